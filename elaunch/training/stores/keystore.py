"""``ctx.distributed.store``: a few small values by name, which every rank of the round sees.

It is the round's TCPStore (elaunch.training.stores.roundstore), below a prefix of its own; for a
job of one rank it is this process's memory. A restarted round begins with an empty one.

=====================  ==========================================
value                  bytes in the store
=====================  ==========================================
int of 64 bits         decimal digits: what ``add`` counts on
bytes                  ``\\0b`` and the bytes
all else that is JSON  ``\\0j`` and the text
=====================  ==========================================

Values that a rank reads are data and run nothing, whoever has written them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from elaunch.errors import CollectiveTimeout, ContextError, PeerLost
from elaunch.store.tcp.wire import LONGEST
from elaunch.training.stores.roundstore import RoundStore, StoreConnection

PREFIX: Final = "values/"
LONGEST_KEY: Final = 1000
SLICE_S: Final = 15.0
"""Seconds after which a wait has the store answer, so that the connection is not idle for long."""
ASK_S: Final = 5.0
"""Seconds to ask the other ranks what they do, for an error."""
MOST_NAMED: Final = 8
_INT: Final = range(-(2**63), 2**63)
_BYTES, _JSON = b"\0b", b"\0j"


class _Ranks(Protocol):
    """This rank among the others: a DistributedContext, which imports this module."""

    rank: int
    size: int

    def seconds(self, timeout: float | None) -> float:
        """Return the seconds that a call may take."""

    def note(self, doing: str) -> None:
        """Note what this rank does on its progress page."""

    def describe(self, ranks: Sequence[int], until: float) -> list[str]:
        """Return what other ranks do."""


class KeyStore:
    """A few small values by name; any rank may call, alone, from any thread.

    Keys are text. A value is what JSON takes (tuples come back as lists), or bytes, up to 8 MB, and
    comes back as it was set. A key can be set again. All values are gone when the round ends.
    ``timeout`` is in seconds; None is the context's own.

    Every call raises CollectiveTimeout when the store does not answer in time, PeerLost when it is
    lost, and ContextError for an impossible key or value, and after the end of the context.
    """

    def __init__(self, distributed: _Ranks, rounds: RoundStore) -> None:
        self.uses = 0
        """How often it was used."""
        self._distributed = distributed
        self._rounds = rounds
        self._lock = threading.Lock()
        self._free: list[StoreConnection] = []
        self._alone = _Memory() if distributed.size == 1 else None

    def set(self, key: str, value: Any, timeout: float | None = None) -> None:
        """Set ``key``; any rank may, alone. Blocks until the store has it, not for another rank."""
        name, packed = _checked_key(key), _packed(key, value)
        with self._store(timeout) as (store, until):
            store.put(name, packed, until)
            store.get(name, until)  # a put has no answer

    def get(self, key: str, timeout: float | None = None) -> Any:
        """Return the value of ``key``; any rank may, alone.

        Blocks until some rank has set it, at most ``timeout`` seconds.

        CollectiveTimeout then names the other ranks and what they do.
        """
        name, seconds = _checked_key(key), self._distributed.seconds(timeout)
        doing, rank = f"store.get({key!r})", self._distributed.rank
        self._distributed.note(doing)
        with self._store(timeout) as (store, until):
            store.put(f"doing/{rank}", json.dumps(["", 1, doing]).encode(), until)  # for errors
            found = store.wait(name, min(until, time.monotonic() + SLICE_S))
            while not found and time.monotonic() < until:
                found = store.wait(name, min(until, time.monotonic() + SLICE_S))
            raw = store.get(name, max(until, time.monotonic() + ASK_S)) if found else b""
        if not raw:
            raise self._nobody(key, seconds)
        return _unpacked(key, raw)

    def add(self, key: str, amount: int = 1, timeout: float | None = None) -> int:
        """Add to the counter ``key``, 0 before the first, and return the sum.

        Any rank may, alone. Blocks until the store has answered, not for another rank. No two ranks
        get the same sum of the same counter while all amounts are positive.
        """
        name = _checked_key(key)
        if isinstance(amount, bool) or not isinstance(amount, int) or amount not in _INT:
            raise ContextError(f"store.add({key!r}, {amount!r}): the amount is a whole number")
        with self._store(timeout) as (store, until):
            before = store.get(name, until)
            if before and not isinstance(_unpacked(key, before), int):
                raise ContextError(
                    f"store.add({key!r}): it holds no number but {_unpacked(key, before)!r}: count "
                    "under a key of its own"
                )
            return store.add(name, amount, until)

    def close(self) -> None:
        """Forget the connections, which the round's store has cut."""
        with self._lock:
            self._free.clear()

    @contextlib.contextmanager
    def _store(self, timeout: float | None) -> Iterator[tuple[StoreConnection | _Memory, float]]:
        until = time.monotonic() + self._distributed.seconds(timeout)
        self.uses += 1
        if self._alone is not None:
            yield self._alone, until
            return
        connection = self._connection(until)
        try:
            yield connection, until
        except (CollectiveTimeout, PeerLost):
            connection.close()
            raise
        except ContextError:
            self._give_back(connection)
            raise
        self._give_back(connection)

    def _connection(self, until: float) -> StoreConnection:
        """Return a connection that works: one that has rested may have been dropped on the way."""
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is not None:
            try:
                connection.get(PREFIX, min(until, time.monotonic() + ASK_S))
                return connection
            except (CollectiveTimeout, PeerLost):
                connection.close()
        return self._rounds.connect(until)

    def _give_back(self, connection: StoreConnection) -> None:
        with self._lock:
            self._free.append(connection)

    def _nobody(self, key: str, seconds: float) -> CollectiveTimeout:
        me, size = self._distributed.rank, self._distributed.size
        others = [rank for rank in range(size) if rank != me]
        others_do = self._distributed.describe(others[:MOST_NAMED], time.monotonic() + ASK_S)
        if len(others) > MOST_NAMED:
            others_do.append(f"and {len(others) - MOST_NAMED} more")
        text = f"store.get({key!r}): no rank has set it within {seconds:g} s"
        why = "; ".join(others_do) or "this is the only one"
        return CollectiveTimeout(f"{text}: {why}", tuple(others))


