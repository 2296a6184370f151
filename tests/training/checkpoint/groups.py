"""Ranks with a gloo group and a context, quick to start: forked from a process that has torch.

``in_group(work, size, directory, …)`` runs ``work(ctx, …)`` on every rank and returns what each
returned. ``work`` is a function of a module, and so are the models here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from elaunch.errors import ElaunchError
from tests.training.channelrig import PATIENCE, StoreHost
from tests.training.checkpoint.agentrig import SavingAgent

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",
        "elaunch.training.context",
        "elaunch.training.checkpoint.save",
        "elaunch.training.checkpoint.load",
        "tests.training.checkpoint.groups",
    ]
)


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
            saving = SavingAgent(directory / "agent", directory / "checkpoints", size)
            stack.callback(saving.close)
            given |= saving.environment
        return _run(work, size, directory, args, given)


def _run(
    work: Callable[..., Any], size: int, directory: Path, args: Any, env: Mapping[str, str]
) -> list[Any]:
    host = StoreHost()
    pipes, processes = [], []
    for rank in range(size):
        own, other = _forks.Pipe(duplex=False)
        variables = _variables(rank, size, host.port, directory) | dict(env)
        process = _forks.Process(target=_rank, args=(other, variables, work, args), daemon=True)
        process.start()
        other.close()
        pipes.append(own)
        processes.append(process)
    try:
        return [_received(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _received(rank: int, pipe: Connection) -> Any:
    assert pipe.poll(2 * PATIENCE), f"rank {rank} has not ended"
    try:
        return pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} has ended without a word") from None


def _variables(rank: int, size: int, port: int, directory: Path) -> dict[str, str]:
    return {
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
        "XDG_STATE_HOME": str(directory / "state"),
        "ELAUNCH_CHECKPOINT_DIR": str(directory / "checkpoints"),
    }


def _rank(
    pipe: Connection, variables: Mapping[str, str], work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for name in [name for name in os.environ if name.startswith(("ELAUNCH_", "TORCH"))]:
        del os.environ[name]
    os.environ.update(variables)
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
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # gloo's threads may abort a process that ends the long way


def _tried(work: Callable[..., Any], ctx: Any, args: tuple[Any, ...]) -> Any:
    try:
        return work(ctx, *args)
    except BaseException as error:  # CheckpointException of torch is no Exception
        known = isinstance(error, ElaunchError)
        text = str(error) if known else traceback.format_exc()
        return Raised(type(error).__name__, text, isinstance(error, Exception))
