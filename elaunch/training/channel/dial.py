"""How one rank reaches the listener of another: to connect, or to ask what it does.

The other rank's listener answers in a thread of its own, whatever its script is in.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from elaunch.training.channel.link import Call
from elaunch.training.channel.listener import LENGTH
from elaunch.training.channel.meeting import RankRecord
from elaunch.wire import stream
from elaunch.wire.stream import ASK, Caller, Endpoint, Unreached, receive

AT_ONCE: Final = 32
LONGEST: Final = 65536


class Dialer:
    """Dials other ranks, with this rank's record and the key of the context."""

    def __init__(self, me: RankRecord, key: bytes) -> None:
        self.me = me
        self._key = key

    def dial(self, member: RankRecord, purpose: bytes, until: float) -> socket.socket:
        """Return a connection to ``member`` after the handshake; raises Unreached.

        Blocks until ``until`` (monotonic clock) at the longest.
        """
        where = Endpoint(host=member.addr, port=member.port)
        if member.machine == self.me.machine:
            where = Endpoint(unix=member.unix)
        caller = Caller(purpose, self.me.rank)
        try:
            return stream.dial(where, lambda: self._key, member.rank, caller, until)
        except Unreached as error:
            texts = {
                "refused": f"{member} has ended, or has closed its context",
                "stranger": f"{member} has ended: {error}",
                "silent": f"{member} does not answer at {where}: {error}",
                "busy": f"{member} does not take us at {where}: {error}",
            }
            raise Unreached(error.how, texts[error.how]) from None


@dataclass(frozen=True)
class Answer:
    """A rank's answer: what it does, as text, and how many calls of each scope it has entered.

    ``there`` is False for one that is ``gone`` or does not answer: ``calls`` is empty then.
    """

    member: RankRecord
    text: str
    there: bool = False
    gone: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.member}{self.text}"

    def lacks(self, call: Call) -> bool:
        """Return whether the rank has not come to ``call``."""
        return not self.there or self.calls.get(call.scope, 0) < call.number


@dataclass
class Activity:
    """The activity of this rank, for ranks that ask; written by the thread that is in a call."""

    calls: dict[str, int] = field(default_factory=lambda: {"all": 0, "local": 0})
    now: Call | None = None
    since: float = 0.0

    def enter(self, scope: str, name: str) -> Call:
        """Note that a call begins, and return it."""
        self.calls[scope] += 1
        self.since = time.monotonic()
        self.now = Call(scope, self.calls[scope], name)
        return self.now

    def report(self, last: str) -> dict[str, Any]:
        """Return the answer to the question; ``last``: what the progress page has."""
        now = self.now
        if now is None:
            return {"calls": self.calls, "text": f": its last call was {last}"}
        seconds = time.monotonic() - self.since
        return {"calls": self.calls, "text": f": in {now} for {seconds:.1f} s"}


def ask(dialer: Dialer, members: Sequence[RankRecord], until: float) -> list[Answer]:
    """Return what each of ``members`` reports, in their order; blocks until ``until`` at most."""
    answers: dict[int, Answer] = {}
    todo: queue.SimpleQueue[RankRecord] = queue.SimpleQueue()
    for member in members:
        todo.put(member)

    def work() -> None:
        while time.monotonic() < until:
            try:
                member = todo.get_nowait()
            except queue.Empty:
                return
            answers[member.rank] = _ask_one(dialer, member, until)

    threads = [
        threading.Thread(target=work, name="elaunch-ask", daemon=True)
        for _ in range(min(AT_ONCE, len(members)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()) + 0.1)
    return [answers.get(m.rank, Answer(m, " does not answer")) for m in members]


def _ask_one(dialer: Dialer, member: RankRecord, until: float) -> Answer:
    try:
        with dialer.dial(member, ASK, until) as sock:
            (length,) = LENGTH.unpack(receive(sock, LENGTH.size, until))
            answer = json.loads(receive(sock, min(length, LONGEST), until))
            return Answer(member, str(answer["text"]), there=True, calls=dict(answer["calls"]))
    except Unreached as error:
        if error.how in ("refused", "stranger"):
            return Answer(member, " has ended, or has closed its context", gone=True)
        return Answer(member, " does not answer")
    except (OSError, ValueError, KeyError, TypeError):
        return Answer(member, " does not answer")
