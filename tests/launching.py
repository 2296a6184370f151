"""Run the real command in a test, and see that it left no process behind.

A ``Launcher`` belongs to one test. Each process that it starts, and all that they start, carry
``MARKER=<a random value>`` in their environment; the test process is a subreaper meanwhile, so an
orphan that has overwritten its environment (a process title does that) still comes back to it.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar, Final, Literal

import psutil

from tests import netns, warm

DEADLINE: Final = 150.0
"""Seconds of a wait that ends with what it waits for: many, for a machine that is busy."""

TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--standalone")
"""Without the flag all jobs of torch up to 2.10 on one node have one port."""

NO_KILL: Final = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
"""Words before a command of root that may not signal other users' processes.

A command that is forked gives that right up by itself.
"""

MARKER = "TEST_RUN_MARKER"
"""Name of the variable that every process of a test's runs carries."""

LEFTOVER_SECONDS = 60.0
"""How long a process may take to disappear after the command that started it has ended."""

_FOREIGN = re.compile(r"^(PET_|ELAUNCH_|TORCHELASTIC_|PYTEST_|TORCH_ELASTIC_)")
_FOREIGN_NAMES = frozenset(
    "OMP_NUM_THREADS RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR "
    "MASTER_PORT NO_COLOR FORCE_COLOR PYTHONPATH LOGLEVEL PYTHON_EXEC".split()
)
_PR_SET_CHILD_SUBREAPER = 36
Stream = Literal["stdout", "stderr"]


def clean_environment(state: Path) -> dict[str, str]:
    """Return this process's environment without what would reach into a run, with its own state."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not _FOREIGN.match(name) and name not in _FOREIGN_NAMES
    }
    return kept | {"XDG_STATE_HOME": str(state)}


def free_port(host: str = "") -> int:
    """Return a port that nobody has, below those that a connection gets by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind((host, port))
            return port


def without_waits(stderr: str) -> str:
    """Return what a command says beyond the reminders of a busy machine that it still waits."""
    lines = stderr.splitlines(keepends=True)
    return "".join(
        line
        for line in lines
        if not re.match(r"elaunch \S+ still (?:waiting for|importing|starting) ", line)
    )


def wait_until(condition: Callable[[], object], deadline: float = DEADLINE, what: str = "") -> None:
    """Wait until ``condition()`` is true; after ``deadline`` seconds the test fails."""
    until = time.monotonic() + deadline
    late = False
    while not condition():
        # One more look is taken after the deadline: this process may itself have been held up.
        assert not late, f"not within {deadline} s: {what or condition}"
        time.sleep(0.01)
        late = time.monotonic() >= until


def freeze(pid: int) -> None:
    """Stop a process as SIGSTOP does, and wait until each of its threads stands still."""
    os.kill(pid, signal.SIGSTOP)
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    wait_until(lambda: all(") T " in stat.read_text() for stat in stats), what=f"{pid} is stopped")


def thaw(pid: int) -> None:
    """Let a stopped process go on."""
    os.kill(pid, signal.SIGCONT)


def _executed(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@dataclass
class _Output:
    """What one stream has said so far; a thread reads it until its last writer is gone."""

    pipe: IO[bytes]
    changed: threading.Condition
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def pump(self) -> None:
        """Read until the end of the pipe."""
        with self.pipe:
            while chunk := os.read(self.pipe.fileno(), 1 << 16):
                with self.changed:
                    self.data += chunk
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def text(self) -> str:
        """Return everything so far."""
        return self.data.decode(errors="replace")


def _tree(pid: int) -> str:
    """Return a process and all below it, with what each of their threads waits in."""
    lines = []
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, OSError):
                tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
                waits = " ".join((task / "wchan").read_text() for task in tasks)
                command = " ".join(process.cmdline())[:120]
                parts = (process.pid, process.ppid(), process.status(), waits, command)
                lines.append(" ".join(map(str, parts)))
    return "\n".join(lines)


