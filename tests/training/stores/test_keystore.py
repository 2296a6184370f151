"""elaunch.training.stores.keystore, ``in_turn``: ranks as threads on a real TCPStore, and alone."""

from __future__ import annotations

import math
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import CollectiveError, CollectiveTimeout, ContextError
from elaunch.training.distributed import DistributedContext
from tests.launching import TORCHRUN, Launcher
from tests.training.rankrig import PATIENCE, Outcome, StoreHost, in_threads

Group = Callable[..., Outcome]


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """One store for all tests of this module."""
    yield StoreHost()


@pytest.fixture
def group(host: StoreHost) -> Group:
    """Run ``work(context)`` on each of some ranks, as threads with a context each."""

    def run(size: int, work: Callable[[DistributedContext], Any]) -> Outcome:
        job = uuid.uuid4().hex

        def rank(number: int) -> Any:
            context = DistributedContext.of(host.place(number, size, job=job))
            context.open(timeout=PATIENCE)
            try:
                return work(context)
            finally:
                context.close()

        return in_threads(range(size), rank)

    return run


VALUES = ["text", "", "ä\n", 0, -(2**63), 2**80, 0.5, True, None, b"", b"\0b\xff", [1, {"a": [2]}]]


def test_a_value_comes_back_as_it_was_set(group: Group) -> None:
    """On every rank, and also where it is set again."""

    def work(context: DistributedContext) -> Any:
        if context.rank == 1:
            for number, value in enumerate(VALUES):
                context.store.set(f"key {number}", value)
            context.store.set("key 0", "another")
            context.store.set("done", True)
        context.store.get("done", PATIENCE)
        return [context.store.get(f"key {number}") for number in range(len(VALUES))]

    for found in group(3, work).all():
        assert found == ["another", *VALUES[1:]]
        assert [type(each) for each in found[1:]] == [type(each) for each in VALUES[1:]]


def test_counters(group: Group) -> None:
    """Each addition has a sum of its own; what was set as a number can be counted on."""

    def work(context: DistributedContext) -> list[int]:
        store = context.store
        if context.rank == 0:
            store.set("begun", 100)
        store.get("begun", PATIENCE)
        return [store.add("hits") for _ in range(20)] + [store.add("begun", -1)]

    outcome = group(3, work).all()
    assert sorted(n for sums in outcome for n in sums[:20]) == list(range(1, 61))
    assert sorted(sums[20] for sums in outcome) == [97, 98, 99]


def test_a_value_that_nobody_sets(group: Group) -> None:
    """The error names the key, the other ranks and what they do; the store goes on to work."""

    def work(context: DistributedContext) -> Any:
        if context.rank == 1:
            context.store.get("over", PATIENCE)
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            context.store.get("missing", 0.2)
        context.store.set("over", 1)
        return caught.value

    error = group(2, work).all()[0]
    assert error.missing == (1,)
    assert str(error).startswith("store.get('missing'): no rank has set it within 0.2 s: rank 1 (")
    assert "its last call was store.get('over')" in str(error)


def test_threads_of_one_rank_do_not_wait_for_each_other(group: Group) -> None:
    """A wait holds up no other call."""

    def work(context: DistributedContext) -> Any:
        found: list[Any] = []
        wait = threading.Thread(target=lambda: found.append(context.store.get("late", PATIENCE)))
        wait.start()
        context.barrier()
        context.store.set("late", "now")
        wait.join(PATIENCE)
        return found

    assert group(2, work).all() == [["now"], ["now"]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda store: store.set("", 1), "the key is '': give a text"),
        (lambda store: store.set(3, 1), "the key is 3: give a text"),
        (lambda store: store.get("\ud800"), "cannot be encoded"),
        (lambda store: store.set("k" * 2000, 1), "has 2000 characters; 1000 fit"),
        (lambda store: store.set("k", {1, 2}), "the value is set, which JSON does not take"),
        (lambda store: store.set("k", b"x" * 9_000_000), "broadcast"),
        (lambda store: store.add("k", 1.5), "the amount is a whole number"),
        (lambda store: store.add("k", 2**70), "the amount is a whole number"),
        (lambda store: store.get("k", 0), "timeout is 0"),
        (lambda store: store.get("k", math.nan), "timeout is nan"),
        (lambda store: (store.set("k", "v"), store.add("k")), "it holds no number but 'v'"),
    ],
)
def test_what_cannot_be(host: StoreHost, call: Callable[[Any], Any], text: str) -> None:
    """It is said before anything is sent, alone and among others, and does no harm."""
    place = host.place(0, 2, job=uuid.uuid4().hex)
    for context in (DistributedContext(), DistributedContext.of(place)):
        with pytest.raises(ContextError) as caught:
            call(context.store)
        assert text in str(caught.value)
        context.store.set("after", 1)
        assert context.store.get("after") == 1
        context.close()


