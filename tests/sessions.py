"""What a process that runs tests changes about itself, once it has collected them."""

from __future__ import annotations

import logging
import signal
from typing import Any, Final

import pytest

OF_PYTHON: Final = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
"""Python itself ignores these, and gives what ``subprocess`` starts their defaults."""


def ignored() -> set[int]:
    """Return the signals that this process was started to ignore; 16 has no name in Python 3.10."""
    every = {number for number in signal.valid_signals() if number < 32}
    return {each for each in every - OF_PYTHON if signal.getsignal(each) is signal.SIG_IGN}


def handle_what_is_ignored() -> None:
    """Have ignored signals do nothing by a handler: what is started then has the defaults.

    ``nohup`` ignores SIGHUP, and a shell SIGINT for what it starts in the background. A command
    inherits what is ignored, and no handler.
    """
    for each in ignored():
        signal.signal(each, lambda *_: None)


def let_loggers_propagate() -> None:
    """Let pytest catch what all loggers log at the root.

    It adds its handlers to each logger that does not propagate, and removes them, six times in each
    test: torch has 56 of those, which was half of what an empty test costs.
    """
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def send_less(config: pytest.Config) -> None:
    """Have a process of xdist send two messages for a test that passes, and not six.

    Neither its beginning and end nor that its fixtures came and went are shown, but where the
    options ask for durations, for all names or for XML.
    """
    asked = config.option
    if asked.verbose > 0 or asked.durations or asked.xmlpath:
        return
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "sendevent"):
            plugin.sendevent = _only_what_is_shown(plugin.sendevent)


def _only_what_is_shown(send: Any) -> Any:
    def sendevent(name: str, **content: Any) -> None:
        report = content.get("data", {})
        by_the_way = report.get("outcome") == "passed" and report.get("when") != "call"
        if name not in ("logstart", "logfinish") and not by_the_way:
            send(name, **content)

    return sendevent
