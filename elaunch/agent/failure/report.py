"""The failure report as text for people: the cause first, the others, torchrun's table if asked.

::

    rank 1 failed at train.py:31 in step: ValueError: bad batch
    rank 1 (local_rank 1, pid 4711) on host node0 exited with code 1, 12.3 s into round 0
    <what is known of the cause, and the fix>
    Traceback from its stderr:
      …
    Its log: …

    Failed afterwards: rank 0 (exit code 1)
    Stopped by elaunch: rank 2 (SIGTERM), rank 3 (SIGKILL)

    Round 1 resumes from step 40; 3 steps lost (it was at step 43): /ckpt/step_40

    torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
    ============================================================
    train.py FAILED
    ------------------------------------------------------------
    Failures:
    [1]:
      time      : 2026-11-20_18:06:55
      host      : node0
      rank      : 0 (local_rank: 0)
      exitcode  : -15 (pid: 14824)  (SIGTERM)
      error_file: <N/A>
      traceback : Signal 15 (SIGTERM) received by PID 14824
    ------------------------------------------------------------
    Root Cause (first observed failure):
    [0]:
      …
    ============================================================

The table (--torchrun-report) is torchrun's character for character, for log parsers: what
``ChildFailedError.format_msg`` of torch 2.13 writes, below the line with which Python begins to
print that exception. A row's number is its place in the order of ranks.

Where another rank than the first is guilty, what is known of that one comes before it::

    rank 1 has not entered all_reduce #61; ranks 0, 2, 3 have been waiting there for 30m 00s
    Rank 1 was here, most recent call first:
      File "train.py", line 31 in read
    Its log: …

    First to fail, 1832.3 s into round 0: rank 3 (exit code 1), a victim (E-COLLECTIVE-TIMEOUT)

The traceback of such a victim is shown only if nothing else is known of the guilty rank.

Of a round that hung the first lines are::

    rank 3 has made no progress for 60 s (step 41; the others are at step 42)
    What each rank said last:
      rank 0: step 42, silent for 60 s, last call allgather #43
      rank 3: step 41, in section eval, silent for 61 s
    Python stacks at that time, most recent call first:
      rank 3:
        File "train.py", line 31 in evaluate
      ranks 0-2:
        File "…/torch/distributed/distributed_c10d.py", line 4165 in barrier
    No stacks of rank 4: the process is stopped by a signal (SIGSTOP) or by a debugger

The report is made by :func:`build` (elaunch.agent.failure.verdict).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from elaunch.agent.failure import errorfile, tracebacks
from elaunch.agent.failure.evidence import NO_ROOM, Failure, Hang
from elaunch.agent.failure.explain import Explanation
from elaunch.agent.failure.verdict import FailureReport, summary
from elaunch.agent.policy import events
from elaunch.endings import Exit, signal_name
from elaunch.text import count, ranks, ranks_do, shortened

WIDTH = 100
HEADING = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
NOT_AVAILABLE = "<N/A>"
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
MAX_RULE = 60
MOST_LAST = 16
"""Ranks of which the text has what they reported last; the JSON has all."""
MOST_VICTIMS = 8
"""Kinds of later failures of which the text has more than the ranks."""


def write_launcher_file(report: FailureReport, environ: Mapping[str, str]) -> bool:
    """Write the launcher's own error file, if ``environ`` names one, from the cause."""
    told = report.told
    if report.hang is not None:
        text = "\n".join(doing(report.hang.seen.last, report.hang.stacks))
        return errorfile.write_launcher_file(environ, report.exit_code, None, summary(report), text)
    message = told.exit.text + (f": {told.message}" if told.message else "")
    callstack = "\n".join(told.traceback) or told.explanation.text or message
    return errorfile.write_launcher_file(
        environ, report.first.exit.exitcode or 1, told.error, message, callstack
    )


def render(report: FailureReport, *, table: bool = False) -> str:
    """Return the report as text: the cause, the others, and torchrun's table if asked for."""
    parts = ["\n".join(lines(report)) for lines in (_cause, _others, _next)]
    text = tracebacks.printable("\n\n".join(part for part in parts if part)) + "\n"
    return f"{text}\n{render_table(report)}" if table else text


