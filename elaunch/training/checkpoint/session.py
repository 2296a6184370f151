"""Opening what ``ctx.checkpoint`` works with, when it is first used.

==============  ==================================================================================
property, call  needs
==============  ==================================================================================
``place``       nothing: variables and the run id give it
``storage``     nothing, and touches nothing
``latest``      an agent's choice, or what ``elaunch.init()`` has found
``alone``       rank 0: it makes the directory, and locks it where no agent has
``together``    ALL ranks: rank 0 sends run id and round; all see the same directory
==============  ==================================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.retention import Retiring
from elaunch.checkpoint.storage.storage import Committed, Location, Storage, open_storage
from elaunch.errors import CheckpointError, ContextError, SaveError
from elaunch.runs.statedir import make_private
from elaunch.training.checkpoint import latest, where
from elaunch.training.checkpoint.callcontext import (
    MISSING,
    CallContext,
    KnownCheckpoints,
    awaiting,
    newer,
)
from elaunch.training.checkpoint.together import together
from elaunch.training.checkpoint.where import DirectoryOwner
from elaunch.wire.worker import CLOSE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from elaunch.runs.record import SavesRecord
    from elaunch.training.agentlink import AgentLink
    from elaunch.training.distributed import DistributedContext
    from elaunch.training.launch import Info
    from elaunch.training.train import TrainContext
    from elaunch.wire.progress import ProgressPage

NO_AGENT: Final = "no agent runs here"

log = logging.getLogger("elaunch")


@dataclass
class CheckpointSession:
    """The checkpoints of one context: what it is made with, and what is opened of that.

    Attributes:
        info: what the launcher set.
        distributed: the ranks.
        train: flushed before each commit.
        page: progress page of this rank.
        run_id: of the run.
        given: the run id is the same when the job is started again.
        noted: gets what was saved so far after each commit, where no agent keeps the run's record.
        link: to this node's agent, if there is one.
        decided: what ``elaunch.init()`` has found, unless agents have chosen what is on the disk.
        directory: of the run, with its record.
        before: the newest checkpoint that this rank knew of among other ranks.
    """

    info: Info
    distributed: DistributedContext
    train: TrainContext
    page: ProgressPage
    run_id: str
    given: bool
    noted: Callable[[SavesRecord], None] | None = None
    link: AgentLink | None = None
    decided: latest.Decided | None = None
    directory: Path | None = None
    before: Committed | None = None
    known: KnownCheckpoints = field(default_factory=KnownCheckpoints)
    _storage: Storage | None = None
    _owner: DirectoryOwner | None = None
    _call: CallContext | None = None
    _met: bool = False
    _closed: bool = False
    _patient: bool = True
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def place(self) -> Location:
        """The directory or URL."""
        return self.storage.place

    @property
    def storage(self) -> Storage:
        """The directory or URL, opened; nothing in it is touched by that."""
        if self._storage is None:
            self._storage = open_storage(
                where.location_of(self.info, self.run_id, os.environ)[0], self.local
            )
        return self._storage

    @property
    def by_agent(self) -> bool:
        """Whether agents look after the directory: they lock it, and choose the latest in it."""
        return latest.has_chosen(self.info)

    @property
    def local(self) -> bool:
        """Whether each node has a directory of its own."""
        return where.is_local(self.info, os.environ)

    def alone(self) -> CallContext:
        """Return the call context on rank 0, which asks no other rank."""
        self._refuse_if_closed()
        if self._call is None:
            self._owner = self._take()
            self._call = self._made(self._owner)
        return self._call

    def together(self, timeout: float | None) -> CallContext:
        """Return the call context; ALL ranks call it together.

        Raises CheckpointError, on all ranks: the directory cannot be made, or is not the same on
        all nodes. One that belongs to another job or run can be read from.
        """
        self._refuse_if_closed()
        if self._met and self._call is not None:
            return self._call
        what = "opening the checkpoint directory"
        with together(self.distributed, what, timeout, CheckpointError, everyone=True) as step:
            step.sent = self._begun(), self.before
        self._owner = step.received[0][0]
        for _, found in step.received:
            if found is not None:
                self.known.note(found)
        where.check_shared(self.distributed, self.storage, self.local, timeout)
        with together(self.distributed, what, timeout, everyone=True) as step:
            made = self._call or self._made(self._owner)
            if self.distributed.rank == 0 and not (self.by_agent or self.local):
                self._note_finished(made)
            step.sent = made.foreground
        self._call = replace(made, foreground=_foreground(self.info, step.received))
        known = self._call.foreground in ("", NO_AGENT, MISSING)
        if self._call.rank == 0 and not known:
            log.warning("%s: the workers write checkpoints themselves", self._call.foreground)
        self._met = True
        return self._call

    def _note_finished(self, made: CallContext) -> None:
        """Note what was complete in a stage, and is a checkpoint since the directory is open."""
        found = latest.newest(self.storage, made.reads)
        before = None if self.decided is None else self.decided.found
        if found is not None and (before is None or found.age > before.age):
            self.known.own = newer(self.known.own, found)

    def latest(self) -> Committed | None:
        """Return the newest checkpoint that all ranks know of."""
        if not self.known.asked:
            self._refuse_if_closed()
            if self.decided is None:
                self.known.resumed = self._chosen_by_agent()
            else:
                self.known.resumed = self.decided.latest(lambda: self.place)
                if self.by_agent and self.known.resumed is not None:
                    self.known.pending = self.known.resumed
                    self.known.whole.add(self.known.resumed.uuid)
            self.known.asked = True
        return self.known.latest()

    def ask_for_latest(self) -> None:
        """Have :meth:`latest` known, or why it is not, before a call of all ranks."""
        try:
            self.latest()
        except (CheckpointError, OSError) as error:
            self.known.problem = error

    def close(self, patient: bool = True) -> None:
        """Wait for saves in flight; give the lock back. SaveError if a save came to nothing.

        ``patient``: see ``AgentSaverClient.close``.
        """
        if self._closed:
            return
        self._closed, self._patient = True, patient
        with awaiting(self.page, CLOSE_S):
            self._stack.close()

    def moved(self, info: Info) -> CheckpointSession:
        """Return the session for other ranks, or another round; this one is closed."""
        self.close(patient=False)
        before = self.known.latest() if self.known.asked else self.known.newest
        known = KnownCheckpoints(asked=True, newest=before)
        fresh = CheckpointSession(
            *(info, self.distributed, self.train, self.page, self.run_id, self.given),
            *(self.noted, self.link, None, self.directory, before),
        )
        fresh.known = known
        return fresh

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ContextError("ctx.checkpoint is used after the end of its context")

    def _begun(self) -> DirectoryOwner | None:
        """Open the directory; return whose it is if this rank acts for it."""
        _ = self.storage  # every rank finds out by itself whether it can be opened
        acts = self.distributed.rank == 0 or (self.local and self.distributed.local_rank == 0)
        return self._owner or self._take() if acts else None

    def _take(self) -> DirectoryOwner:
        """Make the directory ready, lock it where no agent does, and return whose it is."""
        place, chosen = where.location_of(self.info, self.run_id, os.environ)
        if self.distributed.rank == 0:
            where.print_default(place, chosen)
        if isinstance(place, Path):
            if chosen:
                place.mkdir(parents=True, exist_ok=True)
            else:
                make_private(place)
        try:
            self._owner = self._locked()
        except SaveError as error:
            # Another job's, or another run's: it can be read from all the same.
            self.known.read_only = error
            self._owner = DirectoryOwner(self.run_id, 0)
        return self._owner

    def _locked(self) -> DirectoryOwner:
        """Take the directory, and its lock where no agent has it; an error keeps neither."""
        with contextlib.ExitStack() as stack:
            if self.info.launcher != "elaunch":  # an agent has its saver lock it
                stack.callback(where.lock(self.storage).close)
            owner = where.take(self.storage, self.info, self.run_id, self.given)
            self._stack.callback(stack.pop_all().close)
        return owner

    def _made(self, owner: DirectoryOwner) -> CallContext:
        saver, lacks = None, NO_AGENT
        count = _counting(self.noted)
        if self.info.launcher == "elaunch":
            from elaunch.training.checkpoint.saver import connected

            place = str(self.storage.place)
            here = self.distributed.placement
            fewer = self.info.nodes > 1 and here.size < self.info.world_size
            misses = fewer and here.launcher == "elaunch"
            here = here._replace(rank=self.info.rank) if misses else here
            saver, lacks = connected(self.link, here, place, owner.round)
            lacks = MISSING if misses and not lacks else lacks
        if saver is not None:
            count = saver.committed
            self._stack.callback(lambda: saver.close(self._patient))
        return CallContext(
            distributed=self.distributed,
            storage=self.storage,
            saver=saver,
            foreground=lacks,
            count=count,
            run_id=owner.run_id,
            reads=owner.run_id if self.given else None,
            round=owner.round,
            local=self.local,
            retiring=Retiring(self.storage, where.keep_of(os.environ)),
            train=self.train,
            page=self.page,
            agent=self.by_agent,
            known=self.known,
        )

    def _chosen_by_agent(self) -> Committed | None:
        """Return what the round resumes from; the agents chose it before it began."""
        path, step = self.info.resume_from, self.info.resume_step
        if path is None or self.info.is_warm_start:
            return None
        where_, _, name = str(path).rstrip("/").rpartition("/")
        # There the uuid is part of the name.
        at_url = layout.parse_stage_name(name) if isinstance(self.place, str) else None
        own = at_url is not None or layout.parse_step_name(name) is not None
        if own and where_ == str(self.place).rstrip("/"):
            found = self.storage.find(at_url[2] if at_url else name)
            self.known.whole.add(found.uuid)
            return found
        return Committed(name, path, step or 0, 0, "", {}, 0)


def _foreground(info: Info, lacks: list[str]) -> str:
    """Return why ``save(block=False)`` blocks on all ranks; ``lacks``: why each has no agent."""
    rank, reason = next(((rank, why) for rank, why in enumerate(lacks) if why), (0, ""))
    if reason in ("", MISSING) or info.launcher != "elaunch":
        return reason
    return f"rank {rank} cannot reach its agent ({reason})"


def _counting(noted: Callable[[SavesRecord], None] | None) -> Callable[[Committed, float], None]:
    """Return what counts checkpoints for the run's record, where no agent keeps that."""
    newest: Committed | None = None
    commits = 0

    def count(done: Committed, seconds: float) -> None:
        nonlocal newest, commits
        newest, commits = newer(newest, done) or done, commits + 1
        if noted is not None:
            record: SavesRecord = {
                "step": newest.step,
                "committed_at": newest.committed,
                "seconds": round(seconds, 3),
                "saving": None,
                "problem": "",
                "commits": commits,
            }
            noted(record)

    return count
