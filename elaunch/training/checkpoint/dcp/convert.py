"""Between a checkpoint of torch.distributed.checkpoint and one file of ``torch.save``.

This runs in the command's own process, by torch's public functions: the whole state is in memory
once. A file of ``torch.save`` is read with ``weights_only=True`` unless it is trusted, and a
checkpoint as ``load`` does: what would run code when it is read is refused, unless it is trusted.

DCP makes texts of the keys of dicts, also of the numbers in a plain ``optimizer.state_dict()``, and
leaves out dicts without a key. Which dicts had numbers, and which had nothing, is kept in the
checkpoint's metadata, so that they come out as they were. An OrderedDict comes out as a dict.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import struct
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats.dcp import METADATA
from elaunch.checkpoint.storage.durable import sync_directory
from elaunch.checkpoint.storage.files import text_in
from elaunch.checkpoint.storage.storage import (
    Committed,
    Location,
    ShardHeader,
    Stage,
    open_storage,
)
from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.together import os_error_behind

NOBODY = "imported"
"""Run id of what is imported into a directory that no run has; any run may take it over."""
NUMBER_KEYS = "number_keys"
EMPTY_DICTS = "empty_dicts"
# What torch.load raises for bytes that it did not write, beside UnpicklingError.
_UNREADABLE = (
    EOFError,
    RuntimeError,
    AttributeError,
    ImportError,
    ValueError,
    LookupError,
    TypeError,
    struct.error,
)


def to_torch_file(
    directory: Path,
    file: Path,
    metadata: Mapping[str, Any] | None = None,
    *,
    trusted: bool = False,
) -> None:
    """Write what the DCP directory holds to ``file``, which is there whole or not at all.

    ``metadata`` is the checkpoint's, if it has any: it lists what an import has changed.
    ``trusted``: values may be of any class, and so may run anything.

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

    draft = file.with_name(f".{file.name}.{os.urandom(4).hex()}.tmp")
    try:
        _convert(directory, draft, metadata or {}, trusted)
        os.replace(draft, file)
        sync_directory(file.parent)
    except CheckpointException as error:  # a BaseException, with one failure for each rank
        raise CheckpointError(f"torch cannot read {directory}: {_first(error.failures)}") from None
    except OSError as error:
        error.filename = str(file) if error.filename == str(draft) else error.filename
        raise
    except RuntimeError as error:
        if behind := os_error_behind(error, file):
            raise behind from None
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"torch cannot write {directory} to {file}: {why}") from None
    finally:
        draft.unlink(missing_ok=True)


