"""The agent's state, how an event or an action changes it, and its words for reasons. Pure.

::

    STARTING ──ready──► MEETING ──plan: a round with this node──► RUNNING ──all exited──► SWEEPING
                         │  ▲                                        │ failure, signal       ▲ │
                         │  │                                        ▼                       │ │
        ENDED ◄──over────┘  │                                     STOPPING ──all exited──────┘ │
                            └───gone─────────────────────────────────────────────────────────◄─┤
                            └───settled── FLUSHING ◄──gone, saves in memory────────────────────┘
                         MEETING ──over, saves still in memory──► FLUSHING ──settled──► ENDED

STARTING: the server imports, and counts the devices where no number was given; the checkpoint
directory is looked at. This node joins the job as soon as the last two are known. MEETING: nothing
of a round is left here but the workers that stay, and the coordinator's plan says what comes
(elaunch.rendezvous): a round, from which checkpoint, after a backoff, or the end.
RUNNING: workers run. STOPPING: they were signalled, the grace runs. SWEEPING: what they left is
waited for (--wait-for-children) and ended. FLUSHING: checkpoints that the workers have left in the
agent's memory are written out, as far as the next round cannot load them from there.
ENDED: the agent leaves its loop.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import (
    Action,
    AskRestart,
    AwaitChildren,
    EndTree,
    Finish,
    KillServer,
    Meet,
    Notify,
    Refuse,
    RestartServer,
    Settle,
    StartRound,
    StopWorkers,
    TakeStacks,
)
from elaunch.checkpoint.records import Checkpoint
from elaunch.endings import exit_code, how_it_ended
from elaunch.errors import HangError, ServerError
from elaunch.rendezvous.plan import HeldShards, Plan, RestartRequest
from elaunch.rendezvous.text import accused
from elaunch.runs.record import SavesRecord
from elaunch.text import count, duration
from elaunch.wire.worker import Notice

LOST = "all workers ended with 0, but their last checkpoint was in memory only, and is lost"

START_S: Final = 600.0
"""Seconds for the server to import what it should; a cold network file system may take minutes."""


class Phase(enum.Enum):
    """Where the agent is; the module's docstring draws the ways between."""

    STARTING = "STARTING"
    MEETING = "MEETING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SWEEPING = "SWEEPING"
    FLUSHING = "FLUSHING"
    ENDED = "ENDED"


class Limits(Struct, frozen=True):
    """The settings on which this agent's decisions depend; times in seconds.

    ``nproc`` is 0 until the devices are counted, where no number was given. ``meets`` says that
    other nodes take part, or may; ``takes_stacks`` that workers can be asked what they are doing
    (--hang-timeout). ``checkpoint_root`` is this node's own directory, to which the path of a
    plan's checkpoint is relative (--checkpoint-local). ``start_timeout`` bounds STARTING.
    """

    nproc: int
    max_restarts: int = 0
    shutdown_timeout: float = 30.0
    sibling_grace: float = 5.0
    wait_for_children: float = 0.0
    forwarded: frozenset[signal.Signals] = frozenset()
    preempting: frozenset[signal.Signals] = frozenset()
    meets: bool = False
    takes_stacks: bool = False
    checkpoint_root: Path | None = None
    start_timeout: float = START_S


