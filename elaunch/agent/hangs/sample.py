"""The one thread that asks the workers, and all that is known by it of hangs and of slow ranks.

The thread takes a reading when one is due, and keeps what the readings show. Nobody else asks the
workers' sockets while a round runs; once it has failed, elaunch.agent.hangs.scene does, at once.

===========  =======================================================================================
a reading    is taken
===========  =======================================================================================
a look       with ``--hang-timeout``, a fraction of it apart (elaunch.agent.hangs.hang): the pages,
             the matching lines, and the collectives where these show nothing
a survey     every EVERY_S seconds, or more rarely where that would take more than one part in
             SPARING of a processor: the collectives, by which a rank may come last
             (elaunch.agent.hangs.lateness), DataLoaders, ends that the server does not report
a question   when a command or another node's agent asks: the collectives, and where a rank waits
             also the stacks, which alone show some waits (elaunch.agent.hangs.recorders)
===========  =======================================================================================

Where a hang is suspected, or a rank has waited for AWAITED_S, all nodes are asked for whom the
ranks wait. Other threads ask the nodes, which takes seconds; the next look has their answer. Of a
rank that has waited for long the record says it, and after TOLD_S the log, once in a round.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from elaunch import atonce, proc
from elaunch.agent.hangs import lateness, processes, stacks
from elaunch.agent.hangs.collectives import OUTSIDE, RankPlace
from elaunch.agent.hangs.hang import HangVerdict, HangWatch, Look, last_words
from elaunch.agent.hangs.living import Living, RanksElsewhere, RoundWorkers
from elaunch.agent.hangs.processes import Hindrances, LoaderActivity, WorkerActivity
from elaunch.agent.hangs.progress import ProgressLines, RoundProgress
from elaunch.agent.hangs.recorders import DEVICE_TRACE, STACKS, Recorders, Waits
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.workers.group import WorkerGroup
from elaunch.agent.workers.links import WorkerLinks
from elaunch.config import Settings
from elaunch.endings import Exit
from elaunch.runs.record import AwaitedRecord, LatenessRecord, LoaderRecord, ProgressRecord
from elaunch.wire.progress import Reading

if TYPE_CHECKING:
    from elaunch.agent.hangs.elsewhere import OtherNodes

ANSWER_S: Final = 1.0
"""Seconds for all workers to answer which collectives they have entered."""
RECEIVE_S: Final = 1.5
"""Seconds for those that are in no collective to answer whether they receive."""
FIRST_LOOK_S: Final = 5.0
"""Seconds between looks at the stack of a worker that has a group and has entered no collective."""
FIRST_S: Final = 5.0
EVERY_S: Final = 30.0
SPARING: Final = 6000
ANSWERED_S: Final = 5.0
"""Seconds for which a survey is new enough for a command that asks."""
AWAITED_S: Final = 30.0
TOLD_S: Final = 300.0
UNREPORTED_LOOKS: Final = 3
"""Surveys of a worker that has ended, after which the server will not report it."""
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")


class Survey(Struct, frozen=True):
    """The newest survey of a round, ``at`` a time of the monotonic clock.

    ``own`` are the places of this node's ranks, ``everyone`` those of all nodes' if a rank has
    waited for long; ``late`` is which rank comes last.
    """

    begun: Round | None = None
    at: float = -ANSWERED_S
    own: Mapping[int, RankPlace] = {}
    everyone: Mapping[int, RankPlace] = {}
    late: LatenessRecord | None = None


class _Question(NamedTuple):
    """A thread asks where the workers are, with the waits that only stacks show.

    ``waited``: stacks are looked at even if no rank waits here; None: they never are.
    """

    waited: bool | None
    answers: queue.SimpleQueue[Mapping[int, RankPlace]]


class Sampler:
    """Asks the workers from :meth:`start` to :meth:`close`; any thread has what is known.

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
        self.workers = RoundWorkers(group.run_dir)
        self.recorders = Recorders(group.run_dir)
        self.others: OtherNodes | None = None
        self.waiting: Mapping[int, RankPlace] = {}
        """The newest places in which any rank waited, for when one fails of waiting."""
        several, asked = settings.rendezvous is not None, settings.hang_timeout
        self._spawns = settings.start_method == "spawn"
        self._links = links
        self._group = group
        self._lines = lines
        self._post = post
        self._several = several
        activity = WorkerActivity() if asked == "auto" else None
        self._progress = RoundProgress(lines, alone=not several, activity=activity)
        self._watch = None if asked is None else HangWatch(asked, several)
        self._loaders = LoaderActivity()
        self._inbox: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        now = time.monotonic()
        self._look_at = now if asked is not None else float("inf")
        self._survey_at = now + FIRST_S
        self._be_new(Living())

    def _be_new(self, living: Living) -> None:
        """Forget the round before; all of this is the thread's."""
        self._living, self._waits = living, Waits()
        self._hindered: Hindrances = processes.hindrances()
        self._first_look_at = 0.0
        self._unreported: dict[int, int] = {}
        self._told_hang = self._told_wait = self._asks_all = False
        self._suspected: HangVerdict | None = None
        self._nodes: RanksElsewhere | None = None
        self._arrivals: lateness.Arrivals = {}
        self._survey, self.waiting = Survey(living.begun), {}
        self._progress.begin()
        if self._watch is not None:
            self._watch.begin()

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self.recorders.remove(self.workers.now.begun)

    def begin(self, begun: Round) -> None:
        """Watch the next round; its workers are about to start, but for those that were kept."""
        now = self.workers.now
        self.recorders.remove(now.begun, [now.first_rank + k for k in begun.kept])
        if self._lines is not None:
            self._lines.begin()
        self.workers.begin(begun)
        self._inbox.put(None)

    # ── what others ask; any thread ──────────────────────────────────────────────────────────────

    def places(self, round_number: int, waited: bool | None = False) -> Mapping[int, RankPlace]:
        """Return where the workers are, if that round runs here; blocks for seconds at most.

        ``waited``: a rank of another node waits in a collective, it may be for one of these. None:
        no stack is to be looked at.
        """
        begun = self.workers.now.begun
        if begun is None or begun.round != round_number or not self._thread.is_alive():
            return {}
        question = _Question(waited, queue.SimpleQueue())
        self._inbox.put(question)
        try:
            return question.answers.get(timeout=ANSWER_S + RECEIVE_S)
        except queue.Empty:
            return {}

    def record(self) -> ProgressRecord | None:
        """Return what ``elaunch status`` shows of progress now."""
        pages, watch = {**self._links.left(), **self._links.readings()}, self._watch
        found = self._progress.record(self.workers.now, pages, watched=watch is not None)
        if found is not None and watch is not None:
            found["limit_s"] = watch.limit
            found["learning"] = watch.limit is None
        return found

    def lateness(self, ask: bool) -> LatenessRecord | None:
        """Return which rank comes last to the collectives; ``ask`` now, if that is old."""
        begun = self.workers.now.begun
        if ask and begun is not None and time.monotonic() - self._survey.at >= ANSWERED_S:
            self.places(begun.round, None)
        found = self._survey
        return found.late if found.begun is begun else None

    def awaited(self) -> AwaitedRecord | None:
        """Return for which rank the others have waited for long.

        Or that the server rests: it starts no worker and reports no end of one.
        """
        pid = self._group.server.pid
        if pid and (rests := stacks.at_rest(pid)) in stacks.RESTING:
            text = f"the server that starts the workers (pid {pid}) does nothing: {rests}"
            return {"ranks": [], "text": text}
        seen = self._survey
        if seen.begun is not self.workers.now.begun:
            return None
        found = lateness.awaited(seen.own, seen.everyone, time.time(), AWAITED_S)
        return None if found is None else {"ranks": list(found.ranks), "text": found.sentence}

    def loaders(self, slots: int) -> LoaderRecord | None:
        """Return how busy the DataLoaders of so many workers have been."""
        return self._loaders.record(slots)

    def take_stacks(self) -> float:
        """Have all workers' stacks taken and posted; return when that is overdue, in seconds."""
        last = () if self._watch is None else last_words(self._watch.history)
        atonce.start("stacks", lambda: self._post(replace(self.read_stacks(), last=last)))
        return stacks.OVERDUE_S

    def read_stacks(self, options: tuple[str, ...] = ()) -> events.StacksTaken:
        """Return the workers' stacks now; with ``options`` as py-spy shows them."""
        living = self.workers.now
        if living.begun is None:
            return events.StacksTaken(-1)
        number, own = living.begun.round, {k - living.first_rank: k for k in sorted(living.pids)}
        wanted = tuple(
            stacks.Worker(rank, living.pids[rank], self._group.stacks_file(living.begun.born(k), k))
            for k, rank in own.items()
        )

        def ask(pids: Mapping[int, int], until: float) -> Mapping[int, Dump]:
            return self.recorders.ask(living, pids, (STACKS,), until).dumps()

        return stacks.take(number, wanted, ask, options=options)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._closing:
                questions = self._questions()
                if not self._closing:
                    self._take(self.workers.now, questions)
        except Exception:
            log.exception("the workers are not watched any more: no hang and no slow rank is named")

    def _questions(self) -> list[_Question]:
        """Return the questions that have come, as soon as there is one, or a reading is due."""
        found: list[_Question | None] = []
        pause = max(0.0, min(self._look_at, self._survey_at) - time.monotonic())
        try:
            found.append(self._inbox.get(timeout=pause))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return [one for one in found if one is not None]

    def _take(self, living: Living, questions: list[_Question]) -> None:
        """Take the readings that are due, and answer the questions by them."""
        if living.begun is not self._living.begun:
            self._be_new(living)
        self._living = living
        now, began = time.monotonic(), time.thread_time()
        looks, surveys = now >= self._look_at, now >= self._survey_at
        watch = None if self._told_hang or not (looks and living.pids) else self._watch
        pages = self._links.readings()
        places: Mapping[int, RankPlace] | None = None
        if surveys or questions:
            places = self._places(ANSWER_S)
        if watch is not None:
            asks = not self._progress.note(pages) or watch.limit is None
            if asks and places is None:
                places = self._places(min(watch.tick, ANSWER_S))
            self._suspected = self._look(watch, pages, places or {})
        if surveys or (questions and now - self._survey.at >= ANSWERED_S):
            self._note_survey(places or {})
        if surveys:
            self._asks_all = bool(lateness.waits(self._survey.own, time.time() - AWAITED_S))
            self._survey = self._survey if self._asks_all else replace(self._survey, everyone={})
        if questions:
            self._answer(places or {}, questions)
        if self._asks_all or self._suspected is not None:
            self._judge(places)
        if surveys and not self._asks_all:
            self._post_news()
        if self._watch is not None and looks:
            self._look_at = time.monotonic() + self._watch.tick
        if surveys:
            pause = max(EVERY_S, SPARING * (time.thread_time() - began))
            self._survey_at = time.monotonic() + pause

    def _places(self, patience: float) -> dict[int, RankPlace]:
        """Return where the living workers are, and the ended, as torch records it."""
        now, living = time.monotonic(), self._living
        places = self.recorders.places(living, now + patience)
        self._waits.note(places)
        # The first collective of NCCL is not recorded before it has connected the ranks.
        new = {rank for rank, one in places.items() if one.groups and not (one.done or one.is_held)}
        new &= living.pids.keys() if DEVICE_TRACE in self.recorders.traces else set()
        if new and now >= self._first_look_at:
            self._first_look_at = now + FIRST_LOOK_S
            places = self._with_waits(places, {rank: living.pids[rank] for rank in new})
        elif new:
            places = self._waits.known(places, new)
        if any(place.waits for place in places.values()):
            self.waiting = places
        return places

    def _with_waits(
        self, places: Mapping[int, RankPlace], pids: Mapping[int, int]
    ) -> dict[int, RankPlace]:
        """Return the places with the waits that the stacks of these processes show."""
        loose = {k for k, one in places.items() if not (one.is_held or one.problem or one.leaving)}
        asked = {rank: pid for rank, pid in pids.items() if rank in loose}
        until = time.monotonic() + RECEIVE_S
        dumps = self.recorders.ask(self._living, asked, (STACKS,), until).dumps()
        return self._waits.seen(self._waits.dated(places), dumps, asked)

    def _with_outside(self, found: Mapping[int, RankPlace]) -> dict[int, RankPlace]:
        """Return the places, with workers that have made no process group, or are stopped."""
        places, pids = {**found}, self._living.pids
        for rank in () if self._is_blind() else pids.keys() - found.keys():
            rests = stacks.at_rest(pids[rank])
            places[rank] = RankPlace(problem=rests, stopped=bool(rests)) if rests else OUTSIDE
        return places

    def _is_blind(self) -> bool:
        """Whether the workers are no forks, and none has called ``elaunch.init()``."""
        return self._spawns and not (self._links.readings() or self._links.left())

    def _look(
        self, watch: HangWatch, pages: Mapping[int, Reading], places: Mapping[int, RankPlace]
    ) -> HangVerdict | None:
        """Return what is suspected after one more look at living workers."""
        look = self._progress.look(self._living, pages, places)
        if look is None:
            return None
        if self.workers.debugged:
            look = replace(look, held=True)
        waits: Look | None = look
        if look.source != "collectives":
            waits = self._progress.look(self._living, pages, places, by_waits=True)
        found = watch.see(look, waits)
        watch.note_silence(self._is_blind())
        return found

    def _note_survey(self, raw: Mapping[int, RankPlace]) -> None:
        """Keep what a survey shows."""
        living = self._living
        own = self._with_outside(raw) if raw else {}
        self._report_ended(own)
        self._loaders.look(living.pids.values())
        self._arrivals = lateness.kept(self._arrivals, lateness.arrivals(own))
        late = lateness.summary(self._arrivals.values())
        if late is not None and (slow := late["slow"]) is not None:
            late["why"] = processes.hindrances().since(self._hindered, living.pids.get(slow, 0))
        self._survey = Survey(living.begun, time.monotonic(), own, self._survey.everyone, late)

    def _answer(self, raw: Mapping[int, RankPlace], questions: list[_Question]) -> None:
        """Answer; a worker that ends while its stack is asked for may abort, so few ask for it."""
        places = self._with_outside(raw)
        waits = any(place.waits for place in places.values())
        if any(one.waited or (waits and one.waited is False) for one in questions):
            places = self._with_waits(places, self._living.pids)
        for one in questions:
            one.answers.put(places)

    def _judge(self, raw: Mapping[int, RankPlace] | None) -> None:
        """Say for whom ranks wait, and whether the round hangs, by what all nodes show."""
        found, watch, living = self._suspected, self._watch, self._living
        if (begun := living.begun) is None:
            return  # nobody waits before the first round
        try:
            everyone = self._everywhere(begun, raw)
            if everyone is None:
                return
            self._tell_wait(everyone)
            if found is not None and watch is not None:
                own, size = tuple(sorted(living.pids)), begun.place.world_size
                now, at = time.time(), time.monotonic()
                found = watch.explain(found, everyone, own, size, now=now, at=at)
        except Exception:
            log.exception("which rank the others wait for cannot be found out")
            waits = any(place.waits for place in (raw or {}).values())
            found = found if waits or (found and found.source != "collectives") else None
        self._suspected, self._asks_all = None, False
        if found is not None and watch is not None:
            self._tell_hang(begun, found, watch)

    def _everywhere(
        self, begun: Round, raw: Mapping[int, RankPlace] | None
    ) -> Mapping[int, RankPlace] | None:
        """Return where the ranks of all nodes are; None while the other nodes are being asked."""
        elsewhere: Mapping[int, RankPlace] = {}
        if (others := self.others) is not None:
            if self._nodes is None:
                self._nodes = others.ask(begun, True, lambda: self._inbox.put(None))
            if not self._nodes.settled.is_set():
                return None
            elsewhere, self._nodes = self._nodes.places, None
        found = self._places(ANSWER_S) if raw is None else raw
        own = self._with_waits(self._with_outside(found), self._living.pids)
        return {**own, **elsewhere}

    def _tell_wait(self, everyone: Mapping[int, RankPlace]) -> None:
        """Keep, and log once, for whom the ranks wait that have waited for long."""
        if not self._asks_all:
            return
        seen = self._survey = replace(self._survey, everyone=everyone)
        found = lateness.awaited(seen.own, everyone, time.time(), TOLD_S)
        if found is not None and not self._told_wait:
            self._told_wait = True
            log.warning("%s; `elaunch stacks` shows where they are", found.sentence)
        self._post_news()

    def _tell_hang(self, begun: Round, found: HangVerdict, watch: HangWatch) -> None:
        """Post a hang of the round that runs."""
        if self.workers.now.begun is not begun:
            return
        self._told_hang = True
        at, last = time.monotonic(), last_words(watch.history)
        pid = self.workers.pid(min(found.ranks, default=-1))
        self._post(events.HangSeen(**asdict(found), round=begun.round, at=at, last=last, pid=pid))

    def _post_news(self) -> None:
        if self._several:
            self._post(events.RanksAsked())

    def _report_ended(self, places: Mapping[int, RankPlace]) -> None:
        """Report workers that have ended long ago, where the server does not: it may be frozen.

        A server that is stopped is sent on (elaunch.agent.workers.server). Surveys are counted:
        time in which the agent is suspended, too, does not count.
        """
        living, server = self._living, self._group.server.pid
        begun = living.begun
        shown = {rank for rank, one in places.items() if not (one.problem or one.leaving)}
        ends = {rank: proc.exit_code(living.pids[rank]) for rank in living.pids.keys() - shown}
        seen, self._unreported = self._unreported, {}
        for rank, code in ends.items():
            if code is None or begun is None or stacks.at_rest(server) == stacks.STOPPED:
                continue
            self._unreported[rank] = seen.get(rank, 0) + 1
            if self._unreported[rank] < UNREPORTED_LOOKS:
                continue
            local_rank, pid = rank - living.first_rank, living.pids[rank]
            log.warning(
                "rank %d (pid %d) has ended, and the server that starts the workers (pid %d) does "
                "not report it: %s",
                rank,
                pid,
                server,
                stacks.at_rest(server) or "it hangs",
            )
            self._post(Exit(begun.round, rank, local_rank, pid, code, time.monotonic()))
