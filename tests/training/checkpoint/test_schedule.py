"""``save(every=…)``: what is saved, by numbers, by itself, and on ranks that ask nobody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import elaunch
from elaunch.errors import ContextError
from elaunch.runs import verdict
from elaunch.runs.directory import RunDir
from elaunch.training.checkpoint.callcontext import SaveRequest
from elaunch.training.checkpoint.handle import (
    FIRST,
    SaveHandle,
    Schedule,
    expected_failure,
    seconds_between,
)
from tests.training.checkpoint.groups import Raised, in_group


@pytest.mark.parametrize(
    ("cost", "failure_s", "seconds"),
    [
        (0.07, 86400.0, 110.0),  # Young: √(2 · 0.07 · 86400)
        (60.0, 86400.0, 6000.0),  # 1 % of the time: Young's 54 min would take 1.9 %
        (0.002, 15.0, 0.245),
        (0.01, 15.0, 1.0),
        (5.0, 1.0, 500.0),
    ],
)
def test_the_seconds_between_saves(cost: float, failure_s: float, seconds: float) -> None:
    assert seconds_between(cost, failure_s) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("cost", [0.001, 0.07, 3.0])
def test_no_other_interval_within_the_share_loses_less(cost: float) -> None:
    """What saves take, and what is trained again after a failure."""

    def lost(seconds: float) -> float:
        return cost / seconds + seconds / 2 / 7200

    best = seconds_between(cost, 7200)
    others = [best * factor for factor in (0.5, 0.8, 1.25, 2)]
    assert all(lost(best) < lost(other) for other in others if cost / other <= verdict.MOST)
    assert cost / best <= verdict.MOST + 1e-9


def test_how_often_a_job_fails() -> None:
    assert expected_failure(0, 0.0) == 60.0
    assert expected_failure(0, 86400.0) == pytest.approx(86400, rel=0.01)
    assert expected_failure(9, 90.0) == 15.0
    assert expected_failure(100, 86400.0) == pytest.approx(864, rel=0.02)


def nothing() -> None:
    """Return what a round begins with that has nothing to resume from."""


def due(planned: Schedule, every: Any, steps: range, keep: Any = None) -> list[int]:
    """Return which steps a script's calls find due."""
    return [step for step in steps if planned.is_due(every, SaveRequest(step, {}, keep), nothing)]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "often", "10"])
def test_what_is_no_interval(every: Any) -> None:
    with pytest.raises(ContextError, match="give a number of steps, 1 or more, or 'auto'"):
        due(Schedule(None), every, range(1, 3))


def test_what_would_fill_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELAUNCH_CHECKPOINT_KEEP", raising=False)
    with pytest.raises(ContextError, match=r"keep=elaunch\.Keep\(last=3\)"):
        due(Schedule(None), "auto", range(1, 3))
    assert due(Schedule(None), "auto", range(1, 13), elaunch.Keep(last=3)) == [11, 12]
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_KEEP", '{"last": 3}')
    assert due(Schedule(None), "auto", range(1, 13)) == [11, 12]


class Alone:
    """The part of a CallContext that a schedule uses, of the only rank."""

    rank = 0

    def __init__(self) -> None:
        self.distributed = elaunch.DistributedContext()


