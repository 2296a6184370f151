"""Settings of a job: read from everywhere, checked once, passed whole.

``resolve`` goes from the words of the command line, the variables and the job file to
``Settings`` or to one ``UsageError``, before anything is started:

==================  ==========================================================================
flags.py            the one table of flags, with meetingflags.py; flag.py: ``Flag``; variables.py
values.py           text → value, one function per kind of value
given.py            a text with its source; the one form of an error
jobfile.py          the YAML file, as texts with their lines
answers.py          which source decides each flag
checkpointplace.py  where checkpoints are, which are kept; with checkpointflags.py, amounts.py
topology.py         what the rendezvous flags come to on one node; which hosts are this machine
meetingplace.py     whether several nodes meet, where, and who hosts; with endpoints.py
rendezvous.py       ``RendezvousSettings``; with rdzvconf.py, etcdaccess.py, secretfiles.py
address.py          the address that this node gives to the others
facts.py            what must be the same on all nodes
entrypoint.py       what is started
validate.py         what the machine has to say; with modules.py and ports.py
notices.py          what was given and has no effect
settings.py         ``Settings`` and ``resolve``
==================  ==========================================================================

The three public names are imported when they are asked for: the command line needs the table of
flags for an error or a help text, and nothing else of all this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.config.flags.values import StreamMap
    from elaunch.config.settings import Settings, resolve

__all__ = ["Settings", "StreamMap", "resolve"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elaunch.config import settings

    return getattr(settings, name)
