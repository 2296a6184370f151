"""Calls in threads that do not hold up the end of the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from elaunch.checkpoint.storage.atonce import at_once, within

ROOT = Path(__file__).parents[3]


def test_results_are_in_order_and_some_run_together() -> None:
    together = threading.Barrier(3)

    def call(number: int) -> int:
        together.wait(60)
        return number

    assert at_once([partial(call, n) for n in range(6)], 3, "test") == list(range(6))
    assert at_once([lambda: 1], 3, "test") == [1]
    assert at_once([], 3, "test") == []


def test_the_first_error_ends_it() -> None:
    """What runs is waited for, what has not begun never does."""
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        raise OSError(5, "Input/output error", str(number))

    with pytest.raises(OSError, match="Input/output"):
        at_once([partial(call, n) for n in range(50)], 2, "test")
    assert len(begun) <= 2


def test_within() -> None:
    assert within(60, lambda: None, "test")
    assert not within(0.01, threading.Event().wait, "test")
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0, "test")


def test_a_call_that_hangs_does_not_hold_up_the_exit() -> None:
    code = (
        "import threading; from elaunch.checkpoint.storage.atonce import at_once\n"
        "begun, never = threading.Semaphore(0), threading.Event()\n"
        "def call(): begun.release(); never.wait()\n"
        "threading.Thread(target=at_once, args=([call] * 2, 2, 'x'), daemon=True).start()\n"
        "begun.acquire(); begun.acquire()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
