"""Collectives of objects between the ranks of a job: allgather, gather, broadcast, barrier.

The names are Determined's. Objects are whatever pickle takes. Those of ranks that are known to be
of this job are unpickled; of others only what is harmless (elaunch.training.ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from elaunch.errors import CollectiveError, ContextError, PlacementError
from elaunch.training import launch as placements
from elaunch.training.gone import Renamed
from elaunch.training.launch import Placement
from elaunch.training.stores.keystore import KeyStore
from elaunch.training.stores.roundstore import RoundStore, StoreConnection
from elaunch.wire.progress import ProgressPage

if TYPE_CHECKING:
    from elaunch.training.agreement import StoreCalls
    from elaunch.training.ranks import RankCalls

INIT: Final = "elaunch.init()"
"""Names the calls that it makes."""
TIMEOUT_S: Final = 600.0
"""Seconds that a call waits for the other ranks where no other number is given."""
_NUMBERS: Final = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_open: Final[WeakSet[DistributedContext]] = WeakSet()


class DistributedContext(Renamed):
    """This rank among the ranks of its job.

    Given the six numbers, or none of them for a job of one rank. Nothing is opened before
    ``elaunch.init(distributed=…)`` or the first call, which all ranks then make together.

    ``store`` holds small values that any rank sets and gets by name (:class:`KeyStore`).

    Every call but those that end in ``_local`` is made by ALL ranks of the job, in the same order;
    those by all ranks of the node. It blocks until all of them have made it, at most ``timeout``
    seconds (None: 600). One thread of each rank makes them.

    An object is anything that pickle takes, up to 8 MB: torch.distributed is for what is larger.
    Where the ranks are on several nodes and share no key (``--rdzv-secret-file``, or
    ELAUNCH_CHANNEL_KEY under other launchers), anybody who reaches the round's store could be among
    them: plain values, arrays and tensors are then received, and objects of classes that the
    receiver's own object is made of, or that were named to
    ``torch.serialization.add_safe_globals``. A rank's own object comes back as it is.

    Calls raise CollectiveTimeout that names the ranks that have not come, their hosts and what they
    did last; PeerLost when a rank has ended; CollectiveError when ranks call different things, and
    when an object cannot be pickled or unpickled; ContextError when one is too large. After the
    first three the ranks are connected no more: every later call raises the same.

    Args:
        rank: 0 to ``size - 1``.
        size: ranks of the job.
        local_rank: 0 to ``local_size - 1``, among the ranks of this node.
        local_size: ranks of each node; a sequence of one number for each node where they differ.
        cross_rank: 0 to ``cross_size - 1``, this node among the nodes.
        cross_size: nodes of the job.
        chief_ip: address of rank 0's node; needed where there are several nodes.
        chief_port: port there at which the ranks meet. Without it: that of the launcher, where
            there is one; on one node a port made of the process that has started all ranks.

    Raises PlacementError that names an impossible number.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        local_size: int | Sequence[int] | None = None,
        cross_rank: int | None = None,
        cross_size: int | None = None,
        chief_ip: str | None = None,
        chief_port: int | None = None,
    ) -> None:
        given = dict(
            zip(
                _NUMBERS,
                (rank, size, local_rank, local_size, cross_rank, cross_size),
                strict=True,
            )
        )
        numbers = {name: number for name, number in given.items() if number is not None}
        if not numbers:
            self._take(placements.alone(os.environ))
            return
        if missing := [name for name in _NUMBERS if name not in numbers]:
            raise PlacementError(
                f"{', '.join(missing)}: give all six numbers, or none for one rank"
            )
        self._take(placements.explicit(numbers, chief_ip, chief_port, os.environ))

    @classmethod
    def from_torch_distributed(cls) -> DistributedContext:
        """Return the context of a worker of torchrun or ``elaunch run``.

        Any rank may call it alone; it does not block.

        Raises PlacementError that names a variable that is missing or wrong.
        """
        return cls.of(placements.from_torch(os.environ))

    @classmethod
    def of(cls, placement: Placement) -> DistributedContext:
        """Return the context of a placement."""
        made = cls.__new__(cls)
        made._take(placement)
        return made

    def _take(self, placement: Placement) -> None:
        self.placement = placement
        self.rank, self.size = placement.rank, placement.size
        self.local_rank, self.local_size = placement.local_rank, placement.local_size
        self.cross_rank, self.cross_size = placement.cross_rank, placement.cross_size
        self.round_store = RoundStore(placement)
        self.timeout = TIMEOUT_S
        self._node_addrs: tuple[str, ...] | None = None
        self._calls: RankCalls | None = None
        self._page: ProgressPage | None = None
        self._own_page: ProgressPage | None = None
        self._alone = 0
        self._purpose = ""
        self.store = KeyStore(self, self.round_store)
        self._opening = threading.Lock()
        self._opened = self._closed = False

    def open(self, page: ProgressPage | None = None, timeout: float | None = None) -> None:
        """Meet the other ranks; ALL ranks call it together, or none does: the first call does it.

        Blocks until all have come, at most ``timeout`` seconds. Raises CollectiveTimeout that names
        the missing ranks, PeerLost, and PlacementError if the ranks contradict each other.

        Args:
            page: where each call is noted; by default a new one.
            timeout: seconds; also for later calls that give none.
        """
        with self._opening:
            if self._closed:
                raise ContextError("this DistributedContext is closed; make a new one")
            if self._opened:
                return
            self.timeout = self.timeout if timeout is None else checked_timeout(timeout)
            self._page = page
            if self.size > 1:
                self._open(page or self._make_page())
            self._opened = True

    def stand_by(self) -> None:
        """Refuse calls until :meth:`move`: the others are in their loop, and make none with it."""
        self.round_store.close(
            "this rank has taken the place of one that has died, and meets the others in "
            "ctx.train.steps(): nothing that needs all ranks can be called before"
        )

    def move(self, placement: Placement) -> None:
        """Stand among other ranks, or in another round, from the next :meth:`open` on.

        The others learn nothing by that. Objects that were made of this one go on with it.
        """
        self.round_store.close()
        _open.discard(self)
        if self._calls is not None:
            self._calls.abandon()
        self.store.close()
        timeout = self.timeout
        self._take(placement)
        self.timeout = timeout

    @property
    def made(self) -> int:
        """How often this rank has called other ranks, or used :attr:`store`, since they met."""
        return self.store.uses + (0 if self._calls is None else self._calls.made)

    @property
    def node_addrs(self) -> tuple[str, ...]:
        """Addresses of all nodes, in the order of their node ranks, once the ranks have met.

        Any rank may ask; the first time the round's store is read. Raises CollectiveError where it
        does not answer.
        """
        if self._calls is None or self.cross_size == 1:
            return (self.placement.addr or "127.0.0.1",)
        if self._node_addrs is None:
            self._node_addrs = self._calls.node_addrs()
        return self._node_addrs

    def allgather(self, obj: Any, timeout: float | None = None) -> list[Any]:
        """Return every rank's ``obj``, in the order of the ranks. ALL ranks call it together."""
        return self._call("all", "allgather", obj, timeout) or [obj]

    def gather(self, obj: Any, timeout: float | None = None) -> list[Any] | None:
        """Return every rank's ``obj`` on rank 0, None elsewhere. ALL ranks call it together."""
        found = self._call("all", "gather", obj, timeout)
        return found if self.size > 1 else [obj]

    def broadcast(self, obj: Any = None, timeout: float | None = None) -> Any:
        """Return rank 0's ``obj``; what others give is ignored. ALL ranks call it together."""
        return (self._call("all", "broadcast", obj, timeout) or [obj])[0]

    def barrier(self, timeout: float | None = None) -> None:
        """Return when ALL ranks have called it."""
        self._call("all", "barrier", None, timeout)

    def allgather_local(self, obj: Any, timeout: float | None = None) -> list[Any]:
        """Return ``obj`` of every rank of this node. ALL ranks of the node call it together."""
        return self._call("local", "allgather_local", obj, timeout) or [obj]

    def gather_local(self, obj: Any, timeout: float | None = None) -> list[Any] | None:
        """Return every ``obj`` on local rank 0, None elsewhere. ALL ranks of the node call it."""
        found = self._call("local", "gather_local", obj, timeout)
        return found if self.local_size > 1 else [obj]

    def broadcast_local(self, obj: Any = None, timeout: float | None = None) -> Any:
        """Return local rank 0's ``obj``. ALL ranks of the node call it together."""
        return (self._call("local", "broadcast_local", obj, timeout) or [obj])[0]

    def barrier_local(self, timeout: float | None = None) -> None:
        """Return when ALL ranks of this node have called it."""
        self._call("local", "barrier_local", None, timeout)

    @contextlib.contextmanager
    def in_turn(self, timeout: float | None = None) -> Iterator[None]:
        """Have the ranks do the block of ``with …in_turn():`` one after the other, rank 0 first.

        ALL ranks enter it together. Blocks until this rank's turn has come, and behind the block
        until the last rank is through with it; each turn takes at most ``timeout`` seconds. An
        exception in a block ends the turns: that rank gets its own, the others a CollectiveError
        that names the rank.
        """
        for turn in range(self.size):
            if turn == self.rank:
                try:
                    yield
                except Exception as error:
                    self._fail_turn(turn, error, timeout)
                    raise
            self._end_turn(turn, "", timeout)

    def _fail_turn(self, turn: int, error: Exception, timeout: float | None) -> None:
        with contextlib.suppress(CollectiveError, ContextError):  # this rank ends with ``error``
            self._end_turn(turn, f"{type(error).__name__}: {error}".rstrip(": "), timeout)

    def _end_turn(self, turn: int, problem: str, timeout: float | None) -> None:
        problems = self._call("all", "in_turn", problem, timeout) or [problem]
        if problems[turn] and turn != self.rank:
            raise CollectiveError(f"in_turn: rank {turn} failed in its turn: {problems[turn]}")

    def seconds(self, timeout: float | None) -> float:
        """Return the seconds that a call with this ``timeout`` may take; ContextError for none."""
        return self.timeout if timeout is None else checked_timeout(timeout)

    def note(self, doing: str) -> None:
        """Write what this rank does to its progress page, as its calls do."""
        page = self._page or self._own_page
        if page is not None:
            page.note(doing)

    def describe(self, ranks: Sequence[int], until: float) -> list[str]:
        """Return what each of ``ranks`` does and did last, in words, for an error about them.

        Any rank may call it alone, from any thread. Blocks until ``until`` on the monotonic clock
        at the longest: ranks answer at once, whatever their script is in, unless they are gone.
        """
        if self._calls is None:
            return [f"rank {rank}: not met yet" for rank in ranks]
        return self._calls.describe(ranks, until)

    def over(self, connection: StoreConnection, seconds: float) -> StoreCalls:
        """Return what a thread of elaunch's takes part in calls with, over its own connection."""
        assert self._calls is not None
        return self._calls.over(connection, seconds)

    def close(self) -> None:
        """End this rank's connections; each rank may by itself, also twice; it does not block."""
        self._closed = True
        _open.discard(self)
        if self._calls is not None:
            self._calls.close()
        self.round_store.close()
        self.store.close()
        if self._own_page is not None:
            self._own_page.close()

    def _make_page(self) -> ProgressPage:
        self._own_page = ProgressPage()
        return self._own_page

    def _open(self, page: ProgressPage) -> None:
        _at_exit()
        from elaunch.training.ranks import RankCalls  # one rank alone does without

        calls = RankCalls(self.placement, self.round_store, page)
        try:
            calls.open(time.monotonic() + self.timeout)
        except BaseException:
            self.close()
            raise
        self._calls = calls
        _open.add(self)

    def _call(self, scope: str, name: str, obj: Any, timeout: float | None) -> list[Any] | None:
        seconds = self.seconds(timeout)
        calls = self._joined(scope)
        if calls is None:
            self._alone += 1
            self.note(f"{name} #{self._alone}")
            return None
        return calls.call(scope, name, obj, seconds, self._purpose)

    def _joined(self, scope: str) -> RankCalls | None:
        """Return what makes calls of a scope, once the ranks have met; None for one rank alone."""
        if not self._opened or self._closed:
            self.open()
        return None if scope == "local" and self.local_size == 1 else self._calls


