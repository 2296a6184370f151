"""Where an etcd is and how to get into it, and the keys that a job has there.

======================================  ==========================  ================================
key                                     value                       lives
======================================  ==========================  ================================
``<prefix>/<run id>/board``             version, newline, the post  until a minute after ``clear``
``<prefix>/<run id>/board/nodes``       the nodes of the post       as long as the plan
``<prefix>/<run id>/shared``            what all agents share       as long as the plan
``<prefix>/<run id>/agents/<name>``     the agent's record          as long as the agent's lease
``<prefix>/<run id>/lead/<name>``       empty                       as long as the agent's lease
======================================  ==========================  ================================

Run ids and names are percent-encoded, so that a slash in one of them begins no other key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from elaunch.text import host_port


@dataclass(frozen=True)
class EtcdCluster:
    """One etcd: its members' client addresses, the prefix of our keys, how to get in.

    ``cacert`` means TLS; ``cert`` and ``key`` are our own, if etcd asks for one. ``call_timeout``
    is how many seconds one member has for one answer.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str = "/elaunch"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    call_timeout: float = 1.0

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
        """What all agents share."""
        return f"{self.root}shared".encode()

    @property
    def agents(self) -> bytes:
        """What the keys of all agents begin with."""
        return f"{self.root}agents/".encode()

    @property
    def candidates(self) -> bytes:
        """What the keys of all agents begin with that lead or want to."""
        return f"{self.root}lead/".encode()

    def agent(self, name: str) -> bytes:
        """Return the key of one agent's record."""
        return self.agents + quote(name, safe="").encode()

    def candidate(self, name: str) -> bytes:
        """Return the key with which one agent is in line for leadership."""
        return self.candidates + quote(name, safe="").encode()

    def name_of(self, key: bytes) -> str:
        """Return whose record is at ``key``."""
        return unquote(key[len(self.agents) :].decode())


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
