"""The page of a run: how it stands, what needs attention, its rounds, nodes and ranks.

It is the document of ``elaunch status`` with the failed rounds of ``elaunch why`` in short, and
with the workers as rows (WORKER_FIELDS), since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elaunch.errors import RunDirError
from elaunch.monitor import card
from elaunch.monitor.document import run_document
from elaunch.monitor.nodeviews import RemoteWorkers
from elaunch.monitor.runpage import explanation_of, failure_lines, parts_of
from elaunch.monitor.snapshot import PATIENCE_S, RunView, take
from elaunch.monitor.standing import Standing, read_standing
from elaunch.runs import verdict
from elaunch.runs.directory import RunDir, run_id_of
from elaunch.runs.identity import SUSPENDED
from elaunch.runs.pace import StepRate
from elaunch.runs.usage import Measurement
from elaunch.text import duration, ranks

WORKER_FIELDS: Final = (
    *("rank", "local_rank", "state", "step", "doing", "silent_s"),
    *("cpu_percent", "rss_bytes", "pid", "exit"),
)
BAD: Final = frozenset({"FAILED", "LOST", "KILLED", "UNREADABLE"})
FIRST_S: Final = 0.8
"""Seconds that the first reading waits for other nodes, so that it already shows their ranks."""
BEHIND: Final = 2
"""Steps by which a rank is behind that is named: one is what any reading may show."""
QUIET: Final = 0.5
"""Share of the hang timeout after which a silent rank is named."""

MOST_TITLE: Final = 300

_AGENT: Final = {
    "silent": "The agent does not answer; this is what it wrote last.",
    "stopped": f"The {SUSPENDED.format(pid='PID')}.",
    "elsewhere": "The agent runs on another machine; this is what it wrote last.",
}


@dataclass
class RunReader:
    """Reads one run again and again; CPU is measured from one reading to the next.

    ``view`` is the newest reading, None where the run cannot be read; ``rows`` its workers by rank,
    each with its progress; ``pace`` how fast they go.
    """

    run: RunDir
    others: RemoteWorkers | None = field(default=None, init=False)
    view: RunView | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    pace: StepRate = field(default_factory=StepRate)
    _measured: Mapping[int, Measurement] = field(default_factory=dict)
    _cards: dict[int, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def read(
        self, wanted: Collection[int] | None = None, patience: float | None = None
    ) -> dict[str, Any]:
        """Return the summary; of a run that cannot be read, its state and the reason.

        The agents of the ``wanted`` nodes, or of all, have ``patience`` seconds to answer, by
        default FIRST_S for the first reading and PATIENCE_S for others.
        """
        try:
            view = take(self.run, self._measured)
        except RunDirError:
            self.view, self.rows = None, []
            return _unreadable(self.run, read_standing(self.run))
        self._measured = view.measurements
        if view.has_others:
            self.others = self.others or RemoteWorkers(self.run)
            patience = patience or (PATIENCE_S if self.view else FIRST_S)
            view = self.others.complete(view, wanted, patience)
        document = run_document(view)
        others = document.pop("other_nodes")
        del document["failure"]  # the reports of all rounds are read below
        failures = [self._failure(number) for number in self._rounds()]
        progress = dict(document.get("progress") or {})
        rows = _rows(document.pop("workers"), progress.pop("workers", ()))
        document["progress"] = progress or None
        if not view.standing.live:
            rows = [{**row, "silent_s": None} for row in rows]
        self.pace.see(view.standing.taken_at, document["round"], rows)
        for node in others:
            rows += _rows(node["workers"], node["progress"])
        rows.sort(key=lambda row: int(row["rank"]))
        self.view, self.rows = view, rows
        return {
            **document,
            "key": self.run.path.name,
            "live": view.standing.live,
            "bad": view.standing.state in BAD,
            "worker_fields": WORKER_FIELDS,
            "workers": [[row.get(name) for name in WORKER_FIELDS] for row in rows],
            "grid": list(_grid(document, view)),
            "failures": failures,
            "time_classes": verdict.classes(view.record),
            "verdict": list(verdict.facts(view.record, current=view.standing.written_at is None)),
            "attention": list(attention(document, failures, rows)),
        }

    def _rounds(self) -> list[int]:
        try:
            return self.run.reports()
        except OSError:
            return []

    def _failure(self, number: int) -> dict[str, Any]:
        """Return a failed round in short; a report is read again when it was replaced."""
        try:
            changed = self.run.report(number, "json").stat().st_mtime_ns
        except OSError:
            changed = 0
        known = self._cards.get(number)
        if known is None or known[0] != changed:
            known = changed, _short(card.read_card(self.run, number))
            self._cards[number] = known
        return known[1]


_PROGRESS: Final = {"step": None, "doing": "", "silent_s": None}


def _short(found: card.Card) -> dict[str, Any]:
    document = found.document or {}
    return {
        "round": found.round,
        "summary": _text(document.get("headline"))
        or _text(document.get("culprit"))
        or _text(document.get("summary"))
        or found.problem,
        "ended": _text(document.get("summary")),
        "message": _text(parts_of(document.get("first")).get("message")),
        "explanation": _text(explanation_of(document)),
        "code": _text(document.get("code")),
        "host": _text(document.get("host")),
        "at_step": document.get("at_step"),
        "steps_lost": document.get("steps_lost"),
        "hang": bool(document.get("hang")),
        "ranks": document.get("culprit_ranks") or [],
        "lines": list(failure_lines(document))[:5] if document else [],
    }


def _text(value: object) -> str:
    return value[:2000] if isinstance(value, str) else ""


def _unreadable(run: RunDir, standing: Standing) -> dict[str, Any]:
    why = standing.reason or "nothing can be read"
    return {
        "key": run.path.name,
        "run_id": run_id_of(run),
        "dir": str(run.path),
        "state": standing.state,
        "reason": why,
        "live": False,
        "bad": True,
        "read_at": standing.taken_at,
        "attention": [_item("bad", "The record of this run cannot be read", why)],
    }


def _item(level: str, title: str, detail: str = "", page: str = "") -> dict[str, str]:
    return {"level": level, "title": title, "detail": detail, "page": page}


def attention(
    document: Mapping[str, Any], failures: list[dict[str, Any]], workers: list[dict[str, Any]]
) -> Iterator[dict[str, str]]:
    """Yield what a person should look at, the worst first; nothing where all is well."""
    live = document["ended_at"] is None and document["state"] not in BAD
    newest = failures[0] if failures else None
    current = newest is not None and newest["round"] == document["round"]
    if document["state"] in BAD:
        yield from _ended_badly(document, newest if current else None)
    if live and document["agent"]["condition"] in _AGENT:
        yield _item("warn", _AGENT[document["agent"]["condition"]])
    if live:
        if awaited := document.get("awaited"):
            yield _item("warn", awaited["text"], "", "stacks")
        yield from _standing_still(document.get("progress") or {}, workers)
        if (lateness := document.get("lateness")) and lateness["slow"] is not None:
            yield _item("warn", verdict.late_text(verdict.last_rank(lateness)))
    if newest is not None and (live or not current):
        title = f"Round {newest['round']} failed: {newest['summary']}"
        detail = newest["ended"] if newest["ended"] != newest["summary"] else ""
        told = (detail, newest["message"], newest["explanation"])
        yield _item("warn", title, "\n".join(filter(None, told)), "failures")
    saves = document.get("saves") or {}
    if saves.get("problem"):
        yield _item("warn", "The last save came to nothing", saves["problem"], "checkpoints")
    if document["latest_checkpoint_note"]:
        yield _item("warn", "Checkpoints", document["latest_checkpoint_note"], "checkpoints")


def _ended_badly(
    document: Mapping[str, Any], failure: Mapping[str, Any] | None
) -> Iterator[dict[str, str]]:
    elsewhere = document.get("job_failure") or {}
    if failure is not None:
        title, message = failure["summary"], failure["message"].partition("\n")[0]
        if title == failure["ended"] and message:
            title = f"{title}: {message}"[:MOST_TITLE]
        _, found, rest = (document["reason"] or "").rpartition(failure["ended"])
        reason = rest.lstrip("); ") if found else rest
        rest = [failure["explanation"], reason, *failure["lines"]]
        more = "\n".join(dict.fromkeys(text for text in rest if text and text not in title))
        yield _item("bad", title, more, "failures")
    elif elsewhere:
        title = _text(elsewhere.get("summary")) or "The first failure was on another node"
        yield _item("bad", title, _text(elsewhere.get("text")))
    else:
        yield _item("bad", document["reason"] or f"The run is {document['state']}")


def _standing_still(
    progress: Mapping[str, Any], workers: list[dict[str, Any]]
) -> Iterator[dict[str, str]]:
    """Yield ranks that are silent for long, or behind the others, while the run goes on."""
    limit = progress.get("limit_s")
    silent, behind = lagging(progress, workers)
    if silent and limit:
        longest = max(silent, key=lambda worker: float(worker["silent_s"]))
        names = ranks(sorted(worker["rank"] for worker in silent))
        detail = longest["doing"] and f"last call of rank {longest['rank']}: {longest['doing']}"
        yield _item(
            "bad",
            f"No progress of {names} for {duration(longest['silent_s'])}; "
            f"it is a hang at {duration(limit)}",
            detail,
            "logs",
        )
    if behind:
        first, last = min(w["step"] for w in behind), max(w["step"] for w in workers)
        names = ranks(sorted(worker["rank"] for worker in behind))
        yield _item("warn", f"Behind: {names} at step {first} of {last}")


def lagging(
    progress: Mapping[str, Any], workers: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the workers that are silent for long, and those that are behind most others."""
    limit = progress.get("limit_s")
    silent = [w for w in workers if limit and (w["silent_s"] or 0.0) > QUIET * limit]
    steps = [worker["step"] for worker in workers if worker["step"] is not None]
    behind = [w for w in workers if steps and (w["step"] or 0) <= max(steps) - BEHIND]
    few = len(steps) == len(workers) and len(behind) < len(workers) / 2
    return silent, behind if few else []


def _rows(
    workers: Iterable[dict[str, Any]], progress: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the workers of a node, each with its progress."""
    known = {one["rank"]: one for one in progress}
    return [{**_PROGRESS, **known.get(worker["rank"], {}), **worker} for worker in workers]


def _grid(document: Mapping[str, Any], view: RunView) -> Iterator[dict[str, Any]]:
    """Yield the nodes with the ranks of each, and whether their agents answer.

    Of many nodes the record has the first; the run's own is behind them if it is none of those.
    """
    here, slots = document["agent"]["host"], document["nproc_per_node"] or 0
    nodes = [(node["host"], node["slots"]) for node in document.get("nodes") or ()]
    own, first = document.get("node_rank", 0), 0
    notes = {node.node: node.note for node in view.others}
    for number, (host, count) in enumerate(nodes or [(here, slots)]):
        yield {
            "node": number,
            "host": host,
            "first": first,
            "slots": count,
            "here": number == own,
            "note": notes.get(number, ""),
        }
        first += count
    if own is not None and own >= max(1, len(nodes)):
        first = min((worker.record["rank"] for worker in view.workers), default=first)
        place = {"node": own, "host": here, "first": first, "slots": slots}
        yield {**place, "here": True, "note": ""}
