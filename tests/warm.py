"""Start Python programs by forking a process that has torch in memory (tests/warmserver.py).

Most of what a job's start costs is the import of torch, a second of CPU; a test suite that starts
elaunch a thousand times would spend most of its time there. The agents, servers and workers are
real processes all the same, with the parents, arguments, variables and streams of executed ones.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import warmserver

_PR_SET_CHILD_SUBREAPER = 36
_PROGRAM = Path(warmserver.__file__)


class Popen(subprocess.Popen[Any]):
    """A ``python -m MODULE …``, ``python -c CODE …`` or ``python PROGRAM …`` that is forked.

    It is executed where a fork would not see its variables as it does. It is always in a session of
    its own.

    Args:
        argv: the whole command line, the interpreter first.
        env: all its variables.
        cwd: its directory, in the namespaces.
        spaces: paths of the namespaces that it is in, where they are not this process's own.
        options: of ``subprocess.Popen``, for its streams.
    """

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str],
        cwd: Path | None = None,
        spaces: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._spaces = spaces
        words = [os.fspath(word) for word in argv]
        super().__init__(
            words, env=dict(env), cwd=cwd or Path.cwd(), start_new_session=True, **options
        )

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env = rest[4:6]
        prepare(env)
        if not can_start(env):
            assert not self._spaces
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        pipes = rest[9:15]
        streams = [
            pipe if pipe != -1 else number
            for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        opened = [os.open(path, os.O_RDONLY) for path in self._spaces]
        try:
            self.pid = _warm[0].start(args, env, cwd, [*streams, *opened])
            self._child_created = True
        finally:
            for fd in opened:
                os.close(fd)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    argv: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str] | None = None,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a forked Python to its end; ``text`` is what it reads, and its output is returned."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Popen(argv, os.environ if env is None else env, text=True, **pipes) as process:
        out, err = process.communicate(text, timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Warm:
    """The process that forks, one for each process of pytest."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: value for name, value in environ.items() if name != warmserver.PATH}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(theirs.fileno()), "." * warmserver.ROOM],
                env={**kept, "ROOM": "." * warmserver.ROOM},
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
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _warm.append(_Warm(environ))


def can_start(environ: Mapping[str, str]) -> bool:
    """Tell whether a fork would see these variables as an executed command does."""
    return bool(_warm) and warmserver.settings(environ) == _warm[0].settings
