"""Ranks for tests of their calls: threads of the test, or processes, around a real TCPStore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaunch.training.launch import Placement
from elaunch.training.ranks import RankCalls
from elaunch.training.stores.roundstore import RoundStore
from elaunch.wire.progress import ProgressPage
from tests import warm

ROOT = Path(__file__).parents[2]
PATIENCE = 100.0
"""Seconds that ranks have for what must succeed: the machine may be busy."""


class StoreHost:
    """A TCPStore as a launcher hosts it; ``job()`` names a new job in it."""

    def __init__(self, libuv: bool = True) -> None:
        from torch.distributed import TCPStore

        where = ("127.0.0.1", 0)
        self.store = TCPStore(*where, is_master=True, wait_for_workers=False, use_libuv=libuv)
        self.port: int = self.store.port

    def place(
        self, rank: int, size: int, local_size: int | None = None, job: str = ""
    ) -> Placement:
        """Return the place of a rank among equal nodes on this machine."""
        local = local_size or size
        return Placement(
            launcher="explicit",
            rank=rank,
            size=size,
            local_rank=rank % local,
            local_size=local,
            cross_rank=rank // local,
            cross_size=size // local,
            store=("127.0.0.1", self.port) if size > 1 else None,
            hosts_store=False,
            scope=f"{job or 'job'}/0",
            run_id=job or "job",
            round=0,
            addr="127.0.0.1",
            secret=b"a secret of the job's",
        )


@dataclass
class Outcome:
    """What each rank's work returned or raised, by rank."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    def all(self) -> list[Any]:
        """Return the values in the order of the ranks; raise the first error if there is one."""
        for error in self.errors.values():
            raise error
        return [self.values[rank] for rank in sorted(self.values)]


def in_threads(ranks: range, work: Callable[[int], Any]) -> Outcome:
    """Run ``work(rank)`` in a thread each, to the end of all."""
    outcome = Outcome()

    def run(rank: int) -> None:
        try:
            outcome.values[rank] = work(rank)
        except BaseException as error:  # what a rank raises is what the test looks at
            outcome.errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 2 * PATIENCE
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        assert not thread.is_alive(), f"a rank hangs; the others: {outcome}"
    return outcome


class Ranks:
    """Opens the calls of one job, each on a machine of its node or all on this one."""

    def __init__(self, host: StoreHost, size: int, local_size: int | None, machines: bool) -> None:
        self.size = size
        self._host, self._local_size, self._machines = host, local_size, machines
        self._job = uuid.uuid4().hex

    @contextmanager
    def calls(self, rank: int, **changes: Any) -> Iterator[RankCalls]:
        """Open the calls of ``rank``; ``changes``: of its placement."""
        place = self._host.place(rank, self.size, self._local_size, self._job)._replace(**changes)
        machine = f"machine {place.cross_rank}" if self._machines else ""
        page, store = ProgressPage(), RoundStore(place)
        made = RankCalls(place, store, page, machine)
        try:
            made.open(time.monotonic() + PATIENCE)
            yield made
        finally:
            made.close()
            store.close()
            page.close()

    def run(self, work: Callable[[RankCalls, int], Any], ranks: range | None = None) -> Outcome:
        """Run ``work(calls, rank)`` on every rank in a thread each."""

        def rank_work(rank: int) -> Any:
            with self.calls(rank) as calls:
                return work(calls, rank)

        return in_threads(ranks or range(self.size), rank_work)


SCRIPT_HEAD = """
import os, signal, sys, threading, time
from elaunch import CollectiveError, CollectiveTimeout, ContextError, DistributedContext, PeerLost
from elaunch.training.launch import current
ctx = DistributedContext.of(current(os.environ))
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Processes:
    """Ranks of one node as processes that run a script; ``close`` ends what still runs.

    They are forked from a process that has torch (tests/warm.py) unless they are ``executed``.
    """

    def __init__(
        self, host: StoreHost, size: int, script: str, job: str = "", *, executed: bool = False
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        job = job or uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELAUNCH_", "TORCH"))}
        kept |= {"ELAUNCH_RUN_ID": job, "ELAUNCH_ROUND": "0", "PYTHONPATH": str(ROOT)}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(host.port)}
        kept |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        kept |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        start: Any = subprocess.Popen if executed else warm.Popen
        for rank in range(size):
            self.processes.append(
                start(
                    [sys.executable, "-c", SCRIPT_HEAD + script],
                    env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def line(self, rank: int) -> str:
        """Return the next line of a rank; blocks."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().rstrip("\n")

    def ends(self, rank: int) -> tuple[int, str, str]:
        """Return exit code and the rest of stdout and stderr of a rank, once it has ended."""
        process = self.processes[rank]
        out, err = process.communicate(timeout=2 * PATIENCE)
        return process.returncode, out, err

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        self.processes[rank].send_signal(number)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=PATIENCE)
