"""The protocol of every store: it holds one agent's plan, and all members' entries.

==========  ===========================================================  ===========================
part        who writes                                                   who reads
==========  ===========================================================  ===========================
plan        the coordinator: posts with versions 1, 2, 3, …              every agent, by waiting
members     each agent its own entry, for as long as it is alive         the coordinator, by waiting
leadership  one agent at a time holds it; only that one may publish      the agent that is next
shared      one value: the host of a TCPStore, or the first to offer it  every agent, when it comes
==========  ===========================================================  ===========================

That is all that a round needs, and each part costs an agent O(1) operations per round. Nobody
polls: ``follow``, ``changes`` and ``await_leadership`` block until there is news. Liveness is
judged by one clock: an entry that was not renewed for ``ttl`` seconds is gone, by the clock of the
store (etcd) or of the process that hosts it (TCPStore). Two machines' clocks are never compared.

Every method that talks to another machine has a deadline and raises one of

===================  ===========================================================================
StoreUnreachable     nobody answers; ``refused``: the machine is there and the port closed
StoreFull            it answers and takes no more writes
StoreDenied          the store answers and does not let us in (TLS, user, password)
StoreReplaced        another store answers there, without our entry: open it anew
LeaseLost            our own entry is gone: expired or removed; enrol again under a new name
===================  ===========================================================================

The methods may be called from several threads. ``close`` wakes those that block; they then raise
StoreClosed. The implementations are elaunch.store.tcp.client and elaunch.store.etcd.client;
tests/store/test_contract.py holds both, and a store in memory for tests, to this text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class Post:
    """One version of the plan; versions count from 1 for as long as its key exists.

    ``nodes`` is the long part of it, which is the same for many versions; ``key`` is where the post
    is, for messages. Version 0 is what no agent has written: it counts as no plan.
    """

    version: int
    value: bytes
    nodes: bytes = b""
    key: str = field(default="", compare=False)


@dataclass(frozen=True)
class Change:
    """One change of the members: an entry was written (``value``), or it is gone (None).

    ``cause`` is "put", "left" (withdrawn) or "expired" (not renewed in time).
    """

    name: str
    value: bytes | None
    cause: Literal["put", "left", "expired"]


@dataclass(frozen=True)
class Lease:
    """One member's entry; ``age`` is the seconds since it was last renewed, if known."""

    value: bytes
    age: float | None


class Store(Protocol):
    """One job's store, as one agent (or one reader) sees it."""

    @property
    def name(self) -> str:
        """Where the store is, for messages: "etcd at h1:2379,h2:2379", "TCPStore at h:29400"."""

    # ── the plan ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, version: int, value: bytes, nodes: bytes = b"") -> bool:
        """Write ``value`` as ``version``; False if that is not the version that comes next.

        Also False when this agent does not lead (any more). ``nodes`` goes with it: an agent that
        has read it with an earlier version does not read it again.
        """

    def latest(self) -> Post | None:
        """Return the newest post, or None if there is none."""

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait until there is a post newer than ``after`` and return the newest; None: timeout."""

    # ── the members ──────────────────────────────────────────────────────────────────────────────

    def enrol(self, name: str, value: bytes, ttl: float) -> None:
        """Write our own entry; it is gone after ``ttl`` seconds without renewal.

        One entry per store object. ``name`` must be new: a name that was gone never comes back.
        """

    def update(self, value: bytes) -> None:
        """Replace the value of our own entry.

        A write whose answer was lost may be applied late, but never over one that came after it.
        """

    def renew(self) -> None:
        """Keep our own entry for another ``ttl`` seconds."""

    def withdraw(self) -> None:
        """Remove our own entry; nothing if there is none."""

    def members(self) -> Mapping[str, Lease]:
        """Return all entries; for readers and for a coordinator that begins."""

    def changes(self, name: str, timeout: float) -> Sequence[Change]:
        """Wait for changes of the members and return them in order; empty: timeout.

        Only the agent that leads as ``name`` may call it; LeaseLost when it leads no more, also in
        a call that waits. The first call of each leadership returns every entry that is there.
        """

    def unsteady_leader(self) -> str:
        """Return who leads, if agents may have been evicted lately, or may be soon; else ""."""

    def evict(self, name: str) -> bool:
        """Remove the entry of ``name``, who must be gone; return whether that may be done.

        It is where entries of agents that are gone may stay for good, and nowhere else. The agent
        may be alive after all, and learns of it with its next renewal.
        """

    # ── leadership ───────────────────────────────────────────────────────────────────────────────

    def await_leadership(self, name: str, timeout: float) -> bool:
        """Wait until we lead, or for ``timeout`` seconds; True when we lead.

        Leadership is lost with our entry, and given up by ``withdraw``.
        """

    # ── what all share ───────────────────────────────────────────────────────────────────────────

    def shared(self, offer: bytes = b"") -> bytes:
        """Return the one value that all agents share, empty if there is none.

        ``offer`` becomes it where there is none, and keeps the value that was to be removed.
        """

    def clear(self) -> None:
        """Have everything that this job wrote removed once nobody can need it (about a minute)."""

    def close(self) -> None:
        """Let go of connections, threads, and whatever is hosted here; wakes waiting calls."""
