"""What ``load_ddp`` does with a file's content: compares all of it with the state, then puts it in.

=====================================  ==========================================================
in the state                           gets
=====================================  ==========================================================
module, optimizer, other with          what was saved, through ``load_state_dict``
``load_state_dict``
tensor                                 copied into; of the same size, and of a type that cuts
                                       nothing off
dict with tensors or objects in it     the same, member by member; a list too
dict of plain values on both sides     replaced as one value; the dict stays the same object
``elaunch.PerRank``                    this rank's own; on another number of ranks as it says
anything else                          replaced in its dict or list
=====================================  ==========================================================
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elaunch.errors import CheckpointError
from elaunch.text import listed
from elaunch.training.checkpoint.ddp import plainstate
from elaunch.training.checkpoint.state import kinds, modules, optimizers, tensors
from elaunch.training.checkpoint.state.perrank import PerRank

SHOWN: Final = 10
_OWN_LOADING: Final = "_load_from_state_dict"


def fitting(
    state: Mapping[Any, Any], content: Any, strict: bool, *, rank: int, ranks: int
) -> Callable[[], None]:
    """Return what puts ``content`` into ``state``, in which nothing changes before.

    ``rank`` of ``ranks`` calls it. Raises CheckpointError unless the two fit; without ``strict``
    keys may be missing on either side.
    """
    if not isinstance(content, Mapping):
        raise CheckpointError(f"the file holds a {type(content).__name__}, no dict")
    walk = _Filling(rank, ranks)
    walk.members(state, content, "")
    lacking = [("missing", walk.missing), ("unexpected", walk.unexpected)] if strict else []
    problems = [f"{word}: {listed(keys, SHOWN)}" for word, keys in lacking if keys]
    if walk.wrong:
        problems.append(listed(walk.wrong, SHOWN, "; "))
    if problems:
        raise CheckpointError(f"the state does not fit the checkpoint: {'; '.join(problems)}")

    def fill() -> None:
        for step in walk.steps:
            step()

    return fill


class _Filling:
    """One walk through a state and a content, for the state of one of the ranks.

    Attributes:
        missing: keys that only the state has; those in modules too.
        unexpected: keys that only the content has.
        wrong: what cannot be put where it belongs, in words.
        steps: the calls that put the content into the state.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.wrong: list[str] = []
        self.steps: list[Callable[[], object]] = []
        self._rank = rank
        self._ranks = ranks

    def members(self, state: Any, content: Any, above: str) -> None:
        """Walk through two dicts, or two lists."""
        own, saved = dict(_members(state)), dict(_members(content))
        self._keys(own, saved, above)
        for key, value in own.items():
            if key in saved:
                self._value((state, key), value, saved[key], f"{above}{key}")

    def _keys(self, own: Mapping[Any, Any], saved: Mapping[Any, Any], above: str) -> None:
        self.missing += [f"{above}{key}" for key in own if key not in saved]
        self.unexpected += [f"{above}{key}" for key in saved if key not in own]

    def _value(self, at: tuple[Any, Any], value: Any, new: Any, name: str) -> None:
        """Walk through a value, which ``at``, a container and a key, holds."""
        if isinstance(value, PerRank):
            self._own(value, new, name)
        elif isinstance(value, nn.Module):
            self._module(value, new, name)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, new, name)
        elif kinds.is_stateful(value):
            self.steps.append(partial(value.load_state_dict, new))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, new, name)
            self.steps.append(partial(value.detach().copy_, new))
        elif isinstance(value, tuple) and kinds.holds_objects(value):
            self.wrong.append(f"{name} is a tuple with objects in it: make it a list")
        elif _is_replaced(value, new):
            self._replaced(at, value, new, name)
        elif isinstance(new, Mapping if isinstance(value, Mapping) else list):
            self.members(value, new, f"{name}.")
        else:
            self._kind(value, new, name)

    def _replaced(self, at: tuple[Any, Any], value: Any, new: Any, name: str) -> None:
        holder, key = at
        if not isinstance(holder, MutableMapping | list):
            self.wrong.append(
                f"{name} cannot be replaced in a {type(holder).__name__}: give a dict"
            )
        elif isinstance(value, MutableMapping) and isinstance(new, Mapping):
            self.steps += [value.clear, partial(value.update, new)]
        else:
            self.steps.append(partial(operator.setitem, holder, key, new))

    def _own(self, marked: PerRank, saved: Any, name: str) -> None:
        """Give this rank its own; with another number of ranks as PerRank says."""
        kinds.refuse_resizing(marked, name)
        every = _every(saved)
        new = every[self._rank % len(every)]
        if marked.on_resize is not None and len(every) != self._ranks:
            resize = marked.on_resize
            self.steps.append(lambda: _put(marked, resize(list(every))))
        elif self._rank >= len(every) and marked.on_more_ranks == "keep":
            return
        elif kinds.is_changed_in_place(marked.value):
            self._value(({}, ""), marked.value, new, name)
        else:
            self.steps.append(partial(_put, marked, new))

    def _module(self, module: nn.Module, saved: Any, name: str) -> None:
        if not isinstance(saved, Mapping):
            self._kind(module, saved, name)
            return
        own, saved = modules.state_of(module), _unwrapped(saved, module)
        self._keys(own, saved, f"{name}.")
        sizing = _addresses_of_own_loading(module)
        for key, value in own.items():
            if key not in saved or not isinstance(value, torch.Tensor) or is_lazy(value):
                continue
            if self._is_odd(value, f"{name}.{key}"):
                continue
            if value.numel() and value.data_ptr() not in sizing:
                self._tensor(value, saved[key], f"{name}.{key}")
        # Its own where the file lacks some: without ``strict`` that is no error.
        filled = {key: saved.get(key, own[key]) for key in own}
        self.steps.append(partial(modules.set_state, module, filled))

    def _optimizer(self, optimizer: torch.optim.Optimizer, saved: Any, name: str) -> None:
        self.steps.append(partial(optimizer.load_state_dict, saved))
        for number, member in enumerate(optimizers.parameters(optimizer)):
            if not is_lazy(member) and self._is_odd(member, f"{name}, parameter {number},"):
                return
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        if not isinstance(groups, list):
            return
        had = [len(group["params"]) for group in groups]
        has = [len(group["params"]) for group in optimizer.param_groups]
        if had != has:
            self.wrong.append(
                f"{name} has groups of {has} parameters, and the one in the checkpoint of {had}"
            )

    def _is_odd(self, tensor: torch.Tensor, name: str) -> bool:
        """Note a tensor that cannot be loaded into, as one without data."""
        found = tensors.obstacle(tensor)
        if found is None or found.in_file:
            return False
        self.wrong.append(f"{name} {tensors.in_words(found, loading=True)}")
        return True

    def _tensor(self, tensor: torch.Tensor, saved: Any, name: str) -> None:
        if self._is_odd(tensor, name):
            return
        if not isinstance(saved, torch.Tensor):
            self._kind(tensor, saved, name)
        elif saved.device.type == "meta":
            self.wrong.append(f"{name} has no data in the checkpoint (device meta)")
        elif tensor.shape != saved.shape:
            self.wrong.append(
                f"{name} has size {tuple(tensor.shape)}, and {tuple(saved.shape)} in the checkpoint"
            )
        elif tensor.dtype != saved.dtype and not torch.can_cast(saved.dtype, tensor.dtype):
            self.wrong.append(
                f"{name} is {tensor.dtype}, and {saved.dtype} in the checkpoint, which would be "
                "cut off"
            )

    def _kind(self, value: Any, saved: Any, name: str) -> None:
        self.wrong.append(
            f"{name} is a {type(value).__name__}, and a {type(saved).__name__} in the checkpoint"
        )