class State(Struct, frozen=True):
    """All that decisions depend on.

    Attributes:
        limits, phase, round: what the user asked for, where the agent is, in which round.
        alive, succeeded: local ranks of the workers that run, and of those that ended with 0.
        first: the worker whose failure ended the round; ``culprit``: what was known then of the
            rank to blame for it (elaunch.rendezvous.text.accused), "" if that is the same.
        later: the workers that failed by themselves after it.
        stopped: the workers that ended after they were asked to.
        interrupted: the first signal that ends the job; ``sigints``, ``sigterms`` count signals.
        server_lost: how the server ended, if it has.
        server_restarts: how often it was started again without a round.
        killing: the server was sent SIGKILL.
        waits: in SWEEPING: what the workers have left may still end by itself.
        restarts, without_progress: of the job: for life, and since a newer checkpoint was seen.
        checkpoint: what this round resumed from.
        began: when the round's first worker was started, in monotonic seconds.
        stands: the workers whose scripts can go on with a new group when a rank is lost.
        staying: those that were kept when the round ended, for the next one.
        survivable: workers on other nodes can go on without those that have ended here.
        goes_on: workers of the round before go on in this one, here or on other nodes.
        kept: those that have what they need from the round before, if it ``goes_on``, and in which
            round the process of each was started.
        silent: the kept ones that do not know of this round yet; ``entering``: those that do not
            take part in it yet.
        listens: the workers whose scripts ask should_preempt().
        notice: what they were sent, if anything; ``notified_in``: the phase in which it came.
        acked: the workers that reported that they end because of it.
        hang: the hang that ended the round; ``stacks``: what the workers were doing then.
        taking: the workers were asked for their stacks.
        saves: workers have checkpoints written by the agent, or the round resumes from one in its
            memory; ``settled``: what became of the last.
        finish: the decided end that waits for the disk; ``why``: its reason.
        restart: the newest request that a round end: asked here, or read in a plan.
        plan: the coordinator's newest; ``name``: this agent's among the members.
        member: the name under which this node is in ``round``; "": it is in none.
        first_rank: the rank of its first worker there.
        cut_off: this agent has no name at present.
        meeting_failed: why it can take part no more.
        probed, ready: of STARTING: the checkpoint directory, if any, can be used; the server can
            start workers.
    """

    limits: Limits
    phase: Phase = Phase.STARTING
    round: int = 0
    alive: frozenset[int] = frozenset()
    first: events.Exit | None = None
    culprit: str = ""
    later: tuple[events.Exit, ...] = ()
    stopped: tuple[events.Exit, ...] = ()
    succeeded: frozenset[int] = frozenset()
    interrupted: signal.Signals | None = None
    sigints: int = 0
    sigterms: int = 0
    server_lost: int | None = None
    server_restarts: int = 0
    killing: bool = False
    waits: bool = False
    restarts: int = 0
    without_progress: int = 0
    checkpoint: Checkpoint | None = None
    began: float | None = None
    stands: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()
    survivable: bool = False
    goes_on: bool = False
    kept: Mapping[int, int] = {}
    silent: frozenset[int] = frozenset()
    entering: frozenset[int] = frozenset()
    listens: frozenset[int] = frozenset()
    notice: Notice | None = None
    notified_in: Phase | None = None
    acked: frozenset[int] = frozenset()
    hang: events.HangSeen | None = None
    taking: bool = False
    stacks: events.StacksTaken | None = None
    saves: bool = False
    settled: events.SavesSettled | None = None
    finish: Finish | None = None
    why: str = ""
    restart: RestartRequest | None = None
    plan: Plan | None = None
    name: str = ""
    member: str = ""
    first_rank: int = 0
    cut_off: bool = False
    meeting_failed: events.MeetingFailed | None = None
    probed: bool = False
    ready: bool = False

    @property
    def can_join(self) -> bool:
        """Whether an agent in STARTING knows what it joins with: workers, and where they save."""
        return self.probed and self.limits.nproc > 0

    @property
    def lost_save(self) -> bool:
        """Whether all ended well and what they left in memory is not known to be on the disk."""
        written = self.settled is not None and not self.settled.lost
        return self.saves and self.completed and not written

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """Shards in this agent's memory, of saves that are not committed, as far as they count."""
        return () if self.settled is None else self.settled.held

    @property
    def failed(self) -> bool:
        """Whether this round has failed; a user's signal is not a failure."""
        return self.first is not None or self.server_lost is not None or self.hung

    @property
    def hung(self) -> bool:
        """Whether this round has ended by a hang; one whose workers are all done had none."""
        return self.hang is not None and not self.completed

    @property
    def reportable(self) -> bool:
        """Whether there are ends of workers that a failure report can be made of."""
        return self.first is not None or (self.hung and bool(self.later or self.stopped))

    @property
    def completed(self) -> bool:
        """Whether every worker has ended with 0 by itself; no signal can undo that.

        Newcomers to those that were kept have nothing to save where these were asked to end.
        """
        done = self.succeeded | self.new if self.acked else self.succeeded
        return bool(self.succeeded) and len(done) == self.limits.nproc

    @property
    def new(self) -> frozenset[int]:
        """The workers of this round that do not have yet what those have that were kept."""
        all_here = frozenset(range(self.limits.nproc))
        return all_here - self.kept.keys() if self.goes_on else frozenset()

    @property
    def preempted(self) -> bool:
        """Whether the workers have ended with 0 because they were asked to."""
        return self.completed and bool(self.acked)

    @property
    def asked_to_end(self) -> bool:
        """Whether this node's workers were asked to end, and none are to follow them here."""
        if self.notice is None:
            return False
        return self.notice.kind == "stop" or self.interrupted is not None

    @property
    def restarts_round(self) -> bool:
        """Whether the round of the newest plan ends, or is to end, because somebody has asked."""
        plan = self.plan
        return plan is not None and self.restart is not None and self.restart.round == plan.round

    @property
    def may_stay(self) -> frozenset[int] | None:
        """The living workers that can go on in the next round, now that one has failed.

        All must be able to, but for newcomers to those that were kept: they have nothing to lose,
        and one that ends by itself cannot join. None: nobody can, on any node.
        """
        ends = self.notice is not None or self.interrupted is not None or self.hang is not None
        ends = ends or self.restarts_round or self.limits.max_restarts == 0
        first, new = self.first, self.new
        unfit = first is not None and first.local_rank in new and first.exitcode > 0
        if ends or unfit or self.succeeded or not self.alive - new <= self.stands:
            return None
        found = self.alive & self.stands
        return found if found or self.limits.meets else None

    @property
    def left(self) -> frozenset[int]:
        """The kept workers whose scripts went on to something else before they took part."""
        return self.entering & (self.succeeded | (self.alive - self.stands))

    @property
    def strayed(self) -> bool:
        """Whether all ended with 0, and one of them though others wait for it in this round."""
        return self.completed and bool(self.left) and not self.acked

    @property
    def stay(self) -> frozenset[int]:
        """The workers that wait for the next round, while nothing else is left of this one."""
        return self.alive & self.staying

    def births(self, keeps: frozenset[int]) -> dict[int, int]:
        """Return in which round the processes of workers of this round were started."""
        return {local_rank: self.kept.get(local_rank, self.round) for local_rank in keeps}

    @property
    def asked_in_round(self) -> bool:
        """Whether they were asked while there was something of them to end."""
        return self.asked_to_end and self.notified_in is not Phase.FLUSHING


