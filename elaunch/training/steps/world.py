"""The ranks that compute a training: all of the job, or those that are left until others are back.

Where a rank dies while all are in a loop over steps, the others keep their processes:

==============  ==================================================================================
who             does
==============  ==================================================================================
the agent       begins another round, starts a new process for each rank that has died, and sends
                the others ``enter`` (elaunch.wire.worker)
a link's thread answers, and cuts the connections to other ranks: whatever this rank waits for
                ends with PeerLost (:meth:`StepsWorld.cut`)
a survivor      moves all parts of its context to the new round, and tells the others which step
                it wants (:meth:`StepsWorld.reform`)
a newcomer      writes ``here/<rank>`` into the round's store when its loop begins, and waits there
                for ``in/<rank>`` (:meth:`StepsWorld.join`)
rank 0          looks for newcomers while a step is summed up; its sums say who is there
all             after that step, meet in a larger world; the lowest that was there before sends
                the newcomers the state (:meth:`StepsWorld.admit`)
==============  ==================================================================================

Each world numbers its ranks anew: ``present[i]`` is rank i. So all other parts, such as saves, have
to do with a whole world at any time.

A rank may be a step ahead: it has the sums of step N, and another was cut off before it had them.
Those behind compute all of step N among themselves, since its sums do not depend on how many do.
"""

from __future__ import annotations

import json
import logging
import os
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from elaunch import env, text
from elaunch.errors import CollectiveError, ContextError, PeerLost
from elaunch.training.agentlink import AgentLink
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import Placement, current
from elaunch.training.stores.roundstore import ANSWER_S, RoundStore, StoreConnection

if TYPE_CHECKING:
    from elaunch.training.steps.group import Group, Sockets

ENTRY_S: Final = 60.0
"""Seconds for the agents to begin another round after a rank was lost: the machine may be busy."""
MOMENT_S: Final = 1.0
"""Seconds of a wait at a loop's end from one answer to whether to end to the next."""

log = logging.getLogger("elaunch")


class Standing(NamedTuple):
    """A message of a rank that is left to the others: where it stands.

    Attributes:
        next: the number of the step that it wants the sums of.
        saved: the newest step of which it knows that it was saved.
        schedule: when it would save next, as ``ctx.checkpoint`` knows it; None: it saves nothing.
    """

    next: int
    saved: int | None = None
    schedule: tuple[Any, ...] | None = None


