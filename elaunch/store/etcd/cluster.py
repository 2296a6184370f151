"""One etcd: its members, the keys of a job there, and how far it has come by what it has answered.

An etcd that lost its memory goes back (`RevisionHistory`). A linearizable read and a write are
answered with a revision that is no older than any that was known when they were asked for. An etcd
that was wiped begins at 1 again, one that was restored from a snapshot at what it had then; either
may have the cluster id of before, or another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from elaunch.text import host_port


@dataclass(frozen=True)
class EtcdCluster:
    """One etcd: its members' client addresses, the prefix of our keys, how to get in.

    ``cacert`` means TLS; ``cert`` and ``key`` are our own, if etcd asks for one. ``call_timeout``
    is how many seconds one member has for one answer, ``agents`` how many the job has at most.
    """

    endpoints: tuple[tuple[str, int], ...] = ()
    prefix: str = "/elaunch"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    call_timeout: float = 1.0
    agents: int = 1

    @property
    def look_period(self) -> float:
        """Seconds after which an agent that waits looks again whether etcd lets it in.

        The more agents, the longer: all of them together look once a second.
        """
        return max(5.0, self.agents)

    @property
    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of each endpoint, IPv6 in brackets; also what gRPC calls a target."""
        return tuple(host_port(host, port) for host, port in self.endpoints)

    def __str__(self) -> str:
        """Return it for messages: ``etcd at h1:2379,h2:2379``."""
        return f"etcd at {','.join(self.addresses)}"


@dataclass(frozen=True)
class Keys:
    """The keys of one job."""

    root: str

    @property
    def plan(self) -> bytes:
        """The coordinator's plan."""
        return f"{self.root}board".encode()

    @property
    def nodes(self) -> bytes:
        """The plan's nodes; the key begins with that of the plan, to be read with it."""
        return self.plan + b"/nodes"

    @property
    def shared(self) -> bytes:
        """The key of what all agents share."""
        return f"{self.root}shared".encode()

    @property
    def agents(self) -> bytes:
        """The prefix of all agents' keys."""
        return f"{self.root}agents/".encode()

    @property
    def candidates(self) -> bytes:
        """The prefix of the keys of agents that lead or want to."""
        return f"{self.root}lead/".encode()

    def agent(self, name: str) -> bytes:
        """Return the key of one agent's record."""
        return self.agents + quote(name, safe="").encode()

    def candidate(self, name: str) -> bytes:
        """Return the key with which one agent is in line for leadership."""
        return self.candidates + quote(name, safe="").encode()

    def name_of(self, key: bytes, prefix: bytes = b"") -> str:
        """Return whose record is at ``key``, or whose key with another ``prefix`` it is."""
        return unquote(key[len(prefix or self.agents) :].decode())


def every_job(prefix: str) -> bytes:
    """Return what the keys of all jobs begin with."""
    return f"{prefix.rstrip('/')}/".encode()


def keys_of(prefix: str, run_id: str) -> Keys:
    """Return the keys of the job ``run_id``."""
    return Keys(f"{every_job(prefix).decode()}{quote(run_id, safe='')}/")


def run_id_of(prefix: str, key: bytes) -> str:
    """Return which job ``key`` belongs to."""
    return unquote(key[len(every_job(prefix)) :].decode().partition("/")[0])


def end_of(start: bytes) -> bytes:
    """Return the first key after all that begin with ``start``, whose last byte is below 255."""
    return start[:-1] + bytes([start[-1] + 1])


class RevisionHistory:
    """How far the etcd has come whose answers one agent has read, over all of its connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cluster = 0
        self._revision = 0

    @property
    def revision(self) -> int:
        """The newest revision that is known; no answer to a later question may be older."""
        return self._revision

    def reached(self, revision: int) -> None:
        """Note that a revision exists."""
        with self._lock:
            self._revision = max(self._revision, revision)

    def continues(self, header: Any, known: int) -> str:
        """Note an answer, and return in which way it does not continue what was read before.

        Args:
            header: of the answer to a linearizable read or a write.
            known: ``revision`` when it was asked for.
        """
        cluster, revision = int(header.cluster_id), int(header.revision)
        with self._lock:
            problem = ""
            if self._cluster not in (0, cluster):
                problem = f"its cluster is {cluster:x} and was {self._cluster:x}"
            elif revision < known:
                problem = f"its revision is {revision} and was {known}"
            self._cluster = cluster
            self._revision = revision if problem else max(self._revision, revision)
        return problem
