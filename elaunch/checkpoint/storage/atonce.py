"""Calls that wait for storage, in threads that never hold up the end of the process.

Threads that write beside a training run at a lower priority. The threads of concurrent.futures are
joined when the interpreter exits: one that hangs in a file system would keep an agent from ending.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

NICER: Final = 10
"""How much the threads that write lower their priority. With much more they would not run at all
beside a training that uses every processor: what is in memory would stay there only."""

_T = TypeVar("_T")


def at_once(calls: Sequence[Callable[[], _T]], most: int, name: str) -> list[_T]:
    """Return what the calls return, in their order; ``most`` of them run at the same time.

    The first error is raised when those that run have ended; no other one is begun after it.
    """
    if len(calls) < 2:
        return [call() for call in calls]
    errors: list[BaseException] = []
    results: dict[int, _T] = {}
    waiting, lock = iter(enumerate(calls)), threading.Lock()

    def next_call() -> Iterator[tuple[int, Callable[[], _T]]]:
        while True:
            with lock:
                found = None if errors else next(waiting, None)
            if found is None:
                return
            yield found

    def work() -> None:
        for index, call in next_call():
            results[index] = call()

    threads = [
        threading.Thread(target=_run, args=(work, errors), name=f"{name}-{number}", daemon=True)
        for number in range(min(most, len(calls)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: what runs still reads the caller's memory
        errors.append(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(calls))]


def within(seconds: float, call: Callable[[], object], name: str) -> bool:
    """Make a call in a thread, wait ``seconds`` for it at most; return whether it has ended."""
    errors: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(call, errors), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def stand_back() -> None:
    """Have this thread, and those that it starts, run behind the training.

    Where no other wants the processor that costs nothing.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)


def _run(call: Callable[[], object], errors: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:  # raised in the thread that has asked for the call
        errors.append(error)
