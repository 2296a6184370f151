"""The evidence of a failed round: how its workers ended, what they left, and the rest.

:func:`examined` reads what a worker has left: its error file, the last lines of its stderr, or of
its stdout. The verdict (elaunch.agent.failure.verdict) decides by that alone.
"""

from __future__ import annotations

import os
import re
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from elaunch import proc
from elaunch.agent.failure import errorfile, explain, tracebacks
from elaunch.agent.failure.errorfile import ErrorFile
from elaunch.agent.failure.explain import Explanation
from elaunch.agent.hangs.scene import NOT_ASKED, Scene
from elaunch.agent.policy.events import HangSeen, StacksTaken
from elaunch.endings import Exit, signal_name
from elaunch.files import open_regular

LAST_BYTES = 1 << 16
MAX_MESSAGE = 4000
NO_ROOM = frozenset({"E-DISK-FULL", "E-SAVE-CUT"})
"""Causes that the place in the script and the file system say all of: frames add nothing."""
_UNWRITTEN = re.compile(r"No space left on device: ['\"](?P<path>/.+)['\"]")


class Hang(Struct, frozen=True):
    """A hang as it is reported: what was seen, ``at`` in seconds since 1970, and the stacks."""

    seen: HangSeen
    at: float
    stacks: StacksTaken

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data (docs/failure-json.md)."""
        return {
            "ranks": list(self.seen.ranks),
            "reason": self.seen.reason,
            "source": self.seen.source,
            "at": self.at,
            "last": list(self.seen.last),
            "stacks": [group.to_dict() for group in self.stacks.groups],
            "no_stacks": [{"ranks": list(r), "problem": text} for r, text in self.stacks.problems],
        }


class Evidence(Struct, frozen=True):
    """The evidence beside the workers' ends.

    Attributes:
        started_at: when the round began, in seconds since 1970.
        local_world_size: how many workers the node has.
        noticed_monotonic: when the agent's loop got the first exit, by its monotonic clock.
        shm_free: the free space of /dev/shm then, in bytes.
        hang: if the round hung: then no exit is the cause, and all but crashes are elaunch's doing.
        at_step: the furthest step that a worker has shown.
        scene: where the others were when it failed.
        ended: the ranks that had ended with 0 when the first failed.
        size: how many ranks this node has, with those that have ended on others; 0 where that is
            not known.
        places: the paths to which the job writes, as far as they are known.
    """

    started_at: float | None = None
    local_world_size: int | None = None
    noticed_monotonic: float | None = None
    shm_free: int | None = None
    hang: Hang | None = None
    at_step: int | None = None
    scene: Scene = NOT_ASKED
    ended: frozenset[int] = frozenset()
    size: int = 0
    places: tuple[str, ...] = ()


NOTHING_KNOWN = Evidence()


class Failure(Struct, frozen=True):
    """One worker's end with what it left behind.

    At first there is what goes away with the round; :func:`examined` adds what its error file and
    its stderr say.

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

    @property
    def explains(self) -> bool:
        """Whether it says why it ended, and that is no victim's reason."""
        return bool(self.message or self.explanation.code) and not self.explanation.victim

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data, a worker of docs/failure-json.md."""
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
            "signal": signal_name(-end.exitcode, "") or None,
            "ms_after_first": self.ms_after_first,
            "error_file_problem": error.problem or None if error else None,
            "message": self.message or None,
            "traceback": "\n".join(self.traceback) or None,
            "traceback_from": self.traceback_from or None,
            "explanation": self.explanation.text or None,
            "code": self.explanation.code or None,
        }


def examined(left: Failure, seconds_after: float, known: Evidence) -> Failure:
    """Return ``left`` with what its error file and its stderr say."""
    end, error = left.exit, left.error or errorfile.read(left.error_file)
    if left.stopped and end.exitcode < 0 and end.rank in known.scene.leaving:
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
        ms_after_first=max(0.0, round(seconds_after * 1000, 1)),  # wall clocks may step back
    )
    written = _UNWRITTEN.search(message)
    places = known.places if written is None else (written["path"],)
    if explanation.code in NO_ROOM and (full := proc.full_file_systems(places)):
        where = ", ".join(f"{path} ({free})" for path, free in full.items())
        cause = f"{explanation.cause.partition(':')[0].rstrip('.')}: no room is left in {where}."
        explanation = replace(explanation, cause=cause, fix="Make room there, or write elsewhere.")
    ours = left.stopped and not came_to_end(found, known.scene)  # its end is elaunch's doing
    return replace(found, explanation=Explanation() if ours else explanation)


def _last_lines(path: str) -> list[str]:
    """Return the last lines of a worker's file; none of one that cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return file.read(LAST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def came_to_end(failure: Failure, scene: Scene) -> bool:
    """Whether it was on its way to an end with an error before any was signalled.

    It may have been signalled before it came there: then it has raised.
    """
    has_failed = failure.exit.exitcode > 0 or bool(failure.message)
    return has_failed and failure.exit.rank in scene.leaving
