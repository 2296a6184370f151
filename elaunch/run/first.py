"""Parts of a record as they are at first, before anything has happened."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from elaunch import proc, shown
from elaunch.errors import RunDirError
from elaunch.run.record import (
    SCHEMA,
    AgentRecord,
    Record,
    RoundRecord,
    WorkerRecord,
    this_agent,
)

KEPT_ROUNDS: Final = 100
"""Rounds in a record, which is written whole at each change; a run may have thousands."""


def first_record(run_id: str, name: str, directory: Path) -> Record:
    """Return the record of a run that this process writes from now on; its state is STARTING."""
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "name": name,
        "dir": str(directory),
        "state": "STARTING",
        "reason": None,
        "agent": this_agent(),
        "started_at": time.time(),
        "ended_at": None,
        "round": 0,
        "restarts": {"used": 0, "without_progress": 0, "max": 0, "budget": "lifetime"},
        "world_size": None,
        "nproc_per_node": None,
        "entrypoint": "",
        "argv": shown.arguments(sys.argv),
        "cwd": os.getcwd(),
        "start_method": "",
        "interpreter": sys.executable,
        "workers": [],
        "checkpoint_dir": None,
        "checkpoint_glob": None,
        "checkpoint": None,
        "exit_code": None,
        "failure": None,
        "log_dir": None,
        "history": [],
    }


def agent_of(pid: int) -> AgentRecord:
    """Return the record's ``agent`` for a process of this user; RunDirError if it is gone."""
    process = proc.read_process(pid)
    if process is None:
        raise RunDirError(f"the process {pid} is gone, or /proc does not show it")
    place = this_agent()  # the same host, boot and user
    return {
        **place,
        "pid": pid,
        "create_time": proc.create_time(process),
        "start_ticks": process.start,
    }


def new_worker(rank: int, local_rank: int) -> WorkerRecord:
    """Return the record of a worker that is about to be started."""
    return {
        "rank": rank,
        "local_rank": local_rank,
        "pid": None,
        "state": "STARTING",
        "exit": None,
        "exit_code": None,
        "started_at": None,
        "ended_at": None,
    }


def add_round(record: Record, begun: RoundRecord) -> None:
    """Append a round; the oldest go once there are more than KEPT_ROUNDS, and are counted."""
    history = record["history"]
    history.append(begun)
    extra = len(history) - KEPT_ROUNDS
    if extra > 0:
        del history[:extra]
        record["rounds_left_out"] = record.get("rounds_left_out", 0) + extra


def new_round(round: int, reason: str | None, resumed_step: int | None = None) -> RoundRecord:
    """Return the record of a round that begins now."""
    return {
        "round": round,
        "reason": reason,
        "started_at": time.time(),
        "ended_at": None,
        "recovery_s": None,
        "resumed_step": resumed_step,
    }
