"""Patches of torch in a forked worker, some of them for old versions only.

Two are of stores under a launcher. With TORCHELASTIC_USE_AGENT_STORE=True
(torch/distributed/rendezvous.py, ``_create_c10d_store``)

* every rank is a client of **any** ``tcp://`` store, also of one that the script opens at an
  address of its own, which then nobody hosts: all ranks wait until the timeout. From 2.14 on torch
  honours the variable at the launcher's own address only, and is left to do so; so it is here.
* a process group that is destroyed and made again in one process finds the keys of the first in the
  launcher's store, and connects to addresses that are gone. From the second time on the keys get a
  prefix here. It is counted for each world size: one rank may have had a group of its own before.

Where torch has no such function any more, nothing is done.

The third is of the fork server alone: torch reads TORCH_DISTRIBUTED_DEBUG when it is imported. It
is read again before a store is made, so that a script may set it.

The fourth ends workers that have finished. A thread of gloo's process group lets go of a collective
after it has woken the thread that waited for it; if the tensor is Python's, it needs the
interpreter's lock. An interpreter that has begun to end does not give it any more but ends the
thread, which C++ answers with ``terminate called without an active exception`` and SIGABRT. On a
busy machine that was one finished worker in a hundred. So a worker waits for those threads before
it ends.

The same thread is why a script may hang in ``destroy_process_group`` with torch up to 2.7: the
group's destructor keeps the lock and waits for the thread. There a worker waits before that, too.

The fifth is for workers that fail. libtorch's destructors take its operators off their tables, on
pages that a fork shares with the server until then: 0.13 s, half of the time from an exception to
the end of its process, in which nobody can see that the worker has failed. They are left out then.

The sixth is for workers that succeed, and leave a process group behind. The interpreter takes the
modules apart that outlive ``sys.modules``; the dictionary of one that does not is left to the
collector, which skips what the server has imported, as that is frozen. So the module that has
the groups is kept, or their destructors, which do what is still to be done, would never run.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elaunch import env, proc

DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"
GLOO_THREAD = "pt_gloo_runloop"
WATCHERS = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH")
"""Variables of tools that are loaded before all else, and write what they found at the very end."""
MENDED = (2, 8)
"""The first torch that destroys a group without the interpreter's lock, and names those threads."""
SETTLE_DEADLINE = 0.5
"""Seconds for the threads of gloo to have let go of everything; a running collective never does."""