def observe(state: State, event: events.Event) -> State:
    """Return ``state`` with ``event`` written into it."""
    if isinstance(event, events.WorkerStarted):
        return replace(state, began=event.at if state.began is None else state.began)
    if isinstance(event, events.Exit):
        return _observe_exit(state, event)
    if isinstance(event, events.TreeGone):
        return replace(state, waits=False)
    if isinstance(event, events.SignalReceived):
        return _observe_signal(state, event)
    if isinstance(event, events.ServerLost):
        return replace(state, server_lost=event.exitcode, alive=frozenset(), ready=False)
    if isinstance(event, events.WorkerListens) and event.round == state.round:
        return replace(state, listens=state.listens | {event.local_rank})
    if isinstance(event, events.WorkerStands) and event.round == state.round:
        return _observe_stands(state, event)
    if isinstance(event, events.WorkerEnters) and event.round == state.round:
        done = frozenset({event.local_rank})
        entering = state.entering - done if event.done else state.entering
        return replace(state, silent=state.silent - done, entering=entering)
    if isinstance(event, events.PreemptAcked) and event.round == state.round:
        notice = state.notice or event.notice
        return replace(state, notice=notice, acked=state.acked | {event.local_rank})
    if isinstance(event, events.HangSeen | events.StacksTaken):
        return _observe_hang(state, event)
    if isinstance(event, events.SaverUsed) and event.round == state.round:
        return replace(state, saves=True)
    if isinstance(event, events.SavesSettled) and event.round == state.round:
        return replace(state, settled=event)
    if state.phase is Phase.STARTING:
        state = _observe_start(state, event)
    return _observe_news(state, event)


