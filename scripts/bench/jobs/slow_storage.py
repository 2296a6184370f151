"""``RATE ARGS``: ``elaunch ARGS``, whose agent writes RATE bytes a second into checkpoints."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

rate = float(sys.argv.pop(1))
real, one = os.writev, threading.Lock()


def throttled(descriptor: int, batch: Any) -> int:
    """Write, and take as long for it as the storage would."""
    written = real(descriptor, batch)
    if "/.stage/" in os.readlink(f"/proc/self/fd/{descriptor}"):
        with one:
            time.sleep(written / rate)
    return written


if __name__ == "__main__":
    os.writev = throttled
    from elaunch.__main__ import main

    sys.exit(main())
