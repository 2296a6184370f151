"""Plays an agent: makes a run directory, starts sleeping workers, keeps the record, answers.

Run as a process with the number of workers and a JSON object of changes to the record as arguments.
It prints the run directory, then takes lines from stdin, each a JSON object of changes, and answers
each with ``ok``. ``{"silent": true}`` stops it from answering its socket, the end of its stdin ends
it; its workers die with it, however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from elaunch.agent.status.socket import ControlSocket
from elaunch.runs.directory import RunDir, create
from elaunch.runs.identity import WorkerRecord, note_start, this_agent
from elaunch.runs.record import new_worker

WORKER = "import sys; sys.stdin.read()"
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_workers(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that wait for the end of their stdin, and die with this process."""
    return [
        subprocess.Popen(
            [sys.executable, "-S", "-c", WORKER],
            stdin=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        for _ in range(count)
    ]


def started(rank: int, pid: int, now: float) -> WorkerRecord:
    """Return the record of a worker that has started."""
    worker = new_worker(rank, rank)
    worker["state"] = "RUNNING"
    note_start(worker, pid, now)
    return worker


def new_record(run: RunDir, run_id: str, pids: list[int]) -> dict[str, Any]:
    """Return the record of a run whose workers have these pids."""
    now = time.time()
    return {
        "schema": 1,
        "run_id": run_id,
        "name": "train",
        "dir": str(run.path),
        "state": "RUNNING",
        "reason": None,
        "agent": this_agent(),
        "started_at": now,
        "ended_at": None,
        "round": 0,
        "restarts": {"used": 0, "without_progress": 0, "max": 3, "budget": "progress"},
        "world_size": len(pids),
        "nproc_per_node": len(pids),
        "entrypoint": "train.py",
        "argv": ["/bin/elaunch", "run", "--nproc-per-node", "2", "train.py", "--name", "a b"],
        "cwd": os.getcwd(),
        "start_method": "forkserver",
        "interpreter": sys.executable,
        "workers": [started(rank, pid, now) for rank, pid in enumerate(pids)],
        "checkpoint_dir": None,
        "checkpoint_glob": None,
        "checkpoint": None,
        "exit_code": None,
        "failure": None,
        "log_dir": str(run.logs),
        "history": [
            {
                "round": 0,
                "reason": None,
                "started_at": now,
                "ended_at": None,
                "recovery_s": None,
                "resumed_step": None,
            }
        ],
    }


def main() -> None:
    """Play the agent until stdin ends."""
    workers, changes = start_workers(int(sys.argv[1])), json.loads(sys.argv[2])
    run_id = changes.pop("run_id", "train-3fa2c1")
    run = create(run_id, os.environ)
    record = new_record(run, run_id, [worker.pid for worker in workers]) | changes
    silent = threading.Event()

    def snapshot() -> dict[str, Any]:
        while silent.is_set():
            time.sleep(60)
        return dict(record)

    run.write_state(record)
    control = ControlSocket(run.socket, snapshot)
    control.start()
    print(run.path, flush=True)
    for line in sys.stdin:
        changes = json.loads(line)
        if changes.pop("silent", False):
            silent.set()
        record = record | changes
        run.write_state(record)
        print("ok", flush=True)
    control.close()
    for worker in workers:
        worker.kill()
        worker.wait()


if __name__ == "__main__":
    main()
