"""The context of each call of ``ctx.checkpoint``, and one save as a script requests it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Keep
from elaunch.checkpoint.retention import Retiring
from elaunch.errors import ContextError
from elaunch.training import liveness
from elaunch.training.distributed import checked_timeout
from elaunch.wire.worker import MARGIN_S

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.storage import Committed, Stage, Storage
    from elaunch.errors import SaveError
    from elaunch.training.checkpoint.saver import AgentSaverClient
    from elaunch.training.distributed import DistributedContext
    from elaunch.training.train import TrainContext
    from elaunch.wire.progress import ProgressPage

SECTION: Final = "checkpoint"
"""The section of this rank in ``elaunch status`` during every call."""
MISSING: Final = "ranks on other nodes are missing"
"""Then agents do not know the numbers by which those that are left save."""
LOADS: Final = frozenset({"load", "latest", "get_metadata", "restore_path"})
"""Calls of ctx.checkpoint whose time counts as loading; that of the others counts as saving."""


@dataclass
class KnownCheckpoints:
    """Which checkpoints this rank knows of.

    Attributes:
        asked: whether ``resumed`` is known.
        resumed: the one that the round began with.
        newest: the newest that was committed since, or was read in place of one that is gone; like
            ``resumed`` it changes in calls of all ranks only, so it is the same on all of them.
        own: the newest that this rank has committed without the others.
        whole: uuids of those that were verified, or written by this job.
        damaged: uuids of those of which a rank has read what does not fit the manifests.
        unrecalled: uuids of those that could not be had from memory: it is logged once.
        read_only: why nothing can be saved here: the directory is another job's.
        problem: why this rank does not find what the round resumed from.
        staged: paths that the script was given to write to, until it commits them.
        pending: what the round resumes from, while it may be in the agents' memory only.
        loads: whether the script has called ``load`` for the latest.
    """

    asked: bool = False
    resumed: Committed | None = None
    newest: Committed | None = None
    own: Committed | None = None
    read_only: SaveError | None = None
    problem: Exception | None = None
    whole: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    unrecalled: set[str] = field(default_factory=set)
    staged: dict[str, Stage] = field(default_factory=dict)
    pending: Committed | None = None
    loads: bool = False

    def note(self, committed: Committed) -> None:
        """Note what all ranks have committed together; it is the newest unless one is newer."""
        self.whole.add(committed.uuid)
        self.newest = newer(self.newest, committed)

    def note_own(self, committed: Committed) -> None:
        """Note what this rank has committed alone; the others learn of it by the next restore."""
        self.whole.add(committed.uuid)
        self.own = newer(self.own, committed)

    def choose(self, chosen: Committed | None) -> None:
        """Note which checkpoint all ranks read as the latest; known newer ones are gone."""
        self.asked, self.problem = True, None
        self.resumed = _not_newer(self.resumed, chosen)
        self.newest = _not_newer(self.newest, chosen)
        self.own = _not_newer(self.own, chosen)
        if chosen is None:
            return
        self.whole.add(chosen.uuid)
        if self.resumed is None or self.resumed.place != chosen.place:
            self.newest = chosen

    def latest(self) -> Committed | None:
        """Return the newest that all ranks know of."""
        return newer(self.resumed, self.newest)

    def protected(self) -> frozenset[str]:
        """Return the names that retention leaves alone."""
        # What the round resumed from is needed until there is a newer one; so is what this rank has
        # committed alone.
        resumed = self.resumed if self.newest is None else None
        own = self.own if newer(self.own, self.latest()) is self.own else None
        known = (resumed, self.newest, own)
        return frozenset(found.name for found in known if found is not None)


@dataclass(frozen=True)
class CallContext:
    """All that a call of ``ctx.checkpoint`` works with.

    All fields but ``storage``, ``saver`` and ``count`` are the same on all ranks.

    Attributes:
        distributed: the ranks; ``distributed.timeout`` is the default of every timeout.
        storage: the directory or URL, as this node sees it.
        saver: this rank's connection to its agent, which writes what was staged and knows whether
            the round is still on; None where no agent can be reached.
        foreground: why ``save(block=False)`` blocks: some rank has no agent, or others are MISSING;
            else "".
        count: notes a checkpoint that the ranks have committed, and the seconds that it took, in
            the run's record.
        run_id: of the run; it stands in every checkpoint.
        reads: the run whose checkpoints count when the latest is looked for; None: any run's,
            where nobody has chosen an id.
        round: of the names of the checkpoints that are written now.
        local: each node has a directory of its own (``--checkpoint-local``).
        retiring: removes what may go after a commit; knows the rule of the flags.
        train: what is flushed before a commit; knows the metrics of a step.
        page: progress page of this rank, for sections.
        agent: this process has an agent, which then holds the directory's lock and looks after
            what is left in stages.
        known: what this context knows of checkpoints, the one thing here that changes.
    """

    distributed: DistributedContext
    storage: Storage
    saver: AgentSaverClient | None
    foreground: str
    count: Callable[[Committed, float], None]
    run_id: str
    reads: str | None
    round: int
    local: bool
    retiring: Retiring
    train: TrainContext
    page: ProgressPage
    agent: bool
    known: KnownCheckpoints = field(default_factory=KnownCheckpoints)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.distributed.rank

    @property
    def is_node_chief(self) -> bool:
        """Whether this rank acts for its node where each has a directory of its own."""
        return self.distributed.local_rank == 0

    @property
    def acts(self) -> bool:
        """Whether this rank acts for a directory: rank 0; each chief where each node has one."""
        return self.rank == 0 or (self.local and self.is_node_chief)

    def seconds(self, timeout: float | None) -> float:
        """Return the seconds that one wait for the other ranks may take."""
        return self.distributed.timeout if timeout is None else checked_timeout(timeout)

    def awaiting(self, seconds: float) -> AbstractContextManager[None]:
        """Return the section of a wait for this job's own save in flight: ``awaiting``."""
        return awaiting(self.page, seconds)


