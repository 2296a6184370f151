"""Which rank the others wait for, from the collectives that each has entered. Pure.

Ranks enter the collectives of a process group in one order; torch numbers them. A rank waits while
one that it has entered has not come to its end. In this order of precedence:

============  ====================================================================================
finding       evidence
============  ====================================================================================
differ        some rank waits in a group, in which two ranks entered different collectives under
              one number, or one collective with different sizes or types; the fewer are named
behind        ranks wait in a collective that another one has not entered, and that one waits in
              none; it has ended, it may be, or its interpreter ends
apart         ranks wait for each other in different groups: they enter them in different orders
inside        ranks are still in a collective that all have entered, and that others have left
making        ranks are in ``init_process_group``, which others have not entered, or have left
idle          ranks wait in what torch does not record (a send, a receive, a group in the making),
              and another one waits for nobody
silent        ranks wait in a collective that all have entered who answer; another rank does not,
              and is named if its process is stopped
together      all ranks are in one collective, and none has left it
============  ====================================================================================

Nobody is accused without evidence: a rank whose record does not reach back so far, or of which no
answer came, is no culprit. Of ranks that differ the fewer are named, of ranks that wait for each
other the one for which the most wait; nobody where there are as many on both sides. Where most
ranks have ended before a collective, those are named that go on. A collective with a root is left
by some ranks before others: to be still in it is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct

from elaunch import text

_EQUAL: Final = frozenset(
    {
        *("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather"),
        *("_all_gather_base", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"),
    }
)
"""Collectives of which every rank's input has one size and type."""

_ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Collectives that a rank may leave before all others have entered them."""

DEFAULT_GROUP: Final = "init_process_group"
ON_DEVICE: Final = "/device"
"""The end of the name of a group whose collectives are queued on a device, NCCL's."""
TOGETHER: Final = frozenset({"monitored_barrier", "new_group"})
"""The calls that all ranks of a group enter and that torch does not record."""
LASTING_S: Final = 10.0
"""Seconds that ranks have waited for one that is no longer just the slower."""


class CollectiveCall(Struct, frozen=True):
    """A collective that a rank has entered ``at`` (seconds since 1970), and whether it waits there.

    ``elements`` and ``dtypes`` are those of its input. ``lasted``: it was on the device for so many
    seconds, where torch measures that (TORCH_NCCL_ENABLE_TIMING).
    """

    number: int
    name: str
    elements: int = 0
    dtypes: tuple[str, ...] = ()
    at: float = 0.0
    waits: bool = False
    lasted: float | None = None

    def __str__(self) -> str:
        """Return "all_reduce #61"."""
        return f"{text.one_line(self.name)} #{self.number}"

    @property
    def shape(self) -> tuple[object, ...]:
        """The part of it that has to be the same on all ranks."""
        name = self.name.lstrip("_")
        return (name, self.elements, self.dtypes) if self.name in _EQUAL else (name,)


class GroupPlace(Struct, frozen=True):
    """Where a rank is in a process group that it has made for the ``times``-th time.

    ``members`` are the group's ranks in the job, () where that is unknown; ``calls`` are the newest
    collectives that the rank has entered. ``known``: if there are none, it has entered none.
    ``queued``: it enters them before its device comes to them, and goes on.
    """

    members: tuple[int, ...]
    times: int = 1
    known: bool = True
    calls: tuple[CollectiveCall, ...] = ()
    queued: bool = False

    @property
    def entered(self) -> int | None:
        """The number of the newest collective; None where that is unknown."""
        if self.calls:
            return max(call.number for call in self.calls)
        return 0 if self.known else None


