"""Workers that answer as torch's server in them does, on real sockets of a run's directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elaunch.agent.hangs.recorders import STACKS, TRACE
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.wire.local import listen
from elaunch.wire.recorder import groups_path, socket_path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
NOT_THERE = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
SECONDS = 30.0


def call(number: int, since: float, waits: bool) -> dict[str, Any]:
    """Return a collective as torch records it, entered ``since`` seconds ago."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[1]],
        "input_dtypes": ["Float"],
        "time_created_ns": int((time.time() - since) * 1e9),
        "retired": not waits,
    }


class PlayedWorker:
    """The worker of a local rank in a world of ``size``; ``calls`` are its collectives."""

    def __init__(self, run_dir: Path, local_rank: int, size: int, *calls: dict[str, Any]) -> None:
        self.calls = list(calls)
        self.stack = ""
        self.asked: list[bytes] = []
        path = socket_path(run_dir, 0, local_rank)
        groups_path(path).write_text(f'["0", {size}, {local_rank}, []]\n')
        self._listener = listen(path, 64)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as connection, contextlib.suppress(OSError):
                    connection.sendall(self._answer(connection.recv(4096)))

    def _answer(self, request: bytes) -> bytes:
        handler = request.split()[1].rpartition(b"/")[2]
        self.asked.append(handler)
        if handler == TRACE:
            done = {"0": {"last_enqueued_collective": str(len(self.calls))}}
            body = json.dumps({"entries": self.calls, "pg_status": done}).encode()
        elif handler == STACKS:
            body = self.stack.encode()
        else:
            return NOT_THERE
        return HEAD % len(body) + body


class SampledRound:
    """A sampler, and the workers of round 0 on this node; all of them are this process."""

    def __init__(self, run_dir: Path, ranks: int = 2, **settings: Any) -> None:
        self.posted: list[events.Event] = []
        known = {"hang_timeout": None, "rendezvous": None, "start_method": "forkserver"}
        nothing = SimpleNamespace(readings=dict, left=dict)
        group = SimpleNamespace(run_dir=run_dir, server=SimpleNamespace(pid=os.getpid()))
        made: Any = Sampler
        wanted = SimpleNamespace(**{**known, **settings})
        post = self.posted.append
        self.sampler: Sampler = made(wanted, nothing, group, lines=None, post=post)
        self.begun = Round(0, ranks)
        self.run_dir = run_dir

    def begin(self, pids: Mapping[int, int] | None = None) -> None:
        """Have the round begin, with these workers."""
        self.sampler.begin(self.begun)
        for rank in range(self.begun.nproc):
            pid = (pids or {}).get(rank, os.getpid())
            self.hear(events.WorkerStarted(0, rank, pid, 0.0))

    def hear(self, event: events.Event) -> None:
        """Hear of an event as the loop does."""
        turn: Any = SimpleNamespace(event=event)
        self.sampler.workers.see(turn)

    @contextlib.contextmanager
    def running(self) -> Iterator[Sampler]:
        """Have the thread run while the block does."""
        self.sampler.start()
        try:
            yield self.sampler
        finally:
            self.sampler.close()

    def hangs(self) -> list[events.HangSeen]:
        """Return the hangs that were posted."""
        return [one for one in self.posted if isinstance(one, events.HangSeen)]
