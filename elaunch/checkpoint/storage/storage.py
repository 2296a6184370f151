"""A storage: the directory, or URL, into which a run puts its checkpoints.

==================  ==============================================================================
step of a save      who does what
==================  ==============================================================================
``prepare``         one process, once per job: the directory and ``run.json``
``lock``            the process that decides here holds it while the job lives
``open_stage``      every writer: the directory for its files
``write_shard``     every rank, or its agent for it: its files, fsync, its manifest
``write_manifest``  the same for files that a script has written itself
``commit``          one process, when all manifests are there: checks, fence, COMMIT, rename
``finish_stages``   the process that chooses the next round's checkpoint: commits stages that are
                    complete though the process that was to commit has died, clears the others
==================  ==============================================================================

A checkpoint that readers see has all its files, and they are on the disk. Nothing is ever written
to a name that readers use, and a committed checkpoint is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from elaunch.checkpoint.records import Committed, Image, Location, ReadBefore, ShardHeader, Stage

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.objects import Ranges

__all__ = [
    "Committed",
    "Image",
    "Location",
    "ReadBefore",
    "ShardHeader",
    "Stage",
    "Storage",
    "open_storage",
]


class StorageLock(Protocol):
    """The lock that ``Storage.lock`` returns."""

    def close(self) -> None:
        """Give the lock back; a second call does nothing."""

    def write_holder(self, jobs: Collection[str]) -> None:
        """Write ``jobs`` into the lock's file, as for ``Storage.lock``."""


