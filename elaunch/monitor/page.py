"""What ``elaunch status`` shows, as plain data: parts in the order in which they are read.

:func:`run_page` puts the state and its cause first, then how far it got, the workers and the
rounds, and last where it came from. :func:`list_page` is one row for each run.
``elaunch.monitor.render`` turns a page into text.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elaunch.monitor import progressfacts, savefacts
from elaunch.monitor.amounts import clean, date, duration, memory, moment
from elaunch.monitor.failurelines import SHOWN_MESSAGE_LINES, failure_lines
from elaunch.monitor.snapshot import RunView, WorkerView
from elaunch.monitor.standing import Standing
from elaunch.run.directory import handle
from elaunch.run.record import Record, RoundRecord, WorkerProgressRecord

NOTHING: Final = "-"
SHOWN_ROUNDS: Final = 10
SHOWN_NODES: Final = 8

_AGENT_NOTES: Final = {
    "silent": "agent does not answer",
    "stopped": "agent is suspended by a signal; `kill -CONT {pid}` resumes it",
    "elsewhere": "on {host}; not checked from here",
}
_LIST_NOTES: Final = {
    "silent": " (no answer)",
    "stopped": " (suspended)",
    "elsewhere": " (elsewhere)",
}


@dataclass(frozen=True)
class Cell:
    """A piece of text on one line; ``state`` is the state that gives it its colour."""

    text: str
    state: str = ""


@dataclass(frozen=True)
class Title:
    """The first line: what it is about, its state, a note."""

    name: str
    state: Cell
    note: str


@dataclass(frozen=True)
class Paragraph:
    """Lines below the title."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Fields:
    """Names with their values."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """A column of a table: on a narrow terminal ``spare`` ones go, ``elastic`` ones are folded."""

    name: str
    right: bool = False
    elastic: bool = False
    spare: bool = False


@dataclass(frozen=True)
class Table:
    """Rows below their columns; of very many, a terminal leaves out those in state ``usual``."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    usual: str = ""


Part = Title | Paragraph | Fields | Table
Page = tuple[Part, ...]


def run_page(view: RunView) -> Page:
    """Return the page of one run."""
    parts: list[Part] = [_title(view.standing, view.record)]
    if cause := tuple(_cause(view)):
        parts.append(Paragraph(cause))
    parts.append(Fields(tuple((name, clean(value)) for name, value in _progress(view))))
    if view.workers:
        parts.append(_workers(view.workers, progressfacts.by_rank(view.record, view.standing.live)))
    if len(view.record["history"]) > 1:
        parts.append(_history(view.record["history"], view.standing))
    parts.append(Fields(tuple((name, clean(value)) for name, value in _origin(view))))
    return tuple(parts)


def list_page(standings: Sequence[Standing], everything: bool) -> Page:
    """Return the page of several runs; with ``everything`` none was left out."""
    if not standings:
        if everything:
            return (Paragraph(("No run is recorded.",)),)
        return (Paragraph(("No run of this user is recorded on this machine.",)),)
    columns = (
        Column("run", elastic=True),
        Column("state", elastic=True),
        Column("round", right=True),
        Column("restarts", right=True),
        Column("world size", right=True),
        Column("started"),
        Column("ended", spare=True),
        Column("duration", right=True),
        Column("name", elastic=True, spare=True),
        Column("script", spare=True),
    )
    ids = Counter(_run_id(standing) for standing in standings)
    return (Table(columns, tuple(_list_row(standing, ids) for standing in standings)),)


def _list_row(standing: Standing, ids: Mapping[str, int]) -> tuple[Cell, ...]:
    run_id, record = _run_id(standing), standing.record
    name = Cell(clean(run_id if ids[run_id] == 1 else handle(standing.run)))
    note = _LIST_NOTES.get(standing.agent, "")
    state = Cell(f"{standing.state}{note}", standing.state)
    if record is None:
        return (name, state, *(Cell(NOTHING) for _ in range(8)))
    restarts = record["restarts"]
    lasted, ended = standing.duration_s, record["ended_at"]
    return (
        name,
        state,
        Cell(str(record["round"])),
        Cell(f"{restarts['used']}/{restarts['max']}"),
        Cell(_or_nothing(record["world_size"])),
        Cell(moment(record["started_at"], standing.taken_at)),
        Cell(NOTHING if ended is None else moment(ended, standing.taken_at)),
        Cell(NOTHING if lasted is None else duration(lasted)),
        Cell(clean(record["name"])),
        Cell(clean(os.path.basename(record["entrypoint"]))),
    )


