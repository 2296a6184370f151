"""Settings of a job: read from everywhere, checked once, passed whole.

``resolve`` goes from the texts of the command line, the variables and the job file to
``Settings`` or to one ``UsageError``, before anything is started:

==================  ==========================================================================
flags/              the one table of flags; the values in it: values.py, endpoints.py, rdzvconf.py
jobfile.py          the YAML file, as texts with their lines
settings.py         ``Settings`` and ``resolve``
command.py          the command to start
place.py            whether and where the agents of a job meet
rendezvous.py       how they get in, and how long they wait: ``RendezvousSettings``
checkpoint.py       where checkpoints are, which are kept
checks.py           checks against each other and the machine; flags that have no effect
files.py            files as a user names them
facts.py            the facts that must be equal on all nodes
==================  ==========================================================================

The three public names are imported when they are asked for: the command line needs the table of
flags for an error or a help text, and nothing else of all this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.config.settings import Settings, resolve
    from elaunch.config.values import StreamMap

__all__ = ["Settings", "StreamMap", "resolve"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elaunch.config import settings

    return getattr(settings, name)
