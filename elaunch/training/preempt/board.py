"""What the ranks write to the round's store to agree on the call at which all of them end.

======================  ===================  ======================================================
key                     written by           what
======================  ===================  ======================================================
``preempt/notice``      any rank with one    JSON: ``{"reason": …, "kind": …}``; the first stays
``preempt/at/<rank>``   every rank           JSON: ``{"calls": n, "closed": …}``: how often it had
                                             called should_preempt() when it received the notice, or
                                             when it closed
``preempt/at/all``      the last of all      JSON: ``{"call": K, "reason": …, "kind": …}``; K is one
                                             more than the most calls
``preempt/in/<rank>``   every rank           it has come to call K, or has closed
``preempt/in/all``      the last of all      all have: call K returns True
``preempt/out/<rank>``  every rank           it has seen that, or has closed
``preempt/out/all``     the last of all      nobody needs these keys any more
======================  ===================  ======================================================

The last rank learns it from a counter, ``preempt/<stage>/count``. A rank whose connection broke
adds to it again, so it may be too high; therefore a rank that finds it high enough also looks
whether all are there. It cannot be too low, so the last one always looks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from elaunch.errors import PeerLost
from elaunch.training.stores.connection import SteadyLine
from elaunch.training.stores.roundstore import StoreConnection
from elaunch.wire.worker import KINDS, Notice

NOTICE: Final = "preempt/notice"
Stage = Literal["at", "in", "out"]


@dataclass(frozen=True)
class CallCount:
    """How often one rank had called should_preempt(), and whether it will call it no more."""

    calls: int
    closed: bool


@dataclass(frozen=True)
class Agreed:
    """The call at which should_preempt() returns True on every rank, and why."""

    call: int
    notice: Notice


def agree(standings: list[CallCount], notice: Notice) -> Agreed:
    """Return the first call that no rank has made yet."""
    return Agreed(1 + max(standing.calls for standing in standings), notice)


class PreemptBoard:
    """The keys above, as one rank writes and reads them over its connection.

    Every method raises CollectiveError when the store cannot be reached.
    """

    def __init__(self, line: SteadyLine, rank: int, size: int) -> None:
        self._line = line
        self._rank = rank
        self._size = size

    def announce(self, notice: Notice) -> None:
        """Publish ``notice`` to every rank, if there is none yet."""

        value = _packed(asdict(notice))
        self._line.run(lambda line, until: line.compare_set(NOTICE, b"", value, until))

    def notice(self) -> Notice:
        """Return the notice that there is."""
        return _notice(_fields(self._line.run(lambda line, until: line.get(NOTICE, until))))

    def stand(self, standing: CallCount) -> None:
        """Publish how often this rank had called; the last rank to do so publishes the call."""

        def complete(values: list[bytes]) -> bytes:
            agreed = agree([_standing(value) for value in values], self.notice())
            return _packed({"call": agreed.call, **asdict(agreed.notice)})

        self._enter("at", _packed(asdict(standing)), complete)

    def arrive(self) -> None:
        """Publish that this rank has come to the call, or never will."""
        self._enter("in", b"1", lambda _: b"1")

    def leave(self) -> None:
        """Publish that this rank needs the store for this no more."""
        self._enter("out", b"1", lambda _: b"1")

    def keep_alive(self) -> None:
        """Use the connection, so that no firewall forgets it; open it if it is not. Once."""
        self._line.run(lambda line, until: line.get(NOTICE, until), patience=0.0)

    def complete(self, stage: Stage, until: float) -> bool:
        """Wait until all ranks have come to ``stage``, at the longest until ``until``."""
        return self._line.await_key(f"preempt/{stage}/all", until)

    def agreed(self) -> Agreed:
        """Return what was agreed on; for when stage "at" is complete."""
        fields = _fields(self._line.run(lambda line, until: line.get("preempt/at/all", until)))
        return Agreed(_whole(fields.get("call")), _notice(fields))

    def standings(self) -> list[CallCount | None]:
        """Return by rank what it published; None for those that published nothing."""
        return [_standing(value) if value else None for value in self._all_of("at")]

    def absent(self, stage: Stage) -> list[int]:
        """Return the ranks that have not come to ``stage``."""
        return [rank for rank, value in enumerate(self._all_of(stage)) if not value]

    def _enter(self, stage: Stage, value: bytes, complete: Callable[[list[bytes]], bytes]) -> None:
        def exchange(line: StoreConnection, until: float) -> int:
            line.put(f"preempt/{stage}/{self._rank}", value, until)
            return line.add(f"preempt/{stage}/count", 1, until)

        if self._line.run(exchange) < self._size:
            return
        values = self._all_of(stage)
        if not all(values):
            return  # the count is too high; the last one is yet to come
        outcome = complete(values)
        key = f"preempt/{stage}/all"
        self._line.run(lambda line, until: line.compare_set(key, b"", outcome, until))

    def _all_of(self, stage: Stage) -> list[bytes]:
        keys = [f"preempt/{stage}/{rank}" for rank in range(self._size)]
        return self._line.run(lambda line, until: line.multi_get(keys, until))


def _packed(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        fields = {}
    return fields if isinstance(fields, dict) else {}


def _notice(fields: dict[str, Any]) -> Notice:
    kind = fields.get("kind")
    return Notice(str(fields.get("reason", "")), kind if kind in KINDS else "stop")


def _standing(raw: bytes) -> CallCount:
    fields = _fields(raw)
    return CallCount(_whole(fields.get("calls")), fields.get("closed") is True)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise PeerLost(f"the round's store holds something that no rank wrote: {number!r}")
    return number
