"""The failure report as text for people: the cause first, the others, then torchrun's table.

::

    rank 1 (local_rank 1, pid 4711) on host node0 exited with code 1, 12.3 s into round 0
    <what is known of the cause, and the fix>
    Traceback from its stderr:
      …
    Its log: …

    Failed by themselves afterwards:
      rank 0 (local_rank 0, pid 4710) exited with code 1, 35 ms later
    Stopped by elaunch: rank 2 (SIGTERM), rank 3 (SIGKILL)

    <elaunch.agent.failure.table>

The report is made by :func:`build` (elaunch.agent.failure.ends).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace

from elaunch.agent.failure import errorfile, tracebacks
from elaunch.agent.failure.ends import (
    Circumstances,
    Failure,
    FailureReport,
    WorkerExit,
    build,
    ended,
    summary,
)
from elaunch.agent.failure.table import (
    HEADING,
    NO_TRACEBACK,
    NOT_AVAILABLE,
    FailedWorker,
    failure_table,
    signal_message,
    signal_name,
)
from elaunch.agent.hangs import report as hangreport
from elaunch.agent.hangs.report import Hang, source_text
from elaunch.endings import exit_code

__all__ = [
    "Circumstances",
    "Failure",
    "FailureReport",
    "WorkerExit",
    "build",
    "exit_code",
    "render",
    "render_cause",
    "render_table",
    "summary",
    "write_launcher_file",
]

WIDTH = 100


def write_launcher_file(report: FailureReport, environ: Mapping[str, str]) -> bool:
    """Write the launcher's own error file, if ``environ`` names one, from the first failure."""
    first = report.first
    if report.hang is not None:
        told = "\n".join(hangreport.lines(report.hang))
        return errorfile.write_launcher_file(environ, report.exit_code, None, summary(report), told)
    message = summary(report) + (f": {first.message}" if first.message else "")
    callstack = "\n".join(first.traceback) or first.explanation.text or message
    return errorfile.write_launcher_file(
        environ, first.exit.exitcode or 1, first.error, message, callstack
    )


def render(report: FailureReport) -> str:
    """Return the report as text: the cause, the others, and torchrun's table."""
    return f"{render_cause(report)}\n{tracebacks.printable(_table(report))}\n"


def render_table(report: FailureReport) -> str:
    """Return torchrun's table alone, for a round whose cause was printed before."""
    return f"{tracebacks.printable(_table(report))}\n"


def render_cause(report: FailureReport) -> str:
    """Return the cause and the others without the table, for a round that is restarted."""
    parts = ["\n".join(_cause(report)), "\n".join(_others(report))]
    return tracebacks.printable("\n\n".join(part for part in parts if part)) + "\n"


def _identity(end: WorkerExit) -> str:
    return f"rank {end.rank} (local_rank {end.local_rank}, pid {end.pid})"


def _first_line(text: str, width: int = WIDTH) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= width else line[: width - 2] + " …"


