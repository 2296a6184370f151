"""Optimizers by the names of their parameters, through torch's get/set_optimizer_state_dict.

``optimizer.state_dict()`` numbers the parameters, and what is loaded under numbers into a fresh
optimizer restores nothing, without an error. By names it is restored, resharded too. Five things
that torch's functions do are kept from happening:

* a save before the first step would make that step: torch calls ``optimizer.step()`` to have a
  state to save, after which Adam counts one step more. Nothing is saved in its place, and a load
  leaves the optimizer fresh;
* a load would make that step, too, which takes gradients for all parameters and several times as
  long as what is loaded: torch's own optimizers begin their state without it;
* a load with gradients in place would restore nothing into a fresh optimizer;
* a load would give a state to parameters that had none when it was saved;
* torch 2.8 and older load no state in which a parameter has none.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.state import modules, tensors

STATE = "state"
GROUPS = "param_groups"
_PARAMS = "params"
_RATE = "lr"  # torch sets it to 0 for the step
_WANTS_ALL = torch.__version__ < (2, 10)  # so that a parameter without a state is a KeyError
_STEP_FAILS = (TypeError, RuntimeError, ValueError, AttributeError, KeyError, AssertionError)
Named = tuple[str, nn.Module]
_plain: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)
"""Optimizers of which torch has given the state as :func:`_named` does, and their modules."""


def is_raw(value: Mapping[Any, Any]) -> bool:
    """Tell whether a dict is what ``optimizer.state_dict()`` returned: parameters by number."""
    if set(value) != {STATE, GROUPS} or not isinstance(value[GROUPS], Sequence):
        return False
    members = [
        member
        for group in value[GROUPS]
        if isinstance(group, Mapping)
        for member in group.get(_PARAMS, ())
    ]
    return bool(members) and all(isinstance(member, int) for member in members)


def refuse_raw(key: str) -> CheckpointError:
    """Return the error about what :func:`is_raw`."""
    return CheckpointError(
        f"{key} is optimizer.state_dict(), which numbers the parameters: loaded into a fresh "
        'optimizer it would restore nothing. Give the optimizer itself, {"model": model, '
        '"optimizer": optimizer}, or get_optimizer_state_dict(model, optimizer) of '
        "torch.distributed.checkpoint.state_dict"
    )


def owner(key: str, optimizer: torch.optim.Optimizer, modules: Sequence[Named]) -> nn.Module:
    """Return the module, of those in the state, that has all of the optimizer's parameters.

    Raises CheckpointError if none or several have.
    """
    wanted = {id(parameter) for parameter in parameters(optimizer)}
    found = [
        (name, module)
        for name, module in modules
        if wanted <= {id(parameter) for parameter in module.parameters()}
    ]
    if len(found) == 1:
        return found[0][1]
    if found:
        names = ", ".join(name for name, _ in found)
        raise CheckpointError(
            f"the parameters of {key} belong to several modules of the state ({names}): put each "
            "module into it once"
        )
    names = ", ".join(name for name, _ in modules)
    raise CheckpointError(
        f"no module of the state has all parameters of {key} ("
        + (f"modules: {names}" if names else "there is no module in it")
        + '): save them together, as in {"model": model, "optimizer": optimizer}; several modules '
        "go into one nn.ModuleDict"
    )


def is_of_one_shape(saved: Iterable[tuple[str, Sequence[str | int]]]) -> bool:
    """Tell whether no list stands in an optimizer's saved state: those grow, as LBFGS's do.

    ``saved`` is what a checkpoint has below its ``state``: keys, and the rest of their paths.
    """
    return not any(isinstance(part, int) for _, rest in saved for part in rest)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all that the optimizer changes."""
    return [member for group in optimizer.param_groups for member in group[_PARAMS]]


