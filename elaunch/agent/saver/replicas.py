"""Replicas of other nodes' shards on the disk, where each node has a directory of its own.

With ``--checkpoint-local`` a committed checkpoint has the files of this node's ranks and the
manifests of all. With ``--checkpoint-replicas`` the files of the node before this one are put in
beside them: that node may be gone when the next round looks for what all nodes have together.

====================  ==============================================================================
a replica             what becomes of it
====================  ==============================================================================
of a committed save   its files are written to the disk at once
of a save in flight   the same, when that is committed here; until then the next replica of that
                      rank waits, for a bounded time
of a save that ends   it is written into the stage at the end of the round: the search for the next
with a manifest only  checkpoint commits that
of a save that is     it is dropped
given up
====================  ==============================================================================

A file is written under another name, fsynced, compared with the checksum in the manifest that is
there, and renamed. Nothing else is changed, so the checkpoint is what it was, and retention removes
all of it. A copy that fails is logged and fails nothing.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from elaunch.agent.peers.directory import GATHERED
from elaunch.agent.saver.memory import CheckpointMemory, Segment
from elaunch.agent.saver.queue import SaveQueue, error_text
from elaunch.atonce import Writing, start
from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import decode
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.commit import read_committed
from elaunch.checkpoint.storage.durable import (
    make_parents,
    sync_directory,
    sync_parents,
    write_file,
)
from elaunch.checkpoint.storage.files import JSON_LIMIT, read_limited
from elaunch.checkpoint.storage.storage import Storage
from elaunch.errors import CheckpointError, SaveError
from elaunch.files import own_directory
from elaunch.wire.worker import StagedShard

ROOM_S: Final = 20.0
"""Seconds that a replica waits for the one before it; its sender waits longer for the answer."""
LOOK_S: Final = 0.2
"""Seconds between two looks whether a save has failed; all else wakes the thread."""

_Replica = tuple[StagedShard, Segment]

log = logging.getLogger("elaunch")


class Replicas:
    """Writes replicas into the directory of ``storage``; any thread may call.

    A replica's memory is held until it is written or dropped.
    """

    def __init__(self, storage: Storage, queue: SaveQueue, memory: CheckpointMemory) -> None:
        self._storage = storage
        self._root = Path(storage.place)
        self._queue = queue
        self._memory = memory
        self._changed = threading.Condition()
        self._waiting: list[_Replica] = []
        self._writing: list[_Replica] = []

    def came(self, shard: StagedShard, segment: Segment) -> None:
        """Take over a replica that is whole."""
        self._memory.hold(segment)
        with self._changed:
            self._waiting.append((shard, segment))
        if self._is_committed(shard.stage):
            self.committed(shard.stage)

    def committed(self, stage: Stage) -> None:
        """Begin to write the replicas of a save that is committed here."""
        with self._changed:
            ready = self._take([one for one in self._waiting if one[0].stage == stage])
        for replica in ready:
            self._start(replica, self._root / stage.final)

    def await_room(self, rank: int) -> None:
        """Wait, for ROOM_S at most, until no replica of ``rank`` is on its way to the disk."""
        until = time.monotonic() + ROOM_S
        while self._is_writing(rank) and time.monotonic() < until:
            with self._changed:
                self._changed.wait(LOOK_S)

    def settle(self, until: float) -> None:
        """Write the replicas in flight, after the saves of the round; monotonic ``until``.

        No replica may come meanwhile.
        """
        with self._changed:
            left = self._take(list(self._waiting))
        for replica in left:
            stage = replica[0].stage
            if self._is_committed(stage):
                self._start(replica, self._root / stage.final)
            else:
                self._start(replica, None, until)
        with self._changed:
            self._changed.wait_for(lambda: not self._writing, max(0.0, until - time.monotonic()))

    def _is_writing(self, rank: int) -> bool:
        with self._changed:
            waiting = [one for one in self._waiting if one[0].header.rank == rank]
        for replica in waiting:
            stage = replica[0].stage
            # In this order: a save is over when it is committed.
            is_open = self._queue.is_open(stage)
            if self._is_committed(stage):
                self.committed(stage)
            elif not is_open:
                self._drop(replica)
        with self._changed:
            return any(one[0].header.rank == rank for one in (*self._waiting, *self._writing))

    def _is_committed(self, stage: Stage) -> bool:
        try:
            return read_committed(self._root / stage.final).uuid == stage.uuid
        except (CheckpointError, OSError):
            return False

    def _take(self, replicas: list[_Replica]) -> list[_Replica]:
        """Note, with the lock held, that these replicas are being written."""
        self._waiting = [one for one in self._waiting if one not in replicas]
        self._writing += replicas
        return replicas

    def _drop(self, replica: _Replica) -> None:
        with self._changed:
            if replica not in self._waiting:
                return  # it has just been taken
            self._waiting.remove(replica)
        self._memory.release(replica[1])

    # ── the threads ──────────────────────────────────────────────────────────────────────────────

    def _start(self, replica: _Replica, target: Path | None, until: float = math.inf) -> None:
        name = f"copy of rank {replica[0].header.rank}"
        start(name, self._write, replica, target, until, behind=True)

    def _write(self, replica: _Replica, target: Path | None, until: float) -> None:
        """Put a replica into the checkpoint at ``target``, or into its stage before ``until``."""
        shard, segment = replica
        try:
            if target is None:
                self._complete_stage(shard, segment.view, until)
            else:
                content = read_limited(target / layout.manifest_name(shard.header.rank), JSON_LIMIT)
                self._put(target, content, shard, segment.view)
        except (CheckpointError, OSError) as error:
            if target is not None and not target.is_dir():
                log.debug("%s went before its copy was written", shard.stage.final)
            else:
                which = f"rank {shard.header.rank}'s shard of {shard.stage.final}"
                log.warning(
                    "this node's disk has no copy of %s: %s", which, error_text(error, self._root)
                )
        finally:
            self._memory.release(segment)
            with self._changed:
                self._writing.remove(replica)
                self._changed.notify_all()

    def _complete_stage(self, shard: StagedShard, memory: memoryview, until: float) -> None:
        """Put the replica into a stage that no thread works on, with the manifest of its rank."""
        stage, rank = shard.stage, shard.header.rank
        path = self._root / layout.STAGE / stage.name
        manifest = self._queue.idle_manifest(stage, rank)
        if manifest is None or not path.is_dir():
            return
        self._put(path, manifest, shard, memory, until)
        if rank not in self._storage.manifests(stage):
            self._storage.adopt(stage, {rank: manifest})

    def _put(
        self,
        target: Path,
        manifest: bytes,
        shard: StagedShard,
        memory: memoryview,
        until: float = math.inf,
    ) -> None:
        """Put those files into ``target`` that the manifest of the shard's rank lists."""
        wanted = {entry.path: entry for entry in decode(manifest, shard.header.rank).files}
        extents = {path: found for path, found in shard.images if path in wanted}
        lacking = [path for path in extents if not os.path.lexists(target / path)]
        if not lacking:
            return
        with self._scratch() as scratch:
            for number, path in enumerate(lacking):
                pieces = [memory[at : at + size] for at, size in extents[path]]
                made, entry = write_file(scratch, str(number), pieces, Writing()), wanted[path]
                if (made.size, made.checksum) != (entry.size, entry.checksum):
                    raise CheckpointError(f"{path} is not what its rank has written")
            if time.monotonic() >= until:
                raise SaveError("the storage has not taken it in time")
            for number, path in enumerate(lacking):
                make_parents(target, path)
                os.rename(scratch / str(number), target / path)
        sync_parents(target, lacking)
        sync_directory(target)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Give a directory to write in; a search removes it after a kill."""
        path = self._root / layout.STAGE / f"{GATHERED}{secrets.token_hex(8)}"
        with own_directory(path.parent):
            path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
