"""The page of ``elaunch status`` as plain data: parts in the order in which they are read.

:func:`run_page` puts the state and its cause first, then how far it got, the workers and the
rounds, and last where it came from. :func:`list_page` is one row for each run.
Below the state of a run that has failed stands its failure report in a few lines.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from elaunch.agent.hangs.judge import UNLEARNED_S
from elaunch.monitor.page import (
    NOTHING,
    Cell,
    Column,
    Fields,
    Page,
    Paragraph,
    Part,
    Table,
    Title,
)
from elaunch.monitor.snapshot import RunView, WorkerView
from elaunch.monitor.standing import Standing
from elaunch.runs import verdict
from elaunch.runs.directory import handle
from elaunch.runs.identity import SUSPENDED
from elaunch.runs.record import (
    ProgressRecord,
    Record,
    RoundRecord,
    SavesRecord,
    WorkerProgressRecord,
)
from elaunch.text import date, duration, moment, one_line, ranks, size

SHOWN_MESSAGE_LINES: Final = 5
BY: Final[Mapping[str, str]] = {"script": "by the script", "collectives": "by its collectives"}
NOTHING_YET: Final[Mapping[str, str]] = {
    "script": "none is known: the script has reported nothing yet",
    "log lines": "none is known: no line has matched --progress-regex yet",
}
SHOWN_ROUNDS: Final = 10
SHOWN_NODES: Final = 8
SHOWN_RANKS: Final = 64
"""Ranks of a job that have a row each; of more, those of this node have."""

_AGENT_NOTES: Final = {
    "silent": "agent does not answer",
    "stopped": SUSPENDED,
    "elsewhere": "on {host}; not checked from here",
}
_LIST_NOTES: Final = {
    "silent": " (no answer)",
    "stopped": " (suspended)",
    "elsewhere": " (elsewhere)",
}


def agent_note(standing: Standing) -> str:
    """Return why the state is not the agent's own answer, in parentheses, or ""."""
    template = _AGENT_NOTES.get(standing.agent)
    if template is None or standing.record is None:
        return ""
    return f"({template.format(**standing.record['agent'])})"


def run_page(view: RunView) -> Page:
    """Return the page of one run."""
    parts: list[Part] = [_title(view.standing, view.record)]
    if cause := tuple(_cause(view)):
        parts.append(Paragraph(cause))
    parts.append(Fields(tuple((name, one_line(value)) for name, value in _progress(view))))
    progress = _by_rank(view.record, view.standing.live)
    if few := len(shown := _all_workers(view)) <= SHOWN_RANKS:
        progress |= {one["rank"]: one for node in view.others for one in node.progress}
    if workers := shown if few else view.workers:
        parts.append(_workers(workers, progress))
    if notes := tuple(_others(view, few)):
        parts.append(Paragraph(notes))
    if len(view.record["history"]) > 1:
        parts.append(_history(view.record["history"], view.standing))
    parts.append(Fields(tuple((name, one_line(value)) for name, value in _origin(view))))
    return tuple(parts)


def _all_workers(view: RunView) -> tuple[WorkerView, ...]:
    return view.workers + tuple(worker for node in view.others for worker in node.workers)


def _others(view: RunView, few: bool) -> Iterator[str]:
    """Yield which nodes do not answer, and how many ranks have no row, by their state."""
    states = Counter(worker.state for node in view.others for worker in node.workers)
    if states and not few:
        numbers = ", ".join(f"{number:,} {one_line(state)}" for state, number in states.items())
        yield f"ranks of other nodes: {numbers}; each: elaunch status --json, elaunch top"
    silent = [node for node in view.others if node.note]
    for node in silent[:SHOWN_NODES]:
        yield f"node {node.node}, {one_line(node.host)}: {node.note}"
    if len(silent) > SHOWN_NODES:
        yield f"and {len(silent) - SHOWN_NODES} more nodes"


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
    name = Cell(one_line(run_id if ids[run_id] == 1 else handle(standing.run)))
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
        Cell(one_line(record["name"])),
        Cell(one_line(os.path.basename(record["entrypoint"]))),
    )


def _run_id(standing: Standing) -> str:
    return standing.run.path.name if standing.record is None else standing.record["run_id"]


def _title(standing: Standing, record: Record) -> Title:
    notes = []
    if doubt := agent_note(standing):
        notes.append(doubt)
    if standing.live and standing.duration_s is not None:
        notes.append(f"for {duration(standing.duration_s)}")
    elif record["exit_code"] is not None:
        notes.append(f"exit code {record['exit_code']}")
    return Title(one_line(record["run_id"]), Cell(standing.state, standing.state), " ".join(notes))


