"""The messages between two neighbours, and the connection that carries them.

After the handshake a connection carries frames, both ways: 4 bytes b"eln2", u8 kind, 3 bytes
nothing, u32 length, and so many bytes. Those of a piece are bytes of objects, all others are JSON:

=====  ==================================  =========================================================
kind   JSON                                meaning
=====  ==================================  =========================================================
up     {"call": …, "entries": …}           the entries of the sender, or of all ranks below it
down   {"call": …, "entries": …}           all ranks are there; here is what you lack of theirs
piece  none                                the next bytes of the objects of the frame before
abort  {"call": …, "error": …, …}          the call has failed; nothing comes after it
bye    {}                                  the sender has closed its context
=====  ==================================  =========================================================

A call is ``[scope, number, name]``, an entry ``[rank, form, size]``: form ``object`` is an object's
bytes (objects.py), ``error`` is why this rank could not send one, ``takes`` has no bytes and says
that this rank takes what is delivered. The bytes of all entries follow their frame in pieces;
between two of them an abort may come, which so need not wait for the end of a large object.

A link never waits: what cannot be sent at once is kept, what comes is made into frames; mesh.py
waits for all links together.
"""

from __future__ import annotations

import json
import mmap
import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from elaunch.hosts import keep_alive
from elaunch.training.channel.meeting import RankRecord
from elaunch.training.channel.objects import Bytes

MAGIC: Final = b"eln2"
HEAD: Final = struct.Struct("<4sB3xI")
Kind = Literal["up", "down", "piece", "abort", "bye"]
KINDS: Final[tuple[Kind, ...]] = ("up", "down", "piece", "abort", "bye")
LONGEST_TEXT: Final = 1 << 28
LONGEST_DATA: Final = 1 << 36
Form = Literal["object", "error", "takes"]
CHUNK: Final = 65536
PIECE: Final = 1 << 20
AT_ONCE: Final = 64
"""Buffers that one system call gets."""
_FLAGS: Final = socket.MSG_NOSIGNAL
READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


class BadFrame(Exception):
    """Bytes were received that are no frame; the connection is of no more use."""


class Call(NamedTuple):
    """One call of one rank: ``number`` counts those of its scope (all, or local: the node's)."""

    scope: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


NO_CALL: Final = Call("all", 0, "")


class Contribution(NamedTuple):
    """One rank's object for a call: ``parts`` one after the other are its ``size`` bytes."""

    rank: int
    form: Form
    size: int
    parts: tuple[Bytes, ...]


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    text: dict[str, Any]
    entries: Sequence[Contribution] = ()

    @property
    def call(self) -> Call:
        """The call that this frame belongs to."""
        return Call(*self.text.get("call", NO_CALL))


Encoded = list[list[memoryview]]
"""A frame as it goes out: blocks of bytes, between which another frame may be sent."""


def encode(kind: Kind, text: dict[str, Any], entries: Sequence[Contribution] = ()) -> Encoded:
    """Return a frame; its bytes may be the entries' own memory."""
    if entries:
        text = {**text, "entries": [(entry.rank, entry.form, entry.size) for entry in entries]}
    line = json.dumps(text).encode()
    parts = [part for entry in entries for part in entry.parts]
    size = sum(entry.size for entry in entries)
    first = _head(kind, len(line)) + line
    if size < CHUNK:
        return [[memoryview(b"".join((first, _head("piece", size), *parts)))]]
    return [[memoryview(first)], *_pieces(parts)]


def _pieces(parts: Iterable[Bytes]) -> Iterator[list[memoryview]]:
    piece: list[memoryview] = []
    room = PIECE
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            piece.append(rest[:room])
            room -= len(piece[-1])
            rest = rest[len(piece[-1]) :]
            if not room:
                yield [memoryview(_head("piece", PIECE)), *piece]
                piece, room = [], PIECE
    if piece:
        yield [memoryview(_head("piece", PIECE - room)), *piece]


def _head(kind: Kind, length: int) -> bytes:
    return HEAD.pack(MAGIC, KINDS.index(kind), length)


