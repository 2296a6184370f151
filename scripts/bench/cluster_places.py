"""How the agents of one job are called in each column of the table, and where they meet."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cluster_etcd
import launchers
from cluster_figures import C10D, ETCD, TORCHRUN, TORCHRUN_FRESH
from job import POLL, Job, JobError
from procfs import free_port

HOST = "127.0.0.1"
HOST_SECONDS = 30.0

PROGRAMS = {
    TORCHRUN: launchers.TORCHRUN,
    TORCHRUN_FRESH: launchers.TORCHRUN,
    C10D: launchers.ELAUNCH,
    ETCD: launchers.ELAUNCH,
}


@dataclass(frozen=True)
class Place:
    """Where the agents of one job meet, and what each of them is started with."""

    words: tuple[str, ...]
    endpoint: str
    environment: Mapping[str, str] = field(default_factory=dict)
    etcd: cluster_etcd.Etcd | None = None

    def agent(
        self, root: Path, nodes: str, job: str, stamps: Path | None = None, args: Sequence[str] = ()
    ) -> Job:
        """Return one agent with one worker, not started yet.

        Args:
            root: of the bench.
            nodes: ``--nnodes``.
            job: script in jobs/.
            stamps: where its workers report, if not in its own directory.
            args: more flags of the launcher.
        """
        script = str(launchers.JOBS / f"{job}.py")
        command = [*self.words, "--nnodes", nodes, "--nproc-per-node", "1", *args, script]
        extra = {} if stamps is None else {"BENCH_DIR": str(stamps)}
        return Job(root, command, {**self.environment, **extra})

    def leader(self) -> cluster_etcd.Member:
        """Return the member of etcd that leads; raises JobError if this is no etcd."""
        if self.etcd is None:
            raise JobError(f"{self.endpoint} is no etcd")
        return self.etcd.leader()

    def await_host(self, job: Job) -> None:
        """Wait until the agent that hosts the store listens, so that the next one does not.

        Raises:
            JobError: it ended, or does not listen after 30 s.
        """
        if self.etcd is not None:
            return
        host, _, port = self.endpoint.partition(":")
        until = time.monotonic() + HOST_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), 1.0).close()
                return
            if job.process.poll() is not None or time.monotonic() > until:
                raise job.error("the store's host does not listen")
            time.sleep(POLL)


@contextlib.contextmanager
def place(column: str, root: Path, members: int = 1) -> Iterator[Place]:
    """Return a place for one job: a free port, or a new etcd of ``members`` members.

    Raises:
        JobError: etcd does not start.
    """
    launcher = launchers.find(PROGRAMS[column])
    with contextlib.ExitStack() as stack:
        started = None
        if column == ETCD:
            directory = root / f"etcd-{secrets.token_hex(4)}"
            started = stack.enter_context(cluster_etcd.etcd(directory, members))
        endpoint = started.endpoints if started else f"{HOST}:{free_port(HOST)}"
        words = [launcher.program, *(["run"] if launcher.name == launchers.ELAUNCH else [])]
        words += ["--rdzv-backend", "etcd" if started else "c10d", "--rdzv-endpoint", endpoint]
        words += ["--rdzv-id", f"bench-{secrets.token_hex(4)}", "--local-addr", HOST]
        fresh = launchers.FRESH_STORE if column == TORCHRUN_FRESH else {}
        yield Place((*words, "--max-restarts", "3"), endpoint, fresh, started)
