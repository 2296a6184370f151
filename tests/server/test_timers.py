"""The watchdog for torch's timers: requests from a real pipe, signals to real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaunch.server import processes, timers
from elaunch.server.timers import Timers, worker_above

Process = subprocess.Popen[bytes]


class Rig:
    """A pipe, its timers, and processes that wait for their end."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.timers = Timers()
        assert self.timers.open(str(path)) is None
        self.processes: list[Process] = []

    def process(self) -> Process:
        """Start one that is below this process."""
        self.processes.append(subprocess.Popen(["sleep", "600"]))
        return self.processes[-1]

    def request(
        self, pid: int, scope: str = "s", after: float = 0.0, signum: int = signal.SIGKILL
    ) -> None:
        """Ask for a timer as torch's client does; ``after`` below 0 releases it."""
        expires = -1 if after < 0 else time.time() + after
        fields = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expires}
        self.send(json.dumps(fields | {"signal": int(signum)}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        """Write to the pipe, which must have a reader, and have it read."""
        pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, data)
        os.close(pipe)
        assert select.select(self.timers.files, [], [], 60)[0]
        self.timers.read()

    def expired(self) -> list[tuple[int, str]]:
        """Return whose timers have expired by now."""
        return [(t.process.pid, t.scope) for t in self.timers.expired(os.getpid())]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Make a pipe and read it."""
    made = Rig(tmp_path / "timers")
    yield made
    made.timers.close()
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_process_whose_timer_expires_is_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that expired first is named; the other process lives."""
    one, other = rig.process(), rig.process()
    rig.request(one.pid, "second", 200)
    rig.request(one.pid, "first", 100)
    rig.request(other.pid, "long", 6000)
    assert rig.expired() == []
    assert rig.timers.due - time.monotonic() <= 100
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000)
    monkeypatch.setattr(timers, "time", later)
    assert rig.expired() == [(one.pid, "first")]
    assert one.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    assert rig.expired() == []
    assert rig.timers.due - time.monotonic() > 500


def test_a_released_timer_and_one_that_is_set_again_do_nothing(rig: Rig) -> None:
    """A section that ended in time, and one that began again."""
    process = rig.process()
    rig.request(process.pid, "ended")
    rig.request(process.pid, "ended", after=-1)
    rig.request(process.pid, "again")
    rig.request(process.pid, "again", after=600)
    rig.request(process.pid, "of an old round")
    assert rig.timers.due <= time.monotonic()
    rig.request(process.pid, "of an old round", after=-1)
    assert (rig.expired(), process.poll()) == ([], None)
    rig.timers.clear()
    assert rig.timers.due == float("inf")
    assert select.select(rig.timers.files, [], [], 0)[0] == []  # nothing spins


def test_another_signal_or_none(rig: Rig) -> None:
    """A client may ask for SIGTERM; 0 is none, and then the next one counts."""
    one, other = rig.process(), rig.process()
    rig.request(one.pid, "nothing", signum=0)
    rig.request(other.pid, "nothing", signum=0)
    rig.request(other.pid, "asks", signum=signal.SIGTERM)
    assert rig.expired() == [(other.pid, "asks")]
    assert other.wait(60) == -signal.SIGTERM
    assert (one.poll(), rig.timers.due) == (None, float("inf"))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"pid": os.getppid()},
        lambda r: {"pid": -1},
        lambda r: {"pid": 0},
        lambda r: {"pid": 1 << 40},
        lambda r: {"signal": 4000},
        lambda r: {"expiration_time": "soon"},
        lambda r: {"expiration_time": float("nan")},
        lambda r: {"pid": None},
    ],
)
def test_what_is_no_request_of_a_worker_does_nothing(
    rig: Rig, change: Callable[[Rig], dict[str, object]]
) -> None:
    """Strangers, numbers that are none, text that is no JSON; the next request counts."""
    process = rig.process()
    fields = {"pid": process.pid, "scope_id": "x", "expiration_time": 1.0, "signal": 9}
    rig.send(json.dumps(fields | change(rig)).encode() + b"\n" + b"{\n[]\n\xff\n" + b"[" * 9000)
    rig.send(b"\n")
    assert (rig.expired(), process.poll()) == ([], None)
    rig.request(process.pid)
    assert rig.expired() == [(process.pid, "s")]


def test_a_line_may_come_in_parts(rig: Rig) -> None:
    """The pipe may hold half of one at the end of a read."""
    process = rig.process()
    line = json.dumps({"pid": process.pid, "scope_id": "x", "expiration_time": 1, "signal": 9})
    rig.send(line[:20].encode())
    rig.send(line[20:].encode() + b"\n")
    assert rig.expired() == [(process.pid, "x")]


def test_the_worker_above_a_process() -> None:
    """Itself, its parent, or none of ours."""
    own, parent = os.getpid(), os.getppid()
    assert worker_above(own, [own]) == own
    assert worker_above(own, [parent]) == parent
    with subprocess.Popen(["sleep", "60"]) as child:
        assert worker_above(child.pid, [parent]) == parent
        child.kill()
    assert worker_above(own, [processes.MAX_PID]) is None
