"""What ``ps`` shows for this process: the memory that holds its arguments, overwritten in place.

The kernel shows that memory (``arg_start`` … ``arg_end`` of proc_pid_stat(5)) as it is while its
last byte is NUL, as the end of the last argument is. Where it is not, a process has renamed itself
and everything up to the first NUL is the title. The process' short name (comm) stays as it is.
"""

from __future__ import annotations

import os

_ARG_START, _ARG_END = 45, 46  # fields 48 and 49, counted from the one after the name


def set_title(title: str) -> None:
    """Show ``title`` for this process, cut to the room there is; where none is, do nothing."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        text = os.fsencode(title)[: max(0, end - start - 2)] + b"\0"
        # By way of the file: an address that is not what it seems to be gives an error, no crash.
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(text.ljust(end - start, b"."))
    except (OSError, ValueError, IndexError):  # a sandbox's /proc; the title is cosmetic
        return
