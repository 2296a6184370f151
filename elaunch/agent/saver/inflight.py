"""The saves in flight: which shards have come, which ranks wait, which failures are unreported.

::

    open ──► the first shard is staged ──► shards are written ──► all manifests ──► committing
                   │                              │                                     │
                   └─ a shard never comes ────────┴─ a shard fails, the storage hangs ──┴─► done

Ranks may be on several nodes. The process with rank 0 receives every manifest and commits; another
one is done with a save when the shards of its own ranks are written. Nothing here touches a file;
waits have deadlines, and what elaunch.agent.saver.queue alone calls is called with the lock held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from elaunch import text
from elaunch.atonce import Writing
from elaunch.checkpoint.ownership import NOT_THE_ONE
from elaunch.checkpoint.records import Committed, Stage
from elaunch.errors import SaveError
from elaunch.runs.record import SavesRecord
from elaunch.wire.worker import StagedShard

SHARD_DEADLINE_S = 600.0
"""Seconds for all ranks to stage their shards, after the first, or after another node has last
reported that it still writes one."""
WRITE_DEADLINE_S = 1800.0
"""Seconds without progress for the storage to take a shard; longer is a storage that hangs."""
LOOK_S: Final = 1.0
"""Seconds between two looks at these deadlines; all else wakes the waiting threads."""
REMEMBERED: Final = 8
"""Saves that are over and still known, so that a late message of another node begins none anew."""

log = logging.getLogger("elaunch")


@dataclass
class Save:
    """One checkpoint on its way to the disk.

    Attributes:
        stage, world_size: which one, and how many shards it has.
        began: when the first shard came, in monotonic seconds.
        shards: what was staged in this process, by rank.
        commits: whether this process commits it.
        writing: the ranks whose shards are being written here, and how that gets on.
        reported: when another node's saver last reported that it writes the shard of a rank.
        manifests: those of written shards, of all nodes, by rank.
        committing: whether the commit runs.
        adopting: whether it has yet to write other nodes' manifests into the stage.
        committed: the checkpoint that it has become.
        retiring: whether retention, which follows the commit, removes what may go.
        problem: why it comes to nothing.
        done: whether nothing more is expected of it here; threads may still write.
        stays: whether its stage is left to the process that chooses the next checkpoint.
        adopted: whether it is of an earlier round, and the round has resumed from it, or goes on.
    """

    stage: Stage
    world_size: int
    began: float
    shards: dict[int, StagedShard] = field(default_factory=dict)
    commits: bool = False
    writing: dict[int, Writing] = field(default_factory=dict)
    reported: dict[int, float] = field(default_factory=dict)
    manifests: dict[int, bytes] = field(default_factory=dict)
    committing: bool = False
    adopting: bool = False
    committed: Committed | None = None
    retiring: bool = False
    problem: str = ""
    done: bool = False
    stays: bool = False
    adopted: bool = False

    @property
    def busy(self) -> bool:
        """Whether a thread of this process works on it."""
        return bool(self.writing) or self.committing

    @property
    def verdict(self) -> str:
        """The message about a save that comes to nothing."""
        return f"checkpoint {self.stage.final} was not committed: {self.problem}"

    def first_shard(self) -> StagedShard:
        """Return the shard of the lowest rank here, whose options count for the whole save."""
        return self.shards[min(self.shards)]

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose shards have not come."""
        return [r for r in sorted(ranks) if r not in self.shards and r not in self.manifests]

    def stuck(self, now: float) -> str:
        """Return the text about storage that hangs, judged at ``now``; or ""."""
        late = [r for r, one in self.writing.items() if now - one.moved > WRITE_DEADLINE_S]
        if not late:
            return ""
        return (
            f"the storage has taken nothing of the part of {text.ranks(late)} for "
            f"{WRITE_DEADLINE_S:g} s: it hangs"
        )

    def overdue(self, now: float, own: Iterable[int]) -> str:
        """Return the text about ranks whose shards are overdue at ``now``; or "".

        The process that commits waits for all; any other, whose ``own`` ranks these are, is sent
        nothing of the rest.
        """
        late = [
            rank
            for rank in self.missing(range(self.world_size) if self.commits else own)
            if now - max(self.began, self.reported.get(rank, 0.0)) > SHARD_DEADLINE_S
        ]
        if not late:
            return ""
        return (
            f"{text.ranks(late)} staged no shard within {SHARD_DEADLINE_S:g} s; every rank "
            "has to call save"
        )


