"""Every sample of an epoch once, whatever restarts, world sizes and batch sizes come in it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import os
import pickle
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from elaunch.errors import PlacementError, SamplerError
from elaunch.training.sampler import (
    FEISTEL_ROUNDS,
    LARGEST,
    ORDER_VERSION,
    ElasticDistributedSampler,
    Permutation,
)
from tests import warm
from tests.tables import each

BILLION = 10**9
PINNED_TEN = [6, 1, 9, 0, 8, 4, 7, 5, 2, 3]
PINNED_SEED = [3, 8, 1, 9, 7, 6, 2, 5, 0, 4]
PINNED_EPOCH = [4, 6, 9, 7, 2, 1, 3, 0, 5, 8]
PINNED_BILLION = [121648538, 683574085, 650284425, 371222173]


def order(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    """Return a whole order."""
    found: list[int] = Permutation(length, seed, epoch)(torch.arange(length)).tolist()
    return found


def written_out(length: int, seed: int, epoch: int, position: int) -> int:
    """Compute one place of the order from its description, in plain integers."""
    words = hashlib.shake_256(f"elaunch {seed} {epoch}".encode()).digest(8 * FEISTEL_ROUNDS)
    key = [int.from_bytes(words[i : i + 4], "little") for i in range(0, len(words), 4)]
    rows = math.isqrt(length - 1) + 1
    rows += rows % 2
    columns = -(-length // rows)

    def drawn(value: int, number: int, side: int) -> int:
        word = value ^ key[2 * number]
        word ^= word >> 16
        word = word * 0x45D9F3B % 2**32
        word = (word ^ (word >> 16)) ^ key[2 * number + 1]
        word = word * 0x45D9F3B % 2**32
        return (word ^ (word >> 16)) * side >> 32

    while True:
        row, column = divmod(position, columns)
        for number in range(0, FEISTEL_ROUNDS, 2):
            row = (row + drawn(column, number, rows)) % rows
            column = (column + drawn(row, number + 1, columns)) % columns
        position = row * columns + column
        if position < length:
            return position


@pytest.mark.slow
@given(length=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_each_once(length: int, seed: int, epoch: int) -> None:
    """Any length, seed and epoch give all of 0 … length - 1."""
    assert sorted(order(length, seed, epoch)) == list(range(length))


@pytest.mark.slow
@given(
    length=st.integers(1, LARGEST),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_is_what_it_is_described_as(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """No overflow, no rounding up to the largest length; any place without those before it."""
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=5))
    found = Permutation(length, seed, epoch)(torch.tensor(places)).tolist()
    assert found == [written_out(length, seed, epoch, place) for place in places]


def test_does_not_change() -> None:
    """Checkpoints rely on it. If this must change, so must ORDER_VERSION."""
    assert ORDER_VERSION == 1
    assert order(10) == PINNED_TEN
    assert order(10, seed=1) == PINNED_SEED
    assert order(10, epoch=1) == PINNED_EPOCH
    places = torch.tensor([0, 1, 2, BILLION - 1])
    assert Permutation(BILLION, 42, 7)(places).tolist() == PINNED_BILLION


def is_even(found: Sequence[int]) -> bool:
    """Whether counts are as alike as those of chance are: chi-square."""
    counts = torch.tensor(found, dtype=torch.double)
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    freedom = torch.tensor(len(found) - 1.0)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item() > 0.001


def is_uniform(found: torch.Tensor) -> bool:
    """Whether numbers lie between 0 and 1 as those of chance do: Kolmogorov and Smirnov."""
    count = len(found)
    steps = torch.arange(count + 1) / count
    ordered = found.sort()[0]
    distance = max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())
    return (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance < 1.9495  # p > 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "rounds"),
    [
        (3, 120),
        *(pytest.param(*more, marks=pytest.mark.trial) for more in ((2, 200), (4, 60), (5, 40))),
    ],
)
def test_all_orders_are_equally_frequent(length: int, rounds: int) -> None:
    """The smallest lengths are the hardest for a network of few rounds."""
    count = rounds * math.factorial(length)
    seen = Counter(tuple(order(length, seed)) for seed in range(count))
    found = [seen[one] for one in permutations(range(length))]
    assert is_even(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [10, *(pytest.param(each, marks=pytest.mark.trial) for each in (27, 48))]
)
def test_each_element_comes_to_each_place(length: int) -> None:
    """Over the epochs of one seed: chi-square over all pairs of element and place."""
    table = torch.zeros(length, length)
    epochs = 20 * length
    for epoch in range(epochs):
        table[torch.arange(length), torch.tensor(order(length, 3, epoch))] += 1
    expected = epochs / length
    # Rows and columns of the table have fixed sums, so (length - 1)^2 degrees of freedom.
    statistic = ((table - expected) ** 2 / expected).sum().item()
    freedom = (length - 1) ** 2
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@cache
def places(length: int) -> torch.Tensor:
    """Return where the first 100,000 elements stand, as parts of the whole."""
    count = min(length, 100_000)
    return Permutation(length, 5, 0)(torch.arange(count)).double() / length


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 1 << 17, BILLION])
@pytest.mark.parametrize("lag", [1, 2, 8, 31, 256])
def test_neighbours_are_strangers(length: int, lag: int) -> None:
    """What stands ``lag`` places apart is not correlated, and its distance is that of chance."""
    found = places(length)
    one, other = found[:-lag], found[lag:]
    correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(len(one))
    assert is_uniform((other - one) % 1)


@pytest.mark.parametrize("length", [1 << 20, BILLION, LARGEST])
def test_any_stretch_is_spread_over_the_whole(length: int) -> None:
    """A batch, or what one rank sees, is a fair sample: 64 bins, at the start and in the middle."""
    for start, step in [(0, 1), (length // 2, 1), (3, 8), (0, 1024)]:
        places = torch.arange(1024) * step + start
        found = Permutation(length, 11, 2)(places)
        bins = torch.bincount(found.div(-(-length // 64), rounding_mode="floor"), minlength=64)
        assert is_even(bins.tolist())
        assert is_even(torch.bincount(found % 64, minlength=64).tolist())


def test_epochs_and_seeds_have_nothing_in_common() -> None:
    """As many places agree as by chance: one, give or take one."""
    orders = [order(5000, seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10


def samplers(data: Any, world: int, **options: Any) -> list[ElasticDistributedSampler]:
    """Return the samplers of all ranks."""
    return [ElasticDistributedSampler(data, world, rank, **options) for rank in range(world)]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as it comes back from a checkpoint: through torch.save, then through JSON."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = json.loads(json.dumps(torch.load(buffer, weights_only=True)))
    assert loaded == state
    return loaded


def steps(
    ranks: list[ElasticDistributedSampler], batch_size: int, most: int | None = None
) -> Iterator[list[int]]:
    """Train: yield what each step takes over all ranks, until the epoch's end or ``most``."""
    iterators = [iter(sampler) for sampler in ranks]
    for _ in range(sys.maxsize if most is None else most):
        batches = [list(itertools.islice(one, batch_size)) for one in iterators]
        assert len({len(batch) for batch in batches}) == 1, "a rank would wait for the others"
        if not batches[0]:
            return
        for sampler, batch in zip(ranks, batches, strict=True):
            sampler.advance(len(batch))
        assert len({json.dumps(sampler.state_dict()) for sampler in ranks}) == 1
        yield [index for batch in batches for index in batch]


