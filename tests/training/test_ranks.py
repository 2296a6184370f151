"""elaunch.training.ranks: calls of all ranks, ranks as threads around a real TCPStore."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elaunch.errors import (
    CollectiveError,
    CollectiveTimeout,
    ContextError,
    PeerLost,
    PlacementError,
)
from elaunch.store.tcp.wire import LONGEST
from elaunch.training.agreement import PIECE
from elaunch.training.ranks import CallsDiffer, RankCalls
from elaunch.training.stores.roundstore import RoundStore
from elaunch.wire.progress import ProgressPage
from tests.training.rankrig import PATIENCE, Outcome, Ranks, StoreHost, in_threads

SHAPES = [
    pytest.param(2, 2, False, id="2 on one node"),
    pytest.param(5, 5, False, id="5 on one node"),
    pytest.param(4, 2, False, id="2 nodes of 2 on one machine"),
    pytest.param(2, 1, True, id="2 machines of 1"),
    pytest.param(6, 2, True, id="3 machines of 2"),
    pytest.param(5, 1, True, id="5 machines of 1"),
]
LARGE = 400_000


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """One store for all tests of this module: each is a job of its own in it."""
    yield StoreHost()


def blob(rank: int, size: int = LARGE) -> bytes:
    """Return bytes that tell whose they are."""
    return rank.to_bytes(4, "little") * (size // 4)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES)
@pytest.mark.parametrize("large", ["none", "all", "last", "first", "odd"])
def test_every_call_gives_every_rank_what_it_promises(
    host: StoreHost, size: int, local_size: int, machines: bool, large: str
) -> None:
    """Whoever's objects are large."""

    def thing(rank: int) -> bytes:
        is_large = {
            "none": False, "all": True, "last": rank == size - 1, "first": rank == 0,
            "odd": rank % 2 == 1,
        }[large]  # fmt: skip
        return blob(rank, LARGE + 4 * rank if is_large else 64)

    def work(calls: RankCalls, rank: int) -> None:
        node = [r for r in range(size) if r // local_size == rank // local_size]
        everybody = [thing(r) for r in range(size)]
        for _ in range(2):
            mine = thing(rank)
            assert calls.call("all", "allgather", mine, PATIENCE) == everybody
            gathered = calls.call("all", "gather", mine, PATIENCE)
            assert gathered == (everybody if rank == 0 else None)
            assert calls.call("all", "broadcast", mine, PATIENCE) == everybody[:1]
            assert calls.call("all", "barrier", None, PATIENCE) is None
            if local_size > 1:
                near = [everybody[r] for r in node]
                assert calls.call("local", "allgather_local", mine, PATIENCE) == near
                gathered = calls.call("local", "gather_local", mine, PATIENCE)
                assert gathered == (near if rank == node[0] else None)
                assert calls.call("local", "broadcast_local", mine, PATIENCE) == near[:1]

    Ranks(host, size, local_size, machines).run(work).all()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES)
def test_what_is_delivered_comes_to_those_that_take_it(
    host: StoreHost, size: int, local_size: int, machines: bool
) -> None:
    """Whoever gives it, however large, to one, to all others or to none; or nobody gives."""

    def work(calls: RankCalls, rank: int) -> None:
        for giver in range(size):
            for takers in ({(giver + 1) % size}, set(range(size)) - {giver}, set()):
                for sent in (blob(giver), b"small", b""):
                    given = (sent if rank == giver else None, rank in takers)
                    found = calls.call("all", "deliver", given, PATIENCE)
                    assert found == ([sent] if rank in takers else None)
        assert calls.call("all", "deliver", (None, True), PATIENCE) is None
        assert calls.call("all", "allgather", rank, PATIENCE) == list(range(size))

    Ranks(host, size, local_size, machines).run(work).all()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [False, True])
def test_a_thousand_calls_in_a_row_keep_their_order(host: StoreHost, machines: bool) -> None:
    """Nothing of one call is taken for the next."""

    def work(calls: RankCalls, rank: int) -> None:
        for step in range(1000):
            found = calls.call("all", "allgather", (rank, step), PATIENCE)
            assert found == [(r, step) for r in range(3)]

    Ranks(host, 3, 1 if machines else 3, machines).run(work).all()


@pytest.mark.parametrize("machines", [False, True])
def test_arrays_arrive_writable_and_as_ones_own(host: StoreHost, machines: bool) -> None:
    """Each receiver has its own."""
    import numpy

    def work(calls: RankCalls, rank: int) -> None:
        mine = numpy.full(LARGE, rank, dtype=numpy.int16)
        found = calls.call("all", "allgather", mine, PATIENCE)
        assert found is not None
        for r, array in enumerate(found):
            assert (array == r).all()
            array += 100 + rank
        calls.call("all", "barrier", None, PATIENCE)
        for r, array in enumerate(found):
            assert (array == r + 100 + rank).all()

    Ranks(host, 4, 2 if machines else 4, machines).run(work).all()


