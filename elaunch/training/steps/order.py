"""Which samples a step takes, and in which micro-batches: the same for every number of ranks.

An epoch is the sampler's order of the whole dataset (elaunch.training.sampler.Permutation). A step
takes the next ``global_batch`` samples of it, and leaf i of the step the i-th ``micro_batch`` of
them. What is left at the end of an epoch, less than a step, is dropped; or, with
``last="short"``, is a step of fewer leaves, of which the last may have fewer samples.

Random numbers are drawn from seeds that follow from the seed, the step and the leaf:

==========  ==================================================================================
drawn in    seeds
==========  ==================================================================================
a sample    ``"data"``, step, leaf: wherever it is fetched, a loader's worker or the rank itself
a leaf      ``"leaf"``, step, leaf: forward and backward
the rest    ``"step"``, step: the same on all ranks
==========  ==================================================================================
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elaunch.errors import ContextError, SamplerError
from elaunch.training.sampler import ORDER_VERSION, Permutation


@dataclass(frozen=True)
class Position:
    """Where a loop stands: steps done, and where the next one begins in which epoch."""

    step: int = 0
    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StepData:
    """The samples of one step.

    Attributes:
        number: of the step, from 1.
        epoch: in which they are.
        offset: of the first of them in the order of the epoch.
        size: how many there are.
        leaves: in how many micro-batches.
        is_last: whether the epoch ends with them.
    """

    number: int
    epoch: int
    offset: int
    size: int
    leaves: int
    is_last: bool


@dataclass(frozen=True)
class Order:
    """The order of the data; ``length`` 0 stands for no dataset, and has one endless epoch."""

    length: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    shuffle: bool = True
    drops_last: bool = True

    def next(self, position: Position) -> StepData:
        """Return the step that begins at a position."""
        number, size, last = position.step + 1, self.global_batch, False
        epoch, offset = position.epoch, position.offset
        if self.length:
            if self._is_over(offset):
                epoch, offset = epoch + 1, 0
            size = min(size, self.length - offset)
            last = self._is_over(offset + size)
        return StepData(number, epoch, offset, size, -(-size // self.micro_batch), last)

    def after(self, step: StepData) -> Position:
        """Return where the next step begins."""
        if step.is_last:
            return Position(step.number, step.epoch + 1, 0)
        return Position(step.number, step.epoch, step.offset + step.size)

    def _is_over(self, offset: int) -> bool:
        left = self.length - offset
        return left < self.global_batch if self.drops_last else left <= 0

    def places(self, step: StepData, leaf: int) -> range:
        """Return where the samples of a leaf are in the order of the epoch."""
        first = step.offset + leaf * self.micro_batch
        return range(first, min(first + self.micro_batch, step.offset + step.size))

    def indices(self, step: StepData, leaves: range) -> list[list[int]]:
        """Return the indices in the dataset of some leaves that follow each other."""
        if not leaves:
            return []
        first = self.places(step, leaves[0]).start
        found = torch.arange(first, self.places(step, leaves[-1]).stop)
        if self.shuffle:
            found = Permutation(self.length, self.seed, step.epoch)(found)
        numbers: list[int] = found.tolist()
        return [
            numbers[place.start - first : place.stop - first]
            for place in (self.places(step, leaf) for leaf in leaves)
        ]


class Progress:
    """Where the loop stands, as an object of the state that is saved and loaded."""

    def __init__(self, order: Order, loop: int = 0) -> None:
        self.position = Position()
        self.loop = loop
        """The number of the loop among those of the script, from 0."""
        self.before = 0
        """Steps of the loops before."""
        self.loaded: dict[str, Any] = {}
        """The place that a load has found; it counts once it is adopted."""
        self._same = {
            "version": ORDER_VERSION,
            "length": order.length,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return it as numbers."""
        place = {"loop": self.loop, "before": self.before}
        return {**self._same, **place, **asdict(self.position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a load has found."""
        self.loaded = dict(state)

    def adopt(self) -> None:
        """Go on from what was loaded.

        Raises SamplerError if it is of other data or in another order, ContextError if it is of
        another loop.
        """
        state = self.loaded
        if state["loop"] != self.loop:
            raise ContextError(
                f"steps(): the checkpoint is of loop {state['loop']} of its script, and this is "
                f"loop {self.loop}: run the same loops again, or give another --checkpoint-dir"
            )
        if other := [name for name in self._same if state[name] != self._same[name]]:
            wanted = ", ".join(f"{name} {state[name]} (here {self._same[name]})" for name in other)
            raise SamplerError(
                f"steps(): the checkpoint's step is of other data: {wanted}; give the same dataset "
                "and arguments, or another --checkpoint-dir"
            )
        self.position = Position(state["step"], state["epoch"], state["offset"])
        self.before = state["before"]


def seed_all(seed: int, kind: str, *numbers: int) -> None:
    """Seed the random generators of Python, numpy (where it is imported) and torch."""
    words = hashlib.blake2b(repr((seed, kind, numbers)).encode(), digest_size=20).digest()
    own = int.from_bytes(words[:8], "little")
    random.seed(own)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(words[8:12], "little"))
    # torch.manual_seed() takes a traceback where CUDA is not in use: a millisecond each time.
    torch.default_generator.manual_seed(int.from_bytes(words[12:], "little") >> 1)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(own >> 1)