class Storage(Protocol):
    """Where a run's checkpoints are. Any thread may call; OSErrors name the file.

    A full disk is an OSError with ENOSPC or EDQUOT from whatever writes: the caller decides.
    """

    @property
    def place(self) -> Location:
        """The directory (a Path) or the URL (a str)."""

    def prepare(self, run_id: str, given: bool) -> None:
        """Make the directory and ``run.json``; one process calls it, before any other method.

        ``given``: the user chose the run id. Raises SaveError if another run, whose id was given
        too, has the directory; an id that was made up may be replaced by any.
        """

    def lock(self, jobs: Collection[str] = ()) -> StorageLock:
        """Take the directory for this job; SaveError names who has it. No lock on URLs.

        ``jobs`` are the incarnation ids by which other agents of this job know that it is theirs.
        """

    def open_stage(self, stage: Stage, rank: int | None = None) -> Path:
        """Return the local directory to write into; any process of the save, any number of times.

        With ``rank`` it is a directory that this rank has for itself, so that two ranks that write
        different files under one name are found out: give it as ``below`` to ``own_files`` and
        ``write_manifest``. On a URL it is a temporary directory of this process. Raises SaveError
        if a checkpoint of that step and round is committed, or if the directory of :meth:`prepare`
        is gone or another one, which later calls raise, too.
        """

    def write_shard(self, stage: Stage, header: ShardHeader, images: Sequence[Image]) -> bytes:
        """Write, fsync and checksum a rank's files, then its manifest; return the manifest's bytes.

        Raises CheckpointError for paths that cannot be, SaveError if the stage is gone.
        """

    def write_manifest(
        self, stage: Stage, header: ShardHeader, files: Sequence[str], below: Path | None = None
    ) -> bytes:
        """Fsync and checksum files that were written into ``open_stage``; else as ``write_shard``.

        ``below``: they are in this directory, wherever it is, and are moved into the stage (copied
        from another file system). The files may not change any more. Another rank may list the same
        files.
        """

    def own_files(self, stage: Stage, below: Path | None = None) -> list[str]:
        """Return every file in ``open_stage``, or in ``below``; relative, sorted, manifests not.

        Raises SaveError for a link, a FIFO, a device or a name that is elaunch's.
        """

    def adopt(self, stage: Stage, manifests: Mapping[int, bytes]) -> None:
        """Put other nodes' manifests (by rank) into the stage, where each node has its own place.

        Before ``commit``, which then asks for the files of those ranks only that have any here.
        """

    def manifests(self, stage: Stage) -> dict[int, bytes]:
        """Return the manifests that are there: rank → bytes."""

    def commit(
        self, stage: Stage, fence: Callable[[], None], extra: Mapping[str, Any] | None = None
    ) -> Committed:
        """Commit a stage that has the manifests of all ranks; one process calls it.

        ``fence`` raises if this round is over; it is asked right before the commit. ``extra`` goes
        into ``metadata.json`` (``metrics``, ``versions``, ``durations``, ``started``). Raises
        SaveError: shards are missing, files or metadata contradict each other, files do not have
        the sizes in the manifests, another checkpoint has the name. The stage then stays. If
        another process has committed the same stage meanwhile, that is a success.
        """

    def discard(self, stage: Stage) -> None:
        """Remove a stage, if it is there; not what is committed, or being committed elsewhere."""

    def finish_stages(
        self,
        run_id: str | None,
        keep: Collection[str] = (),
        after: int = 0,
        alone: bool = False,
        held: Collection[str] = (),
    ) -> list[Committed]:
        """Commit the run's complete stages, verified, and clear the others.

        ``run_id`` None: whichever run wrote them. ``keep``: names of stages that living processes
        still write. ``after``: the round of this job that has just ended. Stages of an earlier one
        came too late, since what was complete was committed then: they are cleared.
        ``alone``: no other machine has written there since the last call, so nothing can be late.
        ``held``: names of stages that are not cleared, and not too late: agents have shards of them
        in memory. Call it only where no other process of an earlier round is left.
        """

    def listed(self, known: ReadBefore | None = None) -> list[Committed]:
        """Return the committed checkpoints from old to new; files are not looked at.

        ``known`` has what earlier calls have read, and gets what this one reads: a checkpoint whose
        directory has not changed is not read again.
        """

    def newest_first(self, known: ReadBefore | None = None) -> Iterator[Committed]:
        """Yield the same from new to old; each is read when it is asked for."""

    def holds(self, name: str, uuid: str) -> bool:
        """Tell whether the checkpoint of this name and uuid is committed; no other one is read."""

    def find(self, name_or_uuid: str) -> Committed:
        """Return one by its name, or by its uuid; CheckpointError lists what is there.

        One that is there under the name is read, and no other.
        """

    def fetch(self, found: Committed) -> AbstractContextManager[Path]:
        """Give a local directory to read from, while the ``with`` block lasts."""

    def ranges(self, found: Committed) -> Ranges | None:
        """Return what reads parts of its files without a copy; None where ``fetch`` makes none."""

    def remove(self, found: Committed) -> None:
        """Take it away from readers at once, then delete it; nothing if it is gone already."""

    def verify(self, found: Committed, run_id: str | None = None, content: bool = True) -> None:
        """Read all of it; CheckpointError has the reason.

        Without ``content`` only the documents are read, and the files' sizes compared.
        """

    def quarantine(self, found: Committed | Location, reason: str) -> None:
        """Take it away from readers, keep it with the reason; nothing if it is gone already."""

    def quarantined(self) -> list[tuple[str, str]]:
        """Return (name, reason) of each."""

    def clear_trash(self) -> None:
        """Delete what an earlier process had renamed and not yet deleted."""


def open_storage(place: Location, local: bool = False) -> Storage:
    """Return the storage at a directory or an fsspec URL; nothing is touched yet.

    ``local``: each node has a directory of its own there, with the shards of its ranks. Raises
    UsageError for a URL when fsspec, or what it needs for that URL, is not installed.
    """
    if isinstance(place, str) and "://" in place:
        from elaunch.checkpoint.storage.url import ObjectStorage

        return ObjectStorage(place)
    from elaunch.checkpoint.storage.posix import PosixStorage

    return PosixStorage(Path(place), local)
