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

import os
import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from elaunch import proc
from elaunch.agent.failure import errorfile, explain, tracebacks
from elaunch.agent.failure.errorfile import ErrorFile
from elaunch.agent.failure.explain import Explanation
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import Scene
from elaunch.agent.policy.events import HangSeen, StacksTaken
from elaunch.agent.policy.turn import Round
from elaunch.endings import Exit, exit_code
from elaunch.errors import HangError
from elaunch.files import open_regular
from elaunch.rendezvous.text import UNACCUSED
from elaunch.text import one_line, shortened

LAST_BYTES = 1 << 16
MAX_MESSAGE = 4000
MAX_TRACEBACKS = 1 << 20
"""Characters of tracebacks that a report has of all workers but the first."""
MAX_SIGNATURE = 300
MAX_HEADLINE = 300
SCHEMA = 1
_NO_ROOM = frozenset({"E-DISK-FULL", "E-SAVE-CUT"})
"""Causes that the place in the script and the file system say all of: frames add nothing."""
_UNWRITTEN = re.compile(r"No space left on device: ['\"](?P<path>/.+)['\"]")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


class Hang(Struct, frozen=True):
    """A hang as it is reported: what was seen, ``at`` in seconds since 1970, and the stacks."""

    seen: HangSeen
    at: float
    stacks: StacksTaken

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data (docs/failure-report.md)."""
        return {
            "ranks": list(self.seen.ranks),
            "reason": self.seen.reason,
            "source": self.seen.source,
            "at": self.at,
            "last": list(self.seen.last),
            "stacks": [group.to_dict() for group in self.stacks.groups],
            "no_stacks": [{"ranks": list(r), "problem": text} for r, text in self.stacks.problems],
        }


class Circumstances(Struct, frozen=True):
    """The circumstances of the round; times are in seconds, ``started_at`` since 1970.

    ``noticed_monotonic`` is when the agent's loop got the first exit, by its monotonic clock;
    ``shm_free`` is memory.shm_free() at that time. ``hang`` is there if the round hung: then no
    exit is the cause, and all but crashes are elaunch's doing. ``at_step`` is the furthest step
    that a worker has shown. ``scene`` is where the others were when it failed. ``places`` are the
    paths to which the job writes, as far as they are known.
    """

    started_at: float | None = None
    local_world_size: int | None = None
    noticed_monotonic: float | None = None
    shm_free: int | None = None
    hang: Hang | None = None
    at_step: int | None = None
    scene: Scene | None = None
    places: tuple[str, ...] = ()


NOTHING_KNOWN = Circumstances()


class Failure(Struct, frozen=True):
    """One worker's end with what it left behind.

    At first there is what goes away with the round; :func:`build` adds what its error file and its
    stderr say.

    Attributes:
        exit: how it ended.
        at: when, in seconds since 1970.
        stopped: whether it ended after elaunch had signalled it.
        error_file, stdout_path, stderr_path: of its files, where it has some.
        tail: the last lines of its stderr (a few hundred, so that a whole traceback fits).
        oom_kill: whether the cgroup's count of OOM kills grew meanwhile.
        error: its error file.
        message: the line that names its exception.
        traceback: from its error file or its stderr, which ``traceback_from`` says.
        ms_after_first: milliseconds since the first failure.
        explanation: its cause as far as it is known.
    """

    exit: Exit
    at: float
    stopped: bool = False
    error_file: str | None = None
    stdout_path: str | None = None
    stderr_path: str | None = None
    tail: tuple[str, ...] = ()
    oom_kill: bool = False
    error: ErrorFile | None = None
    message: str = ""
    traceback: tuple[str, ...] = ()
    traceback_from: str = ""
    ms_after_first: float = 0.0
    explanation: Explanation = field(default_factory=Explanation)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, a worker of docs/failure-report.md."""
        end, error = self.exit, self.error
        return {
            "rank": end.rank,
            "local_rank": end.local_rank,
            "pid": end.pid,
            "exitcode": end.exitcode,
            "at": self.at,
            "stopped_by_us": self.stopped,
            "error_file": error.path if error else None,
            "stdout_path": self.stdout_path,
            "stderr_path": self.stderr_path,
            "oom_kill": self.oom_kill,
            "timer": end.timer,
            "ended": end.how,
            "signal": signal_name(end.exitcode),
            "ms_after_first": self.ms_after_first,
            "error_file_problem": error.problem or None if error else None,
            "message": self.message or None,
            "traceback": "\n".join(self.traceback) or None,
            "traceback_from": self.traceback_from or None,
            "explanation": self.explanation.text or None,
            "code": self.explanation.code or None,
        }


