"""Settings of a job: read from everywhere, checked once, passed whole.

``resolve`` goes from the texts of the command line, the variables and the job file to
``Settings`` or to one ``UsageError``, before anything is started:

==================  ==========================================================================
flags               the one table of flags, their values, and which source decides each
jobfile.py          the YAML file, as texts with their lines; with hparams.py
meeting             where the agents of a job meet: ``RendezvousSettings``; this node's address
checkpoint.py       where checkpoints are, which are kept
facts.py            the facts that must be equal on all nodes
entrypoint.py       the command to start
validate.py         checks against the machine; with modules.py, paths.py and gpus.py
moments.py          ``--preempt-at``
notices.py          flags that have no effect
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
