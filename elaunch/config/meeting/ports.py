"""Whether a port can be listened on, and which process holds it if not."""

from __future__ import annotations

import errno
import os
import socket


def why_not_free(host: str, port: int) -> str | None:
    """Return why nothing can listen on ``port`` of this machine's ``host``, or None if one can.

    A host that is not this machine's own (a service's name) stands for all addresses.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    # localhost is often 127.0.0.1 and ::1: another process on either would be connected to.
    problems = {_problem(family, str(address[0]), port) for family, *_, address in found}
    problems.discard(errno.EADDRNOTAVAIL)
    if errno.EADDRINUSE in problems:
        return _reason(errno.EADDRINUSE, port)
    if problems:
        return _reason(None if None in problems else problems.pop(), port)
    everywhere = _problem(socket.AF_INET6, "::", port)
    if everywhere not in (None, errno.EADDRINUSE, errno.EACCES):  # a machine without IPv6
        everywhere = _problem(socket.AF_INET, "0.0.0.0", port)
    return _reason(everywhere, port)


def _problem(family: int, address: str, port: int) -> int | None:
    """Return the errno of listening there, or None; nothing stays open."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((address, port))
    except OSError as exc:
        return exc.errno or errno.EIO
    return None


def _reason(problem: int | None, port: int) -> str | None:
    if problem is None:
        return None
    if problem == errno.EADDRINUSE:
        return f"is in use{_holder(port)}"
    if problem == errno.EACCES:
        return "cannot be listened on: a port this low needs more rights"
    return f"cannot be listened on: {os.strerror(problem)}"


def _holder(port: int) -> str:
    """Return `` by PID (COMMAND)`` of the process that listens on the port, where it is seen."""
    pid = _holder_pid(port)
    if pid is None:
        return " by a process that this user cannot see"
    line = " ".join(_command(pid))
    shown = line[:57] + "..." if len(line) > 60 else line
    return f" by process {pid} ({shown})" if line else f" by process {pid}"


def may_be_agent(port: int) -> bool:
    """Whether an elaunch agent may listen on the port: one does, or the listener is not seen."""
    pid = _holder_pid(port)
    words = [] if pid is None else _command(pid)
    return not words or any(os.path.basename(word) == "elaunch" for word in words)


def _holder_pid(port: int) -> int | None:
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
            pid: int | None = connection.pid
            return pid
    return None


def _command(pid: int) -> list[str]:
    import psutil

    try:
        words: list[str] = psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
    return words
