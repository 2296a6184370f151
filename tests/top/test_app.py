"""The screen of ``elaunch top``, driven by its keys, on run directories as agents leave them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import RichLog

from elaunch.runs.directory import RunDir
from elaunch.runs.record import new_worker
from elaunch.top import app, widgets
from elaunch.top.app import TopApp
from elaunch.top.pages import TopReader
from elaunch.top.widgets import RowList
from tests.dashboard.test_app import failed, made
from tests.launching import Launcher
from tests.top.screens import closed, drawn, press, run_json, seen, settle
from tests.views.conftest import Play

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]markup[/] 漢字\u202e\tend"
SMALL, WIDE = (80, 24), (200, 50)
LEADER = """
import fcntl, sys, termios
from elaunch.__main__ import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a terminal's shell: its end is a SIGHUP
sys.exit(main())
"""
Drive = Callable[[Pilot[None]], Awaitable[None]]


def drive(run: RunDir, environ: dict[str, str], size: tuple[int, int], act: Drive) -> None:
    """Open the screen, and act on it."""

    async def driven() -> None:
        async with TopApp(TopReader(run, environ)).run_test(size=size) as pilot:
            await seen(pilot, "read at")
            await act(pilot)

    asyncio.run(driven())


@pytest.fixture
def run(environ: dict[str, str], tmp_path: Path) -> RunDir:
    """Return a run of two ranks that has failed, with hostile names and lines."""
    workers = [new_worker(0, 0) | {"state": "STOPPED"}, new_worker(1, 1) | {"state": "FAILED"}]
    run = made(
        environ,
        state="FAILED",
        exit_code=7,
        reason=f"rank 1 exited with code 7 {HOSTILE}",
        workers=workers,
        world_size=2,
        log_dir=str(tmp_path / "logs"),
        nodes=[{"name": "n", "host": f"host{HOSTILE}", "addr": "10.0.0.1", "slots": 2}],
        node_rank=0,
    )
    for rank in (0, 1):
        directory = tmp_path / "logs" / "attempt_0" / str(rank)
        directory.mkdir(parents=True)
        lines = "".join(f"line {n} of {rank}\n" for n in range(50))
        (directory / "stdout.log").write_text(f"{lines}loss of {rank} {HOSTILE}\n")
    failed(run, 0, summary=f"rank 1 exited with code 7 {HOSTILE}")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, WIDE])
def test_a_failed_run_at_a_glance(
    run: RunDir, environ: dict[str, str], size: tuple[int, int]
) -> None:
    """The failed rank first, what needs attention, its newest lines; nothing hostile is obeyed."""

    async def act(pilot: Pilot[None]) -> None:
        await seen(pilot, "FAILED", "loss of")
        text = drawn(pilot)
        assert "✗ rank 1" in text and text.index("rank 1 ") < text.index("rank 0 ")
        assert "FAILED" in text and "loss of" in text
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
        assert "[bold red]" in text
        await press(pilot, "down", "down")
        await seen(pilot, "loss of 1", "line 49 of 1")
        assert "line 49 of 0" not in drawn(pilot)

    drive(run, environ, size, act)


@pytest.mark.slow
@pytest.mark.parametrize("with_page", [False, pytest.param(True, marks=pytest.mark.trial)])
def test_a_reading_while_the_screen_is_closed(
    run: RunDir, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, with_page: bool
) -> None:
    """A reading that comes when the widgets are already gone ends nothing."""
    readings = []

    async def at_once(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        readings.append(work)
        return work()

    for module in (app, widgets):
        monkeypatch.setattr(module, "in_thread", at_once)
        monkeypatch.setattr(module, "LEAST_S", 0.0, raising=False)
        monkeypatch.setattr(module, "EVERY_S", 0.0, raising=False)
        monkeypatch.setattr(module, "SHARE", 0)

    async def act(pilot: Pilot[None]) -> None:
        if with_page:
            await press(pilot, "l")
            await seen(pilot, "log of")
            await press(pilot, "escape", "l")
        before, until = len(readings), time.monotonic() + 30
        while len(readings) < before + 10 and time.monotonic() < until:
            await settle(pilot, 0)

    drive(run, environ, SMALL, act)


@pytest.mark.slow
def test_keys_as_in_k9s(run: RunDir, environ: dict[str, str]) -> None:
    """Enter on a rank is its log; / filters there and in the tree; Esc goes back."""

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"rank 0", "enter")
        tree = pilot.app.query_one(RowList)
        assert [row.key for row in tree._rows] == [(), (0,), (0, 0)]
        await press(pilot, "question_mark")
        await seen(pilot, "elaunch top RUN --json")
        await press(pilot, "escape")
        await closed(pilot)
        assert [row.key for row in tree._rows] == [(), (0,), (0, 0)]  # it stays meanwhile
        await press(pilot, "escape", "end", "enter")
        await seen(pilot, "log of rank 0", "loss of 0", "line 40 of 0")
        await press(pilot, "slash", *"line 7 ", "enter")
        await seen(pilot, "lines with 'line 7 '")
        await seen(pilot, "line 7 of 0")
        assert "line 40 of 0" not in drawn(pilot)
        await press(pilot, "escape", "w")
        await seen(pilot, "why train-1", "rank 1 (local_rank 1) exited with code 7")
        await press(pilot, "m")
        await seen(pilot, "metrics of train-1", "has reported nothing")
        await press(pilot, "s")
        await seen(pilot, "stacks of train-1", "does not run")
        await press(pilot, "question_mark")
        await seen(pilot, "elaunch top RUN --json")
        await press(pilot, "escape")
        await closed(pilot)
        await press(pilot, "home", "left")
        assert [row.key for row in tree._rows] == [()]
        await press(pilot, "right")
        assert len(tree._rows) == 4

    drive(run, environ, SMALL, act)


@pytest.mark.slow
def test_lines_that_are_read_before_the_screen_is_laid_out(
    run: RunDir, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are shown when it is."""

    async def at_once(work: Callable[[], Any]) -> Any:
        return work()

    monkeypatch.setattr(widgets, "in_thread", at_once)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "w")
        await seen(pilot, "why train-1", "rank 1 (local_rank 1) exited with code 7")
        await press(pilot, "question_mark")
        await seen(pilot, "elaunch top RUN --json")

    drive(run, environ, SMALL, act)