def _wrap(text: str, indent: str = "") -> list[str]:
    """Break ``text`` into lines; paths and options stay whole, so that they can be copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cause(report: FailureReport) -> Iterator[str]:
    first = report.first
    end = first.exit
    when = f" in round {report.round}"
    if report.seconds_into_round is not None:
        when = f", {report.seconds_into_round:.1f} s into round {report.round}"
    if report.hang is not None:
        yield from _hang(report, report.hang, when.lstrip(", "))
        return
    yield f"{_identity(end)} on host {report.host} {ended(end)}{when}"
    explanations = [first.explanation.text, _likelier(report)]
    yield from (line for text in explanations for line in _wrap(text))
    if first.error and first.error.problem:
        yield from _wrap(f"{first.error.problem} ({first.error.path})")
    yield from _evidence(first)
    logs = [path for path in (end.stderr_path, end.stdout_path) if path]
    if logs:
        yield "Its log: " + " and ".join(dict.fromkeys(logs))


def _hang(report: FailureReport, hang: Hang, when: str) -> Iterator[str]:
    """Yield who stands still, for how long, and what all were doing."""
    end = report.first.exit
    yield from _wrap(hang.reason)
    only = hang.ranks == (end.rank,)
    who = f"local_rank {end.local_rank}, pid {end.pid}, " if only else ""
    yield f"({who}on host {report.host}, {when}; known by {source_text(hang.source)})"
    yield from hangreport.lines(hang)
    logs = [path for path in (end.stderr_path, end.stdout_path) if path and only]
    if logs:
        yield "Its log: " + " and ".join(dict.fromkeys(logs))


def _evidence(failure: Failure) -> Iterator[str]:
    """Yield the traceback, or the last lines, under a title that says which it is."""
    if failure.message and failure.traceback_from != "error file" and failure.error:
        yield f"Its error file says: {_first_line(failure.message)}"
    if not failure.traceback:
        yield "It left no traceback and wrote nothing to stderr."
        return
    if failure.traceback_from == "error file":
        title = "Traceback from its error file:"
    elif tracebacks.message_of(failure.traceback):
        title = "Traceback from its stderr:"
    else:
        title = "Last lines of its stderr:"
    yield title
    yield from (f"  {line}".rstrip() for line in failure.traceback)


def _likelier(report: FailureReport) -> str:
    """Return a hint at another rank if the first one's error is what a victim shows."""
    if not report.first.explanation.victim:
        return ""
    other = next((f for f in report.victims if not f.explanation.victim), None)
    if other is None:
        return ""
    said = f": {_first_line(other.message)}" if other.message else ""
    return f"The likelier cause is rank {other.exit.rank}, which {ended(other.exit)}{said}"


def _others(report: FailureReport) -> Iterator[str]:
    if report.victims:
        yield "Failed by themselves afterwards:"
    for failure in report.victims:
        after = f"{failure.ms_after_first:.0f} ms later"
        yield f"  {_identity(failure.exit)} {ended(failure.exit)}, {after}"
        if failure.message:
            yield f"    {_first_line(failure.message, WIDTH - 4)}"
        if failure.error and failure.error.problem:
            yield f"    {failure.error.problem}"
    if report.stopped:
        ends = (f"rank {f.exit.rank} ({_how_stopped(f.exit)})" for f in report.stopped)
        text = "Stopped by elaunch: " + ", ".join(ends)
        yield from _wrap(text, indent="  ")


def _how_stopped(end: WorkerExit) -> str:
    if end.exitcode < 0:
        return signal_name(end.exitcode) or f"signal {-end.exitcode}"
    return f"exit code {end.exitcode}"


def _table(report: FailureReport) -> str:
    others = [f for f in (*report.victims, *report.stopped) if f.exit.exitcode != 0]
    rows = [_row(failure, report.host) for failure in (report.first, *others)]
    if report.hang is not None:
        rows[0] = replace(rows[0], traceback=f"{report.hang.reason} (stopped by elaunch)")
    return f"{HEADING}\n{failure_table(report.name, rows, report.first.exit.rank)}"


def _row(failure: Failure, host: str) -> FailedWorker:
    end, error = failure.exit, failure.error
    text = _table_text(failure)
    if end.stopped_by_us:
        text = f"{text} (stopped by elaunch)"
    return FailedWorker(
        rank=end.rank,
        local_rank=end.local_rank,
        pid=end.pid,
        exitcode=end.exitcode,
        at=end.at,
        host=host,
        error_file=error.path if error else NOT_AVAILABLE,
        traceback=text,
    )


def _table_text(failure: Failure) -> str:
    """Return the traceback field: torch's, and where torch has none, the exception in stderr."""
    end, error = failure.exit, failure.error
    if error and error.problem:
        return error.problem
    if error and error.callstack:
        return "\n".join(failure.traceback)
    if error and error.message:
        return error.message
    if end.exitcode < 0:
        return signal_message(end.pid, end.exitcode)
    if failure.message:
        return f"{_first_line(failure.message)} (see {end.stderr_path or 'its output above'})"
    return NO_TRACEBACK