def state_to_save(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by name; tensors in it are its own. It is not changed."""
    if not optimizer.state:
        with _no_first_step(optimizer):
            return dict(get_optimizer_state_dict(module, optimizer))
    named, known = _named(module, optimizer), _plain.get(optimizer)
    if named is not None and known is not None and known() is module:
        return named
    state = dict(get_optimizer_state_dict(module, optimizer))
    if named is not None and _is_same(named, state):
        _plain[optimizer] = weakref.ref(module)
    return state


def _named(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Return ``optimizer.state_dict()`` by the names of the module, if those are known."""
    known = modules.names_of(module)
    if known is None:
        return None
    names = {id(member): known.get(name) for name, member in module.named_parameters()}
    numbered = [names.get(id(member)) for member in parameters(optimizer)]
    if None in numbered:
        return None
    state = dict(optimizer.state_dict())
    if any(type(number) is not int for number in state[STATE]):
        return None
    groups = [
        {**group, _PARAMS: [numbered[number] for number in group[_PARAMS]]}
        for group in state[GROUPS]
    ]
    return {STATE: {numbered[at]: held for at, held in state[STATE].items()}, GROUPS: groups}


def _is_same(one: object, other: object) -> bool:
    """Tell whether two states have the same keys and the very same values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = list(one) == list(other)
        return keys and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, str) and one == other)


def state_to_fill(
    module: nn.Module, optimizer: torch.optim.Optimizer, saved: frozenset[str] | None
) -> dict[str, Any] | None:
    """Return the optimizer's state by name, to be loaded into; a fresh optimizer gets one first.

    None if it cannot be given one: torch does that by a step without gradients and closure, which
    LBFGS and SparseAdam do not make.

    Args:
        module: has the parameters.
        optimizer: is changed only in that a state is made where it has none.
        saved: the names of the parameters that have a state in the checkpoint; None: all.
    """
    if saved is not None and not saved:
        state = state_to_save(module, optimizer)
        return {**state, STATE: {}}
    fresh, rates = not optimizer.state, [group.get(_RATE) for group in optimizer.param_groups]
    with _no_gradients(optimizer):
        if fresh:
            _begin_state(optimizer)
        try:
            state = dict(get_optimizer_state_dict(module, optimizer))
        except _STEP_FAILS:
            if not fresh:
                raise
            optimizer.state.clear()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group.update({_RATE: rate} if _RATE in group else {})
            return None
    if saved is not None:
        # None is known by its name: some other code has saved it; the check of keys reports it.
        known = {name: held for name, held in state[STATE].items() if name in saved}
        state[STATE] = known or state[STATE]
    return state


def flat_state_to_fill(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return it as ``flatten_optimizer_state_dict`` makes it, which some other code saves."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _no_gradients(optimizer):
        return dict(get_optimizer_state_dict(module, optimizer, options=options))


def set_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give the optimizer ``state``, by name; a parameter that is not in it has no state after."""
    # Not strict: torch would refuse parameters without a state. Keys were compared before.
    options = StateDictOptions(strict=False, flatten_optimizer_state_dict=STATE not in state)
    keeping = contextlib.nullcontext() if optimizer.state else _no_first_step(optimizer)
    with keeping, _all_have_one(optimizer, state) if _WANTS_ALL else contextlib.nullcontext():
        set_optimizer_state_dict(module, optimizer, state, options=options)


@contextlib.contextmanager
def _all_have_one(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Iterator[None]:
    """Give parameters that have no state in ``state`` an empty one, and none in the optimizer."""
    if STATE in state:
        names = (name for group in state[GROUPS] for name in group[_PARAMS])
        state[STATE] = {**{name: {} for name in names}, **state[STATE]}
    yield
    for member in parameters(optimizer):
        if not optimizer.state.get(member, True):
            del optimizer.state[member]


@contextlib.contextmanager
def _no_first_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from calling ``step()`` to make a state: it does not where there is a gradient."""
    members = parameters(optimizer)
    if not members or any(member.grad is not None for member in members):
        yield
        return
    smallest = min(members, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def _begin_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer of torch's own its first state; leave any other one fresh.

    It is what ``step()`` does before it computes. There are no gradients, and none are after it.
    """
    begin: Any = getattr(optimizer, "_init_group", None)
    members = [member for member in parameters(optimizer) if member.requires_grad]
    own = type(optimizer).__module__.startswith("torch.optim.")
    if begin is None or not own or any(tensors.is_sharded(member) for member in members):
        return
    lists = len(inspect.signature(begin).parameters) - 1
    for member in members:
        member.grad = member.new_zeros(()).expand_as(member)  # no memory of that size
    try:
        for group in optimizer.param_groups:
            begin(group, *([] for _ in range(lists)))
    except _STEP_FAILS:
        optimizer.state.clear()
    finally:
        for member in members:
            member.grad = None
    if not all(optimizer.state.values()):  # SGD begins its state behind that
        optimizer.state.clear()


@contextlib.contextmanager
def _no_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the gradients aside: torch makes no state for an optimizer where there are some."""
    aside = [(member, member.grad) for member in parameters(optimizer)]
    for member, _ in aside:
        member.grad = None
    try:
        yield
    finally:
        for member, gradient in aside:
            member.grad = gradient
