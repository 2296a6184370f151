"""When a failed round is reported, with what its workers left; fakes stand in for their output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.failure import errorfile
from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import NOT_ASKED, Scene
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import StartRound
from elaunch.agent.policy.state import Limits
from elaunch.agent.policy.turn import Turn
from elaunch.endings import Exit
from elaunch.runs.directory import RunDir
from tests.agent.histories import READY, Played, exited, gone, started
from tests.agent.policy.test_nodes import ENDING, RUNS, SECOND, seen

TABLE = "Root Cause (first observed failure)"


class Rig:
    """A reporter; what it prints, and the last lines that the pump has until the next round."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self.noted: list[Mapping[str, Any]] = []
        self.tail = ["the last words"]
        self.scene = NOT_ASKED
        self.asked: list[bool] = []
        self.reasons: list[str] = []
        self.settled: list[tuple[int, bool]] = []
        self.pump = SimpleNamespace(
            paths=lambda _: (None, None), tail=lambda *_: list(self.tail), show=self.said.append
        )
        self.pump.withhold = lambda: None
        self.pump.settle = lambda number, **how: self.settled.append((number, how["drops"]))
        self.group = SimpleNamespace(files_root=Path("x"), error_file=lambda *_: None)
        run_dir = RunDir(root)
        record = SimpleNamespace(note_failure=self.noted.append)
        settings = SimpleNamespace(
            entrypoint="t.py", args=(), max_same_failures=0, torchrun_report=True, run_id="t"
        )
        settings.checkpoint_dir = None
        publisher = SimpleNamespace(failed_elsewhere=lambda _: None, keep=lambda *_: None)
        known: Any = {"group": self.group, "status_record": record, "publisher": publisher}
        known["look"] = self.look
        self.reporter = Reporter(settings, run_dir, self.pump, **known)  # type: ignore[arg-type]

    def look(self, _: Exit, lost: bool, is_victim: bool) -> Any:
        """Return what describes the scene; note whether other nodes would be asked."""
        self.asked.append(lost)
        return SimpleNamespace(described=lambda _: self.scene)

    def show(self, limits: Limits, *history: events.Event) -> Turn:
        """Show the turns of a history, as the loop does; return the last."""
        played = Played(limits)
        played.reporter = self.reporter
        for taken in (each for event in history for each in played.take(event)):
            self.reasons.append(taken.reason)
            self.reporter.see(taken)
            if taken.begun is not None and taken.begun.round > 0:
                self.tail.clear()  # the pump has opened the next round
            self.reporter.report_on(taken)
        return taken


ROUND = (READY, started(0), started(1), exited(1, 7, at=99.0), exited(0, -15, stopped=True), gone())


def test_the_cause_is_shown_at_once_and_the_table_at_the_end(tmp_path: Path) -> None:
    """One report for each round; that of a round that is restarted has no table."""
    rig = Rig(tmp_path)
    again = (started(0, 1), started(1, 1), exited(0, 9, 1), exited(1, -15, 1, stopped=True))
    rig.show(Limits(2, max_restarts=1), *ROUND, *again, gone(1))
    first, last, table = rig.said
    assert first.startswith("rank 1 (local_rank 1, pid 1001)") and "the last words" in first
    assert TABLE not in first
    assert last.startswith("rank 0 (local_rank 0, pid 1000)") and TABLE not in last
    assert table.count(TABLE) == 1
    assert [found["summary"] for found in rig.noted] == [
        "rank 1 exited with code 7",
        "rank 0 exited with code 9",
    ]
    written = json.loads((tmp_path / "failure-0.json").read_text())
    assert [one["rank"] for one in written["stopped"]] == [0]
    assert [number for number, drops in rig.settled if drops] == [0, 1]


def test_what_workers_left_is_kept_where_the_next_plan_is_there_already(tmp_path: Path) -> None:
    """On several nodes too the next round may follow the end of the tree at once."""
    rig = Rig(tmp_path)
    ends = (exited(1, 7), seen(ENDING), seen(SECOND), exited(0, -15, stopped=True), gone())
    last = rig.show(Limits(2, meets=True), *RUNS, *ends)
    assert isinstance(last.action, StartRound)
    (text,) = rig.said
    assert "the last words" in text


LOST = (
    "Traceback (most recent call last):",
    '  File "t.py", line 1, in <module>',
    "RuntimeError: Connection closed by peer [127.0.0.1]:40312",
)


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_ended_with_0_is_what_the_others_lost(tmp_path: Path, ended: bool) -> None:
    """If it had ended before the first of them failed."""
    rig = Rig(tmp_path)
    rig.tail[:] = LOST
    others = (exited(0, 1), exited(2, 1))
    ends = (exited(1, 0), *others) if ended else (*others, exited(1, 0))
    rig.show(Limits(3), READY, *map(started, range(3)), *ends, gone())
    told = "rank 1 has ended with 0, and the others have lost it"
    assert rig.noted[-1]["culprit"] == (told if ended else None)
    assert rig.noted[-1]["culprit_ranks"] == ([1] if ended else [])
    assert rig.said[0].startswith(told) is ended


