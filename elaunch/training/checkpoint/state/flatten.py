"""The state that a script saves or loads, as flat leaves under torch.distributed.checkpoint's keys.

=====================================  ==========================================================
in the state                           leaves
=====================================  ==========================================================
``nn.Module`` (DDP, FSDP1, FSDP2, TP)  its get_model_state_dict: no ``module.``, shards stay shards
``Optimizer``                          its get_optimizer_state_dict, with the module of the state
                                       that has its parameters
``elaunch.PerRank(value)``             those of the value, under ``key.rank-00003``
``state_dict``/``load_state_dict``     those of its state_dict
dict, list with dicts or tensors       ``key.name``, ``key.0``
tensor                                 itself
anything else                          itself, as one pickled value
=====================================  ==========================================================

The keys are those of plain ``dcp.save``, so plain ``dcp.load`` reads what is saved. One exception:
a dict with keys that are no strings is one value, since flattened it would come back with other
keys. Where a checkpoint has it flattened it is loaded so.

``Values`` packs the leaves that are no tensors: one archive each, made again only when the value
changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elaunch import text
from elaunch.errors import CheckpointError
from elaunch.training import unpickling
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp.metadata import Stored, key_of
from elaunch.training.checkpoint.state import kinds, modules, optimizers, tensors
from elaunch.training.checkpoint.state.perrank import PerRank, rank_name
from elaunch.training.checkpoint.together import guarded

_PLAIN: Final = (int, float, str, bool, type(None))
_NAME: Final = re.compile(rb"c[\w.]+\n[\w.]+\n")
"""A name of a class or function in a pickle."""
_LARGE: Final = 1 << 20
"""Bytes of an archive that is not searched for names at each save."""


class Values:
    """The archives of the plain values of the last save, by key."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, bytes]] = {}
        self._read: dict[str, frozenset[bytes] | str] = {}

    def pack(self, flat: FlatState) -> dict[str, bytes]:
        """Return the archive of each value; raise CheckpointError that names one it cannot pack."""
        leaves = flat.leaves.items()
        return {key: self._pack(key, leaf.value) for key, leaf in leaves if not leaf.is_tensor}

    def _pack(self, key: str, value: Any) -> bytes:
        text = _text_of(value)
        known = self._known.get(key)
        if text is not None and known is not None and known[0] == text:
            return known[1]
        kind = type(value).__name__
        packed, problem = guarded(lambda: archives.pack(value), "torch.save")
        if packed is None:
            raise CheckpointError(f"{key}, a {kind}, cannot be pickled: {problem}") from problem
        if text is None:
            self._check(key, kind, packed, value)
        if text is not None:
            self._known[key] = (text, packed)
        return packed

    def _check(self, key: str, kind: str, packed: bytes, value: Any) -> None:
        """Raise CheckpointError for what a load would refuse, unless it names what was known."""
        large = len(packed) > _LARGE
        names = kind if large else frozenset(_NAME.findall(packed))
        if self._read.get(key) == names:
            return
        also = unpickling.named_by([value])
        problem = guarded(lambda: archives.unpack(packed, also), "torch.load")[1]
        if problem is not None:
            raise CheckpointError(
                f"{key}, a {kind}, could not be loaded again: {problem}. Make it a plain value, as "
                "float(x), list(x), str(x) or numpy.asarray(x) are; or name its class to "
                "torch.serialization.add_safe_globals, here and where it is loaded"
            ) from problem
        self._read[key] = names


