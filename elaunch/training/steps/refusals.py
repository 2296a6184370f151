"""The arguments of ``steps()``, and what it cannot train: found on all ranks before the first step.

Each rank looks for itself; the ranks send each other what they have found, and all raise the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elaunch import text
from elaunch.errors import CheckpointError, ContextError
from elaunch.training.checkpoint.state import compare, kinds
from elaunch.training.distributed import DistributedContext
from elaunch.training.steps.feed import OWN_ARGUMENTS, Batch, Collate, Dataset, length_of
from elaunch.training.steps.order import Order

PROGRESS: Final = "steps"
"""The key in a checkpoint under which the loop saves where it stands."""


@dataclass(frozen=True)
class Options:
    """The arguments of :meth:`elaunch.TrainContext.steps`, which documents them."""

    dataset: Dataset | None
    batch: Batch | None
    collate_fn: Collate | None
    loader: Mapping[str, Any]
    global_batch: int
    micro_batch: int
    until: int | None
    epochs: int | None
    last: str
    shuffle: bool
    seed: int
    save_every: int | str | None
    keep: Any
    on_bad_batch: str
    check: bool | str
    threads: int

    def order(self) -> Order:
        """Return the order of the data."""
        length = length_of(self.dataset) or 0
        sizes = (length, self.global_batch, self.micro_batch)
        return Order(*sizes, self.seed, self.shuffle, self.last == "drop")


class Trained(NamedTuple):
    """The objects of a state that a loop deals with; ``parameters`` are the optimizers'."""

    modules: Mapping[str, nn.Module]
    optimizers: Sequence[Optimizer]
    parameters: Sequence[torch.Tensor]


def look(state: Any) -> Trained:
    """Return what is to be trained of a state; raises CheckpointError for what is none."""
    kinds.refuse_no_dict(state)
    modules: dict[str, nn.Module] = {}
    optimizers: list[Optimizer] = []
    for path, value in kinds.parts(state):
        if isinstance(value, nn.Module):
            modules[".".join(map(str, path))] = value
        elif isinstance(value, Optimizer):
            optimizers.append(value)
    parameters = [
        one for each in optimizers for group in each.param_groups for one in group["params"]
    ]
    trained = [one for one in dict.fromkeys(parameters) if one.requires_grad]
    return Trained(modules, optimizers, trained)


def check(
    distributed: DistributedContext, state: Any, options: Options, *, alone: bool = False
) -> Trained:
    """Return what is to be trained; ALL ranks call it together, or one ``alone``.

    Raises ContextError, the same on all ranks, for what cannot be.
    """
    trained: Trained | None = None
    try:
        trained = look(state)
        problem = next(_problems(state, trained, options, distributed.size), "")
    except CheckpointError as error:
        problem = str(error)
    own = facts(trained, options) if trained is not None and not problem else {}
    mine = (problem, own)
    found: list[tuple[str, dict[str, str]]] = [mine] if alone else distributed.allgather(mine)
    if by_rank := {rank: one for rank, (one, _) in enumerate(found) if one}:
        problem = next(iter(by_rank.values()))
        who = "" if len(by_rank) == len(found) else f"{text.ranks(list(by_rank))}: "
        raise ContextError(f"steps(): {who}{problem}")
    for name, value in found[0][1].items():
        for rank, (_, others) in enumerate(found):
            if others[name] != value:
                raise ContextError(
                    f"steps(): {name} is {value} on rank 0 and {others[name]} on rank {rank}: give "
                    "the same on all ranks"
                )
    assert trained is not None
    return trained


def check_same(distributed: DistributedContext, state: Mapping[str, Any]) -> None:
    """Check that all ranks begin with the same state; ALL ranks call it together.

    Raises ContextError, on all ranks, that names the first difference.
    """
    if distributed.size == 1:
        return
    try:
        compare.check_same(distributed, state, None)
    except CheckpointError as error:
        raise ContextError(
            f"steps(): the ranks begin with different states ({error}): build them alike, as after "
            "torch.manual_seed(0), or mark what each rank has of its own by elaunch.PerRank"
        ) from None


def facts(trained: Trained, options: Options) -> dict[str, str]:
    """Return what must be the same on all ranks, in words."""
    names = "global_batch micro_batch until epochs last shuffle seed save_every".split()
    names += ["on_bad_batch", "check", "threads"]
    shapes = [(tuple(one.shape), str(one.dtype)) for one in trained.parameters]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return {
        **{name: repr(getattr(options, name)) for name in names},
        "the dataset's length": repr(length_of(options.dataset)),
        "the list of trained parameters": f"{len(shapes)} of digest {digest}",
    }