class FailureReport(Struct, frozen=True):
    """Everything that is known of one failed round on this node.

    ``first`` is the worker that failed first, or, with a ``hang``, the one that stands still.
    ``culprit`` is who is guilty, where another thing than its own end shows that. ``follows`` is
    the round that follows, once it begins.
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
    culprit: Culprit | None = None
    at_step: int | None = None
    follows: Round | None = None
    scene: Scene | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the command if no restart follows."""
        return HangError.exit_code if self.hang else exit_code(self.first.exit.exitcode)

    @property
    def likelier(self) -> Failure | None:
        """The worker that failed for a reason of its own, where the first shows a victim's.

        One that was stopped counts if it had raised, and its interpreter ended, before.
        """
        if not self.first.explanation.victim:
            return None
        raised = (each for each in self.stopped if each.message and _came_to_end(each, self.scene))
        own = (each for each in (*self.victims, *raised) if not each.explanation.victim)
        return next((each for each in own if each.message or each.explanation.code), None)

    @property
    def guilty(self) -> Failure:
        """The worker of this node that is to blame: the culprit, or else the first to fail."""
        accused = self.culprit.ranks[:1] if self.culprit else ()
        everyone = (self.first, *self.victims, *self.stopped)
        return next((one for one in everyone if one.exit.rank in accused), self.first)

    @property
    def traced(self) -> tuple[int, ...]:
        """The ranks whose tracebacks its text shows: a victim's where the cause has nothing."""
        guilty, first = self.guilty, self.first
        if guilty.explanation.code in _NO_ROOM:
            return ()
        stacks = () if self.scene is None else self.scene.groups
        seen = any(guilty.exit.rank in group.ranks for group in stacks)
        known = seen or guilty.message or guilty.explanation.code
        if guilty is first or (known and first.explanation.victim):
            return (guilty.exit.rank,)
        return (first.exit.rank, guilty.exit.rank)

    @property
    def cause(self) -> Failure:
        """The worker that failed for a reason of its own; the first where none is known."""
        return self.likelier or self.first

    @property
    def code(self) -> str:
        """The code of the cause in the catalogue; empty where none is known."""
        if self.hang is not None:
            return explain.OF_COMMAND[HangError.exit_code].code
        return self.cause.explanation.code

    @property
    def headline(self) -> str:
        """The rank that is to blame and what it failed with, in one sentence."""
        if self.hang is not None:
            return one_line(self.hang.seen.reason)
        said = self.culprit.sentence if self.culprit else ""
        return shortened(one_line(said or failed(self.cause)), MAX_HEADLINE)

    @property
    def accused(self) -> str:
        """The culprit as reasons name it: "" where the first to fail is known to be the one."""
        if self.culprit is not None and self.culprit.sentence:
            return one_line(self.culprit.sentence)[:MAX_HEADLINE]
        return UNACCUSED if self.first.explanation.victim else ""

    @property
    def signature(self) -> str:
        """The failure's text without its numbers: equal where it comes again in another round."""
        end, told = self.cause.exit.word, self.cause.message
        if self.hang is not None:
            end, told = "hang", self.hang.seen.reason
        return one_line(f"{self.code} {end} {_NUMBER.sub('#', told)}")[:MAX_SIGNATURE]

    @property
    def steps_lost(self) -> int | None:
        """How many steps the next round does again, where that is known."""
        resumed = self.follows.checkpoint if self.follows else None
        if resumed is None or self.at_step is None or self.at_step < resumed.step:
            return None
        return self.at_step - resumed.step

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data, schema 1 of docs/failure-report.md."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "host": self.host,
            "round": self.round,
            "headline": self.headline,
            "summary": summary(self),
            "exit_code": self.exit_code,
            "seconds_into_round": self.seconds_into_round,
            "noticed_monotonic": self.noticed_monotonic,
            "explanation": self.first.explanation.text or None,
            "likely_victim": self.first.explanation.victim,
            "likelier": self.likelier.exit.rank if self.likelier else None,
            "code": self.code or None,
            "culprit": self.culprit.sentence or None if self.culprit else None,
            "culprit_ranks": list(self.culprit.ranks) if self.culprit else [],
            "at_step": self.at_step,
            "steps_lost": self.steps_lost,
            "follows": _follows_dict(self.follows) if self.follows else None,
            "hang": self.hang.to_dict() if self.hang else None,
            "meanwhile": _scene_dict(self.scene) if self.scene else None,
            "first": self.first.to_dict(),
            "victims": [failure.to_dict() for failure in self.victims],
            "stopped": [failure.to_dict() for failure in self.stopped],
        }


