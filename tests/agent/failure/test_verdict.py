"""Who is guilty of a failure, by what the ranks have left and where the others were."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elaunch.agent.failure.evidence import Evidence, Failure, Hang
from elaunch.agent.failure.verdict import build
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import Scene
from elaunch.agent.policy.events import HangSeen, StacksTaken
from tests.agent.histories import left

HEAD = ("Traceback (most recent call last):", '  File "t.py", line 3, in <module>')
LOST = (*HEAD, "RuntimeError: Connection closed by peer [127.0.0.1]:40312")
LATE = (*HEAD, "RuntimeError: Timed out waiting 6000ms for recv operation to complete")
MISSING = (*HEAD, "torch.distributed.DistStoreError: wait timeout after 9000ms, keys: /a")
OWN = (*HEAD, "ValueError: boom")
BEHIND = Culprit((3,), "rank 3 has not entered all_reduce #61; ranks 0, 2 wait there", lasting=True)
DIFFER = Culprit(
    (2,), "rank 2 has entered broadcast #61, …: the collectives differ", True, "differ"
)


def end(rank: int, exitcode: int, tail: tuple[str, ...] = (), *, stopped: bool = False) -> Failure:
    """Return the end of a rank with its last lines."""
    return left(rank, exitcode, tail=tail, stopped=stopped)


def found_by(*ends: Failure, **known: Any) -> Culprit | None:
    """Return the culprit by ends of which the first failed first, of four ranks."""
    evidence = Evidence(**{"size": 4, **known})
    return build("t.py", "node0", 0, ends, ends[0].exit.local_rank, evidence).culprit


def seen(culprit: Culprit | None = None, awaited: Culprit | None = None) -> Scene:
    """Return what the others did."""
    return Scene(0, (), culprit, awaited)


def test_a_rank_that_is_late_has_not_killed_another() -> None:
    """It evaluates, while another is killed for memory, or raises."""
    for failed in (end(1, -9), end(1, 1, OWN), end(1, -11)):
        assert found_by(failed, scene=seen(BEHIND)) is None
    for failed in (end(1, 1, LATE), end(1, 1, MISSING)):
        assert found_by(failed, scene=seen(BEHIND)) == BEHIND


def test_a_rank_that_stands_still_has_closed_no_connection() -> None:
    """One that has ended has; or it was another's, which had waited until its timeout."""
    lost = end(1, 1, LOST)
    assert found_by(lost, scene=seen(BEHIND)) is None
    assert found_by(lost, end(0, 1, LATE), scene=seen(BEHIND)) == BEHIND
    ended = replace(BEHIND, kind="ended")
    assert found_by(lost, scene=seen(ended)) == ended


def test_collectives_that_differ_are_a_cause_by_themselves() -> None:
    """Whatever the first that fails of it says."""
    assert found_by(end(1, 1, OWN), scene=seen(DIFFER)) == DIFFER


def test_a_short_wait_proves_nothing_but_for_a_timeout() -> None:
    """For that the ranks have waited as long as they do."""
    short = replace(BEHIND, lasting=False)
    assert found_by(end(1, 1, MISSING), scene=seen(short)) is None
    assert found_by(end(1, 1, LATE), scene=seen(short)) == short
    assert found_by(end(1, 1, LATE), scene=seen(None, short)) == short
    assert found_by(end(1, 1, LOST), scene=seen(None, short)) is None
    nobody = replace(short, ranks=())
    assert found_by(end(1, 1, LATE), scene=seen(nobody)) is None


def test_a_rank_that_failed_for_a_cause_of_its_own() -> None:
    """It was noticed after its victim; one that says nothing at all is not accused."""
    found = found_by(end(0, 1, LOST), end(1, 1, OWN))
    assert found == Culprit((1,), "rank 1 failed at t.py:3: ValueError: boom")
    found = found_by(end(0, 1, LOST), end(1, -11))
    assert found == Culprit((1,), found.sentence if found else "")
    assert found is not None and found.sentence.startswith("rank 1 was killed by SIGSEGV: native")
    assert found_by(end(0, 1, LOST), end(1, 1)) is None


