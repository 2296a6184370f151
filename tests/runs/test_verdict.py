"""What the end of a run says of where its time went."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.runs import verdict
from elaunch.runs.directory import RunDir
from elaunch.runs.record import Record
from tests.views.played_agent import new_record


def ended(lasted: float, rounds: int = 1, **changes: Any) -> Record:
    """Return the record of a run of so many seconds, of which most are training."""
    now = time.time()
    timing = {
        "slots": 4,
        "wall_s": lasted,
        "seconds": {"train": 0.9 * lasted, "start": 0.1 * lasted},
        "failures": rounds - 1,
        "reports": "steps",
        "step_s": None,
        "slowest": None,
        "spare_threads": 0,
        "loaders": None,
    }
    entry = {"round": 0, "recovery_s": None}
    record: dict[str, Any] = {**new_record(RunDir(Path("job")), "job", [])}
    record |= {"state": "COMPLETED", "started_at": now - lasted, "ended_at": now}
    return record | {"timing": timing, "history": [entry] * rounds} | changes  # type: ignore[return-value]


START = "start takes most: 10 s of each slot, 10.0 %"


def late(held: float, seconds: float) -> dict[str, Any]:
    """Return that ranks of this node wait for rank 2 in that share of so many seconds."""
    rank = {"rank": 2, "last": 46, "behind_s": 0.021, "seconds": seconds}
    found = {"slow": 2, "ranks": [rank], "collectives": 60, "held": held, "seconds": seconds}
    return {**found, "why": ""}


@pytest.mark.parametrize(
    ("lasted", "rounds", "state", "shown"),
    [
        (59.0, 1, "COMPLETED", 0),
        (59.0, 1, "STOPPED", 1),
        (3.0, 1, "PREEMPTED", 1),
        (3.0, 1, "KILLED", 1),
        (3.0, 1, "FAILED", 1),
        (11.0, 1, "FAILED", 1),
        (3.0, 2, "COMPLETED", 2),
        (61.0, 1, "COMPLETED", 2),
    ],
)
def test_a_run_that_was_short_and_whole_is_silent(
    lasted: float, rounds: int, state: str, shown: int
) -> None:
    """As under torchrun; one that was neither prints its verdict, one that was not whole a part."""
    record = ended(lasted, rounds, state=state)
    assert verdict.shown(record) == shown
    assert [line.partition(":")[0] for line in verdict.lines(record)[:2]] == ["result", "advice"]
    record["timing"] |= {"seconds": {"train": lasted}, "failures": 0}  # type: ignore[operator]
    assert verdict.lines(record)[1].startswith("goodput: 100.0 % of ")
    assert verdict.shown(record) == min(shown, 1)


@pytest.mark.parametrize("reports", ["nothing", "context"])
def test_of_a_script_that_reports_no_steps_no_goodput_is_told(reports: str) -> None:
    """It may have stood still for most of what is not known to be something else."""
    record = ended(100.0)
    record["timing"]["reports"] = reports  # type: ignore[typeddict-item]
    record["timing"]["seconds"] = {"train": 99.0, "start": 1.0}
    assert verdict.goodput(record) is None
    facts = dict(verdict.facts(record))
    assert facts["goodput"] == facts["slowest rank"] == verdict.UNKNOWN
    assert "advice" not in facts and not any("%" in text for text in facts.values())
    assert verdict.classes(record)["train"] == "in the script"
    job = {"nodes": 2, "late": None, **record["timing"]}
    assert dict(verdict.facts_of_job(job))["goodput"] == verdict.UNKNOWN  # type: ignore[arg-type]


def test_the_goodput_of_a_job_is_that_of_all_its_nodes() -> None:
    """Wherever it is shown."""
    record = ended(100.0)
    timing = record["timing"]
    assert verdict.goodput(record) == 0.9
    assert timing is not None
    job = {"nodes": 2, "late": None, **timing, "seconds": {"train": 50.0, "wait": 50.0}}
    record["job_timing"] = job  # type: ignore[typeddict-item]
    assert verdict.goodput(record) == 0.5
    assert dict(verdict.facts(record))["goodput"].startswith("50.0 % of 1m 40s on 4 slots of 2")


@pytest.mark.parametrize(
    ("took", "text"),
    [
        ([0.2271], "1, 0.227 s"),
        ([0.3, 0.1, 0.2], "3, median 0.200 s, longest 0.300 s"),
        ([None], "none is known here"),
    ],
)
def test_recoveries(took: list[float | None], text: str) -> None:
    """Of one there is no statistic."""
    record = ended(100.0, history=[{"round": 1, "recovery_s": one} for one in took])
    record["restarts"]["used"] = len(took)
    assert dict(verdict.facts(record))["recoveries"] == text


FAILURE = {"round": 1, "headline": "rank 2 failed at t.py:1: ValueError: b", "summary": "s"}
ELSEWHERE = {"round": 1, "text": "rank 9 failed: E\nrank 9 (local_rank 1) on host b\n"}


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({"failure": FAILURE}, "rank 2 failed at t.py:1: ValueError: b"),
        ({"failure": FAILURE, "job_failure": ELSEWHERE}, "rank 9 failed: E"),
        ({"failure": FAILURE, "job_failure": {**ELSEWHERE, "summary": "hung"}}, "hung"),
        ({"failure": {"round": 1, "summary": "of an earlier version"}}, "of an earlier version"),
        ({"failure": {**FAILURE, "round": 0}, "reason": "the store\x1b was lost"}, "the store"),
        ({"failure": FAILURE, "exit_code": 74, "reason": "cannot look for"}, "cannot look for"),
        ({"job_failure": ELSEWHERE, "exit_code": 69, "reason": "lost the store"}, "lost the store"),
    ],
    ids="here,elsewhere,hang elsewhere,earlier version,another reason,directory,store".split(","),
)
def test_the_result_names_who_is_to_blame(changes: dict[str, Any], result: str) -> None:
    """In the last lines of a run that failed, behind torchrun's long table."""
    record = ended(100.0, 2, state="FAILED", round=1, **changes)
    line = verdict.lines(record)[0]
    assert line.startswith(f"result: FAILED after 1m 40s, 0 restarts: {result}")
    assert line.endswith(" (elaunch why job)") and line.isprintable()


