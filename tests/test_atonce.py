"""Calls in threads that do not hold up the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elaunch import atonce
from elaunch.atonce import ENOUGH, Pace, at_once, start, within
from elaunch.checkpoint.manifests import FileEntry
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


def led(own: Pace, steps: Iterator[int]) -> None:
    """Do the steps as the work of a part is done; raise what they raise."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            own.run(steps)
        except OSError as error:
            errors.append(error)

    own.supervise(work)
    if errors:
        raise errors[0]


def steps(count: int, size: int, seconds: float, seen: list[int]) -> Iterator[int]:
    """Yield steps that take a while each; note each one's priority."""
    for _ in range(count):
        threading.Event().wait(seconds)
        seen.append(niceness())
        yield size


def test_fast_steps_stand_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atonce, "LOOK_S", 0.02)
    seen: list[int] = []
    own = Pace()
    led(own, steps(20, 100 * ENOUGH, 0.005, seen))
    assert len(seen) == 20 and min(seen) > niceness() and not own.hurries


def test_slow_steps_get_the_priority_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left, and all of what is done after them; nothing is done twice."""
    monkeypatch.setattr(atonce, "LOOK_S", 0.02)
    seen: list[int] = []
    own, usual = Pace(), niceness()
    led(own, steps(20, 1, 0.005, seen))
    assert own.hurries and len(seen) == 20
    behind = [nice for nice in seen if nice > usual]
    assert 0 < len(behind) < 20 and seen == [*behind, *[usual] * (20 - len(behind))]
    seen.clear()
    led(own, steps(3, 1, 0.0, seen))
    assert seen == [usual] * 3
    assert niceness() == usual


@pytest.mark.parametrize("at", [1, 15])
def test_what_a_step_raises(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """At low priority and at normal."""
    monkeypatch.setattr(atonce, "LOOK_S", 0.02)

    def broken() -> Iterator[int]:
        for number, size in enumerate(steps(20, 1, 0.005, [])):
            if number == at:
                raise OSError("the disk is full")
            yield size

    with pytest.raises(OSError, match="the disk is full"):
        led(Pace(), broken())


def test_a_file_is_the_same_at_every_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into steps of any size, its bytes and its checksum are those of one call."""
    pieces = [os.urandom(size) for size in (0, 1, 5 << 20, 3, 1 << 20)] + [b"ab"] * 2000
    plain = durable.write_file(tmp_path, "plain", pieces)
    monkeypatch.setattr(atonce, "LOOK_S", 0.0)
    monkeypatch.setattr(atonce, "ENOUGH", 1 << 60)
    for number, step in enumerate((1 << 23, 1 << 16)):
        monkeypatch.setattr(durable, "STEP", step)
        own = Pace()
        write = partial(durable.write_file, tmp_path, f"paced{number}", pieces, own)
        entries: list[FileEntry] = []
        own.supervise(lambda write=write, entries=entries: entries.append(write()))  # type: ignore[misc]
        (made,) = entries
        assert (made.size, made.checksum) == (plain.size, plain.checksum)
        assert (tmp_path / f"paced{number}").read_bytes() == b"".join(pieces)
        assert own.hurries


def test_slow_steps_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are done all the same, each once."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(atonce, "LOOK_S", 0.02)
    monkeypatch.setattr(threading.Thread, "start", refused)
    seen: list[int] = []
    led(Pace(), steps(20, 1, 0.005, seen))
    assert seen == [niceness()] * 20


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