def _cause(view: RunView) -> Iterator[str]:
    """Yield why the run is in its state; of a failure also the failed worker's report."""
    if view.standing.reason:
        yield one_line(view.standing.reason)
    if view.awaited is not None:
        yield f"attention: {one_line(view.awaited['text'])}"
    lateness = view.record.get("lateness")
    if lateness is not None and lateness["slow"] is not None and view.standing.live:
        yield f"attention: {verdict.late_text(verdict.last_rank(lateness))}"
    failure = view.record["failure"]
    # An earlier round's failure stays in the record.
    current = failure is not None and failure.get("round") == view.record["round"]
    if failure and current and view.standing.state == "FAILED":
        yield from (one_line(line) for line in failure_lines(failure))
    elif view.standing.state == "FAILED":
        # The first failure of the job was on another node, whose agent has the report.
        text = str((view.record.get("job_failure") or {}).get("text") or "")
        yield from (one_line(line) for line in text.splitlines()[:SHOWN_MESSAGE_LINES])


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
    if (written := standing.written_at) is not None:
        age = duration(max(0.0, standing.taken_at - written))
        yield "as of", f"{date(written)}, {age} ago: the record is not newer"
    yield "round", str(record["round"])
    used = view.restarts
    yield (
        "restarts",
        restarts_text(used["used"], used["without_progress"], used["max"], used["budget"]),
    )
    yield "world size", f"{_or_nothing(record['world_size'])}, {record['start_method']}"
    yield from _place_among_nodes(record)
    yield from _progress_facts(record, standing.live)
    if standing.live and (address := record.get("dashboard")):
        yield "dashboard", address
    if lateness := record.get("lateness"):
        yield "last", verdict.late_text(verdict.last_rank(lateness))
    yield from _checkpoint_facts(view)
    yield from _save_facts(record, view.standing)
    begun = standing.state != "STARTING"  # no script can have reported before
    yield from verdict.facts(record, current=begun and standing.written_at is None)
    if record["log_dir"]:
        yield "logs", record["log_dir"]
    report = standing.run.report(record["round"], "txt")
    if record["failure"] and report.exists():
        yield "report", str(report)


def _place_among_nodes(record: Record) -> Iterator[tuple[str, str]]:
    """Yield where this machine stands in a job of several; nothing for a job of one node."""
    # Optional fields: a record of one node has none of them.
    nodes = record.get("nodes")
    if not nodes:
        return
    number = record.get("node_count", len(nodes))
    if record.get("standby"):
        yield "node", "stands by as a spare"
    elif (rank := record.get("node_rank")) is not None:
        yield "node", f"{rank} of {number}"
    shown = [f"{node['host']} ({node['addr']})" for node in nodes[:SHOWN_NODES]]
    more = f", and {number - SHOWN_NODES} more" if number > SHOWN_NODES else ""
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
        Column("local_rank", right=True, spare=True),
        Column("pid", right=True),
        Column("state"),
        Column("CPU %", right=True),
        Column("RSS", right=True),
        Column("tree RSS", right=True, spare=True),
        Column("threads", right=True, spare=True),
        Column("exit", elastic=True),
        Column("step", right=True),
        Column("last", elastic=True),
    )
    ordered = sorted(workers, key=lambda worker: worker.record["rank"])
    rows = (_worker_row(worker, progress.get(worker.record["rank"])) for worker in ordered)
    return Table(columns, tuple(rows)).trimmed(4)  # no usage after the end, no exit before it


