"""Every second of a slot falls into one class, whatever happens in whatever order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Action, Finish, Nothing
from elaunch.agent.policy.state import Limits, Phase, State
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.status import ledger
from elaunch.agent.status.ledger import Ledger, SlotLife, TrainedSpan
from elaunch.checkpoint.records import Checkpoint
from elaunch.rendezvous.plan import Plan
from elaunch.runs.record import ProgressRecord
from elaunch.wire.progress import SPENT, Reading

STATE = State(Limits(nproc=2, max_restarts=3))


def page(
    opened: float = 0.0,
    kind: Any = "train",
    since: float = 0.0,
    steps: tuple[int | None, int | None] = (None, None),
    **spent: float,
) -> Reading:
    """Return what a worker's page shows; ``steps`` are the first and the newest."""
    seconds = tuple(spent.get(name, 0.0) for name in SPENT)
    texts = {"section": "", "section_until": None, "doing": "", "status": ""}
    numbers = {"beats": 1, "beat_at": since, "step": steps[1], "progress": None}
    told = {"opened": opened, "kind": kind, "since": since, "spent": seconds, "first": steps[0]}
    return Reading(**numbers, **texts, **told)  # type: ignore[arg-type]


class Job:
    """A ledger with a clock, and what its workers show."""

    def __init__(self, saves: bool = True) -> None:
        self.now = 100.0
        self.pages: dict[int, Reading] = {}
        self.ledger = Ledger(saves, lambda: self.pages, self.progress, clock=lambda: self.now)
        self.state = STATE

    def progress(self) -> ProgressRecord | None:
        """Return the pages' steps as the record has them."""
        workers: list[Any] = [{"step": one.step} for one in self.pages.values()]
        return {"source": "script", "limit_s": None, "learning": False, "workers": workers}

    def turn(
        self, at: float, event: events.Event, begun: Round | None = None, **state: Any
    ) -> None:
        """Have a turn happen at ``at`` that leads to ``state``."""
        self.now = at
        action: Action = Finish(0) if state.get("phase") is Phase.ENDED else Nothing()
        before, self.state = self.state, replace(self.state, **state)
        if isinstance(event, events.Exit):
            before = replace(before, first=self.state.first)
        self.ledger.see(Turn(before, event, action, "", self.state, begun))

    def begin(self, at: float, number: int, step: int | None = None) -> None:
        """Have a round begin, whose workers are forked one second later."""
        found = None if step is None else Checkpoint("/c", step, "elaunch")
        begun = Round(number, 2, checkpoint=found)
        fresh = {"first": None, "hang": None, "round": number}
        self.turn(at, events.DeadlinePassed(), begun, phase=Phase.RUNNING, **fresh)
        for k in range(2):
            self.turn(at, events.WorkerStarted(number, k, 1, at + 1.0))

    def crash(self, at: float, rank: int, number: int) -> None:
        """Have a worker fail at ``at``, and all be gone 3 s later; 2 s to learn of it."""
        failure = events.Exit(number, rank, rank, 1, 7, at)
        self.turn(at + 2.0, failure, first=failure, phase=Phase.STOPPING)
        self.turn(at + 5.0, events.TreeGone(number), phase=Phase.MEETING)

    def seconds(self) -> Mapping[str, float]:
        """Return the classes that are not empty; their sum is the wall time."""
        found = self.ledger.record()
        assert found is not None
        assert found["wall_s"] == self.now - 100.0
        assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], rel=1e-9)
        assert all(seconds >= -1e-9 for seconds in found["seconds"].values()), found
        return {kind: s for kind, s in found["seconds"].items() if abs(s) > 1e-9}


def test_a_crash_and_a_resume() -> None:
    """Each second is where it was spent; steps after the checkpoint are done again."""
    job = Job()
    job.turn(104.0, events.DeadlinePassed(), phase=Phase.MEETING)
    job.begin(105.0, 0)
    spent = {"init": 1.0, "first_step": 2.0, "save": 3.0, "train": 10.0}
    one = page(107.0, "train", 123.0, (1, 11), **spent)
    job.pages = {0: one, 1: one}
    job.crash(123.0, 1, 0)
    assert job.seconds() == pytest.approx(
        {"start": 6.0, "rendezvous": 1.0, "init": 1.0, "first_step": 2.0, "save": 3.0}
        | {"train": 10.0, "detect": 2.0, "kill": 3.0}
    )
    job.pages = {}
    job.begin(130.0, 1, step=11 - 4)
    job.turn(140.0, events.DeadlinePassed())
    seconds = job.seconds()
    assert seconds["lost"] == pytest.approx(10.0 * 4 / 11)
    assert seconds["rendezvous"] == pytest.approx(1.0 + 2.0)


