"""The gradients of one rank's micro-batches, and their sum over all ranks, in the tree's order.

The gradients of all parameters lie one behind the other in flat buffers, one set of buffers for
each type and device. ``parameter.grad`` is a part of the buffer into which autograd is to add. At
the first leaf of a sum autograd gives a tensor of its own, which is copied there: that is quicker
than to add it to zeros.

A buffer is divided into buckets of whole parameters, the last parameters first, as their gradients
are complete first. While the last micro-batch's backward still runs, a bucket whose parameters are
complete goes through these stages:

=========  =================================================================================
stage      what is done
=========  =================================================================================
sent       each rank has one part of the bucket; the others send it that of their nodes
summed     it sums them up in the tree's order, divides, and sends its part to all others
complete   all parts are there: the gradients, in buffer 0
=========  =================================================================================

Buckets go through them in the same order on all ranks, ``AHEAD`` of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from elaunch.errors import ContextError, PeerLost
from elaunch.training.steps.group import Group, Message
from elaunch.training.steps.tree import RankPart, Subtree, combine, share

BUCKET_BYTES: Final = 8 << 20
"""Bytes of a bucket, or a parameter that is larger."""
AHEAD: Final = 2
"""Buckets that are sent and not summed yet; what is received for them takes memory."""


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are summed together: a range of a flat buffer.

    ``size`` is how many they are, ``waits_for`` how many are without the last leaf's gradient yet.
    """

    number: int
    flat: _Flat
    first: int
    end: int
    size: int
    waits_for: int = 0
    messages: list[Message] = field(default_factory=list)
    received: dict[Subtree, torch.Tensor] = field(default_factory=dict)

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """Return the range of the buffer that ``rank`` sums up."""
        length = self.end - self.first
        return self.first + length * rank // size, self.first + length * (rank + 1) // size


class _Flat:
    """The buffers for the parameters of one type on one device."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.length = sum(one.numel() for one in parameters)
        self.slots: list[torch.Tensor] = []

    def add_slot(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Make another buffer; yield each parameter with its part of it."""
        first, at = self.parameters[0], 0
        flat = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        self.slots.append(flat)
        for one in self.parameters:
            part = flat[at : at + one.numel()]
            at += one.numel()
            if one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last):
                yield one, part.as_strided(one.shape, one.stride())
            else:
                yield one, part.view(one.shape)


