"""How a process ended, in words and as an exit code; exit codes are negative for a signal."""

from __future__ import annotations

import signal

PREEMPTED = 75
"""Exit code of a run that was asked to end, and whose workers acknowledged it and ended with 0: not
done, to be continued (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that a person has ended with Ctrl-C."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a run that was asked to end and did not."""


def signal_name(number: int) -> str:
    """Return a signal's name; real-time signals have none of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(exitcode: int) -> str:
    """Return "exited with code 7" or "was killed by SIGKILL"."""
    if exitcode < 0:
        return f"was killed by {signal_name(-exitcode)}"
    return f"exited with code {exitcode}"


def exit_code(exitcode: int) -> int:
    """Return the command's exit code for a failed worker's: 128 + n for a signal; never 0."""
    return 128 - exitcode if exitcode < 0 else exitcode & 0xFF or 1
