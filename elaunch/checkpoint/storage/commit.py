"""From a stage with the manifests of all ranks to a checkpoint that readers see, on a file system.

====  ==========================================================  ================================
step  what                                                        a kill right after it leaves
====  ==========================================================  ================================
1     all manifests are there, fit together, the files' sizes     a complete stage
      are those in the manifests
2     claim: rename to ``….commit-<random>``                      a complete stage, claimed
3     fence: is this round still the current one?                 the same
4     manifests without the files that another rank lists too,    the same
      ``metadata.json``, COMMIT: each temporary, fsync, rename
5     fsync the directory                                         the same
6     rename to the final name, which must be free                the checkpoint
7     fsync the parents                                           the checkpoint, after a power cut
====  ==========================================================  ================================

Two processes may commit at once: a chief that was frozen, and the one that chooses the next round's
checkpoint and finishes what it finds. The claim is a rename, so one of them has the directory for
itself; the other waits for the outcome. A claim belongs to its maker, which publishes it or gives
it back: neither ``commit`` nor ``discard`` touches another's. ``finish`` takes claims over, since
the round of their owners has ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.assemble import (
    Documents,
    assemble,
    describe,
    in_the_way,
    is_complete,
    is_foreign,
)
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.records import Committed, Stage
from elaunch.checkpoint.shelves import throw_away
from elaunch.checkpoint.storage.durable import (
    read_patiently,
    regular,
    stir,
    sync_directory,
    write_document,
)
from elaunch.checkpoint.storage.files import read_json
from elaunch.errors import CheckpointError, SaveError
from elaunch.files import own_directory

log = logging.getLogger(__name__)

_SETTLE = 10.0  # seconds for another process to finish what it has claimed
_LOOK = 0.02
LATE_S = 5.0
"""Seconds for manifests that other machines may have written before their round ended."""
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def stage_path(root: Path, stage: Stage) -> Path:
    """Return the directory in which a stage is written."""
    return root / layout.STAGE / stage.name


def read_stage(path: Path) -> dict[int, bytes]:
    """Return the manifests in a stage's directory: rank → bytes."""
    found = own.read_manifests(path, os.listdir(path))
    ranks = {layout.parse_manifest_name(name): content for name, content in found.items()}
    return {rank: content for rank, content in ranks.items() if rank is not None}


def read_committed(path: Path) -> Committed:
    """Return the committed checkpoint at ``path``; CheckpointError or OSError if it is none."""
    if not os.path.exists(path / layout.COMMIT):
        raise CheckpointError(f"not committed: {layout.COMMIT} is missing")
    found = describe(path, path.name, read_json(path / layout.METADATA))
    if (found.step, found.round) != layout.parse_step_name(path.name):
        raise CheckpointError(f"{layout.METADATA} says step {found.step} of round {found.round}")
    return found


def commit(
    root: Path,
    stage: Stage,
    fence: Callable[[], None],
    extra: Mapping[str, Any],
    *,
    patience: float,
    local: bool,
) -> Committed:
    """Commit a stage that has the manifests of all ranks; see ``Storage.commit``.

    ``patience``: seconds that a manifest or a file may take to be seen here. ``local``: ranks of
    other nodes have their files there.
    """
    path = stage_path(root, stage)
    try:
        contents = _gather(path, patience)
        documents = assemble(stage, contents, extra, time.time())
        _check_as_listed(path, documents, patience, local)
        claim = _claim(path)
    except FileNotFoundError:
        return _outcome(root, stage)
    try:
        fence()
    except BaseException:
        _release(claim, path)
        raise
    return _publish(root, claim, stage, documents)


def finish(
    root: Path,
    run_id: str | None,
    keep: Collection[str],
    after: int,
    held: Collection[str] = (),
    *,
    patience: float = 0.0,
    local: bool,
) -> list[Committed]:
    """Commit complete stages of dead rounds, clear the others; see ``Storage.finish_stages``.

    ``patience``: as for ``commit``, for all stages together. The wait for a missing manifest is
    LATE_S at most, since its writer may have died.
    """
    begun = time.monotonic()
    try:
        with own_directory(root / layout.STAGE) as stages:
            names = sorted(os.listdir(stages))
    except FileNotFoundError:
        return []
    done = []
    for name in names:
        plain = layout.unclaimed(name)
        parsed = layout.parse_stage_name(plain)
        if parsed is None or plain in keep:
            continue
        stage = Stage(*parsed)
        try:
            if _is_left(root / layout.STAGE / name, run_id, plain in held):
                continue
            if stage.round < after and plain not in held:
                _clear(root, root / layout.STAGE / name, stage, too_late(stage, after))
                continue
            if patience:
                _await_files(root / layout.STAGE / name, begun, patience, local, stage)
            done += _finish(root, root / layout.STAGE / name, stage, local)
        except OSError as error:
            # Unreadable now is not the same as incomplete: the next round tries again.
            log.warning("%s could not be finished and is left: %s", name, error)
    return sorted(done, key=lambda committed: committed.age)


