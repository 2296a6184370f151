"""Brings a checkpoint directory in order before the next round's checkpoint is chosen there.

1. The directory is locked: two jobs in one would take each other's stages for dead ones.
2. Stages of dead rounds are committed, where all ranks had written their manifests, or cleared.
3. Checkpoints of this run that are damaged are put into quarantine, so that they are neither read
   nor counted again.
4. Once the checkpoint is chosen, what may go by the rule of the newest that was committed in 2 is
   removed. No round waits for that.

Only directories that elaunch writes into (``run.json`` is there) are touched. One object serves
both the search and the saver, so that the lock is taken once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.files import text_in
from elaunch.config import Settings
from elaunch.errors import CheckpointError, SaveError, UsageError
from elaunch.files import NotOwnError

if TYPE_CHECKING:
    from elaunch.checkpoint.ownership import Origin
    from elaunch.checkpoint.records import Committed, PassedOver
    from elaunch.checkpoint.storage.storage import Storage, StorageLock

CLOSE_S: Final = 2.0
"""Seconds at the end for the storage to take the lock back; the process's end gives it back too."""
REMOVE_S: Final = 10.0
"""Seconds at the end for retention to end; what it has renamed by then the next job deletes."""
LOCK_S: Final = 15.0
"""Seconds for an earlier job of this run id, which is about to end, to give the directory back."""
LOOK_S: Final = 0.1
ASIDE_S: Final = 2.0
"""Seconds before a round for damaged checkpoints to be put aside."""
MOST_LOGGED: Final = 10

log = logging.getLogger("elaunch")


