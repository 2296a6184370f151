"""The agent's own log lines: one line each, printed between the workers' lines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from elaunch.text import one_line

log = logging.getLogger("elaunch")


class OneLine(logging.Formatter):
    """Formats a log line, in which what others wrote is printed as elaunch.text says."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback of an error of elaunch's own."""
        plain = logging.makeLogRecord(vars(record))
        plain.msg, plain.args = one_line(record.getMessage()), None
        return super().format(plain)


class PumpHandler(logging.Handler):
    """Prints the agent's log lines through the log pump, so that they cut no worker's line."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self.setFormatter(OneLine("elaunch %(asctime)s.%(msecs)03d %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        self._show(self.format(record))


@contextlib.contextmanager
def logging_to(show: Callable[[str], None], level: str) -> Iterator[None]:
    """Have the agent's log lines printed by ``show`` in the block."""
    handler = PumpHandler(show)
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
