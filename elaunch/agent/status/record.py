"""Keeps the run's record (elaunch.runs.record), which ``status`` shows meanwhile and afterwards.

The record is replaced as a whole at each change. A file system that cannot take it (full, gone) is
reported once and does not stop the job: training is worth more than its record.

It is written in a thread, so that a file system that hangs does not stop the loop. The loop waits
for its record to be on the disk, as its next reader expects, but only as long as the file system
answers: one that takes longer than PATIENCE is named, and is not waited for until it has answered.
It then gets the newest record; those between are never written. Nor is the record of a phase that
passes (PASSING) waited for, unless a failure is new in it: the next round would begin later.

While nothing changes, it is written again from time to time with how far the workers are and where
the time went, for an agent that is killed, and for the one that goes on after it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from signal import SIGTERM
from typing import Any, Final, cast

from msgspec.structs import asdict

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Action, Finish, Meet, Nothing, ReplaceServer
from elaunch.agent.policy.state import Phase, State
from elaunch.agent.policy.turn import Round, Turn
from elaunch.checkpoint.records import Checkpoint
from elaunch.config import Settings
from elaunch.endings import PREEMPTED
from elaunch.errors import ElaunchError, RunDirError
from elaunch.rendezvous.plan import Node, Plan, WorkerFailure
from elaunch.rendezvous.times import to_record
from elaunch.runs.directory import RunDir
from elaunch.runs.identity import note_start
from elaunch.runs.record import (
    FINAL_STATES,
    AwaitedRecord,
    CheckpointRecord,
    LatenessRecord,
    NodeRecord,
    ProgressRecord,
    Record,
    SavesRecord,
    TimingRecord,
    add_round,
    first_record,
    new_round,
    new_worker,
)

log = logging.getLogger("elaunch")

PASSING: Final = (Phase.SWEEPING, Phase.FLUSHING)
PLANNED: Final = ("asked", "joined", "left")
"""Causes of a round's end that are no failure."""
"""Phases whose record is not waited for."""
MOST_NODES: Final = 64
"""Nodes in a record, but in that of node 0, which has all: N records of N nodes would be large.
A command that asks the agent gets all."""


def wall_time(monotonic: float) -> float:
    """Return the time of day of a moment on the monotonic clock, in seconds since the epoch."""
    return time.time() - (time.monotonic() - monotonic)


def shown_code(code: int, settings: Settings) -> int:
    """Return the command's exit code: 1 for any failure with ``--exit-codes torchrun``.

    A worker's own 2 is no usage error; what is one was raised before a worker was started.
    """
    return min(code, 1) if settings.exit_codes == "torchrun" else code


