"""Publishes the status of this node in a job of several, and prints what failed elsewhere.

The loop shows it every turn. The status follows purely from the state after the turn
(elaunch.agent.policy.nodes.own_state), and is published when it has changed. The threads of the
Meeting send it, so the loop does not block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from elaunch.agent.failure.errorfile import write_launcher_file
from elaunch.agent.failure.report import render
from elaunch.agent.failure.verdict import FailureReport
from elaunch.agent.policy import events, nodes
from elaunch.agent.policy.state import Phase, State, failure
from elaunch.agent.policy.turn import Turn
from elaunch.endings import KILLED, PREEMPTED
from elaunch.errors import HangError, ServerError, SymmetryError
from elaunch.rendezvous import text as words
from elaunch.rendezvous.plan import (
    AgentState,
    NodeStatus,
    NodeTimes,
    Plan,
    Preempted,
    Survivors,
    WorkerFailure,
)
from elaunch.rendezvous.text import differences
from elaunch.runs.record import AwaitedRecord
from elaunch.text import block

if TYPE_CHECKING:
    from elaunch.rendezvous.coordinator import Standalone
    from elaunch.rendezvous.meeting import Meeting

MAX_TEXT = 4000
AT_REST: frozenset[AgentState] = frozenset(("joining", "ready", "ended", "finished"))
"""The states that an agent publishes while nothing of a round is left on its node."""
STALE_S = 300.0
"""Seconds after which this node's times are published anew, where nothing else is to be."""

log = logging.getLogger("elaunch")