def _worker_row(worker: WorkerView, progress: WorkerProgressRecord | None) -> tuple[Cell, ...]:
    record, used = worker.record, worker.usage
    return (
        Cell(str(record["rank"])),
        Cell(str(record["local_rank"])),
        Cell(_or_nothing(record["pid"])),
        Cell(one_line(worker.state), worker.state),
        Cell(f"{used.cpu_percent:.0f}" if used else NOTHING),
        Cell(size(used.rss) if used else NOTHING),
        Cell(size(used.tree_rss) if used else NOTHING),
        Cell(str(used.threads) if used else NOTHING),
        Cell(one_line(record["exit"] or NOTHING)),
        Cell(_step_text(progress) or NOTHING),
        Cell(one_line(_doing_text(progress)) or NOTHING),
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
    lasted, recovery = standing.round_s(entry), entry["recovery_s"]
    return (
        Cell(str(entry["round"])),
        Cell(moment(entry["started_at"], standing.taken_at)),
        Cell(NOTHING if lasted is None else duration(lasted)),
        Cell(NOTHING if recovery is None else f"{recovery:.3f} s"),
        Cell(_or_nothing(entry["resumed_step"])),
        Cell(one_line(entry["reason"] or NOTHING)),
    )


def _or_nothing(value: object) -> str:
    return NOTHING if value is None else str(value)


def failure_lines(failure: Mapping[str, Any]) -> Iterator[str]:
    """Yield which worker failed and its report; of a hang, where the workers were."""
    # The report has a schema of its own: what is missing in it, or is not so, is left out here.
    if failure.get("hang"):
        yield from _hang(parts_of(failure["hang"]))
        return
    first = parts_of(failure.get("first"))
    if {"rank", "local_rank", "pid", "ended"} <= first.keys():
        when = f"in round {failure.get('round')}"
        if isinstance(seconds := failure.get("seconds_into_round"), int | float):
            when = f"{duration(seconds)} into round {failure.get('round')}"
        yield (
            f"rank {first['rank']} (local_rank {first['local_rank']}, pid {first['pid']}) "
            f"on {failure.get('host')} {first['ended']}, {when}"
        )
    for text in (first.get("message"), explanation_of(failure)):
        yield from str(text or "").splitlines()[:SHOWN_MESSAGE_LINES]


def explanation_of(failure: Mapping[str, Any]) -> object:
    """Return what explains the first failure; of a victim whose culprit is known not whom to seek.

    As the report does (elaunch.agent.failure.report).
    """
    first, accused = parts_of(failure.get("first")), failure.get("culprit_ranks")
    if failure.get("likely_victim") and accused and first.get("rank") not in accused:
        return f"Rank {first.get('rank')} is a victim of that."
    return failure.get("explanation") or first.get("explanation")


def _hang(hang: Mapping[str, Any]) -> Iterator[str]:
    """Yield the innermost frame of each group of workers, the smallest group first."""
    groups = hang.get("stacks")
    for group in map(parts_of, groups[:SHOWN_MESSAGE_LINES] if isinstance(groups, list) else ()):
        main, numbers = group.get("main"), group.get("ranks")
        if main and numbers and isinstance(main, list) and isinstance(numbers, list):
            yield f"{ranks(rank for rank in numbers if isinstance(rank, int))}: {main[0]}"


def parts_of(value: object) -> Mapping[str, Any]:
    """Return an object of a report; an empty one for what is none."""
    return value if isinstance(value, dict) else {}


def _progress_facts(record: Record, live: bool) -> Iterator[tuple[str, str]]:
    """Yield names and values: how far, by which source, the script's own status, the limit."""
    progress = record.get("progress")
    if progress is None:
        return
    by = BY.get(progress["source"], f"by {progress['source']}")
    how_far = ", ".join(_how_far(progress))
    text = f"{how_far} ({by})" if how_far else f"no step is known; watched {by}"
    if all(worker["silent_s"] is None for worker in progress["workers"]) and not how_far:
        text = NOTHING_YET.get(progress["source"], text)
    yield "progress", text
    for text in dict.fromkeys(worker["status"] for worker in progress["workers"]):
        if text:
            yield "status", text
    if live and progress["learning"]:
        waits = f"{duration(UNLEARNED_S)} for a rank that others wait for"
        yield "hang timeout", f"auto: {waits}; the run's own pauses are not known yet"
    elif live and progress["limit_s"] is not None:
        yield "hang timeout", duration(progress["limit_s"])


def _how_far(progress: ProgressRecord) -> Iterator[str]:
    steps = sorted({s for worker in progress["workers"] if (s := worker["step"]) is not None})
    if steps == [1]:
        yield "1 step"
    elif steps:
        yield f"{steps[0]} steps" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"
    shares = [worker["progress"] for worker in progress["workers"]]
    known = [share for share in shares if share is not None]
    if known:
        yield f"{100 * min(known):.0f} %"


def _by_rank(record: Record, live: bool) -> dict[int, WorkerProgressRecord]:
    """Return what is known of each worker, by its rank; of an ended run not how long ago it was."""
    progress = record.get("progress")
    if progress is None:
        return {}
    workers: list[WorkerProgressRecord] = progress["workers"]
    if not live:
        workers = [{**worker, "silent_s": None} for worker in workers]
    return {worker["rank"]: worker for worker in workers}


def _step_text(worker: WorkerProgressRecord | None) -> str:
    """Return a worker's step, or nothing."""
    return "" if worker is None or worker["step"] is None else str(worker["step"])


def _doing_text(worker: WorkerProgressRecord | None) -> str:
    """Return "in section eval, 12 s ago, last call allgather #3", or nothing if it is unknown."""
    if worker is None or worker["silent_s"] is None:
        return ""
    parts = [f"in section {worker['section']}"] if worker["section"] else []
    parts.append(f"{duration(worker['silent_s'])} ago")
    return ", ".join([*parts, f"last call {worker['doing']}"] if worker["doing"] else parts)


def _save_facts(record: Record, standing: Standing) -> Iterator[tuple[str, str]]:
    """Yield names and values: the newest commit, what is on its way, what came to nothing."""
    saves = record.get("saves")
    if saves is None:
        return
    # The agent of rank 0's node counts for the job.
    nothing = "counted on node 0" if record.get("node_rank") else "none yet"
    yield "saves", ", ".join(_saves(saves, standing)) or nothing
    if saves["problem"]:
        yield "", saves["problem"]


def _saves(saves: SavesRecord, standing: Standing) -> Iterator[str]:
    if saves["step"] is not None and saves["committed_at"] is not None:
        age = duration(max(0.0, standing.taken_at - saves["committed_at"]))
        yield f"step {saves['step']} committed {age} ago, in {duration(saves['seconds'])}"
        yield f"{saves['commits']} in all"
    if saves["saving"] is not None:
        yield f"step {saves['saving']} is being written" if standing.live else "one was unfinished"
