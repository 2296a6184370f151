"""Word that something goes on for which the job waits: nothing does so in silence."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

TOLD_S: Final = 10.0
"""Seconds after which it is said, and again after every AGAIN_S."""
AGAIN_S: Final = 60.0

log = logging.getLogger("elaunch")


@contextlib.contextmanager
def telling(what: Callable[[float], str]) -> Iterator[None]:
    """Log ``what(seconds)`` now and then while the block goes on; seconds since it began."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = TOLD_S
        while not over.wait(pause):
            log.warning("%s", what(time.monotonic() - began))
            pause = AGAIN_S

    threading.Thread(target=tell, name="patience", daemon=True).start()
    try:
        yield
    finally:
        over.set()
