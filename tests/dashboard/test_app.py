"""The dashboard's addresses, with run directories as agents leave them."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.dashboard.app import KEPT_RUNS, STATIC, Dashboard, Feed, encoded
from elaunch.dashboard.guard import App
from elaunch.runs.directory import RunDir, create
from elaunch.runs.record import new_worker
from tests.agent.status.test_views import LOADS, WAITS, job, taken
from tests.dashboard.asking import ask
from tests.views.conftest import Play
from tests.views.played_agent import new_record

HOSTILE = "</script><script>alert(1)</script>\u202e\x1b[31m"


def made(environ: dict[str, str], run_id: str = "train-1", **changes: Any) -> RunDir:
    """Make the directory of a run that has ended."""
    run = create(run_id, environ)
    now = time.time()
    ended = {"state": "COMPLETED", "started_at": now - 20, "ended_at": now - 10, "exit_code": 0}
    run.write_state({**new_record(run, run_id, []), **ended, **changes})
    return run


def failed(run: RunDir, number: int, **changes: Any) -> None:
    """Leave the failure report of a round."""
    report = {
        "schema": 1,
        "round": number,
        "summary": "rank 1 exited with code 7",
        "first": {"rank": 1, "message": "ValueError: bad", "ended": "exited with code 7"},
    }
    run.report(number, "json").write_text(json.dumps({**report, **changes}))
    run.report(number, "txt").write_text("rank 1 (local_rank 1) exited with code 7\n")


@pytest.fixture
def app(environ: dict[str, str]) -> App:
    """Return the application, without its guard."""
    return Dashboard(environ).app()


def test_the_page_and_its_files(app: App) -> None:
    """Each file that a page names is there, with its type; scripts are files only."""
    page = ask(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    for path in STATIC.iterdir():
        assert ask(app, f"/static/{path.name}").body == path.read_bytes()
        text = path.read_text()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
    assert b"<script>" not in page.body and b"style=" not in page.body
    assert ask(app, "/static/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "....//app.py", "/etc/passwd", "app.py", "", "\0", "%00"]
)
def test_no_other_file_can_be_had(app: App, name: str) -> None:
    """Names are looked up among those of the page."""
    answer = ask(app, f"/static/{name}")
    assert answer.status == 404 and b"import" not in answer.body and b"root:" not in answer.body


@pytest.mark.parametrize(
    "key", ["..", ".", "", "../../etc", "/etc", "nothing", "%2e%2e", "\0", "ü"]
)
@pytest.mark.parametrize(
    "path", "/api/run /api/failures /api/metrics /api/curves /api/csv /api/logs".split()
)
def test_no_other_directory_is_a_run(
    app: App, environ: dict[str, str], key: str, path: str
) -> None:
    """A key is looked up among the directories of runs, a path is none."""
    run = made(environ)
    if path in ("/api/run", "/api/failures"):
        assert ask(app, path, run=run.path.name).status == 200
    for name in (key, f"{run.path.name}/../..", str(run.path)):
        assert ask(app, path, run=name).status == 404, name


def test_the_runs(app: App, environ: dict[str, str], tmp_path: Path) -> None:
    """All that are kept; one that cannot be read beside the others; one elsewhere if asked for."""
    assert ask(app, "/api/runs").json == {"runs": [], "first": None, "read_at": None}
    made(environ, "a", state="FAILED")
    made(environ, "b")
    made(environ, "b")
    create("torn", environ).state_file.write_text('{"schema": 1')
    runs = {run["key"]: run for run in ask(app, "/api/runs").json["runs"]}
    assert {key: (run["state"], run["bad"]) for key, run in runs.items()} == {
        "a": ("FAILED", True),
        "b": ("COMPLETED", False),
        "b.2": ("COMPLETED", False),
        "torn": ("UNREADABLE", True),
    }
    assert [runs[key]["name_shown"] for key in ("a", "b", "b.2")] == ["a", "b.1", "b.2"]
    torn = ask(app, "/api/run", run="torn").json
    assert "is not JSON" in torn["attention"][0]["detail"]
    other = made({**environ, "XDG_STATE_HOME": str(tmp_path / "other")}, "far")
    with_other = Dashboard(environ, other).app()
    listed = ask(with_other, "/api/runs").json
    assert (listed["first"], listed["runs"][0]["key"], len(listed["runs"])) == ("far", "far", 5)
    assert ask(with_other, "/api/run", run="far").json["dir"] == str(other.path)


def test_a_run_with_what_it_has_gone_through(app: App, environ: dict[str, str]) -> None:
    """The cause is the first thing; a round's report is read again when it was replaced."""
    run = made(environ, state="FAILED", round=1, exit_code=7, reason="rank 1 exited with code 7")
    failed(run, 0)
    failed(run, 1, culprit="rank 1 has not entered all_reduce #61", explanation="Look there.")
    shown = ask(app, "/api/run", run="train-1").json
    (first,) = shown["attention"]
    assert (first["level"], first["title"]) == ("bad", "rank 1 has not entered all_reduce #61")
    assert "Look there." in first["detail"]
    assert [failure["round"] for failure in shown["failures"]] == [1, 0]
    reports = ask(app, "/api/failures", run="train-1").json
    assert [report["card"]["round"] for report in reports] == [1, 0]
    assert reports[0]["text"].startswith("rank 1 (local_rank 1)")


