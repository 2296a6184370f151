"""The ends of a round's workers, sorted into cause and consequences.

:func:`build` makes a :class:`FailureReport` from the exits of a round, in the order in which they
were noticed. Each worker that ended is one of

=========  =====================================================================================
first      the first that failed; its exit code becomes the command's
victims    failed by themselves afterwards, in order, most often because the first was gone
stopped    ended by elaunch after the first failed
=========  =====================================================================================

and those that had succeeded, which are left out. :meth:`FailureReport.to_dict` is the report for
programs (docs/failure-report.md), :func:`summary` the one line that becomes a restart's reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.agent.failure import errorfile, explain, tracebacks
from elaunch.agent.failure.errorfile import ErrorFile
from elaunch.agent.failure.explain import Explanation
from elaunch.agent.failure.table import signal_name
from elaunch.agent.hangs.report import Hang
from elaunch.endings import exit_code, how_it_ended
from elaunch.errors import HangError

MAX_MESSAGE = 4000
SCHEMA = 1


@dataclass(frozen=True)
class WorkerExit:
    """How one worker ended.

    ``exitcode`` is negative for a signal, ``at`` in seconds since 1970, ``tail`` the last lines of
    its stderr (a few hundred, so that a whole traceback fits), ``stopped_by_us`` says that elaunch
    had signalled it before, ``oom_kill`` that the cgroup's count of OOM kills grew meanwhile,
    ``timer`` which timer of torch.distributed.elastic.timer had expired.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    at: float
    stopped_by_us: bool = False
    error_file: str | None = None
    stdout_path: str | None = None
    stderr_path: str | None = None
    tail: tuple[str, ...] = ()
    oom_kill: bool = False
    timer: str = ""


@dataclass(frozen=True)
class Circumstances:
    """What is known of the round; times are in seconds, ``started_at`` since 1970.

    ``noticed_monotonic`` is when the agent's loop got the first exit, by its monotonic clock;
    ``shm_free`` is memory.shm_free() at that time. ``hang`` is there if the round hung: then no
    exit is the cause, and all but crashes are elaunch's doing.
    """

    started_at: float | None = None
    local_world_size: int | None = None
    noticed_monotonic: float | None = None
    shm_free: int | None = None
    hang: Hang | None = None


@dataclass(frozen=True)
class Failure:
    """One worker's end with what it left behind: error file, or traceback in its stderr."""

    exit: WorkerExit
    error: ErrorFile | None
    message: str
    traceback: tuple[str, ...]
    traceback_from: str
    ms_after_first: float
    explanation: Explanation = field(default_factory=Explanation)


@dataclass(frozen=True)
class FailureReport:
    """Everything that is known of one failed round on this node.

    ``first`` is the worker that failed first, or, with a ``hang``, the one that stands still.
    """

    name: str
    host: str
    round: int
    first: Failure
    victims: tuple[Failure, ...]
    stopped: tuple[Failure, ...]
    seconds_into_round: float | None
    noticed_monotonic: float | None
    hang: Hang | None = None

    @property
    def exit_code(self) -> int:
        """What the command ends with if no restart follows."""
        return HangError.exit_code if self.hang else exit_code(self.first.exit.exitcode)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data, schema 1 of docs/failure-report.md."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "host": self.host,
            "round": self.round,
            "summary": summary(self),
            "exit_code": self.exit_code,
            "seconds_into_round": self.seconds_into_round,
            "noticed_monotonic": self.noticed_monotonic,
            "explanation": self.first.explanation.text or None,
            "likely_victim": self.first.explanation.victim,
            "hang": self.hang.to_dict() if self.hang else None,
            "first": _worker_dict(self.first),
            "victims": [_worker_dict(failure) for failure in self.victims],
            "stopped": [_worker_dict(failure) for failure in self.stopped],
        }


def build(
    name: str,
    host: str,
    round: int,
    exits: Sequence[WorkerExit],
    first: int,
    circumstances: Circumstances = Circumstances(),
) -> FailureReport:
    """Read the error files of a failed round and make its report.

    Args:
        name: the script's name, as in torchrun's title.
        host: this node's name.
        round: the round that failed.
        exits: the ends of all its workers on this node, in the order noticed.
        first: local_rank of the one that failed first; it is in ``exits``.
        circumstances: what is known of the round besides; the hang, if it was one.
    """
    by_rank = {end.local_rank: end for end in exits}
    failures = {
        end.local_rank: _failure(end, end.at - by_rank[first].at, circumstances)
        for end in exits
        if end.exitcode != 0 or end.stopped_by_us or end.local_rank == first
    }
    cause = failures.pop(first)
    began, hang = circumstances.started_at, circumstances.hang
    failed_at = cause.exit.at if hang is None else hang.at
    return FailureReport(
        name=name,
        host=host,
        round=round,
        first=cause,
        victims=tuple(f for f in failures.values() if not f.exit.stopped_by_us),
        stopped=tuple(f for f in failures.values() if f.exit.stopped_by_us),
        seconds_into_round=None if began is None else max(0.0, failed_at - began),
        noticed_monotonic=circumstances.noticed_monotonic,
        hang=hang,
    )


def summary(report: FailureReport) -> str:
    """Return one line like ``rank 1 exited with code 7``, for the log and as a restart's reason."""
    if report.hang is not None:
        return report.hang.reason
    return f"rank {report.first.exit.rank} {ended(report.first.exit)}"


def _failure(end: WorkerExit, seconds_after: float, known: Circumstances) -> Failure:
    error = errorfile.read(end.error_file)
    if error and error.callstack:
        lines, origin = error.callstack.rstrip("\n").split("\n"), "error file"
    else:
        lines, origin = list(tracebacks.pick(end.tail, end.exitcode)), "stderr"
    message = error.message if error else ""
    message = message or (tracebacks.message_of(lines) if end.exitcode else "")
    facts = explain.WorkerEnd(
        exitcode=end.exitcode,
        text="\n".join([message, *lines]),
        rank=end.rank,
        local_rank=end.local_rank,
        local_world_size=known.local_world_size,
        oom_kill=end.oom_kill,
        timer=end.timer,
        shm_free=known.shm_free,
    )
    source = end.error_file if origin == "error file" else end.stderr_path
    return Failure(
        exit=end,
        error=error,
        message=message[:MAX_MESSAGE],
        traceback=tracebacks.cap(lines, source or "its output"),
        traceback_from=origin if lines else "",
        ms_after_first=_milliseconds(seconds_after),
        explanation=Explanation() if end.stopped_by_us else explain.explain(facts),
    )


def _milliseconds(seconds: float) -> float:
    """Return ``seconds`` in ms with one decimal, not below 0: wall clocks may step back."""
    return max(0.0, round(seconds * 1000, 1))


def ended(end: WorkerExit) -> str:
    """Return how a worker ended, like ``was killed by SIGKILL``."""
    return how_it_ended(end.exitcode)


def _worker_dict(failure: Failure) -> dict[str, Any]:
    end, error = failure.exit, failure.error
    facts = {name: value for name, value in vars(end).items() if name != "tail"}
    return facts | {
        "ended": ended(end),
        "signal": signal_name(end.exitcode),
        "ms_after_first": failure.ms_after_first,
        "error_file": error.path if error else None,
        "error_file_problem": error.problem or None if error else None,
        "message": failure.message or None,
        "traceback": "\n".join(failure.traceback) or None,
        "traceback_from": failure.traceback_from or None,
        "explanation": failure.explanation.text or None,
    }