def awaiting(page: ProgressPage, seconds: float) -> AbstractContextManager[None]:
    """Return the section of a wait for the saver that ends by itself after ``seconds``.

    However short --hang-timeout is, it is no hang until then.
    """
    return liveness.section(page, SECTION, seconds + 2 * MARGIN_S, "save")


def newer(one: Committed | None, other: Committed | None) -> Committed | None:
    """Return the newer of two checkpoints; the second if they are equal."""
    if one is None or other is None:
        return one or other
    return other if other.age >= one.age else one


def _not_newer(known: Committed | None, chosen: Committed | None) -> Committed | None:
    if known is None or chosen is None or known.age > chosen.age:
        return None
    return known


@dataclass(frozen=True)
class SaveRequest:
    """One save, as the script asked for it; the same on all ranks but for ``metadata``.

    Attributes:
        step: steps completed; the checkpoint's number.
        metadata: this rank's own; those of all ranks are merged.
        given: which checkpoints may go after the commit, as the script gave it.
        timeout: seconds that each wait for the other ranks may take; None: the context's.
        what: the call, for errors.
        size: bytes that this rank is about to write, as far as it knows; for errors.
        choose: returns, on rank 0, the steps to the next save, which all ranks are to know.
        when_busy: while a save is in flight: "wait" for it, or "skip" this one.
    """

    step: int
    metadata: Any
    given: Keep | None = None
    timeout: float | None = None
    what: str = "save"
    size: int = 0
    choose: Callable[[], int] | None = None
    when_busy: str = "wait"

    @property
    def keep(self) -> Keep | None:
        """Which checkpoints may go after the commit; None: the rule of the flags.

        Raises ContextError for what is no rule.
        """
        if self.given is None or isinstance(self.given, Keep):
            return self.given
        raise ContextError(f"keep={self.given!r}: write keep=elaunch.Keep(last={self.given!r})")


def as_given(metadata: Any, keep: Keep | None, timeout: float | None) -> SaveRequest:
    """Return what store_path is asked for; it is checked in the first step of all ranks."""
    step = metadata.get(layout.STEPS_COMPLETED) if isinstance(metadata, Mapping) else None
    number = step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else 0
    return SaveRequest(number, metadata, keep, timeout, "store_path")


def at_step(
    step: int,
    metadata: Mapping[str, Any] | None,
    keep: Keep | None,
    timeout: float | None,
    what: str,
) -> SaveRequest:
    """Return what the script asks for in a call that gets the step apart from the metadata."""
    return SaveRequest(step, metadata_of(step, metadata), keep, timeout, what)


def metadata_of(step: int, metadata: Any) -> Any:
    """Return user metadata with its step, for calls that get the step apart.

    A ``steps_completed`` of the user's own stays, so that it is compared; so does what is no dict.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        return metadata
    return {layout.STEPS_COMPLETED: step, **(metadata or {})}