def follow(planned: Schedule, now: list[float], costs: list[float], *, skip: bool = False) -> int:
    """Train with a step of 0.1 s; return the steps from the last save but one to the last."""
    step, saved = 0, [0]
    while costs:
        now[0], step = now[0] + 0.1, step + 1
        if planned.is_due("auto", SaveRequest(step, {}, elaunch.Keep(last=1)), nothing):
            planned.begin(step)
            now[0] += costs.pop(0)
            handle = SaveHandle(step)
            handle.skipped = skip and len(saved) > 1
            planned.note(Alone(), handle)  # type: ignore[arg-type]
            saved.append(step)
    return saved[-1] - saved[-2]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the clock of the schedules of a test."""
    moment = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def test_the_cost_is_measured(now: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    """One slow save counts for as long as there is no other; what changes much is printed."""
    first = follow(Schedule(None), now, [0.05] * 2)
    assert first == 50  # 1 % of 5 s
    printed = capfd.readouterr().err
    assert printed == (
        "elaunch: saves every 50 steps (5.0 s): a save stops the training for 50.0 ms, and the job "
        "has failed 0 times in 0.00 s\n"
    )
    assert follow(Schedule(None), now, [1.0, 0.05, 0.05, 0.05]) == 50
    assert capfd.readouterr().err.count("elaunch: saves every") == 2


def test_a_job_that_runs_on_saves_less_often(now: list[float]) -> None:
    """√(2 · 1 ms · 60 s), with the time that has passed."""
    assert follow(Schedule(None), now, [0.001] * 2) == 4
    assert 8 < follow(Schedule(None), now, [0.001] * 600) < 12


def test_failures_of_the_record_count(
    now: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.time() - 1200
    history = [{"started_at": begun + 15 * number} for number in range(60)]
    monkeypatch.setattr(RunDir, "read_state", lambda _self: {"history": history})
    assert follow(Schedule(tmp_path), now, [0.001] * 3) == 3
    history[1:] = []
    assert follow(Schedule(tmp_path), now, [0.001] * 3) == 16
    history.extend({"started_at": begun, "planned": True} for _ in range(59))
    assert follow(Schedule(tmp_path), now, [0.001] * 3) == 16


def test_a_record_that_is_not_there(now: list[float], tmp_path: Path) -> None:
    assert follow(Schedule(tmp_path / "none"), now, [0.001] * 2) == 4


def test_storage_that_is_slower_than_the_interval(now: list[float]) -> None:
    """The next look is after half as long as the save in flight has taken."""
    assert follow(Schedule(None), now, [0.05] * 3, skip=True) == 26
    assert follow(Schedule(None), now, [0.05] * 4, skip=True) == 39


def test_a_save_of_the_round_before_is_still_in_flight(now: list[float]) -> None:
    """It is looked for again soon, however long the machine has been up."""
    planned, step = Schedule(None), 0
    while not planned.is_due("auto", SaveRequest(step, {}, elaunch.Keep(last=1)), nothing):
        now[0], step = now[0] + 0.1, step + 1
    skipped = SaveHandle(step)
    planned.begin(step)
    planned.note(Alone(), skipped)  # type: ignore[arg-type]
    assert due(planned, "auto", range(step + 1, step + 10))[0] == step + FIRST // 2


def numbered(ctx: Any) -> Any:
    """Save every 4 steps, with a save between that counts, too, and in memory by default."""
    made = {}
    checkpoint = ctx.checkpoint
    checkpoint.load({"x": 0})
    begin = checkpoint.latest().step if checkpoint.latest() else 0
    for step in range(begin + 1, begin + 12):
        handle = checkpoint.save({"x": step}, step, every=4)
        made[step] = handle.skipped or handle.result().name
        if step == begin + 6:
            made[step] = checkpoint.save({"x": step}, step).committed.name
    return {step: name for step, name in made.items() if name is not True}


@pytest.mark.ranks
def test_every_so_many_steps(tmp_path: Path) -> None:
    said = in_group(numbered, 2, tmp_path, agent=True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    assert said[0] == {s: f"step-{s:08}.r0" for s in (4, 6, 10)}


def by_itself(ctx: Any) -> Any:
    """Save as often as is worth it; steps take longer on one rank."""
    state, handles = {"x": 0}, []
    for step in range(1, 2 * FIRST + 2):
        state["x"] = step
        time.sleep(0.002 * ctx.distributed.rank)
        handle = ctx.checkpoint.save(state, step, every="auto", keep=elaunch.Keep(last=2))
        if not handle.skipped:
            handles.append(handle)
    ctx.checkpoint.wait()
    return [handle.step for handle in handles], [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
def test_auto_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    said = in_group(by_itself, 2, tmp_path, agent=True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    saved, kept = said[0]
    assert saved[0] == 1 + FIRST and kept[-1] == saved[-1]


def alone(ctx: Any) -> Any:
    """Without agents it blocks, and is done when it returns."""
    handle = ctx.checkpoint.save({"x": 1}, 2, every=2, when_busy="skip")
    later = ctx.checkpoint.save({"x": 1}, 3, every=2, block=True)
    return handle.done(), handle.result().name, later.skipped, later.result()


@pytest.mark.ranks
def test_every_without_an_agent(tmp_path: Path) -> None:
    said = in_group(alone, 2, tmp_path)
    assert said == [(True, "step-00000002.r0", True, None)] * 2
