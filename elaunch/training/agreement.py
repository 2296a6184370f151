"""One call of several ranks over the round's store: each sets what it gives, the last completes it.

A call is number n of its scope: ``all``, or ``node<r>`` for the ranks of node r.

========================  ===========  =========================================================
key                       written by   what
========================  ===========  =========================================================
``<scope>/<n>/kind``      the first    the call's name and remark, and who calls it: who calls
                                       something else has the call fail
``<scope>/<n>/given``     each         what all are to get, appended
``<scope>/<n>/first``     one rank     what all are to get of this one
``<scope>/<n>/problems``  some         why they give nothing, appended
``<scope>/<n>/count``     each         how many have come; above that, how many have problems;
                                       above that, the sum of checksums of what they call
``<scope>/<n>/done``      the last     what it has composed; or by whoever knows it first, why the
                                       call has failed
``doing/<rank>``          each         its last call: scope, number and name; who is missing from a
                                       call does another one
========================  ===========  =========================================================

The threads of should_preempt() do so, too (elaunch.training.preempt.agreement), in scopes of one
call each, and write no ``doing/<rank>``. There a rank may come twice, after its connection broke:
the last one looks who has given something.

So who waits for a call has three exchanges with the store, and what is not asked for is not read.
The last of call n forgets the keys of call n - 1: all have read them.

A value begins with its HMAC by the job's key. Where the launcher has given one, what has another
is refused; else it is taken for a stranger's: `Value.trusted` is False, and nothing that it could
name is called for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from elaunch.errors import PeerLost
from elaunch.training.stores.roundstore import (
    Request,
    StoreConnection,
    add,
    append,
    forget,
    get,
    put,
    put_first,
)

PIECE: Final = 4 << 20
"""Bytes that one request appends at most."""
ANSWER_S: Final = 10.0
"""Seconds that the store may take for an exchange, whatever the call's deadline."""
FIRST_SLICE_S, LONGEST_SLICE_S = 1.0, 15.0
"""Seconds after which one who waits looks after the others; each time half as many more."""
_RANK: Final = struct.Struct("<I")
_PIECE: Final = struct.Struct("<IIII")
"""Of an appended piece: rank, number, how many there are, bytes."""
_MAC: Final = hashlib.sha256().digest_size
_CAME: Final = 20
"""Bits of the counter for the ranks that have come; as many for those with problems."""
_LOW: Final = (1 << _CAME) - 1
_SUMS: Final = (1 << 23) - 1
_KEYS: Final = ("kind", "given", "first", "problems", "count", "done")


class Call(NamedTuple):
    """One call of one rank: ``number`` counts those of its scope."""

    scope: str
    number: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"

    def key(self, part: str) -> str:
        """Return the key of a part of it."""
        return f"{self.scope}/{self.number}/{part}"


def read_call(raw: bytes) -> Call | None:
    """Return the call that ``doing/<rank>`` names; number 0: none, and there will be none."""
    try:
        scope, number, name = json.loads(raw)
        return Call(str(scope), int(number), str(name))
    except (ValueError, TypeError, RecursionError):
        return None


class Value(NamedTuple):
    """A value that a rank has given; ``trusted``: one of this job has."""

    content: bytes
    trusted: bool


@dataclass(frozen=True)
class Gift:
    """The gift of this rank to a call: for all (``given``, ``first``), or its ``problem``.

    ``remark`` has to be the same on all ranks: else the call fails, and the next one works.
    """

    given: bytes | None = None
    first: bytes | None = None
    problem: bytes | None = None
    remark: str = ""


@dataclass
class Gathered:
    """The gifts of all, by rank; ``composed`` is what the last has made of them.

    ``own_problem`` is this rank's.
    """

    given: dict[int, Value] = field(default_factory=dict)
    first: Value | None = None
    problems: dict[int, Value] = field(default_factory=dict)
    composed: dict[str, Any] = field(default_factory=dict)
    own_problem: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """Why a call has failed: ``error`` is the kind, ``missing`` the ranks that it is about."""

    error: str
    text: str
    missing: tuple[int, ...] = ()