class Running:
    """A started command: its process, its output so far, and waits with a deadline."""

    started: ClassVar[list[Running]] = []
    """Those of the test that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.started.append(self)
        self.argv: list[str] = process.args  # type: ignore[assignment]  # Popen keeps what it got
        self.process = process
        assert process.stdout is not None and process.stderr is not None
        self._changed = threading.Condition()
        self._outputs = {
            "stdout": _Output(process.stdout, self._changed),
            "stderr": _Output(process.stderr, self._changed),
        }
        for output in self._outputs.values():
            threading.Thread(target=output.pump, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the command itself: the agent."""
        return self.process.pid

    def output(self, stream: Stream = "stdout") -> str:
        """Return what the stream has said so far; undecodable bytes are replaced."""
        return self._outputs[stream].text()

    def output_bytes(self, stream: Stream = "stdout") -> bytes:
        """Return what the stream has said so far, byte for byte."""
        return bytes(self._outputs[stream].data)

    def wait_for_line(
        self, pattern: str, deadline: float = DEADLINE, stream: Stream = "stdout"
    ) -> re.Match[str]:
        """Wait until a whole line matches ``pattern`` (``re.search``) and return the match.

        Args:
            deadline: seconds; then, and when the stream ends without the line, the test fails.
        """
        output = self._outputs[stream]

        def found() -> re.Match[str] | None:
            whole = output.text() if output.ended else output.text().rpartition("\n")[0]
            return next(
                filter(None, (re.search(pattern, line) for line in whole.split("\n"))), None
            )

        with self._changed:
            self._changed.wait_for(lambda: found() or output.ended, deadline)
            match = found()
        if match is None:
            why = "the stream ended" if output.ended else f"{deadline} s passed"
            raise AssertionError(f"no line matched {pattern!r} before {why}\n{self._transcript()}")
        return match

    def wait(self, deadline: float = DEADLINE) -> subprocess.CompletedProcess[str]:
        """Wait for the end of the command and of its output; fail after ``deadline`` seconds."""
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            still = f"{self._transcript()}\n--- processes\n{_tree(self.pid)}"
            raise AssertionError(f"still runs after {deadline} s\n{still}") from None
        with self._changed:
            # A process that was left behind may hold the pipes open: the teardown names it.
            self._changed.wait_for(
                lambda: all(o.ended for o in self._outputs.values()), LEFTOVER_SECONDS
            )
        return subprocess.CompletedProcess(
            self.argv, code, self.output("stdout"), self.output("stderr")
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)

    def send_again(self, number: signal.Signals, until: Callable[[], object]) -> None:
        """Send a signal again, until it counts: within a second it is the same request."""

        def sent() -> object:
            if self.process.poll() is None:
                self.process.send_signal(number)
            return until()

        wait_until(sent, what=f"a second {number.name} counts")

    def end(self) -> None:
        """Kill the command where it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60.0)

    def _transcript(self) -> str:
        return f"{self.argv}\n--- stdout\n{self.output()}\n--- stderr\n{self.output('stderr')}"


class Launcher:
    """Starts ``elaunch`` for one test with a private state directory; see the module's text.

    Args:
        forks: ``elaunch run`` and other Python programs are forked where no difference can be seen
            (tests/warm.py).
    """

    def __init__(self, directory: Path, *, forks: bool = False) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.env = clean_environment(self.state) | {MARKER: uuid.uuid4().hex}
        self._forks = forks
        if forks:
            warm.prepare(clean_environment(self.state))
        self._before = _descendants(os.getpid())
        self._running: list[Running] = []
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        deadline: float = DEADLINE,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``elaunch ARGS`` to its end; ``env`` is added to the clean environment."""
        return self.start(args, env=env, cwd=cwd).wait(deadline)

    def start(
        self,
        args: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Running:
        """Start ``elaunch ARGS``; the test's end kills it where it still runs."""
        return self.start_elaunch(args, self.env | dict(env or {}), cwd or self.directory)

    def start_elaunch(
        self,
        args: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str],
        cwd: Path,
        machine: netns.Machine | None = None,
    ) -> Running:
        """Start ``elaunch ARGS`` with just these variables, on a machine if one is given."""
        argv = [sys.executable, "-m", "elaunch", *map(os.fspath, args)]
        return self._begin(argv, env, cwd, machine, may_fork=True)

    def start_command(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        machine: netns.Machine | None = None,
        spaces: Sequence[str] = (),
    ) -> Running:
        """Start any command (torchrun, nohup elaunch …) under the same rules, here or on a machine.

        A program of this very Python, also after ``NO_KILL``, is forked as ``elaunch run`` is; it
        alone can be put into ``spaces``, paths of namespaces.
        """
        argv = [os.fspath(word) for word in argv]
        everything = self.env | dict(env or {})
        words = argv[len(NO_KILL) :] if (*argv[: len(NO_KILL)],) == NO_KILL else argv
        plain = words[0] == sys.executable and (words[1] in ("-m", "-c") or words[1][:1] != "-")
        where = cwd or self.directory
        return self._begin(argv, everything, where, machine, may_fork=plain, spaces=spaces)

    def _begin(
        self,
        argv: list[str],
        env: Mapping[str, str],
        cwd: Path,
        machine: netns.Machine | None = None,
        *,
        may_fork: bool = False,
        spaces: Sequence[str] = (),
    ) -> Running:
        if self._forks and may_fork and warm.can_start(env):
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            spaces = machine.namespaces() if machine else spaces
            process = warm.Popen(argv, env, cwd, spaces, stdin=subprocess.DEVNULL, **pipes)
        else:
            assert not spaces
            prefix = machine.prefix(cwd) if machine else []
            process = _executed([*prefix, *argv], env, cwd)
        running = Running(process)
        self._running.append(running)
        return running

    def leftovers(self) -> dict[int, str]:
        """Return the processes of this test's runs that are alive now: pid and command line."""
        marked = {pid for pid in _pids() if f"{MARKER}={self.env[MARKER]}" in _environ(pid)}
        ours = marked | self._descended()
        return {pid: line for pid in ours if (line := _command_line(pid)) is not None}

    def _descended(self) -> set[int]:
        return _descendants(os.getpid()) - self._before - warm.pids()

    def close(self) -> None:
        """End what still runs; fail where a command that had ended left a process behind."""
        for running in self._running:
            running.end()
        until = time.monotonic() + LEFTOVER_SECONDS
        while (left := self.leftovers()) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(self._descended())
        assert not left, f"left behind: {left}"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _environ(pid: int) -> list[str]:
    return _read(pid, "environ").split("\0")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent …; empty when gone."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _command_line(pid: int) -> str | None:
    """Return the command line; None for a process that is gone, a zombie, or not of a run."""
    stat = _stat(pid)
    if not stat or stat[0] in "ZX":
        return None
    line = _read(pid, "cmdline").replace("\0", " ").strip()
    # Python starts this one for the test process itself and keeps it to the end.
    return None if "multiprocessing.resource_tracker" in line else line or f"[{pid}]"


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(one) for tid in threads for one in _read(pid, f"task/{tid}/children").split()]


def _descendants(root: int) -> set[int]:
    found: set[int] = set()
    todo = [root]
    while todo:
        new = _children(todo.pop())
        found.update(new)
        todo += new
    return found


def _reap(pids: Iterable[int]) -> None:
    """Collect orphans that ended as our children."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