def expect(outcome: Outcome, kind: type[BaseException], *words: str) -> None:
    """Every rank that raised raised this, with these words."""
    for rank, error in outcome.errors.items():
        assert type(error) is kind, (rank, repr(error))
        for word in words:
            assert word in str(error), (rank, str(error))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES[1:5])
@pytest.mark.parametrize("absent", ["first", "last"])
def test_a_rank_that_does_not_come_is_named_everywhere(
    host: StoreHost, size: int, local_size: int, machines: bool, absent: str
) -> None:
    """With its host, its pid, and what it did last; also on ranks that are not connected to it."""
    missing = 0 if absent == "first" else size - 1

    def work(calls: RankCalls, rank: int) -> Any:
        calls.call("all", "barrier", None, PATIENCE)
        if rank == missing:
            return waited.wait(PATIENCE)  # a rank that leaves would be another error
        try:
            return calls.call("all", "allgather", 1, 0.5)
        finally:
            came.append(rank)
            if len(came) == size - 1:
                waited.set()

    waited, came = threading.Event(), list[int]()
    outcome = Ranks(host, size, local_size, machines).run(work)
    assert set(outcome.errors) == set(range(size)) - {missing}
    expect(
        outcome, CollectiveTimeout, "allgather #2", f"rank {missing} (host ", ", pid ", "barrier #1"
    )
    assert all(error.missing == (missing,) for error in outcome.errors.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES)
def test_ranks_that_call_different_things_get_an_error_that_names_both(
    host: StoreHost, size: int, local_size: int, machines: bool
) -> None:
    """At once, not at the deadline."""

    def work(calls: RankCalls, rank: int) -> Any:
        name = "barrier" if rank == size - 1 else "broadcast"
        return calls.call("all", name, rank, PATIENCE)

    begun = time.monotonic()
    outcome = Ranks(host, size, local_size, machines).run(work)
    assert time.monotonic() - begun < PATIENCE
    assert len(outcome.errors) == size
    expect(
        outcome, CollectiveError, "barrier #1", "broadcast #1", "different", f"rank {size - 1} ("
    )


def test_a_call_of_the_node_beside_one_of_all_is_found_too(host: StoreHost) -> None:
    """The two have numbers of their own, so only the name tells."""

    def work(calls: RankCalls, rank: int) -> Any:
        if rank:
            return calls.call("local", "allgather_local", rank, PATIENCE)
        return calls.call("all", "allgather", rank, PATIENCE)

    outcome = Ranks(host, 2, 2, False).run(work)
    assert len(outcome.errors) == 2
    expect(outcome, CollectiveError, "allgather_local #1", "allgather #1")


class Wayward:
    """Raises where it is pickled, or where it is unpickled."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        if self.where == "here":
            raise OverflowError("not me")
        return _refuse, ("not here",)


def _refuse(text: str) -> None:
    raise KeyError(text)


@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES)
def test_an_object_that_cannot_be_pickled_fails_that_call_everywhere_and_no_other(
    host: StoreHost, size: int, local_size: int, machines: bool
) -> None:
    """All learn whose it was and why; the ranks stay in step."""

    def work(calls: RankCalls, rank: int) -> Any:
        thing = [Wayward("here")] if rank == 1 else blob(rank)
        with pytest.raises(CollectiveError, match=r"rank 1 \(.*OverflowError: not me") as caught:
            calls.call("all", "gather", thing, PATIENCE)
        assert (caught.value.__cause__ is not None) == (rank == 1)
        return calls.call("all", "allgather", rank, PATIENCE)

    assert Ranks(host, size, local_size, machines).run(work).all() == [list(range(size))] * size


def test_an_object_that_cannot_be_unpickled_fails_where_it_is_received(host: StoreHost) -> None:
    """Its sender gets the others'; the next call works for all."""

    def work(calls: RankCalls, rank: int) -> Any:
        if rank == 1:
            assert calls.call("all", "allgather", Wayward("there"), PATIENCE)
        else:
            with pytest.raises(CollectiveError, match=r"rank 1 \(.*unpickled here: KeyError"):
                calls.call("all", "allgather", rank, PATIENCE)
        return calls.call("all", "allgather", rank, PATIENCE)

    assert Ranks(host, 3, 3, False).run(work).all() == [[0, 1, 2]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("size", "local_size", "machines"), SHAPES)
