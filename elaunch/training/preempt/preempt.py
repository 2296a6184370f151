"""Ending at the same step on all ranks: should_preempt() and how the ranks agree on the call.

While no notice is there, a call counts itself, looks at one attribute and is a heartbeat; there is
no network. The ranks agree without stopping any script (keys: elaunch.training.preempt.agreement):

1. A notice comes to some rank: from its agent, by a signal, by request(). It is put into the
   round's store, where a thread of every rank waits for it.
2. Every rank, when it receives it, first marks that one is pending and then reads how many calls
   its script has made, n. A call counts itself before it looks for the mark; so every call that
   did not see the mark, and so returned False, is among those n. Any later call waits for step 3.
3. When the numbers of all ranks are in the store, the call is K, one more than the greatest of
   them. All calls before K return False, on every rank.
4. Call K waits until all ranks have come to it, and returns True, as do all later ones.

Until step 4 only threads wait for threads, never for another rank's script; and in step 4 a rank
waits for others to make a call that it has made itself. So nothing can deadlock in a script whose
ranks make the same calls in the same order. A rank that has closed its context has come to every
call.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Final

from elaunch.errors import ContextError, PeerLost
from elaunch.training.agentlink import AgentLink
from elaunch.training.distributed import DistributedContext
from elaunch.training.preempt.agreement import Agreement, ReceivedNotice
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import Kind, Notice

log = logging.getLogger("elaunch")

BLAME_S: Final = 6.0
"""A wait ends so many seconds before the agent ends the ranks; half the grace, if that is less."""
LEAST_S: Final = 0.5
"""Seconds that a rank waits for the others at least, however late it comes."""

_NOT_ASKED: Final = Notice("nothing yet: the script has not asked", "stop")
_CLOSED: Final = Notice("nothing any more: the context is closed", "stop")


class PreemptContext:
    """Tells the script that the job is to end, on all ranks at the same call.

    ``ctx.preempt`` of :func:`elaunch.init`.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        page: ProgressPage,
        link: AgentLink | None,
    ) -> None:
        self._distributed = distributed
        self._page = page
        self._beat = page.beat
        self._link = link
        self._agreement = Agreement(distributed, self._foreign, self._notify_agent)
        self._calls = 0
        # What should_preempt() looks at: None while nothing is pending. See the module's text for
        # the order in which it and _calls are written and read.
        self._pending: Notice | None = _NOT_ASKED
        self._notice: Notice | None = None
        self._asked = False
        self._returned_true = False
        self._closed = False
        self._pid = 0
        self._give_up_at: float | None = None
        self._ended_at: float | None = None
        self._signals: dict[int, tuple[Any, Any]] = {}

    def start(self) -> None:
        """Begin to listen for notices; returns at once."""
        self._pid = os.getpid()
        self._agreement.start()

    def move(self, calls: int) -> None:
        """Agree with other ranks from now on, each of which has asked ``calls`` times so far.

        The context calls it, when these ranks have met. A notice goes on with this rank.
        """
        self._agreement.abandon()
        self._calls = calls
        self._pending, self._asked = _NOT_ASKED, False
        self._agreement = Agreement(self._distributed, self._foreign, self._notify_agent)
        self.start()
        if (notice := self._notice) is not None:
            self._agreement.receive(ReceivedNotice(notice, calls, True, False))

    @property
    def reason(self) -> str:
        """Why the job is to end; empty while nobody wants it to."""
        agreed = self._agreement.agreed
        notice = agreed.notice if agreed else self._notice
        return notice.reason if notice else ""

    @property
    def kind(self) -> Kind:
        """``stop``: the job ends and can be resumed; ``resize``: it goes on in another round."""
        agreed = self._agreement.agreed
        notice = agreed.notice if agreed else self._notice
        return notice.kind if notice else "stop"

    @property
    def deadline(self) -> float | None:
        """Seconds that are left to save and to end in; None without a request to end, or a limit.

        They are what the platform leaves if that is known (the end of Slurm's job, a notice with a
        time), else those of ``--shutdown-timeout``. The agent ends the ranks after that: what takes
        longer to save is lost. Any rank may ask, alone; it blocks on nothing. Each rank counts by
        its own clock, so one rank has to decide what all are to do.
        """
        until = self._ended_at
        return None if until is None else max(0.0, until - time.monotonic())

    def should_preempt(self, timeout: float | None = None) -> bool:
        """Return whether the script should save and end now: True on all ranks at the same call.

        All ranks must call it, equally often: in the loop and outside of any ``if rank == 0``.
        It may be asked in every step: while nothing is pending it costs less than a microsecond
        and no network. It blocks only once something is: until the ranks agree on the call, which
        takes milliseconds, and in that call until all ranks have come to it. After the first True
        it is always True, and exit code 0 means "preempted, to be continued".

        Args:
            timeout: seconds that it may wait for the other ranks; None: those of elaunch.init(). It
                waits no longer than a few seconds less than the agent's grace, so that the error
                comes before the agent ends the ranks.

        Raises:
            CollectiveTimeout: not all ranks came to the call in time; names them and what they
                did last.
            PeerLost: the ranks cannot agree, because the round's store is lost.
            ContextError: the context is closed.
        """
        self._calls += 1
        if self._pending is None:
            self._beat()
            return False
        seconds = self._distributed.timeout if timeout is None else timeout
        return self._ask(self._calls, seconds)

    def request(self, reason: str) -> None:
        """Ask the whole job to end, as ``elaunch preempt`` does.

        Any rank may call it, from any thread and from a signal's handler; it does not block: a
        thread sends the request. should_preempt() is True soon after, on all ranks.
        """
        self._take(Notice(reason, "stop"), agent_knows=False)

    def on_notice(
        self, reason: str, kind: Kind, grace: float | None = None, stated: bool = False
    ) -> None:
        """Take a notice of this node's agent; AgentLink calls it.

        ``grace``: seconds after which the agent ends this rank; ``stated``: these are the
        platform's, and hold on all nodes.
        """
        if grace is not None:
            self._ended_at = time.monotonic() + grace
            self._give_up_at = self._ended_at - min(BLAME_S, grace / 2)
        self._take(Notice(reason, kind, grace if stated else None), agent_knows=True)

    def on_signal(self, signum: int) -> None:
        """Ask the whole job to end when this process gets the signal ``signum``.

        The handler only enqueues. After close() the handler before it is back in place.

        Raises:
            ContextError: this is not the main thread, or the signal cannot be handled.
        """
        try:
            name = signal.Signals(signum).name
        except ValueError:
            name = f"signal {signum}"
        reason = f"{name} to rank {self._distributed.rank}"

        def handler(_signum: int, _frame: FrameType | None) -> None:
            self.request(reason)

        try:
            before = signal.signal(signum, handler)
        except (ValueError, OSError) as error:
            raise ContextError(f"cannot take {name} for a notice to end: {error}") from error
        self._signals[signum] = (handler, before)

    def close(self) -> None:
        """Stop listening; this rank then counts as having come to every call.

        Every rank calls it when it is done, without the others. It blocks for as long as the store
        takes to answer, for some seconds at the most.
        """
        if self._closed:
            return
        self._closed = True
        self._pending = _CLOSED
        if os.getpid() == self._pid:  # neither never started nor forked
            self._restore_signals()
            self._agreement.close(self._calls)

    # In the script's thread:

    def _ask(self, call: int, timeout: float) -> bool:
        self._refuse_if_closed()
        self._beat()
        if os.getpid() != self._pid:
            return False  # a fork of the rank's process: it receives no notice
        if not self._asked and not self._is_pending_at_first():
            return False
        if not self._returned_true:
            self._returned_true = self._settle(call, timeout)
            if self._returned_true and self._link is not None:
                self._link.ack(self.reason, self.kind)
        return self._returned_true

    def _is_pending_at_first(self) -> bool:
        self._asked = True
        if self._link is not None:
            from elaunch.training.preempt import shield  # most scripts do without

            handler = shield.begin()
            if handler is not None:
                self._signals[signal.SIGTERM] = (handler, signal.SIG_DFL)
            self._link.report_listening(shielded=handler is not None)
        # A notice may come between any two of these lines; _take() writes _notice first.
        self._pending = None
        notice = self._notice
        if notice is not None:
            self._pending = notice
        return notice is not None

    def _settle(self, call: int, timeout: float) -> bool:
        self._page.note(f"should_preempt #{call}")
        now = time.monotonic()
        if self._give_up_at is not None:
            timeout = min(timeout, max(LEAST_S, self._give_up_at - now))
        until = now + timeout
        agreement = self._agreement
        if not agreement.decide(until):
            raise agreement.late("at", call, timeout)
        self._refuse_if_closed()
        if agreement.agreed is not None and call < agreement.agreed.call:
            return False
        if not agreement.meet(until):
            raise agreement.late("in", call, timeout)
        self._refuse_if_closed()
        if agreement.failure is not None:
            raise PeerLost(
                f"should_preempt(#{call}): the ranks cannot agree on when to end "
                f"({self.reason}): {agreement.failure}"
            ) from agreement.failure
        log.info("should_preempt(#%d) is True: %s", call, self.reason)
        return True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ContextError("should_preempt() is asked, but its context is closed")

    # In any thread:

    def _take(self, notice: Notice, *, agent_knows: bool, published: bool = False) -> None:
        if self._closed:
            return
        if self._notice is None:
            self._notice = notice
        self._pending = self._notice
        self._agreement.receive(ReceivedNotice(notice, self._calls, agent_knows, published))

    def _foreign(self, notice: Notice) -> None:
        self._take(notice, agent_knows=False, published=True)

    def _notify_agent(self, notice: Notice) -> None:
        if notice.grace is not None and self._ended_at is None:
            # A node that leaves is none that this node's agent limits its own workers for.
            self._ended_at = time.monotonic() + notice.grace
        if self._link is not None:
            self._link.report_notice(notice)

    def _restore_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; the handler does nothing any more
        ends = self._link is not None and self._notice is not None
        for signum, (handler, before) in self._signals.items():
            if ends and signum == signal.SIGTERM:
                continue  # it ends as asked: the SIGTERM to every process may still be on its way
            if signal.getsignal(signum) is handler and before is not None:
                signal.signal(signum, before)
        self._signals.clear()
