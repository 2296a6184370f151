"""Which rank comes last to the collectives, and for which the others wait: from places."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elaunch.agent.hangs.collectives import CollectiveCall, GroupPlace, RankPlace
from elaunch.agent.hangs.lateness import arrivals, awaited, kept, summary

EVERYONE = (0, 1, 2, 3)


def rank(times: Mapping[int, float], members: tuple[int, ...] = EVERYONE) -> RankPlace:
    """Return a rank that has entered those collectives of the default group at those times."""
    calls = tuple(CollectiveCall(number, "all_reduce", at=at) for number, at in times.items())
    return RankPlace({"0": GroupPlace(members, calls=calls)})


def steps(count: int, delays: Mapping[int, float], first: int = 0) -> dict[int, RankPlace]:
    """Return four ranks, a step each tenth of a second, with the delay of each in all of them."""
    return {
        one: rank({n: 100 + n / 10 + delays.get(one, one * 1e-4) for n in range(first, count)})
        for one in EVERYONE
    }


def test_the_rank_with_a_delay() -> None:
    """It is last in all, behind the median of the others, who wait for a fifth of the time."""
    found = summary(arrivals(steps(60, {2: 0.0201})).values())
    assert found is not None
    assert (found["collectives"], found["slow"], len(found["ranks"])) == (60, 2, 1)
    assert found["ranks"][0]["last"] == 60
    assert found["ranks"][0]["behind_s"] == pytest.approx(0.02, abs=1e-5)
    assert found["held"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (steps(60, {}), "it is last in all, by too little to matter"),
        (steps(19, {2: 0.02}), "too few"),
        (
            {
                one: rank({n: n / 10 + (0.02 if n % 2 == one else 0.0) for n in range(60)}, (0, 1))
                for one in (0, 1)
            },
            "each is last in half of them",
        ),
    ],
)
def test_nobody_is_named(places: dict[int, RankPlace], why: str) -> None:
    """Equal ranks are last by chance."""
    found = summary(arrivals(places).values())
    assert found is not None and found["slow"] is None, why


def test_what_is_no_arrival() -> None:
    """A collective counts once all of the node have entered it; of one rank nothing is known."""
    places = steps(3, {}) | {3: rank({0: 100.0})}
    assert [key[2] for key in arrivals(places)] == [0]
    assert not arrivals({0: rank({0: 1.0})})
    # Ranks of other nodes are not waited for: their clocks are others.
    assert len(arrivals({0: rank({0: 1.0}), 1: rank({0: 2.0})})) == 1
    assert not arrivals({one: rank({0: 1.0}, ()) for one in EVERYONE})
    assert summary([]) is None


def test_waits_that_overlap_count_once() -> None:
    """Such as the buckets of one backward pass, all of which are late together."""
    buckets = {one: {n: 100 + n * 1e-3 for n in range(10)} for one in (0, 1)}
    buckets[1] = dict.fromkeys(range(10), 100.5)
    places = {one: rank(times, (0, 1)) for one, times in buckets.items()}
    found = summary(arrivals(places).values())
    assert found is not None
    assert (found["held"], found["seconds"]) == (pytest.approx(1.0), pytest.approx(0.5))


def test_what_is_remembered() -> None:
    """Each collective once, and those of the last minutes."""
    known = kept({}, arrivals(steps(40, {1: 0.05})))
    known = kept(known, arrivals(steps(60, {1: 0.05}, first=20)))
    assert len(known) == 60
    assert len(kept(known, {})) == 60
    assert len(kept(known, arrivals(steps(4000, {1: 0.05}, first=3990)))) == 10


def waiting(number: int, seconds: float) -> RankPlace:
    """Return a rank that has waited in a collective of the default group for so long."""
    call = CollectiveCall(number, "all_reduce", at=1000.0 - seconds, waits=True)
    return RankPlace({"0": GroupPlace(EVERYONE, calls=(call,))})


def test_for_which_rank_the_others_wait() -> None:
    """As long as those here wait in what all were asked of."""
    elsewhere = {2: waiting(7, 400.0), 3: rank({6: 1.0})}

    def look(own: Mapping[int, RankPlace], then: Mapping[int, RankPlace]) -> str:
        found = awaited(own, {**then, **elsewhere}, 1000.0, 30.0)
        return "" if found is None else f"{found.ranks} {found.sentence}"

    short = {0: waiting(7, 20.0), 1: waiting(7, 20.0)}
    assert not look(short, short)
    long = {0: waiting(7, 40.0), 1: waiting(7, 35.0)}
    said = "(3,) rank 3 has not entered all_reduce #7; ranks 0-2 have been waiting there for 35 s"
    assert look(long, long) == said
    assert not look(long, {})
    # They have gone on, and wait for another; the others have not been asked since.
    assert not look({0: waiting(9, 40.0), 1: waiting(9, 40.0)}, long)


def queued(lasted: Mapping[int, float | None]) -> dict[int, RankPlace]:
    """Return two ranks with collectives on a device that have lasted so long on each."""
    return {
        one: RankPlace(
            {
                "0/device": GroupPlace(
                    (0, 1),
                    calls=tuple(
                        CollectiveCall(
                            n, "all_reduce", at=100 + n / 10 + one * 0.03, lasted=seconds
                        )
                        for n in range(30)
                    ),
                    queued=True,
                )
            }
        )
        for one, seconds in lasted.items()
    }


def test_on_a_device_the_last_is_in_the_collective_for_the_shortest_time() -> None:
    """When its rank has queued it shows nothing: rank 1 is later with that, and waits."""
    found = summary(arrivals(queued({0: 0.001, 1: 0.021})).values())
    assert found is not None and found["slow"] == 0
    assert found["ranks"][0]["behind_s"] == pytest.approx(0.02)
    assert not arrivals(queued({0: None, 1: None}))
