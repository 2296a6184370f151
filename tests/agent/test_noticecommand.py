"""--notice-command: real commands of the shell, and what the agent makes of what they print."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent import noticecommand
from elaunch.agent.children import Reaper
from elaunch.agent.noticecommand import NoticeCommand, parse
from tests.launching import wait_until

LONG = 60.0
NOW = 1_800_000_000.0
PLAIN = "this machine will be taken"

LINES = {
    "preempt": (PLAIN, None),
    " preempt +120s": (PLAIN, 120.0),
    "preempt +2m AWS terminates it": ("AWS terminates it", 120.0),
    "preempt\t+2m\tAWS": ("AWS", 120.0),
    "preempt 2027-01-15T08:00:30Z AWS": ("AWS", 30.0),
    "preempt 2027-01-15T08:00:00Z it is over": ("it is over", None),
    "preempt +9999999999d a clock that is wrong": ("a clock that is wrong", None),
    "preempt slurm ends it": ("slurm ends it", None),
    "preempt TRUE \x1b[31m": ("TRUE \\x1b[31m", None),
    "preempted": None,
    "<html>preempt</html>": None,
    "": None,
}


@pytest.mark.parametrize("line", LINES)
def test_lines(line: str) -> None:
    """The word, when, and why; anything else asks nobody to end."""
    assert parse(line, NOW) == LINES[line]


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ("120", r"'120' is no moment; did you mean '\+120'\?"),
        ("2m", "did you mean '\\+2m'"),
        ("+soon", "'soon' in it, which is no duration"),
        ("2027-13-45T00:00:00Z", "is no moment"),
    ],
)
def test_a_time_that_is_mistaken_is_named(
    when: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a notice all the same."""
    assert parse(f"preempt {when} AWS", NOW) == (f"{when} AWS", None)
    assert re.search(problem, caplog.messages[0])


def test_a_text_that_begins_as_no_time_is_not_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("preempt slurm ends it", NOW)
    assert not caplog.messages


class OneByOne(Reaper):
    """Waits for each child by itself: the other children of this process are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: list[int] = []

    def spawn(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        ended: Callable[[int], None],
        files: Sequence[tuple[Any, ...]] = (),
    ) -> int:
        """Start it."""
        pid = os.posix_spawnp(argv[0], list(argv), environ, file_actions=files, setsid=True)
        self.pids.append(pid)

        def wait() -> None:
            ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        threading.Thread(target=wait, daemon=True).start()
        return pid


class Rig:
    """Commands, what they were started by, and the notices that they have given."""

    def __init__(self) -> None:
        self.reaper = OneByOne()
        self.notices: queue.SimpleQueue[tuple[str, float | None]] = queue.SimpleQueue()
        self.commands: list[NoticeCommand] = []

    def start(self, text: str) -> NoticeCommand:
        """Start a command."""
        command = NoticeCommand(
            text, dict(os.environ), self.reaper, lambda *told: self.notices.put(told)
        )
        self.commands.append(command)
        command.start()
        return command


def is_gone(group: int) -> bool:
    """Whether no process of a group is alive."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return False
    return True


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Close the commands; nothing of them is left then."""
    monkeypatch.setattr(noticecommand, "PAUSE_S", 0.01)
    monkeypatch.setattr(noticecommand, "LONGEST_S", 0.02)
    made = Rig()
    yield made
    for command in made.commands:
        command.close()
    for pid in made.reaper.pids:
        wait_until(lambda pid=pid: is_gone(pid), LONG)


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what users were shown."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_notice_is_taken_and_the_command_ended(rig: Rig) -> None:
    """Also what it has started in the background."""
    rig.start("sleep 1000 & echo; echo preempt +60s spot; sleep 1000")
    assert rig.notices.get(timeout=LONG) == ("spot", 60.0)
    wait_until(lambda: is_gone(rig.reaper.pids[0]), LONG)
    assert len(rig.reaper.pids) == 1


def test_one_that_ends_is_asked_again(rig: Rig, tmp_path: Path) -> None:
    """As often as needed; the last line needs no end."""
    tries = tmp_path / "tries"
    rig.start(f"printf x >> {tries}; [ $(cat {tries}) != xxx ] || printf 'preempt +5s third'")
    assert rig.notices.get(timeout=LONG) == ("third", 5.0)
    assert len(rig.reaper.pids) == 3


def test_one_that_leaves_a_process_is_asked_again(rig: Rig, tmp_path: Path) -> None:
    """Though that has its output open, in a session of its own."""
    left, tries = tmp_path / "left", tmp_path / "tries"
    stays = f"[ -e {left} ] || setsid sh -c 'echo $$ > {left}; exec sleep 1000' &"
    stays += f" until [ -s {left} ]; do sleep 0.01; done;"  # or it would be killed with its group
    rig.start(f"{stays} printf x >> {tries}; [ $(cat {tries}) != xxx ] || echo preempt +5s third")
    try:
        assert rig.notices.get(timeout=LONG) == ("third", 5.0)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_failure_is_reported_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """And it is run again."""
    caplog.set_level(logging.DEBUG)
    rig.start("exit 7")
    wait_until(lambda: len(rig.reaper.pids) > 3, LONG)
    assert reports(caplog) == ["--notice-command exited with code 7; it is run again in 0.02 s"]


def test_what_is_no_notice_is_reported_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes of any kind; a notice behind them still counts."""
    caplog.set_level(logging.DEBUG)
    rig.start("head -c 9000 /dev/zero; echo; echo '404 \303'; no-such-program; echo preempt it")
    assert rig.notices.get(timeout=LONG) == ("it", None)
    (report,) = reports(caplog)
    assert report.startswith("--notice-command prints what is no notice: \\x00\\x00")
    assert len(report) < 2000


def test_a_flood_is_ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """After some bytes, however they come."""
    caplog.set_level(logging.DEBUG)
    rig.start("exec cat /dev/zero")
    wait_until(lambda: len(rig.reaper.pids) > 1, LONG)
    wait_until(lambda: is_gone(rig.reaper.pids[0]), LONG)
    (report,) = reports(caplog)
    assert report.endswith("bytes and no notice; it is run again in 0.02 s")


def test_one_that_hangs_is_waited_for(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It may be waiting for the cloud; the end of the job does not wait for it."""
    caplog.set_level(logging.DEBUG)
    command = rig.start("trap '' TERM; sleep 1000")
    wait_until(lambda: rig.reaper.pids, LONG)
    command.close()
    wait_until(lambda: is_gone(rig.reaper.pids[0]), LONG)
    assert rig.notices.empty() and reports(caplog) == []


def test_one_that_is_killed_has_failed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel may do that when memory is short."""
    caplog.set_level(logging.DEBUG)
    rig.start("kill -9 $$")
    wait_until(lambda: reports(caplog), LONG)
    assert reports(caplog)[0].startswith(f"--notice-command was killed by {signal.SIGKILL.name};")
