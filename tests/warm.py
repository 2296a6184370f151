"""Start Python programs by forking a process that has torch in memory (tests/warmserver.py).

Most of what a job's start costs is the import of torch, a second of CPU; a test suite that starts
elaunch a thousand times would spend most of its time there. The agents, servers and workers are
real processes all the same, with the parents, arguments, variables and streams of executed ones.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests import warmserver

_PR_SET_CHILD_SUBREAPER = 36
IMPORT_S: Final = 300.0
"""Seconds until it has torch; where many import it at once, it takes more than a minute."""
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


def _start_server(
    environ: Mapping[str, str], listener: socket.socket | None = None
) -> tuple[int, int]:
    """Start a process that forks; return what leads to it, and its pid."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in environ.items() if name != warmserver.PATH}
    files = [theirs.fileno(), *([] if listener is None else [listener.fileno()])]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), *map(str, files), "." * warmserver.ROOM],
            env={**kept, "ROOM": "." * warmserver.ROOM},
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            start_new_session=listener is None,
        )
    return ours.detach(), process.pid


class _Warm:
    """The process that forks, one for each process of pytest.

    ``fd`` leads to it; it sees ``settings`` as its commands have to.
    """

    def __init__(self, fd: int, pid: int, settings: Mapping[str, str]) -> None:
        self.pid = pid
        self.settings = settings
        self._sock = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._ready = False

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, files: Sequence[int]
    ) -> int:
        """Have a command forked; return its pid once it is a child of this process."""
        request = {"argv": argv, "env": dict(env), "cwd": str(cwd)}
        with self._lock:
            if not self._ready:
                self._receive(IMPORT_S)
                self._ready = True
            warmserver.send(self._sock, request, files)
            pid = self._receive()["pid"]
            self._receive()
        return int(pid)

    def _receive(self, seconds: float = 60.0) -> Any:
        self._sock.settimeout(seconds)
        received = warmserver.receive(self._sock)
        assert received, f"{_PROGRAM.name} has ended with {os.waitpid(self.pid, 0)[1]}"
        return received[0]


_OWN: Final = os.environ.pop(warmserver.OF_WORKER, "")
_warm: list[_Warm] = []
_kept: list[int] = []
"""Closed, it ends the process that forks those of pytest."""


def pids() -> set[int]:
    """Return the process that forks, where there is one: it is nobody's run."""
    return {warm.pid for warm in _warm}


def prepare(environ: Mapping[str, str]) -> None:
    """Start the process that forks, if there is none yet; it imports while the tests go on."""
    if not _warm:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        own = json.loads(_OWN) if _OWN else (*_start_server(environ), warmserver.settings(environ))
        _warm.append(_Warm(*own))


def fork_workers(specs: Sequence[Any], environ: Mapping[str, str]) -> None:
    """Have pytest's own processes, of which xdist has these descriptions, forked from one.

    So torch is imported once for all of them, and for their commands.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(b"")  # the kernel finds a name
        listener.listen(len(specs))
        _kept.append(_start_server(environ, listener)[0])
        name = listener.getsockname()[1:].decode()
    program = _PROGRAM.with_name("forkedworker.py")
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-S", "-E", str(program), name])


def can_start(environ: Mapping[str, str]) -> bool:
    """Tell whether a fork would see these variables as an executed command does."""
    return bool(_warm) and warmserver.settings(environ) == _warm[0].settings
