"""The order of the data in training that restarts and changes its size in mid-epoch.

An epoch is one order of the whole dataset: a function of its length, the seed and the epoch
(`Permutation`), the same for every world size. ``offset`` is how many samples of it
all ranks together have done. From there the rest is dealt out by turns, so that a step in which
each of W ranks takes a batch of B does the B * W samples from ``offset`` on, whichever rank has
which. Another world size, or batch size, just deals the same rest in another way: nothing is lost
and nothing repeated.

Ranks must make equally many steps, so where W does not divide what is left of an epoch, the last
step takes up to W - 1 samples of the epoch's beginning once more (``padding``), or with
``drop_last`` leaves up to W - 1 out. That happens at the end of the epoch only, once, whatever
restarts came before.

The sampler does not know which of the samples that a DataLoader has read ahead were trained on. So
the loop counts: ``advance`` after each step of the optimizer.

The order of an epoch is computed, not stored: any part of it costs only that part.
Position p of the order is found by a keyed bijection of a rectangle of ``rows * columns >= n``
cells. p is split into a row and a column, and in each of FEISTEL_ROUNDS rounds one of the two is
turned by a keyed hash of the other, row and column by turns (a generalized Feistel network). A
result beyond n - 1 is put through again until it is below (cycle walking): less than one in
``sqrt(n)`` is.

The order is part of what a checkpoint relies on. It is a function of (n, seed, epoch) alone: of no
world size, no version of torch and no device. Whoever changes it must change ORDER_VERSION
too; a test holds the order fast.

``rows`` is even: with two odd sides every round would be an even permutation, so half of all orders
could never come. Twelve rounds are what makes all orders of 5 and 6 elements equally frequent;
eight are not enough.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from elaunch.errors import PlacementError, SamplerError
from elaunch.training import launch

ORDER_VERSION = 1
FEISTEL_ROUNDS = 12
LARGEST = 1 << 60
"""More elements than this have no order here: sides are to stay below 2^31."""

_WORD = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # odd and below 2^31: its product with a word does not overflow 64 bits


@dataclass(frozen=True)
class Permutation:
    """The order of 0 … ``length - 1`` for a seed and an epoch; memory does not grow with length."""

    length: int
    seed: int
    epoch: int

    def __call__(self, positions: Tensor) -> Tensor:
        """Return what stands at ``positions``: int64 of any one-dimensional shape, on the CPU."""
        rows = math.isqrt(max(self.length - 1, 0)) + 1
        rows += rows & 1
        sides = (rows, -(-self.length // rows))
        keys = self._keys()
        found = _turn(positions, sides, keys)
        while (beyond := found >= self.length).any():
            found[beyond] = _turn(found[beyond], sides, keys)
        return found

    def _keys(self) -> list[tuple[int, int]]:
        words = hashlib.shake_256(f"elaunch {self.seed} {self.epoch}".encode()).digest(
            8 * FEISTEL_ROUNDS
        )
        numbers = [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _turn(cells: Tensor, sides: tuple[int, int], keys: list[tuple[int, int]]) -> Tensor:
    """Put each cell through all rounds; in place where it can, since this is the whole cost."""
    row = cells.div(sides[1], rounding_mode="floor")
    column = cells - row * sides[1]
    for number, key in enumerate(keys):
        source, target, side = (
            (column, row, sides[0]) if number % 2 == 0 else (row, column, sides[1])
        )
        target += _hash(source, key, side)
        target -= (target >= side) * side
    return row.mul_(sides[1]).add_(column)


def _hash(values: Tensor, key: tuple[int, int], side: int) -> Tensor:
    """Return for each value a number in 0 … ``side - 1``, by a 32-bit integer hash."""
    word = values ^ key[0]
    word ^= word >> 16
    word.mul_(_FACTOR).bitwise_and_(_WORD).bitwise_xor_(word >> 16).bitwise_xor_(key[1])
    word.mul_(_FACTOR).bitwise_and_(_WORD).bitwise_xor_(word >> 16)
    return word.mul_(side).bitwise_right_shift_(32)


_CHUNK = 1 << 13
"""Indices that are computed at once: they fit into the processor's cache."""

_SAME = ("length", "seed", "shuffle")
"""Fields that must be the same in a state and in the sampler that loads it."""


