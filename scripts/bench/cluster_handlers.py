"""Some agents of a large job under torchrun, in one process: its rendezvous handler, in threads.

The protocol is that of cluster_agents.py, as far as ``running``: all have got their ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from cluster_agents import Task


def connect(task: Task, number: int) -> Any:
    """Return torch's handler for one agent, connected to its store."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=task.endpoint,
        run_id=task.run_id,
        min_nodes=task.of,
        max_nodes=task.of,
        local_addr="127.0.0.1",
        is_host=task.hosts and number == task.first,
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


class Handlers:
    """The agents of this process; tells when the last of them has its rank."""

    def __init__(self, task: Task) -> None:
        self._left = task.agents
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._kept: list[Any] = []  # the stores of the round must outlive the threads
        for number in range(task.first, task.first + task.agents):
            handler = connect(task, number)
            threading.Thread(target=self._join, args=(handler,), daemon=True).start()
        say("ready", time.monotonic())

    def go(self) -> None:
        """Let every agent join."""
        self._gate.set()

    def _join(self, handler: Any) -> None:
        self._gate.wait()
        found = handler.next_rendezvous()
        now = time.monotonic()
        with self._lock:
            self._kept.append(found)
            self._left -= 1
            if self._left == 0:
                say("running", now)


def say(what: str, mono: float) -> None:
    """Write one line for the bench."""
    print(json.dumps({"said": what, "mono": mono, "trouble": {}}), flush=True)


def main() -> None:
    """Obey the bench until it closes our stdin."""
    handlers = Handlers(Task(**json.loads(sys.argv[1])))
    for line in sys.stdin:
        if line.strip() == "go":
            handlers.go()
        elif line.strip() == "report":
            say("report", time.monotonic())
    os._exit(0)


if __name__ == "__main__":
    main()
