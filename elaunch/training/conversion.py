"""Between a checkpoint of torch.distributed.checkpoint and one file of ``torch.save``.

This runs in the command's own process, by torch's public functions: the whole state is in memory
once. A file of ``torch.save`` is read with ``weights_only=True`` unless it is trusted. What is no
tensor in a checkpoint is a pickle that torch runs: export only what you have written yourself.

DCP makes texts of the keys of dicts, also of the numbers in a plain ``optimizer.state_dict()``.
Which dicts had numbers is kept in the checkpoint's metadata, so that they come out as they were.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.dcp import METADATA
from elaunch.checkpoint.depot import Committed, Depot, Part, Place, Stage, open_depot
from elaunch.checkpoint.files import read_json
from elaunch.errors import CheckpointError

NOBODY = "imported"
"""Run id of what is imported into a directory that no run has; any run may take it over."""
NUMBER_KEYS = "number_keys"
# What torch.load raises for bytes that it did not write, beside UnpicklingError.
_UNREADABLE = (
    EOFError,
    RuntimeError,
    AttributeError,
    ImportError,
    ValueError,
    LookupError,
    TypeError,
)


def to_torch_file(directory: Path, file: Path, metadata: Mapping[str, Any] | None = None) -> None:
    """Write what the DCP directory holds to ``file``, which is there whole or not at all.

    ``metadata`` is the checkpoint's, if it has any: it tells what an import has changed.

    Raises:
        CheckpointError: the directory holds no such checkpoint, or torch cannot read it.
        OSError: the file cannot be written.
    """
    if not (directory / METADATA).is_file():
        raise CheckpointError(
            f"{directory} has no {METADATA}: it was not written by torch.distributed.checkpoint, "
            "and what it holds is in its files as the script wrote them"
        )
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    part = file.with_name(f".{file.name}.{os.urandom(4).hex()}.tmp")
    try:
        dcp_to_torch_save(directory, part)
        numbered = (metadata or {}).get(NUMBER_KEYS)
        if isinstance(numbered, list):
            _renumber(part, numbered)
        _sync(part)
        os.replace(part, file)
        _sync(file.parent)
    except CheckpointException as error:  # a BaseException, with one failure for each rank
        raise CheckpointError(f"torch cannot read {directory}: {_first(error.failures)}") from None
    finally:
        part.unlink(missing_ok=True)


def from_torch_file(file: Path, directory: Path, trusted: bool = False) -> list[list[str]]:
    """Write what ``file`` holds as a DCP checkpoint into ``directory``; tensors come to the CPU.

    ``trusted``: the file may hold anything that can be pickled, and so may run anything. Returns
    the paths of the dicts whose keys were numbers.

    Raises:
        CheckpointError: torch cannot read the file, or it holds no dict.
    """
    import torch
    from torch.distributed import checkpoint

    try:
        state = torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{file} cannot be read without running what is in it: {why}; give --trust if you "
            "trust who wrote it"
        ) from None
    except _UNREADABLE as error:
        raise CheckpointError(f"torch cannot read {file}: {error!r}") from None
    if not isinstance(state, dict) or not state:
        held = "nothing" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise CheckpointError(f"{file} holds {held}, not a dict with what was saved")
    numbered = list(_numbered(state, [], file))
    writer = checkpoint.FileSystemWriter(directory, single_file_per_rank=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            checkpoint.save(state, storage_writer=writer, no_dist=True)
    except checkpoint.CheckpointException as error:
        raise CheckpointError(f"torch cannot store {file}: {_first(error.failures)}") from None
    return numbered


def _numbered(value: object, path: list[str], file: Path) -> Iterator[list[str]]:
    """Yield the paths of the dicts in ``value`` whose keys are all numbers."""
    if isinstance(value, Mapping):
        numbers = [key for key in value if type(key) is int]
        others = [key for key in value if type(key) is not int and not isinstance(key, str)]
        if others or (numbers and (len(numbers) != len(value) or not path)):
            where = f"under {'.'.join(path)} " if path else ""
            wrong = (others or numbers)[0]
            raise CheckpointError(
                f"{file} holds {where}a dict with the key {wrong!r}: keys are texts, or below the "
                "first level all numbers"
            )
        if numbers:
            yield path
    children = _children(value)
    for key, child in children:
        yield from _numbered(child, [*path, str(key)], file)


def _children(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _renumber(file: Path, paths: list[list[str]]) -> None:
    """Make numbers of the keys of these dicts again."""
    import torch

    state = torch.load(file, map_location="cpu", weights_only=False)
    for path in paths:
        holder: Any = state
        for key in path[:-1]:
            holder = holder[int(key) if isinstance(holder, list | tuple) else key]
        last = int(path[-1]) if isinstance(holder, list) else path[-1]
        holder[last] = {int(key): value for key, value in holder[last].items()}
    torch.save(state, file)


def import_file(
    file: Path, place: Place, step: int, run_id: str | None = None, trusted: bool = False
) -> Committed:
    """Make a committed checkpoint of one file of ``torch.save``.

    Args:
        file: what ``torch.save`` wrote: a dict.
        place: the checkpoint directory or URL; no job may be writing there.
        step: its step.
        run_id: the run that it is for; None for the one that has the directory.
        trusted: as for :func:`from_torch_file`.

    Raises:
        SaveError: another run has the directory, or a living job; nothing was written.
        CheckpointError, OSError: as for :func:`from_torch_file`; no checkpoint is left behind.
    """
    began, depot = time.time(), open_depot(place)
    owner = run_id or _owner(place, depot) or NOBODY
    depot.prepare(owner, given=run_id is not None)
    with contextlib.closing(depot.lock()):
        rounds = [found.round for found in depot.listed() if found.step == step]
        stage = Stage(step, max(rounds, default=-1) + 1, uuid.uuid4().hex)
        try:
            numbered = from_torch_file(file, depot.open_stage(stage), trusted)
            said = {layout.STEPS_COMPLETED: step, "imported_from": file.name}
            said |= {NUMBER_KEYS: numbered} if numbered else {}
            depot.seal(stage, Part(0, 1, owner, said), depot.own_files(stage))
            return depot.commit(stage, _no_fence, {"started": began})
        except BaseException:
            depot.discard(stage)
            raise


def _no_fence() -> None:
    """Nobody else writes here: the lock says so."""


def _owner(place: Place, depot: Depot) -> str:
    """Return the run that has the directory, "" if none has."""
    if isinstance(place, Path):
        with contextlib.suppress(FileNotFoundError):
            return str(read_json(place / layout.RUN).get("run_id") or "")
    listed = depot.listed()
    return listed[-1].run_id if listed else ""


def _first(failures: object) -> str:
    """Return the first failure that torch gives: its values are (error, traceback)."""
    if isinstance(failures, dict) and failures:
        value = next(iter(failures.values()))
        return repr(value[0] if isinstance(value, tuple) else value)
    return "it does not say why"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
