"""Ranks as threads, around real connections: the same bits as one rank, whatever their number."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import ContextError, PeerLost
from elaunch.training.distributed import DistributedContext
from elaunch.training.steps import gradients
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.group import Group, connect
from tests.training.rankrig import StoreHost, in_threads

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """One store for all tests of this module."""
    yield StoreHost()


class Net(nn.Module):
    """Layers of two types; one is used in some leaves only, one never, one by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.images = nn.Conv2d(1, 2, 2).to(memory_format=torch.channels_last)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3).to(torch.bfloat16)
        self.again = self.first

    def forward(self, x: torch.Tensor, leaf: int) -> torch.Tensor:
        y = self.again(x).tanh()
        if leaf % 3 == 1:
            y = self.sometimes(y)
        image = self.images(x[None, None])
        return self.last(y.bfloat16()).float().square().mean() + image.square().mean()


def model() -> Net:
    """Return the same model each time."""
    net = Net()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in net.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    return net


def run(host: StoreHost, size: int, count: int, steps: int = 2) -> list[list[Any]]:
    """Return each rank's gradients after some steps of ``count`` leaves."""
    job = uuid.uuid4().hex

    def work(rank: int) -> list[Any]:
        ranks = DistributedContext.of(host.place(rank, size, job=job))
        group = connect(ranks, range(ranks.size))
        net = model()
        sums = Gradients(list(net.parameters()), group)
        for step in range(steps):
            share = sums.begin(count, float(count))
            for number, what in enumerate(share.sums):
                generator = torch.Generator().manual_seed(1000 * step + what.leaf)
                loss = net(torch.randn(4, 5, generator=generator), what.leaf)
                sums.add(number, loss.backward)
            assert sums.sum_up()
            unused = set(sums.unused())
            if group is not None:
                import json

                content = json.dumps(sorted(unused)).encode()
                unused = set.intersection(*(set(json.loads(o)) for o in group.allgather(content)))
            sums.assign(unused)
            with torch.no_grad():
                for one in net.parameters():
                    if one.grad is not None:
                        one -= one.grad
        found = [None if one.grad is None else one.grad.clone() for one in net.parameters()]
        found += [one.detach().clone() for one in net.parameters()]
        sums.close()
        ranks.close()
        return found

    return in_threads(range(size), work).all()


def same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists of tensors have the same bits."""
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("count", [1, 5, 12])
def test_all_worlds_have_the_bits_of_one_rank(
    host: StoreHost, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buckets of all sizes, and more ranks than leaves."""
    (alone,) = run(host, 1, count)
    assert alone[list(dict(Net().named_parameters())).index("never.weight")] is None
    for size, bucket in ((2, 8 << 20), (3, 64), (4, 1), (6, 256)):
        monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket)
        for rank, found in enumerate(run(host, size, count)):
            assert same(found, alone), f"rank {rank} of {size}"


def test_it_is_the_mean(host: StoreHost) -> None:
    """Of what autograd computes for each leaf."""
    (found,) = run(host, 1, 4, steps=1)
    net = model()
    total = torch.zeros(())
    for leaf in range(4):
        total = total + net(torch.randn(4, 5, generator=torch.Generator().manual_seed(leaf)), leaf)
    (total / 4).backward()
    for one, other in zip(net.parameters(), found, strict=False):
        assert (one.grad is None) == (other is None)
        assert other is None or torch.allclose(one.grad, other, rtol=0.05, atol=1e-4)


def test_a_lost_rank_is_named(host: StoreHost) -> None:
    """By the ranks that wait for it."""
    job = uuid.uuid4().hex

    def work(rank: int) -> list[bytes] | None:
        ranks = DistributedContext.of(host.place(rank, 2, job=job))
        group = connect(ranks, range(ranks.size))
        assert isinstance(group, Group)
        group.allgather(b"")
        if rank == 0:
            return group.allgather(b"here")
        del group
        return None

    outcome = in_threads(range(2), work)
    error = outcome.errors[0]
    assert isinstance(error, PeerLost) and error.missing == (1,)
    assert "rank 1 is lost" in str(error)


def test_bytes_of_different_lengths_are_gathered(host: StoreHost) -> None:
    """None at all, too."""
    job, groups = uuid.uuid4().hex, list[Group]()

    def work(rank: int) -> list[bytes]:
        group = connect(DistributedContext.of(host.place(rank, 3, job=job)), range(3))
        assert isinstance(group, Group)
        groups.append(group)  # until all have received what it sends
        return group.allgather(b"x" * (1000 * rank))

    expected = [b"", b"x" * 1000, b"x" * 2000]
    assert in_threads(range(3), work).all() == [expected] * 3


def test_two_gradients_in_one_backward_are_refused(host: StoreHost) -> None:
    """Once the first was sent: the sum would lack the second."""
    from torch.utils.checkpoint import checkpoint

    job = uuid.uuid4().hex

    def work(rank: int) -> None:
        group = connect(DistributedContext.of(host.place(rank, 2, job=job)), range(2))
        layer = nn.Linear(3, 3)
        sums = Gradients(list(layer.parameters()), group)
        sums.begin(2, 2.0)
        x = torch.ones(1, 3, requires_grad=True)
        twice = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
        sums.add(0, twice.sum().backward)

    outcome = in_threads(range(2), work)
    assert {type(error) for error in outcome.errors.values()} <= {ContextError, PeerLost}
    assert any("use_reentrant=False" in str(error) for error in outcome.errors.values())
