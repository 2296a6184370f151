"""Which rank comes last to the collectives, how much later, and for which one the others wait now.

torch's records of the workers say when each has entered its newest collectives; they are all of one
machine, so that their clock is one. The workers are asked when somebody looks (ANSWERED_S apart, at
most), and otherwise every EVERY_S seconds, or more rarely where that would take more than one part
in SPARING of a processor. What they have shown in the last WINDOW_S seconds counts:

===========  =======================================================================================
last         the rank of a node that enters a collective after all others of its node
behind       the time from the median of the others' entries to its own
held         the share of the time in which any collective had the others wait for the last
slow         the rank that is last in two of three of LEAST_CALLS or more, if some HELD of the time
             is held: of ranks that are equal, each is last by chance
===========  =======================================================================================

A collective counts once all ranks of the node that take part have entered it. One of NCCL is
entered long before the device comes to it: it counts where torch measures how long it was there.

Where a rank has waited for AWAITED_S, the thread asks all nodes, and for stacks, too, for which one
they wait. The record says that, and after TOLD_S the log, once in a round. Nothing ends for it.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from elaunch.agent.hangs import collectives
from elaunch.agent.hangs.collectives import CollectiveCall, Culprit, RankPlace
from elaunch.runs.record import AwaitedRecord, LatenessRecord

WINDOW_S: Final = 300.0
FIRST_S: Final = 5.0
EVERY_S: Final = 30.0
SPARING: Final = 6000
ANSWERED_S: Final = 5.0
"""Seconds for which what the workers have answered is new enough for the next who looks."""
LEAST_CALLS: Final = 20
MOST_OFTEN: Final = 2 / 3
HELD: Final = 0.05
AWAITED_S: Final = 30.0
TOLD_S: Final = 300.0
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")


class LastArrival(NamedTuple):
    """One collective of a node: who came last, and when; the others' median; seconds since 1970."""

    rank: int
    at: float
    median: float
    first: float


Key = tuple[str, int, int]
"""A collective: its group, for the how manieth time that was made, its number there."""


class Lateness:
    """Remembers the round's collectives; its thread asks from :meth:`start` to :meth:`close`.

    Args:
        places: returns where the workers of this node are; it may take a second.
        everywhere: returns where the workers of all nodes are, if any waits here; it may take
            seconds.
        why: returns what may make a rank slow since the round began, or "".
        asked: called by the thread when it has asked.
    """

    def __init__(
        self,
        places: Callable[[], Mapping[int, RankPlace]],
        everywhere: Callable[[], Mapping[int, RankPlace]] = dict,
        why: Callable[[int], str] = lambda _: "",
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        self._places = places
        self._everywhere = everywhere
        self._why = why
        self._asked = asked
        self._found: LatenessRecord | None = None
        self._own: Mapping[int, RankPlace] = {}
        self._all: Mapping[int, RankPlace] = {}
        self._told = False
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._arrivals: dict[Key, LastArrival] = {}
        self._round = 0
        self._asked_at = -ANSWERED_S
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lateness", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def begin(self) -> None:
        """Forget the round before."""
        with self._lock:
            self._arrivals, self._round, self._found = {}, self._round + 1, None
            self._own = self._all = {}
            self._told = False

    def record(self, ask: bool) -> LatenessRecord | None:
        """Return what is known, None where nothing is; ``ask`` the workers, if that is too old."""
        if ask and time.monotonic() - self._asked_at >= ANSWERED_S:
            self._ask()
        return self._found

    def awaited(self) -> AwaitedRecord | None:
        """Return for which rank the others have waited for long, by the newest answers."""
        found = self._culprit(AWAITED_S)
        return None if found is None else {"ranks": list(found.ranks), "text": found.sentence}

    def _culprit(self, least: float) -> Culprit | None:
        now = time.time()
        with self._lock:
            waits, everyone = _waits(self._own, now - least), self._all
        # What all have answered is older: these may have gone on, and wait in another by now.
        if not waits or not waits <= _waits(everyone, now - least):
            return None
        return collectives.find(everyone, now, least=least)

    def _run(self) -> None:
        pause = FIRST_S
        try:
            while not self._closing.wait(pause):
                began = time.thread_time()
                self._ask()
                self._ask_everywhere()
                self._asked()
                pause = max(EVERY_S, SPARING * (time.thread_time() - began))
        except Exception:
            log.exception("which rank comes last to the collectives is not known any more")

    def _ask(self) -> None:
        with self._asking:
            if time.monotonic() - self._asked_at < ANSWERED_S:
                return
            number, places = self._round, self._places()
            found = arrivals(places)
            self._asked_at = time.monotonic()
            with self._lock:
                if number == self._round:
                    self._own = places
                    self._take(found)

    def _ask_everywhere(self) -> None:
        """Ask all nodes for whom ranks wait that have waited for long; log it, once in a round."""
        number, since = self._round, time.time() - AWAITED_S
        places = self._everywhere() if _waits(self._own, since) else {}
        with self._lock:
            self._all = places if number == self._round else {}
        if not self._told and (found := self._culprit(TOLD_S)) is not None:
            self._told = True
            log.warning("%s; `elaunch stacks` shows where they are", found.sentence)

    def _take(self, found: Mapping[Key, LastArrival]) -> None:
        since = max((one.at for one in found.values()), default=0.0) - WINDOW_S
        merged = {**self._arrivals, **found}
        self._arrivals = {key: one for key, one in merged.items() if one.at > since}
        self._found = summary(self._arrivals.values())
        if self._found is not None and (slow := self._found["slow"]) is not None:
            self._found["why"] = self._why(slow)


def _waits(places: Mapping[int, RankPlace], since: float) -> set[tuple[int, str]]:
    """Return which ranks have waited since then or longer, with what each waits in."""
    waits = ((rank, call) for rank, place in places.items() for call in place.awaited)
    return {(rank, str(call)) for rank, call in waits if call.at <= since}


def arrivals(places: Mapping[int, RankPlace]) -> dict[Key, LastArrival]:
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
    return {
        key: _arrival(_times(calls))
        for key, calls in entered.items()
        if len(calls) == members[key[0]] and len(calls) > 1
    }


def _times(calls: Mapping[int, CollectiveCall]) -> dict[int, float]:
    """Return when each rank has come to a collective.

    On devices it ends at once for all: that of the rank which came last has lasted the shortest.
    """
    lasted = {rank: call.lasted for rank, call in calls.items() if call.lasted is not None}
    if len(lasted) < len(calls):
        return {rank: call.at for rank, call in calls.items()}
    first, longest = max(call.at for call in calls.values()), max(lasted.values())
    return {rank: first + longest - seconds for rank, seconds in lasted.items()}


def _arrival(times: Mapping[int, float]) -> LastArrival:
    (_, first), *_, (rank, at) = sorted(times.items(), key=lambda item: (item[1], item[0]))
    return LastArrival(rank, at, statistics.median(t for r, t in times.items() if r != rank), first)


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
