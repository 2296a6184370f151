"""Logs from the end: filters, chunks, what comes later, and text that wants to be more."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from elaunch.dashboard import app as dashboard
from elaunch.dashboard.app import Dashboard
from elaunch.dashboard.guard import App
from elaunch.runs.directory import RunDir
from elaunch.runs.logtree import LogTree
from elaunch.runs.record import new_worker
from elaunch.views import logtail
from elaunch.views.logs import Choice
from tests.dashboard.asking import ask
from tests.dashboard.test_app import made
from tests.views.conftest import Play


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the log directory."""
    return tmp_path / "logs"


@pytest.fixture
def run(environ: dict[str, str], root: Path) -> RunDir:
    """Return a run of two ranks in two rounds."""
    run = made(environ, log_dir=str(root), workers=[new_worker(0, 0), new_worker(1, 1)])
    for number in (0, 1):
        for rank in (0, 1):
            text = f"round {number} rank {rank}\nLoss is NaN\n"
            write(root, number, rank, "stdout", text.encode())
            came = 1000.0 + 10 * number + rank
            with open(root / f"attempt_{number}" / "arrivals", "a") as arrivals:
                arrivals.write(f"{came:.3f} {rank} {rank} stdout 0\n")
    write(root, 1, 1, "stderr", b"\x1b[31mred\x1b[0m\n10%\r20%\r\n<script>alert(1)</script>\n")
    return run


def write(root: Path, number: int, rank: int, stream: str, raw: bytes) -> None:
    """Append to a worker's file."""
    directory = root / f"attempt_{number}" / str(rank)
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{stream}.log", "ab") as file:
        file.write(raw)


@pytest.fixture
def app(environ: dict[str, str], run: RunDir) -> App:
    """Return the application, without its guard."""
    return Dashboard(environ).app()


def texts(app: App, **query: Any) -> list[str]:
    """Return the text of the lines that fit."""
    return [line[-1] for line in ask(app, "/api/logs", run="train-1", **query).json["lines"]]


def test_lines_come_in_the_order_of_their_arrival(app: App) -> None:
    """Over ranks and rounds; a file without arrivals has the time of its last change."""
    assert texts(app, stream="stdout") == [
        *("round 0 rank 0", "Loss is NaN", "round 0 rank 1", "Loss is NaN"),
        *("round 1 rank 0", "Loss is NaN", "round 1 rank 1", "Loss is NaN"),
    ]
    assert texts(app)[-3:] == ["red", "20%", "<script>alert(1)</script>"]


def test_lines_of_one_file_do_not_stick_together(app: App, root: Path) -> None:
    """What another rank wrote in between stands in between; a line came when its end came."""
    write(root, 3, 0, "stdout", b"first\nsecond\nthird\n")
    write(root, 3, 1, "stdout", b"between\nlate\n")
    notes = [
        (2000.0, "0 0", 0),
        (2010.0, "1 1", 0),
        (2020.0, "0 0", 6),
        (2030.0, "0 0", 13),
        (2035.0, "1 1", 8),
    ]
    notes += [(2040.0, "0 0", 15)]
    with open(root / "attempt_3" / "arrivals", "a") as arrivals:
        arrivals.writelines(f"{at:.3f} {rank} stdout {size}\n" for at, rank, size in notes)
    assert texts(app, round="3") == ["first", "between", "second", "late", "third"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"ranks": "1", "text": "ROUND"}, ["round 0 rank 1", "round 1 rank 1"]),
        ({"round": "1", "text": "round"}, ["round 1 rank 0", "round 1 rank 1"]),
        ({"text": "nan", "ranks": "0", "round": "0"}, ["Loss is NaN"]),
        ({"text": "script>", "stream": "stderr"}, ["<script>alert(1)</script>"]),
        ({"text": "nowhere"}, []),
        ({"node": "7"}, []),
    ],
)
def test_filters(app: App, query: dict[str, str], found: list[str]) -> None:
    """By rank, round, stream, node and text in any case."""
    assert texts(app, **query) == found


@pytest.mark.parametrize(
    "query", [{"ranks": "x"}, {"round": "x"}, {"older": "{"}, {"older": "[1]"}, {"ranks": "9-1"}]
)
def test_a_filter_that_is_none_is_refused(app: App, query: dict[str, str]) -> None:
    """With a line that says why."""
    answer = ask(app, "/api/logs", run="train-1", **query)
    assert answer.status == 400 and len(answer.body.splitlines()) == 1


@pytest.mark.parametrize("name", ["../../../etc/passwd", "0/attempt_0/0/../../x", "/etc/passwd"])
def test_older_names_no_other_file(app: App, name: str) -> None:
    """Names are looked up among the files that fit."""
    answer = ask(app, "/api/logs", run="train-1", older=json.dumps({name: 100}))
    assert answer.status == 200 and answer.json["lines"] == []