def _text_of(value: Any) -> str | None:
    """Return a text that identifies a plain value; None for any other, which may change inside."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if type(value) is tuple and all(type(member) in _PLAIN for member in value):
        return f"tuple {value!r}"
    return None


def lengths_for(packed: Mapping[str, bytes], last: Mapping[str, int]) -> dict[str, int]:
    """Return the length of each archive: as it was last, where that fits."""
    return {
        key: archives.length_for(len(archive), last.get(key, 0)) for key, archive in packed.items()
    }


KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Share:
    """How a value that several ranks have, and that is no sharded tensor, is saved.

    Attributes:
        lowest: the lowest of these ranks writes it; else they share the work.
        compared: it is an error if it is not the same on all of them.
        own: it has a key of its own on each rank.
    """

    lowest: bool
    compared: bool
    own: bool = False


PARAMETER = Share(lowest=False, compared=True)
MOMENT = Share(lowest=False, compared=False)
"""A value that an optimizer has for a parameter."""
BUFFER = Share(lowest=True, compared=False)
"""DDP takes rank 0's at the next forward; and so does a checkpoint."""
PLAIN = Share(lowest=True, compared=True)
"""A value that stands in the state by itself."""
OWN = Share(lowest=True, compared=False, own=True)
"""A value that is marked by PerRank."""


class Leaf(NamedTuple):
    """One value of the state; ``holder[name]`` is where it stands, and a loaded one is put."""

    key: str
    path: KeyPath
    value: Any
    holder: Any
    name: Any
    share: Share = PLAIN

    @property
    def is_tensor(self) -> bool:
        """Whether it is saved as a tensor."""
        return isinstance(self.value, torch.Tensor)

    @property
    def is_whole_tensor(self) -> bool:
        """Whether it is a tensor of which a rank that has it has all."""
        return self.is_tensor and not tensors.is_sharded(self.value)

    @property
    def is_left_to_the_lowest(self) -> bool:
        """Whether the lowest of the ranks that have it writes it, and no other."""
        return self.is_whole_tensor and self.share.lowest

    @property
    def is_compared(self) -> bool:
        """Whether it has to be the same on all ranks that have it."""
        return self.share.compared if self.is_tensor else not self.share.own


@dataclass
class FlatState:
    """The leaves by key, and what is to be called, in this order, when values were loaded.

    ``own_values`` are plain values of the state whose places in ``leaves`` have placeholders.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    restores: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    own_values: list[Any] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The leaves that are tensors."""
        return {key: leaf.value for key, leaf in self.leaves.items() if leaf.is_tensor}

    def planner(self) -> DefaultSavePlanner:
        """Return a planner that knows the leaves, for ``resolve_data``."""
        leaves = self.leaves.items()
        sharded = any(hasattr(leaf.value, "local_shards") for _, leaf in leaves)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=sharded)
        # Values are no business of the planner, which would take some of them for containers.
        plain = {key: leaf.value if leaf.is_tensor else None for key, leaf in leaves}
        planner.set_up_planner(plain, is_coordinator=False)
        return planner


def flatten(state: Mapping[str, Any], rank: int, stored: Stored | None = None) -> FlatState:
    """Return the leaves of ``state``, which is not changed.

    FSDP1 makes calls of its ranks for it: ALL ranks call it together.

    Args:
        state: what the script gave.
        rank: this process's, for PerRank.
        stored: what the checkpoint has, if its values are to be put into the leaves.

    Raises:
        CheckpointError: names what cannot be saved, and says what to do.
    """
    kinds.refuse_no_dict(state)
    walk = _Walk(rank, stored)
    # Before the walk: an optimizer may come before its module.
    walk.modules = [
        (key_of(at), part) for at, part in kinds.parts(state) if isinstance(part, nn.Module)
    ]
    walk.members(state, ())
    return walk.flat