def test_a_failure_is_said_once(app: App, environ: dict[str, str]) -> None:
    """The exception is in the title where no culprit is known; nothing stands there twice."""
    run = made(environ, state="FAILED", reason="rank 1 exited with code 7; --max-restarts is 0")
    failed(run, 0)
    (first,) = ask(app, "/api/run", run="train-1").json["attention"]
    assert first["title"] == "rank 1 exited with code 7: ValueError: bad"
    assert first["detail"].splitlines()[0] == "--max-restarts is 0"
    assert "ValueError" not in first["detail"]


@pytest.mark.slow
def test_a_live_run_shows_who_stands_still(app: App, play: Play) -> None:
    """Silent for more than half of the limit, a step behind, a save that came to nothing."""
    worker = {"progress": None, "status": "", "section": "", "local_rank": 0}
    far = {**worker, "rank": 0, "step": 50, "doing": "", "silent_s": 1.0}
    near = {**worker, "rank": 1, "step": 40, "doing": "all_reduce #61", "silent_s": 45.0}
    last = {**worker, "rank": 2, "step": 50, "doing": "", "silent_s": 1.0}
    progress = {"source": "script", "limit_s": 60.0, "learning": False}
    saves = {"step": None, "committed_at": None, "seconds": 0.0, "saving": None}
    saves |= {"problem": "full", "commits": 0}
    agent = play(3, progress={**progress, "workers": [far, near, last]}, saves=saves)
    shown = ask(app, "/api/run", run=agent.run.path.name).json
    titles = [(item["level"], item["title"]) for item in shown["attention"]]
    assert titles == [
        ("bad", "No progress of rank 1 for 45 s; it is a hang at 1m 00s"),
        ("warn", "Behind: rank 1 at step 40 of 50"),
        ("warn", "The last save came to nothing"),
    ]
    assert shown["attention"][0]["detail"] == "last call of rank 1: all_reduce #61"
    rows = [dict(zip(shown["worker_fields"], row, strict=True)) for row in shown["workers"]]
    assert [(row["rank"], row["state"], row["step"]) for row in rows] == [
        (0, "RUNNING", 50),
        (1, "RUNNING", 40),
        (2, "RUNNING", 50),
    ]
    assert rows[0]["rss_bytes"] > 0
    assert shown["grid"][0]["slots"] == 3


def test_a_node_behind_those_in_its_record(app: App, environ: dict[str, str]) -> None:
    """Of many nodes a record has the first; its own is shown with its ranks all the same."""
    listed = [{"name": f"a{n}", "host": f"h{n}", "addr": "", "slots": 2} for n in range(64)]
    workers = [new_worker(200 + n, n) for n in range(2)]
    made(environ, nodes=listed, node_count=128, node_rank=100, workers=workers, nproc_per_node=2)
    *others, own = ask(app, "/api/run", run="train-1").json["grid"]
    assert [node["here"] for node in others] == [False] * 64
    assert (own["node"], own["host"]) == (100, os.uname().nodename)
    assert (own["first"], own["slots"], own["here"]) == (200, 2, True)


def test_all_is_well(app: App, play: Play) -> None:
    """Nothing needs attention."""
    agent = play(2)
    assert ask(app, "/api/run", run=agent.run.path.name).json["attention"] == []


def test_text_of_others_stays_text(app: App, environ: dict[str, str]) -> None:
    """In JSON, which no browser takes for a page; a label of Prometheus never ends."""
    run = made(environ, HOSTILE, name=f'{HOSTILE}"\\\n', reason=HOSTILE, state="FAILED")
    failed(run, 0, summary=HOSTILE, at_step=float("nan"))
    key = run.path.name
    for path in ("/api/runs", "/api/run", "/api/failures"):
        answer = ask(app, path, run=key)
        assert answer.headers["content-type"] == "application/json"
        assert "alert(1)" in json.dumps(answer.json)
        assert b"NaN" not in answer.body, "no browser parses it"
    lines = ask(app, "/metrics").body.decode().split("\n")
    assert all(line.startswith(("elaunch_", "# ")) for line in lines if line)
    (state,) = (line for line in lines if line.startswith("elaunch_run_state"))
    assert state.endswith('\\"\\\\\\n",state="FAILED"} 1')


