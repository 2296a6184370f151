"""A command of the shell that an agent runs, in a session of its own.

A pipe is its lifeline: a shell beside it waits for the pipe's end, and kills the command's process
group then, also when the agent was killed. What the command leaves behind ends with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Final

from elaunch.agent.workers.server import Reaper

_SHELL: Final = '(read -r x <&3; kill -9 0) >/dev/null 2>&1 </dev/null & exec sh -c "$1" 3<&-'


class ShellCommand:
    """One run of a command; ``output`` is where its stdout and stderr can be read.

    Args:
        command: text for the shell.
        environ: its variables.
        reaper: starts it.
        stdin: what it reads, at most a pipe's 64 KiB.

    Raises OSError where it cannot be started.
    """

    def __init__(
        self, command: str, environ: Mapping[str, str], reaper: Reaper, *, stdin: bytes = b""
    ) -> None:
        self._exits: list[int] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as failed:
            self.output, written = os.pipe()
            stack.callback(os.close, written)
            failed.callback(os.close, self.output)
            watched, self._lifeline = os.pipe()
            stack.callback(os.close, watched)
            failed.callback(self.cut)
            given, giving = os.pipe()
            stack.callback(os.close, given)
            stack.callback(os.close, giving)
            os.set_blocking(giving, False)
            os.write(giving, stdin)
            files = [
                (os.POSIX_SPAWN_DUP2, given, 0),
                (os.POSIX_SPAWN_DUP2, written, 1),
                (os.POSIX_SPAWN_DUP2, written, 2),
                (os.POSIX_SPAWN_DUP2, watched, 3),
            ]
            argv = ["/bin/sh", "-c", _SHELL, "sh", command]
            reaper.spawn(argv, environ, self._ended, files)
            failed.pop_all()

    def wait(self, seconds: float) -> int | None:
        """Return its exit code (negative: signal) once it has ended; None if it has not."""
        return self._exits[0] if self._over.wait(seconds) else None

    def cut(self) -> None:
        """Have it killed, if it runs still; may be called twice, and from any thread."""
        with self._lock:
            lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def close(self) -> None:
        """Have it killed, and read nothing more of it."""
        self.cut()
        os.close(self.output)

    def _ended(self, exitcode: int) -> None:
        self._exits.append(exitcode)
        self.cut()  # what it has left behind ends, and with that its output
        self._over.set()