def test_workers_that_were_kept_lose_nothing() -> None:
    """What they have added up before is counted once, also in the third round."""
    job = Job()
    job.turn(104.0, events.DeadlinePassed(), phase=Phase.MEETING)
    job.begin(105.0, 0)

    def shown(at: float, last: int) -> Reading:
        known = {"init": 1.0, "first_step": 2.0, "train": at - 109.0}
        return page(106.0, "train", at, (1, last), **known)

    job.pages = {k: shown(119.0, 11) for k in range(2)}
    job.crash(119.0, 1, 0)
    for number, at in ((1, 124.0), (2, 134.0)):
        job.pages = {0: shown(at, 11)}
        begun = Round(
            number, 2, checkpoint=Checkpoint("/c", 5, "elaunch"), kept={0: 0}, present=[0]
        )
        fresh = {"first": None, "hang": None, "round": number}
        job.turn(at, events.DeadlinePassed(), begun, phase=Phase.RUNNING, **fresh)
        job.turn(at, events.WorkerStarted(number, 1, 1, at + 1.0))
        job.pages = {0: shown(at + 5.0, 11), 1: page(at + 1.0, "first_step", at + 2.0, init=1.0)}
        job.crash(at + 5.0, 1, number)
    seconds = job.seconds()
    assert "lost" not in seconds and seconds["detect"] == pytest.approx(3 * 2.0)
    assert seconds["init"] == pytest.approx(1.0 + 2 * 0.5)
    assert seconds["train"] == pytest.approx(10.0 + 2 * (5.0 + 1.0) / 2)
    assert seconds["first_step"] == pytest.approx(2.0 + 2 * 2.0 / 2)


def test_a_script_that_tells_nothing_trains_from_fork_to_end() -> None:
    """And a slot whose worker is done waits for the others."""
    job = Job(saves=False)
    job.turn(101.0, events.DeadlinePassed(), phase=Phase.MEETING)
    job.begin(101.0, 0)
    job.turn(110.0, events.Exit(0, 0, 0, 1, 0, 110.0))
    job.turn(114.0, events.Exit(0, 1, 1, 2, 0, 114.0), phase=Phase.SWEEPING)
    job.turn(115.0, events.TreeGone(0), phase=Phase.MEETING)
    job.turn(115.0, events.DeadlinePassed(), phase=Phase.ENDED)
    found = job.ledger.record()
    assert found is not None and found["reports"] == "nothing"
    expected = {"start": 2.0, "train": (8.0 + 12.0) / 2, "wait": 2.0, "kill": 1.0}
    assert job.seconds() == pytest.approx(expected)


def test_a_first_report_of_many_steps_is_mostly_training() -> None:
    """A script that reports every 100 steps has not taken 100 steps to compile."""
    shown = page(1.0, "train", 211.0, (100, 200), first_step=110.0, train=100.0)
    spent = ledger.split(SlotLife(1.0, 211.0, 1.0, page=shown, steps=True))
    assert spent == pytest.approx({"start": 0, "first_step": 11.0, "train": 199.0} | _zeros())


def _zeros() -> dict[str, float]:
    return dict.fromkeys(("init", "load", "save", "wait", "section"), 0.0)


def test_a_rank_that_reports_no_step_had_its_first_when_the_others_had() -> None:
    """Many scripts report on rank 0 only; where nobody has reported yet, all are before it."""
    silent = page(1.0, "first_step", 1.0)
    life = SlotLife(0.0, 211.0, forked=0.0, page=silent, steps=True)
    assert ledger.split(life)["first_step"] == 210.0
    spent = ledger.split(replace(life, first_step=11.0))
    assert (spent["first_step"], spent["train"]) == (11.0, 199.0)


def test_nodes_that_are_missing_and_a_hang_have_their_class() -> None:
    """What has led to the wait for them belongs to it; a hang lasts from the last progress."""
    job = Job()
    job.state = replace(STATE, limits=replace(STATE.limits, meets=True))
    job.turn(102.0, events.DeadlinePassed(), phase=Phase.MEETING)
    job.turn(112.0, events.DeadlinePassed(), plan=Plan("j", waits="for 1 more node, for 10 s"))
    job.begin(115.0, 0)
    hang = events.HangSeen((0,), "", "script", round=0, at=140.0, idle=20.0)
    job.state = replace(job.state, hang=hang)
    job.turn(141.0, hang, phase=Phase.STOPPING)
    job.turn(143.0, events.TreeGone(0), phase=Phase.FLUSHING)
    job.turn(144.0, events.DeadlinePassed(), phase=Phase.MEETING)
    expected = {"start": 3.0, "nodes": 13.0, "train": 4.0, "detect": 21.0, "kill": 2.0, "save": 1.0}
    assert job.seconds() == pytest.approx(expected)


