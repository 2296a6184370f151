"""How many workers ``--nproc-per-node`` means: accelerators are counted in a child process.

The rules are torchrun's (torch 2.13, ``torch/distributed/run.py``, ``determine_local_world_size``):
``gpu`` and ``xpu`` must be there, ``auto`` takes the accelerator if there is one and else the CPUs
that this process may use, another name must be the type of the accelerator that torch finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from elaunch.errors import UsageError
from elaunch.server import processes

_DEADLINE = 120.0


def known(kind: str) -> int | None:
    """Return how many workers ``kind`` means here; None if torch must count."""
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    return int(kind) if kind.isdigit() else None


def resolve(kind: str, interpreter: str) -> int:
    """Return how many workers ``kind`` means here; UsageError where that cannot be known."""
    number, problem = known(kind), None
    if number is None:
        number, problem = count_in_fork(kind, interpreter)
    if number is None:
        raise UsageError(str(problem))
    return number


def count(kind: str) -> tuple[int | None, str | None]:
    """Return how many workers ``kind`` means here, or None and the reason; imports torch."""
    import torch

    if kind == "gpu":
        return _available(
            torch.cuda.is_available(), torch.cuda.device_count, "no CUDA GPU is there"
        )
    if kind == "xpu":
        return _available(torch.xpu.is_available(), torch.xpu.device_count, "no XPU is there")
    if kind == "auto":
        if torch.accelerator.is_available():
            return torch.accelerator.device_count(), None
        return len(os.sched_getaffinity(0)), None
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type == kind:
        return torch.accelerator.device_count(), None
    return None, f"torch finds no accelerator of type {kind!r}"


def _available(there: bool, device_count: object, problem: str) -> tuple[int | None, str | None]:
    if not there or not callable(device_count):
        return None, problem
    return int(device_count()), None


def count_in_fork(kind: str, interpreter: str) -> tuple[int | None, str | None]:
    """Run :func:`count` in a child, so that no CUDA state reaches the caller.

    A fork where torch is imported already, else another interpreter. What is returned instead of a
    number is a sentence for the user.
    """
    if "torch" not in sys.modules:
        number, problem = _count_in_interpreter(kind, interpreter)
    else:
        number, problem = _answer(processes.ask_fork(lambda: _count_or_why(kind)))
    if number:
        return number, None
    why = problem or "torch counts none"
    return None, f"--nproc-per-node {kind}: {why}; give a number, or cpu"


def _count_or_why(kind: str) -> tuple[int | None, str | None]:
    try:
        return count(kind)
    except Exception as error:  # whatever a driver raises is the answer
        return None, f"{type(error).__name__}: {error}"


def _count_in_interpreter(kind: str, interpreter: str) -> tuple[int | None, str | None]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import json, sys; sys.path.insert(0, {root!r}); "
        "from elaunch.server import devices, processes; "
        f"processes.die_with_parent({os.getpid()}); "
        f"print(json.dumps(devices.count({kind!r})))"
    )
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, timeout=_DEADLINE)
    except subprocess.TimeoutExpired:
        return None, f"{interpreter} did not count the devices within {_DEADLINE:.0f} s"
    if done.returncode != 0:
        return None, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        return _answer(json.loads(done.stdout))
    except ValueError:
        return _answer(None)


def _answer(pair: Any) -> tuple[int | None, str | None]:
    if pair is None:
        return None, "the process that counts the devices died"
    number, problem = pair
    return number, problem