class RankPlace(Struct, frozen=True):
    """Where a rank is, by group; ``receives`` are sends and receives in which it waits.

    ``problem`` is why that is unknown, ``stopped`` that this is since the process is stopped;
    ``ended``: it has ended; ``leaving``: its interpreter ends, so that it enters no collective any
    more. ``done`` grows with all that it begins and ends in its groups.
    """

    groups: Mapping[str, GroupPlace] = {}
    receives: tuple[CollectiveCall, ...] = ()
    done: int = 0
    problem: str = ""
    stopped: bool = False
    ended: bool = False
    leaving: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, a send or a receive."""
        return bool(self.awaited)

    @property
    def awaited(self) -> tuple[CollectiveCall, ...]:
        """The collectives, sends and receives in which it is."""
        calls = (call for group in self.groups.values() for call in group.calls)
        return (*self.receives, *(call for call in calls if call.waits))

    @property
    def is_held(self) -> bool:
        """Whether it can go on only if another rank does, or if its process does."""
        return self.waits or self.stopped or self.ended


OUTSIDE: Final = RankPlace()
"""Where a rank is that has made no process group yet."""
UNKNOWN: Final = RankPlace(problem="no answer")


class Culprit(Struct, frozen=True):
    """The ranks that the others wait for, named in one sentence; () where nobody is.

    ``lasting``: it may be the cause of a failure that was seen meanwhile, too, and is no chance of
    the moment. ``kind`` is "differ" where the collectives do, "ended" of ranks that have, and
    "leaving" of those whose interpreters end, which may have lost another.
    """

    ranks: tuple[int, ...]
    sentence: str
    lasting: bool = False
    kind: Literal["differ", "ended", "leaving", ""] = ""


class _Wait(Struct, frozen=True):
    """Ranks that wait in one collective of a group, and the members that have not entered it."""

    group: str
    call: CollectiveCall
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    left: tuple[int, ...]
    unknown: tuple[int, ...]
    members: tuple[int, ...]


def find(
    places: Mapping[int, RankPlace],
    now: float,
    *,
    failed: bool = False,
    least: float = 0.0,
    late: Collection[int] = (),
) -> Culprit | None:
    """Return what the places of the ranks show; None where that is no evidence of anything.

    Args:
        places: by rank; of ranks that are not there nothing is known.
        now: seconds since 1970, by the clock of the machine whose ranks these are.
        failed: a rank has failed, so that others leave a collective by an error.
        least: seconds; a collective in which ranks wait for less is one of those that go on.
        late: ranks that are known to have stood still for long: only such ones are named because
            they wait for nobody.
    """
    if (found := _differing(places, now, least)) is not None:
        return found
    waits = [wait for wait in _waits(places) if now - wait.call.at >= least]
    behind = [wait for wait in waits if wait.missing]
    if behind:
        return _behind(behind, places, now)
    if waits:
        return _inside(waits, places, now, failed)
    made = None if failed else _making(places, now, least)
    return made or _idle(places, late, now, least)


def still(found: Culprit, before: Mapping[int, RankPlace], places: Mapping[int, RankPlace]) -> bool:
    """Whether ranks that were named have stood still from the places ``before`` to these.

    Not where one has not answered since, has done anything, or has come to wait itself.
    """
    for rank in found.ranks:
        then, now = before.get(rank), places.get(rank)
        if then is None or now is None or then.problem or now.problem:
            return False
        if now.is_held or (now.done, now.groups, now.leaving) != (
            then.done,
            then.groups,
            then.leaving,
        ):
            return False
    return bool(found.ranks)


def waited(places: Mapping[int, RankPlace], now: float) -> float:
    """Return for how many seconds a rank has waited, that which has waited longest; 0: none waits.

    A receive of gloo, of which only the stack shows that it is there, counts since it is known.
    """
    return max((now - call.at for one in places.values() for call in one.awaited), default=0.0)


def _waits(places: Mapping[int, RankPlace]) -> list[_Wait]:
    """Return the collectives in which ranks wait: those first in which the most do."""
    inside: dict[tuple[str, int, int], dict[int, CollectiveCall]] = {}
    for rank, group, place in _memberships(places):
        for call in place.calls:
            if call.waits:
                inside.setdefault((group, place.times, call.number), {})[rank] = call
    found = []
    for (group, times, number), calls in inside.items():
        ranks = tuple(calls)
        members = places[ranks[0]].groups[group].members
        others = [rank for rank in members if rank not in calls]
        standing = {rank: _standing(places.get(rank), group, times, number) for rank in others}
        missing, left, unknown = (
            tuple(rank for rank in others if standing[rank] == wanted)
            for wanted in ("behind", "left", "unknown")
        )
        at = max(call.at for call in calls.values())
        call = CollectiveCall(number, calls[ranks[0]].name, at=at)
        found.append(_Wait(group, call, ranks, missing, left, unknown, members))
    return sorted(found, key=lambda wait: (-len(wait.ranks), wait.call.number, wait.group))


def _memberships(places: Mapping[int, RankPlace]) -> Iterable[tuple[int, str, GroupPlace]]:
    """Yield each rank with each group whose members are known."""
    for rank, place in sorted(places.items()):
        for name, group in place.groups.items():
            if rank in group.members:
                yield rank, name, group


def _standing(place: RankPlace | None, group: str, times: int, number: int) -> str:
    """Return whether a member has not entered a collective ("behind"), or has ended it ("left")."""
    if place is None:
        return "elsewhere"
    if place.ended or place.leaving:
        return "behind"
    if place.problem:
        return "unknown"
    own = place.groups.get(group)
    if own is None:
        return "behind"  # it has not made the group
    if own.times != times:
        return "behind" if own.times < times else "left"
    if own.entered is None:
        return "unknown"
    return "left" if own.entered >= number else "behind"


# ── what is found ────────────────────────────────────────────────────────────────────────────────


def _differing(places: Mapping[int, RankPlace], now: float, least: float) -> Culprit | None:
    """Return the first collective of a group that two ranks entered differently, if any waits."""
    by_number: dict[tuple[str, int, int], dict[int, CollectiveCall]] = {}
    waiting: dict[tuple[str, int], int] = {}
    for rank, group, place in _memberships(places):
        for call in place.calls:
            by_number.setdefault((group, place.times, call.number), {})[rank] = call
            if call.waits and now - call.at >= least:
                most = waiting.get((group, place.times), call.number)
                waiting[group, place.times] = max(most, call.number)
    for (group, times, number), calls in sorted(by_number.items()):
        if number > waiting.get((group, times), -1):
            continue
        shapes: dict[tuple[object, ...], list[int]] = {}
        for rank, call in calls.items():
            shapes.setdefault(call.shape, []).append(rank)
        if len(shapes) > 1:
            return _told_apart(calls, list(shapes.values()), now)
    return None


def _told_apart(
    calls: Mapping[int, CollectiveCall], shapes: list[list[int]], now: float
) -> Culprit:
    fewest = sorted(shapes, key=lambda ranks: (len(ranks), ranks))
    same_name = len({call.name for call in calls.values()}) == 1
    entered = [(ranks, _described(calls[ranks[0]], same_name)) for ranks in fewest]
    parts = [f"{text.ranks_do(ranks, 'have')} entered {what}" for ranks, what in entered]
    waiting = [call.at for call in calls.values() if call.waits]
    for_how_long = f"have differed for {_seconds(now - max(waiting))}" if waiting else "differ"
    named = fewest[0] if len(fewest[0]) < len(fewest[1]) else []
    what = "sizes or types" if same_name else "collectives"
    told = f"{parts[0]}, {', '.join(parts[1:])}: the {what} {for_how_long}"
    return Culprit(tuple(sorted(named)), told, lasting=True, kind="differ")


def _described(call: CollectiveCall, sized: bool) -> str:
    if not sized:
        return str(call)
    types = ", ".join(dict.fromkeys(call.dtypes)) or "nothing"
    return f"{call} with {call.elements} of {text.one_line(types)}"


def _behind(waits: list[_Wait], places: Mapping[int, RankPlace], now: float) -> Culprit:
    for wait in waits:
        outside = [rank for rank in wait.missing if not places[rank].waits]
        if outside:
            return _absent(wait, outside, places, now)
    parts = [
        f"{text.ranks_do(wait.ranks, 'wait')} in {_named(wait)} for {text.ranks(wait.missing)}"
        for wait in sorted(waits, key=lambda one: one.ranks)
    ]
    so_far = _seconds(now - max(wait.call.at for wait in waits))
    own = dict.fromkeys(one.name for rank in waits[0].missing for one in places[rank].receives)
    order = ": collectives are entered in different orders"
    if len(waits) == 1:
        other = text.one_line(", ".join(own)) or "another one"
        order = f", which {'wait' if waits[0].missing[1:] else 'waits'} in {other}"
    return Culprit(_most_awaited(waits), f"{', '.join(parts)}{order} ({so_far} so far)")


def _absent(
    wait: _Wait, outside: list[int], places: Mapping[int, RankPlace], now: float
) -> Culprit:
    """Return that ranks which wait nowhere have not entered a collective."""
    if ended := [rank for rank in outside if places[rank].ended]:
        rest = len(wait.members) - len(ended)
        if len(ended) >= rest:
            told = f"{text.ranks_do(ended, 'have')} ended before it"
            told = f"{_waiting(wait, now, f'in {_named(wait)}')}; {told}"
            return Culprit(wait.ranks if len(ended) > rest else (), told, True, "ended")
        told = f"{text.ranks_do(ended, 'have')} ended before {_named(wait)}"
        return Culprit(tuple(ended), f"{told}; {_waiting(wait, now, 'there')}", True, "ended")
    lasting = now - wait.call.at > LASTING_S
    standing = [rank for rank in outside if not places[rank].leaving]
    absent, who = standing or outside, text.ranks_do(standing or outside, "have")
    if not standing:
        ends = "interpreter ends" if len(outside) == 1 else "interpreters end"
        who = f", whose {ends}, ".join(who.rsplit(" ", 1))
    told = f"{who} not entered {_named(wait)}; {_waiting(wait, now, 'there')}"
    return Culprit(tuple(absent), told, lasting, "" if standing else "leaving")


def _making(places: Mapping[int, RankPlace], now: float, least: float) -> Culprit | None:
    """Return which ranks have not come to the making of the default group, in which others wait."""
    received = [(rank, one) for rank, place in sorted(places.items()) for one in place.receives]
    waits = {rank: one.at for rank, one in received if one.name == DEFAULT_GROUP}
    members = {k for rank in waits for one in places[rank].groups.values() for k in one.members}
    if not members or now - max(waits.values()) < least:
        return None
    others = {rank: places.get(rank, UNKNOWN) for rank in sorted(members - waits.keys())}
    stopped = [rank for rank, place in others.items() if place.stopped]
    absent = [k for k, place in others.items() if place in (OUTSIDE, RankPlace(ended=True))]
    wait = f"{text.ranks_do(waits, 'have')} been waiting"
    there = told = f"{wait} in {DEFAULT_GROUP}"
    if absent:
        told = f"{text.ranks_do(absent, 'have')} not entered {DEFAULT_GROUP}; {wait} there"
    elif stopped:
        told = f"{_silent(stopped, places)}; {there}"
    elif all(place.groups for place in others.values()):
        left = text.ranks_do(others, "have") if others else "none has"
        told = f"{there}, which {left} left,"
    so_far = _seconds(now - max(waits.values()))
    return Culprit(tuple(absent or stopped), f"{told} for {so_far}")


def _idle(
    places: Mapping[int, RankPlace], late: Collection[int], now: float, least: float
) -> Culprit | None:
    """Return which ranks wait for nobody, while all others wait in what torch does not record."""
    groups = (group for place in places.values() for group in place.groups.values())
    members = {rank for group in groups for rank in group.members}
    unknown = any(place.problem and not place.stopped for place in places.values())
    if unknown or not members <= places.keys():
        return None
    waiting = [rank for rank, place in sorted(places.items()) if place.receives]
    idle = [rank for rank, one in sorted(places.items()) if not (one.receives or one.ended)]
    if not waiting or not idle or not set(idle) <= set(late):
        return None
    so_far = now - max(one.at for rank in waiting for one in places[rank].receives)
    if 1 < len(idle) >= len(waiting) or so_far < least:
        return None
    names = dict.fromkeys(one.name for rank in waiting for one in places[rank].receives)
    where = f"in {text.one_line(', '.join(names))}"
    there = f"{text.ranks_do(waiting, 'have')} been waiting"
    if stopped := [rank for rank in idle if places[rank].stopped]:
        told, idle = _silent(stopped, places), stopped
    elif len(names) == 1 and TOGETHER & names.keys():
        told, where = f"{text.ranks_do(idle, 'have')} not entered {next(iter(names))}", "there"
    else:
        told = f"{text.ranks_do(idle, 'wait')} for no other rank"
    return Culprit(tuple(idle), f"{told}; {there} {where} for {_seconds(so_far)}")


def _most_awaited(waits: list[_Wait]) -> tuple[int, ...]:
    """Return the rank for which the most others wait; none where two are equal in that."""
    awaited: Counter[int] = Counter()
    for wait in waits:
        awaited.update(dict.fromkeys(wait.missing, len(wait.ranks)))
    (first, most), *others = awaited.most_common()
    return (first,) if len(waits) > 1 and all(number < most for _, number in others) else ()


def _inside(
    waits: list[_Wait], places: Mapping[int, RankPlace], now: float, failed: bool
) -> Culprit | None:
    for wait in waits:
        silent = [rank for rank in wait.unknown if places[rank].problem]
        if silent and len(silent) == len(wait.unknown):
            stopped = tuple(rank for rank in silent if places[rank].stopped)
            # When one has failed the others have no time to answer.
            told = f"{_silent(silent, places)}; " if stopped or not failed else ""
            return Culprit(stopped, f"{told}{_waiting(wait, now, f'in {_named(wait)}')}")
        if wait.unknown:
            continue
        so_far = _seconds(now - wait.call.at)
        if wait.left and not failed:
            told = f"{text.ranks_do(wait.ranks, 'are')} still in {_named(wait)} after {so_far}"
            named = () if wait.call.name in _ROOTED else wait.ranks
            return Culprit(named, f"{told}; {text.ranks_do(wait.left, 'have')} left it")
        if len(wait.ranks) < len(wait.members):
            return Culprit((), _waiting(wait, now, f"in {_named(wait)}"))
        if len(wait.ranks) > 1:
            told = f"{text.ranks(wait.ranks)} have all been in {_named(wait)} for {so_far}"
            return Culprit((), f"{told}, and none has left it")
    return None


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def _named(wait: _Wait) -> str:
    if wait.group.removesuffix(ON_DEVICE) == "0":
        return str(wait.call)
    return f"{wait.call} of the group of {text.ranks(wait.members)}"


def _waiting(wait: _Wait, now: float, where: str) -> str:
    so_far = _seconds(now - wait.call.at)
    return f"{text.ranks_do(wait.ranks, 'have')} been waiting {where} for {so_far}"


def _silent(ranks: list[int], places: Mapping[int, RankPlace]) -> str:
    why = text.one_line(places[ranks[0]].problem)
    return f"{text.ranks_do(ranks, 'do')} not answer ({why})"


def _seconds(seconds: float) -> str:
    return text.duration(max(0.0, seconds))
