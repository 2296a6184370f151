"""Leave what a script can see of its launcher: its environment, arguments, and standard files."""

from __future__ import annotations

import os
import sys

from stamp import leave


def main() -> None:
    """Run one worker."""
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    leave(
        "seen",
        {
            "variables": sorted(os.environ),
            "ranks": {name: os.environ[name] for name in named},
            "arguments": sys.argv[1:],
            "flags": str(sys.flags),
            "main": vars(sys.modules["__main__"])["__name__"],
            "terminal": [os.isatty(number) for number in range(3)],
        },
    )


if __name__ == "__main__":
    main()
