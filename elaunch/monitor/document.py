"""What ``elaunch status --json`` prints; docs/status.md describes each field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elaunch.monitor.snapshot import RunView, WorkerView
from elaunch.monitor.standing import Standing
from elaunch.record import SCHEMA

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
        "dir": str(standing.run.path),
        "state": standing.state,
        "recorded_state": view.record["state"],
        "reason": standing.reason,
        "agent": {**view.record["agent"], "condition": standing.agent},
        "duration_s": standing.duration_s,
        "read_at": standing.taken_at,
        "workers": [_worker(worker) for worker in view.workers],
        "latest_checkpoint": asdict(view.latest) if view.latest else None,
        "latest_checkpoint_note": view.latest_note,
    }


def list_document(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """Return one object for each run; of an unreadable one all recorded fields are null."""
    return [_listed(standing) for standing in standings]


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