def render_table(report: FailureReport) -> str:
    """Return torchrun's table alone, for a round whose cause was printed before."""
    return f"{tracebacks.printable(_table(report))}\n"


def _identity(end: Exit) -> str:
    return f"rank {end.rank} (local_rank {end.local_rank}, pid {end.pid})"


def _first_line(text: str, width: int = WIDTH) -> str:
    return shortened(text.strip().partition("\n")[0], width)


def _wrap(text: str, indent: str = "") -> list[str]:
    """Break ``text`` into lines; paths and options stay whole, so that they can be copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _when(report: FailureReport) -> str:
    if report.seconds_into_round is None:
        return f" in round {report.round}"
    return f", {report.seconds_into_round:.1f} s into round {report.round}"


def _cause(report: FailureReport) -> Iterator[str]:
    first = report.first
    end = first.exit
    if report.hang is not None:  # its reason begins with the culprit
        yield from _hang(report, report.hang, _when(report).lstrip(", "))
        return
    if not report.headline.startswith(end.text):  # else the next lines say no less
        yield report.headline
    yield from _guilty(report)
    if _is_mere_victim(report):
        return
    guilty = () if report.culprit is None else report.culprit.ranks
    begins = "First to fail: " if report.accused and end.rank not in guilty else ""
    yield f"{begins}{_identity(end)} on host {report.host} {end.how}{_when(report)}"
    scene = report.scene.sentence
    meanwhile = f"Meanwhile {scene}." if scene and not report.culprit else ""
    for line in (_reason(report), meanwhile):
        yield from _wrap(line)
    if first.error and first.error.problem:
        yield from _wrap(f"{first.error.problem} ({first.error.path})")
    if traced(report) is first:
        yield from _evidence(first)
        yield from _log(first)


def _is_mere_victim(report: FailureReport) -> bool:
    """Whether the first to fail is named among the others: another rank is the cause."""
    first = report.first
    return first.explanation.victim and traced(report) is not first and report.hang is None


def _guilty(report: FailureReport) -> Iterator[str]:
    """Yield what is known of the guilty rank, where that is not the first to fail."""
    one = report.guilty
    if one is report.first:
        return
    if _by_itself(one):
        after = f"{one.ms_after_first:.0f} ms after rank {report.first.exit.rank}"
        yield f"{_identity(one.exit)} on host {report.host} {one.exit.how}, {after}"
    yield from _wrap(_coded(one.explanation))
    if one.message:
        yield from _evidence(one) if traced(report) is one else ()
    elif stack := _stack(report):
        yield f"Rank {one.exit.rank} was here, most recent call first:"
        yield from (f"  {frame}" for frame in stack)
    yield from _log(one)
    if not _is_mere_victim(report):
        yield ""


def traced(report: FailureReport) -> Failure | None:
    """Return whose traceback the text has: a victim's where nothing is known of the guilty."""
    one, first = report.guilty, report.first
    if one.explanation.code in NO_ROOM:
        return None
    known = one.message or one.explanation.code or (first.explanation.victim and _stack(report))
    return one if known else first


def _stack(report: FailureReport) -> Sequence[str]:
    """Return where the guilty rank was when the first failed."""
    rank = report.guilty.exit.rank
    return next((group.main for group in report.scene.groups if rank in group.ranks), ())


def _reason(report: FailureReport) -> str:
    """Return why the first failed; of a victim whose culprit is known no more than that it is."""
    known, culprit = report.first.explanation, report.culprit
    accused = () if culprit is None else culprit.ranks
    if known.victim and accused and report.first.exit.rank not in accused:
        return f"It is a victim of that. (elaunch explain {known.code})"
    return _coded(known)


def _log(failure: Failure) -> Iterator[str]:
    logs = [path for path in (failure.stderr_path, failure.stdout_path) if path]
    if logs:
        yield "Its log: " + " and ".join(dict.fromkeys(logs))


