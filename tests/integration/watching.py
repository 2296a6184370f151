"""What tests of a running job look for: its server, its store host, its workers' lines."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from tests.integration.jobs import ACT
from tests.launching import Launcher, Running, wait_until

Word = str | PathLike[str]


def act(
    method: Sequence[str], *words: Word, nproc: int | str = 2, flags: Sequence[Word] = ()
) -> list[Word]:
    """Return the arguments of ``elaunch`` for workers that do what ``words`` say."""
    return ["run", *method, "--nproc-per-node", str(nproc), *flags, ACT, *words]


def wait_for_workers(running: Running, nproc: int = 2, round: int = 0) -> list[int]:
    """Wait until ``say=up`` was done by every worker of a round; return their pids by rank."""
    lines = (rf"^up rank={rank} round={round} pid=(\d+)$" for rank in range(nproc))
    return [int(running.wait_for_line(line)[1]) for line in lines]


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def server_of(running: Running) -> int:
    """Return the pid of the one process between the agent and its workers."""
    wait_until(lambda: children(running.pid), what="the agent has a server")
    (server,) = children(running.pid)
    return server


def store_host_of(running: Running) -> int:
    """Return the pid of the process that hosts the workers' store, once there is one."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [
            pid
            for pid in children(server_of(running))
            if b"store host" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return bool(found)

    wait_until(look, what="a store host below the server")
    return found[0]


def state_of(pid: int) -> str:
    """Return the state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(launcher: Launcher) -> None:
    """Wait until no process of the test's runs is left, long before any would end by itself."""
    wait_until(lambda: not launcher.leftovers(), what=f"all gone: {launcher.leftovers()}")


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._began


def agent_lines(stderr: str) -> list[str]:
    """Return the agent's own lines, without their times."""
    return re.findall(r"^elaunch \d\d:\d\d:\d\d\.\d+ (.*)$", stderr, re.M)