def build(
    name: str,
    host: str,
    round: int,
    ends: Sequence[Failure],
    first: int,
    circumstances: Circumstances = NOTHING_KNOWN,
) -> FailureReport:
    """Read the error files of a failed round and make its report.

    Args:
        name: the script's name, as in torchrun's title.
        host: this node's name.
        round: the round that failed.
        ends: of all its workers on this node, in the order noticed, with what they left.
        first: local_rank of the one that failed first; it is in ``ends``.
        circumstances: what is known of the round besides; the hang, if it was one.
    """
    began_at = next(end.at for end in ends if end.exit.local_rank == first)
    failures = {
        end.exit.local_rank: _examined(end, end.at - began_at, circumstances)
        for end in ends
        if end.exit.exitcode != 0 or end.stopped or end.exit.local_rank == first
    }
    cause = failures.pop(first)
    others = _bounded(failures.values())
    began, hang = circumstances.started_at, circumstances.hang
    failed_at = cause.at if hang is None else hang.at
    return FailureReport(
        name=name,
        host=host,
        round=round,
        first=cause,
        victims=tuple(f for f in others if not f.stopped),
        stopped=tuple(sorted((f for f in others if f.stopped), key=lambda f: f.exit.rank)),
        seconds_into_round=None if began is None else max(0.0, failed_at - began),
        noticed_monotonic=circumstances.noticed_monotonic,
        hang=hang,
        at_step=circumstances.at_step,
        scene=circumstances.scene,
    )


def failed(failure: Failure) -> str:
    """Return what a rank failed with, in one sentence."""
    known, end = failure.explanation, failure.exit.text
    if known.victim:
        return f"{end}, which a rank does whose peer was gone before"
    if failure.message:
        place = tracebacks.place_of(failure.traceback)
        where = f" at {place}" if place else ""
        error = failure.message.strip().partition("\n")[0]
        if known.code == "E-SAVE-CUT":  # of which torch says the position in its file
            error = known.cause.partition(": most often")[0].rstrip(".")
            error = error[0].lower() + error[1:]
        return f"rank {failure.exit.rank} failed{where}: {error}"
    cause = re.split(r"[:.] |\.$", known.text, maxsplit=1)[0]
    return f"{end}: {cause[0].lower()}{cause[1:]}" if cause else end


def summary(report: FailureReport) -> str:
    """Return one line like ``rank 1 exited with code 7``, for the log and as a restart's reason."""
    if report.hang is not None:
        return report.hang.seen.reason
    return report.first.exit.text


