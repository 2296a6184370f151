"""The agent's Unix socket: answers requests about the run (protocol: ``elaunch.wire.control``).

One thread serves one client after the other, so it costs the agent nothing while nobody asks. No
client can disturb the agent: each is dropped when its request has not come within 1 s, is longer
than 64 KiB, or when it has not read the answer 2 s after that was ready. A client that has hung up
meanwhile gets nothing done: it has reported so to its user. Only the agent's own user and root are
served. A worker that attaches (elaunch.wire.worker) stays, and so does a command that looks at what
other nodes have (elaunch.agent.status.views): its connection is passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from elaunch.errors import RunDirError
from elaunch.wire.local import (
    BadMessage,
    LocalChannel,
    Message,
    Received,
    close_files,
    listen,
    peer_uid,
)
from elaunch.wire.worker import seconds_of

MAX_REQUEST: Final = 64 * 1024
MAX_REASON: Final = 500
MAX_FILES: Final = 1
"""Descriptors beside a request: a worker's progress page."""
BACKLOG: Final = 16
REQUEST_DEADLINE_S: Final = 1.0
CLIENT_DEADLINE_S: Final = 2.0
# How long close() waits for the thread: it is woken at once, unless the snapshot itself blocks.
JOIN_S: Final = 2.0
# accept() fails without blocking when the process has no descriptor left.
ACCEPT_PAUSE_S: Final = 0.5

Preempt = Callable[[str, float | None], str]
Restart = Callable[[str], tuple[str, bool]]
Attach = Callable[[LocalChannel, Message, list[int]], object]


log = logging.getLogger(__name__)


class ControlSocket:
    """Serves the run at ``path`` from :meth:`start` to :meth:`close`; calls in its own thread.

    Args:
        path: of the socket.
        snapshot: returns a record that nobody changes any more.
        preempt: asks, for the reason given, that the job end within so many seconds, if any are
            given, and be continued; returns what is done about it.
        restart: asks, for the reason given, for another round; returns what is done about it, and
            whether it is.
        attach: takes a worker's connection, its message and its descriptors, for good.
        view: takes the connection of a command that asks for stacks or log files, as ``attach``.
    """

    def __init__(
        self,
        path: Path,
        snapshot: Callable[[], Mapping[str, object]],
        preempt: Preempt | None = None,
        attach: Attach | None = None,
        view: Attach | None = None,
        *,
        restart: Restart | None = None,
    ) -> None:
        self._path = path
        self._snapshot = snapshot
        self._preempt = preempt
        self._restart = restart
        self._stays = {"worker": attach, "view": view}
        self._listener: socket.socket | None = None
        self._client: LocalChannel | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self) -> None:
        """Listen and serve; raise RunDirError where the file system can hold no socket."""
        try:
            listener = listen(self._path, BACKLOG)
        except OSError as exc:
            raise RunDirError(f"cannot listen at {self._path}: {exc.strerror}") from exc
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """End the thread, drop its client and remove the socket; takes 2 s at the most."""
        self._closing.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        # Shutting down wakes the thread from accept and recv; closing alone would not.
        listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._client is not None:
                self._client.shutdown()
        self._thread.join(JOIN_S)
        listener.close()

    def _serve(self) -> None:
        listener = self._listener
        while listener is not None and not self._closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError as exc:
                if not self._closing.wait(ACCEPT_PAUSE_S):
                    log.warning("the control socket cannot accept: %s", exc)
                continue
            channel = LocalChannel(client, MAX_REQUEST, MAX_FILES)
            with self._lock:
                self._client = channel
            stays = False
            try:
                # close() may have looked for a client just before this one was known.
                stays = not self._closing.is_set() and self._answer(client, channel)
            except OSError as exc:
                log.debug("a client of the control socket was dropped: %s", exc)
            except Exception:
                log.exception("the control socket could not answer")
            finally:
                with self._lock:
                    self._client = None
                if not stays:
                    channel.close()

    def _answer(self, client: socket.socket, channel: LocalChannel) -> bool:
        """Answer the one request of a client; whether it stays, being a worker's."""
        connected = time.monotonic()
        uid = peer_uid(client)
        if not may_ask(uid, os.geteuid()):
            raise PermissionError(f"user {uid} may not ask")
        try:
            request, files = self._request(channel, connected + REQUEST_DEADLINE_S)
        except BadMessage as error:
            channel.send({"error": f"the request cannot be understood: {error}"}, (), 0.0)
            return False
        if (take := self._stays.get(str(request.get("op")))) is not None:
            take(channel, request, files)
            return True
        close_files(files)
        if _has_hung_up(client):
            raise ConnectionError("it hung up before its request was done")
        channel.send(self._reply(request), (), CLIENT_DEADLINE_S)
        return False

    @staticmethod
    def _request(channel: LocalChannel, until: float) -> Received:
        received = channel.receive(until)
        if received is None:
            raise ConnectionError("it hung up before its request was whole")
        return received

    def _reply(self, fields: Mapping[str, Any]) -> Mapping[str, object]:
        op = fields.get("op")
        if op == "status":
            return self._snapshot()
        if op in ("preempt", "restart"):
            reason = fields.get("reason")
            if not isinstance(reason, str) or not reason.strip() or len(reason) > MAX_REASON:
                return {"error": f"'reason' must be a text of 1 to {MAX_REASON} characters"}
            reason = " ".join(reason.split())
            if op == "restart" and self._restart is not None:
                what, done = self._restart(reason)
                return {"done" if done else "refused": what}
            if op == "preempt" and self._preempt is not None:
                return {"done": self._preempt(reason, seconds_of(fields.get("left")))}
        known = "'status', 'preempt', 'restart', 'view', 'worker'"
        return {"error": f"unknown op {op!r}, known: {known}"}


def may_ask(uid: int, own_uid: int) -> bool:
    """Return whether the user ``uid`` is served by an agent of the user ``own_uid``."""
    return uid in (own_uid, 0)


def _has_hung_up(client: socket.socket) -> bool:
    """Return whether nobody can read an answer; one that has only ended its sending still does."""
    poll = select.poll()
    poll.register(client, 0)
    return any(happened & select.POLLHUP for _, happened in poll.poll(0))
