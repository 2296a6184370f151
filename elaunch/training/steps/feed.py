"""The batches of this rank's micro-batches, in the order in which it computes them.

A dataset is read by torch's DataLoader, whose items are whole micro-batches: so its workers fetch
ahead over the ends of steps and epochs. Without a dataset a function of the script is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from torch.utils.data import DataLoader, default_collate

from elaunch.training.steps.order import Order, Position, StepData, seed_all
from elaunch.training.steps.tree import leaves_of

OWN_ARGUMENTS: Final = frozenset(
    "dataset batch_size shuffle sampler batch_sampler collate_fn drop_last generator".split()
)
"""DataLoader's arguments that steps() gives by itself."""

Collate = Callable[[list[Any]], Any]
Batch = Callable[[int, int], Any]


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""


class LeafRequest(NamedTuple):
    """One micro-batch that a loader is to fetch."""

    step: int
    leaf: int
    indices: list[int]


class _Leaves:
    """A dataset of micro-batches; made in the rank, used in its loader's workers."""

    def __init__(self, dataset: Dataset, collate: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate = default_collate if collate is None else collate
        self._seed = seed

    def __getitem__(self, wanted: LeafRequest) -> Any:
        seed_all(self._seed, "data", wanted.step, wanted.leaf)
        fetch = getattr(self._dataset, "__getitems__", None)
        if fetch is not None:
            return self._collate(fetch(wanted.indices))
        return self._collate([self._dataset[index] for index in wanted.indices])


class LeafFeed:
    """Gives this rank its batches, one after the other, from a position on."""

    def __init__(
        self,
        order: Order,
        source: tuple[Dataset | None, Collate | None, Batch | None],
        loader: Mapping[str, Any],
    ) -> None:
        self._order = order
        self._rank, self._size = 0, 1
        self._dataset, self._collate, self._batch = source
        self._loader = loader
        self._batches: Iterator[Any] = iter(())
        self._leaves: _Leaves | None = None
        if self._dataset is not None:
            self._leaves = _Leaves(self._dataset, self._collate, order.seed)

    def begin(
        self, position: Position, is_over: Callable[[Position], bool], place: tuple[int, int]
    ) -> None:
        """Begin to fetch at a position, up to one where the loop is over; ``place``: rank, size."""
        self._rank, self._size = place
        wanted = self._wanted(position, is_over)
        if self._leaves is None:
            self._batches = map(self._fetch, wanted)
            return
        arguments: dict[str, Any] = {"persistent_workers": False, **self._loader}
        self._batches = iter(
            DataLoader(
                self._leaves,
                batch_size=None,
                sampler=_Once(wanted),
                collate_fn=_as_it_is,
                **arguments,
            )
        )

    def next(self) -> Any:
        """Return the next batch; whatever the script's dataset raises is raised here."""
        return next(self._batches)

    def again(self, step: StepData, leaf: int) -> Any:
        """Return a batch that was given out before, with the same random numbers."""
        return self._fetch(next(self._of_step(step, range(leaf, leaf + 1))))

    def end(self) -> None:
        """End the loader's workers."""
        self._batches = iter(())

    def _fetch(self, wanted: LeafRequest) -> Any:
        if self._leaves is not None:
            return self._leaves[wanted]
        assert self._batch is not None
        seed_all(self._order.seed, "data", wanted.step, wanted.leaf)
        return self._batch(wanted.step, wanted.leaf)

    def _wanted(
        self, position: Position, is_over: Callable[[Position], bool]
    ) -> Iterator[LeafRequest]:
        while not is_over(position):
            step = self._order.next(position)
            yield from self._of_step(step, leaves_of(step.leaves, self._rank, self._size))
            position = self._order.after(step)

    def _of_step(self, step: StepData, leaves: range) -> Iterator[LeafRequest]:
        if self._dataset is None:
            yield from (LeafRequest(step.number, leaf, []) for leaf in leaves)
            return
        for leaf, samples in zip(leaves, self._order.indices(step, leaves), strict=True):
            yield LeafRequest(step.number, leaf, samples)


class _Once:
    """A sampler that is iterated once."""

    def __init__(self, wanted: Iterator[LeafRequest]) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[LeafRequest]:
        return self._wanted


def _as_it_is(batch: Any) -> Any:
    return batch


def length_of(dataset: object) -> int | None:
    """Return the number of samples of a map-style dataset; None for anything else."""
    with suppress(TypeError, NotImplementedError):
        if callable(getattr(dataset, "__getitem__", None)):
            return len(dataset)  # type: ignore[arg-type]
    return None