def _hang(report: FailureReport, hang: Hang, when: str) -> Iterator[str]:
    """Yield who stands still, for how long, and what all were doing."""
    named = report.culprit.ranks if report.culprit and report.culprit.ranks else hang.seen.ranks
    guilty = next((each for each in report.everyone if (each.exit.rank,) == named), None)
    yield from _wrap(hang.seen.reason)
    who = "seen "
    if guilty:
        who = f"local_rank {guilty.exit.local_rank}, pid {guilty.exit.pid}, "
    by = "the script" if hang.seen.source == "script" else hang.seen.source
    yield f"({who}on host {report.host}, {when}; known by {by})"
    yield f"(elaunch explain {report.code})"
    if guilty and guilty.message:
        yield "The last exception in its stderr:"
        yield from (f"  {line}".rstrip() for line in guilty.traceback)
    yield from doing(hang.seen.last, hang.stacks)
    if guilty:
        yield from _log(guilty)


def _evidence(failure: Failure) -> Iterator[str]:
    """Yield the traceback, or the last lines, under a title that says which it is."""
    if failure.message and failure.traceback_from != "error file" and failure.error:
        yield f"Its error file says: {_first_line(failure.message)}"
    if not failure.traceback:
        yield "It left no traceback and wrote nothing to stderr."
        return
    if failure.traceback_from == "error file":
        title = "Traceback from its error file:"
    elif failure.traceback_from == "stdout":
        title = "It wrote nothing to stderr. Last lines of its stdout:"
    elif tracebacks.message_of(failure.traceback):
        title = "Traceback from its stderr:"
    else:
        title = "Last lines of its stderr:"
    yield title
    yield from (f"  {line}".rstrip() for line in failure.traceback)


def _coded(known: Explanation) -> str:
    """Return a cause and its fix with the command that says more of it."""
    return f"{known.text} (elaunch explain {known.code})" if known.code else known.text


def _next(report: FailureReport) -> Iterator[str]:
    """Yield what the next round resumes from, and what that costs."""
    if report.follows is not None and report.follows.present:
        who = ranks_do(report.follows.present, "stay")
        yield f"Round {report.follows.round} loses no step: {who} in their processes"
    if report.follows is None or report.follows.resumes_from is None:
        return
    resumed, lost = report.follows.resumes_from, report.steps_lost
    cost = f"; {count(lost, 'step')} lost (it was at step {report.known.at_step})" if lost else ""
    yield from _wrap(
        f"Round {report.follows.round} resumes from step {resumed.step}{cost}: {resumed.path}"
    )


def _others(report: FailureReport) -> Iterator[str]:
    """Yield how the others ended, in a line, and what those said that are no victims."""
    others = (*report.victims, *report.stopped)
    if report.hang is None and _by_itself(report.guilty):  # it is in the lines above
        others = tuple(one for one in others if one is not report.guilty)
    failed = [one for one in others if _by_itself(one)]
    kinds: dict[tuple[str, str], list[int]] = {}
    for one in failed:
        kinds.setdefault((one.exit.word, _own_error(report, one)), []).append(one.exit.rank)
    shown = list(kinds.items())[:MOST_VICTIMS]
    more = [rank for them in list(kinds.values())[MOST_VICTIMS:] for rank in them]
    ends = [f"{ranks(them)} ({word})" for (word, said), them in shown if not said]
    ends += [ranks(more)] if more else []
    if _is_mere_victim(report):
        first, known = report.first.exit, report.first.explanation
        victim = f"rank {first.rank} ({first.word}), a victim ({known.code})"
        yield f"First to fail{_when(report)}: {victim}"
    if failed:
        yield from _wrap(f"Failed afterwards: {', '.join(ends)}", indent="  ")
    yield from (f"  {ranks(them)} ({word}): {said}" for (word, said), them in shown if said)
    stopped: dict[str, list[int]] = {}
    for one in (each for each in others if not _by_itself(each)):
        stopped.setdefault(one.exit.word, []).append(one.exit.rank)
    if stopped:
        ends = [f"{ranks(them)} ({word})" for word, them in stopped.items()]
        yield from _wrap(f"Stopped by elaunch: {', '.join(ends)}", indent="  ")


def _by_itself(failure: Failure) -> bool:
    """Whether it has not ended of elaunch's signal; above 128, most pass one on."""
    return not failure.stopped or 0 < failure.exit.exitcode <= 128


