"""The messages between neighbours on a connection, after the handshake.

::

    4 bytes b"eln1", u8 kind, u8 nothing, u16 descriptors, u32 length of the text, u64 of the data
    the text: JSON
    the data: the small objects of the entries, one after the other

=====  ==================================  =========================================================
kind   text                                meaning
=====  ==================================  =========================================================
up     {"call": …, "entries": …}           the entries of the sender, or of all ranks below it
down   {"call": …, "entries": …}           all ranks are there; here is what you need of theirs
abort  {"call": …, "timeout": …, …}        the call has failed; nothing comes after it
bye    {}                                  the sender has closed its context
=====  ==================================  =========================================================

A call is ``[scope, number, name]``, an entry ``[rank, form, size, descriptor, offset]``:

======  ============================================================================================
form    where the object is
======  ============================================================================================
inline  in the frame's data
blob    in a memory file: the number of its descriptor in this frame, -1 between nodes
error   nowhere: the text in the frame's data says why this rank could not send it
======  ============================================================================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeGuard

from elaunch.training.channel.objects import Bytes

MAGIC: Final = b"eln1"
HEAD: Final = struct.Struct("<4sBxHIQ")
Kind = Literal["up", "down", "abort", "bye"]
KINDS: Final[tuple[Kind, ...]] = ("up", "down", "abort", "bye")
LONGEST_TEXT: Final = 1 << 28
LONGEST_DATA: Final = 1 << 36
Form = Literal["inline", "blob", "error"]


class BadFrame(Exception):
    """What came is no frame; the connection is of no more use."""


class Call(NamedTuple):
    """One call of one rank: ``number`` counts those of its scope (all, or local: the node's)."""

    scope: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


NO_CALL: Final = Call("all", 0, "")


@dataclass
class Contribution:
    """What one rank gives to a call; ``fd`` and ``offset`` say where a blob is on this node."""

    rank: int
    form: Form
    size: int
    data: Bytes = b""
    fd: int = -1
    offset: int = 0


@dataclass
class Frame:
    """One message; it owns its descriptors until they are taken."""

    kind: Kind
    text: dict[str, Any]
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    fds: list[int] = field(default_factory=list)

    @property
    def call(self) -> Call:
        """The call that this frame belongs to."""
        scope, number, name = self.text.get("call", NO_CALL)
        return Call(scope, number, name)

    def entries(self) -> Iterator[Contribution]:
        """Yield the entries, with the descriptors where the sender gave them."""
        at = 0
        for rank, form, size, place, offset in self.text["entries"]:
            if form == "blob":
                yield Contribution(
                    rank, form, size, fd=self.fds[place] if place >= 0 else -1, offset=offset
                )
            else:
                yield Contribution(rank, form, size, self.data[at : at + size])
                at += size


@dataclass(frozen=True)
class Encoded:
    """A frame as it goes out; the descriptors stay the sender's."""

    parts: tuple[Bytes, ...]
    fds: tuple[int, ...] = ()


def encode(kind: Kind, text: dict[str, Any]) -> Encoded:
    """Return a frame without data."""
    return _encode(kind, text, (), ())


def encode_entries(
    kind: Kind, call: Call, entries: Iterable[Contribution], with_fds: bool = False
) -> Encoded:
    """Return a frame with entries; ``with_fds`` sends the descriptors of blobs along."""
    rows, data = [], []
    places: dict[int, int] = {}
    for entry in entries:
        place = -1
        if entry.form != "blob":
            data.append(entry.data)
        elif with_fds:
            place = places.setdefault(entry.fd, len(places))
        rows.append((entry.rank, entry.form, entry.size, place, entry.offset))
    return _encode(kind, {"call": call, "entries": rows}, data, places)


def _encode(kind: Kind, text: dict[str, Any], data: Iterable[Bytes], fds: Iterable[int]) -> Encoded:
    data, fds = tuple(data), tuple(fds)
    line = json.dumps(text).encode()
    total = sum(map(len, data))
    head = HEAD.pack(MAGIC, KINDS.index(kind), len(fds), len(line), total)
    if total < 65536:
        return Encoded((b"".join((head, line, *data)),), fds)
    return Encoded((head + line, *data), fds)


class Parser:
    """Makes frames of the bytes and descriptors of one connection."""

    def __init__(self, take: Callable[[Frame], None]) -> None:
        self.fds: list[int] = []
        self._take = take
        self._received = bytearray()
        self._head: tuple[Kind, int, int, int] | None = None

    def feed(self, chunk: Bytes) -> None:
        """Take what was received; calls ``take`` for each frame that is complete by it."""
        self._received += chunk
        while (head := self._next_head()) is not None:
            kind, fds, length, size = head
            whole = HEAD.size + length + size
            if len(self._received) < whole or len(self.fds) < fds:
                return
            received = memoryview(bytes(self._received) if size < 65536 else self._received)
            if size >= 65536:  # taken over, not copied
                self._received = bytearray(received[whole:])
            text = _text(bytes(received[HEAD.size : HEAD.size + length]))
            frame = Frame(kind, text, received[HEAD.size + length : whole], self.fds[:fds])
            del self.fds[:fds]
            if size < 65536:
                del self._received[:whole]
            self._head = None
            self._take(frame)

    def _next_head(self) -> tuple[Kind, int, int, int] | None:
        if self._head is None and len(self._received) >= HEAD.size:
            magic, kind, fds, length, size = HEAD.unpack_from(self._received)
            if magic != MAGIC or kind >= len(KINDS) or length > LONGEST_TEXT or size > LONGEST_DATA:
                raise BadFrame("what comes is no frame of elaunch")
            self._head = KINDS[kind], fds, length, size
        return self._head


def _text(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:
        raise BadFrame("a frame's text is no JSON") from None
    if not _is_text(said):
        raise BadFrame("a frame's text lacks fields")
    return said


def _is_text(said: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(said, dict)
