"""The pages of ``elaunch status`` as plain data: parts in the order in which they are read.

:func:`run_page` puts the state and its cause first, then how far it got, the workers and the
rounds, and last where it came from. Below the state of a run that has failed stands its failure
report in a few lines. :func:`list_page` is one row for each run. :func:`store_page` and
:func:`stores_page` are the same for whole jobs, with their nodes in place of workers and rounds.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from elaunch.agent.hangs.hang import UNLEARNED_S
from elaunch.endings import how_it_ended
from elaunch.runs import verdict
from elaunch.runs.directory import handle
from elaunch.runs.identity import SUSPENDED
from elaunch.runs.job import JobDocument, WorkerSeen
from elaunch.runs.record import ProgressRecord, Record, RoundRecord, WorkerProgressRecord
from elaunch.text import date, duration, host_port, moment, one_line, ranks, size
from elaunch.views.layout import (
    NOTHING,
    Cell,
    Page,
    Paragraph,
    Part,
    Table,
    Title,
    fields,
    given,
    table,
)

if TYPE_CHECKING:
    from elaunch.rendezvous.plan import Plan, WorkerFailure
    from elaunch.views.store import StoreJob, StoreNode

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


def agent_note(job: JobDocument) -> str:
    """Return why the state is not the agent's own answer, in parentheses, or ""."""
    template = _AGENT_NOTES.get(job.agent)
    if template is None or job.record is None:
        return ""
    return f"({template.format(**job.record['agent'])})"


def run_page(job: JobDocument) -> Page:
    """Return the page of one run; raise RunDirError where it cannot be read."""
    record = job.known
    parts: list[Part] = [_title(job, record)]
    if cause := tuple(_cause(job, record)):
        parts.append(Paragraph(cause))
    parts.append(fields(_progress(job, record)))
    few = len(shown := job.everyone) <= SHOWN_RANKS
    if workers := shown if few else job.workers:
        parts.append(_workers(workers))
    if notes := tuple(_others(job, few)):
        parts.append(Paragraph(notes))
    if len(record["history"]) > 1:
        rows = (_round_row(job, one) for one in record["history"][-SHOWN_ROUNDS:])
        parts.append(table("round>, started, lasted>, recovery>, from step>, reason~", rows))
    parts.append(fields(_origin(job, record)))
    return tuple(parts)


def _others(job: JobDocument, few: bool) -> Iterator[str]:
    """Yield which nodes do not answer, and how many ranks have no row, by their state."""
    states = Counter(worker.state for node in job.others for worker in node.workers)
    if states and not few:
        numbers = ", ".join(f"{number:,} {one_line(state)}" for state, number in states.items())
        yield f"ranks of other nodes: {numbers}; each: elaunch status --json, elaunch top"
    silent = [node for node in job.others if node.note]
    for node in silent[:SHOWN_NODES]:
        yield f"node {node.number}, {one_line(node.host)}: {node.note}"
    if len(silent) > SHOWN_NODES:
        yield f"and {len(silent) - SHOWN_NODES} more nodes"


def list_page(jobs: Sequence[JobDocument], everything: bool) -> Page:
    """Return the page of several runs; with ``everything`` none was left out."""
    if not jobs:
        if everything:
            return (Paragraph(("No run is recorded.",)),)
        return (Paragraph(("No run of this user is recorded on this machine.",)),)
    ids = Counter(job.run_id for job in jobs)
    columns = (
        "run~, state~, round>, restarts>, world size>, started, ended?, duration>, name~?, script?"
    )
    return (table(columns, (_list_row(job, ids) for job in jobs)),)


def _list_row(job: JobDocument, ids: Mapping[str, int]) -> tuple[object, ...]:
    record, at = job.record, partial(moment, now=job.read_at)
    name = job.run_id if ids[job.run_id] == 1 else handle(job.run)
    state = Cell(f"{job.state}{_LIST_NOTES.get(job.agent, '')}", job.state)
    if record is None:
        return (name, state, *8 * [None])
    used = f"{record['restarts']['used']}/{record['restarts']['max']}"
    when = at(record["started_at"]), given(record["ended_at"], at), given(job.duration_s, duration)
    script = os.path.basename(record["entrypoint"])
    return name, state, record["round"], used, record["world_size"], *when, record["name"], script