def _run_id(standing: Standing) -> str:
    return standing.run.path.name if standing.record is None else standing.record["run_id"]


def _title(standing: Standing, record: Record) -> Title:
    notes = []
    if template := _AGENT_NOTES.get(standing.agent):
        notes.append(f"({template.format(**record['agent'])})")
    if standing.live and standing.duration_s is not None:
        notes.append(f"for {duration(standing.duration_s)}")
    elif record["exit_code"] is not None:
        notes.append(f"exit code {record['exit_code']}")
    return Title(clean(record["run_id"]), Cell(standing.state, standing.state), " ".join(notes))


def _cause(view: RunView) -> Iterator[str]:
    """Yield why the run is in its state; of a failure also the failed worker's report."""
    if view.standing.reason:
        yield clean(view.standing.reason)
    failure = view.record["failure"]
    # An earlier round's failure stays in the record.
    current = failure is not None and failure.get("round") == view.record["round"]
    if failure and current and view.standing.state == "FAILED":
        yield from (clean(line) for line in failure_lines(failure))
    elif view.standing.state == "FAILED":
        # The first failure of the job was on another node, whose agent has the report.
        text = str((view.record.get("job_failure") or {}).get("text") or "")
        yield from (clean(line) for line in text.splitlines()[:SHOWN_MESSAGE_LINES])


def _progress(view: RunView) -> Iterator[tuple[str, str]]:
    record, standing = view.record, view.standing
    yield "name", record["name"]
    if standing.live:
        yield "started", date(record["started_at"])
    elif standing.duration_s is not None:
        yield "started", f"{date(record['started_at'])}, lasted {duration(standing.duration_s)}"
    else:
        yield "started", f"{date(record['started_at'])}; when it ended is not known"
    if record["ended_at"] is not None and not standing.live:
        yield "ended", date(record["ended_at"])
    yield "round", str(record["round"])
    used = record["restarts"]
    yield (
        "restarts",
        restarts_text(used["used"], used["without_progress"], used["max"], used["budget"]),
    )
    yield "world size", f"{_or_nothing(record['world_size'])}, {record['start_method']}"
    yield from _place_among_nodes(record)
    yield from progressfacts.facts(record, standing.live)
    yield from _checkpoint_facts(view)
    yield from savefacts.facts(record, view.standing)
    if record["log_dir"]:
        yield "logs", record["log_dir"]
    report = standing.run.report(record["round"], "txt")
    if record["failure"] and report.exists():
        yield "report", str(report)


def _place_among_nodes(record: Record) -> Iterator[tuple[str, str]]:
    """Yield where this machine stands in a job of several; nothing for a job of one node."""
    # Optional fields: a record of one node, or of an earlier version, has none of them.
    nodes = record.get("nodes")
    if not nodes:
        return
    if record.get("standby"):
        yield "node", "stands by as a spare"
    elif (rank := record.get("node_rank")) is not None:
        yield "node", f"{rank} of {len(nodes)}"
    shown = [f"{node['host']} ({node['addr']})" for node in nodes[:SHOWN_NODES]]
    more = f", and {len(nodes) - SHOWN_NODES} more" if len(nodes) > SHOWN_NODES else ""
    yield "nodes", ", ".join(shown) + more
    if joining := record.get("joining"):
        yield "joining", f"{joining} more, with the next round"


def _origin(view: RunView) -> Iterator[tuple[str, str]]:
    record, agent = view.record, view.record["agent"]
    yield "command", shlex.join(_command(record))
    yield "cwd", record["cwd"]
    saver = "script" if "launcher" in record else "agent"
    yield saver, f"pid {agent['pid']} on {agent['host']}, user {agent['user']}"
    yield "record", str(view.standing.run.path)