class StatusPublisher:
    """Owns this agent's record among the members.

    Args:
        meeting: the way to the coordinator.
        first: the record before it is known how many workers this node has.
        show: prints lines on stderr.
        post: sends events to the loop.
        strict: --strict-symmetry.
        rests: gets whether nothing of a round is left here.
        port: binds the port of the next round's store, if it is not bound, and returns it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        meeting: Meeting | Standalone,
        first: NodeStatus,
        *,
        show: Callable[[str], None],
        post: Callable[[events.Event], None],
        strict: bool = False,
        rests: Callable[[bool], object] = bool,
        port: Callable[[], int] = int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meeting = meeting
        self._record = first
        self._show = show
        self._post = post
        self._strict = strict
        self._rests = rests
        self._port = port
        self._clock = clock
        self._joined = False
        self._text = self._signature = self._culprit = ""
        self._printed: tuple[int, str] | None = None
        self._logged: set[str] = set()
        self._times: Callable[[], NodeTimes | None] = lambda: None
        self._awaited: Callable[[], AwaitedRecord | None] = lambda: None

    def follow(
        self,
        times: Callable[[], NodeTimes | None],
        awaited: Callable[[], AwaitedRecord | None] = lambda: None,
    ) -> None:
        """Publish where the time of this node's slots went, and for which rank its ranks wait."""
        self._times, self._awaited = times, awaited

    def see(self, turn: Turn) -> None:
        """Log what a new plan has beside rounds."""
        if isinstance(turn.event, events.PlanSeen):
            self._log_plan(turn.event.plan, turn.event.name)

    def publish(self, turn: Turn) -> None:
        """Join as soon as it is known with what; then publish how this agent is, if that is new."""
        state = turn.after
        if not self._joined and (not state.can_join or state.phase is Phase.ENDED):
            return
        port = self._port()
        if not self._joined:
            self._joined = True
            self._record = replace(self._record, port=port, slots=state.limits.nproc)
            self._meeting.start(self._record)
        old = self._record
        own_state, round_number = nodes.own_state(state)
        self._rests(own_state in AT_REST)
        is_due = (own_state, round_number) != (old.state, old.round)
        is_due = is_due or isinstance(turn.event, events.RanksAsked)
        made = replace(
            old,
            state=own_state,
            round=round_number,
            port=port,
            failure=self._failure(state) if round_number == state.round else self._early(state),
            listens=bool(state.listens),
            preempted=_preempted(state),
            asks=_asks(state),
            restart=state.restart,
            held=state.held if own_state in AT_REST and state.finish is None else (),
            kept=tuple(sorted(state.stay)) if own_state in AT_REST else (),
            survivors=_survivors(state) if own_state in AT_REST else "",
            reason=_reason(state),
            exit_code=_own_code(state),
            times=self._times() if is_due else old.times,
            note=self._note(own_state) if is_due else old.note,
        )
        if _essentials(made) != _essentials(old) or _is_stale(old.times, made.times):
            self._record = made
            self._meeting.publish(made)

    def _note(self, own_state: AgentState) -> str:
        found = self._awaited() if own_state == "running" else None
        return "" if found is None else found["text"][:MAX_TEXT]

    def keep(self, report: FailureReport, signature: str) -> None:
        """Keep the cause of this node's failure as the text that other nodes will print."""
        self._text, self._signature = render(report)[:MAX_TEXT], signature
        self._culprit = report.accused

    def _failure(self, state: State) -> WorkerFailure | None:
        if state.strayed:
            rank = state.first_rank + min(state.left)
            made = self._made(rank, min(state.left), 0, 1, "", 0.0)
            return replace(made, summary=f"rank {rank} left its loop before it was in the round")
        if not state.failed:
            self._text = self._signature = self._culprit = ""
            return None
        first = state.first
        if state.hang is not None and state.hung:
            rank, age = state.hang.ranks[0], self._clock() - state.hang.at
            local_rank = rank - state.first_rank
            pid, code = state.hang.pid, HangError.exit_code
            made = self._made(rank, local_rank, pid, code, self._text, age)
            return replace(made, summary=state.hang.reason)
        if first is None:
            code, text = ServerError.exit_code, failure(state)
            return self._made(state.first_rank, -1, 0, code, text, 0.0)
        age = self._clock() - first.at
        rank, local_rank, pid, code = first.rank, first.local_rank, first.pid, first.exitcode
        made = self._made(rank, local_rank, pid, code, self._text, age)
        return replace(made, summary=self._culprit if self._text else state.culprit)

    def _early(self, state: State) -> WorkerFailure | None:
        """Return the end of a worker before the round began which was to keep it."""
        lost, plan = nodes.missing(state), state.plan
        if not lost or plan is None:
            return None
        local_rank = min(lost)
        ends = (one for one in (state.first, *state.later) if one is not None)
        end = next((one for one in ends if one.local_rank == local_rank), None)
        rank = nodes.place(plan, state.name).first_rank + local_rank
        if end is not None:
            age = self._clock() - end.at
            return self._made(rank, local_rank, end.pid, end.exitcode, "", age)
        summary = f"rank {rank} ended before round {plan.round} began"
        return replace(self._made(rank, local_rank, 0, 1, "", 0.0), summary=summary)

    def _made(
        self, rank: int, local_rank: int, pid: int, code: int, text: str, age: float
    ) -> WorkerFailure:
        return WorkerFailure(
            rank=rank,
            local_rank=local_rank,
            host=self._record.host,
            pid=pid,
            exitcode=code,
            text=text,
            age=max(0.0, age),
            signature=self._signature,
        )

    # ── printing what others have published ──────────────────────────────────────────────────────

    def failed_elsewhere(self, state: State) -> WorkerFailure | None:
        """Return the job's first failure if the plan has one and it is another node's."""
        plan = state.plan
        if plan is None or plan.failure is None or plan.failure.node == state.member:
            return None
        return plan.failure

    def print_failure(self, state: State) -> WorkerFailure | None:
        """Print another node's failure that ended the round, once; return it if it is news."""
        found = self.failed_elsewhere(state)
        if found is None or state.plan is None:
            return None
        if not found.text and state.plan.phase in ("ending", "forming"):
            return None  # its node has yet to gather what is known; the next plan has it
        mark = (found.pid, found.node)
        if mark == self._printed:
            return None
        self._printed = mark
        text = found.text.rstrip() or words.failure(found)
        self._show(f"the first failure of the job was on another node:\n{block(text)}\n")
        return found

    def _log_plan(self, plan: Plan, name: str) -> None:
        """Log what the plan has beside rounds: differing nodes, who is waited for, standing by."""
        lines = self._differences(plan, name)
        if plan.notice:
            lines.append(plan.notice)
        if name in plan.joining and plan.phase == "running":
            lines.append("the job runs already; this node takes part from its next round on")
        if plan.phase == "forming" and plan.reason:
            lines.append(f"waiting: {plan.reason}")
        if plan.waits and plan.phase != "over":
            lines.append(f"still {plan.waits}")
        if name in plan.spares:
            lines.append(words.standing_by(plan, self._record.host))
        news = [line for line in lines if line not in self._logged]
        self._logged.update(news)
        for line in news:
            log.warning("%s", line)

    def _differences(self, plan: Plan, name: str) -> list[str]:
        """Return how a newcomer differs from the job, if it does; the strict ones then end."""
        own = self._record
        if not plan.facts or plan.phase == "over" or plan.node_rank(name) is not None:
            return []
        differing = differences(
            [(f"the job ({plan.nodes[0].host})", plan.facts), ("here", own.facts)]
        )
        if differing and (plan.strict or self._strict):
            problem = f"{differing}; this node may not take part (--strict-symmetry)"
            self._post(events.MeetingFailed(SymmetryError.exit_code, problem))
            return []
        return [differing] if differing else []

    def write_launcher_file(self, found: WorkerFailure, environ: Mapping[str, str]) -> None:
        """Write the launcher's own error file from another node's failure."""
        code = found.exitcode or 1
        write_launcher_file(environ, code, None, words.failure(found), found.text)


