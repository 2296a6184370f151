"""Where the time of this node's slots goes: a fold over the turns of the loop.

Outside of rounds all slots share one class, by the agent's phase. A round is split when it ends:
for each slot by when its worker was forked, when it ended, when the round failed and when that was
known, and in between by what the worker has added up on its progress page (elaunch.wire.progress).
What is kept of a round is sums, and one span of trained steps; when a later round resumes from
an older step, what lies behind that becomes ``lost``. The sum of all classes is the wall time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, cast

from msgspec import Struct
from msgspec.structs import replace

from elaunch import env, proc
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Finish
from elaunch.agent.policy.state import Phase, State
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.status.record import StatusRecord
from elaunch.agent.workers.links import WorkerLinks
from elaunch.config import Settings
from elaunch.rendezvous.plan import LateRank, NodeTimes, RankPace
from elaunch.runs import directory, verdict
from elaunch.runs.record import (
    LoaderRecord,
    ProgressRecord,
    Record,
    Reports,
    SlowestRecord,
    TimingRecord,
    steps,
)
from elaunch.wire.progress import SPENT, Reading, Spent

SPANS: Final = 64
"""Segments of steps that are remembered; the two oldest become one."""
FEWEST: Final = 5
"""Steps that a rank has made where its pace is judged."""
_FIRST: Final = SPENT.index("first_step")
_BETWEEN: Final = {Phase.STARTING: "start", Phase.FLUSHING: "save"}
_OVER: Final = frozenset({Phase.FLUSHING, Phase.MEETING, Phase.ENDED, Phase.STARTING})


log = logging.getLogger("elaunch")


class SlotLife(Struct, frozen=True):
    """One slot in one round; moments on the monotonic clock.

    Attributes:
        begun, ended: of the round; ``ended`` is now while it runs.
        forked, exited: of its worker.
        failed: when the round failed, or was asked to end; ``noticed``: when the agent knew that.
        alone: when the last worker of the round had ended, in one that did not fail.
        page: its worker's page.
        resumed: the step that the round resumed from; None: its first report is of one step.
        steps: whether the script has ever reported steps.
        first_step: the longest time that a worker has taken to the first step that it reported in
            this round; one that reports none, as where only rank 0 does, has taken no longer.
    """

    begun: float
    ended: float
    forked: float | None = None
    exited: float | None = None
    failed: float | None = None
    noticed: float | None = None
    alone: float | None = None
    page: Reading | None = None
    resumed: int | None = 0
    steps: bool = False
    first_step: float | None = None


def split(life: SlotLife) -> dict[str, float]:
    """Return the seconds of a slot by class; their sum is ``life.ended - life.begun``."""
    spent: dict[str, float] = {}
    at = life.begun

    def until(kind: str, moment: float) -> None:
        nonlocal at
        moment = min(max(moment, at), life.ended)
        spent[kind] = spent.get(kind, 0.0) + moment - at
        at = moment

    ends = (life.exited, life.failed, life.ended)
    worked = min(end for end in ends if end is not None)
    until("start", worked if life.forked is None else min(life.forked, worked))
    if life.page is not None and life.page.opened > 0:
        until("start", min(life.page.opened, worked))
        for kind, seconds in _of_page(life.page, worked, life):
            until(kind, min(at + seconds, worked))
    until("train", worked)
    if life.failed is not None:
        until("wait", life.failed)
        until("detect", life.failed if life.noticed is None else life.noticed)
    elif life.alone is not None:
        until("wait", life.alone)
    until("wait" if life.failed is None and life.alone is None else "kill", life.ended)
    return spent


def _of_page(page: Reading, worked: float, life: SlotLife) -> Iterator[tuple[str, float]]:
    """Yield the seconds that a worker has added up, but for those of ``train``."""
    spent: dict[Spent, float] = dict(zip(SPENT, page.spent, strict=False))
    spent[page.kind] = spent.get(page.kind, 0.0) + max(0.0, worked - page.since)
    train = spent.pop("train", 0.0)
    if page.first is None:
        if not life.steps:
            spent.pop("first_step", None)
        elif life.first_step is not None:
            spent["first_step"] = min(spent.get("first_step", 0.0), life.first_step)
    elif page.step is not None and page.step > page.first:
        # The first report may be of several steps, of which all but one were like those since.
        more = 0 if life.resumed is None else max(0, page.first - life.resumed - 1)
        pace = train / (page.step - page.first)
        spent["first_step"] = max(0.0, spent.get("first_step", 0.0) - more * pace)
    yield from spent.items()


class TrainedSpan(Struct, frozen=True):
    """Steps that were trained in one go, in ``seconds`` of each slot; None: not known which."""

    begin: int | None
    end: int | None
    seconds: float


def resume(spans: Sequence[TrainedSpan], step: int) -> tuple[list[TrainedSpan], float]:
    """Return what stays when training goes on from ``step``, and the seconds that are lost."""
    kept, lost = list(spans), 0.0
    while kept:
        last = kept[-1]
        if step > 0 and (last.begin is None or last.end is None or last.end <= step):
            break
        kept.pop()
        if last.begin is None or last.end is None or last.begin >= step:
            lost += last.seconds
            continue
        share = (last.end - step) / (last.end - last.begin)
        lost += share * last.seconds
        kept.append(TrainedSpan(last.begin, step, (1 - share) * last.seconds))
        break
    return kept, lost


def add(spans: Sequence[TrainedSpan], new: TrainedSpan) -> list[TrainedSpan]:
    """Return the spans with one more; at most SPANS."""
    both = [*spans, new]
    if len(both) > SPANS:
        one, other = both[:2]
        both[:2] = [TrainedSpan(one.begin, other.end, one.seconds + other.seconds)]
    return both


class _KeptSlot(Struct, frozen=True):
    """A slot whose worker the round before had as well: when that one's life began, and was forked.

    ``before`` has the seconds by class that are counted already.
    """

    begun: float
    forked: float | None
    before: Mapping[str, float] = {}


class _OpenRound(Struct):
    """The round that runs, by local rank."""

    begun: Round
    at: float
    forked: dict[int, float]
    exited: dict[int, float]
    failed: float | None = None
    noticed: float | None = None
    kept: dict[int, _KeptSlot] = {}

    def slot(self, local_rank: int) -> _KeptSlot:
        """Return the life of a worker, with nothing counted of one that began here."""
        return self.kept.get(local_rank) or _KeptSlot(self.at, self.forked.get(local_rank))


class Ledger:
    """Adds up one agent's time; an observer of the loop's turns. Any thread may ask for the record.

    Args:
        saves: whether there is a checkpoint directory: a round without a checkpoint begins anew.
        pages: returns the workers' pages by local rank, of those that have ended, too.
        progress: returns how far the workers are, also by their log lines.
        threads: returns the CPUs for each of so many workers, where they have one thread each.
        loaders: returns how busy the DataLoaders of so many workers have been.
        before: the timing of an earlier agent of this run.
        begun: when this agent began, on ``clock``; by default now.
    """

    def __init__(
        self,
        saves: bool,
        pages: Callable[[], Mapping[int, Reading]],
        progress: Callable[[], ProgressRecord | None],
        *,
        threads: Callable[[int], int] = lambda _: 0,
        loaders: Callable[[int], LoaderRecord | None] = lambda _: None,
        before: TimingRecord | None = None,
        begun: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._saves = saves
        self._pages = pages
        self._progress = progress
        self._threads = threads
        self._loaders = loaders
        self._before = before
        self._clock = clock
        self._lock = threading.Lock()
        self._kind = "start"
        self._begun_at = self._at = clock() if begun is None else begun
        self._slots = 0
        self._failures = 0
        self._seconds = dict.fromkeys(verdict.CLASSES, 0.0)
        self._spans: list[TrainedSpan] = []
        self._round: _OpenRound | None = None
        self._last: _OpenRound | None = None
        self._reports: Reports = "nothing"
        self._step_s: float | None = None
        self._slowest: SlowestRecord | None = None

    def see(self, turn: Turn) -> None:
        """Take down what the turn means for the time, before its action is done."""
        now, event, state = self._clock(), turn.event, turn.after
        with self._lock:
            self._slots = state.limits.nproc or self._slots
            failed = state.failed and isinstance(turn.action, Finish)
            self._failures = state.restarts + failed
            if self._round is not None:
                self._follow(self._round, turn, now)
                ends = state.phase in _OVER or turn.begun is not None
                if ends or isinstance(event, events.TreeGone):
                    self._close(self._round, now)
            if turn.begun is not None:
                self._open(turn.begun, now)
            elif self._round is None:
                self._between(state, now)

    def record(self) -> TimingRecord | None:
        """Return the timing as of now; None before the slots are counted."""
        now = self._clock()
        with self._lock:
            if not self._slots:
                return None
            seconds = dict(self._seconds)
            if self._round is None:
                seconds[self._kind] += now - self._at
            else:
                pages = self._pages()
                self._judge(pages)
                _add(seconds, self._split(self._round, now, pages))
            found: TimingRecord = {
                "slots": self._slots,
                "wall_s": now - self._begun_at,
                "seconds": seconds,
                "failures": self._failures,
                "reports": self._reports,
                "step_s": self._step_s,
                "slowest": self._slowest,
                "spare_threads": self._threads(self._slots),
                "loaders": self._loaders(self._slots),
            }
        before = self._before
        if before is not None:
            _add(seconds, before["seconds"])
            found["wall_s"] += before["wall_s"]
            found["failures"] += before["failures"]
        return found

    # ── between rounds ───────────────────────────────────────────────────────────────────────────

    def _between(self, state: State, now: float) -> None:
        kind = _BETWEEN.get(state.phase, "rendezvous")
        if state.phase is Phase.ENDED:
            kind = self._kind
        elif kind == "rendezvous":
            # Nodes are missing, or this one stands by.
            plan = state.plan if state.limits.meets else None
            misses = plan is not None and (bool(plan.waits) or state.name in plan.spares)
            if misses or self._kind == "nodes":
                kind = "nodes"
                if self._kind == "rendezvous":
                    self._kind = kind  # it was so since the last round
            elif state.completed and not state.failed and state.limits.meets:
                kind = "wait"
        if kind != self._kind:
            self._charge(now)
            self._kind = kind

    def _charge(self, now: float) -> None:
        self._seconds[self._kind] += now - self._at
        self._at = now

    # ── a round ──────────────────────────────────────────────────────────────────────────────────

    def _open(self, begun: Round, now: float) -> None:
        self._charge(now)
        current = self._round = _OpenRound(begun, now, {}, {})
        if begun.present and self._last is not None:
            current.kept = {k: self._last.slot(k) for k in begun.kept}
            counted = self._lives(current, now, self._pages())
            for k, slot in current.kept.items():
                current.kept[k] = replace(slot, before=split(counted[k]))
        elif begun.checkpoint is not None:
            self._resume(begun.checkpoint.step)
        elif self._saves:
            self._resume(0)

    def _follow(self, current: _OpenRound, turn: Turn, now: float) -> None:
        event, before = turn.event, turn.before
        if isinstance(event, events.WorkerStarted) and event.round == current.begun.round:
            current.forked[event.local_rank] = event.at
        elif isinstance(event, events.Exit) and event.round == current.begun.round:
            current.exited[event.local_rank] = event.at
        if current.noticed is not None:
            return
        if isinstance(event, events.Exit) and event == before.first:
            current.failed, current.noticed = event.at, now
        elif isinstance(event, events.HangSeen) and event == before.hang:
            current.failed, current.noticed = max(current.at, event.at - event.idle), now
        elif turn.after.phase is Phase.STOPPING or before.failed:
            current.failed = current.noticed = now

    def _close(self, current: _OpenRound, now: float) -> None:
        pages = self._pages()
        self._judge(pages)
        spent = self._split(current, now, pages)
        _add(self._seconds, spent)
        begin, end = self._steps(current, pages)
        anew = not (current.begun.present or current.begun.checkpoint is not None or self._saves)
        if begin is not None and anew:
            self._resume(begin)  # the script has found its own checkpoint, or none
        if seconds := spent.get("train", 0.0):
            self._spans = add(self._spans, TrainedSpan(begin, end, seconds))
        self._round, self._last, self._at, self._kind = None, current, now, "rendezvous"

    def _split(
        self, current: _OpenRound, now: float, pages: Mapping[int, Reading]
    ) -> dict[str, float]:
        """Return the seconds of the round by class, as means over the slots."""
        total: dict[str, float] = {}
        for k, life in enumerate(self._lives(current, now, pages)):
            _add(total, split(life))
            _add(total, {kind: -seconds for kind, seconds in current.slot(k).before.items()})
        return {kind: seconds / self._slots for kind, seconds in total.items()}

    def _lives(
        self, current: _OpenRound, now: float, pages: Mapping[int, Reading]
    ) -> list[SlotLife]:
        exited, slots = current.exited, self._slots
        checkpoint = current.begun.checkpoint
        resumed = 0 if checkpoint is None else checkpoint.step
        life = SlotLife(
            begun=current.at,
            ended=now,
            failed=current.failed,
            noticed=current.noticed,
            alone=max(exited.values()) if len(exited) >= slots else None,
            resumed=None if current.begun.present else resumed,
            steps=self._reports == "steps",
            first_step=max(
                (p.spent[_FIRST] for p in pages.values() if p.first is not None), default=None
            ),
        )
        return [
            replace(
                life,
                begun=current.slot(k).begun,
                forked=current.slot(k).forked,
                exited=exited.get(k),
                page=pages.get(k),
            )
            for k in range(slots)
        ]

    def _steps(
        self, current: _OpenRound, pages: Mapping[int, Reading]
    ) -> tuple[int | None, int | None]:
        """Return the steps between which the round has trained, as far as they are known."""
        end = max(steps(self._progress()), default=None)
        if end is None:
            return None, None
        firsts = [page.first for page in pages.values() if page.first is not None]
        checkpoint = current.begun.checkpoint
        if current.begun.present:
            last = self._spans[-1].end if self._spans else None
            return None if last is None else min(last, end), end
        if checkpoint is not None:
            return min(checkpoint.step, end), end
        if self._saves or not firsts:
            return 0, end
        return min(max(0, min(firsts) - 1), end), end

    def _resume(self, step: int) -> None:
        self._spans, lost = resume(self._spans, step)
        self._seconds["train"] -= lost
        self._seconds["lost"] += lost

    # ── what the ranks report ────────────────────────────────────────────────────────────────────

    def _judge(self, pages: Mapping[int, Reading]) -> None:
        """Note how much the script reports, and how long each rank takes for a step."""
        if pages and self._reports == "nothing":
            self._reports = "context"
        if any(page.first is not None for page in pages.values()):
            self._reports = "steps"
        paces = {k: pace for k, page in pages.items() if (pace := _pace(page)) is not None}
        if not paces:
            return
        self._step_s = median(paces.values())
        if self._round is not None and len(paces) > 1:
            worst = max(paces, key=lambda k: paces[k])
            self._slowest = {
                "rank": self._round.begun.first_rank + worst,
                "step_s": paces[worst],
                "median_s": self._step_s,
            }


def open_ledger(
    settings: Settings,
    run_dir: directory.RunDir,
    links: WorkerLinks,
    *,
    sampler: Sampler,
    record: StatusRecord,
) -> Ledger:
    """Return the ledger of this agent, which goes on with that of an earlier one of this run."""
    found = directory.continued(run_dir, settings.run_id, os.environ)

    def threads(slots: int) -> int:
        alone = env.default_omp_threads(os.environ, slots)
        return proc.cpus() // slots if alone else 0

    return Ledger(
        settings.checkpoint_dir is not None,
        lambda: {**links.left(), **links.readings()},
        sampler.record,
        threads=threads,
        loaders=sampler.loaders,
        before=None if found is None else found.get("timing"),
        begun=time.monotonic() - record.snapshot()["lasted_s"],
    )


def times_of_node(ledger: Ledger, sampler: Sampler) -> NodeTimes | None:
    """Return what the other nodes are to know of this one's time, and of its slow rank."""
    timing, found = ledger.record(), sampler.lateness(False)
    if timing is None:
        return None
    late, slowest = None if found is None else verdict.late_rank(found), timing["slowest"]
    if late is not None:
        late["host"] = os.uname().nodename
    return NodeTimes(
        slots=timing["slots"],
        wall_s=max(0.0, timing["wall_s"]),
        # What is lost is taken from what was trained, and rounding may leave less than nothing.
        seconds={kind: seconds for kind, seconds in timing["seconds"].items() if seconds > 0},
        late=None if late is None else LateRank(**late),
        pace=None if slowest is None else RankPace(**slowest),
        reports=timing["reports"],
    )


