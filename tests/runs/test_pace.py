"""How fast a run trains, from readings of its progress."""

from __future__ import annotations

from typing import Any

from elaunch.runs.pace import WINDOW_S, StepRate


def at(
    pace: StepRate, now: float, *steps: int | None, done: float | None = None, round: int = 0
) -> str:
    """Take a reading of ranks at these steps; return the text."""
    workers: list[dict[str, Any]] = [{"step": step, "progress": None} for step in steps]
    pace.see(now, round, [*workers, {"step": steps[0] if steps else None, "progress": done}])
    return pace.text()


def test_steps_rate_and_the_time_that_is_left() -> None:
    """The slowest rank's steps; what is left by the progress since the round began."""
    pace = StepRate()
    assert at(pace, 0.0) == ""
    assert at(pace, 10.0, 100, 102, done=0.1) == "step 100-102, 10 % done"
    assert at(pace, 20.0, 120, 120, done=0.2) == "step 120, 2 steps/s, 20 % done, ETA 1m 20s"
    assert at(pace, 30.0, 140, done=1.0).endswith("100 % done, ETA 0.00 s")
    assert pace.text(live=False) == "step 140, 100 % done"


def test_a_slow_step_and_a_new_round() -> None:
    """Steps of minutes keep their rate; a round, or steps that are done again, begin anew."""
    pace = StepRate()
    assert at(pace, 0.0, 1) == "step 1"
    assert at(pace, 3 * WINDOW_S, 2) == "step 2, 180 s/step"
    assert at(pace, 5 * WINDOW_S, 2) == "step 2, 180 s/step"
    pace = StepRate()
    for second in range(100):
        at(pace, float(second), 10 * second)
    assert at(pace, 99 + 10 * WINDOW_S, 990) == "step 990, 54.6 s/step", "it hangs"
    pace = StepRate()
    assert at(pace, 0.0, 1) == "step 1"
    assert at(pace, 3 * WINDOW_S, 2) == "step 2, 180 s/step"
    assert at(pace, 6 * WINDOW_S, 2, round=1) == "step 2"
    assert at(pace, 6 * WINDOW_S + 10, 12, round=1) == "step 12, 1 steps/s"
    assert at(pace, 6 * WINDOW_S + 20, 5, round=1) == "step 5"


def test_progress_that_falls_begins_anew() -> None:
    """Where no step is reported it shows that the job went on from a checkpoint."""
    pace = StepRate()
    at(pace, 0.0, done=0.5)
    assert at(pace, 10.0, done=0.6) == "60 % done, ETA 40 s"
    assert at(pace, 20.0, done=0.2) == "20 % done"
    assert at(pace, 30.0, done=0.6) == "60 % done, ETA 10 s"


def test_the_rate_is_that_of_the_last_minute() -> None:
    """What was quicker before is forgotten."""
    pace = StepRate()
    for second in range(200):
        at(pace, float(second), 10 * second if second < 100 else 900 + second)
    assert pace.rate == 1.0