def _checkpoint_facts(view: RunView) -> Iterator[tuple[str, str]]:
    record = view.record
    if record["checkpoint_dir"] is None:
        return
    if view.latest is not None:
        found = view.latest
        age = duration(found.age_s)
        yield "checkpoint", f"step {found.step}, {age} old ({found.format}): {found.path}"
    elif view.latest_note is None:
        yield "checkpoint", f"none yet in {record['checkpoint_dir']}"
    if view.latest_note is not None:
        yield ("" if view.latest else "checkpoint"), view.latest_note
    used = record["checkpoint"]
    if used is not None:
        yield "resumed", f"round {record['round']} from step {used['step']}: {used['path']}"
    else:
        yield "resumed", f"round {record['round']} began without a checkpoint"


def restarts_text(used: int, without: int, allowed: int | None, budget: str | None) -> str:
    """Write restarts so far, those ``without`` progress, and how many are ``allowed`` if known."""
    limit = "" if allowed is None else f" ({allowed} allowed)"
    if budget == "lifetime":
        return f"{used}{limit}"
    return f"{used}, of them {without} since the last progress{limit}"


def _command(record: Record) -> list[str]:
    if "launcher" in record:
        return record["argv"]
    # argv[0] is a path of the installation, or of __main__.py.
    return ["elaunch", *record["argv"][1:]]


def _workers(workers: Sequence[WorkerView], progress: Mapping[int, WorkerProgressRecord]) -> Table:
    columns = (
        Column("rank", right=True),
        Column("local_rank", right=True),
        Column("pid", right=True),
        Column("state"),
        Column("CPU %", right=True),
        Column("RSS", right=True),
        Column("tree RSS", right=True),
        Column("threads", right=True),
        Column("exit"),
        Column("step", right=True),
        Column("last", elastic=True),
    )
    ordered = sorted(workers, key=lambda worker: worker.record["rank"])
    rows = [_worker_row(worker, progress.get(worker.record["rank"])) for worker in ordered]
    # A column without any value is left out: no usage after the end, no exit before it.
    shown = [i for i in range(len(columns)) if i < 4 or any(r[i].text != NOTHING for r in rows)]
    return Table(
        tuple(columns[i] for i in shown), tuple(tuple(row[i] for i in shown) for row in rows)
    )


def _worker_row(worker: WorkerView, progress: WorkerProgressRecord | None) -> tuple[Cell, ...]:
    record, used = worker.record, worker.usage
    return (
        Cell(str(record["rank"])),
        Cell(str(record["local_rank"])),
        Cell(_or_nothing(record["pid"])),
        Cell(clean(worker.state), worker.state),
        Cell(f"{used.cpu_percent:.0f}" if used else NOTHING),
        Cell(memory(used.rss) if used else NOTHING),
        Cell(memory(used.tree_rss) if used else NOTHING),
        Cell(str(used.threads) if used else NOTHING),
        Cell(clean(record["exit"] or NOTHING)),
        Cell(progressfacts.step_text(progress) or NOTHING),
        Cell(clean(progressfacts.doing_text(progress)) or NOTHING),
    )


def _history(history: Sequence[RoundRecord], standing: Standing) -> Table:
    columns = (
        Column("round", right=True),
        Column("started"),
        Column("lasted", right=True),
        Column("recovery", right=True),
        Column("from step", right=True),
        Column("reason", elastic=True),
    )
    rows = tuple(_round_row(entry, standing) for entry in history[-SHOWN_ROUNDS:])
    return Table(columns, rows)


def _round_row(entry: RoundRecord, standing: Standing) -> tuple[Cell, ...]:
    until = entry["ended_at"]
    if until is None and standing.live:
        until = standing.taken_at
    lasted = NOTHING if until is None else duration(max(0.0, until - entry["started_at"]))
    recovery = entry["recovery_s"]
    return (
        Cell(str(entry["round"])),
        Cell(moment(entry["started_at"], standing.taken_at)),
        Cell(lasted),
        Cell(NOTHING if recovery is None else f"{recovery:.3f} s"),
        Cell(_or_nothing(entry["resumed_step"])),
        Cell(clean(entry["reason"] or NOTHING)),
    )


def _or_nothing(value: object) -> str:
    return NOTHING if value is None else str(value)
