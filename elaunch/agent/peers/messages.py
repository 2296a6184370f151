"""The messages between the agents of a job about checkpoints, over TCP.

An agent that connects shows that it is of the job (elaunch.wire.stream), then sends requests,
one after the other, each a line of JSON with ``do``. The answer to each is one line,
``{"ok": true, …}`` or ``{"error": "…"}``, with ``"gone": true`` where another agent that it takes
for that cannot be reached; lines ``{"busy": n}`` may come before it: n grows while
something gets done, so that a slow agent differs from one that hangs. Bytes follow a line as
frames:

===========================  =====================================================================
frame                        meaning
===========================  =====================================================================
u32 n, n bytes               the next n bytes, at most CHUNK
u32 0, 32 bytes              the end; the SHA-256 of all bytes before
u32 2**32-1, line of JSON    the sender cannot go on: ``{"error": "…"}``; the connection lives on
===========================  =====================================================================

======================================================  ==========================================
request                                                 answer, beside ``ok``
======================================================  ==========================================
``written``: stage, rank, manifest                      nothing: the rank's shard is on the disk
``writing``: stage, rank, world_size                    nothing: the shard is being written still
``failed``: stage, rank, problem                        nothing: the shard will not come
``held``: step, round, uuid                             ``ranks`` whose shards that agent has
``shard``: step, round, rank                            ``shard``, the bytes of one rank's shard
                                                        from the memory of that agent, a line
                                                        ``whole``: whether they stayed the same
                                                        meanwhile; nothing if it is not there
``replica``: shard                                      nothing, once there is room; after the bytes
                                                        again, once the neighbour has them
``staged``                                              ``manifests`` of its ranks, ``committed``:
                                                        names
``manifests``: name                                     ``manifests`` of all ranks
``kept``: manifests                                     ``kept``: the checkpoints of this node,
                                                        ``passed_over``: names with reasons
``look``: checkpoint, one of ``kept``                   ``looked``: files that are whole here,
                                                        files wanted, problem, format
``gather``: checkpoint, files, nodes                    nothing: all these files are here now
``file``: checkpoint, file                              ``size``, then the bytes, from the disk
``collectives``: round, whether one waits elsewhere     ``places`` of its ranks, at the time ``now``
``view``: of, …                                         what elaunch.agent.status.views has of it
======================================================  ==========================================

The last but one is elaunch.agent.hangs.elsewhere's, the six before it those of --checkpoint-local
(elaunch.agent.peers.directory). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from elaunch import atonce
from elaunch.errors import SaveError
from elaunch.hosts import keep_alive

CHUNK: Final = 4 * 2**20
ASKED_AT_ONCE: Final = 32
LONGEST_LINE: Final = 64 * 2**20
BUSY_EVERY: Final = 1.0
"""Seconds between two ``busy`` lines."""
ALIVE_S: Final = 6
"""Seconds after which a machine that acknowledges nothing is gone; one whose agent is stopped is
not, and neither is one whose disk is slow."""
_LENGTH: Final = struct.Struct("<I")
_BROKEN: Final = 2**32 - 1


class Undelivered(SaveError):
    """Another agent did not do what it was asked to; the text names it and says why.

    ``gone``: it has ended, or nobody is there; False: it is there and refuses, or is too slow.
    """

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


class PeerConnection:
    """One end of a connection between two agents; owns the socket.

    Args:
        sock: connected, after the handshake.
        who: the other side, as messages name it.
        patience: seconds without a byte, or without progress, after which it counts as hung.
    """

    def __init__(self, sock: socket.socket, who: str, patience: float) -> None:
        self.who = who
        self._sock = sock
        self.patience = patience
        self._progress = 0
        self._busy_at = 0.0
        keep_alive(sock, idle=2, every=1, probes=ALIVE_S - 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * ALIVE_S)
        self._reader = io.BufferedReader(socket.SocketIO(sock, "r"), 65536)

    def __enter__(self) -> PeerConnection:
        """Return it; the end of the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    @property
    def patience(self) -> float:
        """Seconds that the other side may be silent: the socket's own timeout."""
        seconds = self._sock.gettimeout()
        assert seconds is not None  # set when it was made
        return seconds

    @patience.setter
    def patience(self, seconds: float) -> None:
        """Set them, for the next call on."""
        with contextlib.suppress(OSError):  # it has been closed: the next call says so
            self._sock.settimeout(seconds)

    def close(self) -> None:
        """Hang up; may be called twice, and from another thread to wake the one that waits here."""
        with contextlib.suppress(OSError):  # the other side may have hung up before
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    # ── lines ────────────────────────────────────────────────────────────────────────────────────

    def send(self, fields: Mapping[str, Any]) -> None:
        """Send one line; raises Undelivered."""
        self._send_raw(json.dumps(fields, separators=(",", ":")).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next line; None where the other side has hung up between two lines."""
        try:
            line = self._reader.readline(LONGEST_LINE)
        except OSError as error:
            raise self._lost(error) from None
        if not line:
            return None
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not line.endswith(b"\n") or not isinstance(fields, dict):
            raise Undelivered(f"{self.who} broke off, or sends what is no line of elaunch", True)
        return fields

    def ask(
        self, fields: Mapping[str, Any], progress: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Send a request and return its answer; see :meth:`answer`."""
        self.send(fields)
        return self.answer(progress)

    def answer(self, progress: Callable[[], object] | None = None) -> dict[str, Any]:
        """Return the answer to what was asked; ``progress`` is called while it is being worked on.

        Raises Undelivered: it is an error, the other side is gone, or makes no progress.
        """
        seen, since = -1, time.monotonic()
        while True:
            answer = self.receive()
            if answer is None:
                raise Undelivered(f"{self.who} has ended, or hung up", True)
            if "error" in answer:
                gone = answer.get("gone") is True
                raise Undelivered(f"{self.who}: {answer['error']}", gone)
            if "busy" not in answer:
                return answer
            now = time.monotonic()
            if answer["busy"] != seen:
                seen, since = answer["busy"], now
                if progress is not None:
                    progress()
            elif now - since > self.patience:
                raise Undelivered(f"{self.who} makes no progress for {self.patience:g} s")

    def busy(self, amount: int = 1) -> None:
        """Count progress with a request, and send a ``busy`` line at times."""
        self._progress += amount
        now = time.monotonic()
        if now - self._busy_at >= BUSY_EVERY:
            self._busy_at = now
            self.send({"busy": self._progress})

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────

    def send_bytes(self, pieces: Iterable[memoryview | bytes]) -> None:
        """Send the bytes of ``pieces``; an OSError while they are made is sent to the other side.

        Raises Undelivered, and the OSError after it was sent.
        """
        total = hashlib.sha256()
        source = _chunks(pieces)
        while True:
            try:
                chunk = next(source, None)
            except OSError as error:
                self._send_raw(_LENGTH.pack(_BROKEN))
                self.send({"error": error.strerror or str(error)})
                raise
            if chunk is None:
                break
            total.update(chunk)
            self._send_raw(_LENGTH.pack(len(chunk)))
            self._send_raw(chunk)
        self._send_raw(_LENGTH.pack(0) + total.digest())

    def receive_into(self, memory: memoryview, progress: Callable[[int], object]) -> None:
        """Fill ``memory`` with the bytes that come; ``progress`` gets each frame's size.

        Raises Undelivered: fewer or more come, they are not what was sent, or the sender is gone.
        """
        for view in self._received(memory.nbytes, lambda at, size: memory[at : at + size]):
            progress(view.nbytes)

    def receive_to(
        self, write: Callable[[memoryview], object], size: int, progress: Callable[[int], object]
    ) -> None:
        """Give the ``size`` bytes that come to ``write``, piece by piece.

        Needs CHUNK bytes of memory. Raises Undelivered as :meth:`receive_into`, and OSError.
        """
        buffer = memoryview(bytearray(min(CHUNK, max(1, size))))
        for view in self._received(size, lambda _, length: buffer[:length]):
            write(view)
            progress(view.nbytes)

    def _received(self, whole: int, room: Callable[[int, int], memoryview]) -> Iterator[memoryview]:
        """Yield the ``whole`` bytes that come, in memory that ``room`` gives by offset and size."""
        at = 0

        def next_room(size: int) -> memoryview:
            if at + size > whole:
                raise Undelivered(f"{self.who} sends more than {whole:,} bytes")
            return room(at, size)

        for view in self._frames(next_room):
            at += view.nbytes
            yield view
        if at != whole:
            raise Undelivered(f"{self.who} sends {at:,} of {whole:,} bytes")

    def _frames(self, room: Callable[[int], memoryview]) -> Iterator[memoryview]:
        total = hashlib.sha256()
        while True:
            (size,) = _LENGTH.unpack(self._exactly(bytearray(_LENGTH.size)))
            if size == 0:
                break
            if size == _BROKEN:
                fields = self.receive() or {}
                raise Undelivered(f"{self.who}: {fields.get('error', 'it cannot go on')}")
            if size > CHUNK:
                raise Undelivered(f"{self.who} sends what is no frame of elaunch", True)
            view = room(size)
            self._exactly(view)
            total.update(view)
            yield view
        if bytes(self._exactly(bytearray(total.digest_size))) != total.digest():
            raise Undelivered(f"what {self.who} sent was changed on the way")

    def _exactly(self, into: bytearray | memoryview) -> bytearray | memoryview:
        try:
            got = self._reader.readinto(into)
        except OSError as error:
            raise self._lost(error) from None
        if got != len(into):
            raise Undelivered(f"{self.who} has ended in the middle of sending", True)
        return into

    def _send_raw(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> Undelivered:
        if error.errno == errno.ETIMEDOUT:
            return Undelivered(f"{self.who} is gone: its machine does not answer", True)
        if isinstance(error, TimeoutError):
            return Undelivered(f"{self.who} does not answer for {self.patience:g} s")
        why = error.strerror or str(error)
        return Undelivered(f"{self.who} is gone: {why}", True)


def ask_nodes(
    nodes: Iterable[int], ask: Callable[[int], dict[str, Any]], seconds: float
) -> dict[int, dict[str, Any]]:
    """Return what ``ask`` returns of each node, all at once; ``error`` of one that is late."""
    found: dict[int, dict[str, Any]]
    found = {node: {"error": "it was not asked in time"} for node in nodes}
    until = time.monotonic() + seconds

    def one(node: int) -> None:
        if time.monotonic() < until:
            found[node] = {"error": "it does not answer"}
            found[node] = ask(node)

    calls = [partial(one, node) for node in found]
    atonce.within(seconds, lambda: atonce.at_once(calls, ASKED_AT_ONCE, "ask node"), "ask nodes")
    return dict(found)


def _chunks(pieces: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for at in range(0, view.nbytes, CHUNK):
            yield view[at : at + CHUNK]
