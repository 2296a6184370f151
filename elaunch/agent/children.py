"""The agent's children: one thread waits for all; the server and shell commands are among them.

A command runs in a session of its own. A pipe is its lifeline: a shell beside it waits for the
pipe's end, and kills the command's process group then, also when the agent was killed. What the
command leaves behind ends with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import elaunch.server
from elaunch import earlysignals
from elaunch.config import Settings

PIPE: Final = 1 << 16
"""Bytes that a pipe takes."""
_SHELL: Final = '(read -r x <&3; kill -9 0) >/dev/null 2>&1 </dev/null & exec sh -c "$1" 3<&-'

Ended = Callable[[int], None]


def spawn(
    argv: Sequence[str],
    environ: Mapping[str, str],
    files: Sequence[tuple[Any, ...]] = (),
    defaults: Iterable[signal.Signals] = (),
) -> int:
    """Start ``argv`` in a session of its own and return its pid; raises OSError.

    ``files`` are file actions of os.posix_spawn. The process has the default actions of
    ``defaults`` also where they are ignored here, and nothing held back that is held back here.
    """
    return os.posix_spawnp(
        argv[0],
        list(argv),
        environ,
        file_actions=files,
        setsid=True,
        setsigmask=earlysignals.usual_mask(),
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, *defaults],
    )


class Reaper:
    """Starts children in sessions of their own and calls their starters when they end.

    One thread in ``waitpid(-1)`` for the agent's whole life waits for all children: the server, and
    orphans that come to a subreaper or to PID 1. A second one would take the ends of children that
    the first is asked about.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, Ended] = {}
        self._stopped: dict[int, Callable[[], None]] = {}
        self._any_child = threading.Event()
        self._thread: threading.Thread | None = None

    def spawn(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        ended: Ended,
        files: Sequence[tuple[Any, ...]] = (),
        stopped: Callable[[], None] = lambda: None,
    ) -> int:
        """Start ``argv`` and return its pid; raises OSError.

        ``ended`` is called once, in the reaper's thread, with the exit code (negative: signal),
        ``stopped`` each time that a signal stops it. ``files`` are file actions of os.posix_spawn.
        """
        with self._lock:  # a child that ends at once is looked up when it is known, not before
            pid = spawn(argv, environ, files)
            self._ended[pid], self._stopped[pid] = ended, stopped
        self._begin()
        return pid

    def adopt(self, pid: int, ended: Ended, stopped: Callable[[], None]) -> None:
        """Wait for a child that this process had before it was an agent; see :meth:`spawn`."""
        with self._lock:
            self._ended[pid], self._stopped[pid] = ended, stopped
        self._begin()

    def _begin(self) -> None:
        self._any_child.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._reap, name="reaper", daemon=True)
            self._thread.start()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WUNTRACED)
            except ChildProcessError:  # none at all: the next spawn wakes this thread
                self._any_child.wait()
                self._any_child.clear()
                continue
            with self._lock:
                stopped = self._stopped.get(pid)
                ended = None if os.WIFSTOPPED(status) else self._ended.pop(pid, None)
                if ended is not None:
                    del self._stopped[pid]
            if ended is not None:
                ended(os.waitstatus_to_exitcode(status))
            elif stopped is not None:
                stopped()


class ShellCommand:
    """One run of a command; ``output`` is where its stdout and stderr come out.

    Args:
        command: text for the shell.
        environ: its variables.
        reaper: starts it.
        stdin: what it reads, at most PIPE bytes.

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
            self._watched, self._lifeline = os.pipe()
            failed.callback(os.close, self._watched)
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
                (os.POSIX_SPAWN_DUP2, self._watched, 3),
            ]
            argv = ["/bin/sh", "-c", _SHELL, "sh", command]
            self._pid = reaper.spawn(argv, environ, self._ended, files)
            failed.pop_all()

    def read(self, until: float = math.inf) -> bytes | None:
        """Return what it prints next; empty once it has ended, None at ``until`` (monotonic).

        A process that it has left in a session of its own may hold its output for ever.
        """
        poll = select.poll()
        for file in (self.output, self._watched):
            poll.register(file, select.POLLIN)
        left = None if until == math.inf else max(0.0, until - time.monotonic()) * 1000
        ready = [file for file, _ in poll.poll(left)]
        if self.output in ready:
            return os.read(self.output, PIPE)
        return b"" if ready else None

    def wait(self, seconds: float) -> int | None:
        """Return its exit code (negative: signal) once it has ended; None if it has not."""
        return self._exits[0] if self._over.wait(seconds) else None

    def end(self) -> None:
        """Ask it to end, by SIGTERM, if it runs still."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may be sudo
            if not self._over.is_set():
                os.kill(self._pid, signal.SIGTERM)

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
        os.close(self._watched)

    def _ended(self, exitcode: int) -> None:
        self._exits.append(exitcode)
        self.cut()  # what it has left behind ends, and with that its output
        self._over.set()


_LONGEST_ROOM = 100_000


def start_server(
    interpreter: str, room: int, start: Callable[[list[str]], int]
) -> tuple[int, socket.socket]:
    """Start a server with ``room`` bytes for the titles of its workers; return pid and lifeline.

    ``start`` starts a command and returns its pid. Raises OSError.
    """
    entry = str(Path(elaunch.server.__file__).with_name("__main__.py"))
    padding = "." * min(max(0, room - len(entry)), _LONGEST_ROOM)
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    with theirs:
        try:
            return start([interpreter, "-u", entry, str(theirs.fileno()), padding]), ours
        except OSError:
            ours.close()
            raise


def title_room(settings: Settings) -> int:
    """Return the length of the longest command of a worker."""
    words = [settings.interpreter, settings.entrypoint, *settings.args]
    has_checkpoint = settings.checkpoint_dir is not None or settings.init_from is not None
    longest_checkpoint = 4096 if has_checkpoint else 0
    return sum(len(os.fsencode(word)) + 1 for word in words) + 64 + longest_checkpoint
