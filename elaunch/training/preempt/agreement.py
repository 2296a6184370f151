"""One rank's part in agreeing on the call at which should_preempt() returns True on all ranks.

elaunch.training.preempt.preempt describes the steps; the ranks take them over the round's store, as
calls (elaunch.training.agreement) of their own:

==========  ===================  ===================================================================
call        come to it by        what it is
==========  ===================  ===================================================================
NOTICE      any rank with one    the notice: the first stays
AT          every rank           how often it had called should_preempt() when the notice came, or
                                 when it closed; with ``grace`` if its agent states it. The last
                                 makes the call of it, K: one more than the most; the notice; the
                                 least ``grace``
IN          every rank           it has come to call K, or has closed; when all have, K returns True
==========  ===================  ===================================================================

A rank whose connection broke comes again, which changes nothing.

Two threads do that. One waits in the store for the notice and then takes the steps, one after the
other; the script's thread only waits for what comes out. The other passes on the first notice that
comes to this rank: to its agent, and to the store.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple, TypeVar

from elaunch import text
from elaunch.errors import CollectiveError, CollectiveTimeout, PeerLost
from elaunch.training.agreement import Call, Failed, Gift, StoreCalls, Value
from elaunch.training.distributed import DistributedContext
from elaunch.training.stores.roundstore import SteadyConnection, StoreConnection
from elaunch.wire.worker import KINDS, Notice, notice_to_json, seconds_of

Stage = Literal["at", "in"]
NOTICE: Final = Call("preempt/notice", 1, "a notice to end")
STAGES: Final[dict[Stage, Call]] = {
    "at": Call("preempt/at", 1, "an answer to the notice"),
    "in": Call("preempt/in", 1, "should_preempt()"),
}
PATIENCE_S: Final = 5.0
"""Seconds that the agreement goes on without reaching the store."""
SIGN_OFF_S: Final = 5.0
"""Seconds in which a rank that closes reports it; LOST_S where the store seems to be gone."""
LOST_S: Final = 0.5
DESCRIBE_S: Final = 5.0
DESCRIBED: Final = 8
"""Ranks whose last calls an error describes."""
JOIN_S: Final = 2.0

Found = TypeVar("Found")

log = logging.getLogger("elaunch")

_ADVICE: Final[dict[Stage, str]] = {
    "at": "A rank that has ended or is stopped does not, nor one that holds Python's lock in C.",
    "in": "All ranks must call should_preempt() equally often: outside of any `if rank == 0`.",
}


class ReceivedNotice(NamedTuple):
    """A notice as one rank received it.

    ``calls`` are its own so far; ``agent_knows``: its agent has it; ``published``: the store has.
    """

    notice: Notice
    calls: int
    agent_knows: bool
    published: bool


class CallCount(NamedTuple):
    """How often one rank had called should_preempt(), and whether it will call it no more."""

    calls: int
    closed: bool
    grace: float | None = None


class Agreed(NamedTuple):
    """The call at which should_preempt() returns True on every rank, and why."""

    call: int
    notice: Notice


class Agreement:
    """The two threads of one rank, from :meth:`start` to :meth:`close`.

    ``on_notice`` is called with a notice that is in the store, ``notify_agent`` with one that the
    agent does not know of yet; both in these threads.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        on_notice: Callable[[Notice], None],
        notify_agent: Callable[[Notice], None],
    ) -> None:
        self.agreed: Agreed | None = None
        self.failure: CollectiveError | None = None
        self._distributed = distributed
        self._size = distributed.size
        self._on_notice = on_notice
        self._notify_agent = notify_agent
        self._received: ReceivedNotice | None = None
        self._inbox: queue.SimpleQueue[ReceivedNotice | None] = queue.SimpleQueue()
        self._decided = threading.Event()
        self._arriving = threading.Event()
        self._met = threading.Event()
        self._closing = self._all_came = False
        self._lock = threading.Lock()
        self._count: CallCount | None = None
        self._until: float | None = None
        self._announcing = SteadyConnection(distributed.round_store, PATIENCE_S)
        self._watching = SteadyConnection(distributed.round_store, math.inf)
        self._announcer = _thread(self._announce, "elaunch-preempt")
        self._watcher = _thread(self._watch, "elaunch-preempt-watch")

    def start(self) -> None:
        """Start the threads."""
        self._announcer.start()
        if self._size > 1:
            self._watcher.start()

    def receive(self, received: ReceivedNotice) -> None:
        """Take a notice; the first one counts. Blocks on nothing: for signal handlers too."""
        if received.notice.grace is not None:
            self._until = time.monotonic() + received.notice.grace
        if self._received is None:
            self._received = received
        self._inbox.put(received)

    def _left(self) -> float | None:
        """Return what is left of the grace that this rank has received, if it is stated."""
        until = self._until
        return None if until is None else round(max(0.0, until - time.monotonic()), 1)

    def decide(self, until: float) -> bool:
        """Wait until the ranks know the call, or cannot agree; False: not until ``until``."""
        return self._decided.wait(max(0.0, until - time.monotonic()))

    def meet(self, until: float) -> bool:
        """Come to the call and wait until all ranks have, or the store is lost; as `decide`."""
        self._arriving.set()
        return self._met.wait(max(0.0, until - time.monotonic()))

    def late(self, stage: Stage, call: int, timeout: float) -> CollectiveError:
        """Return the error for a stage that lasts ``timeout`` s: it names the ranks that lack."""
        connection = SteadyConnection(self._distributed.round_store, patience=0.0)
        try:
            board = PreemptBoard(connection, self._distributed)
            missing, counts = board.absent(stage), board.counts()
        except CollectiveError as error:
            return CollectiveTimeout(
                f"should_preempt(#{call}): no agreement for {timeout:g} s, and who is missing "
                f"cannot be told: {error}"
            )
        finally:
            connection.close()
        if not missing:
            return CollectiveTimeout(
                f"should_preempt(#{call}): all ranks came, but later than within {timeout:g} s"
            )
        named = missing[:DESCRIBED]
        did = self._distributed.describe(named, time.monotonic() + DESCRIBE_S)
        more = f"; and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        return CollectiveTimeout(
            f"{_blame(stage, call, missing)} for {timeout:g} s; last call by them: "
            f"{'; '.join(did)}{more}{_counts(named, counts)}. {_ADVICE[stage]}",
            tuple(missing),
        )

    def close(self, calls: int) -> None:
        """Count as having come to every call from now on, and end the threads.

        ``calls``: how often the script has called should_preempt(). Blocks for as long as the store
        takes to answer, for some seconds at the most.
        """
        self._closing = True
        self._inbox.put(None)
        self._arriving.set()
        # A store that is lost ended with its host, most likely: no rank is left to notify.
        self._announcer.join(LOST_S if self._announcing.lost else SIGN_OFF_S)
        self._announcing.cut()
        lost, connected = self._watching.lost, self._watching.connected
        self._watching.cut()
        if connected:  # else it tries to connect: it ends by itself when it knows
            self._watcher.join(JOIN_S)
        if self._size > 1 and not self._all_came:
            self._sign_off(calls, LOST_S if lost else SIGN_OFF_S)
        self._decided.set()
        self._met.set()

    def abandon(self) -> None:
        """End the threads: the ranks agree anew, in another round. Blocks on nothing."""
        self._closing = True
        self._inbox.put(None)
        self._announcing.cut()
        self._watching.cut()
        self._arriving.set()
        self._decided.set()
        self._met.set()

    def _announce(self) -> None:
        """Pass on the first notice."""
        received = self._inbox.get()
        if received is None:
            return
        if not received.agent_knows:
            self._notify_agent(received.notice)
        if self._size == 1:
            self.agreed = Agreed(received.calls + 1, received.notice)
            self._decided.set()
            self._met.set()
        elif not received.published:
            try:
                notice = received.notice
                aged = notice if notice.grace is None else notice._replace(grace=self._left())
                PreemptBoard(self._announcing, self._distributed).announce(aged)
            except CollectiveError as error:
                self._fail(error)
            finally:
                self._announcing.close()

    def _watch(self) -> None:
        board = PreemptBoard(self._watching, self._distributed)
        try:
            self._watching.await_key(NOTICE.key("done"), math.inf)
            notice = board.notice()
            self._on_notice(notice)
            if notice.grace is not None:
                # This node's agent may have read of it in the plan, which has no deadline.
                self._notify_agent(notice)
            self._watching.patience = PATIENCE_S
            if self._received is not None:  # it is not closed meanwhile
                self._come_to_call(self._received, board)
        except CollectiveError as error:
            self._fail(error)
        finally:
            self._watching.close()

    def _come_to_call(self, received: ReceivedNotice, board: PreemptBoard) -> None:
        board.stand(self._first_count(CallCount(received.calls, closed=False, grace=self._left())))
        board.complete("at", math.inf)
        self.agreed = board.agreed()
        self._decided.set()
        if self.agreed.notice.grace is not None:
            # Another rank may have known it, and not the one whose notice came first.
            self._notify_agent(self.agreed.notice)
        self._arriving.wait()
        if self._closing:
            return
        if not board.arrive():
            board.complete("in", math.inf)
        self._all_came = True
        self._met.set()

    def _fail(self, error: CollectiveError) -> None:
        log.debug("this rank agrees on nothing any more: %s", error)
        self.failure = error
        self._decided.set()
        self._met.set()

    def _first_count(self, count: CallCount) -> CallCount:
        """Return the count that this rank publishes, the same from either thread: the first one."""
        with self._lock:
            if self._count is None:
                self._count = count
            return self._count

    def _sign_off(self, calls: int, seconds: float) -> None:
        connection = SteadyConnection(self._distributed.round_store, 0.0, seconds)
        try:
            board = PreemptBoard(connection, self._distributed)
            board.stand(self._first_count(CallCount(calls, closed=True)))
            board.arrive()
            if self._distributed.placement.hosts_store and self._received is not None:
                board.complete("in", time.monotonic() + seconds)
        except CollectiveError as error:
            log.debug("this rank could not report its end to the others: %s", error)
        finally:
            connection.close()