class ElasticDistributedSampler(DistributedSampler):  # type: ignore[misc]
    """Deal the dataset's indices to the ranks, exactly, over restarts and resizes in mid-epoch.

    It takes the place of torch's ``DistributedSampler`` and is an instance of it::

        sampler = elaunch.ElasticDistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=2)
        if checkpoint:
            sampler.load_state_dict(checkpoint["sampler"])
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                train_step(x, y)
                sampler.advance(len(x))  # every rank, after every step
                if is_time_to_save():
                    save({"model": model.state_dict(), "sampler": sampler.state_dict()})

    The state is the same on all ranks and fits any number of them; save it with the model, at the
    same step. Nothing here communicates or blocks; what the ranks must do alike is to make the same
    steps with equally large batches, as they do anyway with DistributedDataParallel.

    Memory does not grow with the dataset: 10^9 samples cost as much as ten.

    Iterable datasets have no indices; ``positions`` gives each rank's share. Take ``drop_last``,
    since a stream cannot go back to its beginning for padding. As ``dataset`` ``range(n)`` will do,
    and ``range(2**60)`` for a stream that ends when it ends.

    torchdata's StatefulDataLoader works as the loader: save and load the sampler's state as above
    and leave the loader's own alone, which describes one rank and its workers. If it is wanted for
    its workers' sake, it agrees with the sampler as long as ``snapshot_every_n_steps`` is 1.

    Args:
        dataset: anything with a length; it must not change within an epoch.
        num_replicas: number of ranks; by default torch.distributed's where a process group is
            initialized, else the launcher's, else 1.
        rank: this process's; by default from the same source.
        shuffle: another order in each epoch, or else that of the dataset in all.
        seed: an integer; the same on all ranks.
        drop_last: leave out the up to ``num_replicas - 1`` samples at the end of the epoch that do
            not suffice for all ranks, instead of padding them.
        start_index: as in Torch Elastic's class: how many samples of the first epoch that is begun
            all ranks together have done already. Later epochs are whole. ``load_state_dict`` does
            better, since it knows the epoch and the order too.

    Raises:
        SamplerError: there is no sample ``start_index``.
        PlacementError: rank and num_replicas contradict each other, or the launcher's variables do.
    """

    epoch: int
    """The epoch whose samples are dealt out."""
    offset: int
    """How many samples of the epoch all ranks together have done."""
    padding: int
    """How many samples were done a second time at the end of this epoch; 0 before."""

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        start_index: int = 0,
    ) -> None:
        # torch's own constructor is not called: it would fix the epoch's length for good.
        if num_replicas is None or rank is None:
            found_rank, found_size = _rank_and_size()
            rank = found_rank if rank is None else rank
            num_replicas = found_size if num_replicas is None else num_replicas
        if not 0 <= rank < num_replicas:
            raise PlacementError(f"rank {rank} is not one of the {num_replicas} from 0 on")
        self.dataset = dataset
        self.num_replicas = index(num_replicas)
        self.rank = index(rank)
        self.shuffle = bool(shuffle)
        self.seed = index(seed)
        self.drop_last = bool(drop_last)
        self.length = len(dataset)
        if self.length > LARGEST:
            raise SamplerError(f"a dataset of {self.length} samples: at most 2^60 have an order")
        self.epoch = self.padding = 0
        self.offset = self._start = self._checked_start(start_index, shuffle)
        self._begun = True
        self._reading: _Reading | None = None

    def _checked_start(self, start_index: int, shuffle: object) -> int:
        if type(shuffle) is int:
            raise SamplerError(
                f"shuffle is {shuffle}, a number: give start_index={shuffle} by its name, or True "
                "or False"
            )
        start = index(start_index)
        if start and not 0 <= start < self.length:
            raise SamplerError(f"start_index is {start}, but the dataset has {self.length} samples")
        return start

    def __len__(self) -> int:
        """Return how many samples of the epoch are left for this rank; equal on all ranks.

        It shrinks with ``advance``, and so does ``len(loader)``: ask before the loop, not in it.
        """
        left = self.length - self.offset
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    @property
    def num_samples(self) -> int:
        """The number of samples left for this rank, as ``len()`` has it; torch's name for it."""
        return len(self)

    @property
    def total_size(self) -> int:
        """The number of samples left for all ranks together, padding included."""
        return len(self) * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices of what is left of the epoch; each rank iterates by itself.

        Raises:
            SamplerError: the epoch is done, and no other was begun by ``set_epoch``.
        """
        if not len(self) and not self._begun:
            raise SamplerError(
                f"all of epoch {self.epoch} is done: call set_epoch({self.epoch + 1}) to go on"
            )
        self._reading = _Reading(self)
        return self._reading

    def positions(self, batch_size: int = 1, worker: int = 0, workers: int = 1) -> Iterator[int]:
        """Return this rank's positions in the epoch that are left, in rising order: for streams.

        A loader takes its batches from its workers by turns. So that each step does what comes next
        over all ranks, a worker is given the positions of its own batches only::

            class Lines(IterableDataset):
                def __iter__(self):
                    me = torch.utils.data.get_worker_info()
                    part = (me.id, me.num_workers) if me else (0, 1)
                    wanted = self.sampler.positions(self.batch_size, *part)
                    position = next(wanted, None)
                    for at, line in enumerate(open_stream()):
                        if at == position:
                            yield line
                            position = next(wanted, None)

        The loader's workers have a copy of the sampler from when they were started: leave
        ``persistent_workers`` off. Without workers it is the same as
        ``islice(stream, offset + rank, None, num_replicas)``. ``shuffle`` has no effect on it.

        Args:
            batch_size: this rank's, as the loader has it.
            worker: number of the loader's worker, from 0.
            workers: how many the loader has.
        """
        first, left = self.offset + self.rank, len(self)
        for batch in range(worker * batch_size, left, workers * batch_size):
            for at in range(batch, min(batch + batch_size, left)):
                yield (first + at * self.num_replicas) % self.length

    def advance(self, batch_size: int) -> None:
        """Count a step: each rank has done ``batch_size`` samples more.

        Call it on every rank, after every step of the optimizer, before the state is saved. A last
        batch may be given as smaller, as it was, or as large as the others.

        Args:
            batch_size: samples that this rank has done, not all ranks together; with gradient
                accumulation those of all its small batches.

        Raises:
            SamplerError: these are more than this rank was given, or the epoch was done before.
        """
        batch_size = index(batch_size)
        if batch_size < 0:
            raise SamplerError(f"advance({batch_size}): a step does not take samples back")
        left = len(self)
        if batch_size and not left:
            raise SamplerError(
                f"advance({batch_size}) after the end of epoch {self.epoch}, in which all "
                f"{self.length} samples are done: call set_epoch({self.epoch + 1}) first"
            )
        end = self.offset + min(batch_size, left) * self.num_replicas
        if self._reading is not None and end > self._reading.at:
            read = (self._reading.at - self.offset) // self.num_replicas
            raise SamplerError(
                f"advance({batch_size}), but rank {self.rank} was given only {read} samples since "
                f"the last step: count those of one rank, not of all {self.num_replicas}"
            )
        self.padding += max(end - self.length, 0)
        self.offset = min(end, self.length)
        self._start = 0
        self._begun = self._begun and not batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: the whole of it, but for the one that is under way, which goes on.

        Call it on every rank before each epoch, also before the one that was loaded.

        Args:
            epoch: from 0.
        """
        if epoch != self.epoch:
            if self._reading is not None:
                self._start = 0
            self.epoch, self.offset, self.padding = index(epoch), self._start, 0
            self._reading = None
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return where the job stands in its data: numbers only, equal on all ranks.

        Any rank may save it, in any form (torch.save, JSON), together with the model.
        """
        return {
            "version": ORDER_VERSION,
            "epoch": self.epoch,
            "offset": self.offset,
            "padding": self.padding,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a job, of whatever world and batch size, stood when it saved this.

        Call it on every rank, with the same state, before the loader is iterated.

        Raises:
            SamplerError: the state is of a dataset of another length, another seed or another
                ``shuffle``, or it is no state of a sampler. Then nothing was changed.
        """
        wanted = {**self.state_dict()}
        if missing := wanted.keys() - state.keys():
            raise SamplerError(f"no state of this sampler: {', '.join(sorted(missing))} missing")
        if state["version"] != ORDER_VERSION:
            raise SamplerError(
                f"the state's order of data is of version {state['version']}, this elaunch has "
                f"{ORDER_VERSION}: finish the epoch with the elaunch that saved it"
            )
        if other := [name for name in _SAME if state[name] != wanted[name]]:
            differences = ", ".join(f"{name} {state[name]} (here {wanted[name]})" for name in other)
            raise SamplerError(f"the state is of other data: {differences}")
        epoch, offset, padding = (state[name] for name in ("epoch", "offset", "padding"))
        numbers = all(type(value) is int for value in (epoch, offset, padding))
        if not numbers or not 0 <= offset <= self.length:
            raise SamplerError(f"no place in {self.length} samples: epoch {epoch} offset {offset}")
        self.epoch, self.offset, self.padding = epoch, offset, padding
        self._begun, self._reading = True, None
        self._start = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy, as in the process of a loader's worker, has read nothing yet.
        return {**vars(self), "_reading": None}


