"""The messages between the agents of a job and the host of their store.

A connection is opened as one to any TCPStore, and the store's identity is read (``wire``,
``connection``). From then on both sides send frames: a byte, the length of the message as a u32
(little-endian), the message in MessagePack.

========================================  =========================================================
request (0xE1)                            answer (0xE1), in the order of the requests
========================================  =========================================================
``EnrolEntry`` name, owner, ttl, value    whether the entry is there; not where the name is or was
                                          another's
``PutEntry`` name, value                  whether it is there still; it is renewed, too
``RenewEntry`` name                       whether it is there still
``WithdrawEntry`` name                    whether it was there
``ReadMembers``                           name → seconds since the last renewal, value
``ReadShared`` offer                      the value that all share
``Prove`` nonce, proof                    the host's proof; nothing where the client's is wrong
``ReadPlan`` after, known                 the newest ``SentPost`` if it is newer than the version
                                          ``after``, else one with the version 0; the connection
                                          then follows the plan
========================================  =========================================================

Where the agents share a secret, the identity has a ``challenge``, and until a connection has proved
that it knows the secret it may read what is shared and nothing more. Either side's proof is
HMAC-SHA256 over who proves, the challenge and the client's nonce.

A connection that follows the plan is sent each new version (0xE2), between answers; of several that
come while it reads nothing, the newest. The nodes of a plan, which are the long part of it, are
sent over a connection if they are not those that it was sent last, or those ``known`` already:
``since`` is the version with which they came. They are packed by zlib, to a third or so.

So a round costs an agent two requests, for its records, and two plans that are sent unasked.
Whatever is malformed ends the connection over which it came.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
import zlib
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

PROTOCOL: Final = 3
"""In the identity of a store; 1 was kept under the keys of a plain TCPStore, 2 had no proofs."""
MESSAGE: Final = 0xE1
NEW_POST: Final = 0xE2
"""First bytes of frames; those of TCPStore's requests are below 0x20."""
LONGEST_ENTRY: Final = 64 * 1024
"""Bytes; an agent's record has no more (elaunch.rendezvous.records)."""
LONGEST_REQUEST: Final = LONGEST_ENTRY + 1024
LONGEST_UNPROVED: Final = 1024
"""Bytes of a request by a client that has yet to prove that it knows the secret."""
LONGEST_ANSWER: Final = 1 << 26
"""Bytes; the nodes of 16,384 agents are half a megabyte, their entries some."""
TTL: Final = (0.05, 3600.0)
"""Seconds that an agent may ask for."""

_HEAD: Final = struct.Struct("<BI")
HEAD: Final = _HEAD.size
NONCE: Final = 32
NAME: Final = r"\A[A-Za-z0-9_.-]{1,64}\Z"
Name: TypeAlias = Annotated[str, Meta(pattern=NAME)]
Entry: TypeAlias = Annotated[bytes, Meta(max_length=LONGEST_ENTRY)]


class EnrolEntry(Struct, frozen=True, array_like=True, tag=1):
    """Write a new entry; the same ``owner``, a random word, may ask again."""

    name: Name
    owner: Annotated[bytes, Meta(max_length=16)]
    ttl: Annotated[float, Meta(ge=TTL[0], le=TTL[1])]
    value: Entry


class PutEntry(Struct, frozen=True, array_like=True, tag=2):
    """Replace the value of an entry."""

    name: Name
    value: Entry


class RenewEntry(Struct, frozen=True, array_like=True, tag=3):
    """Keep an entry: a heartbeat."""

    name: Name


class WithdrawEntry(Struct, frozen=True, array_like=True, tag=4):
    """Remove an entry."""

    name: Name


class ReadMembers(Struct, frozen=True, array_like=True, tag=5):
    """Return all entries."""


class ReadShared(Struct, frozen=True, array_like=True, tag=6):
    """Return what all share; ``offer`` becomes it where there is nothing yet."""

    offer: Entry


class ReadPlan(Struct, frozen=True, array_like=True, tag=7):
    """Return the newest post, and follow."""

    after: int
    known: int


class Prove(Struct, frozen=True, array_like=True, tag=8):
    """Prove that this client knows the agents' secret, and have the host prove it."""

    nonce: Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
    proof: Annotated[bytes, Meta(max_length=64)]


class SentPost(Struct, frozen=True, array_like=True):
    """A post as it is sent; ``since`` is 0 for one without nodes, which are packed."""

    version: int
    since: int
    value: bytes
    nodes: bytes


Request: TypeAlias = (
    EnrolEntry | PutEntry | RenewEntry | WithdrawEntry | ReadMembers | ReadShared | ReadPlan | Prove
)
_ANSWERS: Final[dict[type[Request], Any]] = {
    EnrolEntry: bool,
    PutEntry: bool,
    RenewEntry: bool,
    WithdrawEntry: bool,
    ReadMembers: dict[str, tuple[float, bytes]],
    ReadShared: bytes,
    ReadPlan: SentPost,
    Prove: bytes,
}
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_answers: Final = {kind: msgspec.msgpack.Decoder(type=of) for kind, of in _ANSWERS.items()}
_encode: Final = msgspec.msgpack.Encoder().encode


def proof(key: bytes, side: Literal["host", "client"], challenge: str, nonce: bytes) -> bytes:
    """Return what shows that one side of a connection knows ``key``."""
    stated = b"elaunch store " + side.encode() + challenge.encode() + nonce
    return hmac.digest(key, stated, hashlib.sha256)


def is_name(name: str) -> bool:
    """Return whether ``name`` can be a member's."""
    return re.search(NAME, name) is not None


def packed(nodes: bytes) -> bytes:
    """Return nodes as they are sent."""
    return zlib.compress(nodes, 1) if nodes else b""


def unpacked(sent: bytes) -> bytes:
    """Return the nodes that were sent; raises ValueError."""
    unpacking = zlib.decompressobj()
    try:
        nodes = unpacking.decompress(sent, LONGEST_ANSWER)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof:
        raise ValueError("the nodes are cut off, or too long")
    return nodes


def frame(message: object, first: int = MESSAGE) -> bytes:
    """Return a message as it is sent."""
    body = _encode(message)
    return _HEAD.pack(first, len(body)) + body


def head(data: bytes | bytearray) -> tuple[int, int]:
    """Return the first byte of a frame and the length of its message."""
    first, length = _HEAD.unpack_from(data)
    return first, length


def read_request(body: bytes | bytearray) -> Request:
    """Return the request in ``body``; raises ValueError, RecursionError."""
    return _requests.decode(body)


def read_answer(body: bytes, kind: type[Request]) -> Any:
    """Return the answer to a request of that ``kind``; raises ValueError, RecursionError."""
    return _answers[kind].decode(body)