@dataclass
class _Rank:
    """A rank that stages here: failures that it has yet to raise, and its last checkpoint."""

    unreported: list[str] = field(default_factory=list)
    last: Committed | None = None


class SavesInFlight:
    """The saves of one process, by the names of their stages; ``changed`` is their lock."""

    def __init__(self, place: str) -> None:
        self.changed = threading.Condition()
        self.by_stage: dict[str, Save] = {}
        self.gone: set[int] = set()
        self.ending = False
        """Whether the round's ranks have ended: none waits any more."""
        self._place = place
        self._ranks: dict[int, _Rank] = {}
        self._seconds = 0.0
        self._commits = 0
        self._last: Committed | None = None
        self._problem = ""

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────

    def join(self, rank: int) -> None:
        """Note that ``rank`` stages here from now on."""
        with self.changed:
            self._ranks[rank] = _Rank()
            self.gone.discard(rank)

    def leave(self, rank: int) -> list[Save]:
        """Note that ``rank`` has ended; return the saves that come to nothing by that."""
        with self.changed:
            self._ranks.pop(rank, None)
            self.gone.add(rank)
            return [save for save in list(self.by_stage.values()) if self.drop_if_hopeless(save)]

    def give_up(self, rank: int) -> list[Save]:
        """Note that ``rank`` stages no shard of what it has begun; return the saves that end."""
        with self.changed:
            open_ = [save for save in self.by_stage.values() if not save.done]
            ended = [save for save in open_ if save.missing([rank]) and not save.adopted]
            for save in ended:
                self.drop(save, f"rank {rank} gave up its shard")
            return ended

    def call_off(self, rank: int, stage: Stage) -> list[Save]:
        """Note that all ranks have given up ``stage``, as ``rank`` reports; return what ends."""
        with self.changed:
            save = self.save(stage, 0)
            ended = [] if save.done else [save]
            self.drop(save, "its ranks have given it up")
            own = self._ranks.get(rank)
            if own is not None:
                own.unreported = [one for one in own.unreported if one != save.verdict]
            return ended

    def last(self, rank: int) -> Committed | None:
        """Return the checkpoint that the last save of ``rank`` has become."""
        with self.changed:
            own = self._ranks.get(rank)
            return None if own is None else own.last

    def await_idle(self, rank: int, timeout: float | None) -> bool:
        """Wait until no save of ``rank`` is in flight; False after ``timeout``.

        Raises SaveError for a failure not yet raised in the rank, and for a storage that hangs.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            idle = False
            while not idle:
                now = time.monotonic()
                idle = not self._in_flight(rank, now)
                if idle or (until is not None and now >= until):
                    break
                if self.ending:
                    raise SaveError("the round ends while the save before is in flight")
                self.changed.wait(LOOK_S if until is None else min(LOOK_S, until - now))
            self._raise_unreported(rank)
            return idle

    def in_flight(self, rank: int) -> str:
        """Return the names of the checkpoints that ``rank`` waits for."""
        with self.changed:
            return " and ".join(s.stage.final for s in self._in_flight(rank, time.monotonic()))

    def _in_flight(self, rank: int, now: float) -> list[Save]:
        """Return the saves that ``rank`` waits for; give up those whose time is over."""
        found = []
        for save in list(self.by_stage.values()):
            if save.done and not save.busy:
                continue
            stuck = save.stuck(now)
            self.drop(save, stuck or save.overdue(now, self._ranks))
            if stuck:
                self._raise_unreported(rank)
                raise SaveError(
                    f"the storage at {self._place} hangs: it has {save.stage.name}, given up "
                    "already, still to take; nothing is saved before it answers"
                )
            concerned = rank in save.shards or save.adopted
            if concerned and (save.busy or not save.done):
                found.append(save)
        return found

    def is_idle(self, rank: int) -> bool:
        """Whether no save of ``rank`` is in flight and none has failed unnoticed; with the lock."""
        own, saves = self._ranks.get(rank), self.by_stage.values()
        open_ = any(s.busy or (not s.done and (rank in s.shards or s.adopted)) for s in saves)
        return own is not None and not own.unreported and not open_

    def _raise_unreported(self, rank: int) -> None:
        own = self._ranks.get(rank)
        if own is None:
            raise SaveError(f"rank {rank} hands over nothing any more: its round is over")
        if own.unreported:
            failures, own.unreported = own.unreported, []
            raise SaveError("; ".join(failures))

    # ── with the lock held ───────────────────────────────────────────────────────────────────────

    def save(self, stage: Stage, world_size: int) -> Save:
        """Return the save of ``stage``, a new one if it is not known."""
        save = self.by_stage.get(stage.name)
        if save is None:
            save = self.by_stage[stage.name] = Save(stage, world_size, time.monotonic())
            over = [name for name, old in self.by_stage.items() if old.done and not old.busy]
            for name in over[:-REMEMBERED]:
                del self.by_stage[name]
        return save

    def drop_if_hopeless(self, save: Save) -> bool:
        """Give up a save that lacks the shard of a rank which has ended; whether that is so."""
        never = [rank for rank in save.missing(self.gone) if rank < save.world_size]
        if save.done or save.adopted or not never:
            return False
        self.drop(save, f"{text.ranks(never)} ended before handing over a part")
        return True

    def drop(self, save: Save, problem: str) -> None:
        """Give up a save for ``problem``; do nothing if that is "", or the save is done."""
        if save.done or not problem:
            return
        save.done, save.problem = True, problem
        self._problem = save.verdict
        others = "" if NOT_THE_ONE in problem else "; the ones before it are untouched"
        log.warning("%s%s", self._problem, others)
        for rank in self._ranks:
            self.note_failure(rank, save)
        self.changed.notify_all()

    def note_failure(self, rank: int, save: Save) -> None:
        """Have the next call of ``rank`` raise why ``save`` came to nothing."""
        own = self._ranks.get(rank)
        if own is not None and save.verdict not in own.unreported:
            own.unreported.append(save.verdict)

    def take_commit(self, save: Save) -> bool:
        """Whether the caller has to commit ``save``: all manifests are there, and no thread has."""
        if save.done or save.busy or not save.commits or len(save.manifests) < save.world_size:
            return False
        save.committing = True
        save.adopting = save.first_shard().local
        return True

    def note_commit(self, save: Save, done: Committed) -> None:
        """Record that ``save`` has become the checkpoint ``done``."""
        save.done, save.problem, save.committed = True, "", done
        self.count(done, time.monotonic() - save.began)
        for own in self._ranks.values():
            own.last = done

    def count(self, done: Committed, seconds: float) -> None:
        """Record the checkpoint ``done``, which has taken ``seconds``."""
        self._commits += 1
        self._seconds, self._problem = seconds, ""
        if self._last is None or self._last.age <= done.age:
            self._last = done

    def end_round(self, adopted: str = "", resumed: str = "", whole: bool = False) -> list[Save]:
        """Forget the ranks: the next ones are others. Return the saves that go on.

        They are those whose uuid is ``adopted``; and, if ``whole``, those of which all shards are
        here. The one that is the checkpoint ``resumed`` is committed, if the thread that does that
        here has not come to note it.
        """
        self._ranks.clear()
        self.gone.clear()
        self.ending = False
        for save in self.by_stage.values():
            goes_on = bool(adopted) and save.stage.uuid == adopted
            here = bool(save.shards) and not save.missing(range(save.world_size))
            goes_on = goes_on or (whole and here and not save.done)
            save.adopted = goes_on and not save.problem
            if not save.adopted:
                lost = save.busy and save.stage.final != resumed
                self.drop(save, "the next round does not resume from it" if lost else "")
                save.done = True
        return [save for save in self.by_stage.values() if save.adopted and save.shards]

    def record(self) -> SavesRecord:
        """Return what ``elaunch status`` shows of saves."""
        with self.changed:
            saving = [save.stage.step for save in self.by_stage.values() if not save.done]
            last = self._last
            return {
                "step": None if last is None else last.step,
                "committed_at": None if last is None else last.committed,
                "seconds": round(self._seconds, 3),
                "saving": max(saving, default=None),
                "problem": self._problem,
                "commits": self._commits,
            }