def for_purpose(distributed: DistributedContext, purpose: str) -> DistributedContext:
    """Return these ranks, with ``purpose`` in the name of each call made through what is returned.

    Calls for different purposes are different calls: ranks that meet in them get an error.
    """
    distributed.open()  # what is returned has what this has by now
    found = copy.copy(distributed)
    found._purpose = purpose
    return found


def deliver(
    distributed: DistributedContext, content: bytes | None, takes: bool, timeout: float | None
) -> bytes | None:
    """Bring what one rank gives to the ranks that take it; ALL ranks call it together.

    Args:
        distributed: the ranks.
        content: what this rank gives; None on all ranks but one at most.
        takes: whether this rank, which gives nothing, is to receive it.
        timeout: seconds to wait for the others; None: the context's.

    Returns None where nothing was given or nothing is taken. Raises what every call raises.
    """
    found = distributed._call("all", "deliver", (content, takes), timeout)
    return found[0] if found else None


def agree_on(
    distributed: DistributedContext,
    payload: Any,
    problem: dict[str, Any] | None,
    remark: str,
    timeout: float | None,
    *,
    everyone: bool,
    purpose: str,
) -> tuple[list[Any], dict[int, dict[str, Any]]]:
    """Return rank 0's payload, or ``everyone``'s, and by rank what problems there are.

    ALL ranks call it together; see RankCalls.agree.
    """
    seconds = distributed.seconds(timeout)
    calls = distributed._joined("all")
    if calls is None:
        return [payload], {} if problem is None else {0: problem}
    return calls.agree(payload, problem, remark, seconds, everyone=everyone, purpose=purpose)


def checked_timeout(timeout: float) -> float:
    """Return the seconds that a script gave; raise ContextError for what are none."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ContextError(f"timeout is {timeout!r}; give seconds")
    if math.isnan(timeout) or timeout <= 0:
        raise ContextError(f"timeout is {timeout}; give seconds, more than 0")
    return min(float(timeout), 1e9)


_watching_exit: Final = threading.Event()


def _at_exit() -> None:
    """Have contexts closed at exit, so that the other ranks learn that this process ends."""
    if not _watching_exit.is_set():
        _watching_exit.set()
        atexit.register(_close_all)


def leave_to_the_end(context: DistributedContext) -> None:
    """Have the others learn nothing of this rank's end before its process ends.

    Nor then, where the launcher ends them for it.
    """
    if context.placement.launcher not in ("slurm", "explicit"):
        _open.discard(context)


def _close_all() -> None:
    for context in list(_open):
        context.close()
