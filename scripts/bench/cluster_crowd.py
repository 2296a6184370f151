"""A crowd: a handful of light processes with many agents, driven by lines on their stdin.

The first process has one agent, and hosts the TCPStore; four more share the others. The commands
and answers are those of cluster_agents.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster_agents import Task
from cluster_figures import ETCD, OURS, Trial
from job import CLEAR_NAMES, CLEAR_PREFIXES, JobError

from elaunch.rendezvous.decide.view import HOSTED

PROCESSES = 4
CONNECT_SECONDS = 180.0
REPORT_SECONDS = 10.0
CALM_SECONDS = 1.0
"""From the last connection to "go"."""
HERE = Path(__file__).resolve().parent


class TooSlow(JobError):
    """Not all processes have said what was waited for."""


@dataclass(frozen=True)
class Line:
    """What one process said; an empty ``said`` is its end."""

    process: int
    said: str
    mono: float = 0.0


class Crowd:
    """The processes with the agents; reads what they say."""

    def __init__(self, directory: Path) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self._directory = directory
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._kept: list[Line] = []
        self._trouble: dict[str, int] = {}

    def start(self, script: str, task: Task) -> None:
        """Start one more process."""
        number = len(self.processes)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(CLEAR_PREFIXES) and name not in CLEAR_NAMES
        }
        with (self._directory / f"errors-{number}").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE / script), json.dumps(asdict(task))],
                cwd=self._directory,
                env={**kept, "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self.processes.append(process)
        threading.Thread(target=self._read, args=(number, process), daemon=True).start()

    def order(self, command: str, only: int | None = None) -> float:
        """Write a command to all processes, or to one; return the moment before the first."""
        begin = time.monotonic()
        for number, process in enumerate(self.processes):
            if process.stdin is not None and only in (None, number):
                process.stdin.write(command + "\n")
                process.stdin.flush()
        return begin

    def await_all(self, what: str, timeout: float) -> float:
        """Wait until every process has said ``what``; return the moment of the last agent.

        Raises:
            TooSlow: after ``timeout`` seconds.
            JobError: a process has ended.
        """
        return max(line.mono for line in self._await(what, len(self.processes), timeout))

    def await_one(self, what: str, timeout: float) -> float:
        """Wait until one process has said ``what``; raises as ``await_all``."""
        return self._await(what, 1, timeout)[0].mono

    def trouble(self) -> str:
        """Return what went wrong with agents when they last said something, or ""."""
        return "; ".join(f"{count} × {what}" for what, count in self._trouble.items())[:300]

    def report(self) -> str:
        """Ask all what went wrong, and return it with the last words on their stderr."""
        self.order("report")
        with contextlib.suppress(TooSlow):
            self.await_all("report", REPORT_SECONDS)
        errors = (path.read_text(errors="replace") for path in self._directory.glob("errors-*"))
        last = [text.splitlines()[-1] for text in errors if text]
        return "; ".join([self.trouble(), *last]).strip("; ")[:600]

    def end(self) -> None:
        """Kill all processes; nothing that they hold outlives them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(10.0)

    def _await(self, what: str, count: int, timeout: float) -> list[Line]:
        until = time.monotonic() + timeout
        while len(found := [line for line in self._kept if line.said == what]) < count:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                found_in = f"{len(found)} of {count} processes"
                text = f"not within {timeout:g} s ({what!r} in {found_in})"
                raise TooSlow(text) from None
            if not line.said:
                raise JobError(self._last_words(line.process))
            self._kept.append(line)
        return found

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        for text in process.stdout or ():
            said: dict[str, Any] = json.loads(text)
            self._trouble |= said["trouble"]
            self._lines.put(Line(number, said["said"], said["mono"]))
        self._lines.put(Line(number, ""))

    def _last_words(self, number: int) -> str:
        errors = (self._directory / f"errors-{number}").read_text(errors="replace")
        return f"process {number} of the crowd ended: {' | '.join(errors.splitlines()[-4:])}"[:600]


@contextlib.contextmanager
def crowd(trial: Trial, endpoint: str, size: int, rules: tuple[int, float]) -> Iterator[Crowd]:
    """Return a crowd of ``size`` agents, connected to the store and waiting for "go".

    Args:
        trial: the column, and where files go.
        endpoint: of the store.
        size: agents.
        rules: agents that a round needs; the heartbeat timeout in seconds.

    Raises:
        JobError: a process has ended, or is not ready after some minutes.
    """
    _allow_many_files()
    directory = trial.root / f"crowd-{secrets.token_hex(4)}"
    directory.mkdir()
    script = "cluster_agents.py" if trial.column in OURS else "cluster_handlers.py"
    backend = "etcd" if trial.column == ETCD else "c10d"
    of, ttl = rules
    people = Crowd(directory)
    try:
        task = Task(backend, endpoint, "bench", 1, 0, of, ttl, hosts=backend == "c10d")
        people.start(script, task)
        hosted = people.await_all("ready", CONNECT_SECONDS)
        first = 1
        for place_of in range(PROCESSES):
            agents = (size - first) // (PROCESSES - place_of)
            people.start(script, Task(backend, endpoint, "bench", agents, first, of, ttl, False))
            first += agents
        people.await_all("ready", CONNECT_SECONDS)
        time.sleep(max(CALM_SECONDS, hosted + ttl / HOSTED - time.monotonic()))
        yield people
    finally:
        people.end()


def _allow_many_files() -> None:
    """Let this process and its children open as many sockets as the system lets them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