def test_keys_that_are_no_text() -> None:
    """As the standard library writes them; NaN is null, as everywhere."""
    assert encoded({None: math.nan, True: "\udcff"}) == '{"null":null,"true":"\\udcff"}'


def test_the_checkpoints_of_a_run(app: App, environ: dict[str, str], tmp_path: Path) -> None:
    """As `elaunch checkpoints ls` has them; a directory that is not there yet is none."""
    place = tmp_path / "saved"
    made(environ, "none")
    made(environ, "some", checkpoint_dir=str(place))
    assert ask(app, "/api/checkpoints", run="none").json == {"directory": None}
    assert ask(app, "/api/checkpoints", run="some").json.get("checkpoints", []) == []
    (place / "checkpoint-7").mkdir(parents=True)
    (place / "checkpoint-7" / "trainer_state.json").write_text("{")
    found = ask(app, "/api/checkpoints", run="some").json
    assert found["directory"] == str(place) and len(found["checkpoints"]) == 1


def test_prometheus_and_healthz(app: App, play: Play) -> None:
    """How a run stands as samples."""
    agent = play(2)
    page = ask(app, "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    label = f'run="{agent.run.path.name}"'
    lines = page.body.decode().splitlines()
    assert f"elaunch_run_live{{{label}}} 1" in lines
    assert f'elaunch_run_workers{{{label},state="RUNNING"}} 2' in lines
    assert ask(app, "/healthz").body == b"ok\n"


def test_stacks_are_read_once_however_often_they_are_asked_for(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """Of all nodes, the outliers first; the job is asked at most once in STACKS_S."""
    run_dir = tmp_path / "job"
    run_dir.mkdir()
    with job(run_dir, taken({(0,): WAITS}), taken({(1,): WAITS, (2,): LOADS})) as (run, _):
        app = Dashboard(environ, run).app()
        first, second = (ask(app, "/api/stacks", run="job").json for _ in range(2))
    assert [group["ranks"] for group in first["groups"]] == [[2], [0, 1]]
    assert abs(first["taken_at"] - time.time()) < 60 and second == first
    assert ask(Dashboard(environ, run).app(), "/api/stacks", run="job").status == 400
    assert ask(app, "/api/stacks", run="none").status == 404


def test_the_last_event_is_of_the_end() -> None:
    """What is read when the server closes is sent, once, and what was read before is not."""

    async def followed() -> list[bytes]:
        states, closing = ["RUNNING", "COMPLETED"], asyncio.Event()
        feed = Feed(lambda: {"state": states.pop(0) if len(states) > 1 else states[0]}, 60.0)
        events = feed.events(closing)
        found = [await anext(events)]
        closing.set()
        return found + [event async for event in events] + [e async for e in feed.events(closing)]

    running, ended, *again = asyncio.run(followed())
    assert b"RUNNING" in running and b"COMPLETED" in ended and again == [ended]


def test_what_nobody_looks_at_any_more_is_forgotten(environ: dict[str, str]) -> None:
    """A dashboard that is open for days keeps the readings of the runs seen last."""

    def feeds() -> int:
        gc.collect()
        return sum(isinstance(one, Feed) for one in gc.get_objects())

    before, app = feeds(), Dashboard(environ).app()
    for number in range(2 * KEPT_RUNS + 2):
        key = made(environ, f"run-{number}").path.name
        assert ask(app, "/api/stacks", run=key).status == 400
    assert feeds() - before <= KEPT_RUNS + 1


def test_where_the_time_went(app: App, environ: dict[str, str]) -> None:
    """The seconds of each class, and what the end of the run says of them."""
    timing = {
        "slots": 2,
        "wall_s": 100.0,
        "seconds": {"train": 80.0, "start": 20.0},
        "failures": 0,
        "reports": "steps",
        "step_s": 0.1,
        "slowest": None,
        "spare_threads": 0,
        "loaders": None,
    }
    made(environ, timing=timing)
    found = ask(app, "/api/run", run="train-1").json
    assert found["timing"]["seconds"].keys() <= found["time_classes"].keys()
    assert dict(found["verdict"])["advice"].startswith(
        "start takes most: 20 s of each slot, 20.0 %"
    )