def _observe_stands(state: State, event: events.WorkerStands) -> State:
    others, local_rank = state.stands - {event.local_rank}, event.local_rank
    if not event.stands:
        return replace(state, stands=others)
    kept = {local_rank: state.round, **state.kept} if state.goes_on else {}
    return replace(state, stands=others | {local_rank}, kept=kept)


def _observe_start(state: State, event: events.Event) -> State:
    if isinstance(event, events.ServerReady):
        return replace(state, ready=event.problem is None and not event.unforkable)
    if isinstance(event, events.DirectoryProbed):
        return replace(state, probed=not event.problem)
    if isinstance(event, events.DevicesCounted):
        return replace(state, limits=replace(state.limits, nproc=event.count or 0))
    return state


def _observe_news(state: State, event: events.Event) -> State:
    if isinstance(event, events.PlanSeen):
        plan, asked = event.plan, state.restart
        if plan.cause == "asked" and plan.phase == "ending":
            asked = RestartRequest(plan.round, plan.reason)
        return replace(state, plan=plan, name=event.name, restart=asked)
    if isinstance(event, events.CutOff):
        return replace(state, cut_off=True)
    if isinstance(event, events.Rejoined):
        return replace(state, cut_off=False, name=event.name)
    if isinstance(event, events.MeetingFailed):
        return replace(state, meeting_failed=event)
    return state


def _observe_hang(state: State, event: events.HangSeen | events.StacksTaken) -> State:
    if event.round != state.round:
        return state
    if isinstance(event, events.StacksTaken):
        return replace(state, stacks=event) if state.taking else state
    ends_already = state.failed or state.interrupted is not None or state.asked_to_end
    if state.phase is not Phase.RUNNING or not state.alive or ends_already:
        return state
    return replace(state, hang=event)


def _observe_signal(state: State, event: events.SignalReceived) -> State:
    signum = event.signum
    if signum in state.limits.forwarded or signum in state.limits.preempting:
        return state
    return replace(
        state,
        interrupted=state.interrupted or signum,
        sigints=state.sigints + (signum is signal.SIGINT),
        sigterms=state.sigterms + (signum is signal.SIGTERM and event.notice is None),
    )


def _observe_exit(state: State, event: events.Exit) -> State:
    if event.round != state.round or event.local_rank not in state.alive:
        return state
    state = replace(state, alive=state.alive - {event.local_rank})
    # After a person's signal all ends are taken for its effect: many schedulers signal the
    # workers, too, and those that handle it end before the agent's own signal reaches them.
    signalled = state.interrupted is not None and state.notice is None
    # One that does not stay is ended with what the first to fail has left.
    dropped = bool(state.staying) and event.local_rank not in state.staying
    if event.stopped or (dropped and state.first) or (signalled and state.first is None):
        return replace(state, stopped=(*state.stopped, event))
    if event.exitcode == 0:
        return replace(state, succeeded=state.succeeded | {event.local_rank})
    if state.first is None and state.hang is None:
        return replace(state, first=event)
    return replace(state, later=(*state.later, event))