def test_a_rank_that_has_raised_and_never_ends() -> None:
    """One that ends since it has lost another is a victim, and one that says nothing unknown."""
    ends = [
        end(0, -15, stopped=True),
        end(1, -15, LOST, stopped=True),
        end(2, -15, OWN, stopped=True),
    ]
    everyone = (0, 1, 2)

    def hung(seen: HangSeen) -> Culprit | None:
        return found_by(*ends, hang=Hang(seen, 0.0, StacksTaken(0)))

    hang = HangSeen(everyone, "", "collectives", False, "so", leaving=everyone, round=0)
    assert hung(hang) == Culprit((2,), "so")
    assert hung(replace(hang, leaving=(0, 1))) == Culprit((), "so")
    assert hung(replace(hang, ranks=(1,), named=True)) == Culprit((1,), "so")


@pytest.mark.parametrize(("ranks", "named"), [("Rank 2", (2,)), ("Ranks 2, 3", (2, 3))])
def test_whom_a_monitored_barrier_names(ranks: str, named: tuple[int, ...]) -> None:
    """Rank 0 knows who has not come; the others ask for its log."""
    reached = "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors"
    knows = f"RuntimeError: [Rank 0]: {ranks} failed to pass monitoredBarrier in 5000 ms"
    ends = end(1, 1, (*HEAD, reached)), end(0, 1, (*HEAD, knows), stopped=True)
    found = found_by(*ends)
    assert found is not None and found.ranks == named
    assert found.sentence.endswith("not come to monitored_barrier, as rank 0 says")


def test_whom_a_collective_of_elaunch_names() -> None:
    """The others have waited until its timeout, and asked each other who has not come to it."""
    late = (
        "elaunch.errors.CollectiveTimeout: save of step 20, copying: allgather #12: not all ranks "
    )
    late += (
        "came within 5 s: rank 1 (host n, pid 7) does not answer; rank 3 (host n, pid 9): its last"
    )
    found = found_by(end(0, 1, (*HEAD, late)), end(1, -15, stopped=True))
    told = "ranks 1, 3 have not come to allgather #12, as rank 0 says"
    assert found == Culprit((1, 3), told)


TABLE = {
    "one has ended": (
        (end(0, 1, LOST), end(2, 1, LOST, stopped=True), end(3, -15, stopped=True)),
        (1,),
        (3,),
        Culprit((1,), "rank 1 has ended with 0, and the others have lost it"),
    ),
    "nobody knows what two others did": (
        (end(0, 1, LOST), end(2, -15, stopped=True), end(3, -15, stopped=True)),
        (1,),
        (),
        Culprit((), "rank 1 has ended with 0, and rank 0 has gone on"),
    ),
    "or what another one did": (
        (end(0, 1, LOST), end(2, 1, LOST), end(3, -15, stopped=True)),
        (1,),
        (),
        Culprit((1,), "rank 1 has ended with 0, and the others have lost it"),
    ),
    "which was at its end": (
        (end(0, 1, LOST), end(2, 1, LOST), end(3, -15, stopped=True)),
        (1,),
        (),
        Culprit((), "rank 1 has ended with 0, and ranks 0, 2 have gone on"),
    ),
    "which had lost it as well": (
        (end(0, 1, LOST), end(2, 1, LOST), end(3, -15, LOST, stopped=True)),
        (1,),
        (),
        Culprit((1,), "rank 1 has ended with 0, and the others have lost it"),
    ),
    "which has ended, though it was signalled meanwhile": (
        (end(0, 1, LOST), end(1, -15, stopped=True), end(2, 1, LOST), end(3, 0, stopped=True)),
        (),
        (1,),
        Culprit((3,), "rank 3 has ended with 0, and the others have lost it"),
    ),
    "which has ended as well since it had lost another": (
        (
            end(0, 1, LOST),
            end(1, -15, stopped=True),
            end(2, 1, LOST),
            end(3, 0, LOST, stopped=True),
        ),
        (),
        (1,),
        None,
    ),
    "most have ended": (
        (end(0, 1, LOST),),
        (1,),
        (),
        Culprit((0,), "rank 0 has gone on where rank 1 has ended with 0"),
    ),
    "none has": ((end(0, 1, LOST),), (), (), None),
    "it has lost nobody": ((end(0, 1, OWN),), (1, 2, 3), (), None),
}


@pytest.mark.parametrize("name", TABLE)
def test_ranks_that_had_ended_with_0(name: str) -> None:
    """Of those that end and those that go on the fewer are guilty."""
    ends, ended, waiting, expected = TABLE[name]
    leaving = (3,) if name.startswith("which") else ()
    scene = Scene(0, (), waiting=waiting, leaving=leaving)
    assert found_by(*ends, scene=scene, ended=frozenset(ended)) == expected
    assert (
        found_by(*ends, scene=scene, ended=frozenset(ended), size=0) is None
    )  # others are on other nodes
