"""Make ``time.sleep`` work below libfaketime, whose answer to the system call for it is EINVAL.

Python reads this file when it starts, where the directory is in PYTHONPATH (``wall_clock`` of
``tests/cluster.py`` puts it there).
"""

from __future__ import annotations

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]
