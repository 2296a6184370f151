"""An agent's connection to the host of its store, opened again when it breaks.

Several threads use it at once: one waits for the plan while others ask. Of those that wait, one
reads for all. It opens again only to the same host: one that was started anew knows nothing of this
job's agents, which must enrol there again.

What breaks a call, and what is raised as StoreUnreachable (elaunch.errors):

==========================  =====================================================================
connection closed or reset  nothing yet: a new connection is tried, for ``timeout`` seconds
connection refused          nobody_decides=True: nothing listens there, so the host has ended
no answer for ``timeout``   nobody_decides=False: it may be frozen or cut off, or we may be
another run id              nobody_decides=False: another job is there
another boot                StoreReplaced: another coordinator is there, our entry is gone
refused, hosted elsewhere   the same (``moved``)
another secret              StoreDenied, as where one side has none
==========================  =====================================================================
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from elaunch.errors import StoreClosed, StoreDenied, StoreReplaced, StoreUnreachable
from elaunch.store.protocol import Post
from elaunch.store.tcp import messages
from elaunch.store.tcp.connection import StoreTarget, handshake
from elaunch.store.tcp.messages import (
    HEAD,
    LONGEST_ANSWER,
    LONGEST_UNPROVED,
    NEW_POST,
    NONCE,
    Prove,
    ReadPlan,
    ReadShared,
    Request,
    SentPost,
)
from elaunch.store.tcp.wire import Connection, ForeignAnswer

AGAIN: Final = 0.02
"""Seconds before a broken connection is opened again: a host that ends closes its port last."""
GLIMPSE: Final = 0.05
"""Seconds beyond its deadline that a thread leaves to the one that reads for it: after this process
was frozen past it, the answer may be there."""

_GIVE: Final = "give the same --rdzv-secret-file on all nodes"

Found = TypeVar("Found")


class _Asked:
    """A request that was sent, and its answer once that is there."""

    def __init__(self, kind: type[Request]) -> None:
        self.kind = kind
        self.answer: Any = None


class SharedConnection:
    """One open connection, which is of no more use once a method has raised anything.

    Raises ConnectionError when it is cut by either side, TimeoutError when a deadline passes, and
    ForeignAnswer for what no host sends.
    """

    def __init__(self, connection: Connection, nodes: tuple[int, bytes] = (0, b"")) -> None:
        self.nodes = nodes
        """The newest nodes of the plan that were sent, and since which version."""
        self.follows = False
        self.post: Post | None = None
        """The newest that was sent."""
        self._connection = connection
        self._changed = threading.Condition(threading.Lock())
        self._calls: deque[_Asked] = deque()
        self._head: tuple[int, int] | None = None  # of the frame that is being read
        self._reads = False
        self.broken = False

    def ask(self, request: Request, until: float) -> Any:
        """Send a request and return its answer."""
        call = _Asked(type(request))
        with self._changed:
            self._check()
            self._connection.send([messages.frame(request)], until)
            self._calls.append(call)
            return self._await(lambda: call.answer, until)

    def read_post(self, after: int, until: float) -> Post | None:
        """Ask for the newest post; None if it is not newer than ``after``."""
        found: SentPost = self.ask(ReadPlan(after, self.nodes[0]), until)
        self.follows = True
        return self.post if found.version else None

    def await_post(self, after: int, until: float) -> Post | None:
        """Return the newest post, once one newer than ``after`` has come; None: not in time."""

        def newer() -> Post | None:
            return self.post if self.post and self.post.version > after else None

        with self._changed:
            with contextlib.suppress(TimeoutError):
                self._await(newer, until)
            with contextlib.suppress(OSError):  # of a host that ends, what it sent last counts
                while newer() and not self._reads:
                    self._read(0.0)  # more of them may be there
        return newer()

    def cut(self) -> None:
        """Have everything fail that uses it, and free the descriptor; from any thread."""
        self._connection.cut()
        with self._changed:
            self.broken = True
            self._changed.notify_all()
            if not self._reads:
                self._connection.close()

    def _await(self, ready: Callable[[], Found | None], until: float) -> Found:
        """Wait until ``ready`` returns something; the caller holds the lock."""
        while (found := ready()) is None:
            self._check()
            if not self._reads:
                self._read(until)
                continue
            left = until - time.monotonic()
            if not self._changed.wait(max(left, GLIMPSE)) and time.monotonic() >= until:
                raise TimeoutError("no answer")
        return found

    def _check(self) -> None:
        if self.broken:
            raise ConnectionResetError("the connection was closed")

    def _read(self, until: float) -> None:
        """Read one frame for all; the lock is free meanwhile."""
        self._reads = True
        self._changed.release()
        try:
            first, body = self._frame(until)
        finally:
            self._changed.acquire()
            self._reads = False
            self._changed.notify_all()
            if self.broken:
                self._connection.close()
        try:
            if first == NEW_POST:
                self._note(msgspec.msgpack.decode(body, type=SentPost))
            elif self._calls:
                call = self._calls.popleft()
                call.answer = messages.read_answer(body, call.kind)
                if isinstance(call.answer, SentPost):
                    self._note(call.answer)
        except (ValueError, RecursionError) as error:
            raise ForeignAnswer(f"something that is no store of elaunch answers: {error}") from None

    def _frame(self, until: float) -> tuple[int, bytes]:
        if self._head is None:
            self._head = messages.head(self._connection.read(HEAD, until))
        first, length = self._head
        if first not in (messages.MESSAGE, NEW_POST) or length > LONGEST_ANSWER:
            raise ForeignAnswer("something that is no store of elaunch answers")
        body = self._connection.read(length, until)
        self._head = None
        return first, body

    def _note(self, posted: SentPost) -> None:
        if posted.nodes:
            self.nodes = posted.since, messages.unpacked(posted.nodes)
        if posted.version > (self.post.version if self.post else 0):
            nodes = self.nodes[1] if posted.since else b""
            self.post = Post(posted.version, posted.value, nodes)


def prove(
    connection: Connection, name: str, challenge: str | None, key: bytes | None, until: float
) -> bool:
    """Prove that we know the agents' secret, and have the host prove it; return whether that is so.

    It is not where we have no ``key`` yet: what is shared can be read then. Raises StoreDenied
    where the host has another one, or none, and what a connection raises.
    """
    if key is None:
        return challenge is None
    if challenge is None:
        raise StoreDenied(f"the agent that hosts the {name} has no secret, this one has: {_GIVE}")
    nonce = secrets.token_bytes(NONCE)
    request = Prove(nonce, messages.proof(key, "client", challenge, nonce))
    connection.send([messages.frame(request)], until)
    first, length = messages.head(connection.read(HEAD, until))
    if first != messages.MESSAGE or length > LONGEST_UNPROVED:
        raise ForeignAnswer("something that is no store of elaunch answers")
    try:
        answer = messages.read_answer(connection.read(length, until), Prove)
    except ValueError:
        raise ForeignAnswer("something that is no store of elaunch answers") from None
    if not hmac.compare_digest(answer, messages.proof(key, "host", challenge, nonce)):
        raise StoreDenied(f"the agent that hosts the {name} has another secret: {_GIVE}")
    return True


class AgentConnection:
    """Asks the host of a store, over a new connection where one breaks.

    Args:
        target: where to.
        timeout: seconds for one call, and for opening.
        connection: one that is open already.
        moved: called when nothing listens at the target; whether the store is hosted elsewhere now.
        key: what the agents share as a secret, None for nothing; see :func:`prove`.
        proved: whether ``connection`` may be used for more than reading what is shared.
    """

    def __init__(
        self,
        target: StoreTarget,
        timeout: float,
        connection: Connection,
        moved: Callable[[], bool] | None = None,
        key: bytes | None = None,
        proved: bool = True,
    ) -> None:
        self.target, self.timeout = target, timeout
        self._key, self._proved = key, proved
        self.closed = threading.Event()
        self._moved = moved
        self._turn = threading.Lock()
        self._line = SharedConnection(connection)
        self._connecting: Connection | None = None

    def ask(self, request: Request) -> Any:
        """Return the answer to a request, which may be sent again; raises StoreUnreachable."""
        return self._call(
            lambda line, until: line.ask(request, until), isinstance(request, ReadShared)
        )

    def prove(self, key: bytes | None) -> None:
        """Use the agents' secret from now on, which was not known when this was opened."""
        if key is not None:
            self._key, self._proved = key, True
            self._line.cut()  # the next one begins with the proof

    def latest(self) -> Post | None:
        """Return the newest post, or None."""
        return self._call(lambda line, until: line.read_post(0, until))

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; None after ``timeout`` seconds.

        None also means that the host answers, and has none.
        """
        end = time.monotonic() + timeout

        def wait(line: SharedConnection, until: float) -> Post | None:
            if not line.follows:
                line.read_post(0, until)
            found = line.await_post(after, end)
            return found or line.read_post(after, time.monotonic() + self.timeout)

        return self._call(wait)

    def close(self) -> None:
        """Wake waiting calls; they and later ones raise StoreClosed."""
        self.closed.set()
        for connection in (self._line, self._connecting):
            if connection is not None:
                connection.cut()

    def _call(
        self, talk: Callable[[SharedConnection, float], Found], unproved: bool = False
    ) -> Found:
        """Return what ``talk(line, until)`` returns; it is called again after a break.

        ``unproved``: it needs no secret.
        """
        if not (self._proved or unproved):
            raise StoreDenied(f"the agents of the {self.target.name} have a secret: {_GIVE}")
        broken = math.inf
        while True:
            if self.closed.is_set():
                raise StoreClosed(f"the connection to the {self.target.name} was closed")
            now = time.monotonic()
            if now >= broken + self.timeout:
                raise self._unreachable("it closes every connection")
            until = now + self.timeout
            try:
                line = self._open(min(until, broken + self.timeout))
                try:
                    return talk(line, until)
                except (OSError, ForeignAnswer):
                    line.cut()
                    raise
            except (ConnectionAbortedError, ConnectionResetError, BrokenPipeError):
                broken = min(broken, time.monotonic())
                self.closed.wait(AGAIN)
            except (OSError, ForeignAnswer, StoreUnreachable) as error:
                if not self.closed.is_set():
                    raise self._explained(error, broken) from None

    def _open(self, until: float) -> SharedConnection:
        if not self._turn.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError("no connection")
        try:
            if self._line.broken:
                target = self.target
                connection, identity = handshake(target.address, until, self._hold)
                if identity is None or identity["run_id"] != target.run_id:
                    connection.close()
                    raise self._unreachable("it belongs to somebody else now")
                if identity["boot"] != target.boot:
                    connection.close()
                    raise StoreReplaced(
                        f"cannot reach the {target.name}: it was started anew and does not know "
                        "this agent"
                    )
                challenge = identity.get("challenge")
                try:
                    self._proved = prove(connection, target.name, challenge, self._key, until)
                except BaseException:
                    connection.close()
                    raise
                self._line = SharedConnection(connection, self._line.nodes)
            return self._line
        finally:
            self._connecting = None
            self._turn.release()

    def _hold(self, connection: Connection) -> None:
        self._connecting = connection
        if self.closed.is_set():
            raise ConnectionAbortedError("closed")

    def _explained(self, error: Exception, broken: float) -> StoreUnreachable:
        if isinstance(error, StoreUnreachable):
            return error
        if isinstance(error, ConnectionRefusedError):
            if self._moved is not None and self._moved():
                return StoreReplaced(f"the {self.target.name} was started anew at another port")
            return self._unreachable("nothing listens there any more, its host has ended", True)
        if isinstance(error, TimeoutError) and broken < math.inf:
            return self._unreachable(
                f"the connection broke and none was had for {self.timeout:g} s"
            )
        if isinstance(error, TimeoutError):
            return self._unreachable(f"no answer for {self.timeout:g} s")
        if isinstance(error, ForeignAnswer):
            return self._unreachable(str(error))
        return self._unreachable(getattr(error, "strerror", None) or str(error))

    def _unreachable(self, why: str, nobody_decides: bool = False) -> StoreUnreachable:
        return StoreUnreachable(f"cannot reach the {self.target.name}: {why}", nobody_decides)