def _preempted(state: State) -> Preempted:
    """Return why the workers, which have ended with 0, are not done."""
    return state.notice.kind if state.preempted and state.notice is not None else ""


def _survivors(state: State) -> Survivors:
    """Return whether workers can go on without those that have ended here, and what they do."""
    if not state.survivable:
        return ""
    failed = {one.local_rank for one in (state.first, *state.later) if one is not None}
    return "work" if failed <= state.new else "wait"


def _asks(state: State) -> str:
    """Return why somebody asks on this node that the whole job end, to be continued; or ""."""
    notice = state.notice
    return "" if notice is None or notice.kind != "stop" else notice.reason[:MAX_TEXT]


def _reason(state: State) -> str:
    if state.meeting_failed is not None:
        return state.meeting_failed.problem
    if state.notice is not None and not state.failed:
        return state.notice.reason
    if state.interrupted is not None:
        return f"stopped by {state.interrupted.name}"
    return state.why


def _own_code(state: State) -> int | None:
    """Return what this agent will end with, if it leaves the job."""
    if state.finish is not None and state.finish.exit_code:
        return state.finish.exit_code
    if state.meeting_failed is not None:
        return state.meeting_failed.exit_code
    if state.preempted and state.asked_to_end:
        return PREEMPTED
    if state.notice is not None and state.asked_to_end and state.interrupted is None:
        return KILLED if state.stopped else PREEMPTED
    return None if state.interrupted is None else 128 + state.interrupted


def _essentials(record: NodeStatus) -> NodeStatus:
    """Return what of a record is published anew when it has changed."""
    found = None if record.failure is None else replace(record.failure, age=0.0)
    return replace(record, failure=found, reason="", exit_code=None, times=None)


def _is_stale(old: NodeTimes | None, new: NodeTimes | None) -> bool:
    """Whether another rank is slow since, or the old times are of long ago."""
    if old is None or new is None:
        return False
    slow = [None if one.late is None else one.late.rank for one in (old, new)]
    since = new.wall_s - old.wall_s
    return slow[0] != slow[1] or old.reports != new.reports or since >= min(STALE_S, old.wall_s)
