"""Verification of a Hugging Face Trainer's ``checkpoint-N`` directory.

==========================================  =================================================
file                                        must be
==========================================  =================================================
trainer_state.json (written last)           valid JSON, its global_step the N of the name
one of model.safetensors,                   whole
pytorch_model.bin, adapter_model.*,
pytorch_model_fsdp.bin
or one of the two *.index.json              valid JSON, every shard that it names whole
or pytorch_model_fsdp_0/                    a whole DCP directory
or latest, which names DeepSpeed's tag      whole
optimizer.*, scheduler.pt, scaler.pt,       whole, where they are there (a run saved with
rng_state*.pth, training_args.bin,          save_only_model has none)
optimizer_0/
rng_state_<rank>.pth                        there for each rank, where there is one of them: every
                                            rank writes its own, which the state does not wait
                                            for. A lone rank writes rng_state.pth
==========================================  =================================================

``training_args.bin`` holds how many ranks there were: ``distributed_state.num_processes``. Where it
does not (an old Transformers, other programs), they are those up to the highest, two at least.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from elaunch.checkpoint.formats import dcp, deepspeed
from elaunch.checkpoint.formats.archives import check_safetensors, check_zip, number_inside
from elaunch.checkpoint.storage.files import inside, read_json, whole_number
from elaunch.errors import CheckpointError, RankFileMissing

FORMAT = "huggingface"
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "pytorch_model_fsdp.bin",
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")

_NAME = re.compile(r"checkpoint-[0-9]+")
_STATE_FILES = re.compile(
    r"(optimizer|training_args)\.(pt|bin)|optimizer_[0-9]+\.(pt|bin)"
    r"|(scheduler|scaler)\.pt|rng_state[^/]*\.pth"
)
_RANDOM = re.compile(r"rng_state_([0-9]+)\.pth")


def looks_like(path: Path, names: Collection[str]) -> bool:
    """Tell from a directory's name and the names in it whether a Trainer wrote it."""
    if STATE in names:
        return True
    known = (*WEIGHTS, *INDEXES, *SHARDED)
    return _NAME.fullmatch(path.name) is not None and any(name in names for name in known)


def verify(path: Path, step: int) -> None:
    """Raise CheckpointError unless the state says ``step`` and every file is whole."""
    names = os.listdir(path)
    if STATE not in names:
        raise CheckpointError(f"missing: {STATE}: the save did not finish")
    saved_step = whole_number(read_json(path / STATE), "global_step", STATE)
    if saved_step != step:
        raise CheckpointError(f"{STATE} says global_step {saved_step}")
    weights = [name for name in names if name in WEIGHTS]
    indexes = [name for name in names if name in INDEXES]
    sharded = deepspeed.LATEST in names and deepspeed.looks_like(path, names)
    if sharded:
        deepspeed.verify(path)
    if not weights and not indexes and not sharded and SHARDED[0] not in names:
        raise CheckpointError(f"no weights: none of {', '.join((*WEIGHTS, *INDEXES, SHARDED[0]))}")
    files = {*weights, *(name for name in names if _STATE_FILES.fullmatch(name))}
    for index in indexes:
        files.update(_shards(path, index))
    for name in sorted(files):
        _check_file(inside(path, name, STATE))
    for name in SHARDED:
        if name in names:
            dcp.verify_below(path, name)
    if (rank := _rank_without_random_state(path, names)) is not None:
        raise RankFileMissing(f"missing: rng_state_{rank}.pth: the save did not finish")


def _rank_without_random_state(path: Path, names: Collection[str]) -> int | None:
    there = {int(found[1]) for name in names if (found := _RANDOM.fullmatch(name))}
    if not there:
        return None
    ranks = _ranks(path) if ARGUMENTS in names else None
    if ranks == 1:
        return None
    expected = range(ranks) if ranks else (*range(max(there)), 1)
    return next((rank for rank in expected if rank not in there), None)


def _ranks(path: Path) -> int | None:
    """Return how many ranks have written a checkpoint whose files are whole, None if unknown."""
    try:
        return number_inside(path / ARGUMENTS, "distributed_state", "num_processes")
    except CheckpointError:  # arguments of a class of the script's own, pickled in its own way
        return None


def _shards(path: Path, index: str) -> set[str]:
    shards = read_json(path / index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index} has no weight_map")
    for name in shards.values():
        inside(path, name, index)
    return set(shards.values())


def _check_file(path: Path) -> None:
    if path.suffix == ".safetensors":
        check_safetensors(path)
    else:
        check_zip(path)
