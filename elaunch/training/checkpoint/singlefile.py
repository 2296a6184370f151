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
anything else                   itself
==============================  ====================================================================

``optimizer.state_dict()`` in the state is refused: what is loaded goes into that dict, and not into
the optimizer.

==============  ==================================================================================
mode of a load  who opens the file
==============  ==================================================================================
all             every rank
broadcast       rank 0, which sends the content to the others
sequential      every rank, one after the other in the order of the ranks
==============  ==================================================================================
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from elaunch.checkpoint.depot import Committed, Stage
from elaunch.errors import CheckpointError, ContextError
from elaunch.training.checkpoint import optimizers, restoring
from elaunch.training.checkpoint.agreeing import agree, attempt
from elaunch.training.checkpoint.parts import Mode, Parts, Saving
from elaunch.training.checkpoint.perrank import PerRank
from elaunch.training.checkpoint.storing import part_of, save_together

FILE: Final = "state.pt"
PER_RANK: Final = "elaunch.per_rank"
SHOWN: Final = 10
MODES: Final = ("all", "broadcast", "sequential")


def save(parts: Parts, state: Mapping[str, Any], saving: Saving) -> Committed:
    """Save ``state`` as one file; ALL ranks call it together, rank 0 writes.

    Raises SaveError on all ranks, also for a model that is sharded over them.
    """
    own, problem = attempt(lambda: _checked(state))
    saving = replace(saving, size=_size(state) if parts.rank == 0 else 0)
    everyone = agree(parts.distributed, f"{saving.what}, its state", problem, own, saving.timeout)

    def write(stage: Stage) -> bytes | None:
        if parts.rank != 0:
            return None
        path = parts.depot.open_stage(stage) / FILE
        _write(_plain(state, everyone, ""), path)
        return parts.depot.seal(stage, part_of(parts, saving, writers=1), [FILE])

    return save_together(parts, saving, write)


def load(
    parts: Parts,
    state: Mapping[str, Any],
    found: Committed,
    how: tuple[Mode, bool],
    timeout: float | None,
) -> None:
    """Put what is saved into the objects of ``state``; ALL ranks call it together.

    ``how``: the mode, and whether keys must be the same on both sides. Raises CheckpointError, on
    all ranks, that names missing and unexpected keys and their ranks.
    """
    what = f"load_ddp of {found.name}"
    mode, strict = how
    problem = attempt(lambda: _refuse_raw(state))[1]
    agree(parts.distributed, f"{what}, its state", problem, None, timeout, CheckpointError)
    loaded = _read(parts, found, mode, timeout, what)
    problem = attempt(lambda: _restore(state, loaded, parts, strict))[1]
    agree(parts.distributed, what, problem, None, timeout, CheckpointError)


def check_mode(mode: str) -> None:
    """Raise ContextError for a mode that there is not."""
    if mode not in MODES:
        raise ContextError(f"mode={mode!r}: one of {', '.join(MODES)}")


# ── saving ───────────────────────────────────────────────────────────────────────────────────────


def _size(state: Mapping[str, Any]) -> int:
    """Return about how many bytes the tensors of a state have."""
    total = 0
    for value in state.values():
        if isinstance(value, nn.Module):
            total += sum(t.nbytes for t in (*value.parameters(), *value.buffers()))
        elif isinstance(value, torch.optim.Optimizer):
            total += sum(_size(own) for own in value.state.values())
        elif isinstance(value, Mapping):
            total += _size(value)
        elif isinstance(value, torch.Tensor):
            total += value.nbytes
    return total


def _write(content: dict[str, Any], path: Path) -> None:
    """Write the file; a disk that is full is an OSError, which torch hides behind its own."""
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, OSError):
            behind = behind.__context__
        if isinstance(behind, OSError):
            raise OSError(behind.errno, behind.strerror, str(path)) from error
        raise


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank has of its own, by key; refuse what cannot be saved."""
    _refuse_raw(state)
    return dict(_own_parts(state))


def _refuse_raw(value: Any, name: str = "") -> None:
    """Refuse an optimizer's state by numbers, wherever it stands."""
    if isinstance(value, PerRank):
        value = value.value
    if isinstance(value, Mapping):
        if optimizers.is_raw(value):
            raise optimizers.refuse_raw(name)
        members = list(value.items())
    else:
        members = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, member in members:
        _refuse_raw(member, f"{name}.{key}" if name else str(key))