ENDED = Culprit((1,), "rank 1 has ended before all_reduce #7", lasting=True, kind="ended")


@pytest.mark.parametrize(
    ("tail", "scene", "said"),
    [
        (LOST, Scene(0, (), ENDED), f"{ENDED.sentence} (rank 0 exited with code 1)"),
        (LOST, Scene(0, ()), "first to fail: rank 0 exited with code 1"),
        (LOST, NOT_ASKED, "first to fail: rank 0 exited with code 1"),
        (("the last words",), Scene(0, (), ENDED), "rank 0 exited with code 1"),
    ],
)
def test_the_line_of_a_failure_names_the_culprit_if_it_is_known(
    tmp_path: Path, tail: tuple[str, ...], scene: Scene, said: str
) -> None:
    """Who fails first is not accused where it may be a victim; how the others end shows more."""
    rig = Rig(tmp_path)
    rig.tail[:], rig.scene = tail, scene
    rig.show(Limits(3), READY, *map(started, range(3)), exited(1, 0), exited(0, 1))
    assert f"{said}; stopping the other 1 worker, grace 5 s" in rig.reasons
    assert rig.asked == [False] and rig.noted == []


@pytest.mark.parametrize("code", [1, -15])
def test_a_rank_that_had_raised_is_named_before_it_has_ended(tmp_path: Path, code: int) -> None:
    """Its interpreter takes its time, so that another one, which has lost it, comes first."""
    rig = Rig(tmp_path)
    tails = {0: list(LOST), 1: [*LOST[:2], "ValueError: boom"]}
    rig.pump.tail = lambda rank, *_: tails[rank]
    rig.scene = Scene(0, (), leaving=(1,))
    ends = (exited(0, 1), exited(1, code, stopped=True), gone())
    rig.show(Limits(2), READY, started(0), started(1), *ends)
    told = "rank 1 failed at t.py:1: ValueError: boom"
    line = f"{told} (rank 0 exited with code 1); stopping the other 1 worker, grace 5 s"
    assert line in rig.reasons
    assert rig.noted[-1]["culprit"] == told
    assert rig.noted[-1]["stopped"][0]["exitcode"] == code


def test_the_first_ones_error_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the line of its failure, also where it has to be known whether other nodes are asked."""
    read: list[object] = []
    monkeypatch.setattr(errorfile, "read", read.append)
    rig = Rig(tmp_path)
    rig.group.error_file = lambda *_: "error.json"
    rig.show(Limits(2, meets=True), *RUNS, exited(0, 1))
    assert [one for one in read if one] == ["error.json"]


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_of_another_node_has_ended(tmp_path: Path, known: bool) -> None:
    """The others' agents say so, where the first has lost a connection: here ranks 3 and 4 run."""
    rig = Rig(tmp_path)
    rig.tail[:] = LOST
    failed = frozenset((0, 1) if known else ())
    rig.scene = Scene(0, (), ended=(2,), failed=failed, seen=failed | {2})
    history = (*RUNS, exited(0, 1), seen(ENDING), exited(1, -15, stopped=True), gone())
    rig.show(Limits(2, meets=True), *history)
    assert rig.asked == [True]
    assert rig.noted[-1]["culprit_ranks"] == ([2] if known else [])


@pytest.mark.parametrize(("named", "culprit"), [(True, [1]), (False, [])])
def test_of_a_hang_those_are_guilty_that_are_named(
    tmp_path: Path, named: bool, culprit: list[int]
) -> None:
    """Where nobody is, all ranks are of the hang."""
    rig = Rig(tmp_path)
    ranks = (1,) if named else (0, 1)
    hang = events.HangSeen(ranks, "it hangs", "collectives", named, "so it is", round=0)
    ends = [exited(rank, -15, stopped=True) for rank in range(2)]
    taken = events.StacksTaken(0)
    rig.show(Limits(2), READY, started(0), started(1), hang, taken, *ends, gone())
    found = rig.noted[-1]
    assert (found["culprit"], found["culprit_ranks"]) == ("so it is", culprit)
    assert found["hang"]["ranks"] == list(ranks)


@pytest.mark.parametrize("event", [events.DeadlinePassed(), started(0)])
def test_a_round_that_runs_has_no_report(tmp_path: Path, event: events.Event) -> None:
    rig = Rig(tmp_path)
    rig.show(Limits(2), READY, event)
    assert rig.said == [] and rig.noted == []
