"""A script ends under elaunch as under torchrun: status, output, tracebacks byte by byte.

The cases are in parity/endings.py; forks of the worker play them to the very end.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tests.integration.parity.launches import HERE, Outcome, Start, launch_once
from tests.launching import Launcher, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.executed]

SCRIPT = str(HERE / "endings.py")
WITH_TORCH = "return_,exit_text,chained,exit_handlers,keyboard_interrupt,unraisable_at_exit"
ADDRESS = re.compile(r"0x[0-9a-f]+")
FORKS = ("fork", "fork with torch")
# faulthandler shows the whole stack: the server's frame is at its bottom (docs/start-methods.md).
# Python 3.10 cannot raise an exception again without a frame, so the server's is hidden by a hook.
UNLIKE_IN_3_10 = {"hook_broken", "hook_deleted"} if sys.version_info < (3, 11) else set()
BOTTOM = re.compile(r'  File ".*/elaunch/server/__main__\.py", line \d+ in <module>\n')


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every ending; with torch in the process, some."""
    found = _played(
        tmp_path_factory, "all", [SCRIPT], ("torchrun", "spawn", "fork without preload")
    )
    found["fork"] = found.pop("fork without preload")
    again = _played(tmp_path_factory, "torch", [SCRIPT, WITH_TORCH], ("torchrun", "fork"))
    return found | {f"{method} with torch": cases for method, cases in again.items()}


def _played(
    factory: pytest.TempPathFactory, name: str, words: list[str], methods: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, Outcome] = launch_once(factory, name, lambda _: Start(words), methods)
    return {method: outcome.read("endings") for method, outcome in outcomes.items()}


def shown(case: list[Any], method: str) -> list[Any]:
    """Return status, stdout and stderr without addresses, and the documented frame."""
    status, *said = case
    texts = [ADDRESS.sub("0x…", text) for text in said]
    if method in FORKS:
        texts = [BOTTOM.sub("", text) for text in texts]
    return [status, *texts]


@pytest.mark.trial
@pytest.mark.parametrize(
    ("method", "reference"),
    [
        ("spawn", "torchrun"),
        ("fork", "torchrun"),
        ("fork with torch", "torchrun with torch"),
    ],
)
def test_each_ending_is_torchruns(
    endings: dict[str, dict[str, Any]], method: str, reference: str
) -> None:
    """Exits, exceptions, hooks, signals, threads, exit handlers, destructors."""
    expected = {name: shown(case, reference) for name, case in endings[reference].items()}
    found = {name: shown(case, method) for name, case in endings[method].items()}
    unlike = {name: found[name] for name in expected if found[name] != expected[name]}
    assert {name: case for name, case in unlike.items() if name not in UNLIKE_IN_3_10} == {}
    assert len(found) == len(expected)


@pytest.mark.trial
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_statuses_are_what_python_says(endings: dict[str, dict[str, Any]], method: str) -> None:
    """A few by hand, so that two launchers that are wrong alike do not pass."""
    found = {name: case[0] for name, case in endings[method].items()}
    assert [found[f"exit_{name}"] for name in ("3", "text", "none", "true", "256")] == [
        3,
        1,
        0,
        1,
        0,
    ]
    assert (found["exception"], found["exit_at_once"], found["keyboard_interrupt"]) == (1, 4, -2)
    signals = "SIGTERM SIGKILL SIGSEGV SIGABRT SIGBUS SIGFPE SIGILL".split()
    assert [-found[f"by {name}"] for name in signals] == [15, 9, 11, 6, 7, 8, 4]
    assert endings[method]["thread_is_waited_for"][1] == "after the main thread\n"
    assert endings[method]["exit_handlers"][1].startswith(
        "no newlineend of a local\nlast registered"
    )


@pytest.mark.trial
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_traceback_shows_elaunch(endings: dict[str, dict[str, Any]], method: str) -> None:
    """Only a dump of the whole stack has the bottom frame."""
    texts = {name: case[1] + case[2] for name, case in endings[method].items()}
    assert {n for n, text in texts.items() if "/elaunch/server/" in text} <= {
        "fault_shown"
    } | UNLIKE_IN_3_10


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_text_without_a_newline_is_seen_at_once(elaunch: Launcher, method: str) -> None:
    """A prompt shows while the script waits behind it."""
    script = elaunch.directory / "prompt.py"
    script.write_text(
        "import os, time\nprint('proceed? ', end='')\n"
        "until = time.monotonic() + 100\n"
        "while not os.path.exists('answer') and time.monotonic() < until: time.sleep(0.01)\n"
        "print(os.path.exists('answer'))\n"
    )
    words = ["run", "--start-method", method, "--preload", "none", str(script)]
    running = elaunch.start(words)
    wait_until(lambda: running.output() == "proceed? ", 60.0, "the prompt on stdout")
    (elaunch.directory / "answer").touch()
    assert running.wait().stdout == "proceed? True\n"
