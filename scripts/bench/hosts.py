"""Give this process and its children an /etc/hosts that answers the reverse lookup of loopback.

Every connection to a TCPStore looks its peer ``::ffff:127.0.0.1`` up. Where the resolver does not
answer that, it costs seconds, under either launcher, and hides what is to be measured. So the line
is put into a private copy, in a mount namespace of our own; nobody else sees it, and it vanishes
with the last process of the bench. That takes root; for others the table says that it is missing.
"""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import time
from pathlib import Path

HOSTS = Path("/etc/hosts")
ADDRESS = "::ffff:127.0.0.1"
CLONE_NEWNS = 0x20000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18


def answer_loopback() -> str:
    """Add the line where it is missing; return ``present``, ``private copy`` or ``missing: …``.

    Call it before any thread is started.
    """
    text = HOSTS.read_text() if HOSTS.exists() else ""
    if any(line.split()[:1] == [ADDRESS] for line in text.splitlines()):
        return "present"
    try:
        _bind_copy(f"{text.rstrip()}\n{ADDRESS} localhost\n")
    except OSError as error:
        return f"missing: {error.strerror}"
    return "private copy"


def reverse_lookup_seconds() -> float:
    """Return how long the reverse lookup of the loopback address takes."""
    begin = time.monotonic()
    socket.getnameinfo((ADDRESS, 1), 0)
    return time.monotonic() - begin


def _bind_copy(text: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    with tempfile.NamedTemporaryFile("w") as copy:
        copy.write(text)
        copy.flush()
        os.fchmod(copy.fileno(), 0o644)
        _check(libc.mount(copy.name.encode(), bytes(HOSTS), None, MS_BIND, None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
