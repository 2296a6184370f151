"""Whom the others wait for, by tables of what each rank has entered."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from elaunch.agent.hangs.collectives import CollectiveCall, Culprit, GroupPlace, RankPlace, find

NOW = 1000.0
LASTING = ("differ since", "has ended", "since 16m")
ALL = (0, 1, 2, 3)


def calls(*names: str, waits: bool = False, elements: int = 4) -> tuple[CollectiveCall, ...]:
    """Return collectives from number 60 on; the last is waited in, since 4.9 s."""
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
            (1,), "rank 1 has not entered all_reduce #61; ranks 0, 2, 3 wait there since 4.9 s"
        ),
    ),
    "two are behind": (
        {0: WAITS, 1: BEFORE, 2: BEFORE, 3: WAITS},
        Culprit(
            (1, 2), "ranks 1, 2 have not entered all_reduce #61; ranks 0, 3 wait there since 4.9 s"
        ),
    ),
    "one is in the kernel's hands": (
        {0: WAITS, 1: RankPlace(problem="stopped", stopped=True), 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 does not answer (stopped); ranks 0, 2, 3 wait in all_reduce #61 since 4.9 s",
        ),
    ),
    "one does not answer, which is no evidence": (
        {0: WAITS, 1: RankPlace(problem="no answer"), 2: WAITS, 3: WAITS},
        Culprit(
            (),
            "rank 1 does not answer (no answer); ranks 0, 2, 3 wait in all_reduce #61 since 4.9 s",
        ),
    ),
    "one has ended": (
        {0: WAITS, 1: RankPlace(ended=True), 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 has ended before all_reduce #61; ranks 0, 2, 3 wait there since 4.9 s",
        ),
    ),
    "another collective": (
        {0: WAITS, 1: ELSEWHERE, 2: WAITS, 3: WAITS},
        Culprit(
            (1,),
            "rank 1 has entered broadcast #61, ranks 0, 2, 3 have entered all_reduce #61: the "
            "collectives differ since 4.9 s",
        ),
    ),
    "another size": (
        {0: WAITS, 1: WAITS, 2: LARGER, 3: WAITS},
        Culprit(
            (2,),
            "rank 2 has entered all_reduce #61 with 8 of Float, ranks 0, 1, 3 have entered "
            "all_reduce #61 with 4 of Float: the sizes or types differ since 4.9 s",
        ),
    ),
    "two and two: nobody is named": (
        {0: WAITS, 1: ELSEWHERE, 2: ELSEWHERE, 3: WAITS},
        Culprit(
            (),
            "ranks 0, 3 have entered all_reduce #61, ranks 1, 2 have entered broadcast #61: the "
            "collectives differ since 4.9 s",
        ),
    ),
    "still inside": (
        {0: GONE_ON, 1: GONE_ON, 2: WAITS, 3: GONE_ON},
        Culprit(
            (2,),
            "rank 2 is still in all_reduce #61, which ranks 0, 1, 3 have left, since 4.9 s",
        ),
    ),
    "together": (
        {0: WAITS, 1: WAITS, 2: WAITS, 3: WAITS},
        Culprit((), "ranks 0-3 are all in all_reduce #61 since 4.9 s, and none has left it"),
    ),
    "in different orders": (
        {
            0: in_group("1", 1, waits=True, members=A),
            1: at(*calls("all_reduce", "all_reduce", waits=True)),
        },
        Culprit(
            (),
            "rank 0 waits in all_gather #1 of the group of ranks 0, 1 for rank 1, rank 1 waits in "
            "all_reduce #61 for rank 0 since 2.0 s: collectives are entered in different orders",
        ),
    ),
    "the last of a chain": (
        {
            0: in_group("1", 1, waits=True, members=A),
            1: RankPlace({**GROUPS, "1": GroupPlace(A)}),
            2: at(*calls("all_reduce", "all_reduce", waits=True)),
            3: at(*calls("all_reduce", "all_reduce", waits=True)),
        },
        Culprit((1,), "rank 1 has not entered all_reduce #61; ranks 2, 3 wait there since 4.9 s"),
    ),
    "ranks of another node": (
        {0: WAITS, 1: WAITS},
        Culprit((), "ranks 0, 1 wait in all_reduce #61 since 4.9 s"),
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
            (1, 2, 3), "ranks 1-3 have not entered barrier #1; rank 0 waits there since 16m 40s"
        ),
    ),
    "nobody waits": ({0: GONE_ON, 1: BEFORE}, None),
    "a group of unknown ranks": ({0: at(*WAITS.groups["0"].calls, members=()), 1: BEFORE}, None),
    "a receive is no evidence": (
        {0: WAITS, 1: RankPlace(BEFORE.groups, calls("recv", waits=True)), 2: WAITS, 3: WAITS},
        Culprit(
            (),
            "ranks 0, 2, 3 wait in all_reduce #61 for rank 1 since 4.9 s, which waits in recv",
        ),
    ),
    "different before, and gone on since": (
        {0: at(*calls("all_reduce")), 1: at(*calls("broadcast"))},
        None,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_whom_the_others_wait_for(name: str) -> None:
    """One sentence, and who is named in it."""
    places, expected = TABLE[name]
    found = find(places, NOW)
    assert found == (expected and replace(expected, lasting=found is not None and found.lasting))
    assert found is None or found.lasting is any(word in found.sentence for word in LASTING)


def test_after_a_failure_nobody_has_left_a_collective_by_itself() -> None:
    """Those whose collective has failed are said to be nowhere."""
    places = {0: GONE_ON, 2: WAITS, 3: GONE_ON}
    expected = Culprit((), "rank 2 waits in all_reduce #61 since 4.9 s")
    assert find(places, NOW, failed=True) == expected
