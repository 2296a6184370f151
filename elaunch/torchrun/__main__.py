"""``elaunch-torchrun`` and ``python -m elaunch.torchrun``: torchrun's command line, by elaunch."""

from __future__ import annotations

import sys

from elaunch import __main__ as command


def main() -> int:
    """Run ``elaunch run`` with torchrun's exit codes and report; return its code.

    A flag of elaunch's own may stand among torchrun's.
    """
    sys.argv[1:1] = ["run", "--exit-codes=torchrun", "--torchrun-report"]
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
