"""Job, nodes and ranks as rows, the worst first.

=====  ==================================================================
level  of a rank; a node has that of its worst rank
=====  ==================================================================
2      it has failed, is gone, or is silent for long
1      it is behind the others, or comes last to the collectives
0      nothing is known against it
=====  ==================================================================

Rows are made for what is open only: of a closed node its ranks are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from elaunch.runs.job import BAD, Job, NodeSeen, Worker
from elaunch.text import count, one_line
from elaunch.views.json import WORKER_FIELDS, row, screen

Key = tuple[int, ...]
"""``()`` the job, ``(node,)`` a node, ``(node, rank)`` a rank."""
JOB: Key = ()


class TreeRow(Struct, frozen=True):
    """One row; ``open`` is None where nothing is below it."""

    key: Key
    name: str
    state: str
    note: str
    level: int
    open: bool | None = None


class TreeNode(Struct, frozen=True):
    """A node with its ranks, the worst first: level, rank, and what is known of its worker."""

    seen: NodeSeen
    level: int
    ranks: tuple[tuple[int, int, Worker | None], ...]


def nodes(job: Job) -> list[TreeNode]:
    """Return the nodes of a job with their ranks, the worst first."""
    if job.record is None:
        return []
    known = {worker.rank: worker for worker in job.everyone}
    levels = dict(_levels(job))
    found = []
    for node in job.nodes:
        # The record of a script, or of a job that has not begun, has no number of slots.
        span = range(node.first, node.first + node.slots) if node.slots else known
        ranks = [(levels.get(rank, 0), rank, known.get(rank)) for rank in span]
        ranks.sort(key=lambda one: (-one[0], one[1]))
        worst = max((one[0] for one in ranks), default=0)
        found.append(TreeNode(node, max(worst, int(bool(node.note))), tuple(ranks)))
    return sorted(found, key=lambda one: (-one.level, one.seen.number))


def _levels(job: Job) -> Iterator[tuple[int, int]]:
    """Yield ranks with their levels, of one rank the worst last."""
    yield from ((worker.rank, 1) for worker in job.behind)
    yield from ((rank, 1) for rank in (job.awaited or {"ranks": []})["ranks"])
    slow = (job.known.get("lateness") or {"slow": None})["slow"]
    if slow is not None and job.live:
        yield slow, 1
    bad = (worker for worker in job.everyone if worker.state in ("FAILED", "GONE"))
    yield from ((worker.rank, 2) for worker in (*job.silent, *bad))
    failed = (one for one in job.failures if one["round"] == job.known["round"])
    yield from ((rank, 2) for one in failed for rank in one["ranks"])


def rows(
    job: Job, found: Sequence[TreeNode], opened: Collection[Key], needle: str = ""
) -> list[TreeRow]:
    """Return what the tree shows; with a ``needle`` the ranks in which it is, and their nodes."""
    wanted = needle.lower()
    level = 2 if job.state in BAD else max((node.level for node in found), default=0)
    first = TreeRow(JOB, one_line(job.run_id), job.state, "", level, JOB in opened)
    lines = [first]
    for node in found if JOB in opened or wanted else ():
        number, name = node.seen.number, f"node {node.seen.number} {one_line(node.seen.host)}"
        named = wanted in name.lower()
        ranks = [one for one in node.ranks if named or wanted in _searched(*one[1:])]
        if wanted and not (named or ranks):
            continue
        is_open = (number,) in opened or (bool(wanted) and not named)
        states = Counter(worker.state for _, _, worker in node.ranks if worker)
        ended = max(states, key=lambda one: (one in ("FAILED", "GONE"), states[one]), default="")
        note = count(len(node.ranks), "rank")
        lines.append(TreeRow((number,), name, ended, note, node.level, is_open))
        for worst, rank, worker in ranks if is_open else ():
            step = f"step {worker.step}" if worker and worker.step is not None else ""
            state = worker.state if worker else ""
            lines.append(TreeRow((number, rank), f"rank {rank}", state, step, worst))
    return [replace(first, note="no match")] if wanted and lines == [first] else lines


def _searched(rank: int, worker: Worker | None) -> str:
    return f"rank {rank} {worker.state if worker else ''}".lower()


def document(job: Job) -> dict[str, Any]:
    """Return the tree for ``elaunch top --json``: nodes and ranks, the worst first."""
    shown = screen(job)
    names = ("run_id", "dir", "state", "reason", "read_at", "round", "world_size", "attention")
    return {
        "schema": 1,
        **{name: shown.get(name) for name in names},
        "nodes": [
            {
                "node": node.seen.number,
                "host": node.seen.host,
                "here": node.seen.here,
                "note": node.seen.note or None,
                "level": node.level,
                "ranks": [
                    dict.fromkeys(WORKER_FIELDS)
                    | ({name: row(worker).get(name) for name in WORKER_FIELDS} if worker else {})
                    | {"rank": rank, "level": level}
                    for level, rank, worker in node.ranks
                ],
            }
            for node in nodes(job)
        ],
    }
