"""The newest complete checkpoint below a directory.

``find_latest`` lists the candidates, orders them by (step, round) from new to old, and verifies
one after the other until one is complete. Each newer one is passed over with a reason that names
the file. The modification time plays no part: copies and clocks change it. Nothing is written,
and what vanishes or cannot be read in the middle is a reason, not an exception.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from elaunch.checkpoint.formats import deepspeed, directories, lightning, own
from elaunch.checkpoint.formats.safetensors import check_safetensors
from elaunch.checkpoint.formats.torchfile import check_zip
from elaunch.checkpoint.records import Checkpoint, PassedOver, SearchOutcome
from elaunch.checkpoint.search.candidates import (
    JSON,
    SAFETENSORS,
    Candidate,
    classify,
    distinct,
    entries_below,
)
from elaunch.checkpoint.storage.files import explain, read_json
from elaunch.errors import CheckpointError

__all__ = ["Checkpoint", "PassedOver", "SearchOutcome", "find_latest"]


def find_latest(
    root: Path,
    *,
    glob: str | None = None,
    run_id: str | None = None,
    content: bool = True,
    doubted: Collection[str] | None = None,
) -> SearchOutcome:
    """Return the newest complete checkpoint below ``root``, and what was passed over.

    ``glob``, relative to ``root``: only its matches count. ``run_id``: checkpoints in elaunch's
    own layout that another run wrote are passed over. Without ``content`` the files of that layout
    are not read, only their sizes compared. ``doubted`` are the names of those that are read as a
    whole (None: all); of others only what was written to since its manifest. A ``root`` that does
    not exist has none. Raises UsageError for a pattern that leaves ``root``.
    """
    entries, passed_over = entries_below(root, glob)
    candidates = []
    for entry in distinct(entries, root):
        found = classify(entry, globbed=glob is not None)
        if isinstance(found, Candidate):
            candidates.append(found)
        elif found is not None:
            passed_over.append(found)
    candidates.sort(key=lambda candidate: candidate.age, reverse=True)
    for candidate in candidates:
        path = candidate.path
        try:
            read = doubted is None or path.name in doubted
            format_ = verify_candidate(candidate, run_id, content, read)
        except CheckpointError as error:
            passed_over.append(PassedOver(path, str(error), damaged=True))
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            passed_over.append(PassedOver(path, explain(error, path), damaged=gone))
        else:
            if format_ is not None:
                load = deepspeed.to_load(path) if format_ == deepspeed.FORMAT else path
                checkpoint = Checkpoint(load, candidate.step, format_, candidate.round)
                return SearchOutcome(checkpoint, tuple(passed_over), None if load == path else path)
    return SearchOutcome(None, tuple(passed_over))


def verify_candidate(
    candidate: Candidate, run_id: str | None, content: bool = True, doubted: bool = True
) -> str | None:
    """Return the format of a complete candidate, None for a directory that is no checkpoint.

    ``content`` and ``doubted`` are for elaunch's own layout: see
    elaunch.checkpoint.formats.own.verify. Raises CheckpointError for one that is not complete, and
    OSError.
    """
    path = candidate.path
    if candidate.format is None:
        return _verify_directory(candidate)
    if candidate.format == own.FORMAT:
        own.verify(path, run_id, content, doubted)
    elif candidate.format == SAFETENSORS:
        check_safetensors(path)
    elif candidate.format == JSON:
        read_json(path)
    elif path.is_dir():
        lightning.verify_directory(path)
    else:
        check_zip(path)
    return candidate.format


def _verify_directory(candidate: Candidate) -> str | None:
    format_ = directories.known_format(candidate)
    if format_ is not None:
        directories.verify(candidate.path, candidate.step, format_)
    return format_
