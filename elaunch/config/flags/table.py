"""The one table of flags: the command line, the variables and the job file are read by it.

A flag ``--max-restarts`` is also ``--max_restarts``, the variables ``ELAUNCH_MAX_RESTARTS`` and
``PET_MAX_RESTARTS`` (the first wins), and the key ``max_restarts`` or ``max-restarts`` of a job
file. Its kind turns the text from any of them into the value (see ``values.py``), and has the
sentence that errors show. Only torchrun's flags decide whether an abbreviation is ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping

from elaunch.config import values
from elaunch.config.flags import around, job
from elaunch.config.flags.flag import Flag, Kind, VariableFlag
from elaunch.env import TIMER_FILE

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Size of the job": job.SIZE,
    "What is started": job.CODE,
    "Restarts": job.RESTART,
    "Checkpoints": job.CHECKPOINT,
    "Signals and stopping": around.STOP,
    "Output and logs": around.OUTPUT,
    "Rendezvous": around.MEETING,
    "Other": around.OTHER,
}
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)

VARIABLES = (
    VariableFlag(
        "log-level",
        Kind(values.log_level, "", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        "WARNING",
        "How much the agent says.",
        variables=("LOGLEVEL",),
    ),
    VariableFlag(
        "health-check-port",
        Kind(values.whole(0, 65535), "", "a port, 0 to 65535"),
        None,
        "Port of the health check.",
        variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
    ),
    VariableFlag(
        *("file-timer", Kind(values.switch, "", "1 or 0"), "no"),
        "Kill workers whose timers of torch.distributed.elastic.timer expire.",
        variables=("TORCHELASTIC_ENABLE_FILE_TIMER",),
    ),
    VariableFlag(
        "timer-file",
        Kind(values.text, "", "a path where nothing is, or a named pipe that nobody reads"),
        None,
        "Named pipe of these timers.",
        variables=(TIMER_FILE,),
    ),
    VariableFlag(
        *("interpreter", Kind(values.text, "", "a program"), None, "Python of the workers."),
        variables=("PYTHON_EXEC",),
    ),
)

TABLE: Mapping[str, Flag] = {flag.name: flag for flag in (*FLAGS, *VARIABLES)}
USUAL = (
    *("nnodes", "nproc-per-node", "module", "max-restarts", "hang-timeout", "checkpoint-dir"),
    *("log-dir", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "file", "detach", "dry-run"),
)
"""The flags that most jobs need no more than: ``elaunch run --help`` shows these."""

ETCD_USER = "ELAUNCH_ETCD_USER"
ETCD_PASSWORD = "ELAUNCH_ETCD_PASSWORD"
SECRET_VARIABLES = (ETCD_USER, ETCD_PASSWORD, "ELAUNCH_RDZV_CONF", "PET_RDZV_CONF")
"""Taken out of the environment of workers: a password that a worker has is in its core dumps, in
its tracker's list of variables, and in every subprocess. ``--rdzv-conf`` may hold one."""
