"""torchrun's names for programs: ``elastic_launch``, ``LaunchConfig``, ``main``, the errors.

A program that imports them from torch goes on with one changed import::

    from elaunch.torchrun import LaunchConfig, elastic_launch  # torch.distributed.launcher.api
    import elaunch.torchrun as torchrun                        # torch.distributed.run

The exceptions, ``Std`` and ``DefaultLogsSpecs`` are torch's own classes, so that ``except`` clauses
go on to fit. Each name is loaded when it is first asked for: ``python -m elaunch.torchrun``, which
takes torchrun's command line, imports no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaunch.torchrun.api import LaunchConfig as LaunchConfig
    from elaunch.torchrun.api import elastic_launch as elastic_launch
    from elaunch.torchrun.api import launch_agent as launch_agent
    from elaunch.torchrun.api import main as main
    from elaunch.torchrun.api import run as run

_OWN = "elaunch.torchrun.api"
_ERRORS = "torch.distributed.elastic.multiprocessing.errors"
_PROCESSES = "torch.distributed.elastic.multiprocessing"
_RUN = "torch.distributed.run"
_WHERE = {
    **dict.fromkeys(("LaunchConfig", "elastic_launch", "launch_agent", "main", "run"), _OWN),
    **dict.fromkeys(("ChildFailedError", "ProcessFailure", "record"), _ERRORS),
    **dict.fromkeys(("DefaultLogsSpecs", "LogsSpecs", "SignalException", "Std"), _PROCESSES),
    **dict.fromkeys(("config_from_args", "get_args_parser", "parse_args"), _RUN),
    **dict.fromkeys(("determine_local_world_size", "parse_min_max_nnodes"), _RUN),
    **dict.fromkeys(("get_rdzv_endpoint", "get_use_env", "run_script_path"), _RUN),
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    """Import what is asked for (PEP 562)."""
    if name not in _WHERE:
        raise AttributeError(f"module 'elaunch.torchrun' has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
