"""Start one probing script by torchrun and by elaunch's two start methods, and compare the answers.

A probing script writes JSON files into ``$PARITY_OUT``, one directory for each start.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher

HERE = Path(__file__).parent
DEADLINE = 250.0
"""Seconds for all starts of a fixture together, on a machine that is busy; a test has 300."""
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--standalone"],  # else all of torch 2.8 have one port
    "spawn": ["elaunch", "run", "--start-method", "spawn"],
    "fork": ["elaunch", "run", "--start-method", "forkserver"],
    "fork without preload": ["elaunch", "run", "--preload", "none"],
    "fork with jax": ["elaunch", "run", "--preload", "torch,jax"],
}
Item = str
"""Names one thing that was observed: the keys that lead to it, with slashes between."""


@dataclass(frozen=True)
class Start:
    """One start of a probing script.

    Args:
        words: the script and its arguments, as on the command line.
        workers: how many workers.
        shell: what starts the command ``"$@"`` with a state of its own.
        env: added to the clean environment.
        options: for all launchers alike.
    """

    words: Sequence[str]
    workers: int = 1
    shell: str = 'exec "$@"'
    env: Mapping[str, str] | None = None
    options: Sequence[str] = ()

    def argv(self, method: str) -> list[str]:
        """Return the whole command for a key of `COMMANDS`."""
        count = ["--nproc-per-node", str(self.workers), *self.options]
        command = [sys.executable, "-m", *COMMANDS[method], *count, *self.words]
        return ["sh", "-c", self.shell, "sh", *command]


@dataclass(frozen=True)
class Outcome:
    """What one start came to; ``out`` holds the files of the probing script."""

    code: int
    stdout: str
    stderr: str
    out: Path

    def read(self, name: str) -> dict[str, Any]:
        """Return one JSON file of the probing script; without it the test fails."""
        path = self.out / f"{name}.json"
        assert path.exists(), (
            f"{self.out.name} ended with {self.code}\n{self.stdout}\n{self.stderr}"
        )
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def launch(launcher: Launcher, directory: Path, starts: Mapping[str, Start]) -> dict[str, Outcome]:
    """Run all of ``starts`` (method → start) at the same time, in ``directory``."""
    running, found = {}, {}
    # multiprocessing makes sockets below it, and the name of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as temporary:
        for method, start in starts.items():
            out = directory / method.replace(" ", "-")
            out.mkdir()
            env = {"PARITY_OUT": str(out), "TMPDIR": temporary, **(start.env or {})}
            process = launcher.start_command(start.argv(method), env=env, cwd=directory)
            running[method] = (out, process)
        until = time.monotonic() + DEADLINE
        for method, (out, process) in running.items():
            done = process.wait(max(0.0, until - time.monotonic()))
            found[method] = Outcome(done.returncode, done.stdout, done.stderr, out)
    return found


def launch_alike(
    directory: Path, start: Start, methods: Iterable[str] = ("torchrun", "spawn", "fork")
) -> dict[str, Outcome]:
    """Run ``start`` by each of ``methods`` and see that no process is left; for module fixtures."""
    launcher = Launcher(directory)
    try:
        return launch(launcher, directory, dict.fromkeys(methods, start))
    finally:
        launcher.close()


def launch_once(
    factory: pytest.TempPathFactory,
    name: str,
    prepare: Callable[[Path], Start],
    methods: Iterable[str] = ("torchrun", "spawn", "fork"),
) -> dict[str, Outcome]:
    """Do as ``launch_alike``, once for all processes of pytest: a start takes seconds."""
    base = factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"parity-{name}"
    directory.mkdir(exist_ok=True)
    kept = directory / "outcomes"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            place = directory / "place"
            place.mkdir()
            outcomes = launch_alike(place, prepare(place), methods)
            kept.write_bytes(pickle.dumps(outcomes))
    found: dict[str, Outcome] = pickle.loads(kept.read_bytes())
    return found


def differences(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[Item, Any]:
    """Return each item whose value is not the same in both, with both values."""
    left, right = dict(_flat(reference)), dict(_flat(other))
    return {
        item: (left.get(item, "absent"), right.get(item, "absent"))
        for item in sorted(left.keys() | right.keys())
        if left.get(item, "absent") != right.get(item, "absent")
    }


def _flat(found: Mapping[str, Any], path: str = "") -> Iterator[tuple[Item, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield path + name, value