def _own_parts(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what this rank has of its own, by key; refuse what one rank cannot write for all."""
    for key, value in state.items():
        name = f"{above}{key}"
        if isinstance(value, PerRank):
            yield name, _saved(value.value, name)
        elif isinstance(value, Mapping):
            yield from _own_parts(value, f"{name}.")
        else:
            _refuse_sharded(value, name)


def _refuse_sharded(value: Any, name: str) -> None:
    tensors = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    wrapped = isinstance(value, nn.Module) and any(
        type(module).__name__ == "FullyShardedDataParallel" for module in value.modules()
    )
    if wrapped or any(isinstance(tensor, DTensor) for tensor in tensors):
        raise CheckpointError(
            f"{name} is sharded over the ranks, so rank 0 does not have all of it: use "
            "ctx.checkpoint.save()"
        )


def _plain(state: Mapping[str, Any], everyone: list[dict[str, Any]], above: str) -> dict[str, Any]:
    plain = {}
    for key, value in state.items():
        name = f"{above}{key}"
        if isinstance(value, PerRank):
            plain[key] = {PER_RANK: [own[name] for own in everyone]}
        elif isinstance(value, Mapping):
            plain[key] = _plain(value, everyone, f"{name}.")
        else:
            plain[key] = _saved(value, name)
    return plain


def _saved(value: Any, name: str) -> Any:
    if isinstance(value, nn.Module):
        return get_model_state_dict(value)
    if _is_stateful(value):
        return value.state_dict()
    if isinstance(value, Mapping):
        return {key: _saved(inner, f"{name}.{key}") for key, inner in value.items()}
    return value


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


def _read(parts: Parts, found: Committed, mode: Mode, timeout: float | None, what: str) -> Any:
    """Return the file's content on every rank, read by those whom ``mode`` lets."""
    with restoring.opened(parts, found, timeout, what) as place:
        path = place if place.is_file() else place / FILE
        loaded: Any = None
        problem: Exception | None = None
        for turn in range(parts.distributed.size if mode == "sequential" else 1):
            reads = mode == "all" or turn == parts.rank
            if reads:
                loaded, problem = attempt(lambda: _load(path))
            if mode == "sequential":
                parts.distributed.barrier(timeout)
        agree(parts.distributed, what, problem, None, timeout, CheckpointError)
    return parts.distributed.broadcast(loaded, timeout) if mode == "broadcast" else loaded


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not there: save_ddp() did not write this checkpoint; load() and "
            "restore_path() read others"
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that are not loaded without being trusted: {error}; put plain "
            "values into the state, or name their classes to torch.serialization.add_safe_globals"
        ) from None


def _restore(state: Mapping[str, Any], loaded: Any, parts: Parts, strict: bool) -> None:
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"the file holds a {type(loaded).__name__}, no dict")
    missing, unexpected = _differences(state, loaded, "")
    if strict and (missing or unexpected):
        told = [("missing", missing), ("unexpected", unexpected)]
        words = [f"{word}: {_listed(keys)}" for word, keys in told if keys]
        raise CheckpointError(f"the state does not fit the checkpoint: {'; '.join(words)}")
    _put(state, loaded, parts.rank)


def _differences(
    state: Mapping[str, Any], loaded: Mapping[str, Any], above: str
) -> tuple[list[str], list[str]]:
    """Return the keys that only the state has, and those that only the file has; modules' too."""
    missing = [f"{above}{key}" for key in state if key not in loaded]
    unexpected = [f"{above}{key}" for key in loaded if key not in state]
    for key, value in state.items():
        if key not in loaded:
            continue
        inner, saved = value, loaded[key]
        if isinstance(value, nn.Module):
            inner, saved = get_model_state_dict(value), _unwrapped(saved, value)
        if isinstance(inner, Mapping) and isinstance(saved, Mapping):
            more = _differences(inner, saved, f"{above}{key}.")
            missing, unexpected = missing + more[0], unexpected + more[1]
    return missing, unexpected


def _put(state: Mapping[str, Any], loaded: Mapping[str, Any], rank: int) -> None:
    for key, value in state.items():
        if key not in loaded:
            continue
        new = loaded[key]
        if isinstance(value, PerRank):
            _put_own(value, new, rank)
        elif isinstance(value, nn.Module):
            set_model_state_dict(value, _unwrapped(new, value))
        elif _is_stateful(value):
            value.load_state_dict(new)
        elif isinstance(value, torch.Tensor):
            value.detach().copy_(new)
        elif isinstance(value, Mapping):
            _put(value, new, rank)
        else:
            _replace(state, key, new)


def _put_own(value: PerRank, saved: Any, rank: int) -> None:
    """Give this rank its own; with another number of ranks as PerRank says."""
    every = saved[PER_RANK] if isinstance(saved, Mapping) and PER_RANK in saved else [saved]
    if rank >= len(every) and not value.wrap and value.on_resize is None:
        return
    new = every[rank % len(every)]
    if _is_stateful(value.value):
        value.value.load_state_dict(new)
    else:
        value.value = new


def _replace(state: Mapping[str, Any], key: str, new: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(f"{key} cannot be replaced in a {type(state).__name__}: give a dict")
    state[key] = new


def _unwrapped(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's state without DDP's prefix, if somebody saved it with that."""
    prefix = "module."
    if all(key.startswith(prefix) for key in saved) and saved.keys() != _keys(model):
        return {key[len(prefix) :]: value for key, value in saved.items()}
    return dict(saved)


def _keys(model: nn.Module) -> set[str]:
    return set(get_model_state_dict(model))


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more
