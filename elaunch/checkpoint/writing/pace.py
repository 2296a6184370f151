"""The pace of a shard's write: at low priority behind the training, if that is fast enough.

A priority that was lowered cannot be raised again without a privilege. So one thread of normal
priority stays beside those of low priority that write a shard. The work is cut into steps; when
they make less than ``ENOUGH`` bytes a second, that thread starts others for the rest. That costs
little where the storage itself is slower: a thread that waits for it needs no processor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from elaunch.checkpoint.storage.atonce import stand_back

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

        threading.Thread(target=behind, name="checkpoint", daemon=True).start()
        while (call := self._calls.get()) is not None:
            threading.Thread(target=call, name="checkpoint-hurried", daemon=True).start()

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