def test_a_rank_that_closes_is_named_by_those_that_go_on(
    host: StoreHost, size: int, local_size: int, machines: bool
) -> None:
    """And every later call says the same again."""
    leaver = size - 1

    def work(calls: RankCalls, rank: int) -> Any:
        calls.call("all", "barrier", None, PATIENCE)
        if rank == leaver:
            return
        with pytest.raises(PeerLost, match=rf"rank {leaver} \(.*closed its context") as first:
            calls.call("all", "allgather", blob(rank), PATIENCE)
        assert first.value.missing == (leaver,)
        with pytest.raises(PeerLost, match=rf"not connected any more since .*rank {leaver} \("):
            calls.call("all", "barrier", None, PATIENCE)

    Ranks(host, size, local_size, machines).run(work).all()


def test_an_exception_of_a_signal_in_a_call_reaches_the_others(host: StoreHost) -> None:
    """Whatever stops one rank in the middle of a call, the others learn it at once."""

    class Interrupting:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    def work(calls: RankCalls, rank: int) -> Any:
        return calls.call("all", "allgather", Interrupting() if rank == 2 else rank, PATIENCE)

    outcome = Ranks(host, 4, 2, True).run(work)
    assert type(outcome.errors.pop(2)) is KeyboardInterrupt
    assert set(outcome.errors) == {0, 1, 3}
    expect(outcome, CollectiveError, "rank 2 (", "interrupted by KeyboardInterrupt")


def test_two_threads_of_a_rank_cannot_be_in_calls_at_once(host: StoreHost) -> None:
    """Their order would be another on each rank."""

    def work(calls: RankCalls, rank: int) -> Any:
        if rank:
            assert done.wait(PATIENCE)
            return calls.call("all", "barrier", None, PATIENCE)
        both = in_threads(range(2), lambda _: calls.call("all", "barrier", None, 0.3))
        done.set()
        return [type(error) for error in both.errors.values()]

    done = threading.Event()
    outcome = Ranks(host, 2, 2, False).run(work)
    assert set(outcome.values[0]) == {ContextError, CollectiveTimeout}


def test_closing_ends_a_call_that_another_thread_is_in(host: StoreHost) -> None:
    """And the other ranks learn why."""

    def work(calls: RankCalls, rank: int) -> Any:
        calls.call("all", "barrier", None, PATIENCE)
        if rank == 1:
            timer = threading.Timer(0.2, calls.close)
            timer.start()
            with pytest.raises(ContextError, match=r"allgather #2: .*closed its context meanwhile"):
                calls.call("all", "allgather", 1, PATIENCE)
            timer.join()
            with pytest.raises(CollectiveError, match="not connected any more"):
                calls.call("all", "allgather", 1, PATIENCE)
            closed.set()
        elif rank == 0:
            assert closed.wait(PATIENCE)
            with pytest.raises(CollectiveError, match=r"rank 1 \(.*closed its context meanwhile"):
                calls.call("all", "allgather", 1, PATIENCE)

    closed = threading.Event()
    Ranks(host, 2, 1, True).run(work).all()


@pytest.mark.slow
def test_what_a_rank_does_is_known_while_it_computes_or_waits(host: StoreHost) -> None:
    """By its last call; one that has closed is said to be gone."""

    def work(calls: RankCalls, rank: int) -> Any:
        calls.call("all", "barrier", None, PATIENCE)
        if rank == 1:
            with pytest.raises(CollectiveError):
                calls.call("all", "allgather", 1, PATIENCE)
        if rank != 0:
            return None
        said: list[str] = []
        until = time.monotonic() + PATIENCE
        while "call was allgather #2" not in "".join(said) or "closed" not in "".join(said):
            assert time.monotonic() < until, said
            said = calls.describe([0, 1, 2], time.monotonic() + PATIENCE)
        return said

    said = Ranks(host, 3, 1, True).run(work).all()[0]
    assert said[0].startswith("rank 0 (host ") and "last call was barrier #1" in said[0]
    assert said[2].startswith("rank 2 (host ") and said[2].endswith("has closed its context")


@pytest.mark.slow
def test_ranks_that_do_not_meet_name_those_that_have_not_come(host: StoreHost) -> None:
    """And who is there."""

    def work(rank: int) -> None:
        place = host.place(rank, 4, 4, job)
        made = RankCalls(place, RoundStore(place), ProgressPage())
        made.open(time.monotonic() + 1.0)

    job = "never complete"
    outcome = in_threads(range(1, 3), work)
    assert len(outcome.errors) == 2
    expect(outcome, CollectiveTimeout, "ranks 0, 3 of 4 did not open", "rank 1 (", "rank 2 (")
    assert all(error.missing == (0, 3) for error in outcome.errors.values())  # type: ignore[attr-defined]


