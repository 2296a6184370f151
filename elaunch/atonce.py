"""Calls that wait for storage, in threads that never hold up the end of the process.

The threads of concurrent.futures are joined when the interpreter exits: one that hangs in a file
system would keep an agent from ending.

Threads that write beside a training run at a lower priority, if that is fast enough (`Pace`). A
priority that was lowered cannot be raised again without a privilege. So one thread of normal
priority stays beside those of low priority that write a shard. The work is cut into steps; when
they make less than ``ENOUGH`` bytes a second, that thread starts others for the rest. That costs
little where the storage itself is slower: a thread that waits for it needs no processor.

Where no thread can be had (``ulimit -u``, pids.max: workers may have used up all), the thread that
wants one does the work itself: a save that nobody writes would be waited for.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
ENOUGH: Final = 1 << 26
"""Bytes per second that a write has to make to stay behind the training."""
LOOK_S: Final = 2.0
"""Seconds over which that is measured."""


class Pace:
    """The pace of one shard; its files may be written by several threads.

    Attributes:
        moved: when its last step was done, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.moved = time.monotonic()
        self._slow = threading.Event()
        self._supervised = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    @property
    def hurries(self) -> bool:
        """Whether the low priority was given up."""
        return self._slow.is_set()

    def supervise(self, work: Callable[[], object]) -> None:
        """Do ``work`` in a thread of low priority, and the steps too slow for it beside it."""
        self._supervised = True

        def behind() -> None:
            try:
                stand_back()
                work()
            finally:
                self._calls.put(None)

        try:
            threading.Thread(target=behind, name="checkpoint", daemon=True).start()
        except RuntimeError:
            self._supervised = False
            work()
            return
        while (call := self._calls.get()) is not None:
            start("checkpoint-hurried", call)

    def run(self, steps: Iterator[int]) -> None:
        """Do the steps, each of which yields its bytes; raises what they raise."""
        if not self.hurries and self._do(steps):
            return
        done, errors = threading.Event(), list[BaseException]()
        self._calls.put(partial(self._rest, steps, done, errors))
        done.wait()
        if errors:
            raise errors[0]

    def _do(self, steps: Iterator[int]) -> bool:
        """Do steps as long as they are fast enough; return whether all are done."""
        begun, written = time.monotonic(), 0
        for size in steps:
            self.moved, written = time.monotonic(), written + size
            seconds = self.moved - begun
            if self._supervised and seconds >= LOOK_S:
                if written < ENOUGH * seconds:
                    self._slow.set()
                begun, written = self.moved, 0
            if self.hurries:
                return False
        return True

    def _rest(
        self, steps: Iterator[int], done: threading.Event, errors: list[BaseException]
    ) -> None:
        try:
            for _ in steps:
                self.moved = time.monotonic()
        except BaseException as error:  # raised in the thread that waits for this one
            errors.append(error)
        finally:
            done.set()
