"""Which agents the next round has, in which order, or why it has none yet. Pure.

A candidate is a member, was not asked to leave, and has nothing of a round before: a node of the
plan's round has ended it (elaunch.rendezvous.decide.formation has waited for that), a newcomer is
ready or has never had workers. A newcomer that is not ready after READY_PATIENCE seconds holds up
nobody: it is taken only where too few would be there without it. So is one on a host that was lost
again and again (unstable).

Their order gives the node ranks:

1. nodes of the round before, in their old order: a survivor's rank changes as little as it can;
2. spares, in the order in which they arrived: the one that has waited longest replaces first;
3. newcomers, by the order that user or scheduler gave (``hint``), then by host as people count
   (node2 before node10), then by name.

With ``static`` the hint is the rank, and nothing else counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from elaunch.errors import UsageError
from elaunch.rendezvous import text as words
from elaunch.rendezvous.decide import budget, checkpoints
from elaunch.rendezvous.decide.view import FENCE, HOSTED, LastKnown, Present, Rules, View
from elaunch.rendezvous.plan import JobSeen, NodeStatus
from elaunch.text import count, listed

READY_PATIENCE = 10.0
"""Seconds that newcomers which are ready wait for those that came with them and are not."""
MOST_HEARTBEAT = 3600.0
"""Seconds of the longest ``heartbeat_timeout`` that is believed of another agent."""


class Enough(Struct, frozen=True):
    """These are the nodes, in order, and the spares; not before ``settled``."""

    names: tuple[str, ...]
    spares: tuple[str, ...]
    settled: float


class Few(Struct, frozen=True):
    """Too few nodes are there; ``gone`` are those that the round before had.

    ``again`` is when to look again even if nobody comes or goes.
    """

    there: tuple[NodeStatus, ...]
    rules: Rules
    gone: tuple[tuple[str, float], ...] = ()
    missing_ranks: tuple[int, ...] = ()
    again: float | None = None

    def text(self, after: str, now: float | None) -> str:
        """Return who is there and what is missing; with ``now``, since when they are gone."""
        least, most, there = self.rules.min_nodes, self.rules.max_nodes, len(self.there)
        wanted = count(least) if least == most else f"at least {count(least)}"
        text = f"{there} of {wanted}{after}"
        text += f": {words.nodes(sorted(self.there, key=_by_host))}" if self.there else ""
        more = least - there
        if self.missing_ranks:
            ranks = listed([str(rank) for rank in self.missing_ranks])
            text += f"; node rank {ranks} is missing"
        elif more > 0:
            text += f"; {more} more {'is' if more == 1 else 'are'} needed"
        for how, at in self.gone[: words.MOST_NAMED]:
            text += f"; {how}" + (f", {now - at:.0f} s ago" if now is not None else "")
        return text


def _by_host(one: words.HasAddress) -> list[tuple[int, str]]:
    return natural(one.host)


class NeverARound(Struct, frozen=True):
    """These nodes can never make a round."""

    exit_code: int
    problem: str


def enough(view: View, now: float, rules: Rules) -> Enough | Few | NeverARound:
    """Return the nodes of the next round in their order, or what it lacks."""
    there, late = _candidates(view, now, rules)
    if len(there) < rules.min_nodes:
        there.update(late)
    if len(there) < rules.min_nodes and not rules.static:
        return _few(view, rules, there.values())
    candidates = waiting(view.plan.spares, there)
    previous = [node.name for node in view.plan.nodes]
    if rules.static:
        return _static(view, now, rules, static_order(previous, candidates))
    ranked = order(previous, candidates)
    names, rest = ranked[: rules.max_nodes], ranked[rules.max_nodes :]
    return Enough(names, rest, _settled(view, now, rules, len(names)))


def goes_on(record: NodeStatus, rules: Rules) -> JobSeen | None:
    """Return what an agent saw of a job that has begun and is not over, None if it saw none.

    Only a store that ends with its host, or that has ``lost`` its memory since, can know less of
    the job than the agents do.
    """
    seen = record.seen
    if seen is None or not (rules.hosted_by_me or seen.lost):
        return None
    return None if seen.phase == "over" or seen.round < 0 else seen


def is_behind(view: View) -> bool:
    """Return whether the plan is older than what agents have seen in a store that is no more."""
    return view.known is not None and view.known.round > view.plan.round


def further(known: LastKnown | None, seen: JobSeen, record: NodeStatus, rules: Rules) -> LastKnown:
    """Return how far the job was when what one more agent has seen of it is counted in."""
    known = known or LastKnown()
    return LastKnown(
        max(known.round, seen.round),
        max(known.restarts, seen.restarts),
        max(known.without_progress, seen.without_progress),
        seen.step if seen.round > known.round else known.step,
        max(known.heartbeat, rules.heartbeat_timeout, _heartbeat(record)),
    )


def _heartbeat(record: NodeStatus) -> float:
    """Return the ``heartbeat_timeout`` of an agent, which is one of its facts; 0 without it."""
    try:
        seconds = float(record.facts.get("heartbeat_timeout", ""))
    except ValueError:
        return 0.0
    return seconds if 0.0 < seconds <= MOST_HEARTBEAT else 0.0


def _candidates(
    view: View, now: float, rules: Rules
) -> tuple[dict[str, Present], dict[str, Present]]:
    members = {node.name for node in view.plan.nodes}
    there: dict[str, Present] = {}
    late: dict[str, Present] = {}
    shaky = unstable(view, now)
    for name, one in view.present.items():
        record = one.record
        if record.state == "leaving":
            continue
        if name in members:
            there[name] = one
        elif record.rests:
            (late if record.host in shaky else there)[name] = one
        elif record.state == "joining" and goes_on(record, rules) is None:
            begun = view.plan.round >= 0 and now - one.since > READY_PATIENCE
            (late if begun or record.host in shaky else there)[name] = one
    return there, late


def unstable(view: View, now: float) -> Sequence[str]:
    """Return the plan's unstable hosts, none LOSS_APART later or after a newer checkpoint."""
    plan = view.plan
    at = now if plan.phase == "running" else view.phase_since
    if not plan.unstable or at - view.round_began >= budget.LOSS_APART:
        return ()
    return () if checkpoints.progressed(view) else plan.unstable


