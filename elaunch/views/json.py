"""Jobs as JSON: ``elaunch status --json`` (docs/status-json.md), and what a screen shows of a run.

A screen's document has the workers as rows (WORKER_FIELDS), since there may be thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from elaunch.runs import verdict
from elaunch.runs.job import BAD, JobDocument, WorkerSeen
from elaunch.runs.record import SCHEMA
from elaunch.views.attention import attention

if TYPE_CHECKING:
    from elaunch.views.store import StoreJob, StoreNode

JOB_SCHEMA: Final = 1
WORKER_FIELDS: Final = (
    *("rank", "local_rank", "state", "step", "doing", "silent_s"),
    *("cpu_percent", "rss_bytes", "pid", "exit"),
)
_LISTED: Final = (
    *("name", "round", "restarts", "world_size", "started_at", "ended_at", "entrypoint"),
    "exit_code",
)
_OF_STORE: Final = ("run_id", "place", "state", "phase", "reason", "version")
_OF_NODE: Final = ("name", "host", "addr", "slots", "role", "state")


def _seen(job: JobDocument) -> dict[str, Any]:
    """Return what is seen of any run; of an unreadable one all recorded fields are null."""
    record = job.record
    return {
        "dir": str(job.run.path),
        "state": job.state,
        "recorded_state": record["state"] if record else None,
        "reason": job.reason,
        "agent": {**record["agent"], "condition": job.agent} if record else None,
        "duration_s": job.duration_s,
        "read_at": job.read_at,
        "written_at": job.written_at,
    }


def one_run(job: JobDocument) -> dict[str, Any]:
    """Return one run: its record, with the state as seen now and what was measured."""
    record = job.known
    return {
        **record,
        **({} if job.awaited is None else {"awaited": job.awaited}),
        **_seen(job),
        "restarts": job.restarts,
        "history": [{**one, "duration_s": job.round_s(one)} for one in record["history"]],
        "workers": [_worker(worker) for worker in job.workers],
        "other_nodes": [
            {
                "node": node.number,
                "host": node.host,
                "age_s": None if node.age_s is None else round(node.age_s, 3),
                "problem": node.problem or None,
                "workers": [_worker(worker) for worker in node.workers],
                "progress": [one.progress for one in node.workers if one.progress],
            }
            for node in job.others
        ],
        "latest_checkpoint": structs.asdict(job.latest) if job.latest else None,
        "latest_checkpoint_note": job.latest_note,
    }


def listed(jobs: Sequence[JobDocument]) -> list[dict[str, Any]]:
    """Return one object for each run."""
    return [
        {"schema": SCHEMA, "run_id": job.run_id}
        | _seen(job)
        | {name: job.record[name] if job.record else None for name in _LISTED}
        for job in jobs
    ]


def screen(job: JobDocument) -> dict[str, Any]:
    """Return what the dashboard shows of a run; of one that cannot be read only that."""
    shown = {
        "key": job.run.path.name,
        "live": job.live,
        "bad": job.state in BAD,
        "attention": list(attention(job)),
    }
    if job.record is None:
        seen = {"dir": str(job.run.path), "state": job.state, "read_at": job.read_at}
        return {
            "run_id": job.run_id,
            "reason": job.reason or "nothing can be read",
            **seen,
            **shown,
        }
    found = one_run(job)
    del found["failure"], found["other_nodes"]
    rows = (row(worker) for worker in job.everyone)
    progress = found.get("progress")
    return {
        **found,
        **shown,
        "progress": progress and {key: progress[key] for key in progress if key != "workers"},
        "worker_fields": WORKER_FIELDS,
        "workers": [[one.get(name) for name in WORKER_FIELDS] for one in rows],
        "grid": [
            {"node": node.number}
            | {name: getattr(node, name) for name in ("host", "first", "slots", "here", "note")}
            for node in job.nodes
        ],
        "failures": job.failures,
        "time_classes": verdict.classes(job.record),
        "verdict": list(verdict.facts(job.record, current=job.written_at is None)),
    }


def tree(job: JobDocument) -> dict[str, Any]:
    """Return what ``elaunch top --json`` prints: nodes and ranks, the worst first."""
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
            for node in job.judged
        ],
    }


def row(worker: WorkerSeen) -> dict[str, Any]:
    """Return a worker with its progress."""
    nothing = {"step": None, "doing": "", "silent_s": None}
    return {**nothing, **(worker.progress or {}), **_worker(worker)}


def store_job(job: StoreJob) -> dict[str, Any]:
    """Return a whole job as its store has it; of an unreadable one the plan's fields are null."""
    plan = job.plan
    same = ("cause", "job", "round", "world_size", "notice", "exit_code", "coordinator")
    return {
        "schema": JOB_SCHEMA,
        **{name: getattr(job, name) for name in _OF_STORE},
        **{name: getattr(plan, name, None) for name in (*same, "master_addr", "master_port")},
        "restarts": job.restarts,
        "checkpoint": structs.asdict(plan.checkpoint) if plan and plan.checkpoint else None,
        "failure": structs.asdict(plan.failure) if plan and plan.failure else None,
        "job_timing": job.timing,
        "nodes": [_node(node) for node in job.nodes],
        "spares": [_node(node) for node in job.spares],
        "joining": [_node(node) for node in job.joining],
        "refused": [{"name": name, "problem": why} for name, why in sorted(job.refused.items())],
        "stale": job.stale or None,
        "read_at": job.read_at,
    }


def _node(node: StoreNode) -> dict[str, Any]:
    record = node.record
    return {
        **{name: getattr(node, name) for name in _OF_NODE},
        "node_rank": node.rank,
        "first_rank": node.ranks[0] if node.ranks else None,
        "last_rank": node.ranks[1] if node.ranks else None,
        "lease_age_s": None if node.age_s is None else round(node.age_s, 3),
        "agent_state": record.state if record else None,
        "agent_round": record.round if record else None,
        "hint": record.hint if record else None,
        "note": node.note or None,
    }


def _worker(worker: WorkerSeen) -> dict[str, Any]:
    used = worker.usage
    return {
        **worker.record,
        "state": worker.state,
        "cpu_percent": round(used.cpu_percent, 1) if used else None,
        "rss_bytes": used.rss if used else None,
        "threads": used.threads if used else None,
        "tree_cpu_percent": round(used.tree_cpu_percent, 1) if used else None,
        "tree_rss_bytes": used.tree_rss if used else None,
    }
