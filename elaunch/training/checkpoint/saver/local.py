"""A saver without an agent: threads of this process write, from this process's own memory.

It serves under torchrun, under mpirun, and for a script started by itself. A worker that is killed
loses what it has in flight; the stage that it leaves is cleared at the next start. Rank 0 commits:

=====================================  =============================================================
it learns                              from
=====================================  =============================================================
that another has written its shard     its manifest in the stage
that another still writes its shard    a mark in the stage that changes
that another's shard has failed        its note in the stage, if it can write there; else the next
                                       call of all ranks (``share``)
that another has ended without either  that call (PeerLost); at the end, when no call comes any
                                       more, the rank's connection
=====================================  =============================================================
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from elaunch.checkpoint.retention.after import Retiring
from elaunch.checkpoint.writing import inflight
from elaunch.checkpoint.writing.queue import SaveQueue
from elaunch.errors import CheckpointError, ContextError, SaveError
from elaunch.training.checkpoint.saver.pages import release, touch
from elaunch.training.checkpoint.together.agree import agree
from elaunch.training.checkpoint.where import keep_of
from elaunch.wire.saver import CLOSE_S, MARGIN_S, Handed

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.storage import Committed, Stage, Storage
    from elaunch.run.saves import SavesRecord
    from elaunch.training.distributed import DistributedContext

FIRST_LOOK_S: Final = 0.02
LAST_LOOK_S: Final = 0.5
ASK_S: Final = 2.0
"""Seconds between two questions whether the ranks without a manifest still live."""
GONE_S = 30.0
"""Seconds after the end of a rank until its manifest counts as not there: caches are slow."""

log = logging.getLogger("elaunch")


class LocalSaver:
    """This process as its own saver; see ``Saver``.

    ``lacks``: why its agent is not; ``fence``: asks whether a round is still on, where that can be;
    ``noted``: gets what was saved so far after each commit of this process.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        storage: Storage,
        lacks: str = "",
        fence: Callable[[int], None] | None = None,
        noted: Callable[[SavesRecord], None] | None = None,
    ) -> None:
        self.lacks = lacks
        self.fence = fence or _pass
        self._distributed = distributed
        self._rank = distributed.rank
        self._pid = os.getpid()
        self._view: memoryview | None = None
        self._noted = noted or _pass
        alone = _Alone(storage, distributed, self.fence, self._noted)
        self._keeping = alone.keeping = SaveQueue(storage, alone)
        self._keeping.join(self._rank)
        self._said = distributed.rank != 0 or bool(lacks)

    def committed(self, done: Committed, seconds: float) -> None:
        """Count it with what this process has committed in the background."""
        self._keeping.committed_by_rank(done, seconds)
        self._noted(self._keeping.record())

    def memory(self, size: int) -> memoryview:
        """Return memory of this process, touched."""
        if self._view is None or self._view.nbytes < size:
            if self._view is not None:
                release(self._view)
                self._view = None
            try:
                mapping = mmap.mmap(-1, max(1, size))
            except (OSError, ValueError) as error:
                raise SaveError(f"no memory for a part of {size} bytes: {error}") from error
            touch(mapping)
            self._view = memoryview(mapping)
        return self._view

    def begin(self, wait: bool, timeout: float | None = None) -> bool:
        """Wait for the save in flight; whether the memory may be overwritten."""
        if not self._said:
            self._said = True
            log.warning(
                "no agent writes this job's checkpoints: a worker that is killed loses what it has "
                "in flight; under `elaunch run` it does not"
            )
        return self._keeping.begin(self._rank, wait, timeout)

    def staged(self, handed: Handed) -> None:
        """Stage what is in the memory."""
        if handed.local:
            raise SaveError(
                "checkpoints on each node's own disk (--checkpoint-local) are written in the "
                "background by agents only: use `elaunch run`, or save with block=True"
            )
        if self._view is None:
            raise SaveError("no memory was asked for")
        self._keeping.stage(handed, self._view)

    def abandon(self, stage: Stage | None = None) -> None:
        """Take back ``begin``."""
        self._keeping.abandon(self._rank, stage)

    def share(self, wait: bool, timeout: float) -> None:
        """Report to rank 0 a shard that has failed here."""
        own = self._keeping.await_part(self._rank, timeout if wait else 0.0)
        what = "save(block=False) or wait"
        for failed in agree(self._distributed, what, None, own, timeout + MARGIN_S):
            for stage, problem in failed:
                self._keeping.failed_elsewhere(stage, problem)

    def wait(self, timeout: float | None = None) -> Committed | None:
        """Wait until nothing is in flight; the newest that was committed."""
        try:
            return self._keeping.wait(self._rank, timeout)
        except TimeoutError as error:
            raise SaveError(str(error)) from None

    def recall(
        self,
        step: int,
        round_number: int,
        ranks: Collection[int],
        uuid: str = "",
        timeout: float | None = None,
    ) -> dict[int, dict[str, memoryview]]:
        """Return nothing: what an earlier process had in memory is gone with it."""
        return {}

    def close(self, patient: bool = True) -> None:
        """Wait for what is in flight, also without ``patient``."""
        del patient
        if os.getpid() != self._pid:
            return
        try:
            self.wait(CLOSE_S)
        finally:
            self._view = None


