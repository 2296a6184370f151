"""Variables of torchrun that no flag stands for; read and refused by the same rules as flags."""

from __future__ import annotations

from elaunch.config.flags import values
from elaunch.config.flags.flag import OTHER, Flag
from elaunch.env import TIMER_FILE

# Taken out of the environment of workers: a password that a worker has is in its core dumps, in its
# tracker's list of variables, and in every subprocess. --rdzv-conf may hold one.
ETCD_USER = "ELAUNCH_ETCD_USER"
ETCD_PASSWORD = "ELAUNCH_ETCD_PASSWORD"
SECRET_VARIABLES = (ETCD_USER, ETCD_PASSWORD, "ELAUNCH_RDZV_CONF", "PET_RDZV_CONF")

VARIABLES: tuple[Flag, ...] = (
    Flag(
        "log-level",
        values.log_level,
        "WARNING",
        OTHER,
        "How much the agent says.",
        allowed="DEBUG, INFO, WARNING, ERROR, CRITICAL",
        variables=("LOGLEVEL",),
    ),
    Flag(
        "health-check-port",
        values.whole(0, 65535),
        None,
        OTHER,
        "Port of the health check.",
        allowed="a port, 0 to 65535",
        variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
    ),
    Flag(
        "file-timer",
        values.switch,
        "no",
        OTHER,
        "Kill workers whose timers of torch.distributed.elastic.timer expire.",
        allowed="1 or 0",
        variables=("TORCHELASTIC_ENABLE_FILE_TIMER",),
    ),
    Flag(
        "timer-file",
        values.text,
        None,
        OTHER,
        "Named pipe of these timers.",
        allowed="a path where nothing is, or a named pipe that nobody reads",
        variables=(TIMER_FILE,),
    ),
    Flag(
        "interpreter",
        values.text,
        None,
        OTHER,
        "Python of the workers.",
        allowed="a program",
        variables=("PYTHON_EXEC",),
    ),
)
