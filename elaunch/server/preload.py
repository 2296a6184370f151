"""Import what the workers will need, once, before they are forked.

Most of it before the first fork; elaunch.server.later has the rest. The server must have one thread
when it forks: modules that start others, native ones too, are found here and named.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

THREADS_GONE = 0.1
"""Seconds for the kernel to take a thread that has ended off its list."""


@dataclass(frozen=True)
class Preloaded:
    """What became of an import.

    ``problem`` is why it failed, or why nothing may be started with it; ``unforkable`` why this
    process must not be forked any more, with the module that is to blame.
    """

    problem: str | None = None
    unforkable: str = ""


def preload(modules: Sequence[str], path: str | None) -> Preloaded:
    """Import ``modules`` in order.

    ``path`` is what a worker has first on ``sys.path``, if it has anything of its own there.
    """
    if path is not None:
        sys.path.insert(0, path)
    gc.disable()  # an import leaves next to no garbage, and looking for it takes a tenth of torch's
    try:
        return _import(modules)
    finally:
        gc.enable()
        if path is not None and path in sys.path:
            sys.path.remove(path)


def _import(modules: Sequence[str]) -> Preloaded:
    unforkable, threads = "", _threads()
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may raise anything, SystemExit included
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            return Preloaded(
                f"--preload {name}: {last} (in {sys.executable}); install it there, leave it out "
                "(--preload none imports nothing), or use --start-method spawn"
            )
        if _threads() > threads and name.partition(".")[0] != "torch":  # it starts OpenBLAS' only
            others = threads_after_a_fork() - 1
            unforkable = unforkable or (_reason(name, others) if others else "")
        threads = _threads()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return Preloaded(
            f"--preload {','.join(modules)}: a module initialised CUDA while it was imported; a "
            "forked worker cannot use CUDA then. Leave it out, or use --start-method spawn"
        )
    return Preloaded(unforkable=unforkable)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_after_a_fork() -> int:
    """Return how many threads this process has once it has forked.

    A library that knows of forks ends its threads before one and starts others when it needs them,
    as OpenBLAS does. OpenMP's stay: a child waits for ever for those that it does not have.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    until = time.monotonic() + THREADS_GONE
    while (count := _threads()) > 1 and time.monotonic() < until:
        time.sleep(0.001)
    return count


def _reason(module: str, others: int) -> str:
    what = "another thread" if others == 1 else f"{others} other threads"
    return (
        f"--preload {module}: it has started {what} while it was imported (OpenMP's, if it "
        "computes then), and a forked worker would wait for ever for threads that it does not have"
    )