class _Alone:
    """The surroundings of a process without an agent; ``keeping`` is its save queue."""

    keeping: SaveQueue

    def __init__(
        self,
        storage: Storage,
        distributed: DistributedContext,
        fence: Callable[[int], None],
        noted: Callable[[SavesRecord], None],
    ) -> None:
        self.fence = fence
        self._noted = noted
        self._storage = storage
        self._distributed = distributed
        self._rank = distributed.rank
        self._marks = 0
        self._retiring = Retiring(storage, keep_of(os.environ))

    def own_ranks(self) -> frozenset[int]:
        """Return this rank."""
        return frozenset({self._rank})

    def commits(self, _: Handed) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def released(self, _: Handed) -> None:
        """The memory is this process's own."""

    def sealed(self, handed: Handed, _: bytes) -> None:
        """Look for the manifests of the other ranks, on rank 0."""
        if self._rank == 0 and handed.part.world_size > 1:
            name = f"checkpoint {handed.stage.step} seals"
            threading.Thread(target=self._watch, args=(handed,), name=name, daemon=True).start()

    def failed(self, handed: Handed, problem: str) -> None:
        """Leave a note for rank 0, which else would wait for the next call of all ranks."""
        if self._rank == 0:
            return
        try:
            writable = problem.encode(errors="replace").decode()  # a file's name may not be
            self._storage.put_failure(handed.stage, self._rank, writable)
        except (OSError, CheckpointError) as error:
            log.debug("rank 0 is not told of %r: %s", problem, error)

    def writing(self, handed: Handed) -> None:
        """Change the mark that rank 0 looks at."""
        if self._rank == 0:
            return
        self._marks += 1
        self._storage.put_mark(handed.stage, self._rank, str(self._marks))

    def committed(self, handed: Handed, done: Committed) -> None:
        """Have it counted, and remove what may go now."""
        self._noted(self.keeping.record())
        self._retiring.after(handed, done)

    def make_room(self, handed: Handed) -> bool:
        """Remove what may go, on rank 0: one process decides."""
        return self._rank == 0 and self._retiring.for_room(handed, ())

    def _watch(self, handed: Handed) -> None:
        """Report to the save queue which ranks have a manifest, or failed, until all have."""
        stage, size, seen = handed.stage, handed.part.world_size, {0}
        until, pause = time.monotonic() + inflight.PART_DEADLINE_S, FIRST_LOOK_S
        marks: dict[int, str] = {}
        again, lives = threading.Event(), _Lives(self._distributed)
        while len(seen) < size and time.monotonic() < until and self.keeping.is_open(stage):
            again.wait(pause)
            pause = min(2 * pause, LAST_LOOK_S)
            lives.ask([rank for rank in range(size) if rank not in seen])
            try:
                sealed, failed = self._storage.manifests(stage), self._storage.failures(stage)
                marked = self._storage.marks(stage)
            except (OSError, CheckpointError) as error:
                log.debug("%s cannot be read now: %s", stage.name, error)
                sealed, failed, marked = {}, {}, marks
            for rank in [rank for rank, mark in marked.items() if marks.get(rank) != mark]:
                self.keeping.writing_elsewhere(stage, rank, size)
                until = time.monotonic() + inflight.PART_DEADLINE_S
            marks = marked
            for rank in sorted(set(sealed) - seen):
                self.keeping.sealed_elsewhere(stage, rank, size, sealed[rank])
            seen |= set(sealed)
            failed = failed or lives.ended(seen)
            for rank, problem in failed.items():
                self.keeping.failed_elsewhere(stage, f"rank {rank}: {problem}")


def _pass(_: object) -> None:
    """Let every round commit: only the process that started it knows that it is over."""


class _Lives:
    """Which ranks have ended, and since when."""

    def __init__(self, distributed: DistributedContext) -> None:
        self._distributed = distributed
        self._asked = time.monotonic()
        self._gone: dict[int, float] = {}

    def ask(self, ranks: list[int]) -> None:
        """Ask ``ranks`` whether they live, every few seconds."""
        now = time.monotonic()
        if now - self._asked < ASK_S:
            return
        try:
            for rank in self._distributed.gone(ranks, now + ASK_S):
                self._gone.setdefault(rank, now)
        except ContextError as error:
            log.debug("the other ranks cannot be asked: %s", error)
        self._asked = time.monotonic()

    def ended(self, seen: Collection[int]) -> dict[int, str]:
        """Return the ranks that ended a while ago, and are not among ``seen``."""
        late = time.monotonic() - GONE_S
        gone = [rank for rank, at in self._gone.items() if at <= late and rank not in seen]
        return dict.fromkeys(gone, "it ended before its part was on the disk")