class Parser:
    """Makes frames of the bytes of one connection; every object gets memory of its own."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._frame: Frame | None = None
        """The frame whose objects are under way; ``_room`` is where the rest of them goes."""
        self._room: deque[memoryview] = deque()
        self._missing = 0
        self._left = 0
        """Bytes of the objects that come before the next head; of that, ``_wanted`` come next."""
        self._wanted = HEAD.size

    def receive(self, sock: socket.socket) -> list[Frame] | None:
        """Read what ``sock`` has; return the frames complete by it, None at its end.

        Raises OSError, BadFrame.
        """
        if self._left:
            room = islice(self._room, AT_ONCE)
            count = sock.recvmsg_into(list(_clipped(room, self._left)))[0]
            self._filled(count)
            return self._parse() if count else None
        # While objects are under way no byte of theirs, so that they are read into their place.
        chunk = sock.recv(min(self._wanted, CHUNK) if self._frame else CHUNK)
        return self.feed(chunk) if chunk else None

    def feed(self, data: Bytes) -> list[Frame]:
        """Take what was received; return the frames complete by it; raises BadFrame."""
        self._received += data
        return self._parse()

    def _parse(self) -> list[Frame]:
        done: list[Frame] = []
        while True:
            self._take_received()
            if self._frame is not None and not self._missing:
                done.append(self._frame)
                self._frame = None
            if self._left or not self._begin(done):
                return done

    def _take_received(self) -> None:
        """Copy the bytes of objects that were received with a head into the objects' memory."""
        at = 0
        while self._left and at < len(self._received):
            count = min(self._left, len(self._room[0]), len(self._received) - at)
            self._room[0][:count] = self._received[at : at + count]
            at += count
            self._filled(count)
        del self._received[:at]

    def _filled(self, count: int) -> None:
        _advance(self._room, count)
        self._left -= count
        self._missing -= count

    def _begin(self, done: list[Frame]) -> bool:
        """Take the next head, and what follows it but for a piece, if that is complete."""
        whole, kind = HEAD.size, None
        if len(self._received) >= HEAD.size:
            magic, number, length = HEAD.unpack_from(self._received)
            if magic != MAGIC or number >= len(KINDS) or length > LONGEST_TEXT:
                raise BadFrame("what comes is no frame of elaunch")
            kind = KINDS[number]
            if kind == "piece":
                if length > self._missing:
                    raise BadFrame("a neighbour sends more bytes than it has announced")
                self._left = length
            else:
                whole += length
        self._wanted = whole - len(self._received)
        if self._wanted > 0 or kind is None:
            return False
        line = bytes(self._received[HEAD.size : whole])
        del self._received[:whole]
        if kind != "piece":
            self._open(kind, line, done)
        return True

    def _open(self, kind: Kind, line: bytes, done: list[Frame]) -> None:
        text = _text(line)
        sizes = [size for _, _, size in text.get("entries", ())]
        if not sizes:
            done.append(Frame(kind, text))
            return
        if self._frame is not None or sum(sizes) > LONGEST_DATA:
            raise BadFrame("a neighbour begins a frame where none can be")
        room = [_memory(size) for size in sizes]
        entries = zip(text["entries"], room, strict=True)
        self._frame = Frame(
            kind,
            text,
            [Contribution(rank, form, size, (data,)) for (rank, form, size), data in entries],
        )
        self._room.extend(filter(len, room))
        self._missing = sum(sizes)


def _text(line: bytes) -> dict[str, Any]:
    """Return a frame's text; its entries are what :func:`encode` writes, or BadFrame."""
    try:
        text: Any = json.loads(line)
    except ValueError:
        raise BadFrame("a frame's text is no JSON") from None
    if isinstance(text, dict):
        entries = text.get("entries", [])
        if isinstance(entries, list) and all(map(_is_entry, entries)):
            return text
    raise BadFrame("a frame's text lacks fields")


def _is_entry(row: object) -> bool:
    match row:
        case [int(), "object" | "error" | "takes", int(size)]:
            return size >= 0
    return False


def _memory(size: int) -> memoryview:
    """Return memory for one object; that of a large one costs nothing until its bytes come."""
    try:
        if size < CHUNK:
            return memoryview(bytearray(size))
        return memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (MemoryError, OSError):
        raise MemoryError(f"to receive {size} bytes") from None


def _clipped(buffers: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the first ``size`` bytes of the buffers."""
    for buffer in buffers:
        if size <= 0:
            return
        yield buffer[:size]
        size -= len(buffer)


def _advance(buffers: deque[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of the buffers."""
    while count:
        first = buffers.popleft()
        if count < len(first):
            buffers.appendleft(first[count:])
            return
        count -= len(first)


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
        self._out: deque[deque[memoryview]] = deque()
        self._begun = False
        """Whether a part of the first block is sent."""
        self._last_call = NO_CALL
        self._parser = Parser()
        if sock.family != socket.AF_UNIX:
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
        if self.end is not None and self.end.how != "abort":
            return 0
        reads = select.POLLIN if self.end is None else 0
        return reads | (select.POLLOUT if self._out else 0)

    def send(self, frame: Encoded) -> None:
        """Send what goes at once and keep the rest; its memory must stay as it is so long."""
        self._out.extend(map(deque, frame))
        self._flush()

    def ready(self, events: int) -> None:
        """Do what the events allow."""
        if self._out:
            self._flush()
        if events & READABLE and self.end is None:
            self._receive()

    def send_last(self, frame: Encoded) -> None:
        """Send the last frame after the block that is under way, instead of the others."""
        if self.end is not None and self.end.how != "abort":
            self._out.clear()  # nobody reads it
            return
        while len(self._out) > self._begun:
            self._out.pop()
        self.send(frame)

    def hang_up(self) -> None:
        """Send nothing more."""
        self._out.clear()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other side was quicker

    def close(self) -> None:
        """Free the descriptor; send nothing."""
        self._sock.close()
        self.inbox.clear()
        self._out.clear()

    def _flush(self) -> None:
        try:
            while self._out:
                block = self._out[0]
                _advance(block, self._sock.sendmsg(list(islice(block, AT_ONCE)), (), _FLAGS))
                self._begun = bool(block)
                if not block:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self._out.clear()
            self._receive_rest()
            self._lost(error)

    def _receive(self) -> bool:
        """Read once; return whether anything came."""
        try:
            frames = self._parser.receive(self._sock)
        except BlockingIOError:
            return False
        except (OSError, BadFrame) as error:
            self._lost(error)
            return False
        except MemoryError:
            self.end = End("abort", "", ())  # what comes cannot be read; the reason can be sent
            raise
        if frames is None:
            self._lost(None)
            return False
        for frame in frames:
            self._take(frame)
        return True

    def _receive_rest(self) -> None:
        """Read what came before the other side went: it may hold the reason."""
        while self.end is None and self._receive():
            continue

    def _take(self, frame: Frame) -> None:
        if frame.kind in ("up", "down"):
            self._last_call = frame.call
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
        last = self._last_call
        return f"; it was last heard of in {last}" if last.number else ""
