"""A storage in a directory: local, or on a file system that all nodes share.

What each method leaves on the disk is in ``layout``; how a commit goes, in ``commit``.

=====================  ============================================================================
what is relied on      for
=====================  ============================================================================
rename is atomic       a name means a whole file, a whole checkpoint; one of two committers wins
rename refuses a       a committed checkpoint is never replaced
directory with files
fsync                  file before its rename, directory after: a power cut loses nothing committed
flock                  one job per directory; where it does not work, a warning is logged
=====================  ============================================================================

``prepare`` alone makes the directory. Every method that writes into it demands ``run.json`` as it
was at the first look, and so does the commit: what was unmounted or removed is not made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elaunch.atonce import at_once
from elaunch.checkpoint import layout, shelves
from elaunch.checkpoint.assemble import choose, in_the_way
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.manifests import (
    FileEntry,
    check_metadata,
    check_path,
    encode_checked,
)
from elaunch.checkpoint.ownership import DirectoryLock, Origin, claim_directory
from elaunch.checkpoint.records import Committed, Image, Location, ReadBefore, ShardHeader, Stage
from elaunch.checkpoint.storage import commit as committing
from elaunch.checkpoint.storage.durable import (
    list_files,
    make_parents,
    move_in,
    read_patiently,
    sync_directory,
    sync_files,
    sync_parents,
    write_document,
    write_file,
)
from elaunch.checkpoint.storage.files import explain
from elaunch.errors import CheckpointError, SaveError
from elaunch.files import own_directory

_MOUNTS = Path("/proc/self/mountinfo")
_REMOTE = frozenset(
    "9p afs beegfs ceph cifs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs smb3"
    " virtiofs wekafs".split()
)


def is_remote(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Tell whether ``path`` is on a network file system, or on FUSE, which may be one."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return False
    # "36 35 98:0 / /mnt rw - ext3 /dev/root rw": the type is behind the separator " - ".
    kinds = [line.partition(" - ")[2].split()[:1] for line in lines if line.split()[2] == wanted]
    return any(kind in _REMOTE or kind.startswith("fuse") for [kind] in filter(None, kinds))


_TAKEN_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESTALE)
_WRITERS = 4  # files that are written at once
_PATIENCE = 60.0  # seconds; attribute caches of NFS live that long by default

_T = TypeVar("_T")


class PosixStorage:
    """The storage in ``place``. ``local``: every node has a directory of its own, with its shards.

    ``patience``: seconds that what another machine has written may take to be seen here; None
    takes a minute on network file systems, else nothing.
    """

    def __init__(self, place: Path, local: bool = False, patience: float | None = None) -> None:
        self._root = Path(os.path.abspath(place))
        self._local = local
        self._patience = patience
        self._origin = Origin(self._root)

    @property
    def place(self) -> Path:
        """The directory."""
        return self._root

    def prepare(self, run_id: str, given: bool) -> None:
        """Make the directory and ``run.json``; SaveError if another run has it."""
        claim_directory(self._root, run_id, given)
        places = (self._root / layout.STAGE, self._root / layout.TRASH)
        lacking = [path for path in places if not os.path.lexists(path)]
        for path in places:
            with own_directory(path, make=True):
                pass
        if lacking:
            sync_directory(self._root)  # a restart waits for no disk that a save keeps busy
        self._origin = Origin(self._root)
        self._demand_origin()

    def lock(self, jobs: Collection[str] = ()) -> DirectoryLock:
        """Take the directory for this job; SaveError names who has it."""
        return DirectoryLock(self._root / layout.LOCK, jobs)

    def open_stage(self, stage: Stage, rank: int | None = None) -> Path:
        """Return the stage's directory, or in it that of ``rank``; SaveError if it is committed."""
        if os.path.lexists(self._root / stage.final):
            raise in_the_way(self._root, stage.final)
        self._demand_origin()
        path = committing.stage_path(self._root, stage)
        with (
            own_directory(path.parent, make=True) as stages,  # not the root: see above
            own_directory(stages / stage.name, make=True) as made,
        ):
            if rank is None:
                return path
            private = layout.private_name(rank)
            with own_directory(made / private, make=True):
                return path / private

    def write_shard(self, stage: Stage, header: ShardHeader, images: Sequence[Image]) -> bytes:
        """Write a rank's files and its manifest."""
        paths = [check_path(image.path) for image in images]
        check_metadata(header.metadata)
        path = self.open_stage(stage)
        with self._must_stay(stage, header):
            for relative in paths:
                make_parents(path, relative)
            calls = [
                partial(write_file, path, image.path, image.pieces, image.beside)
                for image in images
            ]
            files = at_once(calls, _WRITERS, "checkpoint")
            return self._put_manifest(path, stage, header, files)

    def write_manifest(
        self, stage: Stage, header: ShardHeader, files: Sequence[str], below: Path | None = None
    ) -> bytes:
        """Write the manifest of files in the stage, or in ``below``: those are moved into it."""
        for relative in files:
            check_path(relative)
        check_metadata(header.metadata)
        path = committing.stage_path(self._root, stage)
        with self._must_stay(stage, header):
            entries = sync_files(below or path, files, _WRITERS)
            if below is not None:
                entries = [move_in(below, path, file) for file in entries]
            return self._put_manifest(path, stage, header, entries)

    def adopt(self, stage: Stage, manifests: Mapping[int, bytes]) -> None:
        """Put the manifests of other nodes' ranks into the stage, where each node has its own."""
        path = self.open_stage(stage)
        for rank, content in manifests.items():
            write_document(path / layout.manifest_name(rank), content)
        sync_directory(path)

    def own_files(self, stage: Stage, below: Path | None = None) -> list[str]:
        """Return the files that are below the stage's directory, or below ``below``."""
        try:
            path = below or committing.stage_path(self._root, stage)
            return list_files(path, staged=below is None)
        except (FileNotFoundError, NotADirectoryError):
            self._demand_origin()
            raise

    def manifests(self, stage: Stage) -> dict[int, bytes]:
        """Return the manifests that are there; none if the stage is gone."""
        with contextlib.suppress(FileNotFoundError):
            return committing.read_stage(committing.stage_path(self._root, stage))
        return {}

    def commit(
        self, stage: Stage, fence: Callable[[], None], extra: Mapping[str, Any] | None = None
    ) -> Committed:
        """Commit a stage that has the manifests of all ranks."""

        def fenced() -> None:
            fence()
            self._demand_origin()

        try:
            return committing.commit(
                self._root, stage, fenced, extra or {}, patience=self._wait(), local=self._local
            )
        except (SaveError, FileNotFoundError, NotADirectoryError):
            self._demand_origin()
            raise

    def discard(self, stage: Stage) -> None:
        """Remove a stage."""
        if os.path.lexists(committing.stage_path(self._root, stage)):  # else no trash is made
            committing.discard(self._root, stage)

    def finish_stages(
        self,
        run_id: str | None,
        keep: Collection[str] = (),
        after: int = 0,
        alone: bool = False,
        held: Collection[str] = (),
    ) -> list[Committed]:
        """Commit complete stages of the round that is over, and clear the others."""
        patience = 0.0 if alone or self._local else self._wait()
        return committing.finish(
            self._root, run_id, keep, after, held, patience=patience, local=self._local
        )

    def listed(self, known: ReadBefore | None = None) -> list[Committed]:
        """Return the committed checkpoints from old to new."""
        return list(self.newest_first(known))[::-1]

    def newest_first(self, known: ReadBefore | None = None) -> Iterator[Committed]:
        """Yield the committed checkpoints from new to old; the names are those of the first."""
        try:
            names = os.listdir(self._root)
        except FileNotFoundError:
            return
        ages = {name: age for name in names if (age := layout.parse_step_name(name))}
        for name in sorted(ages, key=ages.__getitem__, reverse=True):
            if found := self._committed(name, known):
                yield found

    def holds(self, name: str, uuid: str) -> bool:
        """Tell whether the checkpoint of this name and uuid is committed."""
        found = self._committed(name)
        return found is not None and found.uuid == uuid

    def find(self, name_or_uuid: str) -> Committed:
        """Return the checkpoint of this name or uuid."""
        named = layout.parse_step_name(name_or_uuid) and self._committed(name_or_uuid)
        return named or choose(self.newest_first(), name_or_uuid, self._root)

    def _committed(self, name: str, known: ReadBefore | None = None) -> Committed | None:
        """Return a checkpoint; None if it was removed, or is damaged: verification reports it."""
        path = self._root / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, CheckpointError):
            if known is None:
                return committing.read_committed(path)
            status = os.stat(path)
            mark = status.st_ino, status.st_mtime_ns
            if name not in known or known[name][0] != mark:
                known[name] = mark, committing.read_committed(path)
            return known[name][1]
        return None

    @contextmanager
    def fetch(self, found: Committed) -> Iterator[Path]:
        """Give the directory itself; CheckpointError if it is gone."""
        path = Path(found.place)
        try:
            read_patiently(lambda: os.stat(path / layout.COMMIT), self._wait())
        except FileNotFoundError:
            raise CheckpointError(f"{path} is gone: another process has removed it") from None
        yield path

    def ranges(self, found: Committed) -> None:
        """Return None: the directory itself is read."""

    def remove(self, found: Committed) -> None:
        """Rename into the trash, then delete."""
        shelves.throw_away(self._root, Path(found.place))

    def verify(self, found: Committed, run_id: str | None = None, content: bool = True) -> None:
        """Read it; an OSError means that it cannot be read now, which proves no damage."""
        path = Path(found.place)
        try:
            own.verify(path, run_id, content)
        except FileNotFoundError as error:
            raise CheckpointError(explain(error, path)) from None

    def quarantine(self, found: Committed | Location, reason: str) -> None:
        """Rename into the quarantine, with the reason beside it."""
        place = found.place if isinstance(found, Committed) else found
        shelves.put_aside(self._root, Path(place), reason)

    def quarantined(self) -> list[tuple[str, str]]:
        """Return (name, reason) of each."""
        return shelves.put_aside_list(self._root)

    def clear_trash(self) -> None:
        """Delete what was renamed and not yet deleted."""
        shelves.empty_trash(self._root)

    def _wait(self) -> float:
        """Return for how long what another machine has written may be hidden here, in seconds."""
        if self._patience is None:
            # The directory itself may be hidden, too.
            there = next(path for path in (self._root, *self._root.parents) if path.exists())
            self._patience = _PATIENCE if is_remote(there) else 0.0
        return self._patience

    def _lost(self) -> str:
        """Return why nothing may be saved here any more, or ""."""
        return self._origin.lost(0.0 if self._origin.known else self._wait())

    def _demand_origin(self) -> None:
        """Raise SaveError unless this is the directory that the job began with."""
        if lost := self._lost():
            raise SaveError(lost) from None

    def _put_manifest(
        self, path: Path, stage: Stage, header: ShardHeader, files: Sequence[FileEntry]
    ) -> bytes:
        """Put the directories and then the manifest on the disk."""
        sync_parents(path, [file.path for file in files])
        if header.copied:
            files = [replace(file, mtime_ns=None) for file in files]
        content = encode_checked(stage, header, files)
        write_document(path / layout.manifest_name(header.rank), content)
        sync_directory(path)
        return content

    @contextmanager
    def _must_stay(self, stage: Stage, header: ShardHeader) -> Iterator[None]:
        """Raise a SaveError in place of what is raised when the stage is removed during a write."""
        path = committing.stage_path(self._root, stage)
        try:
            yield
        except OSError as error:
            if error.errno not in _TAKEN_AWAY:
                raise
            self._demand_origin()
            there = path.is_dir()
            if there and error.errno in (errno.ENOENT, errno.ESTALE):
                raise
            if there:
                raise SaveError(
                    f"rank {header.rank} has a file where another has a directory, or the other way"
                    f" round: {error.filename2 or error.filename}"
                ) from None
            raise SaveError(
                f"{path} was removed while rank {header.rank} wrote into it: the save was given up,"
                " or its round is over"
            ) from None