def _members(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, Mapping) else enumerate(container)


def _put(marked: PerRank, new: Any) -> None:
    if kinds.is_stateful(marked.value):
        marked.value.load_state_dict(new)
    else:
        marked.value = new


def _every(saved: Any) -> list[Any]:
    """Return what every rank has saved; one if it was saved without the mark."""
    marked = isinstance(saved, Mapping) and plainstate.PER_RANK in saved
    return list(saved[plainstate.PER_RANK]) if marked else [saved]


def _is_replaced(value: Any, saved: Any) -> bool:
    """Tell whether what was saved takes the place of ``value``, and does not go into it."""
    if isinstance(value, PerRank | torch.Tensor) or kinds.is_stateful(value):
        return False
    if isinstance(value, Mapping):
        plain = not isinstance(saved, Mapping) or not plainstate.has_tensors(saved)
        return plain and not kinds.holds_objects(value) and not plainstate.has_tensors(value)
    if not isinstance(value, list) or kinds.holds_objects(value):
        return not isinstance(value, list)
    fits = isinstance(saved, list) and len(saved) == len(value)
    return not (fits and plainstate.has_tensors(value))


def _addresses_of_own_loading(module: nn.Module) -> frozenset[int]:
    """Return where the tensors of submodules lie that load in their own way, to any size maybe."""
    return frozenset(
        tensor.data_ptr()
        for child in module.modules()
        if not getattr(type(child), _OWN_LOADING).__module__.startswith("torch.nn.")
        for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if not is_lazy(tensor)
    )


def _unwrapped(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's state without DDP's prefix, if somebody saved it with that."""
    prefix = "module."
    prefixed = all(key.startswith(prefix) for key in saved)
    if prefixed and saved.keys() != modules.state_of(model).keys():
        return {key[len(prefix) :]: value for key, value in saved.items()}
    return dict(saved)
