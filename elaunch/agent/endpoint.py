"""The listening socket of a round's TCPStore: bound by the agent, handed to the store host.

A port that is bound cannot be taken by a stranger between its choice and its use. Without
``--master-port`` each round gets a new one on the loopback address; with it, one socket is kept for
all rounds, since workers of every round are told that port.
"""

from __future__ import annotations

import errno
import os
import socket

from elaunch.errors import UsageError

LOOPBACK = "127.0.0.1"
BACKLOG = 4096


class StoreEndpoint:
    """Owns the listening socket; ``host`` and ``port`` are what the workers are told.

    ``fixed`` says that the port is the user's and stays the same in all rounds.
    """

    def __init__(self, host: str | None, port: int | None) -> None:
        self.host = host or LOOPBACK
        self.port = port or 0
        self.fixed = bool(port)
        self._sock: socket.socket | None = None

    def open(self) -> int:
        """Return the listening socket's file descriptor for the next round.

        The descriptor stays this object's. Raises UsageError when the address cannot be bound.
        """
        if self._sock is not None and self.fixed:
            return self._sock.fileno()
        self.close()
        self._sock = _listen(self.host, self.port if self.fixed else 0)
        self.port = self._sock.getsockname()[1]
        return self._sock.fileno()

    def close(self) -> None:
        """Close the agent's copy of the socket; the store host has its own."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UsageError(
            f"--master-addr {host}: the name cannot be resolved ({error.strerror}); give an "
            "address of this machine"
        ) from error
    problem: OSError | None = None
    for family, *_, address in addresses:
        try:
            return _bound(family, (str(address[0]), port))
        except OSError as error:
            problem = error
            if (
                error.errno == errno.EADDRNOTAVAIL
            ):  # a service name or a NAT address of this machine
                return _bound_everywhere(port)
    reason = os.strerror(problem.errno) if problem is not None and problem.errno else str(problem)
    raise UsageError(f"cannot listen on {host} port {port}: {reason}; choose another --master-port")


def _bound_everywhere(port: int) -> socket.socket:
    try:
        return _bound(socket.AF_INET6, ("::", port))
    except OSError:
        return _bound(socket.AF_INET, ("0.0.0.0", port))


def _bound(family: int, address: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
