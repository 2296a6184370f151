"""A connection between two neighbours: frames both ways, descriptors too where it is a Unix socket.

A link never waits: what cannot be sent at once is kept, what comes is made into frames; mesh.py
waits for all links together.
"""

from __future__ import annotations

import array
import os
import select
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from elaunch.training.channel.frames import NO_CALL, BadFrame, Call, Encoded, Frame, Parser
from elaunch.training.channel.members import RankRecord

CHUNK: Final = 65536
MOST_FDS: Final = 200
"""Descriptors in one sendmsg; the kernel takes 253."""
_ROOM_FOR_FDS: Final = socket.CMSG_SPACE(256 * array.array("i").itemsize)
READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(frozen=True)
class End:
    """Why nothing more comes from a neighbour.

    ``how``: it has sent why its call failed (abort), has closed its context (bye), or is lost.
    ``timeout``: the abort is for a deadline. ``missing``: ranks that it is about.
    """

    how: Literal["abort", "bye", "lost"]
    text: str
    missing: tuple[int, ...]
    call: Call = NO_CALL
    error: str = "lost"


class Link:
    """One neighbour's connection; only the thread that is in a call uses it."""

    def __init__(self, sock: socket.socket, peer: RankRecord) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.inbox: deque[Frame] = deque()
        self.end: End | None = None
        self._sock = sock
        self._unix = sock.family == socket.AF_UNIX
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._heard = NO_CALL
        self._parser = Parser(self._take)
        if not self._unix:
            keep_alive(sock)

    @property
    def sending(self) -> bool:
        """Whether there is something that could not be sent yet."""
        return bool(self._out)

    def fileno(self) -> int:
        """Return the descriptor, -1 once it is closed."""
        return self._sock.fileno()

    def mask(self) -> int:
        """Return the events to poll for."""
        if self.end is not None:
            return 0
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def send(self, frame: Encoded) -> None:
        """Send what goes at once and keep the rest; the descriptors must stay open so long."""
        parts = [memoryview(part) for part in frame.parts]
        for start in range(0, len(frame.fds), MOST_FDS):
            batch = frame.fds[start : start + MOST_FDS]
            self._out.append((parts[0][:1], batch))
            parts[0] = parts[0][1:]
        self._out.extend((part, ()) for part in parts if len(part))
        self._flush()

    def ready(self, events: int) -> None:
        """Do what the events allow."""
        if events & select.POLLOUT:
            self._flush()
        if events & READABLE and self.end is None:
            self._receive()

    def hang_up(self, last: Encoded) -> None:
        """Send the last frame if that goes at once, and nothing more."""
        if self.end is None or self.end.how == "abort":
            self.send(last)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other side was quicker

    def close(self) -> None:
        """Free the descriptors; send nothing."""
        self._sock.close()
        for frame in self.inbox:
            close_all(frame.fds)
        close_all(self._parser.fds)
        self.inbox.clear()
        self._parser.fds.clear()

    def _flush(self) -> None:
        try:
            while self._out:
                data, fds = self._out[0]
                sent = self._send(data, fds)
                if sent < len(data):
                    self._out[0] = (data[sent:], ())
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._out.clear()
            self._receive_rest()
            self._lost(error)

    def _send(self, data: memoryview, fds: tuple[int, ...]) -> int:
        if fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            return self._sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
        return self._sock.send(data, socket.MSG_NOSIGNAL)

    def _receive(self) -> None:
        try:
            if self._unix:
                chunk, fds, _, _ = receive_fds(self._sock)
                self._parser.fds += fds
            else:
                chunk = self._sock.recv(CHUNK)
            self._parser.feed(chunk)
        except BlockingIOError:
            return
        except (OSError, BadFrame) as error:
            self._lost(error)
            return
        if not chunk:
            self._lost(None)

    def _receive_rest(self) -> None:
        """Read what came before the other side went: it may hold the reason."""
        while self.end is None:
            before = len(self.inbox)
            self._receive()
            if len(self.inbox) == before:
                return

    def _take(self, frame: Frame) -> None:
        if frame.kind in ("up", "down"):
            self._heard = frame.call
            self.inbox.append(frame)
        elif frame.kind == "bye":
            self.end = End("bye", f"{self.peer} has closed its context{self._so_far()}", self._it)
        else:
            missing = tuple(map(int, frame.text.get("missing", ())))
            text, error = str(frame.text.get("text")), str(frame.text.get("error"))
            self.end = End("abort", text, missing, frame.call, error)

    def _lost(self, error: Exception | None) -> None:
        if self.end is not None:
            return
        if error is None or isinstance(error, ConnectionResetError | BrokenPipeError):
            text = f"{self.peer} has ended{self._so_far()}"
        else:
            why = getattr(error, "strerror", None) or str(error)
            text = f"the connection to {self.peer} is lost: {why}{self._so_far()}"
        self.end = End("lost", text, self._it)

    @property
    def _it(self) -> tuple[int, ...]:
        return (self.peer.rank,)

    def _so_far(self) -> str:
        return f"; it was last heard of in {self._heard}" if self._heard.number else ""


def receive_fds(sock: socket.socket) -> tuple[bytes, list[int], int, object]:
    """Receive bytes and descriptors; as socket.recv_fds, but no descriptor is ever inheritable."""
    chunk, ancillary, flags, address = sock.recvmsg(
        CHUNK, _ROOM_FOR_FDS, getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000)
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return chunk, list(fds), flags, address


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice, within a minute, that the other machine is gone.

    Where something is under way to it the deadline of the call has to do: TCP_USER_TIMEOUT would
    also end the connection to a rank that computes for long and so does not read.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