class PreemptBoard:
    """The calls above, as one rank takes part in them over its connection.

    Every method raises CollectiveError when the store cannot be reached.
    """

    def __init__(self, connection: SteadyConnection, distributed: DistributedContext) -> None:
        self._connection = connection
        self._distributed = distributed

    def announce(self, notice: Notice) -> None:
        """Publish ``notice`` to every rank, if there is none yet."""
        self._run(lambda calls: calls.decide(NOTICE, notice_to_json(notice)))

    def notice(self) -> Notice:
        """Return the notice that there is."""
        return _notice(self._run(lambda calls: calls.decided(NOTICE)))

    def stand(self, count: CallCount) -> None:
        """Publish how often this rank had called; the last rank to do so publishes the call."""
        gift = Gift(given=json.dumps(count._asdict()).encode())

        def arrive(calls: StoreCalls) -> bool:
            def compose(given: dict[int, Value]) -> dict[str, Any]:
                return _agreed_on(map(_count, given.values()), _notice(calls.decided(NOTICE)))

            return calls.arrive(STAGES["at"], self._distributed.size, gift, compose)

        self._run(arrive)

    def arrive(self) -> bool:
        """Publish that this rank has come to the call, or never will; return whether all have."""
        size = self._distributed.size
        return self._run(lambda calls: calls.arrive(STAGES["in"], size, Gift(given=b"")))

    def complete(self, stage: Stage, until: float) -> bool:
        """Wait until all ranks have come to ``stage``, at the longest until ``until``."""
        return self._connection.await_key(STAGES[stage].key("done"), until)

    def agreed(self) -> Agreed:
        """Return what was agreed on; for when stage "at" is complete."""
        fields = self._run(lambda calls: calls.decided(STAGES["at"]))
        return Agreed(_whole(fields.get("call")), _notice(fields))

    def counts(self) -> list[CallCount | None]:
        """Return by rank what it published; None for those that published nothing."""
        given = self._run(lambda calls: calls.given(STAGES["at"]))
        ranks = range(self._distributed.size)
        return [_count(given[rank]) if rank in given else None for rank in ranks]

    def absent(self, stage: Stage) -> list[int]:
        """Return the ranks that have not come to ``stage``."""
        came = self._run(lambda calls: calls.given(STAGES[stage]))
        return [rank for rank in range(self._distributed.size) if rank not in came]

    def _run(self, work: Callable[[StoreCalls], Found]) -> Found:
        def exchange(connection: StoreConnection, until: float) -> Found:
            return work(self._distributed.over(connection, until - time.monotonic()))

        try:
            return self._connection.run(exchange)
        except Failed as failed:  # by what no rank wrote
            raise PeerLost(str(failed)) from None