def _problems(state: Any, trained: Trained, options: Options, size: int) -> Iterator[str]:
    yield from _of_arguments(options)
    yield from _of_data(options)
    yield from _of_state(state, trained)
    yield from _of_modules(trained, size)


def _of_arguments(options: Options) -> Iterator[str]:
    for name in ("global_batch", "micro_batch", "until", "epochs", "threads"):
        value = getattr(options, name)
        if value is None and name in ("until", "epochs"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name}={value!r}: give a whole number, 1 or more"
    if options.global_batch % options.micro_batch:
        fitting = options.global_batch - options.global_batch % options.micro_batch
        yield (
            f"global_batch={options.global_batch} is no multiple of "
            f"micro_batch={options.micro_batch}: give {fitting + options.micro_batch}, say"
        )
    if isinstance(options.seed, bool) or not isinstance(options.seed, int):
        yield f"seed={options.seed!r}: give a whole number"
    if options.last not in ("drop", "short"):
        yield f'last={options.last!r}: give "drop" or "short"'
    if options.on_bad_batch not in ("raise", "skip"):
        yield f'on_bad_batch={options.on_bad_batch!r}: give "raise" or "skip"'
    if options.check not in (False, True, "warn"):
        yield f'check={options.check!r}: give True, False or "warn"'
    every = options.save_every
    is_number = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if every is not None and every != "auto" and not is_number:
        yield f'save_every={every!r}: give a number of steps, "auto" or None'
    if options.until is not None and options.epochs is not None:
        yield f"until={options.until} and epochs={options.epochs} are given: give one of them"
    if taken := sorted(OWN_ARGUMENTS & options.loader.keys()):
        yield (
            f"loader={{{taken[0]!r}: …}}: steps() chooses the samples itself; loader= takes "
            "num_workers, prefetch_factor, pin_memory and the like"
        )


def _of_data(options: Options) -> Iterator[str]:
    if (options.dataset is None) == (options.batch is None):
        yield "give either a dataset or batch=, a function of step and leaf"
    if options.dataset is None:
        if options.epochs is not None:
            yield f"epochs={options.epochs} without a dataset: give until="
        return
    length = length_of(options.dataset)
    kind = type(options.dataset).__name__
    if length is None:
        yield (
            f"the dataset, a {kind}, has no length or no samples by index, so no position to go on "
            "from: give one with __len__ and __getitem__, or batch=, a function of step and leaf"
        )
    elif not length:
        yield f"the dataset, a {kind}, is empty"
    elif length < options.global_batch and options.last == "drop":
        yield (
            f"the dataset has {length} samples, and global_batch={options.global_batch} takes "
            'more: give a smaller one, or last="short"'
        )


def _of_state(state: Mapping[str, Any], trained: Trained) -> Iterator[str]:
    if PROGRESS in state:
        yield f"the state has a key {PROGRESS!r}, under which steps() saves its own: rename it"
    if not trained.modules:
        yield 'the state has no module: give it as in {"model": model, "optimizer": optimizer}'
    if not trained.optimizers:
        yield 'the state has no optimizer: give it as in {"model": model, "optimizer": optimizer}'
    elif not trained.parameters:
        yield "the optimizers of the state have no parameter that requires a gradient"


def _of_modules(trained: Trained, size: int) -> Iterator[str]:
    for name, module in trained.modules.items():
        for inner, part in module.named_modules(prefix=name):
            kind = type(part).__name__
            if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
                yield (
                    f"{inner} is a {kind}: give the plain module, since steps() sums up the "
                    "gradients itself"
                )
            if part.training and getattr(part, "running_mean", None) is not None:
                yield (
                    f"{inner} is a {kind}: its running statistics depend on the order of the "
                    "micro-batches, and so on the ranks; use GroupNorm or LayerNorm, or freeze it "
                    "by eval()"
                )
    for name, parameter in _named(trained):
        if is_lazy(parameter):
            yield f"{name} has no shape yet: compute one batch before steps()"
        elif isinstance(parameter, DTensor):
            yield (
                f"{name} is sharded (FSDP2 or tensor parallel): steps() trains modules that each "
                "rank has whole; use ctx.checkpoint and the sampler"
            )
        elif parameter.device.type != "cpu" and size > 1:
            yield (
                f"{name} is on {parameter.device}: steps() sums up gradients of several ranks on "
                "the CPU only so far"
            )


def _named(trained: Trained) -> Iterator[tuple[str, torch.Tensor]]:
    names = {
        parameter: f"{name}.{inner}"
        for name, module in trained.modules.items()
        for inner, parameter in module.named_parameters()
    }
    for number, parameter in enumerate(trained.parameters):
        yield names.get(parameter, f"parameter {number} of the optimizers"), parameter
