"""Variables of torchrun that no flag stands for; read and refused by the same rules as flags."""

from __future__ import annotations

from elaunch.config import values
from elaunch.config.flag import OTHER, Flag

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
        "interpreter",
        values.text,
        None,
        OTHER,
        "Python of the workers.",
        allowed="a program",
        variables=("PYTHON_EXEC",),
    ),
)