def _settled(view: View, now: float, rules: Rules, number: int) -> float:
    """Return when the nodes that are there may begin without waiting for others."""
    if view.plan.round >= 0 and (view.known is None or view.known.round < view.plan.round):
        return now
    settled = max(now, view.store_opened + _fences(view, rules, number))
    if number < rules.max_nodes:
        settled = max(settled, max(view.leads_since, view.last_newcomer_at) + rules.settle)
    for one in view.present.values():
        if goes_on(one.record, rules) is not None and not one.record.rests:
            settled = max(settled, view.leads_since + rules.join_timeout)
    return settled


def _fences(view: View, rules: Rules, number: int) -> float:
    """Return how long after the store was opened an agent that does not know it may have workers.

    The earlier host has answered no renewal since, so every fence of its agents has passed after
    FENCE of their ``heartbeat_timeout``. An agent that reaches this host ends its workers at
    once.
    """
    if view.known is not None:
        return view.known.heartbeat
    if rules.hosted_by_me and rules.killed_in is not None:
        return rules.heartbeat_timeout
    if rules.hosted_by_me and number < rules.max_nodes:
        return rules.heartbeat_timeout * FENCE
    return rules.heartbeat_timeout / HOSTED


def _few(view: View, rules: Rules, there: Iterable[Present], missing: Iterable[int] = ()) -> Few:
    gone = []
    for node in view.plan.nodes:
        absent = view.absent.get(node.name)
        if absent is not None:
            gone.append((words.gone(node, absent, rules.heartbeat_timeout), absent.at))
    return Few(tuple(one.record for one in there), rules, tuple(gone), tuple(missing))