def need_clients() -> bool:
    """Return whether all ranks that are not patched must be clients of the launcher's store.

    Up to torch 2.6 a rank 0 that may not host there ends with an error. Torch is not imported for
    this: processes that are not forked need it soon enough.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        with open(os.path.join(os.path.dirname(found.origin), "version.py"), "rb") as file:
            version = re.search(rb"""__version__ = ['"](\d+)\.(\d+)""", file.read())
    except OSError:  # another layout: not one of theirs
        return False
    return version is not None and (int(version[1]), int(version[2])) < (2, 7)


def patch_ends() -> None:
    """Have the threads of gloo come to rest before this worker ends, or an old torch's group.

    And have a group that the script leaves behind go with the interpreter.
    """
    atexit.register(_keep_groups)
    atexit.register(_settle)
    destroy: Any = getattr(sys.modules.get("torch.distributed"), "destroy_process_group", None)
    if destroy is None or not _is_old():
        return

    @functools.wraps(destroy)
    def destroy_at_rest(*args: Any, **named: Any) -> None:
        _settle()
        destroy(*args, **named)

    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        vars(sys.modules[name])[destroy.__name__] = destroy_at_rest


def leave_out_destructors(error: BaseException) -> None:
    """End this process, if ``error`` makes it fail, without the C library's exit handlers so far.

    Python's own end is as ever. Handlers are run last first: what is registered during that runs,
    then these two: all streams of the C library are flushed, and the process ends with its status.
    ``on_exit`` is glibc's.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    atexit.unregister(_keep_groups)  # or it would wait for its group
    if "torch" not in sys.modules or any(map(os.environ.get, WATCHERS)):
        return
    import ctypes  # torch has imported it

    c = ctypes.CDLL(None)
    if hasattr(c, "on_exit") and c.on_exit(c._exit, None) == 0:
        c.on_exit(c.fcloseall, None)


def _keep_groups() -> None:
    """Have the interpreter take the module apart that has the process groups, if there are any.

    A group's destructor does what it has still to do, such as a collective that nobody waits for.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        import ctypes  # torch has imported it

        groups = ctypes.py_object(sys.modules["torch.distributed.distributed_c10d"])
        ctypes.pythonapi.Py_IncRef(groups)


def _settle() -> None:
    until = time.monotonic() + SETTLE_DEADLINE
    looks_at_rest = 0
    while (threads := _gloo_threads()) and time.monotonic() < until:
        runs = "R" in threads
        looks_at_rest = 0 if runs else looks_at_rest + 1
        if looks_at_rest == 2:
            return
        time.sleep(0.0005)  # gives the interpreter's lock to a thread that waits for it


def _gloo_threads() -> list[str]:
    """Return the state of each thread of gloo; an old torch leaves them the main thread's name."""
    tasks, main = "/proc/self/task", str(os.getpid())
    names = {GLOO_THREAD[:15]}
    if _is_old() and (own := proc.stat(f"{tasks}/{main}")):
        names.add(own[0])
    numbers = (number for number in os.listdir(tasks) if number != main)
    threads = filter(None, (proc.stat(f"{tasks}/{number}") for number in numbers))
    return [fields[0] for name, fields in threads if name in names]


def _is_old() -> bool:
    version = getattr(sys.modules.get("torch"), "__version__", None)
    # As numbers: torch's own comparison takes 0.5 ms of each worker.
    return version is not None and tuple(map(int, version.split(".")[:2])) < MENDED


def patch_paths() -> None:
    """Give the modules that make up what they do not have an empty ``__path__``."""
    for name in ("torch.ops", "torch.classes"):
        if name in sys.modules:
            vars(sys.modules[name]).setdefault("__path__", [])


def patch_stores() -> None:
    """Let rank 0 host stores that are not the launcher's, and let groups be made again.

    Needs torch.distributed imported.
    """
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    original = getattr(rendezvous, "_create_c10d_store", None)
    if original is None:
        return
    launchers_port = os.environ.get("MASTER_PORT")  # a script may set another one later
    level_at_import = os.environ.get(DEBUG_LEVEL)
    times: Counter[int] = Counter()
    elsewhere = None if hasattr(rendezvous, "_agent_store_serves") else ""

    def create_store(host: str, port: int, rank: int, world_size: int, *rest: Any) -> Any:
        if os.environ.get(DEBUG_LEVEL) != level_at_import:
            distributed: Any = sys.modules["torch.distributed"]
            distributed.set_debug_level_from_env()
        if str(port) == launchers_port:
            with _agent_store("True" if os.environ.get(env.AGENT_STORE) == "1" else None):
                store = original(host, port, rank, world_size, *rest)
            times[world_size] += 1
            if times[world_size] == 1:
                return store
            prefixed: Any = sys.modules["torch.distributed"].PrefixStore
            return prefixed(f"again_{times[world_size]}", store)
        with _agent_store(elsewhere):
            return original(host, port, rank, world_size, *rest)

    rendezvous._create_c10d_store = create_store


@contextmanager
def _agent_store(value: str | None) -> Iterator[None]:
    """Give torch another value of the variable for a moment; "" takes it away, None keeps it.

    What the script starts keeps ``1``: it is not patched, and a store of its own must work.
    """
    before = os.environ.get(env.AGENT_STORE)
    try:
        if value:
            os.environ[env.AGENT_STORE] = value
        elif value is not None:
            os.environ.pop(env.AGENT_STORE, None)
        yield
    finally:
        if before is not None:
            os.environ[env.AGENT_STORE] = before
