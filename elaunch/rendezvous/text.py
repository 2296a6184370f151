"""How nodes, failures and differences are named, in reasons, errors and status alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from elaunch.endings import how_it_ended
from elaunch.rendezvous.decide.view import Absent
from elaunch.rendezvous.plan import MOST_LOSSES, Node, NodeStatus, Plan, SameFailure, WorkerFailure
from elaunch.text import count, listed, shortened

MOST_NAMED = 8
MOST_CHARACTERS = 1000
MOST_VALUES = 4
UNACCUSED: Final = "first to fail"
"""The culprit of a failure whose own rank is likely its victim, where none is known."""


HasAddress = Node | NodeStatus


def node(one: HasAddress) -> str:
    """Return "node2 (10.0.0.2)", or the address alone where that is the name."""
    if not one.host or one.host == one.addr:
        return one.addr or "a node"
    return f"{one.host} ({one.addr})" if one.addr else one.host


def nodes(them: Iterable[HasAddress]) -> str:
    """Return "node1 (10.0.0.1), node2 (10.0.0.2)", at most eight of them."""
    return listed([node(one) for one in them])


def lost(losses: SameFailure) -> str:
    """Return "node2 was lost in rounds 3, 4, 5", or "node2 was lost in round 3"."""
    numbers = [str(number) for number in losses.rounds[-MOST_LOSSES:]]
    were = "was" if len(losses.hosts) == 1 else "were"
    rounds = "round" if len(numbers) == 1 else "rounds"
    return f"{listed(losses.hosts)} {were} lost in {rounds} {', '.join(numbers)}"


def standing_by(plan: Plan, host: str) -> str:
    """Return why an agent on ``host`` is one of the plan's spares."""
    if plan.losses and host in plan.unstable:
        return f"standing by: {lost(plan.losses)}; the others go on without it"
    nodes = count(len(plan.nodes))
    return f"standing by: the job has its {nodes}; this one replaces the next that is lost"


def named(them: Sequence[HasAddress]) -> str:
    """Return "node node1 (10.0.0.1)" or "nodes node1 (10.0.0.1), node2 (10.0.0.2)"."""
    return f"{'node' if len(them) == 1 else 'nodes'} {nodes(them)}"


def gone(one: HasAddress, absent: Absent | None, heartbeat_timeout: float) -> str:
    """Return how a node went: "node node2 (10.0.0.2) was lost: no heartbeat for 3 s"."""
    if absent is not None and absent.cause == "left":
        why = absent.last.reason if absent.last else ""
        return f"node {node(one)} has left" + (f": {why}" if why else "")
    if absent is not None and absent.cause == "unknown":
        return f"node {node(one)} is gone: it has left, or was lost with the coordinator"
    return f"node {node(one)} was lost: no heartbeat for {heartbeat_timeout:g} s"


def failure(found: WorkerFailure) -> str:
    """Return "rank 3 on node2 was killed by SIGKILL"; else its agent's summary.

    The only node of a job has no name, and needs none.
    """
    code, host = found.exitcode, found.host
    where = f" (on {host})" if host else ""
    if found.rank < 0 or found.local_rank < 0:
        first_line = found.text.strip().partition("\n")[0]
        return f"{first_line or f'exit code {code}'}{where}"
    if found.is_hang:  # the ranks that it names may be another node's
        return f"{found.summary} (seen on {host})" if host else found.summary
    rank = f"rank {found.rank} on {host}" if host else f"rank {found.rank}"
    return accused(found.summary, f"{rank} {how_it_ended(code)}")


def accused(culprit: str, first: str) -> str:
    """Return how the ``first`` rank failed, behind the ``culprit`` if that is another one."""
    if culprit in ("", UNACCUSED):
        return f"{culprit}: {first}" if culprit else first
    return f"{culprit} ({first})"


def differences(nodes: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return which facts differ between which hosts, or ""; ``nodes`` are (host, facts)."""
    if not nodes or all(facts == nodes[0][1] for _, facts in nodes):
        return ""
    names = sorted({name for _, facts in nodes for name in facts})
    differing = []
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, facts in nodes:
            hosts.setdefault(facts.get(name, "(nothing)"), []).append(host)
        if len(hosts) > 1:
            differing.append(f"{name} is {_spread(hosts)}")
    return shortened(f"the nodes differ: {'; '.join(differing)}", MOST_CHARACTERS)


def _spread(hosts: Mapping[str, Sequence[str]]) -> str:
    """Return "a on node1, node2 and b on node3", what most have first."""
    ranked = sorted(hosts.items(), key=lambda one: (-len(one[1]), one[0]))
    shown = [
        f"{value} on {listed(where) if len(where) <= 3 else count(len(where))}"
        for value, where in ranked[:MOST_VALUES]
    ]
    more = len(ranked) - MOST_VALUES
    return " and ".join(shown) + (f" and {more} other values" if more > 0 else "")
