"""``NOTES/agent.N ARGS``: ``elaunch ARGS``, as a process that can be killed in mid-save.

The file gets its pid; see ``checkpoint_fault``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import checkpoint_fault  # from the script's own directory

if __name__ == "__main__":
    Path(sys.argv.pop(1)).write_text(str(os.getpid()))
    checkpoint_fault.arm("agent")
    from elaunch.__main__ import main

    sys.exit(main())