@pytest.mark.slow
def test_a_long_line_has_the_whole_width(
    run: RunDir, environ: dict[str, str], tmp_path: Path
) -> None:
    """Of a wide terminal; it wraps where that ends."""
    with open(tmp_path / "logs" / "attempt_0" / "0" / "stdout.log", "a") as log:
        log.write("w" * 150 + "\n")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        await seen(pilot, "w" * 150)

    drive(run, environ, WIDE, act)


@pytest.mark.slow
def test_an_agent_that_is_killed_meanwhile(play: Play, environ: dict[str, str]) -> None:
    """The view goes on, with what was written last and why the run is LOST."""
    agent = play(2)

    async def act(pilot: Pilot[None]) -> None:
        await seen(pilot, "RUNNING")
        agent.kill()
        await press(pilot, "r")
        await seen(pilot, "LOST", "GONE")

    drive(agent.run, environ, SMALL, act)


@pytest.mark.slow
def test_two_thousand_ranks(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only open nodes have rows, only seen rows are drawn; a filter finds one of them."""
    workers = [new_worker(rank, rank) | {"state": "SUCCEEDED"} for rank in range(2000)]
    run = made(environ, workers=workers, nproc_per_node=2000, world_size=2000)
    drawn_lines: list[int] = []
    draws = RowList.render_line

    def noted(rows: RowList, y: int) -> Strip:
        drawn_lines.append(y)
        return draws(rows, y)

    monkeypatch.setattr(RowList, "render_line", noted)

    async def act(pilot: Pilot[None]) -> None:
        tree = pilot.app.query_one(RowList)
        assert len(tree._rows) == 2 and "2000 ranks" in drawn(pilot)
        await press(pilot, "down", "enter", "end")
        assert tree.key == (0, 1999)
        await seen(pilot, "rank 1999")
        assert 0 < len(set(drawn_lines)) <= WIDE[1]
        await press(pilot, "slash", *"rank 1234", "enter")
        assert [row.name for row in tree._rows][-1] == "rank 1234"

    drive(run, environ, WIDE, act)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, WIDE])
def test_no_digit_is_hidden_by_the_scroll_bar(
    environ: dict[str, str], size: tuple[int, int]
) -> None:
    """Of more rows than lines each is as wide as what is left of the tree beside the bar."""
    workers = [new_worker(rank, rank) | {"state": "SUCCEEDED"} for rank in range(64)]
    shown = {"progress": None, "status": "", "section": "", "doing": "", "silent_s": None}
    steps = [{**shown, "rank": rank, "local_rank": rank, "step": 12345} for rank in range(64)]
    progress = {"source": "script", "limit_s": None, "learning": False, "workers": steps}
    run = made(environ, workers=workers, nproc_per_node=64, world_size=64, progress=progress)

    async def act(pilot: Pilot[None]) -> None:
        tree = pilot.app.query_one(RowList)
        await press(pilot, "end")
        await seen(pilot, "rank 63")
        assert tree.show_vertical_scrollbar
        pilot.app.screen.refresh(layout=True)
        await settle(pilot)
        lines = drawn(pilot).splitlines()
        ranks = [line for line in lines if re.match(r" *rank \d+ ", line)]
        assert len(ranks) > 9
        assert all(re.search(r"SUCCEEDED|step 12345\b", line) for line in ranks), drawn(pilot)
        if size == WIDE:
            assert all("step 12345" in line for line in ranks), drawn(pilot)

    drive(run, environ, size, act)


@pytest.mark.slow
def test_a_run_that_cannot_be_read(run: RunDir, environ: dict[str, str]) -> None:
    """Its reason stands there, and q ends it."""
    run.state_file.write_text("{")

    async def act(pilot: Pilot[None]) -> None:
        await seen(pilot, "UNREADABLE", "state.json")
        await press(pilot, "w", "escape", "q")

    drive(run, environ, SMALL, act)


SCRIPT = """
import os, sys, time, elaunch
with elaunch.init() as ctx:
    step = 0
    while not os.path.exists(sys.argv[1]):
        step += 1
        ctx.train.report_progress(min(1.0, step / 10_000))
        ctx.train.report_training_metrics(step, {"loss": 1.0 / step})
        print("step", step, "of rank", os.environ["RANK"], flush=True)
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_job_that_runs(elaunch: Launcher, tmp_path: Path) -> None:
    """Steps with their rate, a log that is followed, stacks, metrics; then its end is seen."""
    script, stop = tmp_path / "s.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    running = elaunch.start(["run", "--rdzv-id=top", "--nproc-per-node=2", script, str(stop)])
    running.wait_for_line("step 5 ")
    place = run_json(elaunch, "top")

    async def act(pilot: Pilot[None]) -> None:
        await seen(pilot, "steps/s", "ETA", "rank 1")
        await press(pilot, "end", "l")
        await seen(pilot, "log of rank 1", "of rank 1")
        lines = len(pilot.app.screen.query_one(RichLog).lines)
        while len(pilot.app.screen.query_one(RichLog).lines) == lines:
            await settle(pilot, 0.1)
        await press(pilot, "s")
        await seen(pilot, "s.py")
        await press(pilot, "m")
        await seen(pilot, "training loss")
        stop.touch()
        await asyncio.to_thread(running.wait, 60)
        await press(pilot, "escape", "r")
        await seen(pilot, "COMPLETED")

    drive(RunDir(Path(place["dir"])), elaunch.env, SMALL, act)
    assert place["nodes"][0]["ranks"][0]["level"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("\x03", 0),  # Ctrl-C
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.trial),
        pytest.param(signal.SIGQUIT, 131, marks=pytest.mark.trial),
        (None, 129),  # the terminal is closed
    ],
)
def test_the_end_gives_the_terminal_back(
    run: RunDir, environ: dict[str, str], end: str | signal.Signals | None, code: int
) -> None:
    """Also from the log: no raw mode is left, and no second screen; a closed one is left alone."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(
        [sys.executable, "-c", LEADER, "top", str(run.path)],
        env={**os.environ, **environ, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as top:
        seen = _read_until(ours, b"rank 1")
        os.write(ours, b"l")
        seen += _read_until(ours, b"log of")
        if isinstance(end, str):
            os.write(ours, end.encode())
        elif end is not None:
            top.send_signal(end)
        else:
            os.close(theirs)
            os.close(ours)
        if end is not None:
            assert b"\x1b[?1049h" in seen
            _read_until(ours, b"\x1b[?1049l")
        assert top.wait(60) == code
    if end is not None:
        assert termios.tcgetattr(theirs) == before
        os.close(theirs)
        os.close(ours)


def _read_until(descriptor: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        assert select.select([descriptor], [], [], 60)[0], seen
        seen += os.read(descriptor, 1 << 16)
    return seen


@pytest.mark.slow
def test_numbers_that_are_no_level(environ: dict[str, str]) -> None:
    """A script's own record has no number of slots: its ranks are those of its workers."""
    workers: list[Any] = [new_worker(3, 0) | {"state": "SUCCEEDED"}]
    run = made(environ, workers=workers, nproc_per_node=None)

    async def act(pilot: Pilot[None]) -> None:
        assert "rank 3" in drawn(pilot)

    drive(run, environ, SMALL, act)
