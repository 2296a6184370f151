"""Reads runs: from the agent that keeps the record, or from what it left.

The agent is asked first. Where it does not answer, ``state.json`` is read, and the state of the
agent's process decides how to take it (the table of elaunch.runs.job). The workers of other nodes
are asked for through this node's agent (elaunch.agent.status.views).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from elaunch.errors import ElaunchError, RunDirError
from elaunch.runs.directory import RunDir, list_runs
from elaunch.runs.identity import WorkerRecord, condition, worker_is_alive
from elaunch.runs.job import (
    GONE,
    LOST,
    UNREADABLE,
    AgentState,
    JobDocument,
    LatestCheckpoint,
    NodeSeen,
    WorkerSeen,
    progress_of,
    round_nodes,
)
from elaunch.runs.pace import StepRate
from elaunch.runs.record import LIVE_STATES, AwaitedRecord, Record, check
from elaunch.runs.usage import Measurement, measure_since, usage
from elaunch.text import listed
from elaunch.wire.control import WORKERS_S
from elaunch.wire.control import ask as ask_agent

ANSWER_TIMEOUT_S: Final = 2.0
LIST_TIMEOUT_S: Final = 0.5
RETRY_S: Final = 0.05
RECENT_RUNS: Final = 10
WORKERS_END_S: Final = 0.7
"""Seconds for the workers of a killed agent; the server ends them within 0.5 s of its death."""
PATIENCE_S: Final = 0.3
"""Seconds that a screen waits for the agents of other nodes; what comes later is shown next."""
FIRST_S: Final = 0.8
"""The same for its first reading, so that it already shows their ranks."""
MOST_ASKED: Final = 16
"""Nodes that a screen asks at a time for their workers; each comes in its turn."""
FIRST_ASKED: Final = 256
"""Nodes that are asked the first time: all that a command shows which reads once."""


def read_all(environ: Mapping[str, str], everything: bool = False) -> tuple[JobDocument, ...]:
    """Read how all runs stand, the newest first: those live here and the last that ended.

    With ``everything`` also the older ones and those of other machines that share the directory.
    """
    found: list[JobDocument] = []
    recent = 0
    for run in list_runs(environ):
        job = read(run, LIST_TIMEOUT_S)
        if not everything and not job.here and job.agent != "answers":
            continue
        recent += not job.live
        if everything or job.live or recent <= RECENT_RUNS:
            found.append(job)
    return tuple(found)


def read(run: RunDir, timeout: float = ANSWER_TIMEOUT_S) -> JobDocument:
    """Read how the run stands; its agent has ``timeout`` seconds to answer."""
    deadline = time.monotonic() + timeout
    while True:
        job = _look(run, max(deadline - time.monotonic(), RETRY_S))
        # A living agent that cannot be reached may be between its last record and its end, or
        # between its first record and its socket: look again.
        if job.agent != "silent" or time.monotonic() + RETRY_S > deadline:
            break
        time.sleep(RETRY_S)
    if job.record is None or job.agent in ("answers", "ended", "runs"):
        return job
    try:
        return replace(job, written_at=run.state_file.stat().st_mtime)
    except OSError:
        return job


def _look(run: RunDir, timeout: float) -> JobDocument:
    written = _written(run)
    if written.agent == "ended":
        return written
    if written.record is not None and "launcher" in written.record:
        return _unanswered(run, refused=False)
    try:
        answer = ask_agent(run.socket, {"op": "status"}, timeout)
        record = check(answer, f"the answer of the agent at {run.socket}")
    except OSError as exc:
        return _unanswered(run, refused=isinstance(exc, ConnectionRefusedError))
    except RunDirError as exc:
        return replace(written, state=UNREADABLE, reason=str(exc), record=None)
    return _recorded(run, record, "answers" if record["state"] in LIVE_STATES else "ended")


def _written(run: RunDir) -> JobDocument:
    """Return what state.json has, before the agent is looked at."""
    try:
        record = run.read_state()
    except RunDirError as exc:
        return JobDocument(run, None, UNREADABLE, str(exc), "gone", time.time())
    return _recorded(run, record, "silent" if record["state"] in LIVE_STATES else "ended")


def _recorded(run: RunDir, record: Record, agent: AgentState) -> JobDocument:
    return JobDocument(run, record, record["state"], record["reason"], agent, time.time())


def _unanswered(run: RunDir, refused: bool) -> JobDocument:
    """Return a run whose agent did not answer; ``refused``: none listens."""
    written = _written(run)
    record = written.record
    if record is None or written.agent == "ended":
        return written
    found = condition(record["agent"])
    if found == "elsewhere" and refused and record["agent"]["host"] == os.uname().nodename:
        # Another container of this machine: the socket is seen from here, its agent is not.
        found = "gone"
    match found:
        case "gone" | "rebooted":
            # It may have written its last record after that was read and before it ended.
            final = _written(run)
            if final.agent == "ended":
                return final
            workers = _living(record["workers"])
            if "launcher" in record and workers:
                return replace(written, agent="runs")
            reason = _lost_reason(record, workers, found == "rebooted")
            return replace(written, state=LOST, reason=reason, agent="gone")
        case "stopped" | "elsewhere":
            return replace(written, agent=found)
        case _:
            return replace(written, agent="runs") if "launcher" in record else written


def _living(workers: Iterable[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """Return the workers whose processes still run on this machine."""
    return tuple(worker for worker in workers if worker_is_alive(worker))


def _lost_reason(record: Record, survivors: Sequence[WorkerRecord], rebooted: bool = False) -> str:
    """Return why a run is LOST and which of its workers are still there."""
    pid = record["agent"]["pid"]
    if "launcher" in record:
        how = "when the machine was restarted" if rebooted else "without closing its context"
        return f"the script (pid {pid}) ended {how}" + ("" if rebooted else ": it was killed, say")
    who = f"the agent (pid {pid})"
    if rebooted:
        return f"{who} ended when the machine was restarted, and its workers with it"
    gone = f"{who} was killed"
    if not survivors:
        return f"{gone}; its workers were ended with it"
    names = listed([f"rank {worker['rank']} (pid {worker['pid']})" for worker in survivors])
    return f"{gone}; still running: {names}"


class _Answer(msgspec.Struct):
    """The answer of another node's agent: its workers."""

    round: int
    workers: tuple[WorkerSeen, ...]
    awaited: AwaitedRecord | None = None


