"""How long an agent waits for others, and how long its own writes wait for the store. Pure.

The coordinator publishes what it waits for at least every ``remind`` seconds
(elaunch.rendezvous.decide.decide). An agent that waits, and has received no plan for that long,
reads the store itself: the newest plan, and the members.

==============================================  ==================================================
what it finds                                   what follows
==============================================  ==================================================
a newer plan                                    the agent follows it; only its watch was broken
a node of the running round that may have       the wait may last; a line names that node now and
workers                                         then
no such node, and ``store_timeout`` + 2         the agent ends with 69: the coordinator does not
``remind`` later still none, and no plan        receive the records, or cannot publish
==============================================  ==================================================

This deadline depends on the agent's own clock alone. So no agent waits for ever, whether the
coordinator receives nothing, a record is lost or the store takes no writes.

Renewals alone show little: an etcd whose space is used up, or where permissions were taken away,
keeps every entry alive and answers in time. So writes and reads have deadlines of their own
(``Overdue``): the agent's entry and the plan, and, if it coordinates, plans and members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from elaunch.errors import StoreDenied, StoreError, StoreFull
from elaunch.rendezvous import text as words
from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.events import StillWaiting, StoreBack, StoreSilent
from elaunch.rendezvous.plan import Node, NodeStatus, Plan

LONGEST = 20
"""The longest time between two looks, in ``remind``, while others work."""
NODES = 64
"""Nodes of a job above which an agent looks the less often the more there are."""


class Hopeless(Struct, frozen=True):
    """Nobody decides; ``problem`` is why this agent ends."""

    problem: str


class Waiting:
    """One agent's wait: when it began, when to look next, and what was seen."""

    def __init__(self, rules: Rules, now: float) -> None:
        self._remind = rules.remind
        self._limit = rules.store_timeout + 2 * rules.remind
        self.since = now
        """When a plan was last received, or the agent's own record changed."""
        self._look_at = now
        self._pause = rules.remind
        self._nobody_since: float | None = None
        self.restart(now)

    def restart(self, now: float) -> None:
        """Note that a plan was received, or that the agent's own record changed."""
        self.since, self._nobody_since = now, None
        self._pause = self._remind
        self._look_at = now + self._pause

    def due(self, now: float) -> bool:
        """Return whether to look now."""
        return now >= self._look_at

    def looked(
        self, plan: Plan | None, name: str, members: Mapping[str, NodeStatus], now: float
    ) -> StillWaiting | Hopeless:
        """Note what a look at ``members`` has shown; ``name`` is our own there."""
        busy = working(plan, name, members)
        waited = f"for {now - self.since:.0f} s"
        crowd = max(1.0, len(members) / NODES)
        if busy and plan is not None:
            self._nobody_since = None
            self._pause = min(2 * self._pause, LONGEST * self._remind)
            self._look_at = now + self._pause * crowd
            return StillWaiting(f"waiting {waited} for {words.named(busy)} in round {plan.round}")
        self._look_at = now + self._remind * crowd
        if self._nobody_since is None:
            self._nobody_since = now
        what = _missing(plan)
        if now - self._nobody_since < self._limit:
            return StillWaiting(f"waiting {waited}: {what}")
        return Hopeless(f"{what}, {waited}; giving up")


def working(plan: Plan | None, name: str, members: Mapping[str, NodeStatus]) -> list[Node]:
    """Return the other nodes of the running round that are there and have not ended their part."""
    if plan is None or plan.phase != "running":
        return []
    busy = []
    for node in plan.nodes:
        record = members.get(node.name)
        if record is None or node.name == name:
            continue
        if record.round < plan.round or not record.rests:
            busy.append(node)
    return busy


def owes(plan: Plan, record: NodeStatus | None) -> bool:
    """Return whether the coordinator is to publish a plan soon, by an agent's own ``record``.

    While a round runs nothing is due before an agent reports that its part has come to a bad end.
    """
    if record is None or plan.phase == "over":
        return False
    ended = record.failure is not None or record.state == "ended"
    return plan.phase != "running" or (record.round == plan.round and ended)


def is_last(plan: Plan | None, name: str, members: Mapping[str, NodeStatus]) -> bool:
    """Return whether an agent that leaves has to wait until it leads, and ends the job.

    So it is while no other agent stays. Each publishes that it leaves before it looks: of agents
    that leave together, the one that published last finds nobody who stays.
    """
    if plan is not None and plan.phase == "over":
        return False
    return all(key == name or record.state == "leaving" for key, record in members.items())


def _missing(plan: Plan | None) -> str:
    if plan is None:
        return "no coordinator has published a plan"
    if plan.phase == "running":
        return f"no node works on round {plan.round}, and no coordinator has ended it"
    return f"no coordinator has published what follows ({plan.waits or plan.reason})"


# ── how long writes have waited ──────────────────────────────────────────────────────────────────

What = Literal["entry", "plan", "reading", "leading"]
"""Our entry and the plan are written; a follower reads the plan, the agent that leads the members.
"""


class Overdue:
    """Keeps what the store has not done, and since when."""

    def __init__(self) -> None:
        self._since: dict[What, float] = {}
        self._named: What | None = None

    def refused(
        self, what: What, problem: StoreError, now: float, *, needed: bool = True
    ) -> list[StoreSilent]:
        """Note that it was not done, or may not have been.

        A store that is full, or does not let us in any more, is named once. While something is not
        ``needed``, it may stay undone.
        """
        if needed:
            self._since.setdefault(what, now)
        else:
            self._since.pop(what, None)
        if self._named or not isinstance(problem, StoreFull | StoreDenied):
            return []
        self._named = what
        then = "" if isinstance(problem, StoreFull) else ": let this agent in again before then"
        return [StoreSilent(f"{problem}; the job goes on until something has to be decided{then}")]

    def done(self, what: What) -> list[StoreBack]:
        """Note that it was done."""
        self._since.pop(what, None)
        if self._named != what and not (self._named == "plan" and what == "entry"):
            return []  # who leads no longer publishes no plan any more
        self._named = None
        does = "lets this agent in" if what in ("reading", "leading") else "takes writes"
        return [StoreBack(f"the store {does} again")]

    def overdue(self, now: float, answered: float, limit: float) -> str:
        """Return what was not done for ``limit`` seconds or more, and for how long; or "".

        Where nothing is answered since ``answered``, it is not the reading that fails.
        """
        for what, since in self._since.items():
            reads = what in ("reading", "leading")
            waited = (answered if reads else now) - since
            if waited >= limit:
                did = "let this agent read no records" if reads else "taken no write of this agent"
                return f"has {did} for {waited:.0f} s"
        return ""