@pytest.mark.parametrize("state", ["COMPLETED", "PREEMPTED", "STOPPED"])
def test_the_result_of_a_run_that_did_not_fail_blames_nobody(state: str) -> None:
    """An earlier round's failure is none of the run's."""
    line = verdict.lines(ended(100.0, 2, state=state, round=1, failure=FAILURE))[0]
    assert line == f"result: {state} after 1m 40s, 0 restarts"


@pytest.mark.parametrize("code", [1, 69, 70, 74, 128])
def test_a_run_that_no_signal_has_stopped_in_the_end_names_why(code: int) -> None:
    """It was stopped, and something else ended it; what a signal alone has ended says enough."""
    why = "the store\x1b was lost"
    line = verdict.lines(ended(100.0, state="STOPPED", exit_code=code, reason=why))[0]
    assert line == "result: STOPPED after 1m 40s, 0 restarts: the store\\x1b was lost"
    line = verdict.lines(ended(100.0, state="STOPPED", exit_code=143, reason="SIGTERM"))[0]
    assert line == "result: STOPPED after 1m 40s, 0 restarts"


@pytest.mark.parametrize(
    ("held", "advice"),
    [
        (0.5, "rank 2 costs most: ranks wait for it 50 s, 50.0 % of the time"),
        (0.09, START),
    ],
)
def test_the_advice_names_what_costs_most(held: float, advice: str) -> None:
    """Be it a class of time, or a rank for which the others wait inside their training."""
    facts = dict(verdict.facts(ended(100.0, lateness=late(held, 100.0))))
    assert facts["advice"] == advice


@pytest.mark.parametrize("nodes", [None, 2])
def test_a_last_rank_that_costs_little_is_named_as_one(nodes: int | None) -> None:
    """The verdict says what the collectives told, of which the line above it speaks, too."""
    little = {**late(0.02, 100.0), "slow": None}
    record = ended(100.0, lateness=little)
    if nodes is not None:
        job = {**record["timing"], "nodes": nodes, "late": None}
        record |= {"job_timing": job}  # type: ignore[typeddict-item]
    last = "rank 2 arrived last in 46 of 60 collectives, 21 ms behind; the others waited 2 % of"
    facts = dict(verdict.facts(record))
    assert facts["slowest rank"] == f"none; {last} 1m 40s"


