"""Ranks that use ``ctx.checkpoint``: processes as torchrun starts them, around a real TCPStore."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaunch.checkpoint import layout
from tests import warm
from tests.training.rankrig import PATIENCE, ROOT, StoreHost

HEAD = """
import json, os, signal, sys, threading, time
from pathlib import Path
import elaunch
from elaunch import CheckpointError, CollectiveError, CollectiveTimeout, ContextError
from elaunch import Keep, PeerLost, SaveError
from tests import warm

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def tried(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def store(step, files=None, shard=True, metadata=None, **options):
    with ck.store_path(
        {"steps_completed": step, **(metadata or {})}, shard=shard, **options
    ) as (path, uuid):
        for name, content in (files or {}).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content)
    return uuid

ctx = elaunch.init(announce=False, timeout=TIMEOUT)
rank, ck = ctx.distributed.rank, ctx.checkpoint
"""
TAIL = "\nctx.close()\n"


class Job:
    """The ranks of one start of a job; ``close`` ends what still runs.

    Args:
        directory: of the test; the state directory is below it.
        script: runs after HEAD on every rank.
        size: ranks.
        nodes: that they are on, in equal parts.
        timeout: of the context, in seconds.
        env: for all ranks; with ``{node}`` in a value the node's rank stands there.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        size: int = 2,
        nodes: int = 1,
        timeout: float = PATIENCE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._host = StoreHost()
        head = HEAD.replace("TIMEOUT", str(timeout))
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(size):
            node = rank // (size // nodes)
            given = {key: value.replace("{node}", str(node)) for key, value in (env or {}).items()}
            self.processes.append(
                warm.Popen(
                    [sys.executable, "-c", head + script + TAIL],
                    self._environment(rank, size, nodes) | state_of(directory) | given,
                    directory,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def _environment(self, rank: int, size: int, nodes: int) -> dict[str, str]:
        local = size // nodes
        foreign = ("ELAUNCH_", "TORCH", "XDG_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": rank // local,
            "GROUP_WORLD_SIZE": nodes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._host.port,
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONPATH": ROOT,
        }
        return kept | {key: str(value) for key, value in variables.items()}

    def line(self, rank: int) -> str:
        """Return the next line of a rank; blocks."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().rstrip("\n")

    def ends(self, rank: int) -> tuple[int, str, str]:
        """Return exit code, the rest of stdout, and stderr of a rank, once it has ended."""
        out, err = self.processes[rank].communicate(timeout=2 * PATIENCE)
        return self.processes[rank].returncode, out, err

    def said(self) -> list[Any]:
        """Return what each rank said as its last line, which is JSON; all must end well."""
        ended = [self.ends(rank) for rank in range(len(self.processes))]
        assert [code for code, _, _ in ended] == [0] * len(ended), ended
        return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]

    def kill(self, rank: int) -> None:
        """SIGKILL a rank."""
        self.processes[rank].send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=PATIENCE)


def state_of(directory: Path) -> dict[str, str]:
    """Return the variable that puts all state below a directory."""
    return {"XDG_STATE_HOME": str(directory / "state")}


def checkpoints(directory: Path) -> Path:
    """Return where a job without a word about it keeps its checkpoints."""
    return directory / "state" / "elaunch" / "job" / "checkpoints"


def committed(place: Path) -> list[str]:
    """Return the names of the committed checkpoints in a directory."""
    names = [name for name in os.listdir(place) if layout.parse_step_name(name) is not None]
    assert all((place / name / layout.COMMIT).exists() for name in names)
    return sorted(names)


def stages(place: Path) -> list[str]:
    """Return what is being written in a directory, or was left there."""
    return os.listdir(place / layout.STAGE)


def user_files(checkpoint: Path) -> dict[str, str]:
    """Return the files of a checkpoint that the script has written, with their content."""
    found = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        ours = name in (layout.COMMIT, layout.METADATA) or name.startswith("manifest.rank-")
        if path.is_file() and not ours:
            found[name] = path.read_text()
    return found
