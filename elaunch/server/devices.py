"""The accelerators as torch knows them, asked in a child process: how many, and where they are.

How many workers ``--nproc-per-node`` means goes by torchrun's rules (torch 2.15,
``torch/distributed/run.py``, ``determine_local_world_size``): ``gpu`` and ``xpu`` must be there,
``auto`` takes the accelerator if there is one and else the CPUs that this process may use, another
name must be the type of the accelerator that torch finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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
        raise UsageError(str(problem), code="E-DEVICES")
    return number


def count(kind: str) -> tuple[int | None, str | None]:
    """Return how many workers ``kind`` means here, or None and the reason; imports torch."""
    import torch

    named = {"gpu": (torch.cuda, "CUDA GPU"), "xpu": (torch.xpu, "XPU")}
    if kind in named:
        module, what = named[kind]
        return (
            (module.device_count(), None) if module.is_available() else (None, f"no {what} found")
        )
    if kind == "auto":
        if torch.accelerator.is_available():
            return torch.accelerator.device_count(), None
        return len(os.sched_getaffinity(0)), None
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type == kind:
        return torch.accelerator.device_count(), None
    return None, f"torch finds no accelerator of type {kind!r}"


def addresses() -> tuple[list[str], str | None]:
    """Return the PCI address of each accelerator, or none and the reason; imports torch."""
    import torch

    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None:
        return [], "torch finds no accelerator, and CPUs are bound by where that is"
    module = torch.get_device_module(current)
    found = [module.get_device_properties(i) for i in range(torch.accelerator.device_count())]
    if not all(hasattr(each, "pci_bus_id") for each in found):
        return [], f"torch {torch.__version__} does not know where a device of this kind is"
    return [
        f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0"
        for each in found
    ], None


def count_in_fork(kind: str, interpreter: str) -> tuple[int | None, str | None]:
    """Run :func:`count` in a child; what is returned instead of a number is for the user."""
    number, problem = _in_fork(count, (kind,), interpreter)
    if number:
        return number, None
    why = problem or "torch counts none"
    return None, f"--nproc-per-node {kind}: {why}; give a number, or cpu"


def addresses_in_fork(interpreter: str) -> tuple[list[str], str | None]:
    """Run :func:`addresses` in a child."""
    found, problem = _in_fork(addresses, (), interpreter)
    return found or [], problem


def _in_fork(
    question: Callable[..., Any], words: tuple[str, ...], interpreter: str
) -> tuple[Any, str | None]:
    """Ask a question of this module in a child, so that no CUDA state reaches the caller.

    A fork where torch is imported already, else another interpreter.
    """
    if "torch" not in sys.modules:
        return _in_interpreter(question.__name__, words, interpreter)
    return _answer(processes.call_in_fork(lambda: _or_why(question, words)))


def _or_why(question: Callable[..., Any], words: tuple[str, ...]) -> tuple[Any, str | None]:
    try:
        found, problem = question(*words)
    except Exception as error:  # whatever a driver raises is the answer
        return None, f"{type(error).__name__}: {error}"
    return found, problem


def _in_interpreter(
    question: str, words: tuple[str, ...], interpreter: str
) -> tuple[Any, str | None]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import json, sys; sys.path.insert(0, {root!r}); "
        "from elaunch.server import devices, processes; "
        f"processes.die_with_parent({os.getpid()}); "
        f"print(json.dumps(devices.{question}(*{words!r})))"
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


def _answer(pair: Any) -> tuple[Any, str | None]:
    if pair is None:
        return None, "the process that counts the devices died"
    found, problem = pair
    return found, problem
