"""The document that ``elaunch status --json`` prints; docs/status.md describes each field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from elaunch.monitor.snapshot import RunView, WorkerView
from elaunch.monitor.standing import Standing
from elaunch.runs.record import SCHEMA

if TYPE_CHECKING:
    from elaunch.monitor.jobview import JobView, NodeView

JOB_SCHEMA: Final = 1

_LISTED = (
    "name",
    "round",
    "restarts",
    "world_size",
    "started_at",
    "ended_at",
    "entrypoint",
    "exit_code",
)


def run_document(view: RunView) -> dict[str, Any]:
    """Return one run: its record, with the state as seen now and what was measured."""
    standing = view.standing
    return {
        **view.record,
        **({} if view.awaited is None else {"awaited": view.awaited}),
        "restarts": view.restarts,
        "dir": str(standing.run.path),
        "state": standing.state,
        "recorded_state": view.record["state"],
        "reason": standing.reason,
        "agent": {**view.record["agent"], "condition": standing.agent},
        "duration_s": standing.duration_s,
        "read_at": standing.taken_at,
        "written_at": standing.written_at,
        "history": [
            {**entry, "duration_s": standing.round_s(entry)} for entry in view.record["history"]
        ],
        "workers": [_worker(worker) for worker in view.workers],
        "other_nodes": [
            {
                "node": node.node,
                "host": node.host,
                "age_s": None if node.age_s is None else round(node.age_s, 3),
                "problem": node.problem or None,
                "workers": [_worker(worker) for worker in node.workers],
                "progress": list(node.progress),
            }
            for node in view.others
        ],
        "latest_checkpoint": asdict(view.latest) if view.latest else None,
        "latest_checkpoint_note": view.latest_note,
    }


def list_document(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """Return one object for each run; of an unreadable one all recorded fields are null."""
    return [_listed(standing) for standing in standings]


def job_document(view: JobView) -> dict[str, Any]:
    """Return a whole job as its store has it; of an unreadable one the plan's fields are null."""
    from msgspec import structs  # what tells of one run is quicker there without it

    from elaunch.rendezvous.times import to_record

    plan = view.plan
    return {
        "schema": JOB_SCHEMA,
        "run_id": view.run_id,
        "place": view.place,
        "state": view.state,
        "phase": view.phase,
        "reason": view.reason,
        "cause": plan.cause if plan else None,
        "job": plan.job if plan else None,
        "version": view.version,
        "round": plan.round if plan else None,
        "world_size": plan.world_size if plan else None,
        "restarts": asdict(view.restarts) if view.restarts else None,
        "checkpoint": structs.asdict(plan.checkpoint) if plan and plan.checkpoint else None,
        "failure": structs.asdict(plan.failure) if plan and plan.failure else None,
        "notice": plan.notice if plan else None,
        "exit_code": plan.exit_code if plan else None,
        "coordinator": plan.coordinator if plan else None,
        "master_addr": plan.master_addr if plan else None,
        "master_port": plan.master_port if plan else None,
        "job_timing": to_record(view.times) if view.times else None,
        "nodes": [_node(node) for node in view.nodes],
        "spares": [_node(node) for node in view.spares],
        "joining": [_node(node) for node in view.joining],
        "refused": [{"name": name, "problem": problem} for name, problem in view.refused],
        "stale": view.stale or None,
        "read_at": view.read_at,
    }


def jobs_document(views: Sequence[JobView]) -> list[dict[str, Any]]:
    """Return one object for each job."""
    return [job_document(view) for view in views]


def _node(node: NodeView) -> dict[str, Any]:
    record = node.record
    return {
        "name": node.name,
        "host": node.host,
        "addr": node.addr,
        "slots": node.slots,
        "role": node.role,
        "state": node.state,
        "node_rank": node.rank,
        "first_rank": node.ranks[0] if node.ranks else None,
        "last_rank": node.ranks[1] if node.ranks else None,
        "lease_age_s": None if node.age_s is None else round(node.age_s, 3),
        "agent_state": record.state if record else None,
        "agent_round": record.round if record else None,
        "hint": record.hint if record else None,
        "note": node.note or None,
    }


def _listed(standing: Standing) -> dict[str, Any]:
    record = standing.record
    known: dict[str, Any] = {name: record[name] if record else None for name in _LISTED}  # type: ignore[literal-required]
    return {
        "schema": SCHEMA,
        "run_id": record["run_id"] if record else standing.run.path.name,
        "dir": str(standing.run.path),
        "state": standing.state,
        "recorded_state": record["state"] if record else None,
        "reason": standing.reason,
        "agent": {**record["agent"], "condition": standing.agent} if record else None,
        "duration_s": standing.duration_s,
        "read_at": standing.taken_at,
        "written_at": standing.written_at,
        **known,
    }


def _worker(worker: WorkerView) -> dict[str, Any]:
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