class Failed(Exception):
    """The call has failed, on all ranks that are in it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


class Expired(Exception):
    """The deadline has passed."""


class Signature:
    """Says of bytes whether a rank of this job wrote them; without a ``key`` of none."""

    def __init__(self, key: bytes | None, required: bool) -> None:
        self._key = key
        self._required = required

    def mac(self, where: str, content: bytes) -> bytes:
        """Return the HMAC of what is written at ``where``."""
        if self._key is None:
            return bytes(_MAC)
        name = where.encode()
        return hmac.digest(self._key, _RANK.pack(len(name)) + name + content, "sha256")

    def of(self, where: str, content: bytes) -> bytes:
        """Return ``content`` with its HMAC before it."""
        return self.mac(where, content) + content

    def opened(self, where: str, signed: bytes) -> Value:
        """Return what is behind the HMAC; raises PeerLost for a wrong one where that is refused."""
        return self.checked(where, signed[:_MAC], signed[_MAC:])

    def checked(self, where: str, mac: bytes, content: bytes) -> Value:
        """Return ``content`` as a value; raises as :meth:`opened`."""
        own = self._key is not None and hmac.compare_digest(mac, self.mac(where, content))
        if self._required and not own:
            raise PeerLost(
                f"the round's store holds what no rank of this job wrote: {content[:40]!r}"
            )
        return Value(content, own)


class StoreCalls:
    """One rank's part in calls, over its connection; ``who`` names this rank for others.

    Every method raises CollectiveTimeout and PeerLost as StoreConnection's do, and PeerLost for
    what no rank can have written.
    """

    def __init__(
        self,
        connection: StoreConnection,
        signature: Signature,
        rank: int,
        who: str,
        seconds: float = ANSWER_S,
    ) -> None:
        self.signature = signature
        self.connection = connection
        self._rank = rank
        self._who = who
        self._seconds = seconds

    def take_part(
        self,
        call: Call,
        size: int,
        gift: Gift,
        wants: Collection[str],
        until: float,
        *,
        compose: Callable[[dict[int, Value]], dict[str, Any]] | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> Gathered:
        """Give ``gift``, wait until all ``size`` ranks have come, and return what this one wants.

        ``wants``: some of ``given`` and ``first``. ``compose`` makes something of all that is
        given, on the last. ``look`` is called from time to time and may raise. Raises Failed, and
        Expired at ``until``.
        """
        kind, count = self.connection.exchange(self._coming(call, gift), self._by(until))
        self._check_kind(call, gift.remark, kind)
        if count & _LOW == size and count >> 2 * _CAME & _SUMS == size * _sum(call, gift) & _SUMS:
            done, values = self._complete(call, count, wants, until, compose)
        else:
            self._await(call.key("done"), until, look)
            keys = [call.key(part) for part in ("done", *wants)]
            done, *values = self.connection.multi_get(keys, self._by(until))
        fields = self._fields(call, done)
        found = self._found(call, dict(zip(wants, values, strict=True)), fields)
        if fields["problems"]:
            key = call.key("problems")
            problems = self.connection.get(key, self._by(until))
            found.problems = dict(self._pieces(key, problems))
        return found

    def arrive(
        self,
        call: Call,
        size: int,
        gift: Gift,
        compose: Callable[[dict[int, Value]], dict[str, Any]] | None = None,
    ) -> bool:
        """Come to a call, maybe not for the first time; return whether all have. Does not wait.

        Each gives something: by that it is seen who has come.
        """
        _, count = self.connection.exchange(self._coming(call, gift), self._by())
        if count & _LOW < size or len(self.given(call)) < size:
            return False
        self._complete(call, count, (), 0.0, compose)
        return True

    def given(self, call: Call) -> dict[int, Value]:
        """Return what the ranks have given that have come."""
        key = call.key("given")
        return dict(self._pieces(key, self.connection.get(key, self._by())))

    def decide(self, call: Call, fields: dict[str, Any]) -> dict[str, Any]:
        """Complete a call that nobody waits for; return what is said of it, by the first."""
        key = call.key("done")
        done = self.signature.of(key, json.dumps({"problems": False, **fields}).encode())
        return self._fields(call, self.connection.put_first(key, done, self._by()))

    def decided(self, call: Call) -> dict[str, Any]:
        """Return what is said of a complete call."""
        return self._fields(call, self.connection.get(call.key("done"), self._by()))

    def away(self, call: Call, ranks: Iterable[int]) -> dict[int, Call | None]:
        """Return those of ``ranks`` that are not in a call, with what each has called last."""
        asked = list(ranks)
        doing = self.connection.multi_get([f"doing/{rank}" for rank in asked], self._by())
        last = zip(asked, map(read_call, doing), strict=True)
        return {rank: one for rank, one in last if one is None or one[:2] != call[:2]}

    def fail(self, call: Call, verdict: Verdict) -> Verdict | None:
        """Have a call fail; return why it has, by the first that knew it; None: it is complete."""
        try:
            self.decide(call, {"failed": asdict(verdict)})
        except Failed as failed:
            return failed.verdict
        return None

    def _by(self, until: float = 0.0) -> float:
        """Return when the store has to have answered, in a call that lasts until ``until``."""
        return max(until, time.monotonic() + self._seconds)

    def _coming(self, call: Call, gift: Gift) -> list[Request]:
        stated = json.dumps([call.name, self._rank, self._who, gift.remark]).encode()
        kind = call.key("kind")
        requests = [put_first(kind, self.signature.of(kind, stated))]
        if self._who:
            requests.append(put(f"doing/{self._rank}", json.dumps(call).encode()))
        number = 1 + (_sum(call, gift) << 2 * _CAME)
        if gift.given is not None:
            requests += self._appended(call.key("given"), gift.given)
        if gift.first is not None:
            requests += self._appended(call.key("first"), gift.first)
        if gift.problem is not None:
            number += 1 << _CAME
            requests += self._appended(call.key("problems"), gift.problem)
        return [*requests, add(call.key("count"), number)]

    def _appended(self, key: str, content: bytes) -> Iterator[Request]:
        whole = memoryview(content)
        count = max(1, -(-len(content) // PIECE))
        for number in range(count):
            piece = bytes(whole[number * PIECE : (number + 1) * PIECE])
            head = _PIECE.pack(self._rank, number, count, len(piece))
            yield append(key, head + self.signature.of(_named(key, head), piece))

    def _pieces(self, key: str, content: bytes) -> Iterator[tuple[int, Value]]:
        """Yield what each rank has appended; raises PeerLost for what none has."""
        whole, at = memoryview(content), 0
        parts: dict[int, list[Value]] = {}
        try:
            while at < len(whole):
                head = bytes(whole[at : at + _PIECE.size])
                rank, number, count, length = _PIECE.unpack(head)
                at += _PIECE.size + _MAC
                piece = bytes(whole[at : at + length])
                value = self.signature.checked(
                    _named(key, head), bytes(whole[at - _MAC : at]), piece
                )
                at += length
                mine = parts.setdefault(rank, [])
                if not number:
                    mine.clear()
                if number != len(mine) or at > len(whole):
                    raise ValueError
                mine.append(value)
                if len(mine) == count:
                    one = mine[0].content if count == 1 else b"".join(v.content for v in mine)
                    yield rank, Value(one, all(v.trusted for v in mine))
        except (struct.error, ValueError):
            raise PeerLost("the round's store holds something that no rank wrote") from None

    def _check_kind(self, call: Call, remark: str, kind: bytes) -> None:
        """Have the call fail if the first to come has called something else."""
        name, rank, who, theirs = self._read(call.key("kind"), kind, list, 4)
        if (name, theirs) == (call.name, remark):
            return
        if name != call.name:
            other = call._replace(name=str(name))
            both = f"{self._who} calls {call}, {who} calls {other}"
            verdict = Verdict("other", f"{call}: the ranks call different things: {both}")
        else:
            first, second = sorted([(self._rank, remark), (int(rank), str(theirs))])
            both = f"rank {first[0]}: {first[1]}; rank {second[0]}: {second[1]}"
            verdict = Verdict("calls", both)
        raise Failed(self.fail(call, verdict) or verdict)

    def _complete(
        self,
        call: Call,
        count: int,
        wants: Collection[str],
        until: float,
        compose: Callable[[dict[int, Value]], dict[str, Any]] | None,
    ) -> tuple[bytes, list[bytes]]:
        """Complete a call as the last that has come; return what is said of it, and the values."""
        fields: dict[str, Any] = {}
        if compose is not None:
            fields = compose(self.given(call))
        fields["problems"] = bool(count >> _CAME & _LOW)
        key = call.key("done")
        done = self.signature.of(key, json.dumps(fields).encode())
        before = call._replace(number=call.number - 1)
        stands, *values = self.connection.exchange(
            [
                put_first(key, done),
                *(get(call.key(part)) for part in wants),
                *(forget(before.key(part)) for part in _KEYS if call.number > 1),
            ],
            self._by(until),
        )
        if stands == done:  # without libuv only setting it wakes those that wait
            self.connection.put(key, done, self._by(until))
        return stands, values[: len(wants)]

    def _await(self, key: str, until: float, look: Callable[[], None]) -> None:
        seconds = FIRST_SLICE_S
        while not self.connection.wait(key, min(until, time.monotonic() + seconds)):
            if time.monotonic() >= until:
                raise Expired
            look()
            seconds = min(LONGEST_SLICE_S, 1.5 * seconds)

    def _found(self, call: Call, values: dict[str, bytes], fields: dict[str, Any]) -> Gathered:
        found = Gathered(composed=fields)
        if "given" in values:
            found.given = dict(self._pieces(call.key("given"), values["given"]))
        if "first" in values:
            firsts = [value for _, value in self._pieces(call.key("first"), values["first"])]
            found.first = firsts[0] if firsts else None
        return found

    def _fields(self, call: Call, done: bytes) -> dict[str, Any]:
        """Return what the last has composed; raises Failed if the call has failed."""
        fields: dict[str, Any] = self._read(call.key("done"), done, dict)
        failed = fields.get("failed")
        if failed is None and "problems" in fields:
            return fields
        try:
            verdict = Verdict(**failed)  # type: ignore[arg-type]
            verdict = Verdict(str(verdict.error), str(verdict.text), tuple(verdict.missing))
        except TypeError:
            raise PeerLost(f"the round's store holds what no rank wrote: {done[:80]!r}") from None
        raise Failed(verdict)

    def _read(self, key: str, signed: bytes, kind: type[Sized], length: int | None = None) -> Any:
        content = self.signature.opened(key, signed).content
        try:
            found: Any = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind) or (length is not None and len(found) != length):
            raise PeerLost(f"the round's store holds what no rank wrote: {content[:80]!r}")
        return found


def _sum(call: Call, gift: Gift) -> int:
    """Return a checksum of what a rank calls: by it the last sees that all call the same."""
    return zlib.crc32(f"{call.name}\0{gift.remark}".encode()) & _SUMS


def _named(key: str, head: bytes) -> str:
    return f"{key} {head.hex()}"
