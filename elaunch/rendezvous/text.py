"""How nodes and their failures are named, in reasons, errors and status alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from elaunch.endings import how_it_ended
from elaunch.rendezvous.decide.view import Absent
from elaunch.rendezvous.plan import WorkerFailure

MOST_NAMED = 8


class HasPlace(Protocol):
    """A node of a plan, or an agent's record."""

    @property
    def host(self) -> str:
        """The machine's name."""

    @property
    def addr(self) -> str:
        """Its address."""


def node(one: HasPlace) -> str:
    """Return "node2 (10.0.0.2)", or the address alone where that is the name."""
    if not one.host or one.host == one.addr:
        return one.addr or "a node"
    return f"{one.host} ({one.addr})" if one.addr else one.host


def nodes(them: Iterable[HasPlace]) -> str:
    """Return "node1 (10.0.0.1), node2 (10.0.0.2)", at most MOST_NAMED of them."""
    return listed([node(one) for one in them])


def named(them: Sequence[HasPlace]) -> str:
    """Return "node node1 (10.0.0.1)" or "nodes node1 (10.0.0.1), node2 (10.0.0.2)"."""
    return f"{'node' if len(them) == 1 else 'nodes'} {nodes(them)}"


def listed(names: Sequence[str]) -> str:
    """Return the names with commas, at most MOST_NAMED of them, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def count(number: int, word: str = "node") -> str:
    """Return "1 node" or "3 nodes"."""
    return f"1 {word}" if number == 1 else f"{number} {word}s"


def gone(one: HasPlace, absent: Absent | None, heartbeat_timeout: float) -> str:
    """Return how a node went: "node node2 (10.0.0.2) was lost: no heartbeat for 3 s"."""
    if absent is not None and absent.cause == "left":
        why = absent.last.reason if absent.last else ""
        return f"node {node(one)} has left" + (f": {why}" if why else "")
    if absent is not None and absent.cause == "unknown":
        return f"node {node(one)} is gone: it has left, or was lost with the coordinator"
    return f"node {node(one)} was lost: no heartbeat for {heartbeat_timeout:g} s"


def failure(found: WorkerFailure) -> str:
    """Return "rank 3 on node2 was killed by SIGKILL"; else its agent's summary."""
    code, host = found.exitcode, found.host or "a node"
    if found.rank < 0 or found.local_rank < 0:
        said = found.text.strip().partition("\n")[0]
        return f"{said or f'exit code {code}'} (on {host})"
    if found.summary:
        return f"{found.summary} (on {host})"
    return f"rank {found.rank} on {host} {how_it_ended(code)}"