def _title(job: JobDocument, record: Record) -> Title:
    notes = []
    if doubt := agent_note(job):
        notes.append(doubt)
    if job.live and job.duration_s is not None:
        notes.append(f"for {duration(job.duration_s)}")
    elif record["exit_code"] is not None:
        notes.append(f"exit code {record['exit_code']}")
    return Title(one_line(record["run_id"]), Cell(job.state, job.state), " ".join(notes))


def _cause(job: JobDocument, record: Record) -> Iterator[str]:
    """Yield why the run is in its state; of a failure also the failed worker's report."""
    if job.reason:
        yield one_line(job.reason)
    if job.awaited is not None:
        yield f"attention: {one_line(job.awaited['text'])}"
    lateness = record.get("lateness")
    if lateness is not None and lateness["slow"] is not None and job.live:
        yield f"attention: {verdict.late_text(verdict.last_rank(lateness))}"
    failure = record["failure"]
    # An earlier round's failure stays in the record.
    current = failure is not None and failure.get("round") == record["round"]
    if failure and current and job.state == "FAILED":
        yield from (one_line(line) for line in failure_lines(failure))
    elif job.state == "FAILED":
        # The first failure of the job was on another node, whose agent has the report.
        text = str((record.get("job_failure") or {}).get("text") or "")
        yield from (one_line(line) for line in text.splitlines()[:SHOWN_MESSAGE_LINES])


def _progress(job: JobDocument, record: Record) -> Iterator[tuple[str, str]]:
    yield "name", record["name"]
    started = date(record["started_at"])
    if job.live:
        yield "started", started
    elif job.duration_s is not None:
        yield "started", f"{started}, lasted {duration(job.duration_s)}"
    else:
        yield "started", f"{started}; when it ended is not known"
    if record["ended_at"] is not None and not job.live:
        yield "ended", date(record["ended_at"])
    if job.written_at is not None:
        age = duration(max(0.0, job.read_at - job.written_at))
        yield "as of", f"{date(job.written_at)}, {age} ago: the record is not newer"
    yield "round", str(record["round"])
    yield "restarts", _restarts_text(job.restarts)
    yield "world size", f"{given(record['world_size'], str) or NOTHING}, {record['start_method']}"
    yield from _place_among_nodes(record)
    yield from _progress_facts(record, job.live)
    if job.live and (address := record.get("dashboard")):
        yield "dashboard", address
    if lateness := record.get("lateness"):
        yield "last", verdict.late_text(verdict.last_rank(lateness))
    yield from _checkpoint_facts(job, record)
    yield from _save_facts(job, record)
    begun = job.state != "STARTING"  # no script can have reported before
    yield from verdict.facts(record, current=begun and job.written_at is None)
    if record["log_dir"]:
        yield "logs", record["log_dir"]
    report = job.run.report(record["round"], "txt")
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


def _origin(job: JobDocument, record: Record) -> Iterator[tuple[str, str]]:
    agent = record["agent"]
    # argv[0] is a path of the installation, or of __main__.py.
    command = record["argv"] if "launcher" in record else ["elaunch", *record["argv"][1:]]
    yield "command", shlex.join(command)
    yield "cwd", record["cwd"]
    saver = "script" if "launcher" in record else "agent"
    yield saver, f"pid {agent['pid']} on {agent['host']}, user {agent['user']}"
    yield "record", str(job.run.path)


def _checkpoint_facts(job: JobDocument, record: Record) -> Iterator[tuple[str, str]]:
    if record["checkpoint_dir"] is None:
        return
    if job.latest is not None:
        found = job.latest
        age = duration(found.age_s)
        yield "checkpoint", f"step {found.step}, {age} old ({found.format}): {found.path}"
    elif job.latest_note is None:
        yield "checkpoint", f"none yet in {record['checkpoint_dir']}"
    if job.latest_note is not None:
        yield ("" if job.latest else "checkpoint"), job.latest_note
    kept = record["history"][-1].get("kept") if record["history"] else None
    resumed = _resumed(record["round"], record["checkpoint"])
    yield "resumed", f"round {record['round']} by {ranks(kept)}, which go on" if kept else resumed