def _await_files(path: Path, begun: float, patience: float, local: bool, stage: Stage) -> None:
    """Wait until what other machines wrote into a stage is seen here, or the time is over."""
    missing = begun + min(patience, LATE_S) - time.monotonic()
    try:
        contents = _gather(path, max(0.0, missing))
        files = chain(*_files_here(path, assemble(stage, contents, {}, 0.0), local).values())
        for file in files:
            left = begun + patience - time.monotonic()
            read_patiently(partial(_demand_size, path / file.path, file.size), max(0.0, left))
    except (FileNotFoundError, CheckpointError) as error:
        log.debug("%s is not seen as complete: %s", path.name, error)  # finishing it logs why


def _demand_size(path: Path, size: int) -> None:
    if regular(path).st_size != size:
        raise FileNotFoundError(errno.ENOENT, "it has another size still", str(path))


def too_late(stage: Stage, after: int) -> str:
    """Return why a stage of an earlier round is not committed."""
    return f"it was not complete when round {stage.round} ended, and round {after} is over too"


def _finish(root: Path, path: Path, stage: Stage, local: bool) -> list[Committed]:
    try:
        claim = _claim(stage_path(root, stage), path)
    except FileNotFoundError:
        return []  # another process has just taken it
    try:
        documents = assemble(stage, read_stage(claim), {}, time.time())
        own.check_files(claim, chain(*_files_here(claim, documents, local).values()))
        committed = _publish(root, claim, stage, documents)
    except FileNotFoundError as error:
        if not claim.exists():
            return []
        return _clear(root, claim, stage, f"missing: {error.filename}")
    except CheckpointError as error:
        return _clear(root, claim, stage, str(error))
    except OSError:
        _release(claim, stage_path(root, stage))
        raise
    log.info("committed %s, whose committer had died", committed.name)
    return [committed]


def _clear(root: Path, claim: Path, stage: Stage, reason: str) -> list[Committed]:
    throw_away(root, claim)
    throw_away(root, stage_path(root, stage))
    log.info("cleared the stage %s: %s", stage.name, reason)
    return []


def discard(root: Path, stage: Stage) -> None:
    """Remove a stage unless it is claimed; see ``Storage.discard``."""
    throw_away(root, stage_path(root, stage))


def _is_left(path: Path, run_id: str | None, held: bool) -> bool:
    """Whether a stage is another run's, or is ``held`` and lacks manifests still."""
    try:
        contents = read_stage(path)
        return is_foreign(contents, run_id) or (held and not is_complete(contents))
    except (FileNotFoundError, CheckpointError):
        return held  # else it cannot be committed; what becomes of it is decided where it is read


def _gather(path: Path, patience: float) -> dict[int, bytes]:
    def all_there() -> dict[int, bytes]:
        contents = read_stage(path)
        if not is_complete(contents):
            if patience:
                stir(path)
            raise FileNotFoundError(errno.ENOENT, "a manifest is missing", str(path))
        return contents

    try:
        return read_patiently(all_there, patience)
    except FileNotFoundError:
        return read_stage(path)  # what is there: the error names what is not


def _check_as_listed(path: Path, documents: Documents, patience: float, local: bool) -> None:
    """Raise SaveError unless the files are as the manifests have them, by size and time."""
    host = socket.gethostname()
    times: dict[str, set[int | None]] = {}
    for rank, files in documents.listed.items():
        for file in files:
            # Another machine may know another time for the same file: not comparable.
            mtime = file.mtime_ns if documents.hosts[rank] == host else None
            times.setdefault(file.path, set()).add(mtime)
    for rank, here in _files_here(path, documents, local).items():
        for file in here:
            _check_unchanged(path, file, rank, times[file.path], patience)


def _check_unchanged(
    path: Path, file: FileEntry, rank: int, times: Collection[int | None], patience: float
) -> None:
    try:
        status = read_patiently(lambda: regular(path / file.path), patience)
    except (FileNotFoundError, NotADirectoryError):
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "the stage is gone", str(path)) from None
        listed = f"{file.path}, which is in rank {rank}'s manifest"
        raise SaveError(f"not committed: {listed}, is gone") from None
    if status.st_size != file.size:
        raise SaveError(
            f"not committed: {file.path} was changed after rank {rank}'s manifest was written:"
            f" it had {file.size} bytes, now it has {status.st_size}"
        )
    if None not in times and status.st_mtime_ns not in times:
        raise SaveError(f"not committed: {file.path} was written to after rank {rank}'s manifest")


