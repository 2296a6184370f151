"""Serves the store of a job to its agents: one thread, whatever their number.

What is sent is in ``messages``, what the store holds in ``host``. All that has come by a moment is
served together; then what has expired is removed, and a new plan is sent to the connections that
follow it.

Any process that reaches the port can connect. Where the agents have a secret, it may then read what
they share, and prove that it knows the secret; whatever else it asks ends its connection. What is
malformed does so, too. A client that has not read an answer gets no other one, and long answers are
made one at a time. Where more than MOST_HELD is held for clients, the one with the most ends. A
client that does not follow the plan is ended after SILENT seconds without a byte; the kernel asks
the others whether they are still there. While no descriptor is left, a client that connects waits;
where there are nearly as many as the process may have, the most silent client ends for each that
comes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import resource
import secrets
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Final

from elaunch.store.tcp import messages, wire
from elaunch.store.tcp.connection import IDENTITY
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.messages import (
    HEAD,
    LONGEST_REQUEST,
    LONGEST_UNPROVED,
    MESSAGE,
    NEW_POST,
    Prove,
    ReadMembers,
    ReadPlan,
    ReadShared,
    SentPost,
)
from elaunch.store.tcp.wire import CHUNK, NONCE, PING, VALIDATE

SILENT: Final = 30.0
LOOK_EVERY: Final = 1.0
"""Seconds between two looks for silent clients, and before a connection is accepted again after
there was no descriptor for one."""
_MOST_UNSENT: Final = 1 << 26
"""Bytes that a client may leave unread; the nodes of 16,384 agents are half a megabyte."""
MOST_HELD: Final = 1 << 27
"""Bytes that all clients together may leave unread, or have sent in part."""
_LITTLE: Final = 4096
"""Bytes up to which a client's part is not worth adding up."""
_PART: Final = 256
"""Bytes that an answer takes beside its own while it is unsent."""
_OWN_FILES: Final = 256
"""Descriptors that are left to the process, or half of its limit."""
_AT_ONCE: Final = 256
"""Connections that are accepted before others are served."""
_POSTS_AT_ONCE: Final = 64
"""Clients that are sent a new plan before others are served: it may be long, and there many."""
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Of the listening socket; accepted ones have them from it."""
_KEPT: Final = messages.frame(True)
_FIRST: Final = VALIDATE + PING
_ASKS: Final = wire.get(IDENTITY)

log = logging.getLogger("elaunch")


class _MalformedError(Exception):
    """A client has sent what no agent sends."""


class _OtherProtocolError(_MalformedError):
    """A client of a TCPStore has sent what this store does not serve."""


class _UnprovedError(_MalformedError):
    """A client does not know the secret of the agents, and asks for what is theirs."""


class _Client:
    """One connection: what it has sent and is to be sent, and what it knows of the plan.

    ``number`` is the higher, the later it came; ``version`` and ``nodes`` are those of the newest
    post that it was sent.
    """

    def __init__(self, sock: socket.socket, number: int, now: float) -> None:
        self.sock, self.number, self.heard = sock, number, now
        self.received = bytearray()
        self.unsent: deque[memoryview] = deque()
        self.size = 0  # of what is unsent
        self.greeted = self.opened = self.follows = self.proved = False
        self.challenge = ""
        self.version = self.nodes = 0


class TcpServer:
    """Serves ``job`` on a listening socket, which it owns, until it is closed.

    ``identity`` is what clients read first; ``key`` what they must know then, None for nothing.
    """

    def __init__(
        self,
        listening: socket.socket,
        job: HostedJob,
        identity: Mapping[str, object],
        key: bytes | None = None,
    ) -> None:
        self._listening, self._job = listening, job
        self._identity, self._key = identity, key
        self._waiting: list[_Client] = []  # to be served in the next turn
        self._made_long = False
        self._clients: dict[int, _Client] = {}
        self._accepted = 0
        self._pauses = self._short = False
        self._refused: set[type[Exception]] = set()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(limit // 2, limit - _OWN_FILES) if limit > 0 else sys.maxsize
        self._look_at = 0.0
        self._version = 0  # the newest that was, or is being sent to all that follow
        self._behind: deque[_Client] = deque()  # those that it is yet to be sent
        self._frames: dict[tuple[int, int, bool], bytes] = {}
        self._poll = select.epoll()
        self._woken, self._wake = socket.socketpair()
        for option in _OPTIONS:
            listening.setsockopt(*option)
        for sock in (listening, self._woken, self._wake):
            sock.setblocking(False)
        for sock in (listening, self._woken):
            self._poll.register(sock, select.EPOLLIN)
        job.wake = self._wake_up
        self._thread = threading.Thread(target=self._run, name="elaunch-tcpstore", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and leave the port."""
        self._job.close()
        self._wake_up()
        self._thread.join()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is full of such bytes, or closed
            self._wake.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve_all()
        finally:
            self._job.close()
            for sock in (self._listening, self._woken, self._wake):
                sock.close()
            for client in self._clients.values():
                client.sock.close()
            self._poll.close()

    def _serve_all(self) -> None:
        job, left = self._job, 0.0
        while True:
            ready = self._poll.poll(left, len(self._clients) + 2)
            with job.changed:
                if job.closed:
                    return
                now = job.tick()
            self._made_long = False
            waiting, self._waiting = self._waiting, []
            for client in waiting:
                if client.sock.fileno() in self._clients:  # it has not ended
                    self._guarded(client, self._serve)
            for descriptor, events in ready:
                self._turn(descriptor, events, now)
            with job.changed:
                left = job.expire()
                post = job.post
            if self._send_to_some(post) or self._waiting:
                left = 0.0
            if now >= self._look_at:
                self._look(now)

    def _turn(self, descriptor: int, events: int, now: float) -> None:
        client = self._clients.get(descriptor)
        if client is None:
            if descriptor == self._listening.fileno():
                self._accept(now)
            elif descriptor == self._woken.fileno():
                self._woken.recv(CHUNK)
            return

        def exchange(client: _Client) -> None:
            if events & select.EPOLLOUT:
                self._flush(client)
            if events & ~select.EPOLLOUT:
                self._receive(client, now)

        self._guarded(client, exchange)

    def _guarded(self, client: _Client, work: Callable[[_Client], None]) -> None:
        """Do ``work`` for a client; what it has done wrong ends its connection."""
        try:
            work(client)
            if len(client.received) + client.size > _LITTLE:
                self._bound()
        except BlockingIOError:
            return
        except (_OtherProtocolError, _UnprovedError) as error:
            self._refuse(client, type(error))
        except (OSError, _MalformedError, ValueError, RecursionError):  # of msgspec, the last two
            self._drop(client)

    # ── connections ──────────────────────────────────────────────────────────────────────────────

    def _accept(self, now: float) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):  # it is gone already
                return
            except OSError as error:
                # The listening socket stays readable: the thread would only come here again.
                self._complain(f"takes no connection for now: {error.strerror}")
                self._poll.unregister(self._listening)
                self._pauses, self._look_at = True, now + LOOK_EVERY
                return
            sock.setblocking(False)
            self._accepted += 1
            self._clients[sock.fileno()] = _Client(sock, self._accepted, now)
            self._poll.register(sock, select.EPOLLIN)
            if len(self._clients) > self._most:
                self._complain(
                    f"has {self._most} connections, for more raise ulimit -n: the most "
                    "silent one ends for each that comes"
                )
                self._drop(min(self._clients.values(), key=attrgetter("heard")))

    def _complain(self, problem: str) -> None:
        if not self._short:
            log.warning("the agents' store %s", problem)
        self._short = True

    def _look(self, now: float) -> None:
        """Accept connections again, and end the silent ones."""
        self._look_at = now + LOOK_EVERY
        if self._pauses:
            self._poll.register(self._listening, select.EPOLLIN)
            self._pauses = False
        for client in list(self._clients.values()):
            if not client.follows and now - client.heard >= SILENT:
                self._drop(client)

    def _refuse(self, client: _Client, kind: type[Exception]) -> None:
        """End a client of another protocol, or without the secret; the first one is named."""
        if kind not in self._refused:
            with contextlib.suppress(OSError):
                log.warning(
                    "the agents' store refuses a client at %s that %s",
                    client.sock.getpeername()[0],
                    "does not know the job's secret"
                    if kind is _UnprovedError
                    else "is none of this elaunch: torchrun, or another version of elaunch",
                )
                self._refused.add(kind)
        self._drop(client)

    def _bound(self) -> None:
        """End the client for which the most is held, where that is too much altogether."""
        clients = self._clients.values()
        if sum(len(client.received) + client.size for client in clients) > MOST_HELD:
            self._drop(max(clients, key=lambda one: len(one.received) + one.size))

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.sock.fileno(), None) is not None:
            client.sock.close()  # it leaves the poll with that

    # ── what clients send ────────────────────────────────────────────────────────────────────────

    def _receive(self, client: _Client, now: float) -> None:
        if len(client.received) > LONGEST_REQUEST:  # it has to read first what it was sent
            if client.unsent:
                self._poll.modify(client.sock, select.EPOLLOUT)
            return
        data = client.sock.recv(CHUNK)
        if not data:
            raise ConnectionResetError
        client.heard = now
        lease = self._job.heartbeats.get(data) if client.proved else None
        if lease is not None and client.opened and not client.received and not client.unsent:
            lease.renewed = now
            self._send(client, _KEPT)
            return
        client.received += data
        if client.opened or self._open(client):
            self._serve(client)

    def _open(self, client: _Client) -> bool:
        """Answer as a TCPStore of which the identity is read; return whether it was."""
        received = client.received
        if not client.greeted:
            if not _FIRST.startswith(received[: len(_FIRST)]):
                valid = received.startswith(VALIDATE)
                raise _OtherProtocolError if valid else _MalformedError
            if len(received) < len(_FIRST) + NONCE:
                return False
            self._send(client, bytes(received[len(_FIRST) : len(_FIRST) + NONCE]))
            del received[: len(_FIRST) + NONCE]
            client.greeted = True
        if not _ASKS.startswith(received[: len(_ASKS)]):
            raise _OtherProtocolError
        if len(received) < len(_ASKS):
            return False
        del received[: len(_ASKS)]
        identity = dict(self._identity)
        if self._key is None:
            client.proved = True
        else:
            identity["challenge"] = client.challenge = secrets.token_hex(NONCE)
        self._send(client, wire.sized(json.dumps(identity).encode()))
        client.opened = True
        return True

    def _serve(self, client: _Client) -> None:
        """Serve the requests that are there in full, unless the client has answers to read."""
        received = client.received
        while len(received) >= HEAD and not client.unsent:
            first, length = messages.head(received)
            if first != MESSAGE:
                raise _OtherProtocolError
            if length > (LONGEST_REQUEST if client.proved else LONGEST_UNPROVED):
                raise _MalformedError if client.proved else _UnprovedError
            if len(received) < HEAD + length:
                return
            request = messages.read_request(bytes(received[HEAD : HEAD + length]))
            if isinstance(request, ReadMembers) and self._made_long:
                self._waiting.append(client)
                return
            del received[: HEAD + length]
            if isinstance(request, Prove):
                self._send(client, messages.frame(self._checked(client, request)))
                continue
            if not client.proved:
                if not isinstance(request, ReadShared):
                    raise _UnprovedError
                request = ReadShared(b"")  # it may not offer anything
            with self._job.changed:
                answer = self._job.serve(request, client.number)
            self._made_long = self._made_long or isinstance(request, ReadMembers)
            if isinstance(request, ReadPlan) and isinstance(answer, SentPost):
                client.follows, client.nodes = True, client.nodes or request.known
                self._send(client, self._post_for(client, answer, MESSAGE))
            else:
                self._send(client, messages.frame(answer))

    def _checked(self, client: _Client, request: Prove) -> bytes:
        """Return the host's proof, nothing where the client's own is wrong."""
        key = self._key or b""
        proof = messages.proof(key, "client", client.challenge, request.nonce)
        if self._key is None or not hmac.compare_digest(proof, request.proof):
            return b""
        client.proved = True
        return messages.proof(key, "host", client.challenge, request.nonce)

    # ── what they are sent ───────────────────────────────────────────────────────────────────────

    def _send_to_some(self, post: SentPost) -> bool:
        """Send a post to some of the clients that follow; return whether there are more."""
        if post.version > self._version:
            self._version = post.version
            self._frames.clear()
            self._behind = deque(client for client in self._clients.values() if client.follows)
        for _ in range(min(_POSTS_AT_ONCE, len(self._behind))):
            client = self._behind.popleft()
            try:
                self._send_newer(client, post)
            except (OSError, _MalformedError):
                self._drop(client)
        return bool(self._behind)

    def _send_newer(self, client: _Client, post: SentPost) -> None:
        """Send a post to a client that follows, unless it has yet to read what it was sent."""
        if client.follows and not client.unsent and client.version < post.version:
            self._send(client, self._post_for(client, post, NEW_POST))

    def _post_for(self, client: _Client, post: SentPost, first: int) -> bytes:
        """Return the frame of a post for a client, with the nodes if it has others."""
        known = post.since in (0, client.nodes)
        key = first, post.version, known
        if key not in self._frames:
            short = SentPost(post.version, post.since, post.value, b"") if known else post
            self._frames[key] = messages.frame(short, first)
        client.version = max(client.version, post.version)
        client.nodes = post.since or client.nodes
        return self._frames[key]

    def _send(self, client: _Client, data: bytes) -> None:
        """Send what the socket takes; the rest when it takes more."""
        sent = 0
        if not client.unsent:
            with contextlib.suppress(BlockingIOError):
                sent = client.sock.send(data)
            if sent == len(data):
                return
            self._poll.modify(client.sock, select.EPOLLIN | select.EPOLLOUT)
        client.size += len(data) - sent + _PART
        if client.size > _MOST_UNSENT:
            raise _MalformedError
        client.unsent.append(memoryview(data)[sent:])

    def _flush(self, client: _Client) -> None:
        while client.unsent:
            part = client.unsent[0]
            sent = client.sock.send(part)
            client.unsent[0] = part[sent:]
            if sent == len(part):
                client.unsent.popleft()
        client.size = 0
        self._poll.modify(client.sock, select.EPOLLIN)
        self._send_newer(client, self._job.post)
        if client.opened:
            self._serve(client)