def _examined(left: Failure, seconds_after: float, known: Circumstances) -> Failure:
    """Return ``left`` with what its error file and its stderr say."""
    end, error = left.exit, left.error or errorfile.read(left.error_file)
    if left.stopped and end.exitcode < 0 and _was_leaving(end, known.scene):
        end = end._replace(exitcode=1)  # with which what it has raised would have ended it
    if error and error.callstack:
        lines, origin = error.callstack.rstrip("\n").split("\n"), "error file"
    else:
        lines, origin = list(tracebacks.pick(left.tail, end.exitcode)), "stderr"
    if not lines and end.exitcode > 0 and left.stdout_path:
        # Some, as pytest does, say only there why they fail.
        lines, origin = list(tracebacks.pick(_last_lines(left.stdout_path), end.exitcode)), "stdout"
    message = error.message if error else ""
    message = message or (tracebacks.message_of(lines) if end.exitcode else "")
    sources = {"error file": left.error_file, "stdout": left.stdout_path}
    source = sources.get(origin, left.stderr_path)
    known_by = lines if message or origin != "stdout" else []
    text = [*message.split("\n"), *tracebacks.without_source(known_by)]
    explanation = explain.explain(
        end,
        "\n".join(tracebacks.cap(text, "")),  # searches in longer lines could take minutes
        oom_kill=left.oom_kill,
        local_world_size=known.local_world_size,
        shm_free=known.shm_free,
    )
    found = replace(
        left,
        error=error,
        message=message[:MAX_MESSAGE],
        traceback=tracebacks.cap(lines, source or "its output"),
        traceback_from=origin if lines else "",
        ms_after_first=_milliseconds(seconds_after),
    )
    written = _UNWRITTEN.search(message)
    places = known.places if written is None else (written["path"],)
    if explanation.code in _NO_ROOM and (full := proc.full_file_systems(places)):
        where = ", ".join(f"{path} ({left})" for path, left in full.items())
        cause = f"{explanation.cause.partition(':')[0].rstrip('.')}: no room is left in {where}."
        explanation = replace(explanation, cause=cause, fix="Make room there, or write elsewhere.")
    ours = _is_ours(found, known.scene)
    return replace(found, explanation=Explanation() if ours else explanation)


def _last_lines(path: str) -> list[str]:
    """Return the last lines of a worker's file; none of one that cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return file.read(LAST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _came_to_end(failure: Failure, scene: Scene | None) -> bool:
    """Whether it was on its way to an end with an error before any was signalled.

    It may have been signalled before it came there: then it has raised.
    """
    has_failed = failure.exit.exitcode > 0 or bool(failure.message)
    return has_failed and _was_leaving(failure.exit, scene)


def _was_leaving(end: Exit, scene: Scene | None) -> bool:
    return scene is not None and end.rank in scene.leaving


def _is_ours(failure: Failure, scene: Scene | None) -> bool:
    """Whether its end is elaunch's doing."""
    return failure.stopped and not _came_to_end(failure, scene)


def _bounded(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures; those that come late in a long report are without their tracebacks."""
    kept, size = [], 0
    for failure in failures:
        size += sum(map(len, failure.traceback))
        late = size > MAX_TRACEBACKS
        kept.append(replace(failure, traceback=(), traceback_from="") if late else failure)
    return kept


def _milliseconds(seconds: float) -> float:
    """Return ``seconds`` in ms with one decimal, not below 0: wall clocks may step back."""
    return max(0.0, round(seconds * 1000, 1))


def signal_name(exitcode: int) -> str | None:
    """Return the name of the signal that ``exitcode`` (negative for one) means, or None."""
    try:
        return signal.Signals(-exitcode).name if exitcode < 0 else None
    except ValueError:
        return None


def _follows_dict(begun: Round) -> dict[str, Any]:
    resumed = begun.checkpoint
    return {
        "round": begun.round,
        "resumed_step": resumed.step if resumed else None,
        "checkpoint": str(resumed.path) if resumed else None,
    }


def _scene_dict(scene: Scene) -> dict[str, Any]:
    stacks = [group.to_dict() for group in scene.groups]
    return {"collectives": scene.sentence or None, "stacks": stacks}