def _files_here(
    path: Path, documents: Documents, local: bool
) -> Mapping[int, Collection[FileEntry]]:
    """Return rank → the files that must be below ``path``.

    ``local``: all files in a rank's manifest, for ranks that have a file here that is theirs alone.
    """
    if not local:
        return documents.kept
    holders = Counter(file.path for files in documents.listed.values() for file in files)
    return {
        rank: files
        for rank, files in documents.listed.items()
        if any(holders[file.path] == 1 and os.path.lexists(path / file.path) for file in files)
    }


def _claim(path: Path, found: Path | None = None) -> Path:
    """Take a stage for this process alone; ``found`` is where it is now, if not at ``path``.

    A link is no stage: it is removed, and FileNotFoundError raised.
    """
    claim = path.with_name(layout.claim_name(path.name))
    os.rename(found or path, claim)
    if claim.is_symlink():
        claim.unlink()
        raise FileNotFoundError(errno.ENOENT, "a symbolic link was in its place", str(path))
    return claim


def _release(claim: Path, path: Path) -> None:
    """Give a stage back as it was before it was claimed, if it is still ours."""
    for name in (layout.COMMIT, layout.METADATA):
        with contextlib.suppress(OSError):
            os.unlink(claim / name)
    with contextlib.suppress(OSError):
        os.rename(claim, path)


def _claims(root: Path, stage: Stage) -> list[Path]:
    try:
        names = os.listdir(root / layout.STAGE)
    except FileNotFoundError:
        return []
    claimed = [name for name in names if layout.unclaimed(name) == stage.name != name]
    return [root / layout.STAGE / name for name in claimed]


def _publish(root: Path, claim: Path, stage: Stage, documents: Documents) -> Committed:
    try:
        _write_documents(claim, documents)
        os.rename(claim, root / stage.final)
    except FileNotFoundError:
        return _outcome(root, stage)
    except OSError as error:
        if error.errno in _TAKEN and (found := _existing(root, stage)):
            throw_away(root, claim)
            return found
        _release(claim, stage_path(root, stage))
        if error.errno in _TAKEN:
            raise in_the_way(root, stage.final) from None
        raise
    except BaseException:
        _release(claim, stage_path(root, stage))
        raise
    sync_directory(root)
    sync_directory(root / layout.STAGE)
    return read_committed(root / stage.final)


def _write_documents(claim: Path, documents: Documents) -> None:
    for rank in documents.rewritten:
        write_document(claim / layout.manifest_name(rank), documents.manifests[rank])
    write_document(claim / layout.METADATA, documents.metadata)
    _sweep(claim)
    write_document(claim / layout.COMMIT, documents.commit)
    sync_directory(claim)


def _sweep(path: Path) -> None:
    """Remove temporary files and ranks' own directories that killed writers have left."""
    for directory, below, files in os.walk(path):
        for name in files:
            if name.startswith(layout.TEMPORARY):
                os.unlink(os.path.join(directory, name))
        if directory == str(path):
            for name in [name for name in below if name.startswith(layout.PRIVATE)]:
                below.remove(name)
                shutil.rmtree(path / name)


def _existing(root: Path, stage: Stage) -> Committed | None:
    """Return what is committed under the stage's final name, if it is this very stage."""
    try:
        found = read_committed(root / stage.final)
    except (OSError, CheckpointError):
        return None
    return found if found.uuid == stage.uuid else None


def _outcome(root: Path, stage: Stage) -> Committed:
    """Return the checkpoint that another process made of a stage that is gone; else SaveError."""
    deadline = time.monotonic() + _SETTLE
    path = stage_path(root, stage)
    while True:
        in_work = bool(_claims(root, stage))
        if found := _existing(root, stage):
            return found
        if not in_work:
            break
        if time.monotonic() >= deadline:
            raise _theirs(f"another process is at work on {path} and not done yet")
        time.sleep(_LOOK)
    if os.path.lexists(root / stage.final):
        raise in_the_way(root, stage.final)
    if path.exists():
        raise _theirs(f"another process tried to commit {path}, and could not")
    raise SaveError(
        f"not committed: {path} is gone: the save was given up, or its round is over and another"
        " process has cleared the stage"
    )


def _theirs(problem: str) -> SaveError:
    error = SaveError(f"not committed: {problem}")
    error.stays = True
    return error
