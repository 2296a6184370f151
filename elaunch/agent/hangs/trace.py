"""Where a rank is by torch's records of its collectives, and the groups that it has noted. Pure.

The records are JSON (elaunch.wire.recorder). NCCL has one of its own, in which a collective of a
group has another number than one of gloo in the same group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from elaunch.agent.hangs.collectives import (
    DEFAULT_GROUP,
    ON_DEVICE,
    CollectiveCall,
    GroupPlace,
    RankPlace,
)


class _Entry(msgspec.Struct):
    """One collective as torch writes it."""

    record_id: int
    pg_id: int
    process_group: tuple[str, str]
    collective_seq_id: int
    is_p2p: bool
    profiling_name: str
    input_sizes: list[list[int]]
    input_dtypes: list[str]
    time_created_ns: int
    retired: bool
    state: str = ""
    duration_ms: float | None = None
    p2p_seq_id: int = 0

    @property
    def place(self) -> tuple[str, bool, int]:
        """Its group, and its number among those of its kind there."""
        number = self.p2p_seq_id if self.is_p2p else self.collective_seq_id
        return (self.process_group[0], self.is_p2p, number)


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    pg_status: dict[str, dict[str, str]] = {}


class _Group(msgspec.Struct, array_like=True):
    """One process group as the worker notes it; ``ranks`` is empty of the default group."""

    name: str
    size: int
    own_rank: int | None
    ranks: list[int]
    at: float = 0.0


_AS_ONE: Final = ":coalesced"
"""The end of the name of operations that were carried out as one."""
_decode_trace: Final = msgspec.json.Decoder(_Trace).decode
_decode_group: Final = msgspec.json.Decoder(_Group).decode


def place(
    rank: int, world_size: int, trace: bytes, groups: str, on_device: bytes | None = None
) -> RankPlace:
    """Return where a rank is by the records of torch and its process groups; raises ValueError.

    A group may have collectives of both records, each with numbers of its own.
    """
    found = _place(rank, world_size, trace, groups)
    if on_device is None:
        return found
    other = _place(rank, world_size, on_device, groups)
    queued = {name + ON_DEVICE: replace(one, queued=True) for name, one in other.groups.items()}
    receives = tuple(dict.fromkeys((*found.receives, *other.receives)))
    return RankPlace({**found.groups, **queued}, receives, done=found.done + other.done)


def _place(rank: int, world_size: int, trace: bytes, groups: str) -> RankPlace:
    found = _decode_trace(trace)
    entries, renumbered = _as_one(found.entries)
    forgets = bool(entries) and found.entries[0].record_id > 0
    places: dict[str, GroupPlace] = {}
    is_jobs = False
    noted = [_decode_group(line) for line in groups.splitlines()]
    for each in noted:
        if not each.ranks:  # the default group, whose ranks all others name
            is_jobs = (each.size, each.own_rank) == (world_size, rank)
        ranks = (each.ranks or range(world_size)) if is_jobs else ()
        times = places[each.name].times + 1 if each.name in places else 1
        places[each.name] = GroupPlace(tuple(ranks), times, known=not forgets)
    if unknown := {one.process_group[0] for one in entries} - places.keys():
        raise ValueError(f"process group {min(unknown)} was not noted")
    for name, group in places.items():
        own = [one for one in entries if one.process_group[0] == name]
        again = group.times > 1 and len({one.pg_id for one in own}) != group.times
        if again or name in renumbered:
            places[name] = replace(group, known=False)  # whose collectives these are is unknown
            continue
        calls = tuple(_call(one) for one in own if one.pg_id == own[-1].pg_id and not one.is_p2p)
        places[name] = replace(group, calls=calls)
    receives = tuple(_call(one) for one in entries if one.is_p2p and _waits(one))
    if noted and not groups.endswith("\n"):  # the newest is in the making
        name = "new_group" if noted[-1].ranks else DEFAULT_GROUP
        receives = (CollectiveCall(0, name, at=noted[-1].at, waits=True), *receives)
    # These count sends and receives, too, which gloo does not record.
    counts = [int(number) for status in found.pg_status.values() for number in status.values()]
    return RankPlace(places, receives, done=sum(max(0, number) for number in counts))


def _as_one(entries: list[_Entry]) -> tuple[list[_Entry], set[str]]:
    """Put together the operations that NCCL carries out as one, which is recorded behind them.

    torch does not learn when each of them ends. It gives a batch of sends and receives the number
    of the last collective, or in some versions, on its ranks alone, one of its own: the groups are
    returned in which numbers differ for that.
    """
    kept: list[_Entry] = []
    renumbered: set[str] = set()
    for one in entries:
        parts: list[_Entry] = []
        while one.profiling_name.endswith(_AS_ONE) and kept and _is_part(kept[-1], one, parts):
            parts.insert(0, kept.pop())
        if parts and parts[0].is_p2p and not one.is_p2p:
            group, number = one.process_group, one.collective_seq_id
            before = [each for each in kept if each.process_group == group and not each.is_p2p]
            if not before or before[-1].collective_seq_id != number:
                renumbered.add(group[0])
        kept.append(_whole(one, parts) if parts else one)
    return kept, renumbered


def _is_part(entry: _Entry, whole: _Entry, parts: list[_Entry]) -> bool:
    """Whether the operation before such parts is carried out with them."""
    if parts:
        return entry.place == parts[0].place
    is_one = entry.place == whole.place or (entry.is_p2p and _waits(entry))
    return is_one and entry.process_group == whole.process_group


def _whole(one: _Entry, parts: list[_Entry]) -> _Entry:
    return replace(
        one,
        is_p2p=parts[0].is_p2p,
        profiling_name=parts[0].profiling_name,
        input_sizes=[sizes for part in parts for sizes in part.input_sizes],
        input_dtypes=[dtype for part in parts for dtype in part.input_dtypes],
    )


def _call(entry: _Entry) -> CollectiveCall:
    elements = 0
    for sizes in entry.input_sizes:
        count = 1
        for size in sizes:
            count *= size
        elements += count
    return CollectiveCall(
        number=entry.collective_seq_id,
        name=entry.profiling_name.partition(":")[2] or entry.profiling_name,
        elements=elements,
        dtypes=tuple(entry.input_dtypes),
        at=entry.time_created_ns / 1e9,
        waits=_waits(entry),
        lasted=None if entry.duration_ms is None else entry.duration_ms / 1e3,
    )


def at_times(place: RankPlace, at: Callable[[CollectiveCall], float]) -> RankPlace:
    """Return a place whose collectives, sends and receives were entered then."""

    def moved(calls: tuple[CollectiveCall, ...]) -> tuple[CollectiveCall, ...]:
        return tuple(replace(one, at=at(one)) for one in calls)

    groups = {name: replace(one, calls=moved(one.calls)) for name, one in place.groups.items()}
    return replace(place, groups=groups, receives=moved(place.receives))


def _waits(entry: _Entry) -> bool:
    return not entry.retired and entry.state != "completed"
