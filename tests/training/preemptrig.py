"""Ranks with a PreemptContext that are threads of one process, around a real TCPStore."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elaunch.training.agentlink import AgentLink
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import Placement
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.wire.progress import ProgressPage
from tests import warm

LONG = 100.0
"""Seconds that anything may take on a busy machine."""
_HOST = """
import signal, socket
from torch import __version__
from torch.distributed import TCPStore
from elaunch.store.tcp import wire
# Of IPv4, as the agent's: the addresses of its peers are then looked up in /etc/hosts.
listening = socket.create_server(("127.0.0.1", 0), backlog=100)
port = listening.getsockname()[1]
store = TCPStore(
    *("127.0.0.1", port, None, True),
    wait_for_workers=False,
    master_listen_fd=listening.detach(),
    use_libuv=wire.is_served_by(__version__),
)
print(port, flush=True)
signal.pause()
"""


class StoreHost:
    """A process that hosts a TCPStore, as torchrun's and elaunch's agents do."""

    def __init__(self) -> None:
        argv = [sys.executable, "-c", _HOST]
        self.process = warm.Popen(argv, os.environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate(timeout=LONG)


def place(rank: int, size: int, port: int, scope: str, hosts: bool = False) -> Placement:
    """Return a rank's place on the one node of a job."""
    store = ("127.0.0.1", port) if size > 1 else None
    return Placement(
        "torchrun", rank, size, rank, size, 0, 1, store, hosts, scope, "job", 0, "127.0.0.1", None
    )


@dataclass
class Rank:
    """One rank that is a thread."""

    distributed: DistributedContext
    page: ProgressPage
    preempt: PreemptContext
    link: AgentLink | None = None

    @property
    def number(self) -> int:
        """Its rank."""
        return self.distributed.rank

    def close(self) -> None:
        """Close all, in the order in which elaunch.init()'s context does."""
        self.preempt.close()
        self.distributed.close()
        if self.link is not None:
            self.link.close()
        self.page.close()


def open_rank(
    placement: Placement, link: Callable[[ProgressPage], AgentLink] | None = None
) -> Rank:
    """Open one rank; all ranks together, so each in a thread of its own."""
    page = ProgressPage()
    distributed = DistributedContext.of(placement)
    distributed.open(page, LONG)
    made = None if link is None else link(page)
    preempt = PreemptContext(distributed, page, made)
    preempt.start()
    return Rank(distributed, page, preempt, made)


def together(size: int, script: Callable[[int], Any]) -> list[Any]:
    """Run ``script(rank)`` in a thread per rank; return what they return, or raise as the first."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(script, rank) for rank in range(size)]
        return [future.result(LONG) for future in futures]


@contextmanager
def ranks(size: int, port: int, scope: str, hosts: bool = False) -> Iterator[list[Rank]]:
    """Open the ranks of a job, and close them together."""
    opened = together(size, lambda rank: open_rank(place(rank, size, port, scope, hosts)))
    try:
        yield opened
    finally:
        together(size, lambda rank: opened[rank].close())