class AskedNodes:
    """The workers of a run's other nodes, as their agents have answered last.

    The agents are asked in a thread, so that one that does not answer holds up no screen; of many
    nodes those that were asked longest ago, MOST_ASKED at a time, the first time FIRST_ASKED.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._answers: dict[int, tuple[float, _Answer]] = {}
        self._problems: dict[int, tuple[int, str]] = {}
        """By node the round in which it was asked last, and what was wrong then, or ""."""
        self._asked: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def complete(
        self, job: JobDocument, wanted: Collection[int] | None, patience: float
    ) -> JobDocument:
        """Return ``job`` with what is known of its other nodes after ``patience`` seconds.

        ``wanted`` nodes are asked, all where it is None, and those with a problem, which may be
        over; none while the agent here, through which they are asked, does not answer.
        """
        now, others = job.known["round"], [node.number for node in job.others]
        silent = ""
        if job.agent != "answers":
            silent = "the agent of this node, which asks it, does not answer"
        elif len(others) < len(job.nodes):
            chosen = [n for n in others if wanted is None or n in wanted or self._problem(n, now)]
            self._ask(chosen, now, patience)
        nodes = (one if one.here else self._seen(one, now, silent) for one in job.nodes)
        return replace(job, nodes=tuple(nodes))

    def _problem(self, number: int, now: int) -> str:
        """Return what is wrong with a node in the round of ``now``, as far as is known, or ""."""
        of, problem = self._problems.get(number, (now, ""))
        return problem if of == now else ""

    def _ask(self, nodes: list[int], now: int, patience: float) -> None:
        if not nodes or (self._thread is not None and self._thread.is_alive()):
            return
        nodes.sort(key=lambda number: self._asked.get(number, 0.0))
        nodes = nodes[: MOST_ASKED if self._asked else FIRST_ASKED]
        self._thread = threading.Thread(
            target=self._answered, args=(nodes, now), name="nodes", daemon=True
        )
        self._thread.start()
        self._thread.join(patience)

    def _answered(self, nodes: list[int], now: int) -> None:
        from elaunch.views.agents import ask

        self._asked |= dict.fromkeys(nodes, time.monotonic())
        new = [number for number in nodes if number not in self._answers]
        self._problems |= dict.fromkeys(new, (now, "it has not answered yet"))
        try:
            found = ask(self._run, {"of": "workers", "nodes": nodes}, WORKERS_S)
        except (ElaunchError, OSError) as error:
            self._problems |= dict.fromkeys(nodes, (now, str(error)))
            return
        for number in nodes:
            answer = found.get(number, {"error": "it is not in the round that runs"})
            problem = str(answer.get("error", ""))
            if not problem:
                try:
                    shown = msgspec.convert(answer, _Answer)
                    self._answers[number] = time.monotonic(), shown
                    problem = f"it is in round {shown.round}" * (shown.round != now)
                except msgspec.ValidationError as error:
                    problem = f"its answer is not understood: {error}"
            self._problems[number] = now, problem

    def _seen(self, node: NodeSeen, now: int, silent: str) -> NodeSeen:
        node = replace(node, problem=silent or self._problem(node.number, now))
        at, answer = self._answers.get(node.number, (0.0, None))
        if answer is None or answer.round != now:
            return node  # its workers are of another round: nothing is known of those of this one
        age_s = time.monotonic() - at
        return replace(node, workers=answer.workers, age_s=age_s, awaited=answer.awaited)


class RunReader:
    """Reads one run again and again, with its workers, its other nodes and its checkpoints.

    CPU is measured from one reading to the next, for the first one over 0.1 s. ``pace`` is how fast
    the workers go. A ``screen`` gets the failed rounds in short. For the first reading other nodes
    have ``first_s`` seconds to answer, for others PATIENCE_S.
    """

    def __init__(self, run: RunDir, screen: bool = False, first_s: float = FIRST_S) -> None:
        self.run = run
        self.pace = StepRate()
        self._screen = screen
        self._cards: dict[int, tuple[int, dict[str, Any]]] = {}
        self._patience = first_s
        self._measured: Mapping[int, Measurement] = {}
        self._others = AskedNodes(run)

    def read(self, wanted: Collection[int] | None = None) -> JobDocument:
        """Return the run as it is now; the agents of ``wanted`` nodes are asked, or of all."""
        job = read(self.run)
        if (record := job.record) is None:
            return job
        if job.agent == "gone":
            job = _settle(job, record)
        pids = _running(job, record["workers"])
        before, self._measured = measure_since(self._measured, pids)
        used, steps = usage(before, self._measured), progress_of(record, job.live)
        latest, note = _latest_checkpoint(record, job.read_at)
        job = replace(
            job,
            workers=tuple(
                WorkerSeen(
                    one, _state(one, pids, job), used.get(one["pid"] or 0), steps.get(one["rank"])
                )
                for one in record["workers"]
            ),
            nodes=round_nodes(record),
            latest=latest,
            latest_note=note,
            failures=self._failures(),
        )
        self.pace.see(job.read_at, record["round"], [one.progress or {} for one in job.workers])
        if job.others:
            job = self._others.complete(job, wanted, self._patience)
        self._patience = PATIENCE_S
        return job

    def _failures(self) -> tuple[dict[str, Any], ...]:
        if not self._screen:
            return ()
        from elaunch.views.failures import in_short  # its imports are not for every command

        return in_short(self.run, self._cards)


def _settle(job: JobDocument, record: Record) -> JobDocument:
    """Give the workers of a killed agent the time in which they are ended before naming any."""
    survivors = _living(record["workers"])
    if not survivors:
        return job
    deadline = time.monotonic() + WORKERS_END_S
    while survivors and time.monotonic() < deadline:
        time.sleep(RETRY_S)
        survivors = _living(survivors)
    return replace(job, reason=_lost_reason(record, survivors))


def _running(job: JobDocument, workers: Sequence[WorkerRecord]) -> frozenset[int]:
    """Return the pids of the workers that run and can be seen from here."""
    if job.agent == "elsewhere" or not job.here:
        return frozenset()
    running = (worker for worker in workers if worker["state"] == "RUNNING")
    return frozenset(worker["pid"] for worker in _living(running) if worker["pid"])


def _state(worker: WorkerRecord, running: Collection[int], job: JobDocument) -> str:
    if worker["pid"] in running or worker["state"] not in ("STARTING", "RUNNING"):
        return worker["state"]
    over = job.agent in ("gone", "ended", "runs")
    # An agent that does not answer may have started it since.
    quiet = job.agent in ("silent", "stopped") and job.here
    return GONE if over or (quiet and worker["state"] == "RUNNING") else worker["state"]


def _latest_checkpoint(record: Record, now: float) -> tuple[LatestCheckpoint | None, str | None]:
    """Return the newest complete checkpoint, and what was skipped or went wrong.

    It costs little, however large the checkpoint is: a person waits for the result. Of a URL it is
    the newest that is committed; its files are not fetched for that.
    """
    place = record["checkpoint_dir"]
    if place is None:
        return None, None
    try:
        if "://" in place:
            from elaunch.checkpoint.storage.storage import open_storage

            at_url = next(open_storage(place).newest_first(), None)
            if at_url is None:
                return None, None
            age_s = max(0.0, now - at_url.committed)
            return LatestCheckpoint(str(at_url.place), at_url.step, "elaunch", age_s), None
        from elaunch.checkpoint.search.latest import find_latest

        search = find_latest(Path(place), glob=record["checkpoint_glob"], content=False)
        found, note = search.checkpoint, None
        if search.passed_over:
            newest = search.passed_over[0]
            note = f"skipped {newest.path.name}: {newest.reason}"
        if found is None:
            return None, note
        age_s = max(0.0, now - Path(found.path).stat().st_mtime)
        return LatestCheckpoint(str(found.path), found.step, found.format, age_s), note
    except (ElaunchError, OSError) as exc:
        return None, f"cannot be looked for: {exc}"