@dataclass(frozen=True)
class Leg:
    """What happens between two restarts."""

    world: int
    batch_size: int
    steps: int
    lost: int = 0
    """Steps after the last checkpoint, which the next leg does again."""


@dataclass
class Account:
    """What has been trained on and was not lost again."""

    seen: list[int] = field(default_factory=list)
    state: dict[str, Any] | None = None

    def train(self, length: int, leg: Leg, **options: Any) -> None:
        """Do one leg from the last checkpoint."""
        ranks = samplers(range(length), leg.world, **options)
        for sampler in ranks:
            if self.state is not None:
                sampler.load_state_dict(self.state)
            sampler.set_epoch(sampler.epoch)
        for number, step in enumerate(steps(ranks, leg.batch_size, leg.steps + leg.lost), 1):
            if number <= leg.steps:
                self.seen += step
                self.state = saved(ranks[0].state_dict())


legs = st.lists(
    st.builds(Leg, st.integers(1, 8), st.integers(1, 9), st.integers(0, 12), st.integers(0, 5)),
    min_size=1,
    max_size=5,
)
HOLES = [Leg(4, 2, 1), Leg(3, 5, 2), Leg(5, 1, 1), Leg(2, 3, 1)]


@pytest.mark.slow
@given(
    length=st.integers(0, 300),
    chain=legs,
    last=st.builds(Leg, st.integers(1, 8), st.integers(1, 40), st.just(10**6)),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
@example(length=100, chain=HOLES, last=Leg(7, 4, 10**6), shuffle=True, seed=0)
@example(length=3, chain=[Leg(2, 1, 1)], last=Leg(8, 9, 10**6), shuffle=True, seed=0)
def test_any_chain_is_exact(
    length: int, chain: list[Leg], last: Leg, shuffle: bool, seed: int
) -> None:
    """Nothing is lost, repeated is only the padding, and that is counted; twice, for two epochs."""
    options = {"shuffle": shuffle, "seed": seed}
    account = Account()
    for epoch in range(2):
        account.seen.clear()
        for leg in [*chain, last]:
            account.train(length, leg, **options)
        counts = Counter(account.seen)
        assert sorted(counts) == list(range(length)), "something was lost"
        if account.state is None:  # without any data
            return
        world = max(leg.world for leg in [*chain, last])
        assert sum(counts.values()) - length == account.state["padding"] < world
        assert (account.state["offset"], account.state["epoch"]) == (length, epoch)
        ranks = samplers(range(length), last.world, **options)
        ranks[0].load_state_dict(account.state)
        ranks[0].set_epoch(epoch + 1)
        account.state = ranks[0].state_dict()


@pytest.mark.slow
@given(
    length=st.integers(0, 300),
    chain=legs,
    last=st.builds(Leg, st.integers(1, 8), st.integers(1, 40), st.just(10**6)),
)
def test_any_chain_with_drop_last(length: int, chain: list[Leg], last: Leg) -> None:
    """Nothing is repeated, and less than one sample per rank is left out."""
    account = Account()
    for leg in [*chain, last]:
        account.train(length, leg, drop_last=True)
    assert max(Counter(account.seen).values(), default=1) == 1
    assert length - len(account.seen) < last.world
    assert account.state is None or account.state["offset"] == len(account.seen)


@pytest.mark.slow
@given(length=st.integers(1, 200), world=st.integers(1, 8), batch_size=st.integers(1, 9))
def test_a_step_takes_what_comes_next(length: int, world: int, batch_size: int) -> None:
    """The same samples as one rank with the whole batch would take, in whatever order."""
    alone = list(ElasticDistributedSampler(range(length), 1, 0))
    wide = world * batch_size
    for number, step in enumerate(steps(samplers(range(length), world), batch_size)):
        expected = alone[number * wide : (number + 1) * wide]
        padding = len(step) - len(expected)
        assert sorted(step) == sorted(expected + (alone * world)[:padding])
    assert (number + 1) * wide >= length


@pytest.mark.slow
@each("world", range(1, 9))
@each("length", [1, 7, 64, 101])
@each("drop_last", [False, True])
def test_shares_are_those_of_torch(world: int, length: int, drop_last: bool) -> None:
    """Without a shuffle each rank's indices are equal to torch's; with one their numbers are."""
    for rank in range(world):
        for shuffle in (False, True):
            words: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
            theirs: Any = DistributedSampler(range(length), world, rank, **words)  # type: ignore
            ours = ElasticDistributedSampler(range(length), world, rank, **words)
            assert len(list(ours)) == len(list(theirs)) == len(ours) == len(theirs)
            assert ours.total_size == theirs.total_size
            assert ours.num_samples == theirs.num_samples
            if not shuffle:
                assert list(ours) == list(theirs)


def test_is_taken_for_torchs() -> None:
    """Trainers that look for a DistributedSampler leave it in its place and call set_epoch."""
    assert isinstance(ElasticDistributedSampler(range(3), 1, 0), DistributedSampler)


def test_epochs_and_seeds_differ() -> None:
    """And the same ones are the same."""
    orders = set()
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
        sampler = ElasticDistributedSampler(range(50), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        assert list(sampler) == list(sampler)
        orders.add(tuple(sampler))
    assert len(orders) == 6


def test_length_is_what_is_left() -> None:
    """For this rank, padding included; the loader's as well."""
    sampler = ElasticDistributedSampler(range(103), 4, 1)
    loader: DataLoader[int] = DataLoader(range(103), 8, sampler=sampler)
    assert (len(sampler), len(loader)) == (26, 4)
    sampler.advance(8)
    assert (len(sampler), len(loader), sampler.offset) == (18, 3, 32)
    for _ in range(3):
        sampler.advance(8)
    assert (len(sampler), sampler.offset, sampler.padding) == (0, 103, 1)


def test_an_epoch_that_is_done_is_not_done_again() -> None:
    """After a restart at its very end it is empty; without set_epoch it is an error."""
    sampler = ElasticDistributedSampler(range(5), 1, 0)
    sampler.advance(5)
    with pytest.raises(SamplerError, match=r"all of epoch 0 is done: call set_epoch\(1\)"):
        iter(sampler)
    with pytest.raises(SamplerError, match=r"after the end of epoch 0.*set_epoch\(1\)"):
        sampler.advance(1)
    again = ElasticDistributedSampler(range(5), 1, 0)
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(0)
    assert list(again) == []
    again.set_epoch(1)
    assert sorted(again) == [0, 1, 2, 3, 4]


def test_a_state_of_other_data_is_refused() -> None:
    """By name, with both values; the sampler is as it was."""
    sampler = ElasticDistributedSampler(range(10), 2, 0, seed=3)
    sampler.advance(1)
    before = sampler.state_dict()
    for change, words in [
        ({"length": 11}, r"of other data: length 11 \(here 10\)"),
        ({"seed": 4}, r"seed 4 \(here 3\)"),
        ({"shuffle": False, "seed": 0}, r"seed 0 \(here 3\), shuffle False \(here True\)"),
        ({"version": 2}, "version 2"),
        ({"offset": 11}, "no place in 10 samples: epoch 0 offset 11"),
        ({"offset": -1}, "offset -1"),
        ({"offset": 1.5}, "offset 1.5"),
        ({"epoch": "1"}, "epoch 1"),
    ]:
        with pytest.raises(SamplerError, match=words):
            sampler.load_state_dict({**before, **change})
    with pytest.raises(SamplerError, match="epoch, length"):
        sampler.load_state_dict({"offset": 3})
    assert sampler.state_dict() == before


def test_counting_more_than_was_read_is_an_error() -> None:
    """As who counts all ranks' batches together does; nothing is skipped in silence."""
    sampler = ElasticDistributedSampler(range(100), 2, 1)
    iterator = iter(sampler)
    for _ in range(4):
        next(iterator)
    with pytest.raises(SamplerError, match=r"advance\(8\), but rank 1 was given only 4 samples"):
        sampler.advance(8)
    sampler.advance(4)
    with pytest.raises(SamplerError, match="only 0 samples since"):
        sampler.advance(1)
    with pytest.raises(SamplerError, match=r"advance\(-1\)"):
        sampler.advance(-1)
    assert sampler.offset == 8


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_ranks_are_checked(world: int, rank: int) -> None:
    """At once."""
    with pytest.raises(PlacementError, match=f"rank {rank} "):
        ElasticDistributedSampler(range(3), world, rank)


@pytest.mark.parametrize("shuffle", [False, True])
def test_long_epochs(shuffle: bool) -> None:
    """Indices are computed in pieces: where one ends and the next begins, nothing is lost."""
    length = 100_003
    shares = [list(sampler) for sampler in samplers(range(length), 3, shuffle=shuffle)]
    alone = list(ElasticDistributedSampler(range(length), 1, 0, shuffle=shuffle))
    together = [index for indices in zip(*shares, strict=True) for index in indices]
    assert together == alone + alone[:2]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data() -> None:
    """Of 10^9 samples any part costs the same, and begins at once."""
    tracemalloc.start()
    sampler = ElasticDistributedSampler(range(10**9), 8, 3)
    sampler.load_state_dict(sampler.state_dict() | {"offset": 999_000_000})
    count = sum(1 for _ in sampler)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(sampler) == 125_000
    assert peak < 4_000_000


class Squares(Dataset[tuple[int, int]]):
    """A map-style dataset."""

    def __len__(self) -> int:
        return 143

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Stream(IterableDataset[int]):
    """An iterable dataset, as the docstring of ``positions`` has it."""

    def __init__(self, sampler: ElasticDistributedSampler, batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[int]:
        me: Any = torch.utils.data.get_worker_info()
        part = (me.id, me.num_workers) if me else (0, 1)
        wanted = self.sampler.positions(self.batch_size, *part)
        position = next(wanted, None)
        for at, line in enumerate(range(143)):
            if at == position:
                yield line
                position = next(wanted, None)


def load(loader: DataLoader[Any], sampler: ElasticDistributedSampler, most: int) -> list[int]:
    """Train ``most`` steps on what a loader gives."""
    seen = []
    for number, batch in enumerate(loader, 1):
        indices = batch[0] if isinstance(batch, list) else batch
        seen += indices.tolist()
        sampler.advance(len(indices))
        if number == most:
            break
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_with_a_loader_that_reads_ahead(workers: int, kind: str) -> None:
    """What was read ahead and not trained on comes again after the restart, to other ranks."""
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"prefetch_factor": 4, "multiprocessing_context": "fork"}
    words = {"shuffle": kind == "map", "drop_last": kind == "stream"}
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for world, batch_size, most in [(2, 8, 3), (3, 5, 2), (1, 7, 10**6)]:
        after: list[dict[str, Any]] = []
        for sampler in samplers(Squares(), world, **words):
            if state is not None:
                sampler.load_state_dict(state)
            data: Any = Squares() if kind == "map" else Stream(sampler, batch_size)
            given = {"sampler": sampler} if kind == "map" else {}
            loader: DataLoader[Any] = DataLoader(data, batch_size, **given, **options)
            seen += load(loader, sampler, most)
            after.append(sampler.state_dict())
        assert all(one == after[0] for one in after)
        state = after[0]
    assert sorted(seen) == list(range(143))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_with_torchdatas_loader(workers: int) -> None:
    """Its own state may be loaded too: nothing is skipped twice, and both count the same."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> tuple[ElasticDistributedSampler, Any]:
        sampler = ElasticDistributedSampler(Squares(), 2, 1)
        return sampler, stateful(Squares(), 8, sampler=sampler, num_workers=workers)

    expected = list(ElasticDistributedSampler(Squares(), 2, 1))
    sampler, loader = make()
    seen = load(loader, sampler, 3)
    state, mine = loader.state_dict(), sampler.state_dict()
    for also_mine in (False, True):
        again, its_loader = make()
        if also_mine:
            again.load_state_dict(mine)
        its_loader.load_state_dict(state)
        assert seen + load(its_loader, again, 10**6) == expected
        assert (again.offset, again.padding) == (143, 1)


def test_a_copy_goes_its_own_way() -> None:
    """Also through pickle, as a dataset that holds it goes to the workers of a loader."""
    sampler = ElasticDistributedSampler(range(20), 2, 0)
    next(iter(sampler))
    other = pickle.loads(pickle.dumps(sampler))
    other.advance(3)
    assert (sampler.offset, other.offset) == (0, 6)
    assert list(other) == list(sampler)[3:]


def test_a_pass_that_has_begun_is_not_moved() -> None:
    """Neither by what is counted meanwhile nor before its first index is asked for."""
    sampler = ElasticDistributedSampler(range(20), 2, 0)
    whole = list(sampler)
    iterator = iter(sampler)
    sampler._reading = None  # as if another process had read
    sampler.advance(4)
    assert list(iterator) == whole
    assert list(sampler) == whole[4:]


@pytest.mark.slow
def test_rank_and_world_are_the_launchers() -> None:
    """Of torch's process group, else of the launcher's variables, else one alone."""
    code = (
        "import elaunch, torch.distributed as dist, sys\n"
        "if 'group' in sys.argv: dist.init_process_group('gloo', store=dist.HashStore(), rank=0,"
        " world_size=1)\n"
        "sampler = elaunch.ElasticDistributedSampler(range(10))\n"
        "print(sampler.rank, sampler.num_replicas)\n"
        "if 'group' in sys.argv: dist.destroy_process_group()\n"
    )
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
    launched = dict(zip(names, "3 4 1 2 1 2".split(), strict=True))
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for words, variables, wanted in [
        ([], {}, "0 1"),
        ([], launched, "3 4"),
        (["group"], launched, "0 1"),
    ]:
        environ = {k: v for k, v in os.environ.items() if k not in launched} | variables
        argv = [sys.executable, "-c", code, *words]
        done = warm.run(argv, environ)
        assert done.stdout == f"{wanted}\n", done.stderr


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("counts", [True, False])
def test_torch_elastics_argument(epoch: int, counts: bool) -> None:
    """``start_index`` samples are done of the first epoch that is begun; later ones are whole."""
    data = range(103)
    before = samplers(data, 4)
    for sampler in before:
        sampler.set_epoch(epoch)
    done = [index for step in steps(before, 5, 3) for index in step]
    ranks = samplers(data, 3, start_index=len(done))
    assert {len(sampler) for sampler in ranks} == {-(-(103 - 60) // 3)}
    for number in (epoch, epoch + 1, epoch + 2):
        for sampler in ranks:
            sampler.set_epoch(number)
        left = list(steps(ranks, 4)) if counts else [list(sampler) for sampler in ranks]
        seen = Counter(index for part in left for index in part)
        if number == epoch:
            seen += Counter(done)
        assert set(seen) == set(data)
        assert sum(seen.values()) <= 103 + 2


def test_a_start_that_is_not_there() -> None:
    """As torchelastic's class has it; a state that is loaded counts before it."""
    for start in (-1, 10, 11):
        with pytest.raises(ValueError, match=f"start_index is {start}, but the dataset has 10"):
            ElasticDistributedSampler(range(10), 1, 0, start_index=start)
    with pytest.raises(SamplerError, match="give start_index=4 by its name"):
        ElasticDistributedSampler(range(10), 1, 0, 4)
    one = ElasticDistributedSampler(range(10), 1, 0)
    other = ElasticDistributedSampler(range(10), 1, 0, start_index=4)
    other.load_state_dict(one.state_dict())
    other.set_epoch(2)
    assert len(other) == 10