class _Memory:
    """The store of a job of one rank; its threads share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes, until: float) -> None:
        """Set a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, until: float) -> bytes:
        """Return a key's value, empty if it has none."""
        with self._changed:
            return self._values.get(key, b"")

    def add(self, key: str, number: int, until: float) -> int:
        """Add to a counter and return the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + number
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def wait(self, key: str, until: float) -> bool:
        """Return whether the key has a value before ``until``."""
        with self._changed:
            left = max(0.0, until - time.monotonic())
            return self._changed.wait_for(lambda: key in self._values, left)


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ContextError(f"the key is {key!r}: give a text that is not empty")
    if len(key) > LONGEST_KEY:
        raise ContextError(f"the key {key[:40]!r}… has {len(key)} characters; {LONGEST_KEY} fit")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ContextError(f"the key {key!r} cannot be encoded: {error.reason}") from None
    return PREFIX + key


def _packed(key: str, value: Any) -> bytes:
    if type(value) is int and value in _INT:
        return str(value).encode()
    if isinstance(value, bytes | bytearray | memoryview):
        packed = _BYTES + bytes(value)
    else:
        try:
            packed = _JSON + json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ContextError(
                f"store.set({key!r}): the value is {type(value).__name__}, which JSON does not "
                f"take ({error}): give text, numbers, lists or dicts of them, or bytes"
            ) from None
    if len(packed) > LONGEST:
        raise ContextError(
            f"store.set({key!r}): the value has {len(packed):,} bytes, {LONGEST:,} at most: "
            "broadcast() is for what is large"
        )
    return packed


def _unpacked(key: str, raw: bytes) -> Any:
    kind, rest = raw[:2], raw[2:]
    if kind == _BYTES:
        return rest
    try:
        return json.loads(rest) if kind == _JSON else int(raw)
    except (ValueError, RecursionError):
        raise PeerLost(
            f"store.get({key!r}): something else than elaunch has written it: {raw[:40]!r}"
        ) from None