def _resumed(round: int, checkpoint: Mapping[str, Any] | None) -> str:
    if checkpoint is None:
        return f"round {round} began without a checkpoint"
    return f"round {round} from step {checkpoint['step']}: {checkpoint['path']}"


def _restarts_text(restarts: Mapping[str, Any]) -> str:
    """Write how many of the allowed restarts are used; progress gives those before it back."""
    total, allowed = restarts["used"], restarts["max"]
    if not allowed:
        return str(total) if total or allowed is None else "off"
    used = total if restarts["budget"] == "lifetime" else restarts["without_progress"]
    return f"{used} of {allowed} used" + (f"; {total} in all" if total != used else "")


def _workers(workers: Sequence[WorkerSeen]) -> Table:
    columns = (
        "rank>, local_rank>?, pid>, state, CPU %>, RSS>, tree RSS>?, threads>?, exit~, step>, last~"
    )
    # No usage after the end, no exit before it.
    return table(columns, map(_worker_row, workers)).trimmed(4)


def _worker_row(worker: WorkerSeen) -> tuple[object, ...]:
    record, used = worker.record, worker.usage
    who = (record["rank"], record["local_rank"], record["pid"])
    state = Cell(one_line(worker.state), worker.state)
    takes: tuple[object, ...] = (None, None, None, None)
    if used:
        takes = (f"{used.cpu_percent:.0f}", size(used.rss), size(used.tree_rss), used.threads)
    return *who, state, *takes, record["exit"], worker.step, _doing_text(worker.progress)


def _round_row(job: JobDocument, entry: RoundRecord) -> tuple[object, ...]:
    lasted, recovery = (
        given(job.round_s(entry), duration),
        given(entry["recovery_s"], "{:.3f} s".format),
    )
    begun = moment(entry["started_at"], job.read_at)
    return entry["round"], begun, lasted, recovery, entry["resumed_step"], entry["reason"]


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


def _doing_text(worker: WorkerProgressRecord | None) -> str:
    """Return "in section eval, 12 s ago, last call allgather #3", or nothing if it is unknown."""
    if worker is None or worker["silent_s"] is None:
        return ""
    parts = [f"in section {worker['section']}"] if worker["section"] else []
    parts.append(f"{duration(worker['silent_s'])} ago")
    return ", ".join([*parts, f"last call {worker['doing']}"] if worker["doing"] else parts)


def _save_facts(job: JobDocument, record: Record) -> Iterator[tuple[str, str]]:
    """Yield names and values: the newest commit, what is on its way, what came to nothing."""
    saves = record.get("saves")
    if saves is None:
        return
    parts = []
    if saves["step"] is not None and saves["committed_at"] is not None:
        age = duration(max(0.0, job.read_at - saves["committed_at"]))
        parts += [f"step {saves['step']} committed {age} ago, in {duration(saves['seconds'])}"]
        parts += [f"{saves['commits']} in all"]
    if (step := saves["saving"]) is not None:
        parts.append(f"step {step} is being written" if job.live else "one was unfinished")
    # The agent of rank 0's node counts for the job.
    nothing = "counted on node 0" if record.get("node_rank") else "none yet"
    yield "saves", ", ".join(parts) or nothing
    if saves["problem"]:
        yield "", saves["problem"]


def store_page(job: StoreJob) -> Page:
    """Return the page of a whole job as its store has it."""
    plan = job.plan
    note = "" if plan is None or plan.round < 0 else f"round {plan.round}"
    if plan is not None and plan.phase == "over":
        note = f"exit code {plan.exit_code}"
    parts: list[Part] = [Title(one_line(job.run_id), Cell(job.state, job.state), note)]
    if cause := tuple(one_line(line) for line in _store_cause(job)):
        parts.append(Paragraph(cause))
    parts.append(fields(_store_facts(job)))
    groups = (job.nodes, (*job.spares, *job.joining))
    return (*parts, *(_store_table(nodes) for nodes in groups if nodes))


def stores_page(jobs: Sequence[StoreJob]) -> Page:
    """Return the page of several jobs in one store."""
    columns = "run~, state, round>, restarts>, world size>, nodes>, reason~"
    return (table(columns, map(_store_row, jobs)),)