def _static(
    view: View, now: float, rules: Rules, claims: Mapping[int, Sequence[str]]
) -> Enough | Few | NeverARound:
    """The given node rank is the node rank; each from 0 to N - 1 must be there once."""
    number = rules.max_nodes
    records = {name: one.record for name, one in view.present.items()}
    for rank, names in claims.items():
        if rank >= number:
            who = words.node(records[names[0]])
            problem = f"--node-rank {rank} of {who} is too high for --nnodes {number}"
            return NeverARound(UsageError.exit_code, problem)
        if len(names) > 1 and view.plan.round < 0:
            them = [view.present[name] for name in names[:2]]
            until = max(one.since for one in them) + rules.heartbeat_timeout
            if _have_one_address(them) and now < until:  # an agent that was started again, perhaps
                few = _few(view, rules, [view.present[n[0]] for n in claims.values()])
                return replace(few, again=until)
            first, second = (words.node(one.record) for one in them)
            problem = f"--node-rank {rank} is given twice: to {first} and to {second}"
            return NeverARound(UsageError.exit_code, problem)
    missing = [rank for rank in range(number) if rank not in claims]
    if missing:
        return _few(view, rules, [view.present[n[0]] for n in claims.values()], missing)
    chosen = tuple(claims[rank][0] for rank in range(number))
    rest = tuple(name for names in claims.values() for name in names[1:])
    return Enough(chosen, rest, _settled(view, now, rules, number))


def _have_one_address(them: Sequence[Present]) -> bool:
    return len({(one.record.host, one.record.addr) for one in them}) == 1


# ── their order ──────────────────────────────────────────────────────────────────────────────────


class Applicant(Struct, frozen=True):
    """One agent that could be in the next round; ``arrival`` counts arrivals, ``spare`` waits."""

    name: str
    host: str
    hint: int | None = None
    arrival: int = 0
    spare: bool = False


def waiting(known: Sequence[str], there: Mapping[str, Present]) -> list[Applicant]:
    """Return the agents that are ``there`` as candidates.

    Agents that the plan has named already are spares in its order: a coordinator that has taken
    over since does not know which came first.
    """
    positions = {name: index for index, name in enumerate(known)}
    return [
        Applicant(
            name,
            one.record.host,
            one.record.hint,
            positions.get(name, one.number),
            spare=name in positions,
        )
        for name, one in there.items()
    ]


def order(previous: Sequence[str], candidates: Iterable[Applicant]) -> tuple[str, ...]:
    """Return the names of all ``candidates`` in their order; ``previous`` are the old nodes."""
    positions = {name: index for index, name in enumerate(previous)}
    survivors, spares, newcomers = [], [], []
    for one in candidates:
        if one.name in positions:
            survivors.append(one)
        elif one.spare:
            spares.append(one)
        else:
            newcomers.append(one)
    survivors.sort(key=lambda one: positions[one.name])
    spares.sort(key=lambda one: (one.arrival, one.name))
    newcomers.sort(key=by_hint)
    return tuple(one.name for one in (*survivors, *spares, *newcomers))


def static_order(previous: Sequence[str], candidates: Iterable[Applicant]) -> dict[int, list[str]]:
    """Return for each given node rank who claims it, a node of the round before first."""
    old = set(previous)
    claims: dict[int, list[str]] = {}
    for one in sorted(candidates, key=lambda one: (one.name not in old, one.arrival, one.name)):
        if one.hint is not None:
            claims.setdefault(one.hint, []).append(one.name)
    return claims


def by_hint(one: Applicant) -> tuple[bool, int, list[tuple[int, str]], str]:
    """Return a newcomer's sort key; those without a hint come after those with one."""
    return (one.hint is None, one.hint or 0, natural(one.host), one.name)


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key under which ``node2`` comes before ``node10``."""
    parts = re.split("([0-9]+)", text)
    return [(int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts)]
