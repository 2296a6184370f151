"""One step, as the body of the script's loop sees it.

=================  =========================================================================
a step is          when
=================  =========================================================================
begun              the loop has yielded it
summed             ``micro_batches()`` is through: each of its batches was given to
                   ``backward()``, and the gradients and losses of all ranks are summed up
applied            ``apply()`` has returned: the weights are new
=================  =========================================================================

Before it is through, ``micro_batches()`` looks at what was summed. If a loss is not finite, or a
gradient, no weight has changed yet: it gives out the batches again, so as to find the micro-batch,
and then, where that is to be skipped, once more without it.

If a rank is lost, those that are left share the micro-batches among them, and compute them all
anew (elaunch.training.steps.world).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from elaunch import text
from elaunch.errors import BitsDifferError, CollectiveError, ContextError, NotFiniteError
from elaunch.training.steps.check import BitCheck
from elaunch.training.steps.feed import LeafFeed
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.order import Order, StepData, seed_all
from elaunch.training.steps.tree import LeafSum, RankPart, Subtree, combine, leaves_of
from elaunch.training.steps.world import StepsWorld

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from elaunch.training.steps.refusals import Options

LOSS: Final = "loss"
SKIPPED: Final = "skipped"
NAMED: Final = 8
"""Samples of a micro-batch that an error names."""
_Logged = dict[str, list[float | None]]

log = logging.getLogger("elaunch")


class Step:
    """One step of :meth:`elaunch.TrainContext.steps`.

    Attributes:
        number: from 1: the number of steps done once it is applied.
        epoch: of its samples, from 0.
        is_last_of_epoch: whether the next step belongs to another epoch.
        leaf: the micro-batch that is computed, from 0 among those of all ranks; None between them.
        loss: the mean of what all micro-batches gave to backward(); known after the last one.
        metrics: what rank 0 reports: the mean of each value that was logged in micro-batches, the
            loss among them, and what was logged outside.
        skipped: the micro-batches that are left out, since they are not finite.
        grad_norm: of all gradients before they were clipped; known after ``apply(clip=…)``.
    """

    def __init__(
        self,
        data: StepData,
        order: Order,
        feed: LeafFeed,
        gradients: Gradients,
        world: StepsWorld,
        optimizers: Sequence[Optimizer],
        survive: Callable[[Exception], None],
        rules: Options,
    ) -> None:
        self.number, self.epoch, self.is_last_of_epoch = data.number, data.epoch, data.is_last
        self.leaf: int | None = None
        self.loss = math.nan
        self.grad_norm = math.nan
        self.is_applied = False
        self.metrics: dict[str, Any] = {}
        self.skipped: set[int] = set()
        self._data, self._order, self._feed = data, order, feed
        self._gradients, self._world, self._optimizers = gradients, world, optimizers
        self._survive, self._warns = survive, rules.check == "warn"
        self._skips = rules.on_bad_batch == "skip"
        seed, checks = order.seed, bool(rules.check)
        self._checking = partial(BitCheck, data, seed, gradients.parameters, checks, world.name)
        self._check = self._checking(world.group)
        places = (order.places(data, leaf) for leaf in range(data.leaves))
        self._weights = [len(place) / order.micro_batch for place in places]
        self._share, self._sums = RankPart((), (), 1), list[LeafSum]()
        self._given = self._computed = 0
        self._begun = self._is_summed = self._checks = self._is_scaled = False
        self._not_finite: list[int] = []
        self._logged: dict[str, list[Any]] = {}
        seed_all(order.seed, "step", data.number)

    def micro_batches(self) -> Iterator[Any]:
        """Yield this rank's batches of the step; each is for one :meth:`backward`.

        ALL ranks go through them together. A rank may have fewer than another, or none where there
        are more ranks than micro-batches. Behind the last one it blocks until all ranks have come.

        If a rank is lost there, and the others go on, it yields further ones.

        Raises:
            NotFiniteError: on all ranks: a micro-batch has a loss or a gradient that is not finite,
                and is not to be skipped. No weight has changed.
            BitsDifferError: on all ranks, by ``check=True``: two ranks have computed different bits
                of a micro-batch. No weight has changed.
            PeerLost: another rank is lost, and the job does not go on without it.
        """
        if self._begun:
            raise self._error("micro_batches() is called twice: one loop takes all of them")
        self._begun = True
        again = False
        while not self._is_summed:
            yield from self._leaves(again=again)
            again = True
            try:
                self._is_summed = self._sum_up()
            except (CollectiveError, ContextError) as error:
                self._survive(error)
                self._checks = False
                self._check = self._checking(self._world.group)
                self.skipped.clear()
                self.metrics.pop(SKIPPED, None)
        seed_all(self._order.seed, "step", self.number)

    def _leaves(self, *, again: bool) -> Iterator[Any]:
        weights = enumerate(self._weights)
        divisor = sum(one for leaf, one in weights if leaf not in self.skipped)
        # What others have added to a buffer is not to be taken for this rank's.
        early = not self._checks
        self._share = self._gradients.begin(self._data.leaves, divisor, early=early)
        self._given = self._computed = 0
        self._logged.clear()
        self._not_finite.clear()
        seconds = (LeafSum(leaf, -1, True, ()) for leaf in self._check.second())
        self._sums = [*self._share.sums, *seconds]
        for number, what in enumerate(self._sums):
            self._given = number + 1
            if what.leaf in self.skipped:
                self._add(lambda: None)
                continue
            is_new = not again and what.slot >= 0
            batch = self._feed.next() if is_new else self._feed.again(self._data, what.leaf)
            seed_all(self._order.seed, "leaf", self.number, what.leaf)
            self.leaf = what.leaf
            yield batch
            self.leaf = None
            if self._computed != self._given:
                raise self._error(
                    f"micro-batch {what.leaf} was given out and got no backward(): call "
                    "step.backward(loss) once for each"
                )

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
        weight = self._weights[self.leaf]
        weighted = loss if weight == 1.0 else loss * weight
        scaled = weighted if scaler is None else scaler.scale(weighted)
        self._is_scaled |= scaler is not None
        self._add(partial(self._check.compute, self.leaf, loss, scaled.backward))

    def log(self, **values: Any) -> None:
        """Report values with this step; rank 0 writes them, as metrics of group ``training``.

        Inside of the loop over the micro-batches a value is one of its micro-batch: a number, or a
        tensor with one. All ranks have its mean over the micro-batches of all ranks in
        ``step.metrics`` behind the loop over them. Outside it is a value that all ranks have alike.
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
        """Make a step of the optimizers with the mean gradients.

        Every rank calls it, once in each step. It does not block: the gradients were summed up at
        the end of :meth:`micro_batches`.

        Args:
            optimizers: those whose parameters change; all are in the state given to ``steps()``.
            clip: the largest norm of all gradients together; larger ones are scaled down to it.
            scaler: that of :meth:`backward`; its own update is made here.
        """
        self._check_apply(optimizers)
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

    def under_way(self) -> str:
        """Return in words the micro-batch that is fetched or computed, or ""."""
        if self._is_summed or not self._given:
            return ""
        leaf = self._sums[self._given - 1].leaf
        return f"micro-batch {leaf} of step {self.number} ({self._samples(leaf)})"

    def _check_apply(self, optimizers: Sequence[Optimizer]) -> None:
        if self.is_applied:
            raise self._error("apply() is called twice: once in each step")
        if not self._is_summed:
            raise self._error(
                "apply() is called before all micro-batches are computed: go through "
                "step.micro_batches() to its end"
            )
        known = {id(one) for one in self._optimizers}
        if not optimizers or any(id(one) not in known for one in optimizers):
            raise self._error(
                "apply() takes the optimizers of the state: give one or more that steps() was "
                "given, as in apply(optimizer)"
            )

    def _log(self, name: str, value: Any) -> None:
        held = self._logged.setdefault(name, [None] * len(self._sums))
        held[self._given - 1] = value

    def _add(self, backward: Callable[[], None]) -> None:
        number, sums = self._computed, self._gradients
        what = self._sums[number]
        self._computed += 1
        if what.slot < 0:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            backward()
            return
        looks = self._checks and (what.begins or sums.holds_finite(number))
        sums.add(number, backward)
        if looks and not sums.holds_finite(number):
            self._not_finite.append(what.leaf)

    def _sum_up(self) -> bool:
        """Sum up gradients, losses and what was logged; return whether the step is to be applied.

        All ranks decide alike, by what they have sent each other.
        """
        world, sums = self._world, self._gradients
        world.check()
        is_finite = sums.sum_up()
        differing = self._check.differing()
        if differing is None:
            return False
        self._report(differing)
        count = len(self._share.sums)
        own = {name: [_number(one) for one in held[:count]] for name, held in self._logged.items()}
        flags = [is_finite, self._is_scaled]
        sent = [own, sums.unused(), self._not_finite, flags, world.look()]
        everyone = [json.loads(json.dumps(sent))]
        if world.group is not None:
            found = world.group.allgather(json.dumps(sent).encode())
            everyone = [json.loads(one) for one in found]
        values = self._by_leaf([logged for logged, *_ in everyone])
        if not any(is_scaled for *_, (_, is_scaled), _ in everyone):  # a scaler skips it by itself
            bad = {leaf for _, _, leaves, _, _ in everyone for leaf in leaves}
            losses = enumerate(values[LOSS])
            bad |= {leaf for leaf, one in losses if one is not None and not math.isfinite(one)}
            if bad:
                self._leave_out(bad)
                return False
            if not self._checks and not all(finite for *_, (finite, _), _ in everyone):
                self._checks = True
                return False
        self.metrics |= {name: self._mean(held) for name, held in values.items()}
        self.loss = self.metrics[LOSS]
        world.newcomers = everyone[0][-1]
        sums.assign(set.intersection(*(set(unused) for _, unused, *_ in everyone)))
        return True

    def _report(self, differing: Mapping[int, str]) -> None:
        """Raise an error for what ranks have computed with different bits, or write a warning."""
        for leaf, who in differing.items():
            what = f"step {self.number}: micro-batch {leaf} ({self._samples(leaf)}): {who}"
            if not self._warns:
                raise BitsDifferError(
                    f"{what}; no weight has changed. A processor or a memory there is faulty, or "
                    "what is computed is not deterministic (docs/steps.md says what may be): test "
                    'that host and leave it out, or go on by steps(…, check="warn")'
                )
            if self._world.ranks.rank == 0:
                log.warning("%s; the step goes on", what)
            self.metrics["differing"] = len(differing)

    def _leave_out(self, bad: set[int]) -> None:
        names = ", ".join(f"{leaf} ({self._samples(leaf)})" for leaf in sorted(bad))
        what = f"step {self.number}: not finite: the loss or gradients of micro-batch {names}"
        self.skipped |= bad
        if not self._skips or len(self.skipped) == self._data.leaves:
            raise NotFiniteError(
                f"{what}; no weight has changed. Look at these samples, or have "
                'such micro-batches left out by steps(…, on_bad_batch="skip")'
            )
        if self._world.ranks.rank == 0:
            log.warning("%s; left out", what)
        self.metrics[SKIPPED] = len(self.skipped)

    def _samples(self, leaf: int) -> str:
        if not self._order.length:
            return "of batch()"
        indices = self._order.indices(self._data, range(leaf, leaf + 1))[0]
        return f"samples {text.listed([str(one) for one in indices], NAMED)}"

    def _by_leaf(self, logged: Sequence[_Logged]) -> dict[str, list[float | None]]:
        """Return the values of all leaves, by their names."""
        found: dict[str, list[float | None]] = {LOSS: []}
        found |= {name: [] for one in logged for name in one}
        for rank, one in enumerate(logged):
            leaves = leaves_of(self._data.leaves, rank, len(logged))
            for name, values in found.items():
                values += one.get(name, [None] * len(leaves))
        return found

    def _mean(self, values: Sequence[float | None]) -> float:
        """Return the mean over the leaves that have a value, summed in the tree's order."""
        leaves = {
            Subtree(leaf, leaf + 1): (-0.0, 0.0) if value is None else (value * weight, weight)
            for leaf, (value, weight) in enumerate(zip(values, self._weights, strict=True))
        }
        total, weight = combine(
            Subtree(0, len(values)), leaves, lambda _, a, b: (a[0] + b[0], a[1] + b[1])
        )
        return total / weight if weight else math.nan

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
