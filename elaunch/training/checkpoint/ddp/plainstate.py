"""A state as plain values for ``save_ddp``'s torch.save, and what the ranks have to agree on of it.

=============================  =====================================================================
in the state                   compared between the ranks
=============================  =====================================================================
keys                           the same on all ranks, with the same kind of thing under each
plain values                   equal, also in what ``state_dict()`` of schedulers and others returns
modules, optimizers, tensors   not: rank 0's are written, as with torch.save
``elaunch.PerRank``            not
=============================  =====================================================================

What ``torch.load(weights_only=True)`` takes is asked before a file is committed: it refuses the
objects of all classes but torch's, Python's plain ones, and those that the script has named to
``torch.serialization.add_safe_globals``. A value that it would refuse at a resume is refused at the
save, by its key.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elaunch import text
from elaunch.errors import CheckpointError, SaveError
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp.metadata import key_of
from elaunch.training.checkpoint.state import compare, kinds, modules, optimizers, tensors
from elaunch.training.checkpoint.state.compare import differing, digest, split
from elaunch.training.checkpoint.state.perrank import PerRank
from elaunch.training.checkpoint.together import agree, guarded, together
from elaunch.training.distributed import DistributedContext

_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
_CLASS: Final = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")
_LONGEST: Final = 200
"""Characters of torch's reason in an error; after them it explains itself at length."""


def check(value: Any, name: str) -> None:
    """Raise CheckpointError, with the key below ``name``, for what would be saved in vain.

    Tensors are taken to be good, and are not copied.
    """
    problem = _problem(value)
    if problem is None:
        return
    for key, member in kinds.members(value):
        check(member, f"{name}.{key}" if name else str(key))
    raise CheckpointError(
        f"{name or 'the state'}, a {type(value).__name__}, could not be loaded again: "
        f"{reason(problem)}. Make it a plain value, as float(x), list(x), str(x) or "
        "torch.as_tensor(x) are; or name its class to torch.serialization.add_safe_globals, here "
        "and where it is loaded"
    )


def reason(error: BaseException) -> str:
    """Return in a line why torch does not load something, or does not save it."""
    while isinstance(error, CheckpointError) and error.__cause__ is not None:
        error = error.__cause__
    why = _STYLE.sub("", str(error))
    if isinstance(error, pickle.UnpicklingError):
        if found := _CLASS.search(why):
            return f"torch.load(weights_only=True) refuses {found[1]}"
        why = why.partition("WeightsUnpickler error:")[2] or why
    return text.shortened(" ".join(why.split()), _LONGEST)


def _problem(value: Any) -> Exception | None:
    file = io.BytesIO()

    def there_and_back() -> None:
        torch.save(_without_tensors(value), file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)

    return guarded(there_and_back, "torch")[1]


def _without_tensors(value: Any) -> Any:
    """Return the value with None for each ordinary tensor; in it no other class is lacking."""
    kind = type(value)
    if kind in (torch.Tensor, nn.Parameter) and not vars(value):
        return None
    if kind in (dict, OrderedDict):
        return kind((key, _without_tensors(member)) for key, member in value.items())
    if kind in (list, tuple):
        return kind(_without_tensors(member) for member in value)
    return value


PER_RANK: Final = "elaunch.per_rank"
"""The key in the file under which every rank's value stands, in a list."""
_MOST: Final = 8
"""Keys that an error names."""
KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class StateSummary:
    """A summary of a rank's state, sent to the others where its :attr:`digest` differs.

    Attributes:
        kinds: what stands under each key, in words.
        compared: the keys of plain values.
        digests: theirs, joined.
    """

    kinds: dict[str, str]
    compared: tuple[str, ...]
    digests: bytes

    @property
    def digest(self) -> bytes:
        """One digest of all that; the order of the keys plays no part."""
        each = zip(self.compared, split(self.digests), strict=True)
        return digest(repr((sorted(self.kinds.items()), sorted(each))).encode())


