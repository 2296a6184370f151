"""Closes connections to a hosted TCPStore that no client uses.

torch's store keeps every connection for ever, and each is a descriptor of the agent. An agent sends
something twelve times a second to once in five seconds, whatever it waits for; a client that sends
nothing for SILENT seconds is gone, or never was an agent. Of more than MOST connections the most
silent ones go, too.
An agent that was frozen for so long connects again.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

SILENT: Final = 30.0
"""Seconds without a byte."""
MOST: Final = 8192
_LAST_DATA_RECEIVED: Final = 52
"""Where tcp_info has the milliseconds since the last byte, or since the connection was made."""


def hang_up_on_silent(port: int, silent: float = SILENT, most: int = MOST) -> int:
    """End the connections to ``port`` of this process that are silent; return how many."""
    quiet: list[tuple[float, int]] = []
    for name in os.listdir("/proc/self/fd"):
        seconds = _silence(int(name), port)
        if seconds is not None:
            quiet.append((seconds, int(name)))
    quiet.sort(reverse=True)
    over = max(0, len(quiet) - most)
    late = [fd for place, (seconds, fd) in enumerate(quiet) if place < over or seconds >= silent]
    return sum(_hang_up(fd, port) for fd in late)


def _silence(descriptor: int, port: int) -> float | None:
    """Return for how long nothing came over an accepted connection; None for anything else."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if not _is_accepted(sock, port):
                return None
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:  # closed meanwhile
        return None
    return float(struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)[0]) / 1000


def _is_accepted(sock: socket.socket, port: int) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return bool(sock.getsockname()[1] == port and sock.getpeername())


def _hang_up(descriptor: int, port: int) -> bool:
    """Shut the connection down: its owner sees the end of it, and closes the descriptor."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if not _is_accepted(sock, port):  # another one has the number by now
                return False
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
