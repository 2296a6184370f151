"""Messages between two processes of one machine, over a local channel: all of them use this one.

A message is a line of JSON, an object, on a Unix stream socket. These fields are the wire's own:

=========  =====================================================================================
field      is
=========  =====================================================================================
``op``     what is asked for, or reported
``fds``    how many descriptors belong to the message; left out where there are none. They are sent
           with its first byte, and no process that is started here inherits them
``n``      the number of a request; its answer has the same. 0: it is not answered
``error``  in an answer: why the request came to nothing
=========  =====================================================================================

Lines, and no length in front of them: so a command of another version than the agent's gets an
answer that it can read. The size of a message and the number of its descriptors are bounded. A
stream that is torn is closed: one with a message that was sent in part, that is too long, that is
no JSON object, or that brings other descriptors than it names.

The address of a Unix socket holds at most 107 bytes. A longer path is reached through a descriptor
of its directory, by ``/proc/self/fd``.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

LONGEST: Final = 64 << 20
"""Bytes of a message: a shard with a million files or pieces still fits."""
MAX_ADDRESS: Final = 107
TAKEN_S: Final = 10.0
"""Seconds for a process to take the answer to its request."""
_CHUNK: Final = 1 << 16
_UCRED: Final = struct.Struct("iII")
_LONGEST_POLL: Final = (1 << 31) - 1
"""Milliseconds that poll(2) can wait; more is for ever."""
_MOST_WAITING: Final = 16
"""Requests of one process that are not answered yet."""

Message = dict[str, Any]
Received = tuple[Message, list[int]]


class BadMessage(ConnectionError):
    """Bytes came that are no message; nothing that follows them on the stream can be read."""


class LocalChannel:
    """Owns one end of a stream, and the descriptors that came until they are returned.

    Any thread may send; one at a time reads. ``longest`` bounds the messages that are read, in
    bytes, and ``most_files`` the descriptors of one.
    """

    def __init__(self, sock: socket.socket, longest: int = LONGEST, most_files: int = 0) -> None:
        sock.setblocking(False)
        self.longest = longest
        self.most_files = most_files
        self._sock = sock
        self._sending = threading.Lock()
        self._unread = bytearray()
        self._searched = 0
        self._files: list[int] = []

    def fileno(self) -> int:
        """Return what to wait for; -1 after :meth:`close`."""
        return self._sock.fileno()

    def send(
        self,
        message: Mapping[str, object],
        files: Sequence[int] = (),
        seconds: float | None = None,
    ) -> None:
        """Send one message with the open files ``files``; the caller still owns (closes) them.

        Raises TimeoutError when the other end has not taken it within ``seconds``, and another
        OSError when it is gone. Where a part of it was sent, also before an interrupt, nothing can
        be sent any more; what came can still be read.
        """
        until = None if seconds is None else time.monotonic() + seconds
        if files:
            message = {**message, "fds": len(files)}
        data = whole = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        if not self._sending.acquire(timeout=-1 if seconds is None else seconds):
            raise TimeoutError("the message before is not taken yet")
        is_begun = False
        try:
            if self._sock.fileno() < 0:
                raise BrokenPipeError("the channel is closed")
            while data:
                is_begun = True  # an interrupt may come between the call and what it returns
                try:
                    data = data[self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL) :]
                    rights = []
                except BlockingIOError:
                    is_begun = len(data) < len(whole)
                    self._await(select.POLLOUT, until)
                except OSError:
                    is_begun = len(data) < len(whole)
                    raise
        finally:
            if data and is_begun:
                self._shut(socket.SHUT_WR)
            self._sending.release()

    def receive(self, until: float | None = None) -> Received | None:
        """Block for the next message and its descriptors; None when the other end has closed.

        Raises TimeoutError when it is not whole at ``until`` (monotonic), and BadMessage.
        """
        received = self._next()
        while received is None:
            if not self._fill(until):
                return None
            received = self._next()
            if received is None and until is not None and time.monotonic() >= until:
                raise TimeoutError("the other end was too slow")
        return received

    def drain(self) -> Iterator[Received]:
        """Yield the messages that have come; EOFError follows the last one of all.

        Called when :meth:`fileno` can be read from. Raises BadMessage as well.
        """
        try:
            is_open = self._fill(0.0)
        except TimeoutError:
            is_open = True
        while (received := self._next()) is not None:
            yield received
        if not is_open:
            raise EOFError

    def shutdown(self) -> None:
        """End the stream in both directions; a thread that reads here gets its end."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the stream and the descriptors that nobody has asked for."""
        self._shut(socket.SHUT_RDWR)  # wakes the threads that wait here
        with self._sending:
            self.close_here()

    def close_here(self) -> None:
        """Close in this process alone: the stream goes on in the one that it was forked from."""
        self._sock.close()
        close_files(self._files)

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # the other end is gone
            self._sock.shutdown(how)

    def _next(self) -> Received | None:
        """Return the next message if it has come whole."""
        end = self._unread.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._unread)
            if self._searched > self.longest:
                raise BadMessage(f"the message is longer than {self.longest} bytes")
            return None
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        self._searched = 0
        message = _parsed(line)
        count = message.pop("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._files):
            raise BadMessage(f"the message names {count!r} descriptors, {len(self._files)} came")
        files, self._files = self._files[:count], self._files[count:]
        if self._files and not self._unread:
            close_files(files)
            raise BadMessage("descriptors came that the message does not name")
        return message, files

    def _fill(self, until: float | None) -> bool:
        """Take what has come, or wait for it; False at the end of the stream."""
        if len(self._files) > self.most_files:
            raise BadMessage(f"more than {self.most_files} descriptors came with a message")
        room = socket.CMSG_SPACE(self.most_files * 4) if self.most_files else 0
        while True:
            try:
                data, rights, flags, _ = self._sock.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:
                self._await(select.POLLIN, until)
            except ConnectionResetError:
                return False
        for level, kind, raw in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) // fds.itemsize * fds.itemsize])
                self._files += fds
        if flags & socket.MSG_CTRUNC:
            raise BadMessage(f"more than {self.most_files} descriptors came at once")
        self._unread += data
        return bool(data)

    def _await(self, event: int, until: float | None) -> None:
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        left = None if left is None or left > _LONGEST_POLL else left
        fd = self._sock.fileno()
        if fd < 0:
            raise ConnectionAbortedError("the channel was closed")
        waiting = select.poll()
        waiting.register(fd, event)
        if not waiting.poll(left):
            raise TimeoutError("the other end was too slow")


