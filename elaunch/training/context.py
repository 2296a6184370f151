"""``elaunch.init()``: one context per script and process, made of its parts.

==================  ===========================================================================
part                what it is for
==================  ===========================================================================
``ctx.info``        what the launcher set: run, round, nodes, what to resume from
``ctx.distributed`` ranks, and calls that all of them make together (allgather, broadcast …)
``ctx.preempt``     whether to save and to end now, the same on all ranks; without an agent, SIGUSR1
                    to any rank asks for it
``ctx.train``       metrics, progress, status
``ctx.checkpoint``  what is saved, kept and resumed from
``ctx.heartbeat``   reports that this rank makes progress; so does every other call
``ctx.section``     reports that it is in a part that takes its own time (evaluation, saving)
==================  ===========================================================================

The same script runs under ``elaunch run``, torchrun, ``mpirun``/``srun`` and alone. An agent keeps
the run's record; where there is none the script does, so that ``elaunch status`` shows it.
Names follow Determined's Core API where it has one.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from elaunch.env import AGENT_SOCKET, RUN_ID_GIVEN
from elaunch.errors import ContextError, ElaunchError
from elaunch.training import liveness
from elaunch.training.agentlink import AgentLink
from elaunch.training.checkpoint import latest
from elaunch.training.distributed import DistributedContext, leave_to_the_end
from elaunch.training.launch import Info, Placement, current, info
from elaunch.training.metrics.files import FROM_NOTHING, GOES_ON
from elaunch.training.preempt.preempt import PreemptContext
from elaunch.training.steps.world import StepsWorld
from elaunch.training.train import TrainContext
from elaunch.wire import recorder
from elaunch.wire.progress import ProgressPage

if TYPE_CHECKING:
    from elaunch.runs.record import SavesRecord
    from elaunch.training.checkpoint.context import CheckpointContext

log = logging.getLogger("elaunch")

_current: Context | None = None


def init(
    *,
    distributed: DistributedContext | None = None,
    name: str | None = None,
    timeout: float = 600.0,
    chief_only: bool = False,
    tensorboard: bool | str | Path | None = None,
    announce: bool = True,
) -> Context:
    """Open the script's context; every rank calls it, and all of them together.

    Use it as ``with elaunch.init() as ctx:``, or call ``ctx.close()``; at exit it closes itself. It
    blocks until all ranks have come. It needs no process group of torch and makes none.

    Args:
        distributed: ranks and sizes; by default those of the launcher that started the script.
        name: of the run in ``elaunch status``; by default the script's. Under ``elaunch run`` the
            name that each node's first rank gives counts; ``--name`` wins over it.
        timeout: seconds that a call of all ranks waits for the others, ``init()`` included;
            each call may be given another.
        chief_only: refuse metrics from other ranks than 0, as Determined's docs ask for.
        tensorboard: write the metrics for TensorBoard as well: True (beside the metrics) or a
            directory.
        announce: have rank 0 print one line on stderr, in round 0, that says where the run is.

    Raises:
        ContextError: a context is open already; or the name cannot be printed on one line.
        PlacementError: the launcher's variables are incomplete or contradict each other.
        CollectiveTimeout: not all ranks came in time; names those that are missing.
    """
    global _current
    if _current is not None and _current.is_open:
        raise ContextError(
            "elaunch.init() was called before, and its context is open: close it first, or use the "
            "one that is there"
        )
    _check_name(name)
    placed = distributed or DistributedContext.of(current(os.environ))
    options = _Options(name, timeout, chief_only, tensorboard, announce)
    _current = Context(placed, options)
    return _current


class _Options(NamedTuple):
    """The arguments of init(), beside the ranks."""

    name: str | None
    timeout: float
    chief_only: bool
    tensorboard: bool | str | Path | None
    announce: bool


class Context:
    """A script's context; made by :func:`init`, which documents it.

    Attributes:
        info: what the launcher set for this process (:class:`elaunch.Info`).
        distributed: ranks, and calls of all of them (:class:`elaunch.DistributedContext`).
        preempt: whether to save and to end now.
        train: metrics, progress, status.
        checkpoint: what is saved and resumed from; opens its directory when it is first used.
        directory: where the run keeps its record and metrics on this node.
    """

    info: Info
    distributed: DistributedContext
    preempt: PreemptContext
    train: TrainContext
    directory: Path

    def __init__(self, distributed: DistributedContext, options: _Options) -> None:
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._stack = ExitStack()
        self._checkpoint: CheckpointContext | None = None
        self._run_id = ("", False)
        self._note_saves: Callable[[SavesRecord], None] | None = None
        self.distributed = distributed
        self.info = info()
        try:
            self._open(options)
        except BaseException as error:
            self._error = error
            _beside(error, self._stack.close)
            raise
        self.is_open = True
        self._watch_for_the_end()
        if options.announce and distributed.rank == 0 and not self.info.round:
            where = self.directory.name
            print(
                f"elaunch: run {where}: `elaunch status {where}`, {self.directory}", file=sys.stderr
            )

    def _open(self, options: _Options) -> None:
        placement = self.distributed.placement
        self._page = ProgressPage()
        self._stack.callback(self._page.close)
        self._agent = link = self._link(options.name if placement.local_rank == 0 else None)
        self._stack.callback(self._leave)
        self._world = StepsWorld(self.distributed, link, self._move)
        self._timeout = options.timeout
        joins = self._world.joins
        if joins:
            self.distributed.stand_by()
        else:
            self.distributed.open(self._page, options.timeout)
        self.directory = self._own_directory(options)
        resumed = GOES_ON if joins else None
        if not joins and self.info.checkpoint_dir is not None and self.info.launcher == "elaunch":
            # elaunch has looked for checkpoints: without one the script begins anew.
            step = self.info.resume_step
            begins = self.info.resume_from is None or self.info.is_warm_start
            resumed = FROM_NOTHING if begins else step
        self.train = TrainContext(
            placement, self._page, self.directory, resumed, options.chief_only, options.tensorboard
        )
        self._stack.callback(self.train.close)
        self.preempt = PreemptContext(self.distributed, self._page, link)
        self._stack.callback(self.preempt.close)
        self._stack.callback(self._leave_world)
        if not joins:
            self.preempt.start()
        self.train.attach((self._world, self.preempt, lambda: self.checkpoint))
        if link is not None:
            link.on_notice = self.preempt.on_notice
            link.start()
        elif _is_free(signal.SIGUSR1):
            self.preempt.on_signal(signal.SIGUSR1)
        self._decided = None
        if not joins:
            self._decided = latest.decide(self.distributed, self.info, *self._run_id, link)
        self._world.own_calls(begin=False)
        liveness.register_stacks(os.environ)
        recorder.watch(os.environ)
        self._page.ready()
        self._page.beat()

    def _move(self, placement: Placement, calls: int) -> None:
        """Have all parts stand among the ranks of ``placement``; ALL of them call it together.

        ``calls``: how often each of them has asked should_preempt() by now.
        """
        self.info = info()
        self.distributed.move(placement)
        self._world.check()
        self.distributed.open(self._page, self._timeout)
        self.train.move(placement)
        self.preempt.move(calls)
        if self._checkpoint is not None:
            self._checkpoint.move(self.info)

    def _close_checkpoint(self, checkpoint: CheckpointContext) -> None:
        try:
            checkpoint.close(patient=self._error is None)
        except ElaunchError as error:
            if self._error is None:
                self._error = error
                raise
            log.error("%s", error)  # the script's own error is what it ends with

    def _leave(self) -> None:
        """Let the other ranks go on alone; after an error only the end of the process does.

        A rank that waits for this one sees by that that it is lost. If it saw that earlier, it
        might end before this process has, and would be taken for the cause.
        """
        if self._error is None:
            self.distributed.close()
        else:
            leave_to_the_end(self.distributed)

    def _leave_world(self) -> None:
        if self._error is None:
            self._world.leave()
        self._world.close()

    def _link(self, name: str | None) -> AgentLink | None:
        """Return the link to this node's agent; ranks that the script itself placed share one."""
        path = os.environ.get(AGENT_SOCKET)
        placement = self.distributed.placement
        if not path or (placement.launcher != "elaunch" and placement.local_rank != 0):
            return None
        link = AgentLink(Path(path), self._page, placement, name)
        self._stack.callback(link.close)
        return link

    def _own_directory(self, options: _Options) -> Path:
        path = os.environ.get(AGENT_SOCKET)
        if path:
            self._run_id = (self.info.run_id, os.environ.get(RUN_ID_GIVEN) == "1")
            return Path(path).parent
        from elaunch.training.tracking import Tracking  # an agent's workers do without

        tracking = Tracking(self.distributed, options.name)
        tracking.start()
        self._stack.callback(lambda: tracking.end(self._error))
        self._run_id = (tracking.run_id, tracking.run_id_given)
        self._note_saves = tracking.note_saves
        return tracking.directory

    @property
    def checkpoint(self) -> CheckpointContext:
        """This script's checkpoints."""
        if self._checkpoint is None:
            from elaunch.training.checkpoint.context import CheckpointContext  # only if used
            from elaunch.training.checkpoint.session import CheckpointSession

            run_id, given = self._run_id
            self._checkpoint = CheckpointContext(
                CheckpointSession(
                    self.info,
                    self.distributed,
                    self.train,
                    self._page,
                    run_id,
                    given,
                    self._note_saves,
                    self._agent,
                    self._decided,
                    self.directory,
                )
            )
            self._stack.callback(self._close_checkpoint, self._checkpoint)
        return self._checkpoint

    # ── liveness ─────────────────────────────────────────────────────────────────────────────────

    def heartbeat(self) -> None:
        """Report that this rank makes progress; any rank may, alone. It does not block."""
        self._page.beat()

    def section(self, name: str, timeout: float | None = None) -> AbstractContextManager[None]:
        """Report that this rank is in a part of the script that takes longer than a step.

        Any rank may, alone; it does not block. Sections nest. With ``--hang-timeout`` the agent
        judges a rank in a section by ``timeout``, in seconds from its beginning, and without one by
        ten times the flag's value.

        Raises:
            ContextError: ``name`` is empty, or ``timeout`` is not more than 0.
        """
        return liveness.section(self._page, name, timeout)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close the context: write what is queued, detach. Each rank by itself; idempotent.

        It blocks until metrics are written, 10 s at most, and saves in flight are committed, 30
        minutes at most; after an exception it does not wait for saves. Metrics that could not be
        written are counted in a warning.

        Raises:
            SaveError: a save in flight came to nothing.
        """
        if not self.is_open or os.getpid() != self._pid:
            return  # a forked process has no part in it
        self.is_open = False
        atexit.unregister(self.close)
        if sys.excepthook is self._excepthook:  # somebody else's may have come on top of it
            sys.excepthook = self._shown
        self._stack.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or _is_plain_exit(error):
            self.close()
            return
        self._fail(error)
        _beside(error, self.close)

    def _watch_for_the_end(self) -> None:
        """Close at exit, and know then whether an exception ended the script."""
        atexit.register(self.close)
        self._shown = sys.excepthook
        self._excepthook: Callable[..., object] = self._note
        sys.excepthook = self._excepthook

    def _note(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._fail(error)
        recorder.leave(error)
        self._shown(kind, error, traceback)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._world.stand(False)
        self.train.note_step(error)


def _beside(error: BaseException, end: Callable[[], None]) -> None:
    """Call ``end``; what it raises is logged, since the script ends with ``error``."""
    try:
        end()
    except Exception as problem:
        log.error("after %s: %s: %s", type(error).__name__, type(problem).__name__, problem)


def _check_name(name: object) -> None:
    if name is None or (isinstance(name, str) and name.strip() and name.isprintable()):
        return
    raise ContextError(f"init(name={name!r}): give a text of one line, or None for the script's")


def _is_free(signum: signal.Signals) -> bool:
    """Whether the signal would end this process, and a handler can be set."""
    default = signal.getsignal(signum) is signal.SIG_DFL
    return default and threading.current_thread() is threading.main_thread()


def _is_plain_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)
