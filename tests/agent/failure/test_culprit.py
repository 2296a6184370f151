"""Who is guilty of a failure, by what the ranks have left and where the others were."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elaunch.agent.failure.culprit import of_failure, of_hang
from elaunch.agent.failure.ends import Circumstances, Failure, FailureReport, build
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import Scene
from elaunch.agent.policy.events import HangSeen
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


def made(*ends: Failure, scene: Scene | None = None) -> FailureReport:
    """Return the report of ends of which the first failed first."""
    known = Circumstances(scene=scene)
    return build("t.py", "node0", 0, ends, ends[0].exit.local_rank, known)


def seen(culprit: Culprit | None = None, awaited: Culprit | None = None) -> Scene:
    """Return what the others did."""
    return Scene(0, (), culprit, awaited)


def test_a_rank_that_is_late_has_not_killed_another() -> None:
    """It evaluates, while another is killed for memory, or raises."""
    for failed in (end(1, -9), end(1, 1, OWN), end(1, -11)):
        assert of_failure(made(failed, scene=seen(BEHIND)), (), 4) is None
    for failed in (end(1, 1, LATE), end(1, 1, MISSING)):
        assert of_failure(made(failed, scene=seen(BEHIND)), (), 4) == BEHIND


def test_a_rank_that_stands_still_has_closed_no_connection() -> None:
    """One that has ended has; or it was another's, which had waited until its timeout."""
    lost = end(1, 1, LOST)
    assert of_failure(made(lost, scene=seen(BEHIND)), (), 4) is None
    assert of_failure(made(lost, end(0, 1, LATE), scene=seen(BEHIND)), (), 4) == BEHIND
    ended = replace(BEHIND, kind="ended")
    assert of_failure(made(lost, scene=seen(ended)), (), 4) == ended


def test_collectives_that_differ_are_a_cause_by_themselves() -> None:
    """Whatever the first that fails of it says."""
    assert of_failure(made(end(1, 1, OWN), scene=seen(DIFFER)), (), 4) == DIFFER


def test_a_short_wait_proves_nothing_but_for_a_timeout() -> None:
    """For that the ranks have waited as long as they do."""
    short = replace(BEHIND, lasting=False)
    assert of_failure(made(end(1, 1, MISSING), scene=seen(short)), (), 4) is None
    assert of_failure(made(end(1, 1, LATE), scene=seen(short)), (), 4) == short
    assert of_failure(made(end(1, 1, LATE), scene=seen(None, short)), (), 4) == short
    assert of_failure(made(end(1, 1, LOST), scene=seen(None, short)), (), 4) is None
    nobody = replace(short, ranks=())
    assert of_failure(made(end(1, 1, LATE), scene=seen(nobody)), (), 4) is None


def test_a_rank_that_failed_for_a_cause_of_its_own() -> None:
    """It was noticed after its victim; one that says nothing at all is not accused."""
    found = of_failure(made(end(0, 1, LOST), end(1, 1, OWN)), (), 4)
    assert found == Culprit((1,), "rank 1 failed at t.py:3: ValueError: boom")
    found = of_failure(made(end(0, 1, LOST), end(1, -11)), (), 4)
    assert found == Culprit((1,), found.sentence if found else "")
    assert found is not None and found.sentence.startswith("rank 1 was killed by SIGSEGV: native")
    assert of_failure(made(end(0, 1, LOST), end(1, 1)), (), 4) is None


def test_a_rank_that_has_raised_and_never_ends() -> None:
    """One that ends since it has lost another is a victim, and one that says nothing unknown."""
    ends = [
        end(0, -15, stopped=True),
        end(1, -15, LOST, stopped=True),
        end(2, -15, OWN, stopped=True),
    ]
    everyone = (0, 1, 2)
    hang = HangSeen(everyone, "", "collectives", False, "so", leaving=everyone, round=0)
    assert of_hang(made(*ends), hang) == Culprit((2,), "so")
    assert of_hang(made(*ends), replace(hang, leaving=(0, 1))) == Culprit((), "so")
    assert of_hang(made(*ends), replace(hang, ranks=(1,), named=True)) == Culprit((1,), "so")


@pytest.mark.parametrize(("ranks", "named"), [("Rank 2", (2,)), ("Ranks 2, 3", (2, 3))])
def test_whom_a_monitored_barrier_names(ranks: str, named: tuple[int, ...]) -> None:
    """Rank 0 knows who has not come; the others ask for its log."""
    reached = "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors"
    knows = f"RuntimeError: [Rank 0]: {ranks} failed to pass monitoredBarrier in 5000 ms"
    ends = end(1, 1, (*HEAD, reached)), end(0, 1, (*HEAD, knows), stopped=True)
    found = of_failure(made(*ends), (), 4)
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
    found = of_failure(made(end(0, 1, (*HEAD, late)), end(1, -15, stopped=True)), (), 4)
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
    assert of_failure(made(*ends, scene=scene), ended, 4) == expected
    assert of_failure(made(*ends, scene=scene), ended, 0) is None  # others are on other nodes
