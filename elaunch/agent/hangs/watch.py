"""Everything of the agent that has to do with hangs, as the loop sees it.

Progress is followed for ``elaunch status`` also where ``--hang-timeout`` is off; the watchdog is
there only with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elaunch.agent.hangs import stacks
from elaunch.agent.hangs.loglines import ProgressLines
from elaunch.agent.hangs.progress import ProgressSources, RoundProgress
from elaunch.agent.hangs.watchdog import Watchdog
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.config import Settings
from elaunch.run.record import ProgressRecord


@dataclass(frozen=True)
class HangPlan:
    """What hangs are found by: ``lines`` are those of the log pump, if a pattern is given."""

    settings: Settings
    links: WorkerLinks
    lines: ProgressLines | None
    post: Callable[[events.Event], None]


class HangWatch:
    """Owns the watchdog and what it looks with; the loop's thread calls, but for :meth:`record`."""

    def __init__(self, plan: HangPlan, group: WorkerGroup) -> None:
        settings = plan.settings
        self._post = plan.post
        self._group = group
        several = settings.rendezvous is not None
        sources = ProgressSources(plan.links.readings, plan.links.left, plan.lines, not several)
        self._progress = RoundProgress(sources, watched=settings.hang_timeout is not None)
        self._watchdog: Watchdog | None = None
        if settings.hang_timeout is not None:
            look = self._progress.look
            self._watchdog = Watchdog(settings.hang_timeout, look, self._tell, several)

    def start(self) -> None:
        """Begin to watch."""
        if self._watchdog is not None:
            self._watchdog.start()

    def close(self) -> None:
        """End the thread."""
        if self._watchdog is not None:
            self._watchdog.close()

    def begin(self, begun: Round) -> None:
        """Watch the next round; its workers are about to start."""
        self._progress.begin(begun.first_rank)
        if self._watchdog is not None:
            self._watchdog.begin(begun.round)

    def see(self, turn: Turn) -> None:
        """Take down which workers live, and whether they are held."""
        self._progress.hear(turn.event)

    def _tell(self, hang: events.HangSeen) -> None:
        _, pid = self._progress.workers().get(min(hang.ranks, default=-1), (0, 0))
        self._post(replace(hang, pid=pid))

    def take_stacks(self, round_number: int) -> float:
        """Have all workers' stacks taken and posted; return when that is overdue, in seconds."""
        wanted = tuple(
            stacks.Worker(rank, pid, self._group.stacks_file(round_number, local_rank))
            for rank, (local_rank, pid) in self._progress.workers().items()
        )
        last = () if self._watchdog is None else self._watchdog.last_words()
        return stacks.start(round_number, wanted, last, self._post)

    def record(self) -> ProgressRecord | None:
        """Return what ``elaunch status`` shows of progress now; any thread may ask."""
        found = self._progress.record()
        if found is not None and self._watchdog is not None:
            limit = self._watchdog.limit
            found["limit_s"], found["learning"] = limit.seconds, limit.learning
        return found
