"""Ranks with a gloo group and a context, quick to start: forked from a process that has torch.

``in_group(work, size, directory, …)`` runs ``work(ctx, …)`` on every rank and returns what each
returned. ``work`` is a function of a module, and so are the models here. A rank reads what it is to
run from its stdin, and writes the answer to what was its stdout: both are pickles.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elaunch.errors import ElaunchError
from tests import warm
from tests.training.rankrig import PATIENCE, ROOT, StoreHost

_CODE = f"from {__name__} import run_rank; run_rank()"


@dataclass(frozen=True)
class Raised:
    """What a rank's work raised."""

    kind: str
    text: str
    is_exception: bool

    def __contains__(self, words: str) -> bool:
        return words in self.text


def in_group(
    work: Callable[..., Any],
    size: int,
    directory: Path,
    *args: Any,
    env: Mapping[str, str] | None = None,
    agent: bool = False,
) -> list[Any]:
    """Return what ``work(ctx, *args)`` returned on each rank; Raised where it raised.

    ``env`` may have ``GROUP`` = ``no``: then there is no process group. With ``agent`` this process
    has the saver of an agent for them: what a test replaces in the storage's class is replaced for
    it, and not for the ranks.
    """
    given = dict(env or {})
    with contextlib.ExitStack() as stack:
        if agent:
            from tests.training.checkpoint.agentrig import SavingAgent  # the ranks need none of it

            saving = SavingAgent(directory / "agent", directory / "checkpoints", size)
            stack.callback(saving.close)
            given |= saving.environment
        return _run(work, size, directory, args, given)


def _run(
    work: Callable[..., Any], size: int, directory: Path, args: Any, env: Mapping[str, str]
) -> list[Any]:
    host = StoreHost()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            variables = _variables(rank, size, host.port, directory) | dict(env)
            ranks.append(warm.Popen([sys.executable, "-c", _CODE], variables, **pipes))
            with ranks[-1].stdin as stdin:
                pickle.dump((work, args), stdin)
            ranks[-1].stdin = None
        return [_answer(rank, process) for rank, process in enumerate(ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def _answer(rank: int, process: subprocess.Popen[bytes]) -> Any:
    answer, _ = process.communicate(timeout=2 * PATIENCE)
    assert answer, f"rank {rank} has ended without a word, with {process.returncode}"
    return pickle.loads(answer)


def _variables(rank: int, size: int, port: int, directory: Path) -> dict[str, str]:
    foreign = ("ELAUNCH_", "TORCH", "XDG_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(directory / "state"),
        "ELAUNCH_CHECKPOINT_DIR": str(directory / "checkpoints"),
    }


def run_rank() -> None:
    """Run what stdin says; ends this process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work, args = pickle.load(sys.stdin.buffer)
    import torch
    import torch.distributed as dist

    import elaunch

    torch.set_num_threads(1)
    if os.environ.get("GROUP") != "no":
        dist.init_process_group("gloo")
    try:
        with elaunch.init(announce=False, timeout=PATIENCE) as ctx:
            answer = _tried(work, ctx, args)
            assert not torch.cuda.is_initialized()
    except ElaunchError as error:
        answer = Raised(type(error).__name__, f"at the end: {error}", True)
    with answers:
        pickle.dump(answer, answers)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends the long way


def _tried(work: Callable[..., Any], ctx: Any, args: tuple[Any, ...]) -> Any:
    try:
        return work(ctx, *args)
    except BaseException as error:  # CheckpointException of torch is no Exception
        known = isinstance(error, ElaunchError)
        text = str(error) if known else traceback.format_exc()
        return Raised(type(error).__name__, text, isinstance(error, Exception))
