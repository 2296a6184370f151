"""The options of ``save``, and the handle that ``save(block=False)`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from elaunch.errors import SaveError
from elaunch.training.checkpoint.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import NotRequired

    from elaunch.checkpoint.records import Committed, Stage
    from elaunch.checkpoint.retention.delete import Keep
    from elaunch.training.checkpoint.callcontext import CallContext
    from elaunch.training.checkpoint.saver.agent import AgentSaverClient
    from elaunch.training.checkpoint.saver.schedule import Every

Busy = Literal["wait", "skip"]

LONGER_S: Final = 10.0
"""Seconds that the ranks wait longer for each other than for a save in flight."""


class SaveOptions(TypedDict, total=False):
    """Options of ``ctx.checkpoint.save``, whatever it returns."""

    metadata: Mapping[str, Any] | None
    keep: Keep | int | None
    when_busy: Busy
    timeout: float | None


class Blocking(SaveOptions, total=False):
    """Options with which it returns when the checkpoint is committed."""

    block: Literal[True] | None
    every: None


class Scheduled(SaveOptions):
    """Options with which it saves some steps only."""

    block: NotRequired[bool | None]
    every: Every


class Background(SaveOptions):
    """Options with which it returns before the commit."""

    block: Literal[False]
    every: NotRequired[Every | None]


class Either(SaveOptions, total=False):
    """Options of which only the run shows when it returns."""

    block: bool | None
    every: Every | None


def await_saver(
    call: CallContext,
    saver: AgentSaverClient,
    timeout: float | None,
    check: Callable[[], None] = lambda: None,
) -> Committed | None:
    """Return what rank 0's last save has become, when no rank has one in flight any more.

    ALL ranks call it together; each calls ``check`` first. With a ``timeout`` a save that takes
    longer is a SaveError; without one the agents say when the storage takes nothing of it any more.
    """
    seconds = call.seconds(timeout)
    while True:
        with (
            call.awaiting(seconds),
            together(call.distributed, "wait", seconds + LONGER_S) as step,
        ):
            check()
            step.sent = _waited(saver, seconds, patient=timeout is None)
        if all(over for over, _ in step.received):
            committed: Committed | None = step.received[0][1]
            return committed


def _waited(
    saver: AgentSaverClient, seconds: float, *, patient: bool
) -> tuple[bool, Committed | None]:
    """Return whether this rank's save is over, and what it has become."""
    from elaunch.training.checkpoint.saver.agent import StillInFlight

    try:
        return True, saver.wait(seconds)
    except StillInFlight:
        if not patient:
            raise
        return False, None


class SaveHandle:
    """One ``save(block=False)``, and what has become of it.

    Attributes:
        step: the number of steps done that it saves.
        skipped: nothing is saved: another save was in flight, and ``when_busy`` was ``skip``; or
            the step was not due, as ``every`` has it.
    """

    def __init__(self, step: int, committed: Committed | None = None) -> None:
        self.step = step
        self.skipped = committed is None
        self._committed = committed
        self._problem: SaveError | None = None

    def done(self) -> bool:
        """Return whether the save is over; any rank may ask, alone. It does not block.

        On nodes other than rank 0's it is done when the node's own shards are on the disk.
        """
        return True

    def replicated(self) -> bool:
        """Return whether this rank's shard is in the memory of another node, too.

        Any rank may ask, alone; it does not block. The shard is sent there
        (``--checkpoint-replicas 1``) after ``save`` has returned: until it has come, or the save is
        committed, the loss of this node costs the step.
        """
        return False

    def result(self, timeout: float | None = None) -> Committed | None:
        """Return what was committed, when it is; None if the save was skipped.

        ALL ranks call it together. It blocks until the save is over, at most ``timeout`` seconds;
        None: as long as the storage takes something of it.

        Raises SaveError on all ranks, each time: the save came to nothing, or is not over yet, and
        goes on.
        """
        del timeout
        if self._problem is not None:
            raise self._problem
        return self._committed


class SaveInFlight(SaveHandle):
    """A save that the agents have in flight, until :meth:`settle` ends that, on all ranks alike.

    The next save or ``wait()`` settles it, or :meth:`result`, whichever all ranks call first.
    """

    def __init__(self, call: CallContext, saver: AgentSaverClient, stage: Stage) -> None:
        super().__init__(stage.step)
        self.skipped = self.is_settled = False
        self._call = call
        self._saver = saver
        self._stage = stage
        self._lost: SaveError | None = None

    def done(self) -> bool:
        """Return whether this rank's agent has nothing of it in flight any more."""
        from elaunch.training.checkpoint.saver.agent import StillInFlight

        if not self.is_settled and self._lost is None:
            try:
                self._saver.wait(0.0)
            except StillInFlight:
                return False
            except SaveError as error:
                if not error.lost:
                    raise
                self._lost = error  # the agent sends it once; the next call of all ranks raises it
        return True

    def replicated(self) -> bool:
        """Return whether another node has this rank's shard, as far as this one's agent knows."""
        self.done()
        return self._saver.replicated == self._stage.uuid

    def result(self, timeout: float | None = None) -> Committed | None:
        """Wait until it is committed, on all ranks."""
        if self.is_settled:
            return super().result()
        try:
            committed = await_saver(self._call, self._saver, timeout, self.raise_if_lost)
        except SaveError as error:
            if error.lost:
                self.settle(None, error)
            raise
        self.settle(committed)
        return super().result()

    def raise_if_lost(self) -> None:
        """Raise the SaveError of a save that this rank knows to have come to nothing."""
        if self._lost is not None:
            raise self._lost

    def settle(self, committed: Committed | None, problem: SaveError | None = None) -> None:
        """Note what has become of it, the same on all ranks: ``committed`` is rank 0's."""
        if self.is_settled:
            return
        self.is_settled, self._problem = True, problem
        if problem is not None:
            return
        if committed is None or committed.uuid != self._stage.uuid:
            text = f"checkpoint {self._stage.final}: its agent does not know what has become of it"
            self._problem = SaveError(text)
            return
        self._committed = committed
        self._call.known.note(committed)
