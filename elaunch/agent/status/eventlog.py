"""``--event-log-handler``: torch's events of a run, one JSON object per line on stderr.

``console`` writes lines in the form of ``torch.distributed.elastic.events``, ``null`` (the default)
and ``dynamic_rendezvous`` write nothing, as with torchrun::

    {"name": "torchelastic.worker.status.<STATE>", "source": "AGENT" | "WORKER",
     "timestamp": <milliseconds since 1970>,
     "metadata": {"run_id", "global_rank", "group_rank", "worker_id", "role", "hostname", "state",
                  "total_run_time", "rdzv_backend", "raw_error", "metadata", "agent_restarts",
                  "duration_ms"}}

=================  ======  ======================================================================
state              source  when
=================  ======  ======================================================================
RENDEZVOUS         AGENT   the members of a round are known; with ``duration_ms``
ASSIGN_WORKER_     AGENT   the ranks are known; with ``duration_ms``
RANKS
START              WORKER  the worker was started
SUCCEEDED          both    the worker exited 0; the agent ended as it should
FAILED             both    the worker failed; the agent failed or was ended by a signal
TERMINATED         WORKER  the worker was stopped by the agent
=================  ======  ======================================================================

The inner ``metadata`` is a string of JSON in which the worker's values are lists of one, as torch
writes them. Unlike torchrun's, the timestamp is the true one (torch's is always 0), and
``entry_point`` is the script rather than the interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from elaunch import env
from elaunch.agent.failure import errorfile
from elaunch.agent.patience import bounded
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Finish
from elaunch.agent.policy.state import State
from elaunch.agent.policy.turn import Turn
from elaunch.config import Settings

EventState = Literal[
    "RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "SUCCEEDED", "FAILED", "TERMINATED"
]


Worker = events.WorkerStarted | events.Exit


class EventLog:
    """Writes events for one agent; a stderr that is gone ends the writing, not the agent.

    Args:
        settings: of the job, with the handler: ``console``, ``null`` or ``dynamic_rendezvous``.
        error_file: returns the path of a worker's error record, by round and local rank; None if it
            wrote none.
    """

    def __init__(
        self, settings: Settings, error_file: Callable[[int, int], str | None] = lambda *_: None
    ) -> None:
        self._settings = settings
        self._stream = sys.stderr if settings.event_log_handler == "console" else None
        self._started_at = time.time()
        self._error_file = error_file
        self._place = env.only_node("", 1)

    def see(self, turn: Turn) -> None:
        """Write what the turn means to those who read torch's events."""
        if self._stream is None:
            return
        event, restarts = turn.event, turn.after.restarts
        if isinstance(event, events.WorkerStarted):
            self.record("START", event, restarts=restarts)
        elif isinstance(event, events.Exit):
            self._record_exit(turn.before, event)
        if turn.begun is not None:
            self._place = turn.begun.place
            self.record("RENDEZVOUS", restarts=turn.begun.restarts, duration_ms=0.0)
        elif isinstance(turn.action, Finish):
            self.record("FAILED" if turn.action.exit_code else "SUCCEEDED", restarts=restarts)

    def _record_exit(self, state: State, event: events.Exit) -> None:
        name: EventState = "SUCCEEDED" if event.exitcode == 0 else "FAILED"
        if event in state.stopped:
            name = "TERMINATED"
        path = self._error_file(event.round, event.local_rank)
        left = None
        if path is not None:
            read = partial(errorfile.read, path)
            left = bounded(read, None, f"cannot read {path}", Path(path))
        raw = None if left is None or left.record is None else json.dumps(left.record)
        self.record(name, event, restarts=state.restarts, raw_error=raw)

    def record(
        self,
        state: EventState,
        worker: Worker | None = None,
        *,
        restarts: int = 0,
        duration_ms: float | None = None,
        raw_error: str | None = None,
    ) -> None:
        """Write one event.

        Args:
            state: what happened, see the module's table.
            worker: the worker it happened to; None for the agent itself.
            restarts: how many restarts this agent has made.
            duration_ms: how long it took, where that is known.
            raw_error: the content of the worker's error file, or a traceback of the agent.
        """
        if self._stream is None:
            return
        now = time.time()
        settings = self._settings
        metadata = {
            "run_id": settings.run_id,
            "global_rank": self._place.first_rank + worker.local_rank if worker else None,
            "group_rank": 0,
            "worker_id": str(worker.local_rank) if worker else None,
            "role": settings.role,
            "hostname": os.uname().nodename,
            "state": state,
            "total_run_time": int(now - self._started_at),
            "rdzv_backend": settings.rdzv_backend,
            "raw_error": raw_error,
            "metadata": json.dumps(_inner(settings.entrypoint, worker, self._place)),
            "agent_restarts": restarts,
            "duration_ms": duration_ms,
        }
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": "WORKER" if worker else "AGENT",
            "timestamp": int(now * 1000),
            "metadata": metadata,
        }
        self._write(json.dumps(event) + "\n")

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._stream = None


def _inner(entrypoint: str, worker: Worker | None, place: env.NodePlace) -> dict[str, object]:
    inner: dict[str, object] = {
        "group_world_size": 1,
        "entry_point": entrypoint,
    }
    if worker:
        inner["local_rank"] = [worker.local_rank]
        inner["role_rank"] = [place.first_role_rank + worker.local_rank]
        inner["role_world_size"] = [place.role_world_size]
        code = worker.exitcode if isinstance(worker, events.Exit) else None
        inner["exit_code"] = [code]
        inner["worker_pid"] = [worker.pid]
    return inner