class DirectoryFinisher:
    """Owns the directory's lock.

    Attributes:
        unfinished: returns the names of stages that this process still writes; the saver sets it.
        held: names of stages of which agents have shards in memory.
        resumed: name of the stage that the round has resumed from, out of memory, or "".
        round: the newest that this node took part in.
        jobs: the incarnation ids of this job, if it has several nodes, as far as they are known:
            those of the plans that this agent has read, and of those that other agents have.
        turn: held by the thread that searches.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.unfinished: Callable[[], Collection[str]] = tuple
        self.held: frozenset[str] = frozenset()
        self.resumed = ""
        self.round = 0
        self.jobs = set[str]()
        self.turn = threading.Lock()
        self._entered = set[str]()
        self._taking = threading.Lock()
        self._locks: dict[str, StorageLock] = {}
        self._origins: dict[str, Origin] = {}
        self._tidied: dict[str, int] = {}
        self._doubted: set[str] | None = None
        self._committed: tuple[Storage, Committed] | None = None
        self._removing = threading.Lock()

    def enter(self, job: str) -> None:
        """Note the id of a plan that this agent has read; others may know the lock by it."""
        if job in self._entered:
            return
        self._entered.add(job)
        self.jobs.add(job)
        if self._locks:
            from elaunch import atonce

            atonce.start("name the lock's holder", self._write_holder)

    def _write_holder(self) -> None:
        with self._taking:
            for lock in self._locks.values():
                try:
                    lock.write_holder(self._entered.copy())
                except OSError as error:
                    log.warning("cannot write into the checkpoint directory's lock: %s", error)

    def lock(self, storage: Storage) -> None:
        """Take the directory for this job, once; SaveError names the job that has it.

        Another agent of the same job of several nodes may have it: that is as good. Waits LOCK_S
        for another job of the same run id, with several nodes. SaveError, too, if the directory is
        gone since an earlier call, or is another one.
        """
        if isinstance(storage.place, Path):
            self._demand_origin(storage.place)
        until = time.monotonic() + LOCK_S
        while not self._try_lock(storage, time.monotonic() >= until):
            time.sleep(LOOK_S)

    def _try_lock(self, storage: Storage, last: bool) -> bool:
        """Return whether it is locked; False, else SaveError with ``last``, for one to wait for."""
        with self._taking:
            root = str(storage.place)
            try:
                if root not in self._locks:
                    self._locks[root] = storage.lock(self._entered.copy())
            except SaveError:
                from elaunch.checkpoint.ownership import holding_jobs

                several = self._settings.rendezvous is not None
                run_id = text_in(storage.place, layout.RUN, "run_id")
                if not several or run_id != self._settings.run_id:
                    raise
                # That no id is known is no proof of another job.
                jobs = holding_jobs(Path(root))
                ours = not jobs or not self.jobs or not jobs.isdisjoint(self.jobs)
                if last and not ours:
                    raise
                return ours
            self._locks[root].write_holder(self._entered.copy())  # a plan may have come meanwhile
            return True

    def close(self) -> None:
        """Give the lock back, if the storage answers within CLOSE_S; before it retention ends."""
        from elaunch import atonce

        if not self._removing.acquire(timeout=REMOVE_S):
            log.warning("retention is not done after %g s: what may go is left", REMOVE_S)
        if not atonce.within(CLOSE_S, self._unlock, "unlock"):
            log.warning("the checkpoint directory's storage hangs: its lock goes with this process")

    def _unlock(self) -> None:
        with self._taking:
            for lock in self._locks.values():
                lock.close()
            self._locks.clear()

    def finish(self, root: Path | str, run_id: str | None) -> None:
        """Lock the directory and bring its stages to an end; raises CheckpointError, OSError.

        UsageError: the directory is another run's, or a living job's. CheckpointError: it is not
        the one that this job has had.
        """
        if str(root) in self._origins and isinstance(root, Path):
            self._demand_origin(root)
        if isinstance(root, Path) and not (root / layout.RUN).exists():
            return
        from elaunch.checkpoint.storage.storage import (
            open_storage,  # jobs that elaunch writes nothing for
        )

        storage = open_storage(root, self._settings.checkpoint_local)
        try:
            storage.prepare(self._settings.run_id, self._settings.run_id_given)
            self.lock(storage)
        except (SaveError, NotOwnError) as error:
            raise UsageError(
                f"--checkpoint-dir {root}: {error}", code="E-CHECKPOINT-DIR"
            ) from error
        self._tidy(storage, run_id, self.round)

    def _demand_origin(self, root: Path) -> None:
        """Raise SaveError unless this is the directory of the first call for that path."""
        from elaunch.checkpoint.ownership import Origin

        origin = self._origins.get(str(root), Origin(root))
        if lost := origin.lost():
            raise SaveError(lost)
        self._origins[str(root)] = origin

    def tidy(self, storage: Storage) -> None:
        """Bring to an end what rounds before this one left in a directory that has been locked.

        All but what this round resumes from: a save of which the search found shards in some
        agent's memory, and which the round does not resume from, comes to nothing. Where nothing
        was searched (it is not ``--checkpoint-dir``), complete stages of the last round are
        committed. Once a round; raises CheckpointError, OSError.
        """
        settings = self._settings
        if self._tidied.get(str(storage.place)) == self.round:
            return
        self.held = frozenset()
        last = self.round if settings.checkpoint_dir is not None else self.round - 1
        self._tidy(storage, settings.run_id if settings.run_id_given else None, last)

    def _tidy(self, storage: Storage, run_id: str | None, after: int) -> None:
        root = str(storage.place)
        alone = self._settings.rendezvous is None and root in self._tidied
        self._tidied[root] = self.round
        held = {*self.held, self.resumed}
        for done in storage.finish_stages(run_id, self.unfinished(), after, alone, held):
            log.warning("%s was complete and is committed now: its writer had died", done.name)
            self._committed = storage, done
        storage.clear_trash()

    def retire(self, resumed: str) -> None:
        """Apply retention to what was committed here since the last call, in a thread.

        ``resumed`` is the name of the checkpoint that was chosen, or "": it stays.
        """
        committed = self._committed
        if committed is None or not self._removing.acquire(blocking=False):
            return
        self._committed = None
        from elaunch import atonce

        atonce.start("retention", self._retire, *committed, resumed)

    def _retire(self, storage: Storage, done: Committed, resumed: str) -> None:
        from elaunch.checkpoint.retention import Retiring

        try:
            Retiring(storage, self._settings.checkpoint_keep).follow(done, resumed)
        finally:
            self._removing.release()

    def doubted(self, root: Path | str) -> set[str] | None:
        """Return the names of the checkpoints that nobody has read for this job yet; None: of all.

        They were there when this agent first looked for one: what has happened since their
        manifests were written, as a power cut, is not known. A reader takes them out of the set.
        """
        if self._doubted is None:
            try:
                self._doubted = set(_names(root))
            except FileNotFoundError:
                self._doubted = set()
            except OSError:
                return None  # the search will report it
        return self._doubted

    def put_aside(self, root: Path, passed: Iterable[PassedOver], run_id: str | None) -> None:
        """Put into quarantine what is damaged of ``passed``, newest first, and of this run.

        What could not be read now (EIO, EACCES) stays: it may be whole. The round does not wait
        for more than ASIDE_S: the rest is put aside by the next search.
        """
        if not (root / layout.RUN).exists():
            return
        from elaunch.checkpoint.shelves import put_all_aside

        until = time.monotonic() + ASIDE_S
        found = [each for each in passed if each.damaged and _is_own(root, each.path, run_id)]
        reasons = {each.path: each.reason for each in found}
        if not found:
            return

        def in_time() -> Iterator[tuple[Path, str]]:
            for path, reason in reasons.items():
                if time.monotonic() >= until:
                    return
                yield path, reason

        try:
            moved = put_all_aside(root, in_time())
        except (OSError, CheckpointError) as error:
            log.warning("damaged checkpoints are skipped and left where they are: %s", error)
            return
        for path in moved[:MOST_LOGGED]:
            log.warning("%s is damaged (%s): put into quarantine", path.name, reasons[path])
        if len(moved) > MOST_LOGGED:
            log.warning("%d more are damaged: put into quarantine", len(moved) - MOST_LOGGED)


def _names(root: Path | str) -> list[str]:
    if isinstance(root, Path):
        return os.listdir(root)
    from elaunch.checkpoint.storage.objects import Objects

    return Objects(root).names()


def _is_own(root: Path, path: Path, run_id: str | None) -> bool:
    """Return whether this is a checkpoint in elaunch's layout, and of this run."""
    if path.parent != root or layout.parse_step_name(path.name) is None:
        return False
    return run_id in (None, text_in(path, layout.METADATA, "run_id"))