def _convert(directory: Path, draft: Path, metadata: Mapping[str, Any], trusted: bool) -> None:
    import torch

    from elaunch.training.checkpoint.dcp.metadata import plant

    state = _read(directory, trusted)
    for path in metadata.get(EMPTY_DICTS) or []:
        plant(state, tuple(path), {})
    _renumber(state, metadata.get(NUMBER_KEYS) or [])
    with draft.open("wb") as opened:
        torch.save(state, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _read(directory: Path, trusted: bool) -> dict[str, Any]:
    """Return the state that a DCP directory holds."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from elaunch.training.checkpoint.dcp import metadata as stored
    from elaunch.training.checkpoint.dcp import read
    from elaunch.training.checkpoint.dcp.sources import Source
    from elaunch.training.unpickling import Anything, named_to_torch

    with contextlib.closing(Source(directory)) as source:
        source.path = directory
        described = stored.read(source.whole(stored.FILE), directory)
        kinds, paths = described.state_dict_metadata, described.planner_data or {}
        found: dict[str, Any] = {
            key: torch.empty(kind.size, dtype=kind.properties.dtype)
            for key, kind in kinds.items()
            if isinstance(kind, TensorStorageMetadata)
        }
        read.read_tensors(source, read.plan(described, found, []))
        also = Anything() if trusted else named_to_torch()
        held: dict[str, Any] = {}
        for key in kinds:
            if key not in found:
                found[key] = read.read_value(source, described, key, also)
            stored.plant(held, tuple(paths.get(key) or (key,)), found[key])
    return held


def from_torch_file(file: Path, directory: Path, trusted: bool = False) -> dict[str, Any]:
    """Write what ``file`` holds as a DCP checkpoint into ``directory``; tensors come to the CPU.

    ``trusted``: the file may hold anything that can be pickled, and so may run anything. Returns
    the metadata that :func:`to_torch_file` needs: the paths of the dicts that DCP does not keep.

    Raises:
        CheckpointError: torch cannot read the file, or it holds no dict.
        OSError: the directory cannot be written.
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
    numbered, empty = list(_numbered(state, [], file)), list(_empty(state, []))
    writer = checkpoint.FileSystemWriter(directory, single_file_per_rank=True)
    # torch 2.6 has no such parameter, and without a process group it saves alone.
    parameters = inspect.signature(checkpoint.save).parameters
    alone = {"no_dist": True} if "no_dist" in parameters else {}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")
            checkpoint.save(_without_gaps(state), storage_writer=writer, **alone)
    except checkpoint.CheckpointException as error:
        for failure, _ in error.failures.values():
            if behind := os_error_behind(failure, directory):
                raise behind from None
        raise CheckpointError(f"torch cannot store {file}: {_first(error.failures)}") from None
    changed = {NUMBER_KEYS: numbered, EMPTY_DICTS: empty}
    return {name: paths for name, paths in changed.items() if paths}


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


def _empty(value: object, path: list[str | int]) -> Iterator[list[str | int]]:
    """Yield the paths of the dicts in ``value`` that have no key; an int is the place in a list."""
    if isinstance(value, Mapping) and not value:
        yield path
    for key, child in _children(value):
        name = key if isinstance(value, list) and isinstance(key, int) else str(key)
        yield from _empty(child, [*path, name])


def _children(value: object) -> Iterable[tuple[object, object]]:
    """Return what DCP stores one by one; a tuple, or a list of plain values, is one value to it."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list) and _is_taken_apart(value) else ()


def _is_taken_apart(value: object) -> bool:
    """Tell whether an item of a list has DCP take the list apart."""
    import torch

    if isinstance(value, list):
        return any(map(_is_taken_apart, value))
    return isinstance(value, Mapping | torch.Tensor)


def _without_gaps(value: Any) -> Any:
    """Return ``value`` with None for each item of a list of which DCP would store nothing.

    It does not read lists again that have gaps.
    """
    if isinstance(value, Mapping):
        return {key: _without_gaps(child) for key, child in value.items()}
    if not (isinstance(value, list) and _is_taken_apart(value)):
        return value
    return [None if _is_nothing(item) else _without_gaps(item) for item in value]


def _is_nothing(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_nothing, value.values()))


def _renumber(state: Any, paths: list[list[str]]) -> None:
    """Make numbers of the keys of these dicts again."""
    for path in paths:
        holder: Any = state
        for key in path[:-1]:
            holder = holder[int(key) if isinstance(holder, list) else key]
        last = int(path[-1]) if isinstance(holder, list) else path[-1]
        holder[last] = {int(key): value for key, value in holder[last].items()}


def import_file(
    file: Path, place: Location, step: int, run_id: str | None = None, trusted: bool = False
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
    began, storage = time.time(), open_storage(place)
    owner = run_id or text_in(place, layout.RUN, "run_id")
    owner = owner or next((found.run_id for found in storage.newest_first()), "") or NOBODY
    storage.prepare(owner, given=run_id is not None)
    with contextlib.closing(storage.lock()):
        rounds = [found.round for found in storage.listed() if found.step == step]
        stage = Stage(step, max(rounds, default=-1) + 1, uuid.uuid4().hex)
        try:
            metadata = from_torch_file(file, storage.open_stage(stage), trusted)
            metadata |= {layout.STEPS_COMPLETED: step, "imported_from": file.name}
            storage.write_manifest(
                stage, ShardHeader(0, 1, owner, metadata), storage.own_files(stage)
            )
            return storage.commit(stage, _no_fence, {"started": began})
        except BaseException:
            storage.discard(stage)
            raise


def _no_fence() -> None:
    """Let every commit pass: under the lock nobody else writes here."""


def _first(failures: object) -> str:
    """Return the first failure that torch gives: its values are (error, traceback)."""
    if isinstance(failures, dict) and failures:
        value = next(iter(failures.values()))
        return repr(value[0] if isinstance(value, tuple) else value)
    return "it does not say why"
