"""Start ``elaunch`` by forking a process that has torch in memory (tests/warmserver.py).

Most of what a job's start costs is the import of torch, a second of CPU; a test suite that starts
elaunch a thousand times would spend most of its time there. The agents, servers and workers are
real processes all the same, with the parents, arguments, variables and streams of executed ones.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests import warmserver

_PROGRAM = Path(warmserver.__file__)


class WarmProcess:
    """A forked ``python -m elaunch ...``; like subprocess.Popen, as far as tests need that.

    Args:
        argv: the whole command line, the interpreter first.
        env: all its variables.
        cwd: its directory, in the namespaces.
        spaces: paths of the namespaces that it is in, where they are not this process's own.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, spaces: Sequence[str] = ()
    ) -> None:
        self.args = list(argv)
        self.returncode: int | None = None
        self._lock = threading.Lock()
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.stdout: IO[bytes] = open(out, "rb")  # noqa: SIM115 - whoever reads them closes them
        self.stderr: IO[bytes] = open(err, "rb")  # noqa: SIM115
        opened = [os.open(path, os.O_RDONLY) for path in (os.devnull, *spaces)]
        try:
            files = [opened[0], out_end, err_end, *opened[1:]]
            self.pid = _warm[0].start(self.args, env, cwd, files)
        finally:
            for fd in (out_end, err_end, *opened):
                os.close(fd)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._ended)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            poll.poll(None if timeout is None else timeout * 1000)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class _Warm:
    """The process that forks, one for each process of pytest."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno()), "." * warmserver.ROOM],
                env={**environ, "ROOM": "." * warmserver.ROOM},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._sock = ours
        self._lock = threading.Lock()
        self._ready = False
        self.settings = warmserver.settings(environ)

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, files: Sequence[int]
    ) -> int:
        """Have a command forked; return its pid once it is a child of this process."""
        request = {"argv": argv, "env": dict(env), "cwd": str(cwd)}
        with self._lock:
            if not self._ready:
                self._receive()
                self._ready = True
            warmserver.send(self._sock, request, files)
            pid = self._receive()["pid"]
            self._receive()
        return int(pid)

    def _receive(self) -> Any:
        self._sock.settimeout(60.0)
        received = warmserver.receive(self._sock)
        assert received, f"{_PROGRAM.name} has ended with {self._process.wait(10)}"
        return received[0]


_warm: list[_Warm] = []


def pids() -> set[int]:
    """Return the process that forks, where there is one: it is nobody's run."""
    return {warm.pid for warm in _warm}


def prepare(environ: Mapping[str, str]) -> None:
    """Start the process that forks, if there is none yet; it imports while the tests go on."""
    if not _warm:
        _warm.append(_Warm(environ))


def can_start(environ: Mapping[str, str]) -> bool:
    """Tell whether a fork would see these variables as an executed command does."""
    return bool(_warm) and warmserver.settings(environ) == _warm[0].settings
