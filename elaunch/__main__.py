"""The command ``elaunch``: run the command line, turn errors into one message and an exit code."""

from __future__ import annotations

import os
import sys

# ``python -m`` puts the working directory first on the path: a random.py there would be imported
# for Python's. A worker still has its script's directory there.
_SPEC = getattr(sys.modules["__main__"], "__spec__", None)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ADDS = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
if _ADDS and _SPEC is not None and _SPEC.name.startswith("elaunch.") and sys.path[0] != _HERE:
    del sys.path[0]

import gc  # noqa: E402
import signal  # noqa: E402
from types import FrameType  # noqa: E402

from elaunch import earlysignals  # noqa: E402


def main() -> int:
    """Run ``elaunch`` with the arguments of this process; return its exit code."""
    _open_standard_files()
    # PID 1 of a container has no default action: a SIGTERM without a handler would be lost. An
    # interrupt in the middle of an import may be swallowed there, and the job would go on.
    signal.signal(signal.SIGTERM, _leave)
    gc.set_threshold(50_000)  # imports allocate much, and leave no garbage
    launches = sys.argv[1:2] in (["run"], ["wrap"])
    if launches:
        signal.signal(signal.SIGINT, _leave)
        # Where a parent ignores it, the kernel itself takes away a child that has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        earlysignals.hold()
    try:
        from elaunch.cli import execute

        code = execute(sys.argv[1:])
    except KeyboardInterrupt:
        return 130
    if launches:
        _end(code)
    return code


def _open_standard_files() -> None:
    """Open what the parent has closed (``<&- >&- 2>&-``); for the workers stdin stays closed.

    A pipe of the agent's would get the number else, and what is printed would go into it. The
    server is to have a ``sys.stdout`` and ``sys.stderr``, for its forks, which get other files.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, fd > 0)
    os.close(fd)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  open to the end


def _end(code: int) -> None:
    """End without taking the interpreter apart: all that was opened is closed.

    That costs some ms of CPU. Returns where the ordinary way has to do something: a thread still
    works, or the output cannot be written.
    """
    import logging
    import threading

    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if not all(thread.daemon for thread in others):
        return
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
