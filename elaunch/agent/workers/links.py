"""The agent's end of its workers' links (elaunch.wire.worker): who is attached, what they are sent.

The control socket hands a connection over when a worker attaches. One thread reads all of them and
posts what they send; it also notices who has gone. A notice is sent to every worker that is
attached, and to those of the same round that attach later. A worker that does not take its few
bytes, or sends what is no message, is dropped: it loses its link, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.wire.progress import PageReader, Reading
from elaunch.wire.worker import KINDS, Notice

LONGEST_LINE: Final = 64 * 1024
LONGEST_NAME: Final = 200
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")

Message = Mapping[str, Any]


@dataclass
class _Link:
    """One attached worker."""

    sock: socket.socket
    round: int
    local_rank: int
    page: PageReader
    unread: bytearray = field(default_factory=bytearray)


class WorkerLinks:
    """Owns the links of the workers of the round that runs, from :meth:`start` to :meth:`close`."""

    def __init__(self, post: Callable[[events.Event], None]) -> None:
        self._post = post
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._left: dict[int, Reading] = {}
        self._round = -1
        self._notice: Notice | None = None
        self._grace_until: float | None = None
        self._name = ""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="worker links", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self) -> None:
        """End the thread and drop all workers."""
        self._closing = True
        self._wake.send(b"\0")
        self._thread.join(JOIN_S)
        with self._lock:
            for link in list(self._links.values()):
                self._drop(link)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def begin(self, begun: Round) -> None:
        """Forget the workers of the round before: those of the next are about to start."""
        with self._lock:
            self._round, self._notice, self._grace_until = begun.round, None, None
            for link in list(self._links.values()):
                self._drop(link)
            self._left.clear()

    def adopt(self, sock: socket.socket, said: Message, files: list[int]) -> str:
        """Take over the connection of a worker that attaches; return why not, or "".

        Both ``sock`` and ``files`` belong to the links from now on.
        """
        problem = self._attach(sock, said, files)
        if problem:
            for fd in files:
                os.close(fd)
            with contextlib.suppress(OSError):
                _send(sock, {"error": problem})
            sock.close()
        return problem

    def _attach(self, sock: socket.socket, said: Message, files: list[int]) -> str:
        round_number, local_rank = said.get("round"), said.get("local_rank")
        if type(round_number) is not int or type(local_rank) is not int or local_rank < 0:
            return "attach needs the numbers 'round' and 'local_rank'"
        if len(files) != 1:
            return "attach needs the descriptor of a progress page"
        with self._lock:
            if round_number != self._round:
                return f"round {round_number} does not run here; it is round {self._round}"
            try:
                page = PageReader(files[0])
            except (OSError, ValueError) as error:
                return f"the descriptor is no progress page: {error}"
            link = _Link(sock, round_number, local_rank, page)
            old = self._links.pop(local_rank, None)
            if old is not None:
                self._drop(old)
            sock.setblocking(False)
            self._links[local_rank] = link
            self._selector.register(sock, selectors.EVENT_READ, link)
            self._tell(link, {"op": "attached"})
            if said.get("name"):
                self._name = str(said["name"])[:LONGEST_NAME]
            if self._notice is not None:
                self._tell(link, _preempt(self._notice, self._grace_until))
        self._wake.send(b"\0")
        return ""

    def notify(self, notice: Notice, grace: float | None = None) -> None:
        """Send ``notice`` to the workers of this round, those that attach later included.

        They are ended after ``grace`` seconds from now, if it is given.
        """
        with self._lock:
            self._notice = notice
            self._grace_until = None if grace is None else time.monotonic() + grace
            for link in list(self._links.values()):
                self._tell(link, _preempt(notice, self._grace_until))

    def name(self) -> str:
        """Return the name that the script has given the run last; empty if it has given none."""
        with self._lock:
            return self._name

    def readings(self) -> dict[int, Reading]:
        """Return what the attached workers report of their progress, by local rank."""
        with self._lock:
            return {rank: link.page.read() for rank, link in self._links.items()}

    def left(self) -> dict[int, Reading]:
        """Return the last readings of the workers of this round that are not attached any more."""
        with self._lock:
            return dict(self._left)

    # ── one link ─────────────────────────────────────────────────────────────────────────────────

    def _tell(self, link: _Link, message: Message) -> None:
        try:
            _send(link.sock, message)
        except OSError as error:
            log.debug("worker %d does not take a message: %s", link.local_rank, error)
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        """Close a link; the page goes with it. The lock is held."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()
        with contextlib.suppress(OSError):
            self._left[link.local_rank] = link.page.read()
        link.page.close()
        if self._links.get(link.local_rank) is link:
            del self._links[link.local_rank]

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                self._drain() if key.data is None else self._read(key.data)

    def _drain(self) -> None:
        """Take what has woken the thread."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _read(self, link: _Link) -> None:
        try:
            chunk = link.sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        link.unread += chunk
        *lines, rest = bytes(link.unread).split(b"\n")
        link.unread[:] = rest
        for line in lines:
            self._hear(link, line)
        if not chunk or len(rest) > LONGEST_LINE:
            with self._lock:
                self._drop(link)

    def _hear(self, link: _Link, line: bytes) -> None:
        event = understood(line, link.round, link.local_rank)
        if isinstance(event, str):
            log.debug("worker %d says what is no message: %s", link.local_rank, event)
        elif event is not None:
            self._post(event)


def understood(line: bytes, round_number: int, local_rank: int) -> events.Event | str | None:
    """Return the event that a worker's line means, None if none, or what is wrong with it."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return "not JSON"
    op = said.get("op") if isinstance(said, dict) else None
    if op == "listens":
        return events.WorkerListens(round_number, local_rank)
    if op in ("heard", "ack"):
        kind, reason = said.get("kind"), said.get("reason")
        if kind not in KINDS or not isinstance(reason, str):
            return f"{op} without reason and kind"
        notice = Notice(reason[:1000], kind)
        if op == "heard":
            return events.NoticeHeard(round_number, notice)
        return events.PreemptAcked(round_number, local_rank, notice)
    return None if op == "detach" else f"unknown op {op!r}"


def _preempt(notice: Notice, until: float | None) -> Message:
    message = {"op": "preempt", "reason": notice.reason, "kind": notice.kind}
    if until is None:
        return message
    return {**message, "grace": round(max(0.0, until - time.monotonic()), 3)}


def _send(sock: socket.socket, message: Message) -> None:
    """Send a line without waiting; a worker that has no room for it is not there any more."""
    line = json.dumps(message).encode() + b"\n"
    if sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(line):
        raise BrokenPipeError("its buffer is full")