class StepsWorld:
    """This rank among those that compute.

    Attributes:
        ranks: those that are present.
        group: those that compute the step under way; None for one alone.
        joins: this process takes the place of a rank that has died, and was not admitted yet.
        present: the numbers in the job of those that are present, in order.
        slots: how many ranks each node of the job has.
        loop: the number of the loop that they are in, for newcomers.
        newcomers: the ranks that come back, and are to be admitted after the step under way; none
            where a rank was lost since they were seen: not all may know of them.
    """

    def __init__(
        self,
        ranks: DistributedContext,
        link: AgentLink | None,
        move: Callable[[Placement, int], None],
    ) -> None:
        place = ranks.placement
        self.ranks = ranks
        self.group: Group | None = None
        self.present = tuple(range(place.size))
        self.loop = 0
        self.newcomers: list[int] = []
        self.slots: tuple[int, ...] = ()
        self._job = place
        self._link = link
        self._move = move
        self._whole: Group | None = None
        self._sockets: Sockets | None = None
        self._saves = False
        self._number = 0
        self._made = 0
        self._rounds: RoundStore | None = None
        self._board: StoreConnection | None = None
        self._stands = False
        self._can_stand = link is not None and place.launcher == "elaunch" and place.size > 1
        self.joins = self._can_stand and bool(os.environ.get(env.PRESENT))
        if link is not None:
            link.on_entry = self.cut

    @property
    def name(self) -> int:
        """This rank's number in the job."""
        return self._job.rank

    @property
    def missing(self) -> list[int]:
        """The ranks of the job that are not present."""
        return [rank for rank in range(self._job.size) if rank not in self.present]

    @property
    def spans_nodes(self) -> bool:
        """Whether the job has several nodes: then no save goes on into another round."""
        return self._job.cross_size > 1

    def connect(self, saves: bool) -> None:
        """Have the ranks' group; ALL ranks call it together.

        ``saves``: also torch's default group, which ``ctx.checkpoint.save`` needs.
        """
        from elaunch.training.steps import group

        self._saves |= saves
        if self._sockets is None:
            self._can_stand &= not group.has_default()
            self._connect()
        elif saves and self._whole is not None:
            self._whole.provide_default()

    def own_calls(self, begin: bool) -> None:
        """Note that calls of all ranks are a loop's from here on; without ``begin``, the script's.

        A newcomer would be alone in calls that its script makes outside of loops.
        """
        if begin:
            self._can_stand &= self.ranks.made == self._made
        self._made = self.ranks.made

    def stand(self, stands: bool) -> None:
        """Tell the agent whether this rank can go on in its process if others die."""
        stands = stands and self._can_stand
        if self._link is not None and stands != self._stands:
            self._link.report_standing(stands)
        self._stands = stands

    def check(self) -> None:
        """Raise PeerLost if a rank has died, and the others go on in another round."""
        if self._link is not None and self._link.has_entry:
            raise PeerLost("a rank has died; the others go on in another round")

    def cut(self) -> None:
        """End whatever this rank waits for; the link's thread calls it."""
        if self._sockets is not None:
            self._sockets.cut()
        for group in (self.group, self._whole):
            if group is not None:
                group.cut()
        for store in (self.ranks.round_store, self._rounds):
            if store is not None:
                store.close("a rank has died")

    def begin_step(self) -> None:
        """Have all that are present compute from here on."""
        if self.group is not None and self.group is not self._whole:
            self.group.close()
        self.group = self._whole

    # ── ranks that die ───────────────────────────────────────────────────────────────────────────

    def reform(
        self, error: Exception, calls: int, own: Standing, seconds: float = ENTRY_S
    ) -> list[Standing]:
        """Go on without ranks that have died; return what each that is left tells the others.

        ALL ranks that are left call it, wherever they are. ``calls``: how often this rank has asked
        should_preempt(). Raises ``error`` if the agent does not say within ``seconds`` that they
        go on.
        """
        link = self._link
        while self._stands and link is not None:
            entry = link.take_entry(seconds)
            if entry is None and isinstance(error, CollectiveError):
                why = link.problem or f"it has said nothing for {seconds:g} s"
                what = f"{error}; this node's agent has begun no other round: {why}"
                raise PeerLost(what, error.missing) from error
            if entry is None:
                break
            try:
                for name in (env.RESUME_UUID, env.PRESENT):  # of this process's first round
                    os.environ.pop(name, None)
                os.environ.update(entry.environ)
                self._job = current(os.environ)
                self._leave_board()
                self.slots = entry.slots
                self._meet(entry.present, 0, calls)
                link.report_entered(self._job.round)
                found = self.ranks.allgather(own)
                self._part(own, found)
                if self.ranks.rank == 0:
                    self._opened().put("loop", str(self.loop).encode(), _soon())
                    log.warning("round %d goes on: %s", self._job.round, self._in_words(found))
            except (CollectiveError, ContextError) as another:
                error = another.with_traceback(None)  # which has this frame, and so itself
                continue
            return found
        raise error

    def _in_words(self, found: Sequence[Standing]) -> str:
        """Return which ranks are in which step."""
        steps = zip(self.present, (f"step {one.next}" for one in found), strict=True)
        return ", ".join(text.on_ranks(steps))

    def _part(self, own: Standing, found: Sequence[Standing]) -> None:
        """Have those that want an earlier step than others compute it among themselves."""
        first = min(one.next for one in found)
        behind = [rank for rank, one in enumerate(found) if one.next == first]
        if self._whole is not None and own.next == first and len(behind) < len(found):
            self.group = self._whole.among(behind)
            assert self._sockets is not None
            self._sockets.finish()
            self.check()

    # ── ranks that come ──────────────────────────────────────────────────────────────────────────

    def look(self) -> list[int]:
        """Return the newcomers that are here; rank 0 looks, and only where ranks are missing."""
        missing = self.missing
        if not missing or self.ranks.rank or self.group is not self._whole:
            return []
        found = self._opened().multi_get([f"here/{rank}" for rank in missing], _soon())
        return [rank for rank, is_here in zip(missing, found, strict=True) if is_here]

    def admit(self, calls: int, send: Callable[[Group, list[int]], None]) -> None:
        """Meet :attr:`newcomers`, and have them sent the state. ALL ranks call it together.

        ``send`` gets the group and the newcomers' ranks in it; ``calls``: as for :meth:`reform`.
        """
        newcomers, first, number = self.newcomers, self.present[0], self._number + 1
        present = tuple(sorted({*self.present, *newcomers}))
        if self.ranks.rank == 0:
            word = json.dumps([present, number, calls, present.index(first), self.slots]).encode()
            for rank in newcomers:
                self._opened().put(f"in/{rank}", word, _soon())
        self._meet(present, number, calls)
        if self._job.rank == first and self._whole is not None:
            send(self._whole, [present.index(rank) for rank in newcomers])

    def await_newcomers(self, until: float) -> None:
        """Wait a moment for ranks that are missing to come back; ALL ranks call it together.

        Raises PeerLost where none has by then, and not before ``until`` on the monotonic clock.
        """
        self.begin_step()
        missing, found = self.missing, list[int]()
        if self.ranks.rank == 0:
            self._opened().wait(f"here/{missing[0]}", time.monotonic() + MOMENT_S)
            found = self.look()
            if not found and time.monotonic() > until:
                who = text.ranks(missing)
                raise PeerLost(f"{who} did not come back to steps() in time", tuple(missing))
        self.newcomers = self.ranks.broadcast(found)

    def join(self, saves: bool) -> tuple[Group, int]:
        """Wait until the others admit this newcomer; return the group, and who sends the state.

        ``saves``: as for :meth:`connect`. Raises SystemExit if they are through with the script.
        """
        self._saves, board = saves, self._opened()
        self.ranks.note("waiting to be admitted to steps()")
        board.put(f"here/{self._job.rank}", b"1", _soon())
        key = f"in/{self._job.rank}"
        if not board.wait(key, time.monotonic() + self.ranks.timeout):
            raise PeerLost("the other ranks did not admit this one to steps() in time")
        word = json.loads(board.get(key, _soon()))
        if not word:
            raise SystemExit(0)
        present, number, calls, source, slots = word
        self.slots = tuple(slots)
        self._meet(tuple(present), number, calls)
        self.joins = False
        os.environ.pop(env.PRESENT, None)
        assert self._whole is not None  # with those that have admitted it
        return self._whole, source

    def asked(self) -> int:
        """Return, in a newcomer, in which loop the others are."""
        board = self._opened()
        if not board.wait("loop", time.monotonic() + self.ranks.timeout):
            raise PeerLost("the other ranks did not say which loop over steps() they are in")
        return int(board.get("loop", _soon()))

    # ── worlds ───────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        """Have newcomers end, too: the script is through, and has left its loop before the end."""
        with suppress(CollectiveError, ContextError):
            for rank in self.missing if self.ranks.rank == 0 else ():
                self._opened().put(f"in/{rank}", b"[]", _soon())

    def close(self) -> None:
        """Let go of the group."""
        self.begin_step()
        if self._whole is not None:
            self._whole.close()
        self.group = self._whole = None

    def _meet(self, present: tuple[int, ...], number: int, calls: int) -> None:
        """Be one of ``present``, with all parts of the context; ALL of them call it together."""
        self.close()
        self.present, self._number, self.newcomers = present, number, []
        place = self._place()._replace(scope=f"{self._job.scope}/{number}")
        self._move(place if place.size > 1 else place._replace(store=None), calls)
        self._connect()

    def _place(self) -> Placement:
        """Return where this rank stands among those that are present."""
        job, ends = self._job, list(accumulate(self.slots))
        nodes = [bisect(ends, rank) for rank in self.present]
        own = bisect(ends, job.rank)
        here = [rank for rank, node in zip(self.present, nodes, strict=True) if node == own]
        return job._replace(
            rank=self.present.index(job.rank),
            size=len(self.present),
            local_rank=here.index(job.rank),
            local_size=len(here),
            cross_rank=sorted(set(nodes)).index(own),
            cross_size=len(set(nodes)),
        )

    def _connect(self) -> None:
        from elaunch.training.steps import group

        self._sockets = group.Sockets()
        self.check()
        self.group = self._whole = group.connect(self.ranks, self.present)
        if self._saves and self._whole is not None:
            self._whole.provide_default()
        self._sockets.finish()
        self.check()

    def _opened(self) -> StoreConnection:
        """Return the connection to what newcomers and others write for each other."""
        if self._board is None:
            self._rounds = RoundStore(self._job._replace(scope=f"{self._job.scope}/joins"))
            self.check()
            self._board = self._rounds.connect(_soon())
        return self._board

    def _leave_board(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        if self._board is not None:
            self._board.close()
        self._rounds = self._board = None


def _soon() -> float:
    return time.monotonic() + ANSWER_S
