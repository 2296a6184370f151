"""Where the workers' output goes, decided for each stream by the flags alone.

====================  =================================  ==================  ==================
flag                  console                            file                ``isatty()`` there
====================  =================================  ==================  ==================
none                  as written                         yes                 as the agent's
``-r`` (redirects)    no                                 yes                 False
``-t`` (tee)          with the prefix, also beside -r    yes                 False
rank filtered out     no                                 yes                 False
====================  =================================  ==================  ==================

Without log files ``-r`` shows the stream after all, since the output would be lost.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct

from elaunch import env
from elaunch.config import Settings

STREAM_BITS = {"stdout": 1, "stderr": 2}


def encode(text: str) -> bytes:
    """Encode what the user gave as it came from the command line, in any locale."""
    return text.encode("utf-8", "surrogateescape")


def nothing(local_rank: int) -> int:
    """Return 0 for every rank: no stream is redirected or tee'd."""
    return 0


class LogPlan(Struct, frozen=True):
    """Where the workers' output goes; the same for every round of a job.

    Args:
        log_root: directory of the ``attempt_<round>`` directories; None for no files.
        redirects: local rank to the streams that go to the file only (1 stdout, 2 stderr, 3 both).
        tee: local rank to the streams that go to the file and, prefixed, to the console.
        console_ranks: local ranks that are shown on the console; None for all.
        stdout_filters: strings; stdout lines with any of them are copied to filtered_stdout.log.
        stderr_filters: the same for stderr.
        prefix_template: with ``${role_name}``, ``${local_rank}``, ``${rank}``, ``${hostname}``;
            None for torchrun's.
        role: role name, a part of the prefix.
        at_once: show what has no line end yet at once, where the console shows one worker only;
            not where others write to the same place.
        listener: returns what gets all that a local rank writes, stdout and stderr alike.
        withholds: keep tracebacks from the console until it is known which one a failure report
            shows (`LogPump.settle`). Not those of streams that are tee'd, or that have no file.
    """

    log_root: Path | None
    redirects: Callable[[int], int] = nothing
    tee: Callable[[int], int] = nothing
    console_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix_template: str | None = None
    role: str = "default"
    at_once: bool = True
    listener: Callable[[int], Callable[[bytes], None]] | None = None
    withholds: bool = False

    def prefix(self, local_rank: int, rank: int) -> bytes:
        """Return what a tee'd line of this rank begins with."""
        if not self.prefix_template:
            return encode(f"[{self.role}{local_rank}]:")
        names = {"role_name": self.role, "local_rank": local_rank, "rank": rank}
        names["hostname"] = os.uname().nodename
        return encode(string.Template(self.prefix_template).safe_substitute(names))

    def tees(self, local_rank: int, name: str) -> bool:
        """Return whether a stream is tee'd."""
        return bool(self.tee(local_rank) & STREAM_BITS[name])

    def shows(self, local_rank: int, name: str) -> bool:
        """Return whether a stream is shown on the console."""
        if self.console_ranks is not None and local_rank not in self.console_ranks:
            return False
        redirected = self.log_root is not None and bool(
            self.redirects(local_rank) & STREAM_BITS[name]
        )
        return self.tees(local_rank, name) or not redirected

    def filters(self, name: str) -> tuple[str, ...]:
        """Return the duplicate filters of a stream."""
        return self.stdout_filters if name == "stdout" else self.stderr_filters

    def shortcomings(self, local_ranks: Collection[int]) -> list[str]:
        """Return what of the plan cannot be done for want of log files."""
        if self.log_root is not None:
            return []
        found = []
        if not all(self.shows(rank, name) for rank in local_ranks for name in STREAM_BITS):
            found.append("without log files the output of ranks not shown here is dropped")
        if any(self.redirects(rank) for rank in local_ranks):
            found.append("without log files redirected output is shown here")
        if self.stdout_filters or self.stderr_filters:
            found.append("without log files there are no filtered files either")
        return found


def plan_of_run(
    settings: Settings,
    log_root: Path | None,
    environ: Mapping[str, str],
    listener: Callable[[int], Callable[[bytes], None]] | None,
) -> LogPlan:
    """Return the plan that a run's flags make; ``log_root`` and ``listener`` as in LogPlan."""
    return LogPlan(
        log_root=log_root,
        redirects=settings.redirects.of,
        tee=settings.tee.of,
        console_ranks=settings.local_ranks_filter,
        stdout_filters=settings.duplicate_stdout_filters,
        stderr_filters=settings.duplicate_stderr_filters,
        prefix_template=settings.log_line_prefix_template or environ.get(env.LOG_PREFIX_TEMPLATE),
        role=settings.role,
        listener=listener,
        withholds=log_root is not None,
    )
