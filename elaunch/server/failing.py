"""A worker whose script has failed lets the server know before its interpreter is taken apart.

That takes longer than all the rest of a restart: 0.2 s of the processor with torch in memory, 0.6 s
where an optimizer has imported ``torch._dynamo``. It also closes the connections to the other
ranks, which then fail of that. So a failure counts when an exception, or ``sys.exit`` with
something else than 0, has left the script, its traceback is shown, its threads are joined and its
exit handlers have run. The rest (objects go, files are written, libraries are unloaded) goes on
beside the end of the other workers, and the sweep waits for it, ENDING_S at most.

Server and workers share a page of memory, so that a script sees no descriptor more. It has the exit
code of each local rank that ends so, and SIGCHLD has the server look. A script with an excepthook
of its own may end with any code: it is known by its end, as a plain process is.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import signal
import sys
from typing import Any, Final

ENDING_S: Final = 8.0
"""Seconds for the end of such an interpreter; less than a sweep has until it gives up."""

_expected: list[int] = []
"""The exit code of this worker, once its script has failed."""


class FailurePage:
    """Owns the page that a server shares with the workers that it forks: their exit codes or 0."""

    def __init__(self) -> None:
        self._codes = mmap.mmap(-1, mmap.PAGESIZE)
        self._server_pid = os.getpid()
        self._worker: tuple[int, int] | None = None
        atexit.register(self._tell)  # before any module's, so it runs behind those

    def clear(self, local_rank: int) -> None:
        """Forget the worker of the round before."""
        if local_rank < len(self._codes):
            self._codes[local_rank] = 0

    def code(self, local_rank: int) -> int:
        """Return the code with which the worker is about to end; 0: its script has not failed."""
        return self._codes[local_rank] if local_rank < len(self._codes) else 0

    def become(self, local_rank: int) -> None:
        """Have this process tell when its exit handlers have run, if its script has failed."""
        self._worker = os.getpid(), local_rank

    def _tell(self) -> None:
        pid, local_rank = self._worker or (0, 0)
        if not _expected or os.getpid() != pid or local_rank >= len(self._codes):
            return
        self._codes[local_rank] = _expected[0]
        if os.getppid() == self._server_pid:
            with contextlib.suppress(OSError):  # the script runs as another user
                os.kill(self._server_pid, signal.SIGCHLD)


def note(error: BaseException) -> None:
    """Take down that ``error`` leaves the script, if it is clear what it ends with."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else error.code is not None
        _expected[:] = [code & 0xFF] if code & 0xFF else []
    elif isinstance(error, Exception) and _only_shows(sys.excepthook):
        _expected[:] = [1]


def _only_shows(hook: Any) -> bool:
    """Whether the hook is the interpreter's, or elaunch's or torch's, which call that one."""
    place = getattr(hook, "__module__", "")
    if place == "elaunch.training.context":
        return _only_shows(hook.__self__._shown)
    if place == "torch.distributed.distributed_c10d" and hook.__closure__ is not None:
        held = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
        return "old_hook" in held and _only_shows(held["old_hook"].cell_contents)
    return hook is sys.__excepthook__
