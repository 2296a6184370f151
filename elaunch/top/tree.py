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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elaunch.monitor.screen.summary import BAD, WORKER_FIELDS, lagging
from elaunch.text import count, one_line

Key = tuple[int, ...]
"""``()`` the job, ``(node,)`` a node, ``(node, rank)`` a rank."""
Worker = dict[str, Any]
JOB: Key = ()


@dataclass(frozen=True)
class TreeRow:
    """One row; ``open`` is None where nothing is below it."""

    key: Key
    name: str
    state: str
    note: str
    level: int
    open: bool | None = None


@dataclass(frozen=True)
class TreeNode:
    """A node with its ranks, the worst first: level, rank, and what is known of its worker.

    ``note``: why its agent does not answer, and since when.
    """

    number: int
    host: str
    here: bool
    level: int
    ranks: tuple[tuple[int, int, Worker | None], ...]
    note: str = ""


def nodes(summary: Mapping[str, Any], workers: list[Worker]) -> list[TreeNode]:
    """Return the nodes of a summary with their ranks, the worst first."""
    known = {worker["rank"]: worker for worker in workers}
    levels = _levels(summary, workers)
    found = []
    for node in summary.get("grid", ()):
        first, slots = node["first"], node["slots"]
        # The record of a script, or of a job that has not begun, has no number of slots.
        span = range(first, first + slots) if slots else known
        ranks = [(levels.get(rank, 0), rank, known.get(rank)) for rank in span]
        ranks.sort(key=lambda row: (-row[0], row[1]))
        worst = max((row[0] for row in ranks), default=0)
        found.append(
            TreeNode(
                node["node"],
                node["host"],
                node["here"],
                max(worst, int(bool(node["note"]))),
                tuple(ranks),
                node["note"],
            )
        )
    return sorted(found, key=lambda node: (-node.level, node.number))


def _levels(summary: Mapping[str, Any], workers: list[Worker]) -> dict[int, int]:
    silent, behind = lagging(summary.get("progress") or {}, workers) if workers else ([], [])
    levels = {worker["rank"]: 1 for worker in behind}
    levels |= dict.fromkeys((summary.get("awaited") or {}).get("ranks", ()), 1)
    slow = (summary.get("lateness") or {}).get("slow")
    if slow is not None and summary.get("live"):
        levels[slow] = 1
    bad = (worker for worker in workers if worker["state"] in ("FAILED", "GONE"))
    failed = (one for one in summary.get("failures", ()) if one["round"] == summary["round"])
    blamed = (rank for one in failed for rank in one["ranks"])
    return levels | dict.fromkeys((*(worker["rank"] for worker in (*silent, *bad)), *blamed), 2)


def rows(
    summary: Mapping[str, Any], found: Sequence[TreeNode], opened: Collection[Key], needle: str = ""
) -> list[TreeRow]:
    """Return what the tree shows; with a ``needle`` the ranks in which it is, and their nodes."""
    state, wanted = summary["state"], needle.lower()
    level = 2 if state in BAD else max((node.level for node in found), default=0)
    job = TreeRow(JOB, one_line(summary["run_id"]), state, "", level, JOB in opened)
    lines = [job]
    for node in found if JOB in opened or wanted else ():
        host = one_line(node.host)
        named = wanted in f"node {node.number} {host}".lower()
        ranks = [row for row in node.ranks if named or wanted in _searched(row)]
        if wanted and not (named or ranks):
            continue
        is_open = (node.number,) in opened or (bool(wanted) and not named)
        states = Counter(worker["state"] for _, _, worker in node.ranks if worker)
        ended = max(states, key=lambda one: (one in ("FAILED", "GONE"), states[one]), default="")
        note = count(len(node.ranks), "rank")
        lines.append(
            TreeRow((node.number,), f"node {node.number} {host}", ended, note, node.level, is_open)
        )
        for worst, rank, worker in ranks if is_open else ():
            shown = worker or {}
            step = "" if shown.get("step") is None else f"step {shown['step']}"
            key = (node.number, rank)
            lines.append(TreeRow(key, f"rank {rank}", shown.get("state", ""), step, worst))
    if wanted and lines == [job]:
        return [replace(job, note="no match")]
    return lines


def _searched(row: tuple[int, int, Worker | None]) -> str:
    _, rank, worker = row
    shown = worker or {}
    return f"rank {rank} {shown.get('state', '')}".lower()


def document(summary: Mapping[str, Any], found: Sequence[TreeNode]) -> dict[str, Any]:
    """Return the tree for ``elaunch top --json``: nodes and ranks, the worst first."""
    names = ("run_id", "dir", "state", "reason", "read_at", "round", "world_size", "attention")
    return {
        "schema": 1,
        **{name: summary.get(name) for name in names},
        "nodes": [
            {
                "node": node.number,
                "host": node.host,
                "here": node.here,
                "note": node.note or None,
                "level": node.level,
                "ranks": [
                    {**{name: (worker or {}).get(name) for name in WORKER_FIELDS}}
                    | {"rank": rank, "level": level}
                    for level, rank, worker in node.ranks
                ],
            }
            for node in found
        ],
    }
