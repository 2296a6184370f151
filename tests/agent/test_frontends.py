"""What asks something of the agent's loop from outside: the time of --preempt-at."""

from __future__ import annotations

import fcntl
import os
import queue
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaunch.agent import frontends
from elaunch.agent.frontends import line_of
from elaunch.agent.logs.console import Console, LineWriter
from elaunch.agent.policy import events
from elaunch.config.values import Moment
from elaunch.runs.pace import StepRate
from tests.cli.views.test_status import Terminal
from tests.integration.jobs import FORK
from tests.launching import clean_environment


@pytest.mark.parametrize(("before_end", "most"), [(300.0, 200.0), (40.0, 0.0), (None, None)])
def test_a_timer_that_is_late(before_end: float | None, most: float | None) -> None:
    """What is left until Slurm ends the job is counted when it fires: here 100 s too late."""
    posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    frontends.preempt_timer(Moment(at=time.time() - 100.0, before_end=before_end), posted.put)
    event = posted.get(timeout=60.0)
    assert isinstance(event, events.PreemptAsked)
    if most is None or event.left is None:
        assert event.left is most
    else:
        assert max(0.0, most - 60.0) <= event.left <= most


@pytest.mark.parametrize(
    ("moment", "ahead"), [(Moment(at=time.time() + 1e6), 2e6), (Moment(after=0.5), -1e6)]
)
def test_a_clock_that_is_set_meanwhile(
    monkeypatch: pytest.MonkeyPatch, moment: Moment, ahead: float
) -> None:
    """A time is the wall clock's, a duration is not."""
    monkeypatch.setattr(frontends, "CLOCK_S", 0.05)
    posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    frontends.preempt_timer(moment, posted.put)
    assert posted.empty()
    clock = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    monkeypatch.setattr(frontends, "time", clock)
    assert isinstance(posted.get(timeout=60.0), events.PreemptAsked)


LIVE = "elaunch: step 12"


def shown(written: str) -> list[str]:
    """Return the lines of a terminal on which this was written; the cursor is in the last."""
    lines, column = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+|\x1b", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


class Screen:
    """A terminal of 40 columns with a console on it."""

    def __init__(self) -> None:
        self._ours, theirs = os.openpty()
        self.resize(40, theirs)
        self.console = Console("stderr", theirs, terminal=True, polled=False)
        self.text = ""

    def resize(self, columns: int, fd: int | None = None) -> None:
        """Set the width."""
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.console.fd if fd is None else fd, termios.TIOCSWINSZ, size)

    def lines(self) -> list[str]:
        """Write what is queued; return what there is to be seen."""
        self.console.flush()
        os.set_blocking(self._ours, False)
        with suppress(BlockingIOError):
            self.text += os.read(self._ours, 1 << 16).decode()
        return shown(self.text)

    def close(self) -> None:
        """Close both ends."""
        self.console.close()
        os.close(self._ours)


@pytest.fixture
def screen() -> Iterator[Screen]:
    """Return a terminal with a console."""
    made = Screen()
    yield made
    made.close()


def test_lines_scroll_above_it(screen: Screen) -> None:
    """Whole lines before it; half a line and a progress bar have its place until they end."""
    console, worker = screen.console, LineWriter(screen.console, 0, eager=True)
    console.show_live(LIVE)
    assert screen.lines() == [LIVE]
    worker.feed(b"one\n", 0.0)
    worker.feed(b"two\n", 0.0)
    assert screen.lines() == ["one", "two", LIVE]
    worker.feed(b"half", 0.0)
    console.show_live("elaunch: step 13")
    assert screen.lines() == ["one", "two", "half"]
    worker.feed(b" of it\n10 %\r20 %\r", 0.0)
    assert screen.lines() == ["one", "two", "half of it", "20 %"]
    worker.feed(b"30 %\n", 0.0)
    assert screen.lines()[-2:] == ["30 %", "elaunch: step 13"]
    console.show_live("")
    assert screen.lines()[-2:] == ["30 %", ""]


def test_it_never_fills_the_width(screen: Screen) -> None:
    """A line as long as the terminal is wide would wrap; a narrower terminal is seen."""
    screen.console.show_live("x" * 100)
    assert screen.lines() == ["x" * 39]
    screen.resize(20)
    screen.console.show_live("y" * 100)
    assert screen.lines() == ["y" * 19]


def test_a_console_that_takes_nothing_gets_one_line(screen: Screen) -> None:
    """However often it is drawn anew, the queue does not grow."""
    console = screen.console
    console.write(b"z" * 100)
    console.write(b"\n")
    console.show_live("first")
    pending = console.pending
    for number in range(100):
        console.show_live(f"{number}")
    assert console.pending == pending


def test_what_it_says() -> None:
    """The state, unless it is RUNNING; steps or for how long there were none; the round."""
    timing = {"wall_s": 10.0, "seconds": {"train": 9.0}, "reports": "steps"}
    record = {"state": "RUNNING", "round": 0, "started_at": 5.0, "timing": timing}
    pace = StepRate()
    assert line_of(record, pace, 17.0) == ("elaunch: no step is reported, for 12 s, goodput 90.0 %")
    workers = [{"step": 12, "progress": 0.5}]
    record |= {"progress": {"workers": workers}, "state": "RESTARTING", "round": 2}
    assert line_of(record, pace, 18.0) == (
        "elaunch: RESTARTING, step 12, 50 % done, goodput 90.0 %, round 2"
    )
    timing["reports"] = "nothing"
    assert line_of(record, pace, 18.0) == "elaunch: RESTARTING, step 12, 50 % done, round 2"


SCRIPT = """
import sys, time
for step in range(1, 31):
    print(f"step {step}", flush=True)
    time.sleep(0.1)
print("half", end="", flush=True)
time.sleep(0.5)
print(" a line")
"""


@pytest.mark.slow
def test_on_a_terminal_and_in_the_files(tmp_path: Path) -> None:
    """It is drawn while the job runs; at the end the workers' lines are there, and it is not."""
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "elaunch", "run", "--progress", "--rdzv-id=live", *FORK]
    flags = ["--progress-regex=step (\\d+)", f"--log-dir={tmp_path / 'logs'}", str(script)]
    environ = clean_environment(tmp_path / "state")
    terminal = Terminal(environ, *flags, columns=100, rows=24, command=command)
    terminal.wait_for(r"elaunch: step \d+, [\d.]+ steps/s")
    assert terminal.ended() == 0
    lines = [line.rstrip() for line in shown(terminal.text.replace("\r\n", "\n"))]
    wanted = [*(f"step {step}" for step in range(1, 31)), "half a line"]
    assert [line for line in lines if line in wanted] == wanted, lines
    assert not any(line.startswith("elaunch: step") for line in lines), lines
    files = [*(tmp_path / "logs").rglob("*.log")]
    assert files and not any(b"\x1b" in file.read_bytes() for file in files)