@dataclass
class Plain:
    """A state as plain values.

    Attributes:
        content: for the file; None stands for modules and optimizers on ranks that do not write.
        own: what this rank has of its own.
        per_rank: the lists in ``content`` that get what each rank has of its own.
        kinds: what stands under each key.
        values: the plain values by key.
        size: about how many bytes the tensors have.
    """

    content: dict[Any, Any] = field(default_factory=dict)
    own: dict[KeyPath, Any] = field(default_factory=dict)
    per_rank: dict[KeyPath, list[Any]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    size: int = 0

    def summary(self) -> StateSummary:
        """Return what is compared with the other ranks' states."""
        digests = [digest(pickle.dumps(value)) for value in self.values.values()]
        return StateSummary(self.kinds, tuple(self.values), b"".join(digests))

    def complete(self, everyone: Sequence[Mapping[KeyPath, Any]]) -> dict[Any, Any]:
        """Return the content, with what every rank has of its own."""
        for path, values in self.per_rank.items():
            values[:] = [own[path] for own in everyone]
        return self.content


def make(state: Any, writes: bool) -> Plain:
    """Return the state as plain values; ``writes``: this rank writes for all.

    Raises CheckpointError for what cannot be saved, or not loaded again; whatever the script's
    objects raise.
    """
    kinds.refuse_no_dict(state)
    refuse_raw(state)
    walk = _PlainWalk(writes)
    walk.made.content = {key: walk.visit(value, (key,)) for key, value in state.items()}
    check(walk.made.content, "")
    for path, value in walk.made.own.items():
        check(value, key_of(path))
    if writes:
        everything = (part for _, part in kinds.parts(walk.made.content))
        held = (part for part in everything if isinstance(part, torch.Tensor))
        walk.made.size = sum(one.numel() * one.element_size() for one in held)
    return walk.made


def refuse_raw(state: Any) -> None:
    """Raise CheckpointError for an optimizer's state by numbers, wherever it stands."""
    for path, part in kinds.parts(state):
        if isinstance(part, Mapping) and optimizers.is_raw(part):
            raise optimizers.refuse_raw(key_of(path))


def check_same(
    distributed: DistributedContext,
    made: Plain,
    summary: StateSummary,
    what: str,
    timeout: float | None,
) -> None:
    """Raise SaveError, on all ranks, for keys and plain values that differ. ALL ranks call it.

    Call it where the digests of the ranks' summaries are not the same.
    """
    everyone = agree(distributed, what, None, summary, timeout)
    problems = _differences([one.kinds for one in everyone])
    if problems:
        raise SaveError(
            f"{what}: {'; '.join(problems[:_MOST])}{'; …' if len(problems) > _MOST else ''}: rank "
            "0 writes for all ranks, so all give the same keys; elaunch.PerRank(…) is around what "
            "each has of its own"
        )
    suspects = differing([one.compared for one in everyone], [one.digests for one in everyone])
    with together(distributed, what, timeout):
        packed = {key: archives.pack(made.values[key]) for key in suspects if key in made.values}
    compare.settle(distributed, suspects, packed, timeout, made.values.values())


def _differences(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Return in words which keys not all ranks have, or with something else under them."""
    if all(found == everyone[0] for found in everyone):
        return []
    problems = []
    for key in dict.fromkeys(key for found in everyone for key in found):
        held = text.on_ranks(enumerate(found.get(key, "missing") for found in everyone))
        if len(held) > 1:
            problems.append(f"{key} is {', '.join(held)}")
    return problems


class _PlainWalk:
    """One walk through a state; with ``shared=False`` through what a rank has of its own."""

    def __init__(self, writes: bool, shared: bool = True) -> None:
        self.made = Plain()
        self._writes = writes
        self._shared = shared

    def visit(self, value: Any, path: KeyPath) -> Any:
        """Return the value as it stands in the file, and note what the ranks have to agree on."""
        kinds.refuse_tuple(value, key_of(path))
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if isinstance(value, nn.Module):
            _refuse_sharded(value, path)
            self._note(path, "a module")
            return self._written(lambda: _state_of(value, path), path)
        if isinstance(value, torch.optim.Optimizer):
            self._note(path, "an optimizer")
            return self._written(value.state_dict, path)
        if kinds.is_stateful(value):
            state = value.state_dict()
            self._compare(state, path)
            return state
        if isinstance(value, Mapping) and value:
            return {key: self.visit(member, (*path, key)) for key, member in value.items()}
        if isinstance(value, list) and kinds.holds_objects(value):
            return [self.visit(member, (*path, index)) for index, member in enumerate(value)]
        self._compare(value, path)
        return dict(value) if isinstance(value, Mapping) else value

    def _written(
        self, state_of: Callable[[], dict[str, Any]], path: KeyPath
    ) -> dict[str, Any] | None:
        """Return a module's or an optimizer's state, None on ranks that do not write it."""
        if not self._writes:
            return None
        state = state_of()
        _refuse_odd(state, path)
        return state

    def _per_rank(self, marked: PerRank, path: KeyPath) -> dict[str, list[Any]]:
        if not self._shared:
            raise CheckpointError(f"{key_of(path)} is a PerRank in a PerRank: one is enough")
        kinds.refuse_resizing(marked, key_of(path))
        self._note(path, "a PerRank")
        self.made.own[path] = _PlainWalk(writes=True, shared=False).visit(marked.value, path)
        return {PER_RANK: self.made.per_rank.setdefault(path, [])}

    def _compare(self, value: Any, path: KeyPath) -> None:
        """Note the plain values in what is no module and no optimizer."""
        if isinstance(value, torch.Tensor):
            _refuse_sharded(value, path)
            _refuse_odd(value, path)
            self._note(path, "a tensor")
        elif (isinstance(value, Mapping) and value) or kinds.holds_tensors(value):
            for key, member in kinds.members(value):
                self._compare(member, (*path, key))
        else:
            self._note(path, "a value")
            self.made.values[key_of(path)] = value

    def _note(self, path: KeyPath, kind: str) -> None:
        if self._shared:
            self.made.kinds[key_of(path)] = kind


def _state_of(module: nn.Module, path: KeyPath) -> dict[str, Any]:
    state = modules.state_of(module)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors.refuse_in_module(key_of((*path, name)), value)
    return state


def _refuse_sharded(value: Any, path: KeyPath) -> None:
    members = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    wrapped = isinstance(value, nn.Module) and any(
        type(module).__name__ == "FullyShardedDataParallel" for module in value.modules()
    )
    if wrapped or any(isinstance(member, DTensor) for member in members):
        raise CheckpointError(
            f"{key_of(path)} is sharded over the ranks, so rank 0 does not have all of it: use "
            "ctx.checkpoint.save()"
        )


def _refuse_odd(value: Any, path: KeyPath) -> None:
    """Raise CheckpointError for tensors that one file cannot hold, also those in dicts and lists.

    Some that the sharded save refuses, as quantised ones, torch.save and torch.load take.
    """
    for at, part in kinds.parts(value, path):
        found = tensors.obstacle(part) if isinstance(part, torch.Tensor) else None
        if found is not None and not found.in_file:
            tensors.refuse(key_of(at), part)
