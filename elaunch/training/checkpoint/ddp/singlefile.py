"""``save_ddp`` and ``load_ddp``: one ``torch.save`` file for all ranks, written by rank 0.

The file, ``state.pt``, is what ``torch.load`` reads anywhere: a dict with the keys of the state.

==============================  ====================================================================
value in the state              in the file
==============================  ====================================================================
module                          its ``state_dict()``; without ``module.`` where DDP wraps it
other with ``state_dict`` and   its ``state_dict()``: optimizers, schedulers, samplers
``load_state_dict``
``elaunch.PerRank``             every rank's, in a list; each rank gets its own back
dict                            the same, value by value
list with objects in it         the same, member by member
anything else                   itself
==============================  ====================================================================

``optimizer.state_dict()`` in the state is refused: what is loaded goes into that dict, and not into
the optimizer. elaunch.training.checkpoint.ddp.plainstate makes the content. A load compares all of
it with the state, then puts it in:

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

==============  ==================================================================================
mode of a load  who opens the file
==============  ==================================================================================
all             every rank
broadcast       rank 0, which sends the content to the others
sequential      every rank, one after the other in the order of the ranks
==============  ==================================================================================
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError
from elaunch.text import listed
from elaunch.training.checkpoint import restore
from elaunch.training.checkpoint.callcontext import CallContext, Mode, SaveRequest
from elaunch.training.checkpoint.collective import header_of, save_together
from elaunch.training.checkpoint.dcp.sources import Source, SourceFile
from elaunch.training.checkpoint.ddp import plainstate
from elaunch.training.checkpoint.state import kinds, modules, optimizers, tensors
from elaunch.training.checkpoint.state.perrank import PerRank, note_dropped
from elaunch.training.checkpoint.together import guarded, os_error_behind, together
from elaunch.training.distributed import for_purpose

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
        own, saved = dict(kinds.members(state)), dict(kinds.members(content))
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
            self.steps.append(partial(_copy, at, value.detach(), new))
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
            return
        if self._rank == 0:
            self.steps.append(partial(note_dropped, name, range(len(every)), self._ranks))
        if self._rank >= len(every) and marked.on_more_ranks == "keep":
            return
        if kinds.is_changed_in_place(marked.value):
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


def _copy(at: tuple[Any, Any], tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Copy into a tensor; put a new one in its place where elements share memory."""
    if tensors.overlaps(tensor):
        holder, key = at
        holder[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        tensor = holder[key]
    tensor.copy_(new)


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
        plain = not isinstance(saved, Mapping) or not kinds.holds_tensors(saved)
        return plain and not kinds.holds_objects(value) and not kinds.holds_tensors(value)
    if not isinstance(value, list) or kinds.holds_objects(value):
        return not isinstance(value, list)
    fits = isinstance(saved, list) and len(saved) == len(value)
    return not (fits and kinds.holds_tensors(value))


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


FILE: Final = "state.pt"


def save(call: CallContext, state: Mapping[str, Any], request: SaveRequest) -> Committed:
    """Save ``state`` as one file; ALL ranks call it together, rank 0 writes.

    Raises SaveError on all ranks: also for a model that is sharded over them, for values that
    differ between them, and for what could not be loaded again.
    """
    about = call.distributed, f"{request.what}, its state", request.timeout
    with together(*about, everyone=True) as step:
        made = plainstate.make(state, writes=call.rank == 0)
        summary = made.summary()
        step.sent = (summary.digest, made.own)
    everyone = step.received
    if len({one for one, _ in everyone}) > 1:
        plainstate.check_same(call.distributed, made, summary, request.what, request.timeout)
    request = replace(request, size=made.size)

    def write(stage: Stage) -> bytes | None:
        if call.rank != 0:
            return None
        path = call.storage.open_stage(stage) / FILE
        problem = guarded(
            lambda: _write(made.complete([own for _, own in everyone]), path), "torch.save"
        )[1]
        if problem is not None:
            raise problem
        return call.storage.write_manifest(stage, header_of(call, request, writers=1), [FILE])

    return save_together(call, request, write)


def load_chosen(
    call: CallContext, wanted: restore.Wanted, state: Mapping[str, Any], strict: bool
) -> Committed | None:
    """Choose a checkpoint and :func:`load` it. ALL ranks call it together."""

    def use(there: CallContext, found: Committed) -> None:
        load(there, state, found, (wanted.mode, strict), wanted.timeout)

    return restore.read(call, wanted, strict, use)


def load(
    call: CallContext,
    state: Mapping[str, Any],
    found: Committed,
    how: tuple[Mode, bool],
    timeout: float | None,
) -> None:
    """Put what is saved into the objects of ``state``; ALL ranks call it together.

    ``how``: the mode, and whether keys must be the same on both sides. Raises CheckpointError, on
    all ranks, that names missing and unexpected keys and their ranks; nothing has changed then,
    unless an object of the state did not take what it was given.
    """
    what, ranks = f"load_ddp of {found.name}", call.distributed
    mode, strict = how
    with together(ranks, f"{what}, its state", timeout, CheckpointError):
        kinds.refuse_no_dict(state)
        plainstate.refuse_raw(state)
    content = _read(call, found, mode, timeout, what)
    with together(ranks, what, timeout, CheckpointError):
        put = fitting(state, content, strict, rank=call.rank, ranks=ranks.size)
    with together(ranks, f"{what}, filling", timeout, CheckpointError):
        put()


def _write(content: Mapping[Any, Any], path: Path) -> None:
    """Write the file; a disk that is full is an OSError, which torch hides behind its own."""
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise os_error_behind(error, path) or error from None


def _read(call: CallContext, found: Committed, mode: Mode, timeout: float | None, what: str) -> Any:
    """Return the file's content on every rank, read by those whom ``mode`` lets."""
    loaded: Any = None
    with (
        restore.opened(call, found, timeout, what) as place,
        together(call.distributed, what, timeout, CheckpointError),
        _turn(call, mode, timeout),
    ):
        path = place if place.is_file() else place / FILE
        if mode != "broadcast" or call.rank == 0:
            loaded = _load(path, _manifests(found, path))
    if mode == "broadcast":
        loaded = for_purpose(call.distributed, what).broadcast(loaded, timeout)
    return loaded


@contextmanager
def _turn(call: CallContext, mode: Mode, timeout: float | None) -> Iterator[None]:
    """Where ``mode`` has one rank read after the other: wait for those before, then those after."""
    before, after = call.rank, call.distributed.size - call.rank
    if mode != "sequential":
        before = after = 0
    ranks = for_purpose(call.distributed, "load_ddp")
    for _ in range(before):
        ranks.barrier(timeout)
    try:
        yield
    finally:
        for _ in range(after):
            ranks.barrier(timeout)


def _manifests(found: Committed, path: Path) -> Path | None:
    """Return where the manifests are that the file has to fit; None: it has none to fit."""
    # A copy of what is at a URL was compared when it was fetched.
    listed = isinstance(found.place, Path) and path.name == FILE and not restore.is_foreign(found)
    return path.parent if listed else None


def _load(path: Path, manifests: Path | None) -> Any:
    """Return the file's content; raises DamageError where it is not what its manifest says."""
    with closing(Source(path.parent, manifests)) as source:
        source.path = path.parent
        return source.checked(lambda: _unpickle(source, path), "torch.load")


def _unpickle(source: Source, path: Path) -> Any:
    try:
        file = SourceFile(source, path.name)
    except CheckpointError:
        raise CheckpointError(
            f"{path} is not there: save_ddp() did not write this checkpoint; load() and "
            "restore_path() read others"
        ) from None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that are not loaded without being trusted: "
            f"{plainstate.reason(error)}; if you trust the file, name their classes to "
            "torch.serialization.add_safe_globals"
        ) from None