class _Reading:
    """One pass over the indices of a rank; ``at`` is the position of all ranks that it is before.

    Its state is for StatefulDataLoader, which keeps it for each batch until that batch has been
    handed out: so it is where the loop stands, whatever was read ahead since.
    """

    def __init__(self, sampler: ElasticDistributedSampler) -> None:
        self.at = sampler.offset
        self._sampler = sampler
        self._indices = _indices(sampler, sampler.offset, len(sampler))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        found = next(self._indices)
        self.at += self._sampler.num_replicas
        return found

    def state_dict(self) -> dict[str, int]:
        """Return up to where the indices have been read."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there, and let the sampler count from there."""
        sampler, at = self._sampler, state["at"]
        sampler.offset = min(at, sampler.length)
        sampler.padding = max(at - sampler.length, 0)
        self.at, self._indices = at, _indices(sampler, sampler.offset, len(sampler))


def _indices(sampler: ElasticDistributedSampler, offset: int, count: int) -> Iterator[int]:
    order = Permutation(sampler.length, sampler.seed, sampler.epoch)
    first, step = offset + sampler.rank, sampler.num_replicas
    for done in range(0, count, _CHUNK):
        size = min(_CHUNK, count - done)
        places = torch.arange(size).mul_(step).add_(first + done * step).remainder_(sampler.length)
        yield from (order(places) if sampler.shuffle else places).tolist()


def _rank_and_size() -> tuple[int, int]:
    """Return rank and number of ranks, of torch's process group or else of the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    here = launch.current(os.environ)
    return here.rank, here.size