def test_the_only_rank_needs_no_store() -> None:
    """Its threads share what it sets; nobody else would set what is missing."""
    context = DistributedContext()
    late = threading.Timer(0.1, context.store.set, ("late", [1, 2]))
    late.start()
    assert context.store.get("late", PATIENCE) == [1, 2]
    assert [context.store.add("n", 2), context.store.add("n", -5)] == [2, -3]
    with pytest.raises(CollectiveTimeout, match=r"within 0.05 s: this is the only one"):
        context.store.get("missing", 0.05)
    with context.in_turn():
        pass
    with pytest.raises(KeyError), context.in_turn():
        raise KeyError("its own")


def test_the_end_of_the_context_ends_a_wait(host: StoreHost) -> None:
    context = DistributedContext.of(host.place(0, 2, job=uuid.uuid4().hex))
    context.store.set("k", 1)
    threading.Timer(0.2, context.close).start()
    with pytest.raises((CollectiveError, ContextError)):
        context.store.get("missing", PATIENCE)
    with pytest.raises(ContextError, match="closed"):
        context.store.set("k", 2)


def test_turns(group: Group) -> None:
    """One after the other, rank 0 first; nobody is through before the last is."""
    seen: list[tuple[str, int]] = []

    def work(context: DistributedContext) -> None:
        time.sleep(0.02 * (3 - context.rank))
        for _ in range(2):
            with context.in_turn():
                seen.append(("in", context.rank))
                time.sleep(0.02)
                seen.append(("out", context.rank))

    group(4, work).all()
    assert seen == [(word, rank) for rank in range(4) for word in ("in", "out")] * 2


def test_a_rank_that_fails_in_its_turn(group: Group) -> None:
    """It gets its own exception, the others its name; those behind it have no turn."""
    seen: list[int] = []

    def work(context: DistributedContext) -> Any:
        with pytest.raises((ValueError, CollectiveError)) as caught, context.in_turn():
            seen.append(context.rank)
            if context.rank == 1:
                raise ValueError("the file is not there")
        context.barrier()
        return caught.value

    first, own, last = group(3, work).all()
    assert seen == [0, 1]
    assert type(own) is ValueError
    text = "in_turn: rank 1 failed in its turn: ValueError: the file is not there"
    assert str(first) == str(last) == text


@pytest.mark.slow
def test_a_rank_that_never_comes_to_its_turn(group: Group) -> None:
    """The deadline's error names it."""

    def work(context: DistributedContext) -> Any:
        if context.rank == 1:
            return context.store.get("over", PATIENCE)
        with pytest.raises(CollectiveTimeout) as caught, context.in_turn(timeout=2.0):
            pass
        if context.rank == 2:
            context.store.set("over", True)
        return caught.value

    first, _, last = group(3, work).all()
    for error in (first, last):
        assert error.missing == (1,)
        assert "in_turn #1: not all ranks came within 2 s: rank 1 (host " in str(error)


SCRIPT = """
import sys, time
import elaunch
with elaunch.init(announce=False) as ctx:
    rank, size, store = ctx.distributed.rank, ctx.distributed.size, ctx.distributed.store
    store.set(f"from {rank}", {"rank": rank})
    assert [store.get(f"from {r}", 60) for r in range(size)] == [{"rank": r} for r in range(size)]
    with ctx.distributed.in_turn():
        with open(sys.argv[1], "a") as file:
            file.write(f"{rank} of {size} is {store.add('turns')}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["elaunch", "torchrun", "alone"])
def test_under_each_launcher(elaunch: Launcher, tmp_path: Path, launcher: str) -> None:
    """With the agent's store, with torchrun's, and with none."""
    script, out = tmp_path / "s.py", tmp_path / "out"
    script.write_text(SCRIPT)
    argv = {
        "elaunch": [sys.executable, "-m", "elaunch", "run", "--nproc-per-node", "2"],
        "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],
        "alone": [sys.executable],
    }[launcher]
    done = elaunch.start_command([*argv, script, out]).wait(120)
    assert done.returncode == 0, done
    size = 1 if launcher == "alone" else 2
    assert out.read_text() == "".join(f"{r} of {size} is {r + 1}\n" for r in range(size))