def follow(state: State, action: Action, reason: str = "") -> State:
    """Return the state in which ``action`` leaves the agent, decided for ``reason``."""
    if isinstance(action, StartRound):
        assert state.plan is not None  # it named the round
        return State(
            limits=state.limits,
            phase=Phase.RUNNING,
            round=action.round,
            alive=frozenset(range(state.limits.nproc)),
            restarts=state.plan.restarts,
            without_progress=state.plan.without_progress,
            checkpoint=action.checkpoint,
            saves=bool(action.checkpoint and action.checkpoint.uuid)
            or bool(action.keeps and state.saves),
            stands=state.stands & action.keeps,
            goes_on=state.plan.anew is not None,
            kept=state.births(action.keeps),
            silent=action.keeps,
            entering=action.keeps,
            listens=state.listens & action.keeps,
            plan=state.plan,
            name=state.name,
            member=state.name,
            first_rank=action.first_rank,
            restart=state.restart,
        )
    if isinstance(action, Notify):
        return replace(state, notice=action.notice, notified_in=state.phase)
    if isinstance(action, AskRestart):
        return replace(state, restart=action.request)
    if isinstance(action, TakeStacks):
        return replace(state, taking=True)
    if isinstance(action, RestartServer):
        return replace(state, server_lost=None, server_restarts=state.server_restarts + 1)
    if isinstance(action, AwaitChildren):
        return replace(state, phase=Phase.SWEEPING, waits=True)
    if isinstance(action, EndTree):
        staying = action.keeps or frozenset()
        dropped = not staying and bool(state.alive - state.new)
        survivable = action.keeps is not None and not dropped and not state.succeeded
        return replace(
            state, phase=Phase.SWEEPING, waits=False, staying=staying, survivable=survivable
        )
    if isinstance(action, KillServer):
        return replace(state, killing=True)
    if isinstance(action, Settle):
        return replace(state, phase=Phase.FLUSHING, finish=action.then, why=action.why)
    if isinstance(action, Finish):
        return replace(state, phase=Phase.ENDED, finish=action, why=reason)
    return replace(state, phase=_PHASES.get(type(action), state.phase))


_PHASES: Final = {
    Meet: Phase.MEETING,
    StopWorkers: Phase.STOPPING,
    Refuse: Phase.ENDED,
}


def is_unsettled(state: State) -> bool:
    """Return whether memory may hold saves that nobody writes out yet: no round is to load them."""
    if state.finish is not None or not state.saves:
        return False
    if state.phase in (Phase.MEETING, Phase.FLUSHING):
        return bool(state.held)
    return state.phase in (Phase.RUNNING, Phase.SWEEPING)


COMMITTING: Final = (Phase.RUNNING, Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING)


def refusal(state: State, round_number: int, uuid: str = "") -> str:
    """Return why ``round_number`` may not commit a checkpoint, as the agent's loop knows; or "".

    The save that the round has resumed from out of memory may be committed: ``uuid`` names it. In a
    job of one node nobody else decides; in one of several the store is asked instead
    (elaunch.agent.saver.commitrules).
    """
    if uuid and state.checkpoint is not None and state.checkpoint.uuid == uuid:
        return ""
    if state.round != round_number and not _goes_on(state, round_number):
        return f"the job is in round {state.round}"
    if state.phase not in COMMITTING and not state.stay:
        return "it is over, and the checkpoint of the next round is being chosen"
    return ""


def _goes_on(state: State, round_number: int) -> bool:
    """Whether the workers of this round have what those of that one had, and go on from there."""
    return min(state.kept.values(), default=state.round) <= round_number < state.round


# ── the phrases that reasons are made of ─────────────────────────────────────────────────────────


def failure(state: State) -> str:
    """Return what ended the round on this node."""
    if state.hang is not None and state.hung:
        return state.hang.reason
    if state.first is not None:
        return accused(state.culprit, state.first.text)
    return server_ended(state.server_lost or 0)


def failure_code(state: State) -> int:
    """Return the exit code of a run that this round's failure ends."""
    if state.hung:
        return HangError.exit_code
    return ServerError.exit_code if state.first is None else exit_code(state.first.exitcode)


def server_ended(exitcode: int) -> str:
    """Return how the server ended."""
    return f"the server that starts the workers {how_it_ended(exitcode)}"


def late_save(saves: SavesRecord | None, grace: float) -> str:
    """Return what to log if the last save took longer than ``grace``, which the next one has."""
    if saves is None or saves["seconds"] <= grace:
        return ""
    took, left = duration(saves["seconds"]), duration(grace)
    return f"the last save took {took} until its commit, and there are {left} for the next one"


def workers(number: int) -> str:
    """Return "1 worker" or "3 workers"."""
    return count(number, "worker")