def _store_row(job: StoreJob) -> tuple[object, ...]:
    plan, restarts = job.plan, job.restarts
    used = restarts and "/".join(
        str(restarts[k]) for k in ("used", "max") if restarts[k] is not None
    )
    size = plan.world_size if plan and plan.nodes else None
    nodes = None if job.problem else len(job.nodes)
    state = Cell(job.state, job.state)
    return job.run_id, state, _round_of(plan), used, size, nodes, job.reason


def _round_of(plan: Plan | None) -> str:
    return str(plan.round) if plan and plan.round >= 0 else NOTHING


def _store_cause(job: StoreJob) -> Iterator[str]:
    """Yield why the job is in its state, what differs between nodes, which records are refused."""
    if job.stale:
        yield f"the store does not answer, this is what it said last: {job.stale}"
    if job.reason:
        yield job.reason
    # All nodes whose ranks wait say the same of the rank that they wait for.
    notes = (node.record.note for node in job.nodes if node.record is not None)
    if job.live and (note := next(filter(None, notes), "")):
        yield f"attention: {note}"
    plan, timing = job.plan, job.timing
    if job.live and timing is not None and timing["late"] is not None:
        yield f"attention: {verdict.late_text(timing['late'])}"
    if plan and plan.failure and plan.phase in ("ending", "over"):
        yield _which_failed(plan.failure)
        yield from plan.failure.text.splitlines()[:SHOWN_MESSAGE_LINES]
    if plan and plan.notice:
        first, *rest = plan.notice.splitlines()
        yield from (f"warning: {first}", *rest)
    refused = [f"refused the record of {name}: {why}" for name, why in sorted(job.refused.items())]
    yield from refused[:SHOWN_MESSAGE_LINES]
    if more := refused[SHOWN_MESSAGE_LINES:]:
        yield f"refused {len(more)} more"


def _which_failed(failure: WorkerFailure) -> str:
    """Return which worker failed and how."""
    from elaunch.rendezvous import text  # not for the page of one run

    if failure.is_hang or failure.rank < 0 or failure.local_rank < 0:
        return text.failure(failure)
    first = (
        f"rank {failure.rank} (local_rank {failure.local_rank}, pid {failure.pid}) "
        f"on {failure.host or '?'} {how_it_ended(failure.exitcode)}"
    )
    return text.accused(failure.summary, first)


def _store_facts(job: StoreJob) -> Iterator[tuple[str, str]]:
    plan = job.plan
    yield "store", job.place
    if plan is not None:
        yield "round", _round_of(plan)
    if job.restarts is not None:
        yield "restarts", _restarts_text(job.restarts)
    if plan is not None and plan.nodes:
        yield "world size", str(plan.world_size)
    states = Counter(node.state for node in job.nodes)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    besides = ((job.spares, "standing by"), (job.joining, "joining"))
    census = [f"{len(those)} {what}" for those, what in besides if those]
    yield "nodes", "; ".join([f"{len(job.nodes)}: {counts}" if counts else "0", *census])
    if plan is None:
        return
    if plan.failure and plan.phase not in ("ending", "over"):
        yield "last failure", _which_failed(plan.failure)
    if plan.round >= 0:
        yield "resumed", _resumed(plan.round, asdict(plan.checkpoint) if plan.checkpoint else None)
    if plan.master_addr:
        yield "master", host_port(plan.master_addr, plan.master_port)
    if plan.coordinator:
        hosts = {node.name: node.host for node in (*job.nodes, *job.spares, *job.joining)}
        known = hosts.get(plan.coordinator)
        yield "coordinator", f"{plan.coordinator} on {known}" if known else plan.coordinator
    if job.timing is not None:
        yield from verdict.facts_of_job(job.timing)


def _store_table(nodes: Sequence[StoreNode]) -> Table:
    columns = "node>, name, host~, address~, state, ranks, slots>, lease age>, role?, note~"
    return table(columns, map(_node_row, nodes), usual="alive").trimmed()


def _node_row(node: StoreNode) -> tuple[object, ...]:
    ranks = node.ranks and "-".join(dict.fromkeys(map(str, node.ranks)))
    role = "" if node.role == "default" else node.role
    state, age = Cell(node.state, node.state), given(node.age_s, duration)
    what = (node.rank, node.name, node.host, node.addr, state, ranks, node.slots)
    return *what, age, role, node.note