def _own_error(report: FailureReport, failure: Failure) -> str:
    """Return what a rank failed with, if not with what a victim has or the cause had."""
    if failure.error and failure.error.problem:
        return failure.error.problem
    known = failure.explanation.victim or failure.message == report.told.message
    return "" if known else _first_line(failure.message, WIDTH - 4)


def _table(report: FailureReport) -> str:
    """Return torchrun's table with the line above it."""
    others = [f for f in (*report.victims, *report.stopped) if f.exit.exitcode != 0]
    ordered = sorted((report.first, *others), key=lambda failure: failure.exit.rank)
    blocks = {f.exit.rank: _block(number, f, report) for number, f in enumerate(ordered)}
    longest = max(len(line) for block in blocks.values() for line in block.split("\n"))
    title = f"{report.name} FAILED"
    width = min(max(longest, len(title)), MAX_RULE)
    # A cause that ended with 0 afterwards has no row.
    root = blocks.pop(report.told.exit.rank, None) or blocks.pop(report.first.exit.rank)
    parts = [
        HEADING,
        "=" * width,
        title,
        "-" * width,
        "Failures:",
        *(blocks.values() or ["  <NO_OTHER_FAILURES>"]),
        "-" * width,
        "Root Cause (first observed failure):",
        root,
        "=" * width,
    ]
    return "\n".join(parts)


def _block(number: int, failure: Failure, report: FailureReport) -> str:
    end, name = failure.exit, signal_name(-failure.exit.exitcode, "")
    time = datetime.fromtimestamp(int(failure.at)).isoformat(sep="_")
    text = _table_text(failure)
    if report.hang is not None and failure is report.first:
        text = f"{report.hang.seen.reason} (stopped by elaunch)"
    elif failure.stopped:
        text = f"{text} (stopped by elaunch)"
    # The space after the pid's bracket is torch's, with a signal's name after it or without.
    lines = [
        f"[{number}]:",
        f"  time      : {time}",
        f"  host      : {report.host}",
        f"  rank      : {end.rank} (local_rank: {end.local_rank})",
        f"  exitcode  : {end.exitcode} (pid: {end.pid}) " + (f" ({name})" if name else ""),
        f"  error_file: {failure.error.path if failure.error else NOT_AVAILABLE}",
        "  traceback : " + text.replace("\n", "\n  "),
    ]
    return "\n".join(lines)


def _table_text(failure: Failure) -> str:
    """Return the traceback field: torch's, and where torch has none, the exception in stderr."""
    end, error = failure.exit, failure.error
    if error and error.problem:
        return error.problem
    if error and error.callstack:
        return "\n".join(failure.traceback)
    if error and error.message:
        return error.message
    if end.exitcode < 0 and not (failure.stopped and failure.message):
        name = signal_name(-end.exitcode, NOT_AVAILABLE)
        return f"Signal {-end.exitcode} ({name}) received by PID {end.pid}"
    if failure.message:
        return f"{_first_line(failure.message)} (see {failure.stderr_path or 'its output above'})"
    return NO_TRACEBACK


# ── hangs ────────────────────────────────────────────────────────────────────────────────────────


def doing(last: Sequence[str], taken: events.StacksTaken) -> Iterator[str]:
    """Yield what the workers of this node were doing when a round hung, here or elsewhere."""
    if last:
        yield "What each rank said last:"
        yield from (f"  {line}" for line in last[:MOST_LAST])
    if len(last) > MOST_LAST:
        yield f"  … and {len(last) - MOST_LAST} more ranks"
    if taken.groups:
        yield "Python stacks at that time, most recent call first:"
    for group in taken.groups:
        yield f"  {ranks(group.ranks)}:"
        yield from (f"    {frame}" for frame in group.main)
        for them, stack in group.threads:
            yield f"  another thread of {ranks(them)}:"
            yield from (f"    {frame}" for frame in stack)
    yield from (f"No stacks of {ranks(them)}: {why}" for them, why in taken.problems)
    if not taken.groups and not taken.problems:
        yield "The stacks of the workers could not be taken in time."