class Gradients:
    """The gradients of one step after the other.

    Args:
        parameters: all that are trained, each once; the same on all ranks.
        group: the ranks; None for one alone.

    ``group`` are those that it sums up over.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Group | None) -> None:
        self.parameters = parameters
        self._lost: PeerLost | None = None
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for one in reversed(parameters):
            kinds.setdefault((one.dtype, one.device), []).append(one)
        self._flats = [_Flat(some) for some in kinds.values()]
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        for flat in self._flats:
            self._divide(flat)
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._on_gradient) for one in parameters
        ]
        self._count, self._divisor = 0, 1.0
        self._share = RankPart((), (), 1)
        self._views: list[dict[torch.Tensor, torch.Tensor]] = []
        """For each buffer: of each parameter its part."""
        self._begun: dict[torch.Tensor, torch.Tensor] = {}
        """Parts that wait for the first gradients of their sum: those of the leaf under way."""
        self._adds = self._is_last = False
        self._is_early = True
        self._fired: set[torch.Tensor] = set()
        self._fired_now: set[torch.Tensor] = set()
        self._sent = self._summed = 0
        self._is_finite = True
        self.regroup(group)

    def regroup(self, group: Group | None) -> None:
        """Sum up over other ranks from the next :meth:`begin` on.

        All buffers are new ones: messages of the group before may be on their way into these.
        """
        self.group = group
        self._rank, self._size = (0, 1) if group is None else (group.rank, group.size)
        for bucket in self._buckets:
            bucket.messages.clear()
            bucket.received.clear()
        for flat in self._flats:
            flat.slots.clear()
        self._views.clear()
        self._lost = None

    def begin(self, count: int, divisor: float, *, early: bool = True) -> RankPart:
        """Begin a step of ``count`` leaves, whose sum is divided by ``divisor``.

        ``early``: begin with the sums of all ranks while the last leaf is computed.
        """
        self._count, self._divisor, self._is_early = count, divisor, early
        self._share = share(count, self._rank, self._size)
        self._fired.clear()
        self._sent = self._summed = 0
        self._is_finite = True
        while len(self._views) < self._share.slots:
            self._views.append(dict(pair for flat in self._flats for pair in flat.add_slot()))
        return self._share

    def add(self, number: int, backward: Callable[[], None]) -> None:
        """Add the gradients that ``backward`` computes: of this rank's leaf ``number``, from 0."""
        what = self._share.sums[number]
        views = self._views[what.slot]
        for one, view in views.items():
            one.grad = None if what.begins else view
        self._begun = dict(views) if what.begins else {}
        self._fired_now.clear()
        self._adds = True
        self._is_last = self.group is not None and number == len(self._share.sums) - 1
        if self._is_last:
            for bucket in self._buckets:
                bucket.waits_for = bucket.size
        try:
            backward()
        finally:
            self._adds = False
        for view in self._begun.values():
            view.fill_(-0.0)  # added to x, it is x in all bits, as 0.0 is not
        if not self._is_last:
            for flat in self._flats:
                _merge(flat.slots, what.merges, slice(None))

    def holds_finite(self, number: int) -> bool:
        """Return whether the buffer is finite to which this rank's leaf ``number`` was added."""
        slot = self._share.sums[number].slot
        return all(_are_finite(flat.slots[slot]) for flat in self._flats)

    def unused(self) -> list[int]:
        """Return the numbers of the parameters that no leaf of this rank has a gradient of."""
        return [n for n, one in enumerate(self.parameters) if one not in self._fired]

    def sum_up(self) -> bool:
        """Sum up the gradients of all ranks; return whether what this rank has summed is finite.

        ALL ranks call it together. Raises PeerLost if another is lost.
        """
        if self._lost is not None:
            raise self._lost
        if self.group is None:
            for flat in self._flats:
                flat.slots[0].div_(self._divisor)
                self._is_finite &= _are_finite(flat.slots[0])
            return self._is_finite
        while self._sent < len(self._buckets):
            self._send()
        while self._summed < len(self._buckets):
            self._sum()
        for bucket in self._buckets:
            self._wait(bucket)
        return self._is_finite

    def assign(self, unused: Iterable[int]) -> None:
        """Have the mean gradients in ``grad``, of all parameters but those of ``unused``."""
        left_out = {self.parameters[number] for number in unused}
        for one, view in self._views[0].items():
            one.grad = None if one in left_out else view

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        for one in self.parameters:
            one.grad = None

    def _divide(self, flat: _Flat) -> None:
        """Make the buckets of one set of buffers."""
        most = max(1, BUCKET_BYTES // flat.parameters[0].element_size())
        first = at = 0
        inside: list[torch.Tensor] = []
        for one in flat.parameters:
            inside.append(one)
            at += one.numel()
            if at - first >= most or at == flat.length:
                bucket = _Bucket(len(self._buckets), flat, first, at, len(inside))
                self._buckets.append(bucket)
                self._bucket_of.update(dict.fromkeys(inside, bucket))
                first, inside = at, []

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Note that autograd has added to ``grad``; called for each parameter of each backward."""
        if not self._adds:
            return
        if (view := self._begun.pop(parameter, None)) is not None:
            view.copy_(parameter.grad.to_dense())
            parameter.grad = view
        is_first = parameter not in self._fired_now
        self._fired_now.add(parameter)
        self._fired.add(parameter)
        if not self._is_last or not self._is_early or self._lost is not None:
            return
        bucket = self._bucket_of[parameter]
        if bucket.number < self._sent:
            raise ContextError(
                "a parameter has got two gradients in one backward(), as by checkpoint(…, "
                "use_reentrant=True): give use_reentrant=False"
            )
        bucket.waits_for -= is_first
        try:
            while self._sent < len(self._buckets) and not self._buckets[self._sent].waits_for:
                self._send()
        except PeerLost as error:  # sum_up() raises it: the script's backward() goes on
            self._lost = error

    def _send(self) -> None:
        """Send the others their parts of the next bucket, and begin to receive this rank's."""
        assert self.group is not None
        if self._sent - self._summed >= AHEAD:
            self._sum()
        bucket = self._buckets[self._sent]
        self._sent += 1
        slots = bucket.flat.slots
        if self._share.sums:
            _merge(slots, self._share.sums[-1].merges, slice(bucket.first, bucket.end))
        first, end = bucket.part(self._rank, self._size)
        tag = 1 + bucket.number * (self._count + 1)
        for rank in self.group.others:
            theirs = slice(*bucket.part(rank, self._size))
            for number, node in enumerate(share(self._count, rank, self._size).nodes):
                if first < end:
                    part = torch.empty_like(slots[0][first:end])
                    bucket.received[node] = part
                    bucket.messages.append(self.group.receive(part, rank, tag + number))
            for number in range(len(self._share.nodes)):
                if theirs.start < theirs.stop:
                    part = slots[number][theirs]
                    bucket.messages.append(self.group.send(part, rank, tag + number))

    def _sum(self) -> None:
        """Sum up this rank's part of the next bucket that is sent, and send it to the others."""
        assert self.group is not None
        bucket = self._buckets[self._summed]
        self._summed += 1
        self._wait(bucket)
        slots = bucket.flat.slots
        first, end = bucket.part(self._rank, self._size)
        if first < end:
            own = {node: slots[n][first:end] for n, node in enumerate(self._share.nodes)}
            _sum_into(slots[0][first:end], self._count, {**bucket.received, **own})
            slots[0][first:end].div_(self._divisor)
            self._is_finite &= _are_finite(slots[0][first:end])
        bucket.received.clear()
        tag = 1 + bucket.number * (self._count + 1) + self._count
        for rank in self.group.others:
            theirs = slice(*bucket.part(rank, self._size))
            if theirs.start < theirs.stop:
                bucket.messages.append(self.group.receive(slots[0][theirs], rank, tag))
            if first < end:
                bucket.messages.append(self.group.send(slots[0][first:end], rank, tag))

    def _wait(self, bucket: _Bucket) -> None:
        if self.group is not None:
            self.group.wait(bucket.messages)
        bucket.messages = []


def _are_finite(values: torch.Tensor) -> bool:
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    return bool(low.isfinite() & high.isfinite())


def _merge(slots: Sequence[torch.Tensor], merges: Iterable[int], where: slice) -> None:
    for slot in merges:
        slots[slot - 1][where] += slots[slot][where]


def _sum_into(result: torch.Tensor, count: int, known: dict[Subtree, torch.Tensor]) -> None:
    """Sum up the values of all ranks' nodes, which may be overwritten; one may be ``result``."""
    root = Subtree(0, count)

    def add(node: Subtree, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.add(left, right, out=result) if node == root else left.add_(right)

    total = combine(root, known, add)
    if total.data_ptr() != result.data_ptr():
        result.copy_(total)
