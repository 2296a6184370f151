"""What a process that runs tests changes about itself, once it has collected them."""

from __future__ import annotations

import logging
import re
import signal
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

import elaunch

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


def leaves_trials_out(chosen: str) -> bool:
    """Whether the option -m is words such as ``not trial and not gpu``."""
    return re.fullmatch(r"(not \w+ and )*not trial( and not \w+)*", chosen) is not None


def fill_files_of_hypothesis() -> None:
    """Have hypothesis write down which characters there are, and elaunch's constants.

    In a fresh clone each process would work that out: six seconds of CPU.
    """
    with suppress(ImportError):
        from hypothesis.internal.charmap import intervals_from_codec
        from hypothesis.internal.constants_ast import constants_from_module

        intervals_from_codec("utf-8")
        for path in Path(elaunch.__file__).parent.rglob("*.py"):
            module = ModuleType(path.stem)
            module.__file__ = str(path)
            constants_from_module(module)


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
