"""How a process ended: as a record, in words, as an exit code; negative codes are for a signal."""

from __future__ import annotations

import signal
from typing import NamedTuple

PREEMPTED = 75
"""Exit code of a run that was asked to end, and whose workers acknowledged it and ended with 0: not
done, to be continued (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that a person has ended with Ctrl-C."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a run that was asked to end and did not."""


def signal_name(number: int, unknown: str = "signal {}") -> str:
    """Return a signal's name, or ``unknown``: real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return unknown.format(number)


def how_it_ended(exitcode: int) -> str:
    """Return "exited with code 7" or "was killed by SIGKILL"."""
    if exitcode < 0:
        return f"was killed by {signal_name(-exitcode)}"
    return f"exited with code {exitcode}"


class Exit(NamedTuple):
    """How one worker ended: made by the server, which waited for it, and passed on as it is.

    It is a message to the agent, an event of its loop, the failure in its state, and what report,
    record and event log are made from.

    Attributes:
        round: the worker's round.
        rank: in the job.
        local_rank: on its node.
        pid: of its process.
        exitcode: negative for a signal.
        at: when its wait returned, in seconds of the machine's monotonic clock.
        stopped: whether the server had been asked to end the workers, and had not yet seen this
            one's end: "it died" and "we ended it" are different facts.
        timer: which timer of torch.distributed.elastic.timer had expired before; empty: none.
    """

    round: int
    rank: int
    local_rank: int
    pid: int
    exitcode: int
    at: float
    stopped: bool = False
    timer: str = ""

    @property
    def how(self) -> str:
        """Return "exited with code 7" or "was killed by SIGKILL"."""
        return how_it_ended(self.exitcode)

    @property
    def word(self) -> str:
        """Return "exit code 7" or "SIGKILL"."""
        if self.exitcode < 0:
            return signal_name(-self.exitcode)
        return f"exit code {self.exitcode}"

    @property
    def text(self) -> str:
        """Return "rank 1 exited with code 7" or "rank 1 was killed by SIGKILL"."""
        return f"rank {self.rank} {self.how}"


def exit_code(exitcode: int) -> int:
    """Return the command's exit code for a failed worker's: 128 + n for a signal; never 0."""
    return 128 - exitcode if exitcode < 0 else exitcode & 0xFF or 1