def _agreed_on(counts: Iterable[CallCount], notice: Notice) -> dict[str, Any]:
    """Return the call, and the notice with the least grace."""
    found = list(counts)
    graces = [notice.grace, *(count.grace for count in found)]
    least = min((one for one in graces if one is not None), default=None)
    call = 1 + max(count.calls for count in found)
    return {"call": call, **notice_to_json(notice._replace(grace=least))}


def _thread(run: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def _blame(stage: Stage, call: int, missing: list[int]) -> str:
    have = "has" if len(missing) == 1 else "have"
    if stage == "at":
        return (
            f"should_preempt(#{call}): {text.ranks(missing)} {have} not answered the notice to end"
        )
    return f"{text.ranks(missing)} {have} not called should_preempt(#{call})"


def _counts(missing: list[int], counts: list[CallCount | None]) -> str:
    known = [(rank, counts[rank]) for rank in missing]
    texts = [f"rank {rank} was at #{c.calls}" for rank, c in known if c is not None]
    return f"; when the notice came, {text.listed(texts)}" if texts else ""


def _notice(fields: dict[str, Any]) -> Notice:
    kind = fields.get("kind")
    reason, grace = str(fields.get("reason", "")), seconds_of(fields.get("grace"))
    return Notice(reason, kind if kind in KINDS else "stop", grace)


def _count(value: Value) -> CallCount:
    try:
        fields = json.loads(value.content)
    except (ValueError, RecursionError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    closed, grace = fields.get("closed") is True, seconds_of(fields.get("grace"))
    return CallCount(_whole(fields.get("calls")), closed, grace)


def _whole(number: object) -> int:
    if type(number) is not int or number < 0:
        raise PeerLost(f"the round's store holds something that no rank wrote: {number!r}")
    return number
