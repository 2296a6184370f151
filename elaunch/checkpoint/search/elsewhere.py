"""The checkpoint that a user names by its path or URL, wherever it is and of whatever format.

==========================================  =================================================
at the path there is                        the checkpoint is
==========================================  =================================================
a checkpoint of a format known here         that, verified
a file of another kind                      that, as it is
a directory with checkpoints in it          the newest that is complete, of any run
any other directory with files in it        that, as it is
a URL                                       one of elaunch's own layout, or the newest below it
==========================================  =================================================
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import dcp, deepspeed, huggingface, lightning, own
from elaunch.checkpoint.formats.archives import check_safetensors, check_zip
from elaunch.checkpoint.records import (
    Checkpoint,
    Committed,
    Location,
    PassedOver,
    SearchOutcome,
)
from elaunch.checkpoint.search import latest
from elaunch.checkpoint.search.latest import find_latest, newest_in
from elaunch.checkpoint.search.locations import without_slash
from elaunch.checkpoint.storage.files import explain, open_regular, read_json, whole_number
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import CheckpointError, RankFileMissing

OTHER: Final = "other"
"""The format of what nothing here can verify."""
_ZIP: Final = b"PK"
_OWN_NAMES: Final = frozenset({layout.RUN, layout.STAGE, layout.QUARANTINE})
_MOST: Final = 3
"""Incomplete checkpoints whose problems an error lists."""


def find_at(place: Location, content: bool = True) -> Checkpoint:
    """Return the checkpoint that is at ``place``, or the newest complete one in it.

    ``content``: read the files of elaunch's own layout, and not only compare their sizes. Raises
    CheckpointError, with location and reason: nothing is there, or nothing complete.
    """
    if isinstance(place, str):
        return _at_url(place, content)
    if not os.path.lexists(place):
        raise CheckpointError(f"{place} is not there")
    try:
        found = _one(place, content)
        search = SearchOutcome(found) if found else find_latest(place, content=content)
        if search.checkpoint is not None:
            return search.checkpoint
        names = os.listdir(place)
        if not _OWN_NAMES & set(names) and any((place / name).is_file() for name in names):
            return Checkpoint(place, 0, OTHER)
    except OSError as error:
        raise CheckpointError(f"{place}: {explain(error, place)}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from None
    raise CheckpointError(f"{place} holds no complete checkpoint{_listed(search.passed_over)}")


def committed_at(found: Checkpoint) -> tuple[Location | None, Committed]:
    """Return a checkpoint as what was committed, and the location that it is in.

    The location is None for one of another format, of which no more is known than its path.
    """
    if found.format != own.FORMAT:
        name = str(found.path).rstrip("/").rpartition("/")[2]
        return None, Committed(name, found.path, found.step, 0, "", {}, 0)
    above, name = parent_of(found.path)
    at_url = layout.parse_stage_name(name) if isinstance(above, str) else None
    return above, open_storage(above).find(at_url[2] if at_url else name)


def parent_of(place: Location) -> tuple[Location, str]:
    """Return where a checkpoint is, and its name there."""
    if isinstance(place, Path):
        return place.parent, place.name
    above, _, name = without_slash(place).rpartition("/")
    return above, name


def _listed(passed_over: Sequence[PassedOver]) -> str:
    reasons = [f"{one.path.name}: {one.reason}" for one in passed_over[:_MOST]]
    return f" ({'; '.join(reasons)})" if reasons else ""


def _one(path: Path, content: bool) -> Checkpoint | None:
    """Return the checkpoint that a path itself is, verified; None if there may be some in it."""
    if not path.is_dir():
        return _file(path)
    names = frozenset(os.listdir(path))
    if layout.COMMIT in names:
        step, round_ = layout.parse_step_name(path.name) or (0, 0)
        own.verify(path, None, content)
        return Checkpoint(path, step, own.FORMAT, round_)
    if lightning.META in names and dcp.looks_like(names):
        lightning.verify_directory(path)
        return Checkpoint(path, 0, lightning.FORMAT)
    format_, step = latest.format_of(path, picked=False), 0
    if format_ is None or format_ == deepspeed.FORMAT:  # of its tags one may be newer and whole
        return None
    if format_ == huggingface.FORMAT:
        if huggingface.STATE not in names:  # a model in a directory of such a name
            return None
        state = read_json(path / huggingface.STATE)
        step = whole_number(state, "global_step", huggingface.STATE)
    try:
        latest.verify_format(path, step, format_)
    except RankFileMissing:
        if format_ != huggingface.FORMAT:
            raise
        # A Trainer's lacks a rank's random state, which a new run does without.
    return Checkpoint(path, step, format_)


def _file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        check_safetensors(path)
    elif path.suffix == ".json":
        read_json(path)
    else:
        with open_regular(path) as file:
            begins = file.read(len(_ZIP))
        if not begins:
            raise CheckpointError("it is empty")
        if begins == _ZIP:
            check_zip(path)
    return Checkpoint(path, 0, OTHER)


def _at_url(url: str, content: bool) -> Checkpoint:
    above, name = parent_of(url)
    parsed = layout.parse_stage_name(name)
    storage = open_storage(above if parsed else without_slash(url))
    try:
        listed = [storage.find(parsed[2])] if parsed else storage.listed()
    except OSError as error:
        raise CheckpointError(f"{url}: {error}") from None
    found, passed = newest_in(reversed(listed), lambda one: storage.verify(one, content=content))
    if found is None:
        raise CheckpointError(f"{url} holds no complete checkpoint{_listed(passed)}")
    return Checkpoint(found.place, found.step, own.FORMAT, found.round)