def test_ranks_of_one_node_on_two_machines_are_refused(host: StoreHost) -> None:
    """Their numbers say something that is not so."""

    def work(rank: int) -> None:
        place = host.place(rank, 2, 2, "split node")
        RankCalls(place, RoundStore(place), ProgressPage(), f"m{rank}").open(
            time.monotonic() + PATIENCE
        )

    outcome = in_threads(range(2), work)
    assert len(outcome.errors) == 2
    expect(outcome, PlacementError, "rank 0 (", "rank 1 (", "different machines")


def test_pickle_is_what_is_used(host: StoreHost) -> None:
    """Whatever pickle takes goes: here a class of the test's own, and recursion."""

    def work(calls: RankCalls, rank: int) -> Any:
        loop: list[Any] = [rank]
        loop.append(loop)
        found = calls.call("all", "allgather", loop, PATIENCE)
        assert found is not None and found[1 - rank][1] is found[1 - rank]
        return pickle.dumps(found[1 - rank][0])

    assert len(Ranks(host, 2, 2, False).run(work).all()) == 2


def test_what_elaunch_itself_sends_may_be_large(host: StoreHost) -> None:
    """It goes in pieces; a script's own object is refused on all ranks, and the next call works."""

    def work(calls: RankCalls, rank: int) -> Any:
        large = blob(rank, 2 * PIECE + 100)
        found = calls.call("all", "broadcast", large, PATIENCE, "loading")
        assert found == [blob(0, 2 * PIECE + 100)]
        assert calls.call("all", "gather", large, PATIENCE, "planning") == (
            [blob(r, 2 * PIECE + 100) for r in range(2)] if rank == 0 else None
        )
        thing = bytes(LONGEST) if rank == 1 else b""
        with pytest.raises(ContextError, match=r"rank 1 \(.* bytes, .*torch\.distributed"):
            calls.call("all", "allgather", thing, PATIENCE)
        return calls.call("all", "allgather", rank, PATIENCE)

    assert Ranks(host, 2, 2, False).run(work).all() == [[0, 1]] * 2


def test_the_store_does_not_grow(host: StoreHost) -> None:
    """Whatever calls there are, their keys go."""

    def work(calls: RankCalls, rank: int) -> Any:
        sizes = []
        for step in range(60):
            calls.call("all", "allgather", step, PATIENCE)
            calls.call("all", "broadcast", step, PATIENCE)
            calls.call("local", "gather_local", step, PATIENCE)
            if step in (5, 59):
                calls.call("all", "barrier", None, PATIENCE)
                sizes.append(host.store.num_keys() if rank == 0 else 0)
                calls.call("all", "barrier", None, PATIENCE)
        return sizes[1] - sizes[0]

    assert max(Ranks(host, 4, 2, False).run(work).all()) < 8


def test_ranks_that_agree_on_different_things_go_on(host: StoreHost) -> None:
    """All are told both, and the next call works."""

    def work(calls: RankCalls, rank: int) -> Any:
        about = {"timeout": PATIENCE, "everyone": rank > 5, "purpose": "saving"}
        with pytest.raises(CallsDiffer, match=r"rank \d: one; rank 2: two"):
            calls.agree(rank, None, "two" if rank == 2 else "one", **about)
        assert calls.agree("first" if rank == 0 else None, None, "x", **about) == (["first"], {})
        about["everyone"] = True
        return calls.agree(rank, {"a": 1} if rank == 1 else None, "x", **about)

    assert Ranks(host, 3, 3, False).run(work).all() == [([], {1: {"a": 1}})] * 3


@pytest.mark.slow
def test_64_ranks(host: StoreHost) -> None:
    """Of 8 nodes; one that has a problem is told by all, and one that leaves is named by all."""

    def work(calls: RankCalls, rank: int) -> Any:
        assert calls.call("all", "allgather", rank, PATIENCE) == list(range(64))
        near = list(range(rank // 8 * 8, rank // 8 * 8 + 8))
        assert calls.call("local", "allgather_local", rank, PATIENCE) == near
        problem = {"rank": rank} if rank in (5, 60) else None
        found = calls.agree(rank, problem, "x", PATIENCE, everyone=False, purpose="y")
        assert found == ([], {5: {"rank": 5}, 60: {"rank": 60}})
        if rank == 63:
            return None
        with pytest.raises(PeerLost, match=r"rank 63 \(") as caught:
            calls.call("all", "barrier", None, PATIENCE)
        return caught.value.missing

    assert Ranks(host, 64, 8, False).run(work).all() == [(63,)] * 63 + [None]
