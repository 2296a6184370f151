"""Makes a round's failure report at the two moments when its parts are at hand.

What the dead workers left (last lines, error files) is kept before the next round reuses the log
pump (:meth:`Reporter.see`); the report is made, shown and written after that round was started,
since it can wait and the workers cannot (:meth:`Reporter.report_on`). It shows one traceback: the
log pump keeps the others from the console. torchrun's table is shown at the end of the job, with
--torchrun-report. In a job of several nodes the cause is shown as soon
as the plan says whose failure was the first. What is written is completed when the next round
begins, since then it is known what that resumes from.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from msgspec.structs import replace

from elaunch import proc
from elaunch.agent.failure import explain, report, verdict
from elaunch.agent.failure.evidence import Evidence, Failure, Hang
from elaunch.agent.failure.verdict import FailureReport
from elaunch.agent.hangs.scene import NOT_ASKED, LastLook, Scene
from elaunch.agent.logs.pump import LogPump
from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.patience import bounded
from elaunch.agent.policy import events, nodes
from elaunch.agent.policy.actions import Finish, Meet, StartRound
from elaunch.agent.policy.state import Phase, State
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.status.record import StatusRecord, wall_time
from elaunch.agent.workers.group import WorkerGroup
from elaunch.config import Settings
from elaunch.config.command import CALLER
from elaunch.endings import Exit
from elaunch.runs.directory import RunDir
from elaunch.runs.record import ProgressRecord, steps
from elaunch.runs.statedir import replace_file

TAIL_LINES = 400
SETTLE_S = 0.5
"""Seconds for what other nodes answer, before the report is made."""

log = logging.getLogger("elaunch")


class Reporter:
    """Collects what is known of a failing round; the agent's loop calls.

    ``publisher`` has what other nodes' agents report, ``progress`` how far the workers are;
    ``look`` asks the others what they do when the first of a round has failed (scene.look).
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: RunDir,
        pump: LogPump,
        *,
        group: WorkerGroup,
        status_record: StatusRecord,
        publisher: StatusPublisher,
        progress: Callable[[], ProgressRecord | None] = lambda: None,
        look: Callable[[Exit, bool, bool], LastLook | None],
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._pump = pump
        self._group = group
        self._status_record = status_record
        self._publisher = publisher
        self._progress = progress
        self._at_step: int | None = None
        self._look = look
        self._looked: LastLook | None = None
        self._first: Failure | None = None
        self._made: FailureReport | None = None
        self._shown = False
        self._noticed: float | None = None
        self._ended: frozenset[int] = frozenset()
        self._oom_kills = proc.oom_kill_count()
        self._oom = False
        self._shm_free: int | None = None
        self._kept: tuple[Failure, ...] = ()

    def see(self, turn: Turn) -> None:
        """Take down what cannot be seen any more when the turn's action is done.

        What cannot be seen once the others of a failed round are signalled is :meth:`look`'s.
        """
        state, event = turn.before, turn.event
        if event == state.hang:
            self._looked = None
            self._notice(state)
        elif isinstance(event, events.StacksTaken) and event == state.stacks and not state.hang:
            self._show_stacks(event)
        if state.phase is Phase.RUNNING and turn.after.phase is not Phase.RUNNING:
            self._pump.withhold()
        if turn.begun is not None and self._made is None:
            self._keep(state)

    def look(self, state: State) -> None:
        """Look at the others when the first has failed, before they are signalled."""
        assert state.first is not None  # its caller has looked
        self._pump.withhold()
        self._notice(state)
        self._looked, lost, is_victim, self._first = None, False, False, None
        if state.limits.meets or state.first.exitcode in explain.TEXT_COUNTS:
            found = self._make(state, (self._left(state.first, False),))
            self._first = replace(found.first, error_file=None)
            is_victim = self._first.explanation.victim
            # What it has lost may be a rank of another node.
            lost = state.limits.meets and found.code in verdict.CLOSED
        stay = bool(state.may_stay)  # they go on, and wait for the agent
        if state.phase is Phase.RUNNING and (state.alive or lost) and not stay:
            self._looked = self._look(state.first, lost, is_victim)

    def accuse(self, state: State) -> str:
        """Return what is known then of the culprit (FailureReport.accused)."""
        assert state.first is not None  # as for look()
        scene = self._scene(0.0)
        first = self._first or self._left(state.first, False)
        return self._make(state, (first, *self._leaving(state, scene)), scene).accused

    def _scene(self, patience: float) -> Scene:
        return NOT_ASKED if self._looked is None else self._looked.described(patience)

    def report_on(self, turn: Turn) -> None:
        """Report why a round has failed, here or on another node, once that is known."""
        state = turn.before
        final = isinstance(turn.action, Finish)
        meets = state.limits.meets
        due = meets or self._settings.max_same_failures or state.culprit
        if isinstance(turn.action, Meet) and not due:
            return  # the next round does not wait for the report of this one
        if isinstance(turn.action, StartRound | Finish | Meet):
            self._report(state, turn.begun)
            self._show(state, final)
            if final or isinstance(turn.action, StartRound):
                self._settle(state)
            if final:
                self._end(state)
            if not isinstance(turn.action, Meet):
                self._made, self._shown = None, False
        elif meets and turn.after.phase is Phase.MEETING:
            self._show(turn.after)

    def _report(self, state: State, begun: Round | None) -> None:
        """Make and write the report, or complete it by the round that follows."""
        made = self._made
        if made is None and state.reportable:
            if not self._kept:
                self._keep(state)
            made = self._make(state, self._kept, self._scene(SETTLE_S))  # for what others answer
            self._kept = ()
            signature = made.signature if self._settings.max_same_failures else ""
            self._publisher.keep(made, signature)
        if made is None or (made is self._made and begun is None):
            return
        self._made = made = replace(made, follows=begun)
        text = report.render(made, table=self._settings.torchrun_report)
        contents = {"json": json.dumps(made.to_dict(), indent=1), "txt": text}
        self._write_files(made.round, contents)
        self._status_record.note_failure(made.to_dict())

    def _show(self, state: State, final: bool = False) -> None:
        """Print what ended the round, as soon as the plan says what did."""
        publisher = self._publisher
        if not (final or nodes.is_decided(state)):
            return
        if publisher.failed_elsewhere(state) is not None:
            found = publisher.print_failure(state)
            if found is not None:
                self._status_record.note_job_failure(found)
            return
        if self._made is not None and not self._shown:
            self._pump.show(report.render(self._made))
            self._shown = True

    def _settle(self, state: State) -> None:
        """Drop the tracebacks that the report makes superfluous, and those of a stop from outside.

        What the workers of any other round wrote is shown.
        """
        made, elsewhere = self._made, self._publisher.failed_elsewhere(state) is not None
        traced = None if made is None or elsewhere else report.traced(made)
        ranks = () if traced is None else (traced.exit.rank,)
        drops = self._shown or elsewhere or state.interrupted is not None
        self._pump.settle(state.round, drops=drops, shown=ranks, run=self._settings.run_id)

    def _end(self, state: State) -> None:
        """Write the launcher's own error file; print the table for who reads that."""
        publisher = self._publisher
        found = publisher.failed_elsewhere(state)
        if found is not None:
            publisher.write_launcher_file(found, os.environ)
        elif self._made is not None:
            if self._settings.torchrun_report:
                self._pump.show(f"\n{report.render_table(self._made)}")
            report.write_launcher_file(self._made, os.environ)

    def _notice(self, state: State) -> None:
        """Take down the state of the machine when the first failure is learned of."""
        self._noticed, self._ended = time.monotonic(), state.succeeded
        count = proc.oom_kill_count()
        self._oom = count is not None and count > (self._oom_kills or 0)
        self._oom_kills = count
        self._shm_free = proc.shm_free()

    def _keep(self, state: State) -> None:
        """Keep what the round's workers left; the log pump forgets it when the next opens."""
        if state.reportable:
            first = () if state.first is None else (state.first,)
            everyone = (*first, *state.later, *state.stopped)
            self._kept = tuple(self._left(end, end in state.stopped) for end in everyone)
            self._at_step = max(steps(self._progress()), default=None)

    def _leaving(self, state: State, scene: Scene) -> Iterator[Failure]:
        """Yield what those have left so far that were on their way to an end of their own."""
        for rank in scene.leaving:
            local_rank = rank - state.first_rank
            if local_rank in state.alive:  # the code that an exception ends with
                end = Exit(state.round, rank, local_rank, 0, 1, time.monotonic(), stopped=True)
                yield self._left(end, True)

    def _make(
        self, state: State, ends: tuple[Failure, ...], scene: Scene = NOT_ASKED
    ) -> FailureReport:
        """Make the report of a failed round of which so many have ended."""
        settings, known = self._settings, self._evidence(state, scene)
        name = settings.name if settings.entrypoint == CALLER else settings.entrypoint
        whose = (name, socket.gethostname(), state.round)
        build = partial(verdict.build, *whose, first=_first(state), known=known)
        what = "cannot read the workers' files"
        made = bounded(partial(build, ends), None, what, self._group.files_root)
        without = {"error_file": None, "stdout_path": None}  # both would be read
        return made or build(tuple(replace(each, **without) for each in ends))

    def _evidence(self, state: State, scene: Scene) -> Evidence:
        """Return what is known of the round beside its workers' ends."""
        size, first = state.limits.nproc, state.first_rank
        ended = frozenset(first + local_rank for local_rank in self._ended)
        if state.limits.meets and state.plan is not None:
            others = frozenset(range(state.plan.world_size)) - {*range(first, first + size)}
            if others <= scene.seen:
                ended |= others & {*scene.ended}
                size += len(others & {*scene.ended})
            else:
                size = 0
        return Evidence(
            started_at=None if state.began is None else wall_time(state.began),
            local_world_size=state.limits.nproc,
            noticed_monotonic=self._noticed,
            shm_free=self._shm_free,
            hang=_hang(state),
            at_step=self._at_step,
            scene=scene,
            ended=ended,
            size=0 if state.alive else size,
            places=self._places(),
        )

    def _places(self) -> tuple[str, ...]:
        """Return where the job writes, its script's arguments among them, which often say where."""
        settings, environ = self._settings, os.environ
        own = (settings.checkpoint_dir, environ.get("HOME"), environ.get("TMPDIR"), "/tmp")
        named = (word.rpartition("=")[2] for word in settings.args)
        return tuple(str(at) for at in (*own, self._group.files_root, ".", *named) if at)

    def _show_stacks(self, taken: events.StacksTaken) -> None:
        """Print and write what this node's workers did when another node reported a hang."""
        begins = "What the workers of this node were doing meanwhile:"
        text = "\n".join([begins, *report.doing(taken.last, taken)]) + "\n"
        self._write_files(taken.round, {"txt": text})
        self._pump.show(text)

    def _write_files(self, round_number: int, contents: Mapping[str, str]) -> None:
        for suffix, content in contents.items():
            path = self._run_dir.report(round_number, suffix)
            raw = content.encode("utf-8", "surrogateescape")
            bounded(partial(replace_file, path, raw), None, f"cannot write {path}", path.parent)
        run_dir = self._run_dir
        bounded(run_dir.drop_reports, None, "cannot remove old failure reports", run_dir.path)

    def _left(self, end: Exit, stopped: bool) -> Failure:
        stdout, stderr = self._pump.paths(end.local_rank)
        return Failure(
            exit=end,
            at=wall_time(end.at),
            stopped=stopped,
            error_file=self._group.error_file(end.round, end.local_rank),
            stdout_path=None if stdout is None else str(stdout),
            stderr_path=None if stderr is None else str(stderr),
            tail=tuple(self._pump.tail(end.local_rank, TAIL_LINES)),
            oom_kill=self._oom and end.exitcode in (-9, 128 + 9) and not stopped,
        )


def _first(state: State) -> int:
    """Return the local rank that the report is about: who failed first, or who hung."""
    if state.first is not None:
        return state.first.local_rank
    assert state.hang is not None  # the loop reports failures of workers only
    ended = [event.local_rank for event in (*state.later, *state.stopped)]
    hung = [rank - state.first_rank for rank in state.hang.ranks]
    return next((local_rank for local_rank in hung if local_rank in ended), ended[0])


def _hang(state: State) -> Hang | None:
    if state.hang is None or not state.hung:
        return None
    stacks = state.stacks or events.StacksTaken(state.round)
    return Hang(state.hang, wall_time(state.hang.at), stacks)