def test_the_time_of_earlier_starts_of_the_run_is_told() -> None:
    """What the run's own time is stands in its result."""
    facts = dict(verdict.facts(ended(100.0, lasted_s=60.0)))
    assert facts["goodput"].startswith(
        "90.0 % of 1m 40s (40 s in earlier starts) on 4 slots is train"
    )
    facts = dict(verdict.facts(ended(100.0, lasted_s=99.9)))
    assert facts["goodput"].startswith("90.0 % of 1m 40s on 4 slots is train")


def test_a_slow_rank_counts_for_the_time_in_which_it_was_seen() -> None:
    """Not for all of a run that it held up in its last minute."""
    facts = dict(verdict.facts(ended(1000.0, lateness=late(0.9, 60.0))))
    assert facts["advice"].startswith("start takes most")


@pytest.mark.parametrize(("failures", "advice"), [(1, None), (0, START)])
def test_a_run_that_its_workers_have_failed(failures: int, advice: str | None) -> None:
    """No class of time matters before that; one that lost its store has no such cause."""
    record = ended(100.0, 2, state="FAILED")
    assert record["timing"] is not None
    record["timing"]["failures"] = failures
    assert dict(verdict.facts(record)).get("advice") == advice


@pytest.mark.parametrize(
    ("step_s", "rest"),
    [(0.211, ", which is rank 2: `elaunch profile --rank 2` shows what it does"), (0.109, "")],
)
def test_the_rank_that_the_others_wait_for_is_named(step_s: float, rest: str) -> None:
    """Where its own time for a step stands out."""
    record = ended(100.0)
    assert record["timing"] is not None
    record["timing"]["seconds"] = {"train": 57.0, "wait": 43.0}
    record["timing"]["slowest"] = {"rank": 2, "step_s": step_s, "median_s": 0.108}
    wait = "waiting for the slowest rank takes most: 43 s of each slot, 43.0 %"
    assert dict(verdict.facts(record))["advice"] == wait + rest


@pytest.mark.parametrize(("nodes", "of"), [(1, ""), (2, " of this node alone")])
def test_a_job_of_which_only_this_node_is_known(nodes: int, of: str) -> None:
    """While it runs, and where a signal has ended all of its agents at once: it says so."""
    facts = dict(verdict.facts(ended(100.0, node_count=nodes)))
    assert facts["goodput"].startswith(f"90.0 % of 1m 40s on 4 slots{of} is train; ")


@pytest.mark.parametrize("name", sorted(verdict.CLASSES))
def test_each_class_that_takes_most_is_named(name: str) -> None:
    """With seconds and share, and what makes it smaller where there is something."""
    record = ended(100.0)
    assert record["timing"] is not None
    record["timing"]["seconds"] = {"train": 60.0, name: 40.0}
    advice = dict(verdict.facts(record)).get("advice")
    if name == "train":
        assert advice is None
    else:
        takes = f"{verdict.CLASSES[name]} takes most: 40 s of each slot, 40.0 %"
        assert advice == takes + (f"; {verdict.REMEDIES[name]}" if name in verdict.REMEDIES else "")


@pytest.mark.parametrize(
    ("busy", "cpus", "advice"),
    [
        (
            0.97,
            8,
            "try num_workers=4 in the DataLoader, not 2: its processes compute 97 % of the "
            "time, so the training waits for them, and each worker has 8 CPUs",
        ),
        (0.97, 3, START),
        (0.5, 8, START),
    ],
)
def test_dataloaders_that_compute_all_the_time(busy: float, cpus: int, advice: str) -> None:
    """More of them are advised where there are CPUs for more."""
    record = ended(100.0)
    assert record["timing"] is not None
    record["timing"]["loaders"] = {"processes": 2, "seconds": 90.0, "busy": busy, "cpus": cpus}
    assert dict(verdict.facts(record))["advice"] == advice


def test_how_often_to_save_is_told_in_words() -> None:
    """Also where a save takes so long that it should come once in days."""
    record = ended(1300.0)
    assert record["timing"] is not None
    record["timing"]["seconds"] = {"train": 50.0, "save": 1250.0, "lost": 0.0}
    record["saves"] = {"commits": 1}  # type: ignore[typeddict-item]
    advice = dict(verdict.facts(record))["advice"]
    assert re.match(
        r"save every \dd \d\dh.*, not every 21m 40s: a save stops the training for", advice
    )
