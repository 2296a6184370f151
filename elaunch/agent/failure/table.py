"""torchrun's table of failures, character for character, since schedulers and log parsers read it.

::

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

It is what ``ChildFailedError.format_msg`` of torch 2.13 writes, below the line with which Python
begins to print that exception. A row's number is its place in the order of ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

HEADING = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
NOT_AVAILABLE = "<N/A>"
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
MAX_RULE = 60


@dataclass(frozen=True)
class FailedWorker:
    """One failed worker; ``exitcode`` is negative for a signal, ``at`` in seconds since 1970."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    at: float
    host: str
    error_file: str
    traceback: str


def signal_name(exitcode: int) -> str | None:
    """Return the name of the signal that ``exitcode`` (negative for one) means, or None."""
    try:
        return signal.Signals(-exitcode).name if exitcode < 0 else None
    except ValueError:
        return None


def signal_message(pid: int, exitcode: int) -> str:
    """Return torch's text in place of a traceback for a worker ended by a signal."""
    name = signal_name(exitcode) or NOT_AVAILABLE
    return f"Signal {-exitcode} ({name}) received by PID {pid}"


def failure_table(name: str, rows: Sequence[FailedWorker], root_rank: int) -> str:
    """Return the table without its heading line.

    Args:
        name: the script's name, for the title.
        rows: all failed workers.
        root_rank: the rank that failed first; it is in ``rows``.
    """
    title = f"{name} FAILED"
    ordered = sorted(rows, key=lambda row: row.rank)
    blocks = {row.rank: _block(number, row) for number, row in enumerate(ordered)}
    longest = max(len(line) for block in blocks.values() for line in block.split("\n"))
    width = min(max(longest, len(title)), MAX_RULE)
    root = blocks.pop(root_rank)
    others = list(blocks.values()) or ["  <NO_OTHER_FAILURES>"]
    parts = [
        "=" * width,
        title,
        "-" * width,
        "Failures:",
        *others,
        "-" * width,
        "Root Cause (first observed failure):",
        root,
        "=" * width,
    ]
    return "\n".join(parts)


def _block(number: int, row: FailedWorker) -> str:
    name = signal_name(row.exitcode)
    time = datetime.fromtimestamp(int(row.at)).isoformat(sep="_")
    # The space after the pid's bracket is torch's, with a signal's name after it or without.
    lines = [
        f"[{number}]:",
        f"  time      : {time}",
        f"  host      : {row.host}",
        f"  rank      : {row.rank} (local_rank: {row.local_rank})",
        f"  exitcode  : {row.exitcode} (pid: {row.pid}) " + (f" ({name})" if name else ""),
        f"  error_file: {row.error_file}",
        "  traceback : " + row.traceback.replace("\n", "\n  "),
    ]
    return "\n".join(lines)
