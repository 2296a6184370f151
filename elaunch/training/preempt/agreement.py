"""One rank's part in agreeing on the call at which should_preempt() returns True on all ranks.

elaunch.training.preempt.preempt describes the steps; here are the two threads that take them. One
waits in the round's store for another rank's notice. The other waits for a notice from any source,
and then takes the steps one after the other; the script's thread only waits for what comes out.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from elaunch.errors import CollectiveError, CollectiveTimeout
from elaunch.training.distributed import DistributedContext
from elaunch.training.preempt.board import NOTICE, Agreed, CallCount, PreemptBoard, Stage, agree
from elaunch.training.stores.connection import SLICE_S, SteadyLine
from elaunch.wire.worker import Notice

PATIENCE_S: Final = 5.0
"""Seconds that the agreement goes on without reaching the store."""
SIGN_OFF_S: Final = 5.0
"""Seconds in which a rank that closes reports it; LOST_S where the store seems to be gone."""
LOST_S: Final = 0.5
DESCRIBE_S: Final = 5.0
DESCRIBED: Final = 8
"""Ranks whose last calls an error describes."""
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")

_ADVICE: Final[dict[Stage, str]] = {
    "at": "A rank that has ended or is stopped does not, nor one that holds Python's lock in C.",
    "in": "All ranks must call should_preempt() equally often: outside of any `if rank == 0`.",
}


@dataclass(frozen=True)
class Heard:
    """A notice as one rank received it: its own calls so far, and whether its agent knows of it."""

    notice: Notice
    calls: int
    agent_knows: bool


class Agreement:
    """The two threads of one rank, from :meth:`start` to :meth:`close`.

    ``on_notice`` is called with a notice of another rank, ``tell_agent`` with one that the agent
    does not know of yet; both in these threads.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        on_notice: Callable[[Notice], None],
        tell_agent: Callable[[Notice], None],
    ) -> None:
        self.agreed: Agreed | None = None
        self.failure: CollectiveError | None = None
        self._distributed = distributed
        self._on_notice = on_notice
        self._tell_agent = tell_agent
        self._inbox: queue.SimpleQueue[Heard | None] = queue.SimpleQueue()
        self._decided = threading.Event()
        self._arriving = threading.Event()
        self._met = threading.Event()
        self._hosts = distributed.placement.hosts_store and distributed.rank == 0
        # What one thread writes and the other reads:
        self._pending = self._waiting = self._closing = False
        self._calls = 0
        self._lock = threading.Lock()
        self._standing: CallCount | None = None
        self._settling = SteadyLine(distributed.round_store, PATIENCE_S)
        self._watching = SteadyLine(distributed.round_store, math.inf)
        self._settler = _thread(self._settle, "elaunch-preempt")
        self._watcher = _thread(self._watch, "elaunch-preempt-watch")

    def start(self) -> None:
        """Start the threads."""
        self._settler.start()
        if self._distributed.size > 1:
            self._watcher.start()

    def hear(self, heard: Heard) -> None:
        """Take a notice; the first one counts. Only enqueues: for signal handlers too."""
        self._inbox.put(heard)

    def decide(self, until: float) -> bool:
        """Wait until the ranks know the call, or cannot agree; False: not until ``until``."""
        return self._decided.wait(max(0.0, until - time.monotonic()))

    def meet(self, until: float) -> bool:
        """Come to the call and wait until all ranks have, or the store is lost; as `decide`."""
        self._arriving.set()
        return self._met.wait(max(0.0, until - time.monotonic()))

    def late(self, stage: Stage, call: int, timeout: float) -> CollectiveError:
        """Return the error that says who did not come to ``stage`` within ``timeout`` seconds."""
        line = SteadyLine(self._distributed.round_store, patience=0.0)
        try:
            board = self._board(line)
            missing, standings = board.absent(stage), board.standings()
        except CollectiveError as error:
            return CollectiveTimeout(
                f"should_preempt(#{call}): no agreement for {timeout:g} s, and who is missing "
                f"cannot be told: {error}"
            )
        finally:
            line.close()
        if not missing:
            return CollectiveTimeout(
                f"should_preempt(#{call}): all ranks came, but later than within {timeout:g} s"
            )
        told = missing[:DESCRIBED]
        did = self._distributed.describe(told, time.monotonic() + DESCRIBE_S)
        more = f"; and {len(missing) - len(told)} more" if len(missing) > len(told) else ""
        return CollectiveTimeout(
            f"{_blame(stage, call, missing)} for {timeout:g} s; last call by them: "
            f"{'; '.join(did)}{more}{_counts(told, standings)}. {_ADVICE[stage]}",
            tuple(missing),
        )

    def close(self, calls: int) -> None:
        """Count as having come to every call from now on, and end the threads.

        ``calls``: how often the script has called should_preempt(). Blocks for as long as the store
        takes to answer, for some seconds at the most.
        """
        self._calls = calls
        self._closing = True
        self._inbox.put(None)
        self._arriving.set()
        if self._waiting:
            self._sign_off_apart()
        else:
            # A store that is lost ended with its host, most likely: no rank is left to notify.
            self._settler.join(LOST_S if self._settling.lost else SIGN_OFF_S)
        for line, thread in ((self._settling, self._settler), (self._watching, self._watcher)):
            connected = line.connected
            line.cut()
            if connected:  # else it tries to connect: it ends by itself when it knows
                thread.join(JOIN_S)
        self._decided.set()
        self._met.set()

    def _board(self, line: SteadyLine) -> PreemptBoard:
        return PreemptBoard(line, self._distributed.rank, self._distributed.size)

    def _watch(self) -> None:
        try:
            board = self._board(self._watching)
            if self._watching.await_key(NOTICE, math.inf):
                self._on_notice(board.notice())
        except CollectiveError as error:
            log.debug("no notices are looked for in the round's store any more: %s", error)
        finally:
            self._watching.close()

    def _settle(self) -> None:
        heard = self._next()
        board = self._board(self._settling)
        try:
            if heard is not None:
                self._come_to_call(heard, board)
            elif self._distributed.size > 1:
                self._sign_off(board)
        except CollectiveError as error:
            self.failure = error
        finally:
            self._settling.close()
            self._decided.set()
            self._met.set()

    def _next(self) -> Heard | None:
        """Wait for a notice, or None for the end; the connection is ready all the while."""
        if self._distributed.size == 1:
            return self._inbox.get()
        board = self._board(self._settling)
        while True:
            try:
                board.keep_alive()
            except CollectiveError as error:
                log.debug("the round's store does not answer: %s", error)
            try:
                return self._inbox.get(timeout=SLICE_S)
            except queue.Empty:
                continue

    def _come_to_call(self, heard: Heard, board: PreemptBoard) -> None:
        if not heard.agent_knows:
            self._tell_agent(heard.notice)
        if self._distributed.size == 1:
            self.agreed = agree([CallCount(heard.calls, False)], heard.notice)
            return
        self._pending = True
        board.announce(heard.notice)
        board.stand(self._stand(CallCount(heard.calls, closed=False)))
        if self._all_have_come(board, "at"):
            self.agreed = board.agreed()
            self._decided.set()
            self._arriving.wait()
        if not self._closing:
            board.arrive()
        if self._closing or not self._all_have_come(board, "in"):
            self._sign_off(board)
            return
        self._met.set()
        board.leave()
        if self._hosts:
            board.complete("out", math.inf)

    def _all_have_come(self, board: PreemptBoard, stage: Stage) -> bool:
        """Wait for all ranks; False if this one closes: then others may wait for it."""
        self._waiting = True
        # close() writes _closing and then reads _waiting: one of the two sees the other's.
        if self._closing:
            return False
        board.complete(stage, math.inf)
        self._waiting = False
        return True

    def _stand(self, standing: CallCount) -> CallCount:
        """Return the count that this rank publishes, the same from either thread: the first one."""
        with self._lock:
            if self._standing is None:
                self._standing = standing
            return self._standing

    def _sign_off(self, board: PreemptBoard) -> None:
        board.stand(self._stand(CallCount(self._calls, closed=True)))
        board.arrive()
        board.leave()
        if self._hosts and self._pending:
            board.complete("out", time.monotonic() + SIGN_OFF_S)

    def _sign_off_apart(self) -> None:
        """Do it while the other thread waits for all ranks, this one included."""
        line = SteadyLine(self._distributed.round_store, 0.0, SIGN_OFF_S)
        try:
            self._sign_off(self._board(line))
        except CollectiveError as error:
            log.debug("the other ranks were not told that this one has ended: %s", error)
        finally:
            line.close()


def _thread(run: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def _blame(stage: Stage, call: int, missing: list[int]) -> str:
    if stage == "at":
        return f"should_preempt(#{call}): ranks {missing} have not answered the notice to end"
    return f"ranks {missing} have not called should_preempt(#{call})"


def _counts(missing: list[int], standings: list[CallCount | None]) -> str:
    known = [(rank, standings[rank]) for rank in missing]
    said = [f"rank {rank} was at #{s.calls}" for rank, s in known if s is not None]
    return f"; when the notice came, {', '.join(said)}" if said else ""
