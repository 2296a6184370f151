"""The workers of the round that runs: who lives here, as the loop hears, and who elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from elaunch.agent.hangs.collectives import RankPlace
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round, Turn
from elaunch.wire.control import debug_socket


class Living(Struct, frozen=True):
    """The workers of a round on this node.

    Attributes:
        begun: the round; None before the first.
        pids: of the living workers, by rank.
        ended: the ranks that have ended with 0.
        failed: the ranks that have ended by themselves, and not with 0.
    """

    begun: Round | None = None
    pids: Mapping[int, int] = {}
    ended: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()

    @property
    def first_rank(self) -> int:
        """The rank of this node's first worker."""
        return 0 if self.begun is None else self.begun.first_rank

    def after(self, event: events.Event) -> Living:
        """Return who lives after an event."""
        if isinstance(event, events.WorkerStarted):
            return replace(self, pids={**self.pids, self.first_rank + event.local_rank: event.pid})
        if not isinstance(event, events.Exit):
            return self
        ended, failed = self.ended, self.failed
        if event.exitcode == 0 and not event.stopped:
            ended |= {event.rank}
        elif event.exitcode > 0 or not event.stopped:
            failed |= {event.rank}
        gone = self.first_rank + event.local_rank
        pids = {rank: pid for rank, pid in self.pids.items() if rank != gone}
        return replace(self, pids=pids, ended=ended, failed=failed)


class RoundWorkers:
    """Has who lives ``now``, and the workers that a debugger looks at."""

    def __init__(self, run_dir: Path) -> None:
        self.now = Living()
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._debugged: set[int] = set()

    def begin(self, begun: Round) -> None:
        """Forget the workers of the round before, but those that were kept."""
        shift = begun.first_rank - self.now.first_rank
        pids = {rank + shift: pid for rank, pid in self.now.pids.items()}
        self.now = Living(begun, {rank: pids[rank] for rank in pids.keys() & {*begun.present}})

    def see(self, turn: Turn) -> None:
        """Take down which workers live."""
        self.now = self.now.after(turn.event)

    def pid(self, rank: int) -> int:
        """Return the process of a rank that runs on this node, or 0."""
        return self.now.pids.get(rank, 0)

    def failed(self, round_number: int) -> frozenset[int]:
        """Return which ranks of this node have failed in that round."""
        begun = self.now.begun
        is_known = begun is not None and begun.round == round_number
        return self.now.failed if is_known else frozenset()

    @property
    def debugged(self) -> bool:
        """Whether a debugger looks at any worker."""
        return bool(self._debugged)

    @contextlib.contextmanager
    def held_by_debugger(self, pid: int) -> Iterator[bool]:
        """Let no time count while a debugger looks at ``pid``; False: another one does.

        The socket of its command, which may have been killed, is removed.
        """
        with self._lock:
            first = pid not in self._debugged
            self._debugged.add(pid)
        try:
            yield first
        finally:
            if first:
                debug_socket(self._run_dir, pid).unlink(missing_ok=True)
                with self._lock:
                    self._debugged.discard(pid)


class RanksElsewhere:
    """The other nodes' ranks, as far as is known: their ``places``, and which have ``failed``.

    It is ``answered`` when the agents have answered once, ``settled`` when nothing more will come.
    """

    def __init__(self) -> None:
        self.places: dict[int, RankPlace] = {}
        self.failed: set[int] = set()
        self.answered, self.settled = threading.Event(), threading.Event()
