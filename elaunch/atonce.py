"""Calls that wait for storage, in threads that never hold up the end of the process.

The threads of concurrent.futures are joined when the interpreter exits: one that hangs in a file
system would keep an agent from ending.

Threads that write beside a training run at a lower priority (``stand_back``).

Where no thread can be had (``ulimit -u``, pids.max: workers may have used up all), the thread that
wants one does the work itself: a save that nobody writes would be waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

NICER: Final = 5
"""How much the threads that write lower their priority: beside a training that uses every processor
they get a quarter of one. With much more what is in memory would stay there only."""

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
            try:
                thread.start()
            except RuntimeError:
                _run(work, errors)
                break
        for thread in threads:
            if thread.ident is not None:
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
    try:
        thread.start()
    except RuntimeError:
        call()
        return True
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def start(name: str, target: Callable[..., object], *args: object, behind: bool = False) -> None:
    """Call ``target`` in a thread of its own, ``behind`` the training."""

    def run() -> None:
        if behind:
            stand_back()
        target(*args)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        target(*args)


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


STEP: Final = 1 << 23
"""Bytes of one step: low priority beside a busy training may take a second for them."""


class Writing:
    """A write beside the training; its files may be written by several threads.

    Attributes:
        moved: when its last step was done, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.moved = time.monotonic()

    def follow(self, steps: Iterator[int]) -> None:
        """Do the steps."""
        for _ in steps:
            self.moved = time.monotonic()
