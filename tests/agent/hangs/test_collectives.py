"""Whom the others wait for, by tables of what each rank has entered."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from elaunch.agent.hangs.collectives import (
    CollectiveCall,
    Culprit,
    GroupPlace,
    RankPlace,
    find,
    still,
)
from tests.tables import each

NOW = 1000.0
LASTING = ("have differed", "has ended", "have ended", "for 16m")
ALL = (0, 1, 2, 3)


def calls(*names: str, waits: bool = False, elements: int = 4) -> tuple[CollectiveCall, ...]:
    """Return collectives from number 60 on; the last is waited in, for 4.9 s."""
    last = len(names) - 1
    return tuple(
        CollectiveCall(60 + n, name, elements, ("Float",), NOW - 4.9, waits and n == last)
        for n, name in enumerate(names)
    )


def at(
    *found: CollectiveCall, members: tuple[int, ...] = ALL, name: str = "0", times: int = 1
) -> RankPlace:
    """Return a rank that has entered those of one group."""
    return RankPlace({name: GroupPlace(members, times, True, found)})


WAITS = at(*calls("all_reduce", "all_reduce", waits=True))
GONE_ON = at(*calls("all_reduce", "all_reduce"))
BEFORE = at(*calls("all_reduce"))
ELSEWHERE = at(*calls("all_reduce", "broadcast", waits=True))
LARGER = at(*calls("all_reduce"), *calls("", "all_reduce", waits=True, elements=8)[1:])
LEFT_ROOT = at(*calls("all_reduce", "gather"))
IN_ROOT = at(*calls("all_reduce", "gather", waits=True))
A, B = (0, 1), (2, 3)
GROUPS = {"0": GroupPlace(ALL, 1, True, calls("all_reduce"))}


def in_group(name: str, number: int, *, waits: bool, members: tuple[int, ...]) -> RankPlace:
    """Return a rank that has entered so many of a smaller group, after those of the large one."""
    found = CollectiveCall(number, "all_gather", 1, ("Long",), NOW - 2, waits)
    return RankPlace({**GROUPS, name: GroupPlace(members, 1, True, (found,))})


TABLE: dict[str, tuple[Mapping[int, RankPlace], Culprit | None]] = {
    "before": (
        {0: WAITS, 1: BEFORE, 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 has not entered all_reduce #61; ranks 0, 2, 3 "
            "have been waiting there for 4.9 s",
        ),
    ),
    "two are behind": (
        {0: WAITS, 1: BEFORE, 2: BEFORE, 3: WAITS},
        Culprit(
            (1, 2),
            "ranks 1, 2 have not entered all_reduce #61; ranks 0, 3 "
            "have been waiting there for 4.9 s",
        ),
    ),
    "one is in the kernel's hands": (
        {0: WAITS, 1: RankPlace(problem="stopped", stopped=True), 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 does not answer (stopped); ranks 0, 2, 3 "
            "have been waiting in all_reduce #61 for 4.9 s",
        ),
    ),
    "one does not answer, which is no evidence": (
        {0: WAITS, 1: RankPlace(problem="no answer"), 2: WAITS, 3: WAITS},
        Culprit(
            (),
            "rank 1 does not answer (no answer); ranks 0, 2, 3 "
            "have been waiting in all_reduce #61 for 4.9 s",
        ),
    ),
    "one has ended": (
        {0: WAITS, 1: RankPlace(ended=True), 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 has ended before all_reduce #61; ranks 0, 2, 3 "
            "have been waiting there for 4.9 s",
        ),
    ),
    "most have ended: those that go on are named": (
        {0: RankPlace(ended=True), 1: WAITS, 2: RankPlace(ended=True), 3: RankPlace(ended=True)},
        Culprit(
            (1,),
            "rank 1 "
            "has been waiting in all_reduce #61 for 4.9 s; ranks 0, 2, 3 have ended before it",
        ),
    ),
    "half have ended": (
        {0: WAITS, 1: WAITS, 2: RankPlace(ended=True), 3: RankPlace(ended=True)},
        Culprit(
            (),
            "ranks 0, 1 "
            "have been waiting in all_reduce #61 for 4.9 s; ranks 2, 3 have ended before it",
        ),
    ),
    "the interpreter of one ends": (
        {0: WAITS, 1: RankPlace(leaving=True), 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1, whose interpreter ends, has not entered all_reduce #61; ranks 0, 2, 3 have "
            "been waiting there for 4.9 s",
        ),
    ),
    "the interpreter of one ends, and another stands": (
        {0: WAITS, 1: RankPlace(leaving=True), 2: BEFORE, 3: WAITS},
        Culprit(
            (2,),
            "rank 2 has not entered all_reduce #61; ranks 0, 3 have been waiting there for 4.9 s",
        ),
    ),
    "another collective": (
        {0: WAITS, 1: ELSEWHERE, 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 has entered broadcast #61, ranks 0, 2, 3 have entered all_reduce #61: the "
            "collectives have differed for 4.9 s",
        ),
    ),
    "another size": (
        {0: WAITS, 1: WAITS, 2: LARGER, 3: WAITS},
        Culprit(
            (2,),
            "rank 2 has entered all_reduce #61 with 8 of Float, ranks 0, 1, 3 have entered "
            "all_reduce #61 with 4 of Float: the sizes or types have differed for 4.9 s",
        ),
    ),
    "two and two: nobody is named": (
        {0: WAITS, 1: ELSEWHERE, 2: ELSEWHERE, 3: WAITS},
        Culprit(
            (),
            "ranks 0, 3 have entered all_reduce #61, ranks 1, 2 have entered broadcast #61: the "
            "collectives have differed for 4.9 s",
        ),
    ),
    "still inside": (
        {0: GONE_ON, 1: GONE_ON, 2: WAITS, 3: GONE_ON},
        Culprit(
            (2,),
            "rank 2 is still in all_reduce #61 after 4.9 s; ranks 0, 1, 3 have left it",
        ),
    ),
    "still inside one with a root, which others leave first": (
        {0: LEFT_ROOT, 1: LEFT_ROOT, 2: IN_ROOT, 3: LEFT_ROOT},
        Culprit(
            (),
            "rank 2 is still in gather #61 after 4.9 s; ranks 0, 1, 3 have left it",
        ),
    ),
    "together": (
        {0: WAITS, 1: WAITS, 2: WAITS, 3: WAITS},
        Culprit((), "ranks 0-3 have all been in all_reduce #61 for 4.9 s, and none has left it"),
    ),
    "in different orders": (
        {
            0: in_group("1", 1, waits=True, members=A),
            1: at(*calls("all_reduce", "all_reduce", waits=True)),
        },
        Culprit(
            (),
            "rank 0 waits in all_gather #1 of the group of ranks 0, 1 for rank 1, rank 1 waits in "
            "all_reduce #61 for rank 0: collectives are entered in different orders (2.0 s so far)",
        ),
    ),
    "the last of a chain": (
        {
            0: in_group("1", 1, waits=True, members=A),
            1: RankPlace({**GROUPS, "1": GroupPlace(A)}),
            2: at(*calls("all_reduce", "all_reduce", waits=True)),
            3: at(*calls("all_reduce", "all_reduce", waits=True)),
        },
        Culprit(
            (1,),
            "rank 1 has not entered all_reduce #61; ranks 2, 3 have been waiting there for 4.9 s",
        ),
    ),
    "ranks of another node": (
        {0: WAITS, 1: WAITS},
        Culprit((), "ranks 0, 1 have been waiting in all_reduce #61 for 4.9 s"),
    ),
    "a record that does not reach back": (
        {0: WAITS, 1: RankPlace({"0": GroupPlace(ALL, 1, False)}), 2: WAITS, 3: WAITS},
        None,
    ),
    "a second group of that name": (
        {
            0: at(CollectiveCall(1, "barrier", waits=True), times=2),
            1: GONE_ON,
            2: GONE_ON,
            3: GONE_ON,
        },
        Culprit(
            (1, 2, 3),
            "ranks 1-3 have not entered barrier #1; rank 0 has been waiting there for 16m 40s",
        ),
    ),
    "nobody waits": ({0: GONE_ON, 1: BEFORE}, None),
    "a group of unknown ranks": ({0: at(*WAITS.groups["0"].calls, members=()), 1: BEFORE}, None),
    "a receive is no evidence": (
        {0: WAITS, 1: RankPlace(BEFORE.groups, calls("recv", waits=True)), 2: WAITS, 3: WAITS},
        Culprit(
            (),
            "ranks 0, 2, 3 wait in all_reduce #61 for rank 1, which waits in recv (4.9 s so far)",
        ),
    ),
    "different before, and gone on since": (
        {0: at(*calls("all_reduce")), 1: at(*calls("broadcast"))},
        None,
    ),
}


@each("name", TABLE)
def test_whom_the_others_wait_for(name: str) -> None:
    """One sentence, and who is named in it."""
    places, expected = TABLE[name]
    found = find(places, NOW)
    if found is not None and expected is not None:
        expected = replace(expected, lasting=found.lasting, kind=found.kind)
        assert (found.kind == "differ") is ("have differed" in found.sentence)
        assert (found.kind == "ended") is (" ended" in found.sentence)
        assert (found.kind == "leaving") is ("interpreter ends" in found.sentence)
    assert found == expected
    assert found is None or found.lasting is any(word in found.sentence for word in LASTING)


def test_after_a_failure_nobody_has_left_a_collective_by_itself() -> None:
    """Those whose collective has failed are said to be nowhere."""
    places = {0: GONE_ON, 2: WAITS, 3: GONE_ON}
    expected = Culprit((), "rank 2 has been waiting in all_reduce #61 for 4.9 s")
    assert find(places, NOW, failed=True) == expected
    # Who has not answered in the moment before all are signalled is not said to be silent.
    places[3] = RankPlace(problem="no answer")
    assert find(places, NOW, failed=True) == expected


def test_a_collective_in_which_ranks_wait_for_a_moment_is_none_that_hangs() -> None:
    """Other ranks may train, while those of one group wait for each other."""
    (call,) = calls("all_gather", waits=True)
    busy = [RankPlace({"1": GroupPlace(A, calls=each)}) for each in ((call,), ())]
    stuck = [RankPlace({"2": GroupPlace(B, calls=each)}) for each in ((call,), ())]
    stuck[0] = RankPlace({"2": GroupPlace(B, calls=(replace(call, at=NOW - 60.0),))})
    places = dict(enumerate((*busy, *stuck)))
    found = find(places, NOW, least=30.0)
    assert found is not None and found.ranks == (3,)
    first = find(places, NOW)
    assert first is not None and first.ranks == (1,)


def receiving(name: str = "recv") -> RankPlace:
    """Return a rank of which its stack shows that it waits for another."""
    return RankPlace(BEFORE.groups, (CollectiveCall(0, name, at=NOW - 4.9, waits=True),))


IDLE: dict[str, tuple[Mapping[int, RankPlace], tuple[int, ...], Culprit | None]] = {
    "a stage of a pipeline": (
        {0: receiving("send"), 1: BEFORE, 2: receiving(), 3: receiving()},
        (0, 1, 2, 3),
        Culprit(
            (1,),
            "rank 1 waits for no other rank; ranks 0, 2, 3 "
            "have been waiting in send, recv for 4.9 s",
        ),
    ),
    "what all enter": (
        {rank: receiving("monitored_barrier") if rank else BEFORE for rank in ALL},
        ALL,
        Culprit(
            (0,),
            "rank 0 has not entered monitored_barrier; ranks 1-3 have been waiting there for 4.9 s",
        ),
    ),
    "one is stopped": (
        {0: receiving(), 1: RankPlace(problem="stopped", stopped=True), 2: receiving()},
        (0, 2),
        None,
    ),
    "one is stopped, and late": (
        {
            0: receiving(),
            1: RankPlace(problem="stopped", stopped=True),
            **dict.fromkeys(B, receiving()),
        },
        ALL,
        Culprit(
            (1,),
            "rank 1 does not answer (stopped); ranks 0, 2, 3 have been waiting in recv for 4.9 s",
        ),
    ),
    "one computes, and has not done so for long": (
        {0: receiving(), 1: BEFORE, 2: receiving(), 3: receiving()},
        (0, 2, 3),
        None,
    ),
    "one of another node is not known": ({0: receiving(), 1: BEFORE, 2: receiving()}, ALL, None),
    "one does not answer": (
        {0: receiving(), 1: BEFORE, 2: receiving(), 3: RankPlace(problem="no answer")},
        ALL,
        None,
    ),
    "as many": ({0: receiving(), 1: BEFORE, 2: BEFORE, 3: receiving()}, ALL, None),
    "all receive": (dict.fromkeys(ALL, receiving()), ALL, None),
    "nobody does": (dict.fromkeys(ALL, BEFORE), ALL, None),
}


@pytest.mark.parametrize("name", IDLE)
def test_the_rank_that_waits_for_nobody(name: str) -> None:
    """While all others wait in what torch does not record."""
    places, late, expected = IDLE[name]
    assert find(places, NOW, late=late) == expected
    assert find(places, NOW, late=late, least=5.0) is None


COMES = RankPlace(
    {"0": GroupPlace(ALL)}, (CollectiveCall(0, "init_process_group", at=NOW - 4.9, waits=True),)
)
MADE = RankPlace({"0": GroupPlace(ALL)})
MAKING: dict[str, tuple[Mapping[int, RankPlace], Culprit | None]] = {
    "ranks have not come": (
        {0: COMES, 1: RankPlace(), 2: RankPlace(), 3: RankPlace()},
        Culprit(
            (1, 2, 3),
            "ranks 1-3 have not entered init_process_group; rank 0 "
            "has been waiting there for 4.9 s",
        ),
    ),
    "one has ended": (
        {0: COMES, 1: COMES, 2: RankPlace(ended=True), 3: COMES},
        Culprit(
            (2,),
            "rank 2 has not entered init_process_group; ranks 0, 1, 3 "
            "have been waiting there for 4.9 s",
        ),
    ),
    "one is stopped": (
        {0: COMES, 1: COMES, 2: COMES, 3: RankPlace(problem="stopped", stopped=True)},
        Culprit(
            (3,),
            "rank 3 does not answer (stopped); ranks 0-2 "
            "have been waiting in init_process_group for 4.9 s",
        ),
    ),
    "one is not known": (
        {0: COMES, 1: MADE, 2: COMES},
        Culprit((), "ranks 0, 2 have been waiting in init_process_group for 4.9 s"),
    ),
    "some have left it": (
        {0: MADE, 1: COMES, 2: COMES, 3: MADE},
        Culprit(
            (),
            "ranks 1, 2 "
            "have been waiting in init_process_group, which ranks 0, 3 have left, for 4.9 s",
        ),
    ),
    "all are there": (
        dict.fromkeys(ALL, COMES),
        Culprit(
            (), "ranks 0-3 have been waiting in init_process_group, which none has left, for 4.9 s"
        ),
    ),
}


@pytest.mark.parametrize("name", MAKING)
def test_which_rank_does_not_come_to_init_process_group(name: str) -> None:
    """It may be one of which nothing else is ever seen; a failure may have kept others from it."""
    places, expected = MAKING[name]
    assert find(places, NOW, least=4.0) == expected
    assert find(places, NOW, least=5.0) is None
    assert find(places, NOW, failed=True) is None


def test_who_has_stood_still_since() -> None:
    """Not a rank that has gone on, waits itself, or does not answer any more."""
    before = {0: WAITS, 1: BEFORE, 2: WAITS, 3: WAITS}
    found = find(before, NOW)
    assert found is not None and found.ranks == (1,)
    assert still(found, before, {1: BEFORE})
    changed = (GONE_ON, WAITS, RankPlace(problem="no answer"), RankPlace(leaving=True))
    assert not any(still(found, before, {1: place}) for place in changed)
    assert not still(found, before, {0: WAITS})
    assert not still(replace(found, ranks=()), before, before)
