"""Which rank comes last to the collectives, how much later, and for which one all wait now. Pure.

torch's records of the workers say when each has entered its newest collectives; they are all of one
machine, so that their clock is one. What they have shown in the last WINDOW_S seconds counts:

===========  =======================================================================================
last         the rank of a node that enters a collective after all others of its node
behind       the time from the median of the others' entries to its own
held         the share of the time in which any collective had the others wait for the last
slow         the rank that is last in two of three of LEAST_CALLS or more, if some HELD of the time
             is held: of ranks that are equal, each is last by chance
===========  =======================================================================================

A collective counts once all ranks of the node that take part have entered it. One of NCCL is
entered long before the device comes to it: it counts where torch measures how long it was there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from elaunch.agent.hangs import collectives
from elaunch.agent.hangs.collectives import CollectiveCall, Culprit, RankPlace
from elaunch.runs.record import LatenessRecord

WINDOW_S: Final = 300.0
LEAST_CALLS: Final = 20
MOST_OFTEN: Final = 2 / 3
HELD: Final = 0.05


class LastArrival(NamedTuple):
    """One collective of a node: who came last, and when; the others' median; seconds since 1970."""

    rank: int
    at: float
    median: float
    first: float


Key = tuple[str, int, int]
"""A collective: its group, how many times that was made, its number there."""
Arrivals = Mapping[Key, LastArrival]


def kept(known: Arrivals, found: Arrivals) -> Arrivals:
    """Return the known arrivals with those that were found, of the last WINDOW_S seconds."""
    since = max((one.at for one in found.values()), default=0.0) - WINDOW_S
    return {key: one for key, one in {**known, **found}.items() if one.at > since}


def waits(places: Mapping[int, RankPlace], since: float) -> set[tuple[int, str]]:
    """Return which ranks have waited since then or longer, with what each waits in."""
    calls = ((rank, call) for rank, place in places.items() for call in place.awaited)
    return {(rank, str(call)) for rank, call in calls if call.at <= since}


def awaited(
    own: Mapping[int, RankPlace], everyone: Mapping[int, RankPlace], now: float, least: float
) -> Culprit | None:
    """Return for whom ranks wait that have waited ``least`` seconds, or None.

    What ``everyone`` has answered is older: this node's ``own`` ranks may have gone on since, and
    wait in another collective.
    """
    inside = waits(own, now - least)
    if not inside or not inside <= waits(everyone, now - least):
        return None
    return collectives.find(everyone, now, least=least)


def arrivals(places: Mapping[int, RankPlace]) -> Arrivals:
    """Return who came last to each collective that all these ranks have entered who take part."""
    entered: dict[Key, dict[int, CollectiveCall]] = {}
    members: dict[str, int] = {}
    for rank, place in places.items():
        for name, group in place.groups.items():
            if rank not in group.members:
                continue
            members[name] = sum(other in places for other in group.members)
            known = (call for call in group.calls if call.lasted is not None or not group.queued)
            for call in known:
                entered.setdefault((name, group.times, call.number), {})[rank] = call
    found: dict[Key, LastArrival] = {}
    for key, calls in entered.items():
        if len(calls) == members[key[0]] and len(calls) > 1:
            times = sorted((at, rank) for rank, at in _times(calls).items())
            *others, (last, rank) = times
            median = statistics.median(at for at, _ in others)
            found[key] = LastArrival(rank, last, median, times[0][0])
    return found


def _times(calls: Mapping[int, CollectiveCall]) -> dict[int, float]:
    """Return when each rank has come to a collective.

    On devices it ends at once for all: that of the rank which came last has lasted the shortest.
    """
    lasted = {rank: call.lasted for rank, call in calls.items() if call.lasted is not None}
    if len(lasted) < len(calls):
        return {rank: call.at for rank, call in calls.items()}
    first, longest = max(call.at for call in calls.values()), max(lasted.values())
    return {rank: first + longest - seconds for rank, seconds in lasted.items()}


def summary(found: Iterable[LastArrival]) -> LatenessRecord | None:
    """Return how often each rank was last, and how much later; None of no collective."""
    ordered = sorted(found, key=lambda one: one.at)
    if not ordered:
        return None
    by_rank: dict[int, list[float]] = {}
    for one in ordered:
        by_rank.setdefault(one.rank, []).append(one.at - one.median)
    seconds = ordered[-1].at - min(one.first for one in ordered)
    share = _covered((one.median, one.at) for one in ordered) / seconds if seconds > 0 else 0.0
    ranks = sorted(by_rank, key=lambda rank: (-len(by_rank[rank]), rank))
    often = len(by_rank[ranks[0]]) >= MOST_OFTEN * len(ordered)
    slow = often and len(ordered) >= LEAST_CALLS and share >= HELD
    return {
        "collectives": len(ordered),
        "until": ordered[-1].at,
        "seconds": seconds,
        "held": share,
        "slow": ranks[0] if slow else None,
        "ranks": [
            {
                "rank": rank,
                "last": len(by_rank[rank]),
                "behind_s": statistics.median(by_rank[rank]),
            }
            for rank in ranks
        ],
        "why": "",
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of these spans lasts."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
