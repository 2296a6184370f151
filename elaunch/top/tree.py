"""A job, its nodes and its ranks as rows, the worst first.

Rows are made for what is open only: of a closed node its ranks are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from elaunch.runs.job import BAD, JobDocument, JudgedNode, WorkerSeen
from elaunch.text import count, one_line

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


def rows(
    job: JobDocument, found: Sequence[JudgedNode], opened: Collection[Key], needle: str = ""
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


def _searched(rank: int, worker: WorkerSeen | None) -> str:
    return f"rank {rank} {worker.state if worker else ''}".lower()