class StatusRecord:
    """Writes one run's record; the agent's loop is its only caller, but for :meth:`snapshot`.

    Attributes:
        progress, saves, timing, lateness, awaited: return what others know of the run now; any
            thread may ask. ``lateness`` may ask the workers if it is given True.
        name: what the script calls the run; a name of the command line or the job file stays.
        pages: the address of the dashboard, or "".
    """

    def __init__(
        self, settings: Settings, run_dir: RunDir, log_dir: str | None, warn: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._writer = RecordWriter(run_dir.write_state_text, warn, self._newest)
        self._failed_at: float | None = None
        self._cause = ""
        self._begun = time.monotonic()
        self._round_begun: float | None = None
        self._news = False
        self._record = _first_record(settings, run_dir, log_dir)
        self._published = json.dumps(self._record)
        self._nodes: Sequence[Node] = ()
        self.progress: Callable[[], ProgressRecord | None] = lambda: None
        self.saves: Callable[[], SavesRecord | None] = lambda: None
        self.name: Callable[[], str] = lambda: ""
        self.pages: Callable[[], str] = lambda: ""
        self.awaited: Callable[[], AwaitedRecord | None] = lambda: None
        self.timing: Callable[[], TimingRecord | None] = lambda: None
        self.lateness: Callable[[bool], LatenessRecord | None] = lambda _: None

    def snapshot(self, ask: bool = False) -> dict[str, Any]:
        """Return the record as it was last written, with the progress of now; for other threads.

        ``ask`` the workers which of them comes last, if what is known of that is old; and have all
        nodes in it, for a command that shows them.
        """
        published: dict[str, Any] = json.loads(self._published)
        live = published["state"] not in FINAL_STATES
        published |= self._measured(ask, timing=live)
        if address := self.pages():
            published["dashboard"] = address
        if ask and self._nodes:
            published["nodes"] = _nodes(self._nodes)
        if live:
            self._note_lasted(published)
            if (awaited := self.awaited()) is not None:
                published["awaited"] = awaited
        return published

    def _measured(self, ask: bool, *, timing: bool = True) -> dict[str, Any]:
        """Return the fields whose values others know, as far as they know them now."""
        found = {
            "progress": self.progress(),
            "lateness": self.lateness(ask),
            "saves": self.saves(),
            "timing": self.timing() if timing else None,
            "name": None if self._settings.name_given else self.name() or None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def see(self, turn: Turn) -> None:
        """Write down what the turn has changed."""
        record, state, event, action = self._record, turn.after, turn.event, turn.action
        reason = turn.reason
        if isinstance(event, events.WorkerStarted) and event.round == state.round:
            self._note_start(event)
        elif isinstance(event, events.Exit) and event.round == state.round:
            self._note_exit(state, event)
        elif isinstance(event, events.HangSeen) and event == state.hang:
            self._failed_at = event.at
        elif isinstance(event, events.TreeGone) and record["history"]:
            record["history"][-1]["ended_at"] = time.time()
            self._note_lasted(record)
            self._round_begun = None
        if isinstance(action, ReplaceServer):
            record["start_method"] = "spawn"
        elif turn.begun is not None:
            self._note_round(turn.begun, reason)
        elif isinstance(action, Finish):
            record["exit_code"] = shown_code(action.exit_code, self._settings)
            record["ended_at"] = time.time()
        record["state"] = _state_name(state, action)
        record["reason"] = reason or record["reason"]
        if isinstance(event, events.PlanSeen):
            self._cause = event.plan.cause or self._cause
        if isinstance(event, events.PlanSeen) and state.limits.meets:
            self._note_plan(event.plan, event.name)
            if not reason and state.phase is Phase.MEETING and event.plan.phase == "forming":
                record["reason"] = event.plan.waits or event.plan.reason or record["reason"]
        record["restarts"]["used"] = state.restarts
        record["restarts"]["without_progress"] = state.without_progress
        if self._news or self._worth_writing(state, event, action):
            self.write(waits=self._news or state.phase not in PASSING)

    def _worth_writing(self, state: State, event: events.Event, action: Action) -> bool:
        """Spare the disk the steps between: a start of many workers, an end of many."""
        if state.limits.meets and isinstance(event, events.PlanSeen):
            return True
        if not isinstance(action, Nothing if state.limits.meets else Nothing | Meet):
            return True
        if isinstance(event, events.WorkerStarted):
            return all(worker["pid"] for worker in self._record["workers"])
        return isinstance(event, events.Exit) and self._record["state"] == "RUNNING"

    def note_failure(self, report: dict[str, Any]) -> None:
        """Put a failure report into the record; the next round does not remove it.

        It is written with what the turn has changed (:meth:`see`).
        """
        self._record["failure"] = report
        self._news = True

    def note_job_failure(self, failure: WorkerFailure) -> None:
        """Put the first failure of the job, on another node, into the record, with its round."""
        self._record["job_failure"] = asdict(failure) | {"round": self._record["round"]}
        self._news = True

    def note_error(self, error: BaseException) -> None:
        """Write the end of a run that never came to its loop's end, but to ``error``.

        Also a defect of elaunch ends the record; it goes on to show its traceback.
        """
        record = self._record
        record["state"], record["exit_code"], record["reason"] = (
            "FAILED",
            1,
            f"{type(error).__name__}: {error}",
        )
        if isinstance(error, ElaunchError):
            record["exit_code"], record["code"] = error.exit_code, error.code
        record["ended_at"] = time.time()
        self.write()

    def _note_lasted(self, record: Any) -> None:
        """Note how long the run and its newest round last, whatever is done to the clock."""
        now = time.monotonic()
        record["lasted_s"] = now - self._begun
        if self._round_begun is not None:
            record["history"][-1]["lasted_s"] = now - self._round_begun

    def write(self, waits: bool = True) -> None:
        """Replace the record on disk and for readers of the socket; ``waits`` until it is there."""
        self._news = False
        self._note_lasted(self._record)
        cast("dict[str, Any]", self._record).update(self._measured(False))
        self._published = _packed(self._record)
        self._writer.put(self._published, self._record["state"] in FINAL_STATES, waits)

    def _newest(self) -> str:
        return _packed(self.snapshot())

    def _note_plan(self, plan: Plan, name: str) -> None:
        """Note what the job is beyond this node; workers' tools read who joins."""
        record = self._record
        record["node_rank"] = plan.node_rank(name)
        most = None if record["node_rank"] == 0 else MOST_NODES
        self._nodes = plan.nodes
        record["nodes"] = _nodes(plan.nodes[:most])
        record["node_count"] = len(plan.nodes)
        record["standby"] = name in plan.spares
        record["joining"] = len(plan.joining)
        if plan.times is not None:
            record["job_timing"] = to_record(plan.times)

    def _note_round(self, begun: Round, reason: str) -> None:
        record, checkpoint, place = self._record, begun.checkpoint, begun.place
        record["round"], record["world_size"] = begun.round, place.world_size
        record.pop("lateness", None)
        record["nproc_per_node"] = begun.nproc
        record["workers"] = [
            {**record["workers"][local_rank], "rank": place.first_rank + local_rank}
            if local_rank in begun.kept
            else new_worker(place.first_rank + local_rank, local_rank)
            for local_rank in range(begun.nproc)
        ]
        record["checkpoint"] = None if checkpoint is None else _checkpoint(checkpoint)
        resumed = begun.resumes_from
        add_round(record, new_round(begun.round, reason, resumed.step if resumed else None))
        if self._cause in PLANNED:
            record["history"][-1]["planned"] = True
        if begun.present:
            record["history"][-1]["kept"] = list(begun.present)
        self._cause = ""
        self._round_begun = time.monotonic()

    def _note_start(self, event: events.WorkerStarted) -> None:
        worker = self._record["workers"][event.local_rank]
        note_start(worker, event.pid, wall_time(event.at))
        if worker["state"] == "STARTING":
            worker["state"] = "RUNNING"
        if self._failed_at is not None and all(w["pid"] for w in self._record["workers"]):
            self._record["history"][-1]["recovery_s"] = event.at - self._failed_at
            self._failed_at = None

    def _note_exit(self, state: State, event: events.Exit) -> None:
        if event == state.first:
            self._failed_at = event.at
        code = event.exitcode
        if event in state.stopped:
            name = "STOPPED"
        else:
            name = "SUCCEEDED" if code == 0 else "FAILED"
        worker = self._record["workers"][event.local_rank]
        worker["state"], worker["exit"], worker["exit_code"] = name, event.word, code
        worker["ended_at"] = wall_time(event.at)


def _nodes(nodes: Sequence[Node]) -> list[NodeRecord]:
    return [
        {"name": node.name, "host": node.host, "addr": node.addr, "slots": node.slots}
        for node in nodes
    ]


def _packed(record: Mapping[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


def _checkpoint(checkpoint: Checkpoint) -> CheckpointRecord:
    return {"path": str(checkpoint.path), "step": checkpoint.step, "format": checkpoint.format}


def _first_record(settings: Settings, run_dir: RunDir, log_dir: str | None) -> Record:
    record = first_record(settings.run_id, settings.name, run_dir.path)
    record["restarts"]["max"] = settings.max_restarts
    record["restarts"]["budget"] = settings.restart_budget
    record["entrypoint"] = settings.entrypoint
    record["start_method"] = settings.start_method
    record["interpreter"] = settings.interpreter
    if settings.checkpoint_dir is not None:
        record["checkpoint_dir"] = str(settings.checkpoint_dir)
    record["checkpoint_glob"] = settings.checkpoint_glob
    record["log_dir"] = log_dir
    return record


def _is_preempted(state: State, end: Finish) -> bool:
    """Whether the run has ended because it was asked to; a worker may end with the same code."""
    plan = state.plan
    elsewhere = plan is not None and plan.phase == "over" and plan.failure is not None
    return end.exit_code == PREEMPTED and not state.failed and not elsewhere


def _state_name(state: State, action: Action) -> str:
    if isinstance(action, Finish):
        if action.exit_code == 0:
            return "COMPLETED"
        if _is_preempted(state, action):
            return "PREEMPTED"
        if state.notice is not None and not state.failed and state.interrupted in (None, SIGTERM):
            return "KILLED"
        return "STOPPED" if state.interrupted is not None and not state.failed else "FAILED"
    if state.phase is Phase.RUNNING:
        return "RUNNING"
    if state.phase in (Phase.STOPPING, Phase.SWEEPING, Phase.FLUSHING):
        restarts = state.failed and state.interrupted is None and state.limits.max_restarts > 0
        restarts = restarts or state.restarts_round
        restarts = restarts or (state.limits.meets and state.interrupted is None)
        return "RESTARTING" if restarts else "STOPPING"
    if state.phase is Phase.MEETING and state.member:
        return "RUNNING" if state.completed and not state.failed else "RESTARTING"
    return "RESTARTING" if state.failed else "STARTING"


PATIENCE: Final = 1.0
"""Seconds for the file system to take a record."""
LAST_PATIENCE: Final = 5.0
"""Seconds for it to take the last one."""
AGAIN_S: Final = (60.0, 300.0)
"""The least and the most seconds after which it is written again: a tenth of the job's time."""
THAWED_S: Final = 0.2
"""Seconds more, which a process that was frozen for longer than its patience still has."""


class RecordWriter:
    """Owns the thread, from the first :meth:`put` to the last record; only the loop calls that.

    Args:
        write: replaces the record; raises RunDirError where it cannot.
        warn: takes what is wrong, each problem once.
        newest: returns the record as of now, for when nothing has changed for long.
    """

    def __init__(
        self,
        write: Callable[[str, bool], None],
        warn: Callable[[str], None],
        newest: Callable[[], str],
    ) -> None:
        self._write = write
        self._warn = warn
        self._newest = newest
        self._begun = time.monotonic()
        self._problem = ""
        self._changed = threading.Condition()
        self._next: tuple[str, bool] | None = None
        self._given = self._done = 0
        self._late = False
        self._thread: threading.Thread | None = None

    def put(self, text: str, is_last: bool = False, waits: bool = True) -> bool:
        """Have ``text`` written; return whether it is, as long as the file system may take.

        Without ``waits`` it returns False at once, and ``text`` is written if nothing newer comes.
        """
        patience = LAST_PATIENCE if is_last else PATIENCE
        with self._changed:
            self._next = text, is_last
            self._given += 1
            number, known = self._given, self._late
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="record", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if (known or not waits) and not is_last:
                return False
            done = any(
                self._changed.wait_for(lambda: self._done >= number, seconds)
                for seconds in (patience, THAWED_S)
            )
            self._late = not done
        if not done and not known:
            self._warn(
                f"the file system of the run directory has not taken the record for {patience:g} "
                "s; going on without it: `elaunch status` reads the agent's own"
            )
        return done

    def _run(self) -> None:
        again = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None, self._pause(again))
                taken, self._next = self._next, None
                number = self._given
            try:
                text, is_last = taken or (self._newest(), False)
            except Exception:
                log.exception("the record is written only where something changes from now on")
                again = False
                continue
            again = again and not is_last
            problem = ""
            try:
                self._write(text, is_last)
            except RunDirError as error:
                problem = str(error)
            with self._changed:
                self._done, self._late = number, False
                ends = is_last and self._next is None
                self._thread = None if ends else self._thread
                news, self._problem = problem not in ("", self._problem), problem or self._problem
                self._changed.notify_all()
            if news:
                self._warn(f"{problem}; `elaunch status` will be out of date")
            if ends:
                return

    def _pause(self, again: bool) -> float | None:
        least, most = AGAIN_S
        return min(max(least, 0.1 * (time.monotonic() - self._begun)), most) if again else None
