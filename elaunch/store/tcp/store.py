"""One agent's view of the store that one of them hosts: over a connection, or in its own memory."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence

from elaunch.errors import LeaseLost, StoreClosed
from elaunch.store.protocol import Change, Lease, Post
from elaunch.store.tcp.agentconnection import AgentConnection
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.messages import (
    LONGEST_ENTRY,
    TTL,
    EnrolEntry,
    PutEntry,
    ReadMembers,
    ReadShared,
    RenewEntry,
    WithdrawEntry,
    is_name,
)
from elaunch.store.tcp.server import TcpServer


class TcpStore:
    """One agent's store.

    Args:
        name: where it is, for messages.
        job: what it holds: here, or over a connection.
        server: what serves it, if it is hosted here; it ends with this object.
    """

    def __init__(
        self, name: str, job: HostedJob | AgentConnection, server: TcpServer | None = None
    ) -> None:
        self._place, self._job, self._server = name, job, server
        self._hosted = job if isinstance(job, HostedJob) else None
        self._owner = secrets.token_bytes(8)
        self._entry: str | None = None
        self._closed = threading.Event()

    @property
    def name(self) -> str:
        """Where the store is, for messages."""
        return self._place

    def publish(self, version: int, value: bytes, nodes: bytes = b"") -> bool:
        """Write the next version of the plan; False without leadership or with another version."""
        return self._hosted is not None and self._hosted.publish(version, value, nodes)

    def latest(self) -> Post | None:
        """Return the newest post, or None."""
        return self._job.latest()

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; None after ``timeout`` seconds."""
        return self._job.follow(after, timeout)

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write our entry; LeaseLost if the name is or was there already.

        An earlier entry of this store is withdrawn.
        """
        if not is_name(name) or not TTL[0] <= ttl <= TTL[1]:
            raise ValueError(f"{name!r} with a ttl of {ttl:g} s cannot be enrolled")
        request = EnrolEntry(name, self._owner, ttl, _fitting(value))
        self.withdraw()
        self._entry = name
        if not self._job.ask(request):
            self._entry = None
            raise LeaseLost(f"the name {name} is or was a member's already")

    def update(self, value: bytes) -> None:
        """Replace the value of our entry; LeaseLost if it is gone."""
        self._keep(PutEntry(self._enrolled(), _fitting(value)))

    def renew(self) -> None:
        """Keep our entry for another ``ttl`` seconds; LeaseLost if it is gone."""
        self._keep(RenewEntry(self._enrolled()))

    def withdraw(self) -> None:
        """Remove our entry; nothing if there is none."""
        if self._closed.is_set():
            raise StoreClosed(f"the connection to the {self.name} was closed")
        entry, self._entry = self._entry, None
        if entry is not None:
            self._job.ask(WithdrawEntry(entry))

    def unsteady_leader(self) -> str:
        """Return "": the host judges entries by its clock."""
        return ""

    def evict(self, name: str) -> bool:
        """Return False: entries of agents that are gone expire."""
        return False

    def members(self) -> Mapping[str, Lease]:
        """Return all entries with their ages."""
        found: dict[str, tuple[float, bytes]] = self._job.ask(ReadMembers())
        return {name: Lease(value, age) for name, (age, value) in found.items()}

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes of the members; the first call returns all. Only the host can."""
        if self._hosted is None:
            raise LeaseLost(f"only the agent that hosts the {self.name} can lead")
        return self._hosted.changes(name, timeout)

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we lead; an agent that does not host waits ``timeout`` in vain."""
        self._enrolled()
        if self._hosted is not None:
            self._hosted.lead(name)
            return True
        if self._closed.wait(max(0.0, timeout)):
            raise StoreClosed(f"the connection to the {self.name} was closed")
        return False

    def shared(self, offer: bytes = b"") -> bytes:
        """Return the value that all share; ``offer`` becomes it where there is none."""
        found: bytes = self._job.ask(ReadShared(offer))
        return found

    def clear(self) -> None:
        """Do nothing: what the job wrote goes with the process that hosts it."""

    def prove(self, key: bytes | None) -> None:
        """Use the agents' secret, which was read from this store; the host has it already."""
        if isinstance(self._job, AgentConnection):
            self._job.prove(key)

    def close(self) -> None:
        """Close the connection, or end the store itself if it is hosted here."""
        self._closed.set()
        self._job.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _enrolled(self) -> str:
        if self._entry is None:
            raise LeaseLost("this agent is no member")
        return self._entry

    def _keep(self, request: PutEntry | RenewEntry) -> None:
        if not self._job.ask(request):
            raise LeaseLost(f"{request.name} is no member any more")


def _fitting(value: bytes) -> bytes:
    if len(value) > LONGEST_ENTRY:
        raise ValueError(
            f"an entry of {len(value)} bytes is more than an entry may have ({LONGEST_ENTRY})"
        )
    return value