def test_a_long_file_is_read_in_chunks_from_its_end(
    app: App, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line once, whatever the chunks are; of a page the newest, then older ones."""
    monkeypatch.setattr(logtail, "FIRST_CHUNK", 64)
    monkeypatch.setattr(logtail, "CHUNK", 256)
    monkeypatch.setattr(logtail, "BUDGET_S", 60.0)
    lines = [f"line {number} {'x' * (number % 90)}" for number in range(1300)]
    write(root, 2, 0, "stdout", "\n".join(lines).encode())
    pages, older = [], ""
    while True:
        page = ask(app, "/api/logs", run="train-1", round="2", older=older).json
        pages.append([line[-1] for line in page["lines"]])
        if page["older"] is None:
            break
        older = json.dumps(page["older"])
    assert [len(page) for page in pages] == [500, 500, 300]
    assert [line for page in reversed(pages) for line in page] == lines
    assert texts(app, round="2", text="line 777 ") == [lines[777]]


def test_a_search_ends_in_time_and_goes_on(
    app: App, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is far from the end is found by the next search."""
    monkeypatch.setattr(logtail, "BUDGET_S", 0.0)
    write(root, 2, 0, "stdout", b"needle\n" + 10_000 * b"hay is all that is here\n")
    older, found = "", []
    for _ in range(20):
        page = ask(app, "/api/logs", run="train-1", round="2", text="needle", older=older).json
        found += page["lines"]
        monkeypatch.setattr(logtail, "BUDGET_S", 0.05)
        if page["older"] is None:
            break
        older = json.dumps(page["older"])
    assert [line[-1] for line in found] == ["needle"]


def test_a_line_that_goes_on(app: App, environ: dict[str, str], run: RunDir, root: Path) -> None:
    """Of a progress bar the last state, and of a line without an end no more than is shown."""
    bar = b"".join(b"%d %% of the epoch\r" % percent for percent in range(2000))
    write(root, 2, 0, "stdout", bar)
    assert texts(app, round="2") == ["1999 % of the epoch"]
    logs = logtail.RunLogs(run, environ)
    ends: dict[str, int] = {}
    held: dict[str, bytes] = {}
    for _ in range(3):
        write(root, 2, 0, "stdout", b"x" * logtail.CHUNK)
        assert not logtail.newer(logs, logtail.LogFilter(Choice(round=2)), ends, held)
    assert sum(map(len, held.values())) == logtail.CHUNK
    (root / "attempt_2" / "0" / "stdout.log").write_bytes(b"cut\n")
    assert not logtail.newer(logs, logtail.LogFilter(Choice(round=2)), ends, held)
    write(root, 2, 0, "stdout", b"and on\n")
    ((*_, line),) = logtail.newer(logs, logtail.LogFilter(Choice(round=2)), ends, held)
    assert line.endswith("and on")


def test_searches_share_a_look_at_the_files(
    environ: dict[str, str], play: Play, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a live run for a while, of one that has ended for good; what comes is looked for anew."""
    looks, files = [], LogTree.files
    monkeypatch.setattr(LogTree, "files", lambda tree: looks.append(tree.root) or files(tree))
    monkeypatch.setattr(logtail, "SEEN_S", 600.0)
    agent = play(2, log_dir=str(root))
    write(root, 0, 0, "stdout", b"first\n")
    logs = logtail.RunLogs(agent.run, environ)

    def found(rank: int) -> tuple[list[str], dict[str, int]]:
        wanted = logtail.LogFilter(Choice(frozenset({rank})))
        document, ends = logtail.search(logs, wanted)
        return [line[-1] for line in document["lines"]], ends

    assert found(0)[0] == ["first"]
    write(root, 0, 0, "stdout", b"second\n")
    lines, ends = found(0)
    assert lines == ["first"] and len(looks) == 1
    come = logtail.newer(logs, logtail.LogFilter(Choice()), ends, {})
    assert [line[-1] for line in come] == ["second"] and len(looks) == 2
    assert found(0)[0] == ["first", "second"] and len(looks) == 2
    monkeypatch.setattr(logtail, "SEEN_S", -1.0)
    logtail.newer(logs, logtail.LogFilter(Choice()), ends, {})
    write(root, 0, 0, "stdout", b"last\n")
    assert found(0)[0] == ["first", "second", "last"] and len(looks) == 4
    agent.write(state="COMPLETED", ended_at=2e9, exit_code=0)
    agent.__exit__(None, None, None)
    assert found(0)[0] == found(0)[0] == ["first", "second", "last"] and len(looks) == 5
    agent.run.write_state(agent.run.read_state())
    write(root, 0, 0, "stdout", b"of another run\n")
    assert found(0)[0][-1] == "of another run" and len(looks) == 6


def test_lines_that_come_are_sent(
    environ: dict[str, str], play: Play, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole lines of files that fit, of new files too, until the run has ended."""
    monkeypatch.setattr(dashboard, "PAUSE_S", 0.05)
    agent = play(2, log_dir=str(root))
    write(root, 0, 0, "stdout", b"first\nhal")
    logs = logtail.RunLogs(agent.run, environ)
    wanted = logtail.LogFilter(Choice(), "a")

    async def followed() -> list[Any]:
        found = dashboard.follow(logs, wanted, *logtail.search(logs, wanted), asyncio.Event())
        seen = [await anext(found)]
        write(root, 0, 0, "stdout", b"f a line\nno\n")
        seen.append(await anext(found))
        write(root, 1, 1, "stderr", b"another\na 9\na 10\n")
        seen.append(await anext(found))
        agent.write(state="COMPLETED", ended_at=2e9, exit_code=0)
        agent.__exit__(None, None, None)
        return [*seen, *[event async for event in found]]

    documents = [json.loads(event[6:]) for event in asyncio.run(followed())]
    shown = [[line[1:3] + line[-1:] for line in document["lines"]] for document in documents]
    assert shown == [
        [[0, "stdout", "hal"]],
        [[0, "stdout", "half a line"]],
        [[1, "stderr", "another"], [1, "stderr", "a 9"], [1, "stderr", "a 10"]],
        [],
    ]
    assert documents[-1]["ended"]
