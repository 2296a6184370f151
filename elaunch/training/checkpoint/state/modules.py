"""Modules by the names of their parameters, through torch's get/set_model_state_dict.

Names have no ``module.`` of DDP and the like, and shards stay shards. torch's functions refuse a
module without parameters; its own ``state_dict`` is taken then. Those of torch 2.7 and older leave
out what is on the device ``meta``, without an error; ``state_dict`` has it, so that it is refused.

torch looks up each name in the tree of modules, twice: with Adam most of what a small save costs.
For all but FSDP1 its names are ``state_dict``'s without those of wrappers. So they are looked up
once for each module, and again when ``state_dict`` has other keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from elaunch.training.checkpoint.state import tensors

_LEAVES_OUT_META = torch.__version__ < (2, 8)
Names = Mapping[str, str]
_names: Final[WeakKeyDictionary[nn.Module, Names]] = WeakKeyDictionary()
"""Modules whose names are known: those of ``state_dict`` → torch's."""


def addresses(module: nn.Module) -> frozenset[int]:
    """Return where the parameters lie in memory, by which they are told from buffers."""
    known = (each for each in module.parameters() if not is_lazy(each))
    return frozenset(each.data_ptr() for each in known)


def is_buffer(value: object, parameters: frozenset[int]) -> bool:
    """Tell whether a value of a module's state is a buffer, by its module's :func:`addresses`."""
    if not isinstance(value, torch.Tensor) or tensors.is_sharded(value) or is_lazy(value):
        return False
    return value.data_ptr() not in parameters


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the module's state by name; tensors in it are its own.

    FSDP1 makes calls of its ranks for it: ALL ranks call it together.
    """
    if not _has_parameters(module) or (_LEAVES_OUT_META and _is_on_meta(module)):
        return dict(module.state_dict())
    if names := names_of(module):
        state = module.state_dict()
        if state.keys() == names.keys():
            return {names[name]: value for name, value in state.items()}
    state = dict(get_model_state_dict(module))
    _learn_names(module, state)
    return state


def names_of(module: nn.Module) -> Names | None:
    """Return torch's names of what :func:`state_of` has seen last; None if they are not known."""
    return _names.get(module) if _has_plain_names(module) else None


def _learn_names(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Remember the names in ``state``, torch's of the module, where it has ``state_dict``'s values.

    ``state_dict`` of FSDP1 would gather all shards.
    """
    if not _has_plain_names(module):
        return
    own = module.state_dict()
    places = [_place(value) for value in own.values()]
    if None not in places and places == [_place(value) for value in state.values()]:
        _names[module] = dict(zip(own, state, strict=True))


def _has_plain_names(module: nn.Module) -> bool:
    return not any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _place(value: object) -> Hashable | None:
    """Return what tensor it is, and where it lies; None for what is no tensor of ``state_dict``."""
    if not isinstance(value, torch.Tensor) or tensors.obstacle(value):
        return None
    if hasattr(value, "local_shards"):
        return None
    return type(value), _layout(value.to_local() if isinstance(value, DTensor) else value)


def set_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give the module ``state``, as :func:`state_of` returned it and with other values maybe.

    ALL ranks call it together, as :func:`state_of`.
    """
    if not _has_parameters(module):
        module.load_state_dict(state)
        return
    set_model_state_dict(module, _with_parameters(module, state))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_on_meta(module: nn.Module) -> bool:
    return any(each.is_meta for each in chain(module.parameters(), module.buffers()))


def _with_parameters(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the parameters themselves in place of what shares their memory.

    They were loaded in place; torch would copy each onto itself, unless it is the same object.
    """
    own = {_layout(parameter): parameter for parameter in module.parameters()}
    return {
        name: own.get(_layout(value), value)
        if isinstance(value, torch.Tensor) and not tensors.is_sharded(value)
        else value
        for name, value in state.items()
    }


def _layout(tensor: torch.Tensor) -> Hashable:
    if is_lazy(tensor):
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
