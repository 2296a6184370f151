"""What steps() refuses, before the first step: with the value, the reason and what to do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from elaunch.errors import ContextError, PeerLost
from elaunch.training.distributed import DistributedContext
from elaunch.training.steps import refusals
from tests.training.rankrig import StoreHost, in_threads
from tests.training.stepsrig import options, state_of


class Stream(IterableDataset[int]):
    """A stream of samples."""

    def __iter__(self) -> Iterator[int]:
        """Begin it."""
        return iter(range(10))


def refused(state: Any = None, **changes: Any) -> str:
    """Return the error of a rank alone."""
    with pytest.raises(ContextError) as error:
        state = state_of(nn.Linear(2, 1)) if state is None else state
        refusals.check(DistributedContext(), state, options(**changes))
    return str(error.value)


def test_what_is_right_is_taken() -> None:
    """Frozen parameters are not trained; a frozen BatchNorm, and one without statistics, pass."""
    net = nn.Sequential(
        nn.BatchNorm1d(2).eval(), nn.InstanceNorm1d(2), nn.Linear(2, 2), nn.GroupNorm(1, 2)
    )
    net[2].bias.requires_grad_(False)
    found = refusals.check(DistributedContext(), {"a": [state_of(net)]}, options())
    assert len(found.parameters) == 5 and list(found.modules) == ["a.0.model"]
    assert len(found.optimizers) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 10, "micro_batch": 4}, "global_batch=10 is no multiple of micro_batch=4"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"micro_batch": 1.5}, "micro_batch=1.5"),
        ({"until": -1}, "until=-1"),
        ({"until": 3, "epochs": 2}, "until=3 and epochs=2 are given"),
        ({"threads": 0}, "threads=0"),
        ({"seed": "x"}, "seed='x'"),
        ({"last": "pad"}, 'last=\'pad\': give "drop" or "short"'),
        ({"on_bad_batch": "leave"}, 'on_bad_batch=\'leave\': give "raise" or "skip"'),
        ({"check": "loud"}, "check='loud': give True, False or \"warn\""),
        ({"save_every": 0}, "save_every=0"),
        ({"save_every": "never"}, "save_every='never'"),
        ({"loader": {"batch_size": 3}}, "loader={'batch_size': …}"),
        ({"dataset": None}, "either a dataset or batch="),
        ({"batch": lambda step, leaf: 0}, "either a dataset or batch="),
        ({"dataset": Stream()}, "a Stream, has no length or no samples by index"),
        ({"dataset": iter([1])}, "has no length"),
        ({"dataset": []}, "is empty"),
        ({"global_batch": 12}, "the dataset has 10 samples, and global_batch=12 takes more"),
    ],
)
def test_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    """Each by its name and value."""
    message = refused(**changes)
    assert message.startswith("steps(): ") and words in message


def test_states_are_refused() -> None:
    """What is no state, and what has nothing to train."""
    net = nn.Linear(2, 1)
    assert "a dict with names" in refused(state=[net])
    assert "no module" in refused(state={"x": 1})
    assert "no optimizer" in refused(state={"model": net})
    assert "key 'steps'" in refused(state={**state_of(net), "steps": 3})
    frozen = nn.Linear(2, 1)
    state = state_of(frozen)
    frozen.requires_grad_(False)
    assert "no parameter that requires a gradient" in refused(state=state)


def test_modules_are_refused_by_their_names() -> None:
    """With what to use in their place."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    message = refused(state=state_of(inner))
    assert "model.1.0 is a BatchNorm1d" in message and "GroupNorm" in message
    message = refused(state=state_of(nn.Sequential(nn.LazyLinear(2))))
    assert "model.0.weight has no shape yet" in message


def test_a_module_in_ddp_is_refused() -> None:
    """Its gradients would be summed twice."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        message = refused(state=state_of(DistributedDataParallel(nn.Linear(2, 1))))
    finally:
        destroy_process_group()
    assert "model is a DistributedDataParallel: give the plain module" in message


@pytest.mark.slow
def test_all_ranks_raise_the_same() -> None:
    """What one rank refuses, and what they have not alike."""
    host = StoreHost()

    def errors(*changes: dict[str, Any]) -> set[str]:
        job = uuid.uuid4().hex

        def work(rank: int) -> str:
            ranks = DistributedContext.of(host.place(rank, 3, job=job))
            try:
                state = state_of(nn.Linear(*changes[rank].get("shape", (2, 1))))
                given = {k: v for k, v in changes[rank].items() if k != "shape"}
                refusals.check(ranks, state, options(**given))
            except ContextError as error:
                return str(error)
            finally:
                ranks.close()
            return ""

        return {*in_threads(range(3), work).all()}

    (message,) = errors({}, {"until": 0}, {})
    assert message.startswith("steps(): rank 1: until=0")
    (message,) = errors({}, {}, {"seed": 3})
    assert "seed is 0 on rank 0 and 3 on rank 2: give the same" in message
    (message,) = errors({}, {"shape": (3, 1)}, {})
    assert "the list of trained parameters" in message
    assert errors({}, {}, {}) == {""}


@pytest.mark.slow
def test_steps_on_some_ranks_only_is_an_error() -> None:
    """Of those that call it, with the rank that does not."""
    host, job = StoreHost(), uuid.uuid4().hex

    def work(rank: int) -> str:
        ranks = DistributedContext.of(host.place(rank, 2, job=job))
        ranks.open()
        if rank == 1:
            ranks.close()
            return ""
        with pytest.raises(PeerLost) as error:
            refusals.check(ranks, state_of(nn.Linear(2, 1)), options())
        ranks.close()
        return str(error.value)

    assert "rank 1" in in_threads(range(2), work).all()[0]


@pytest.mark.slow
def test_states_that_differ_are_refused() -> None:
    """With the first parameter that does, on all ranks."""
    host, job = StoreHost(), uuid.uuid4().hex

    def work(rank: int) -> str:
        ranks = DistributedContext.of(host.place(rank, 2, job=job))
        net = nn.Linear(2, 1)
        with torch.no_grad():
            net.weight.fill_(1.0)
            net.bias.fill_(float(rank))
        with pytest.raises(ContextError) as error:
            refusals.check_same(ranks, {"model": net})
        ranks.close()
        return str(error.value)

    (message,) = {*in_threads(range(2), work).all()}
    assert "model.bias" in message and "torch.manual_seed(0)" in message
