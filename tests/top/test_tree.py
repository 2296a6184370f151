"""The tree of ``elaunch top``: worst first, filtered, filled only where it is open."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console

from elaunch.runs.directory import RunDir
from elaunch.runs.job import JobDocument, JudgedNode, NodeSeen, WorkerSeen
from elaunch.runs.record import new_worker
from elaunch.top.pages import JOB, TopReading, detail, rows
from elaunch.views.json import tree
from tests.views.played_agent import new_record


def seen(
    slots: int, hosts: list[str], workers: list[WorkerSeen], here: int = 0, **more: Any
) -> JobDocument:
    """Return a job of nodes with so many slots each."""
    run = RunDir(Path("r"))
    record: Any = new_record(run, "r", []) | more
    grid = (NodeSeen(n, host, n * slots, slots, n == here) for n, host in enumerate(hosts))
    job = JobDocument(run, record, "RUNNING", None, "answers", 1.0)
    return replace(job, workers=tuple(workers), nodes=tuple(grid))


def worker(rank: int, state: str = "RUNNING", step: int | None = 10, **more: Any) -> WorkerSeen:
    """Return a worker."""
    known: Any = {"rank": rank, "step": step, "silent_s": None, "doing": ""} | more
    record: Any = {"rank": rank}
    return WorkerSeen(record, state, progress=known)


def test_the_worst_comes_first() -> None:
    """A failed rank before a slow one before the rest; a node where its worst rank puts it."""
    workers = [worker(8 + k) for k in range(8)]
    workers[5] = worker(13, step=4)
    workers[6] = worker(14, "FAILED")
    job = seen(8, ["a", "b"], workers, here=1)
    found = job.judged
    assert [node.seen.number for node in found] == [1, 0]
    assert [rank for _, rank, _ in found[0].ranks][:3] == [14, 13, 8]
    shown = rows(job, found, {JOB, (1,)})
    assert [(row.name, row.level) for row in shown[:4]] == [
        ("r", 2),
        ("node 1 b", 2),
        ("rank 14", 2),
        ("rank 13", 1),
    ]
    assert [row.open for row in shown if len(row.key) == 1] == [True, False]


def test_silent_and_late_ranks() -> None:
    """More than half of the hang timeout; the last at the collectives, while the run goes on."""
    workers = [worker(0, silent_s=6.0), worker(1), worker(2)]
    late = {"slow": 2, "ranks": [{"rank": 2, "last": 1, "behind_s": 0.1}]}
    limit = {"limit_s": 10.0, "workers": []}
    said = seen(3, ["a"], workers, progress=limit, lateness=late)
    awaited = seen(3, ["a"], workers, awaited={"ranks": [1]}).judged[0].ranks
    assert [(level, rank) for level, rank, _ in awaited] == [(1, 1), (0, 0), (0, 2)]
    assert [(level, rank) for level, rank, _ in said.judged[0].ranks] == [(2, 0), (1, 2), (0, 1)]
    ended = replace(seen(3, ["a"], workers, lateness=late), state="COMPLETED")
    assert ended.judged[0].level == 0


def test_the_rank_to_blame_is_marked() -> None:
    """It may have ended with 0, or was stopped in a hang; in the round that is shown only."""
    workers = [worker(0, "STOPPED"), worker(1, "SUCCEEDED"), worker(2, "FAILED")]
    for number, levels in ((3, [(2, 1), (2, 2), (0, 0)]), (2, [(2, 2), (0, 0), (0, 1)])):
        said = seen(3, ["a"], workers, round=3)
        said = replace(said, failures=({"round": number, "ranks": [1]},))
        assert [(level, rank) for level, rank, _ in said.judged[0].ranks] == levels


def test_a_filter_shows_ranks_with_their_nodes() -> None:
    """By rank, state or host, in any case; a node that is named keeps all its ranks."""
    workers = [worker(k, "FAILED" if k == 1 else "RUNNING") for k in range(4)]
    said = seen(2, ["alpha", "beta"], workers)
    found = said.judged
    assert [row.key for row in rows(said, found, (), "failed")] == [JOB, (0,), (0, 1)]
    assert [row.key for row in rows(said, found, (), "BETA")] == [JOB, (1,)]
    called = replace(said, workers=tuple(worker(k, doing="allgather #3") for k in range(4))).judged
    assert [row.key for row in rows(said, called, (), "3")] == [JOB, (1,), (1, 3)]
    assert [row.key for row in rows(said, found, {(1,)}, "beta")] == [JOB, (1,), (1, 2), (1, 3)]
    (nothing,) = rows(said, found, (), "zzz")
    assert (nothing.key, nothing.note) == (JOB, "no match")


def test_hostile_names_stay_on_their_line() -> None:
    """Escapes and line breaks in a host name are written out."""
    said = seen(1, ["\x1b[31mh\nx"], [])
    assert rows(said, said.judged, {JOB})[1].name == "node 0 \\x1b[31mh\\nx"


def test_the_document_has_all_ranks() -> None:
    """Also of nodes of which only the place is known."""
    here = [replace(worker(k), record=new_worker(k, k)) for k in range(2)]
    found = tree(seen(2, ["a", "b"], here))
    assert [node["host"] for node in found["nodes"]] == ["a", "b"]
    assert [one["rank"] for node in found["nodes"] for one in node["ranks"]] == [0, 1, 2, 3]
    assert found["nodes"][1]["ranks"][0]["state"] is None and found["read_at"] == 1.0


def test_a_node_that_does_not_answer_needs_attention() -> None:
    """If there is nothing worse; no other text says that all is well."""
    lost = JudgedNode(NodeSeen(1, "node-b", 1, 1, problem="it has ended"), 1, ())
    for found, said in (([lost], "node 1 node-b: it has ended"), ([], "nothing needs attention")):
        reading = TopReading(seen(1, ["a"], []), found, (), [], "", ())
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(detail(reading, JOB, 80))
        assert said in console.export_text()