class _Call:
    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answer: Received | None = None


class Requester:
    """Numbered requests on a channel that one thread reads (:meth:`read`); any thread may ask."""

    def __init__(self, channel: LocalChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._number = 0
        self._calls: dict[int, _Call] = {}
        self._ended = False

    def ask(self, request: Mapping[str, object], seconds: float) -> Received:
        """Return the answer to ``request`` and its descriptors, which the caller owns.

        Raises TimeoutError when there is none within ``seconds``; one that comes later is passed
        over. Raises another OSError when the other end is gone.
        """
        until = time.monotonic() + seconds
        call = _Call()
        with self._lock:
            if self._ended:
                raise ConnectionError("it has hung up")
            self._number += 1
            number, self._calls[self._number] = self._number, call
        try:
            self._channel.send({**request, "n": number}, (), seconds)
            left = until - time.monotonic()
            came = call.answered.wait(min(max(0.0, left), threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                del self._calls[number]
        if call.answer is not None:
            return call.answer
        raise ConnectionError("it has hung up") if came else TimeoutError("no answer has come")

    def post(self, request: Mapping[str, object], seconds: float) -> None:
        """Send a request that is not answered; raises what :meth:`LocalChannel.send` does."""
        self._channel.send({**request, "n": 0}, (), seconds)

    def read(self, take: Callable[[Message], object]) -> None:
        """Read until the other end closes: answers for those who have asked, all else to ``take``.

        Raises what :meth:`LocalChannel.receive` does.
        """
        try:
            while (received := self._channel.receive()) is not None:
                if "n" in received[0]:
                    self._deliver(received)
                else:
                    close_files(received[1])
                    take(received[0])
        finally:
            with self._lock:
                self._ended = True
                for call in self._calls.values():
                    call.answered.set()

    def _deliver(self, received: Received) -> None:
        number = received[0]["n"]
        with self._lock:
            call = self._calls.get(number) if type(number) is int else None
            if call is not None and call.answer is None:
                call.answer = received
                call.answered.set()
                return
        close_files(received[1])


class Requests:
    """The numbered requests of one process in the order in which they came, to be answered.

    One thread puts them here and another answers them, so that no request waits for those that take
    long but the process's own.
    """

    def __init__(self, channel: LocalChannel) -> None:
        self._channel = channel
        self._waiting: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def put(self, request: Message) -> None:
        """Add one; BadMessage where too many wait."""
        if self._waiting.qsize() >= _MOST_WAITING:
            raise BadMessage(f"more than {_MOST_WAITING} requests wait for an answer")
        self._waiting.put(request)

    def end(self) -> None:
        """No more requests come."""
        self._waiting.put(None)

    def next(self) -> Message | None:
        """Block for the next one; None behind the last."""
        return self._waiting.get()

    def answer(
        self, request: Message, fields: Mapping[str, object], files: Sequence[int] = ()
    ) -> None:
        """Answer a request; ``ok`` is false where ``fields`` has an error.

        A process that is gone, or does not read its answers, has nothing of it; what else it has
        asked is still to be done.
        """
        if request["n"] == 0:
            return
        answer = {"n": request["n"], "ok": "error" not in fields, **fields}
        with contextlib.suppress(OSError):
            self._channel.send(answer, files, TAKEN_S)

    def post(self, message: Mapping[str, object]) -> None:
        """Send the process what it has not asked for; one that does not take it goes without."""
        with contextlib.suppress(OSError):
            self._channel.send(message, (), TAKEN_S)

    def hang_up(self) -> None:
        """End the stream; the requests that have come stay."""
        self._channel.shutdown()


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage("the message is not JSON") from error
    if not isinstance(message, dict):
        raise BadMessage("the message is no object")
    return message


def close_files(files: list[int]) -> None:
    """Close descriptors, and forget them."""
    while files:
        os.close(files.pop())


def is_readable(descriptor: int, seconds: float | None) -> bool:
    """Wait until something can be read, or the process of a pidfd has ended; None: for ever.

    Unlike select(), also where 1,024 files are open.
    """
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(None if seconds is None else seconds * 1000.0))


def connect(path: Path, seconds: float) -> socket.socket:
    """Return a connection to the process that listens at ``path``.

    Raises FileNotFoundError or ConnectionRefusedError when none does, and TimeoutError when it has
    not accepted those before within ``seconds``.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(True)
    # With a full backlog a non-blocking connect fails at once; the send timeout waits.
    whole, fraction = divmod(seconds, 1.0)
    limit = struct.pack("@ll", int(whole), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        with short_address(path) as address:
            connection.connect(address)
    except OSError as error:
        connection.close()
        if isinstance(error, BlockingIOError):
            raise TimeoutError(f"{path} does not answer") from None
        raise
    return connection


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel recorded it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(raw)[1]
    return uid


def listen(path: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at ``path``, for processes of this user."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode of the descriptor becomes the file's, so it is never open to others.
        os.fchmod(listener.fileno(), 0o600)
        with short_address(path) as address:
            listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


@contextmanager
def short_address(path: str | Path) -> Iterator[str]:
    """Give an address of the socket ``path`` that is short enough while the block runs."""
    if len(os.fsencode(path)) <= MAX_ADDRESS:
        yield os.fspath(path)
        return
    parent, name = os.path.split(path)
    directory = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{name}"
    finally:
        os.close(directory)