def test_an_earlier_agent_of_the_run_is_added() -> None:
    """Its seconds, its wall time and its failures; the sum stays exact."""
    first = Job()
    first.turn(103.0, events.DeadlinePassed(), phase=Phase.MEETING)
    first.begin(104.0, 0)
    first.crash(110.0, 0, 0)
    before = first.ledger.record()
    assert before is not None
    again = Ledger(True, dict, lambda: None, before=before, clock=lambda: first.now)
    first.now += 5.0
    again.see(Turn(STATE, events.DeadlinePassed(), Nothing(), "", STATE))
    found = again.record()
    assert found is not None and found["wall_s"] == before["wall_s"] + 5.0
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], rel=1e-12)


@pytest.mark.parametrize("part", range(2))
def test_the_sum_of_a_slot_is_its_time(part: int) -> None:
    """Whatever its page holds, in whatever order its moments lie."""
    for seed in range(150 * part, 150 * (part + 1)):
        draw = random.Random(seed)

        def moment(draw: random.Random = draw) -> float | None:
            return draw.choice((None, draw.uniform(-5, 15)))

        spent = {name: draw.choice((0.0, draw.uniform(0, 9))) for name in SPENT}
        steps = draw.choice(((None, None), (3, 3), (3, 9), (90, 91)))
        shown = page(moment() or 0.0, draw.choice(SPENT), moment() or 0.0, steps, **spent)
        life = SlotLife(
            0.0,
            10.0,
            *(moment() for _ in range(5)),
            page=draw.choice((None, shown)),
            resumed=draw.choice((0, 2, 50)),
            steps=draw.random() < 0.5,
        )
        found = ledger.split(life)
        assert sum(found.values()) == pytest.approx(10.0, rel=1e-12)
        assert all(seconds >= 0 for seconds in found.values())


@pytest.mark.parametrize("part", range(2))
def test_segments_lose_nothing(part: int) -> None:
    """What is kept and what is lost is all that was trained, also of more than are remembered."""
    for seed in range(50 * part, 50 * (part + 1)):
        draw = random.Random(seed)
        spans: list[TrainedSpan] = []
        trained = lost = 0.0
        at = 0
        for _ in range(200):
            end = at + draw.randrange(10)
            known = draw.random() < 0.9
            new = TrainedSpan(at if known else None, end if known else None, draw.random())
            spans, trained = ledger.add(spans, new), trained + new.seconds
            at = draw.choice((end, end, end, draw.randrange(end + 1)))
            spans, more = ledger.resume(spans, at)
            lost += more
        assert len(spans) <= ledger.SPANS
        assert sum(one.seconds for one in spans) + lost == pytest.approx(trained)


@pytest.mark.parametrize("part", range(2))
def test_the_sum_of_a_job_is_its_wall_time(part: int) -> None:
    """Through rounds, crashes and phases in any order."""
    for seed in range(30 * part, 30 * (part + 1)):
        draw = random.Random(seed)
        job = Job(saves=draw.random() < 0.5)
        assert job.ledger.record() is None  # the slots are not counted yet
        job.turn(101.0, events.DeadlinePassed())
        numbers = itertools.count()
        number = next(numbers)
        for _ in range(40):
            at = job.now + draw.choice((0.0, draw.random(), 5.0))
            what = draw.randrange(5)
            if what == 0:
                job.begin(at, number := next(numbers), draw.choice((None, draw.randrange(50))))
            elif what == 1:
                job.crash(at, draw.randrange(2), number)
            elif what == 2:
                job.turn(at, events.DeadlinePassed(), phase=draw.choice(list(Phase)))
            elif what == 3:
                job.turn(at, events.Exit(number, 0, 0, 1, 0, at - draw.random()))
            else:
                newest = draw.randrange(1, 60)
                shown = page(at, "wait", at, (1, newest), train=draw.random(), save=draw.random())
                job.pages = {draw.randrange(2): shown}
            job.now = max(job.now, at)
            job.seconds()
