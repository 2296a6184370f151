"""Whose directory it is: ``run.json``.

=================  ==========================================================================
the file says      a run comes
=================  ==========================================================================
nothing            it has the directory from now on
its own id         fine; ``given`` is put right
another id         refused if a user chose both ids; otherwise: a chosen id stays, or takes
                   the directory over; of two that were made up the later one has it
=================  ==========================================================================
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.files import read_json
from elaunch.checkpoint.filewriter import sync_directory, write_document
from elaunch.checkpoint.manifests import dump, schema_checked
from elaunch.errors import CheckpointError, SaveError


def claim_directory(root: Path, run_id: str, given: bool) -> None:
    """Make the directory and its ``run.json``; SaveError if it is another run's."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_directory(root.parent)
    path = root / layout.RUN
    try:
        found = schema_checked(read_json(path), layout.RUN)
    except FileNotFoundError:
        found = None
    except CheckpointError as error:
        raise SaveError(unreadable(root, error)) from None
    document = decide(root, found, run_id, given)
    if document is not None:
        write_document(path, dump(document))
        sync_directory(root)


def decide(
    place: Path | str, found: dict[str, Any] | None, run_id: str, given: bool
) -> dict[str, Any] | None:
    """Return the ``run.json`` to write, None if it may stay; SaveError if it is another run's."""
    document = {"schema": layout.SCHEMA, "run_id": run_id, "given": given, "created": time.time()}
    if found is None:
        return document
    theirs = bool(found.get("given"))
    if found.get("run_id") == run_id:
        return {**found, "given": True} if given and not theirs else None
    if given and theirs:
        raise SaveError(
            f"{place} belongs to run {found.get('run_id')!r}, this is run {run_id!r}: give this"
            f" run a directory of its own, or start it with --run-id {found.get('run_id')} to go"
            " on where that one ended"
        )
    return None if theirs else document


def unreadable(place: Path | str, error: CheckpointError) -> str:
    """Return what is said of a ``run.json`` that cannot be read."""
    return (
        f"{place}/{layout.RUN} does not say whose directory it is: {error}. If no other job uses"
        " it, remove that file"
    )
