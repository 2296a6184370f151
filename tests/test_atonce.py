"""Calls in threads that do not hold up the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from elaunch.atonce import NICER, Writing, at_once, start, within
from elaunch.checkpoint.storage import durable

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
        "import threading; from elaunch.atonce import at_once\n"
        "begun, never = threading.Semaphore(0), threading.Event()\n"
        "def call(): begun.release(); never.wait()\n"
        "threading.Thread(target=at_once, args=([call] * 2, 2, 'x'), daemon=True).start()\n"
        "begun.acquire(); begun.acquire()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def niceness() -> int:
    """Return that of the thread that asks."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_behind_the_training() -> None:
    """And those that it starts."""
    seen: list[int] = []

    def work() -> None:
        seen.append(niceness())
        at_once([lambda: seen.append(niceness())] * 2, 2, "test")
        done.set()

    done = threading.Event()
    start("test", work, behind=True)
    assert done.wait(60)
    assert seen == [niceness() + NICER] * 3


def test_a_write_notes_each_of_its_steps() -> None:
    own = Writing()
    began, own.moved = own.moved, 0.0
    own.follow(iter([1, 2]))
    assert own.moved >= began


def test_a_file_is_the_same_in_steps_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes and its checksum are those of one call."""
    pieces = [os.urandom(size) for size in (0, 1, 5 << 20, 3, 1 << 20)] + [b"ab"] * 2000
    plain = durable.write_file(tmp_path, "plain", pieces)
    for number, step in enumerate((1 << 23, 1 << 16)):
        monkeypatch.setattr(durable, "STEP", step)
        made = durable.write_file(tmp_path, f"cut{number}", pieces, Writing())
        assert (made.size, made.checksum) == (plain.size, plain.checksum)
        assert (tmp_path / f"cut{number}").read_bytes() == b"".join(pieces)


def test_where_no_thread_can_be_started_the_work_is_done_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers may have used up the processes that a user may have."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    done: list[int] = []
    start("test", done.append, 1, behind=True)
    assert within(1.0, lambda: done.append(2), "test")
    assert done == [1, 2]
    assert at_once([partial(int, n) for n in range(6)], 3, "test") == list(range(6))
