"""All of the agent that has to do with hangs, as the loop sees it.

Progress is followed for ``elaunch status`` also where ``--hang-timeout`` is off; the watchdog
(elaunch.agent.hangs.watchdog) is there only with it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from elaunch import atonce, proc
from elaunch.agent.hangs import collectives, processes, scene, stacks
from elaunch.agent.hangs.collectives import OUTSIDE, UNKNOWN, RankPlace
from elaunch.agent.hangs.judge import HangVerdict, Look, accuse
from elaunch.agent.hangs.lateness import Lateness
from elaunch.agent.hangs.processes import LoaderActivity, WorkerActivity
from elaunch.agent.hangs.progress import ProgressLines, RoundProgress
from elaunch.agent.hangs.recorders import Recorders
from elaunch.agent.hangs.scene import Scene
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.hangs.watchdog import Watchdog
from elaunch.agent.patience import bounded
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.config import Settings
from elaunch.endings import Exit
from elaunch.runs.record import AwaitedRecord, LatenessRecord, LoaderRecord, ProgressRecord
from elaunch.wire.control import debug_socket

if TYPE_CHECKING:
    from elaunch.agent.hangs.elsewhere import OtherNodes

ANSWER_S: Final = 1.0
"""Seconds for all workers to answer which collectives they have entered."""
RECEIVE_S: Final = 1.5
"""Seconds for those that are in no collective to answer whether they receive."""
AGAIN_S: Final = 10.0
"""Seconds until the other nodes are asked again, if the workers here wait for one of them."""
UNREPORTED_LOOKS: Final = 3
"""Looks at a worker that has ended, after which the server will not report it."""
SILENT_ASKS: Final = 3
"""So often they are asked again since nothing is known of some rank."""
MOST_ASKED: Final = 32
"""Nodes of a job in which a node whose rank has lost another asks all: many may ask at once."""
SCENE_S: Final = 0.05
"""Seconds for that, and for their stacks, before they are signalled since one has failed."""
SETTLE_S: Final = 0.5
"""Seconds in which ranks of other nodes that come to their ends are asked for again."""


log = logging.getLogger("elaunch")


def no_scene(_: float) -> Scene | None:
    """Return that nothing is known of the other workers."""
    return None


def _any_waits(places: Mapping[int, RankPlace]) -> bool:
    return any(place.waits for place in places.values())


def _are_blind(settings: Settings, links: WorkerLinks) -> bool:
    """Whether the workers are no forks, and none has called ``elaunch.init()`` in this round."""
    return settings.start_method == "spawn" and not (links.readings() or links.left())


class HangWatch:
    """Owns the watchdog and what it looks with; the loop's thread calls, but for :meth:`record`.

    ``lines`` are those of the log pump, if a pattern is given.
    """

    def __init__(
        self,
        settings: Settings,
        links: WorkerLinks,
        group: WorkerGroup,
        *,
        lines: ProgressLines | None,
        post: Callable[[events.Event], None],
    ) -> None:
        self._post = post
        self._group = group
        self._recorders = Recorders(group.run_dir)
        self._others: OtherNodes | None = None
        self._begun: Round | None = None
        self._ask_again = 0.0
        self._silent = 0
        self._judges_others = settings.hang_timeout != "auto"  # else one that computes may be late
        self._takes_scene = not settings.no_stacks
        self._ended: dict[int, int] = {}
        self._waiting: Mapping[int, RankPlace] = {}
        several = settings.rendezvous is not None
        watched = settings.hang_timeout is not None
        self._progress = RoundProgress(
            links.readings,
            links.left,
            lines,
            alone=not several,
            watched=watched,
            collectives=self._places if watched else None,
            activity=WorkerActivity() if settings.hang_timeout == "auto" else None,
        )
        self._lock = threading.Lock()
        self._debugged: set[int] = set()
        self._hindered = processes.hindrances()
        news: Callable[[], None] = partial(post, events.RanksAsked()) if several else lambda: None
        self._loaders = LoaderActivity()
        self._lateness = Lateness(self._seen, self._everywhere, self._why, news)
        self._blind = partial(_are_blind, settings, links)
        self._watchdog: Watchdog | None = None
        if settings.hang_timeout is not None:
            self._watchdog = Watchdog(
                settings.hang_timeout,
                self._look,
                self._tell,
                several,
                partial(self._look, True),
                self._explain,
                self._blind,
            )

    @property
    def watches(self) -> bool:
        """Whether hangs are looked for."""
        return self._watchdog is not None

    @contextlib.contextmanager
    def held_by_debugger(self, pid: int) -> Iterator[bool]:
        """Let no time count while a debugger looks at ``pid``; False: one does. Any thread.

        The socket of its command, which may have been killed, is removed.
        """
        with self._lock:
            first = pid not in self._debugged
            self._debugged.add(pid)
        try:
            yield first
        finally:
            if first:
                debug_socket(self._group.run_dir, pid).unlink(missing_ok=True)
                with self._lock:
                    self._debugged.discard(pid)

    def _look(self, by_waits: bool = False) -> Look | None:
        found = self._progress.look(by_waits)
        held = bool(self._debugged)
        return structs.replace(found, held=True) if found is not None and held else found

    def start(self) -> None:
        """Begin to watch."""
        self._lateness.start()
        if self._watchdog is not None:
            self._watchdog.start()

    def close(self) -> None:
        """End the threads."""
        self._lateness.close()
        if self._watchdog is not None:
            self._watchdog.close()
        self._recorders.close()

    def begin(self, begun: Round) -> None:
        """Watch the next round; its workers are about to start."""
        self._recorders.begin(begun)
        self._hindered = processes.hindrances()
        self._lateness.begin()
        self._begun, self._ask_again, self._silent, self._waiting = begun, 0.0, 0, {}
        self._progress.begin(begun.first_rank)
        if self._watchdog is not None:
            self._watchdog.begin(begun.round)

    def see(self, turn: Turn) -> None:
        """Take down which workers live."""
        self._progress.hear(turn.event)
        self._recorders.see(turn.event)

    def take_scene(
        self, first: Exit, lost: bool, is_victim: bool
    ) -> Callable[[float], Scene | None]:
        """Ask the others, before they are signalled, where they are; blocks SCENE_S at most.

        If the ``first`` is a victim, it takes as long as it may; else what they do is only shown.
        Where it has ``lost`` a rank, that may be one of another node: these are asked, too. The
        function that is returned waits so many seconds for what is missing of that.
        """
        nothing: Callable[[float], Scene | None] = no_scene
        if not self._takes_scene:
            return nothing
        take = partial(self._take_scene, first, lost, is_victim)
        what = "cannot see where the other workers are"
        return bounded(take, nothing, what, self._group.run_dir)

    def _take_scene(
        self, first: Exit, lost: bool, is_victim: bool
    ) -> Callable[[float], Scene | None]:
        until, elsewhere, failed = time.monotonic() + SCENE_S, dict[int, RankPlace](), set[int]()
        answered, settled = threading.Event(), threading.Event()
        if lost:
            atonce.start("ask nodes", self._ask_nodes, elsewhere, failed, answered, settled)
        pids = {rank: pid for rank, (_, pid) in self._progress.workers().items()}
        pids.pop(first.rank, None)
        read = self._recorders.scene(pids, until, hurries=not is_victim)
        now, before = time.time(), self._waiting
        if lost:
            answered.wait(max(0.0, until - time.monotonic()))
        nothing: tuple[dict[int, RankPlace], dict[int, Dump]] = {}, {}
        # The lines of a victim's peers are looked up where they run, while they do. What is only
        # shown is read when the others are signalled.
        asked = [read()] if is_victim else []

        def describe(patience: float) -> Scene | None:
            if lost and patience:
                settled.wait(patience)
            if not asked:
                what = "cannot read what the other workers do"
                asked.append(bounded(read, nothing, what, self._group.run_dir))
            places, dumps = asked[0]
            found, gone = {**elsewhere, **places}, frozenset(failed)
            if not (found or gone):
                return None
            return scene.describe(first.round, found, dumps, before=before, now=now, failed=gone)

        return describe

    def _ask_nodes(
        self,
        places: dict[int, RankPlace],
        failed: set[int],
        answered: threading.Event,
        settled: threading.Event,
    ) -> None:
        """Ask the other nodes, again while a rank there comes to its end, SETTLE_S at most."""
        begun, others, until = self._begun, self._others, time.monotonic() + SETTLE_S
        while others is not None and begun is not None and begun.place.nodes <= MOST_ASKED:
            found = others.places(begun, False, failed)
            places.update(found)
            answered.set()
            if time.monotonic() > until or not any(place.leaving for place in found.values()):
                break
            time.sleep(SCENE_S)
        answered.set()
        settled.set()

    def _places(self, pids: Mapping[int, int]) -> Mapping[int, RankPlace]:
        patience = ANSWER_S if self._watchdog is None else min(self._watchdog.tick, ANSWER_S)
        places = self._note(self._recorders.places(pids, time.monotonic() + patience))
        return {rank: place for rank, place in places.items() if rank in pids}

    def _now(self) -> tuple[Mapping[int, int], Mapping[int, RankPlace]]:
        pids = {rank: pid for rank, (_, pid) in self._progress.workers().items()}
        return pids, self._note(self._recorders.places(pids, time.monotonic() + ANSWER_S))

    def _note(self, places: Mapping[int, RankPlace]) -> Mapping[int, RankPlace]:
        """Keep the newest places in which any rank waits, for when one fails of waiting."""
        if _any_waits(places):
            self._waiting = places
        return places

    def _seen(self) -> Mapping[int, RankPlace]:
        pids, places = self._now()
        self._report_ended(places)
        self._loaders.look(pids.values())
        return self._with_outside(pids, places) if places else places

    def _with_outside(
        self, pids: Mapping[int, int], found: Mapping[int, RankPlace]
    ) -> dict[int, RankPlace]:
        """Return the places, with workers that have made no process group, or are stopped."""
        places = {**found}
        for rank in () if self._blind() else pids.keys() - found.keys():
            rests = stacks.at_rest(pids[rank])
            places[rank] = RankPlace(problem=rests, stopped=bool(rests)) if rests else OUTSIDE
        return places

    def loaders(self, slots: int) -> LoaderRecord | None:
        """Return how busy the DataLoaders of so many workers have been; any thread may ask."""
        return self._loaders.record(slots)

    def _why(self, rank: int) -> str:
        _, pid = self._progress.workers().get(rank, (0, 0))
        return processes.hindrances().since(self._hindered, pid)

    def lateness(self, ask: bool) -> LatenessRecord | None:
        """Return which rank comes last to the collectives; any thread may ``ask`` the workers."""
        return self._lateness.record(ask)

    def awaited(self) -> AwaitedRecord | None:
        """Return for which rank the others have waited for long; any thread may ask.

        Or that the server rests: it starts no worker and reports no end of one.
        """
        pid = self._group.server.pid
        if pid and (rests := stacks.at_rest(pid)) in stacks.RESTING:
            text = f"the server that starts the workers (pid {pid}) does nothing: {rests}"
            return {"ranks": [], "text": text}
        return self._lateness.awaited()

    def _report_ended(self, places: Mapping[int, RankPlace]) -> None:
        """Report workers that have ended long ago, where the server does not: it may be frozen.

        The agent continues a server that is stopped (elaunch.agent.workers.server). Looks are
        counted: time in which the agent is suspended, too, does not count.
        """
        begun, server, workers = self._begun, self._group.server.pid, self._progress.workers()
        shown = {rank for rank, one in places.items() if not (one.problem or one.leaving)}
        ends = {rank: proc.exit_code(workers[rank][1]) for rank in workers.keys() - shown}
        seen, self._ended = self._ended, {}
        for rank, code in ends.items():
            if code is None or begun is None or stacks.at_rest(server) == stacks.STOPPED:
                continue
            self._ended[rank] = seen.get(rank, 0) + 1
            if self._ended[rank] < UNREPORTED_LOOKS:
                continue
            local_rank, pid = workers[rank]
            log.warning(
                "rank %d (pid %d) has ended, and the server that starts the workers (pid %d) does "
                "not report it: %s",
                rank,
                pid,
                server,
                stacks.at_rest(server) or "it hangs",
            )
            self._post(Exit(begun.round, rank, local_rank, pid, code, time.monotonic()))

    def meet(self, others: OtherNodes) -> None:
        """Ask the other nodes' agents, too, from now on."""
        self._others = others

    def places(self, round_number: int, waited: bool = False) -> Mapping[int, RankPlace]:
        """Return where the workers are, if that round runs here; any thread may ask.

        ``waited``: a rank of another node waits in a collective, it may be for one of these.
        """
        begun = self._begun
        if begun is None or begun.round != round_number:
            return {}
        pids, found = self._now()
        places = self._with_outside(pids, found)
        if not waited and not _any_waits(places):
            return places  # a worker that ends while its stack is asked for may abort
        return self._recorders.with_receives(places, pids, time.monotonic() + RECEIVE_S)

    def failed(self, round_number: int) -> frozenset[int]:
        """Return which ranks of this node have failed in that round; any thread may ask."""
        begun = self._begun
        is_known = begun is not None and begun.round == round_number
        return self._recorders.failed if is_known else frozenset()

    def _everywhere(self) -> Mapping[int, RankPlace]:
        """Return where the ranks of all nodes are, which takes seconds.

        Sends and receives, of which only the stacks show that a rank waits in one, count, too.
        """
        begun = self._begun
        if begun is None:
            return {}
        places = dict(self.places(begun.round, True))
        if self._others is not None:
            places |= self._others.places(begun, True)
        return places

    def _explain(self, found: HangVerdict) -> HangVerdict | None:
        """Name the rank that has not entered a collective in which others wait, if there is one.

        By the collectives it is no hang before a rank of some node has waited for as long as the
        one that is late may be: nobody is held up. Nor is it one, where all of this node's workers
        wait, while a rank of another node is in no collective: that is its own node's to judge.
        """
        begun = self._begun
        if begun is None or time.monotonic() < self._ask_again:
            return None
        places = self._everywhere()
        own = [place for rank, place in places.items() if rank in found.ranks]
        now, pause = time.time(), 0.0
        if found.source == "collectives":
            pause = min(AGAIN_S, found.patience - collectives.waited(places, now))
        asks = self._others is not None or found.source == "collectives"
        if asks and own and all(place.waits for place in own):
            pause = max(pause, self._pause(places, begun.place.world_size, found.patience))
        if pause > 0:
            self._ask_again = time.monotonic() + pause
            return None
        culprit = collectives.find(places, now, least=found.patience / 2, late=found.ranks)
        everyone = tuple(self._progress.workers())
        return accuse(found, culprit, everyone, any(place.waits for place in own))

    def _pause(self, places: Mapping[int, RankPlace], world_size: int, patience: float) -> float:
        """Return in how many seconds to ask again, since a rank is in no collective, or silent."""
        ranks = [places.get(rank, UNKNOWN) for rank in range(world_size)]
        loose = [place for place in ranks if not place.is_held]
        if self._others is None or self._judges_others:
            loose = [place for place in loose if place != OUTSIDE]
        if self._others is None:  # its turn comes when it is late itself
            return min(AGAIN_S, patience) if any(not one.problem for one in loose) else 0.0
        if all(place.problem for place in loose):
            self._silent += bool(loose)
            return AGAIN_S if loose and self._silent <= SILENT_ASKS else 0.0
        self._silent = 0
        return AGAIN_S

    def _tell(self, hang: events.HangSeen) -> None:
        _, pid = self._progress.workers().get(min(hang.ranks, default=-1), (0, 0))
        self._post(structs.replace(hang, pid=pid))

    def take_stacks(self, round_number: int) -> float:
        """Have all workers' stacks taken and posted; return when that is overdue, in seconds."""
        last = () if self._watchdog is None else self._watchdog.last_words()
        return stacks.start(round_number, self._wanted(round_number), last, self._post)

    def _wanted(self, round_number: int) -> tuple[stacks.Worker, ...]:
        return tuple(
            stacks.Worker(rank, pid, self._group.stacks_file(round_number, local_rank))
            for rank, (local_rank, pid) in self._progress.workers().items()
        )

    def pid(self, rank: int) -> int:
        """Return the process of a rank that runs on this node, or 0. Any thread."""
        return self._progress.workers().get(rank, (0, 0))[1]

    def stacks(self, options: tuple[str, ...] = ()) -> events.StacksTaken:
        """Return the workers' stacks now; with ``options`` as py-spy shows them. Any thread."""
        begun = self._begun
        if begun is None:
            return events.StacksTaken(-1)
        ask = self._recorders.dumps
        return stacks.take(begun.round, self._wanted(begun.round), ask, options=options)

    @property
    def begun(self) -> Round | None:
        """The round that runs here, or ran last; any thread may ask."""
        return self._begun

    def record(self) -> ProgressRecord | None:
        """Return what ``elaunch status`` shows of progress now; any thread may ask."""
        found = self._progress.record()
        if found is not None and self._watchdog is not None:
            found["limit_s"], found["learning"] = self._watchdog.limit()
        return found
