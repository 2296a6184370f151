"""``RATE NOTES/agent.N ARGS``: ``elaunch ARGS`` on storage that takes RATE bytes a second in all.

The file gets its pid; see ``checkpoint_fault``. What the agent writes into stages is throttled.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import checkpoint_fault  # from the script's own directory

if __name__ == "__main__":
    rate = float(sys.argv.pop(1))
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    real, one = os.writev, threading.Lock()

    def throttled(descriptor: int, batch: list[memoryview]) -> int:
        """Write, and take as long for it as the storage would."""
        written = real(descriptor, batch)
        if "/.stage/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            with one:
                time.sleep(written / rate)
        return written

    os.writev = throttled
    checkpoint_fault.arm("agent")
    from elaunch.__main__ import main

    sys.exit(main())