class VerdictLog:
    """The verdict on a run at its end, known when the loop ends; an observer of its turns.

    Each node has the result. What was measured is of all nodes on node 0 only.
    """

    def __init__(self, record: StatusRecord) -> None:
        self._record = record
        self._lines: list[tuple[int, str]] = []

    def see(self, turn: Turn) -> None:
        """Keep the verdict if the turn ends the run."""
        if not isinstance(turn.action, Finish):
            return
        record = cast("Record", self._record.snapshot())
        lines, shown = verdict.lines(record), verdict.shown(record)
        for number, line in enumerate(lines[:1] if record.get("node_rank") else lines):
            self._lines.append((logging.WARNING if number < shown else logging.INFO, line))

    def log(self) -> None:
        """Log the verdict: the last lines of the agent, behind what its parts say at their end."""
        for level, line in self._lines:
            log.log(level, "%s", line)


def _pace(page: Reading) -> float | None:
    """Return the seconds of its own that a rank takes for a step."""
    if page.first is None or page.step is None or page.step - page.first < FEWEST:
        return None
    train = page.spent[SPENT.index("train")]
    if page.kind == "train":
        train += max(0.0, page.beat_at - page.since)
    return train / (page.step - page.first)


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for kind, seconds in more.items():
        total[kind] = total.get(kind, 0.0) + seconds