class _Walk:
    """One walk through a state."""

    def __init__(self, rank: int, stored: Stored | None, loading: bool = False) -> None:
        self.flat = FlatState()
        self._rank = rank
        self._stored = stored
        self._loading = loading or stored is not None
        self.modules: list[optimizers.Named] = []
        self._own_depth = 0

    def members(self, value: Any, path: KeyPath, share: Share = PLAIN) -> None:
        """Walk through what a dict or a list holds."""
        for name, member in kinds.members(value):
            step = str(name) if isinstance(value, Mapping) else name
            self._visit(value, name, member, (*path, step), share)

    def _visit(
        self, holder: Any, name: Any, value: Any, path: KeyPath, share: Share = PLAIN
    ) -> None:
        if isinstance(value, torch.Tensor):
            key = key_of(path)
            tensors.refuse(key, value, self._loading)
            self._leaf(Leaf(key, path, value, holder, name, share))
        elif isinstance(value, PerRank):
            self._per_rank(value, path)
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, path)
        elif kinds.is_stateful(value):
            self._stateful(value, path)
        elif self._is_walked(value, path):
            self.members(value, path, share)
        elif self._is_grown(value, path):
            self._fill(value, path)
        else:
            kinds.refuse_hidden_shards(value, key_of(path))
            self._leaf(Leaf(key_of(path), path, value, holder, name, share))

    def _is_walked(self, value: object, path: KeyPath) -> bool:
        if isinstance(value, Mapping):
            if optimizers.is_raw(value):
                raise optimizers.refuse_raw(key_of(path))
            plain = all(isinstance(name, str) for name in value)
            if value and (plain or kinds.holds_more(value)):
                return True
            return (
                bool(value) and self._stored is not None and key_of(path) not in self._stored.keys
            )
        kinds.refuse_tuple(value, key_of(path))
        return isinstance(value, list) and kinds.holds_more(value)

    def _is_grown(self, value: object, path: KeyPath) -> bool:
        """Tell whether this is an empty dict or list of which the checkpoint has the content."""
        return (
            self._stored is not None
            and type(value) in (dict, list)
            and not value
            and key_of(path) not in self._stored.keys
            and bool(self._stored.below(path))
        )

    def _fill(self, value: dict[str, Any] | list[Any], path: KeyPath) -> None:
        held = self._rebuilt(path, value)

        def put() -> None:
            if isinstance(value, list):
                value.extend(held[""])
            else:
                value.update(held[""])

        self._then(put)

    def _leaf(self, leaf: Leaf) -> None:
        if self._own_depth:
            if leaf.is_tensor and not leaf.is_whole_tensor:
                raise CheckpointError(
                    f"{leaf.key} is sharded over the ranks: each saves its own part of it anyway, "
                    "so put no elaunch.PerRank around it"
                )
            leaf = leaf._replace(share=OWN)
        held_fast = isinstance(leaf.holder, Mapping) and not isinstance(leaf.holder, MutableMapping)
        if held_fast and not leaf.is_tensor:
            kind = type(leaf.holder).__name__
            raise CheckpointError(f"{leaf.key} cannot be replaced in a {kind}: give a dict")
        other = self.flat.leaves.setdefault(leaf.key, leaf)
        if other is not leaf:
            raise CheckpointError(
                f"two values of the state would have the key {leaf.key!r}: {other.path} and "
                f"{leaf.path}; rename one"
            )

    def _module(self, module: nn.Module, path: KeyPath) -> None:
        own = modules.addresses(module)
        state = modules.state_of(module)
        for name, value in state.items():
            share = BUFFER if modules.is_buffer(value, own) else PARAMETER
            self._visit(state, name, value, (*path, name), share)
            if isinstance(value, torch.Tensor) and not self._loading:
                tensors.refuse_in_module(key_of((*path, name)), value)
        self._then(lambda: modules.set_state(module, state))

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: KeyPath) -> None:
        module = optimizers.owner(key_of(path), optimizer, self.modules)
        if self._stored is None:
            state = optimizers.state_to_save(module, optimizer)
        elif self._stored.has_names_below((*path, optimizers.GROUPS)):
            state = optimizers.flat_state_to_fill(module, optimizer)
        else:
            state = self._optimizer_to_fill(module, optimizer, path)
        self.members(state, path, MOMENT)
        self._then(lambda: optimizers.set_state(module, optimizer, state))

    def _optimizer_to_fill(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, path: KeyPath
    ) -> dict[str, Any]:
        """Return an optimizer's state, by name, to be loaded into."""
        assert self._stored is not None
        below = (*path, optimizers.STATE)
        state = None
        if optimizers.is_of_one_shape(self._stored.below(below)):
            saved = self._stored.names_below(below)
            state = optimizers.state_to_fill(module, optimizer, saved)
        # LBFGS has lists that grow, and others cannot be given a state: as it was saved, then.
        return state or self._stored.build(path, {}).get("", {})

    def _stateful(self, value: Any, path: KeyPath) -> None:
        state = value.state_dict()
        if isinstance(state, Mapping) and optimizers.is_raw(state):
            raise optimizers.refuse_raw(key_of(path))
        if self._stored is None:
            self._visit({}, "", state, path)
            return
        held = self._rebuilt(path, state)
        self._then(lambda: value.load_state_dict(held[""]))

    def _per_rank(self, marked: PerRank, path: KeyPath) -> None:
        kinds.refuse_resizing(marked, key_of(path))
        if self._stored is None:
            self._own_depth += 1
            self._visit({}, "", marked.value, (*path, rank_name(self._rank)))
            self._own_depth -= 1
            return
        saved = self._stored.ranks_below(path)
        if not saved:
            self.flat.missing.append(key_of((*path, rank_name(self._rank))))
            return
        if marked.on_resize is not None and len(saved) != self._stored.world_size_now:
            self._resized(marked, path, saved)
            return
        if marked.on_fewer_ranks == "error" and (left := saved[self._stored.world_size_now :]):
            raise CheckpointError(
                f"{key_of(path)}: what {text.ranks(left)} had of their own is not loaded on "
                f"{text.count(self._stored.world_size_now, 'rank')}: write "
                'PerRank(…, on_fewer_ranks="drop") to leave it out, or use it in on_resize='
            )
        if self._rank < len(saved) or marked.on_more_ranks == "wrap":
            self._own(marked, (*path, rank_name(saved[self._rank % len(saved)])))

    def _own(self, marked: PerRank, path: KeyPath) -> None:
        """Load one rank's value in place of this rank's."""
        if kinds.is_changed_in_place(marked.value):
            self._visit({}, "", marked.value, path)
            return
        if kinds.is_stateful(marked.value):
            self._stateful(marked.value, path)
            return
        held = self._rebuilt(path, marked.value)

        def put() -> None:
            marked.value = held[""]

        self._then(put)

    def _resized(self, marked: PerRank, path: KeyPath, saved: list[int]) -> None:
        """Load all ranks' values, and have the script make one of them."""
        every = [self._rebuilt((*path, rank_name(rank)), None) for rank in saved]

        def put() -> None:
            assert marked.on_resize is not None
            value = marked.on_resize([held[""] for held in every])
            if kinds.is_stateful(marked.value):
                marked.value.load_state_dict(value)
            else:
                marked.value = value

        self._then(put)

    def _rebuilt(self, path: KeyPath, value: Any) -> dict[str, Any]:
        """Return ``{"": …}`` of what the checkpoint has below ``path``, as leaves to be read.

        Tensors that ``value`` has at the same place are loaded into; other things are new.
        """
        assert self._stored is not None
        here = _Walk(self._rank, None, loading=True)
        here._visit({}, "", value, path)
        own = here.flat.tensors
        leaves = here.flat.leaves.values()
        self.flat.own_values += [leaf.value for leaf in leaves if not leaf.is_tensor]
        self.flat.missing += sorted(set(own) - self._stored.keys)
        held = self._stored.build(path, own)
        if not held:
            self.flat.missing += [key_of(path)] if here.flat.leaves and not own else []
            return {"": value}
        for key, rest in self._stored.below(path):
            holder: Any = held
            name: str | int = ""
            for step in rest:
                holder, name = holder[name], step
            self._leaf(Leaf(key, (*path, *rest), holder[name], holder, name))
        return held

    def _then(self, call: Callable[[], None]) -> None:
        if self._stored is not None:
            self.flat.restores.append(call)
