"""One step, as the body of the script's loop sees it.

=================  =========================================================================
a step is          when
=================  =========================================================================
begun              the loop has yielded it
computed           each batch of ``micro_batches()`` was given to ``backward()``
applied            ``apply()`` has returned: the loss of all ranks is known, the weights are new
=================  =========================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from elaunch.errors import ContextError
from elaunch.training.steps.feed import Feed
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.group import Group
from elaunch.training.steps.order import Order, StepData, seed_all
from elaunch.training.steps.tree import Node, combine

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

LOSS: Final = "loss"
_Logged = dict[str, list[float | None]]


class Step:
    """One step of :meth:`elaunch.TrainContext.steps`.

    Attributes:
        number: from 1: the number of steps done once it is applied.
        epoch: of its samples, from 0.
        is_last_of_epoch: whether the next step belongs to another epoch.
        leaf: the micro-batch that is computed, from 0 among those of all ranks; None between them.
        loss: the mean of what all micro-batches gave to backward(); known after apply().
        grad_norm: of all gradients before they were clipped; known after ``apply(clip=…)``.
    """

    def __init__(
        self,
        data: StepData,
        order: Order,
        feed: Feed,
        gradients: Gradients,
        group: Group | None,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self.number, self.epoch, self.is_last_of_epoch = data.number, data.epoch, data.is_last
        self.leaf: int | None = None
        self.loss = math.nan
        self.grad_norm = math.nan
        self.is_applied = False
        self.metrics: dict[str, Any] = {}
        """Mean over the micro-batches of what was logged in them; and what was logged outside."""
        self._data, self._order, self._feed = data, order, feed
        self._gradients, self._group, self._optimizers = gradients, group, optimizers
        self._share = gradients.begin(data.leaves, data.size / order.micro_batch)
        self._given = self._computed = 0
        self._begun = False
        self._logged: dict[str, list[Any]] = {}
        seed_all(order.seed, "step", data.number)

    def micro_batches(self) -> Iterator[Any]:
        """Yield this rank's batches of the step; each is for one :meth:`backward`.

        A rank may have fewer than another, or none where there are more ranks than micro-batches.
        """
        if self._begun:
            raise self._error("micro_batches() is called twice: one loop takes all of them")
        self._begun = True
        for number, what in enumerate(self._share.sums):
            batch = self._feed.next()
            seed_all(self._order.seed, "leaf", self.number, what.leaf)
            self.leaf, self._given = what.leaf, number + 1
            yield batch
            self.leaf = None
            if self._computed != self._given:
                raise self._error(
                    f"micro-batch {what.leaf} was given out and got no backward(): call "
                    "step.backward(loss) once for each"
                )
        seed_all(self._order.seed, "step", self.number)

    def backward(self, loss: Tensor, scaler: GradScaler | None = None) -> None:
        """Compute the gradients of one micro-batch, in the place of ``loss.backward()``.

        Args:
            loss: a scalar: the mean over the samples of the micro-batch.
            scaler: scales the loss; give it to :meth:`apply`, too.
        """
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            raise self._error(f"backward() takes a loss that is one number; {_described(loss)}")
        if self.leaf is None or self._computed == self._given:
            raise self._error(
                "backward() is called without a micro-batch, or twice for one: add up its losses, "
                "and call it once inside of the loop over step.micro_batches()"
            )
        self._log(LOSS, loss.detach())
        # A shorter micro-batch counts by its samples.
        weight = self._weights()[self.leaf]
        weighted = loss if weight == 1.0 else loss * weight
        scaled = weighted if scaler is None else scaler.scale(weighted)
        self._gradients.add(self._computed, scaled.backward)
        self._computed += 1

    def log(self, **values: Any) -> None:
        """Report values with this step; rank 0 writes them, as metrics of group ``training``.

        Inside of the loop over the micro-batches a value is one of its micro-batch: a number, or a
        tensor with one. All ranks have its mean over the micro-batches of all ranks in
        ``step.metrics`` after :meth:`apply`. Outside it is a value that all ranks have alike.
        """
        for name, value in values.items():
            if self.leaf is None:
                self.metrics[name] = value
            else:
                self._log(name, value.detach() if isinstance(value, Tensor) else value)

    def apply(
        self,
        *optimizers: Optimizer,
        clip: float | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Sum up the gradients of all ranks, and make a step of the optimizers.

        ALL ranks call it together, once in each step; it blocks until all have come.

        Args:
            optimizers: those whose parameters change; all are in the state given to ``steps()``.
            clip: the largest norm of all gradients together; larger ones are scaled down to it.
            scaler: that of :meth:`backward`; its own update is made here.
        """
        self._check_apply(optimizers)
        if self.leaf is not None:  # the script has left the loop over the micro-batches
            self.leaf = None
            seed_all(self._order.seed, "step", self.number)
        unused = self._exchange()
        self._gradients.finish(unused)
        for optimizer in optimizers if scaler is not None else ():
            assert scaler is not None
            scaler.unscale_(optimizer)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._gradients.parameters, clip)
            self.grad_norm = float(norm)
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self.is_applied = True

    def _check_apply(self, optimizers: Sequence[Optimizer]) -> None:
        if self.is_applied:
            raise self._error("apply() is called twice: once in each step")
        if self._computed < len(self._share.sums):
            raise self._error(
                f"{self._computed} of this rank's {len(self._share.sums)} micro-batches are "
                "computed: go through all of step.micro_batches() before apply()"
            )
        known = {id(one) for one in self._optimizers}
        if not optimizers or any(id(one) not in known for one in optimizers):
            raise self._error(
                "apply() takes the optimizers of the state: give one or more that steps() was "
                "given, as in apply(optimizer)"
            )

    def _log(self, name: str, value: Any) -> None:
        held = self._logged.setdefault(name, [None] * len(self._share.sums))
        held[self._given - 1] = value

    def _exchange(self) -> list[int]:
        """Have the means of what was logged; return the parameters without any gradient."""
        own = {name: [_number(one) for one in held] for name, held in self._logged.items()}
        unused = self._gradients.unused()
        everyone = [(own, unused)]
        if self._group is not None:
            content = json.dumps([own, unused]).encode()
            everyone = [json.loads(one) for one in self._group.allgather(content)]
        counts = [len(logged.get(LOSS, ())) for logged, _ in everyone]
        for name in dict.fromkeys(name for logged, _ in everyone for name in logged):
            values: list[float | None] = []
            for (logged, _), count in zip(everyone, counts, strict=True):
                values += logged.get(name, [None] * count)
            self.metrics[name] = self._mean(values)
        self.loss = self.metrics[LOSS]
        return sorted(set.intersection(*(set(missing) for _, missing in everyone)))

    def _mean(self, values: Sequence[float | None]) -> float:
        """Return the mean over the leaves that have a value, summed in the tree's order."""
        weights = self._weights()
        leaves = {
            Node(leaf, leaf + 1): (0.0, 0.0)
            if value is None
            else (value * weights[leaf], weights[leaf])
            for leaf, value in enumerate(values)
        }
        total, weight = combine(
            Node(0, len(values)), leaves, lambda _, a, b: (a[0] + b[0], a[1] + b[1])
        )
        return total / weight

    def _weights(self) -> list[float]:
        whole = self._order.micro_batch
        return [len(self._order.places(self._data, n)) / whole for n in range(self._data.leaves)]

    def _error(self, what: str) -> ContextError:
        return ContextError(f"step {self.number}: {what}")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return f"this is {type(loss).__name__}"
    if loss.dim():
        return f"this has the shape {tuple(loss.shape)}: take its mean()"
    return "this was computed without gradients (under no_grad, or of a detached tensor)"
