"""How a run stands: what its agent reports, or what it left, and whether it still lives.

The agent is asked first. Where it does not answer, ``state.json`` is read, and the state of the
agent's process decides how to take it:

===========  ===================================================================================
agent        meaning
===========  ===================================================================================
answers      the reading is live
silent       its process runs but has not answered in time; the reading is ``state.json``
stopped      its process is suspended; the reading is ``state.json``
gone         it was killed: a live state becomes LOST
elsewhere    it runs on another host or in another container; the reading is ``state.json``
runs         there is none: the script keeps the record itself, and runs
ended        the state is final
===========  ===================================================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir, list_runs
from elaunch.runs.identity import WorkerRecord, condition, worker_is_alive
from elaunch.runs.record import LIVE_STATES, Record, RoundRecord, check, lasted
from elaunch.text import listed
from elaunch.wire.control import ask

LOST: Final = "LOST"
UNREADABLE: Final = "UNREADABLE"

ANSWER_TIMEOUT_S: Final = 2.0
LIST_TIMEOUT_S: Final = 0.5
RETRY_S: Final = 0.05
RECENT_RUNS: Final = 10

AgentState = Literal["answers", "silent", "stopped", "gone", "elsewhere", "runs", "ended"]


@dataclass(frozen=True)
class Standing:
    """How a run stands: its record, and the state and reason after its agent was looked at.

    ``record`` is None where none can be read; then the state is UNREADABLE, and the reason is why.
    """

    run: RunDir
    record: Record | None
    state: str
    reason: str | None
    agent: AgentState
    taken_at: float

    @property
    def live(self) -> bool:
        """Whether the run goes on, as far as can be seen from here."""
        return self.state in LIVE_STATES

    @property
    def here(self) -> bool:
        """Whether the run is or was one of this machine, or nothing is known of it."""
        return self.record is None or self.record["agent"]["host"] == os.uname().nodename

    @property
    def written_at(self) -> float | None:
        """When the record was written, in seconds since the epoch, if it may be out of date."""
        if self.record is None or self.agent in ("answers", "ended", "runs"):
            return None
        try:
            return self.run.state_file.stat().st_mtime
        except OSError:
            return None

    @property
    def duration_s(self) -> float | None:
        """Return how long the run has lasted in seconds; None where its end is not known."""
        if self.record is None:
            return None
        return self._lasted(self.record, self.agent in ("answers", "ended"))

    def round_s(self, entry: RoundRecord) -> float | None:
        """Return how long a round of it has lasted in seconds; None where its end is not known."""
        return self._lasted(entry, entry["ended_at"] is not None or self.agent == "answers")

    def _lasted(self, part: Record | RoundRecord, known: bool) -> float | None:
        if known:
            return lasted(part, self.taken_at)
        return max(0.0, self.taken_at - part["started_at"]) if self.live else None


def overview(environ: Mapping[str, str], everything: bool = False) -> tuple[Standing, ...]:
    """Read how all runs stand, the newest first: those live here and the last that ended.

    With ``everything`` also the older ones and those of other machines that share the directory.
    """
    standings = []
    recent = 0
    for run in list_runs(environ):
        standing = read_standing(run, LIST_TIMEOUT_S)
        if not everything and not standing.here and standing.agent != "answers":
            continue
        recent += not standing.live
        if everything or standing.live or recent <= RECENT_RUNS:
            standings.append(standing)
    return tuple(standings)


def read_standing(run: RunDir, timeout: float = ANSWER_TIMEOUT_S) -> Standing:
    """Read how the run stands; its agent has ``timeout`` seconds to answer."""
    deadline = time.monotonic() + timeout
    while True:
        standing = _look(run, max(deadline - time.monotonic(), RETRY_S))
        # A living agent that cannot be reached may be between its last record and its end, or
        # between its first record and its socket: look again.
        if standing.agent != "silent" or time.monotonic() + RETRY_S > deadline:
            return standing
        time.sleep(RETRY_S)


def _look(run: RunDir, timeout: float) -> Standing:
    written = _written(run)
    if written.agent == "ended":
        return written
    if written.record is not None and "launcher" in written.record:
        return _unanswered(run, refused=False)
    try:
        answer = ask(run.socket, {"op": "status"}, timeout)
        record = check(answer, f"the answer of the agent at {run.socket}")
    except OSError as exc:
        return _unanswered(run, refused=isinstance(exc, ConnectionRefusedError))
    except RunDirError as exc:
        return replace(written, state=UNREADABLE, reason=str(exc), record=None)
    return _standing(run, record, "answers" if record["state"] in LIVE_STATES else "ended")


def _written(run: RunDir) -> Standing:
    """Return the standing in state.json, before the agent is looked at."""
    try:
        record = run.read_state()
    except RunDirError as exc:
        return Standing(run, None, UNREADABLE, str(exc), "gone", time.time())
    return _standing(run, record, "silent" if record["state"] in LIVE_STATES else "ended")


def _unanswered(run: RunDir, refused: bool) -> Standing:
    """Return the standing of a run whose agent did not answer; ``refused``: none listens."""
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
            workers = living(record["workers"])
            if "launcher" in record and workers:
                return replace(written, agent="runs")
            reason = lost_reason(record, workers, found == "rebooted")
            return replace(written, state=LOST, reason=reason, agent="gone")
        case "stopped" | "elsewhere":
            return replace(written, agent=found)
        case _:
            return replace(written, agent="runs") if "launcher" in record else written


def _standing(run: RunDir, record: Record, agent: AgentState) -> Standing:
    return Standing(run, record, record["state"], record["reason"], agent, time.time())


def living(workers: Iterable[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """Return the workers whose processes still run on this machine."""
    return tuple(worker for worker in workers if worker_is_alive(worker))


def lost_reason(record: Record, survivors: Sequence[WorkerRecord], rebooted: bool = False) -> str:
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
