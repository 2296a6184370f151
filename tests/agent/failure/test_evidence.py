"""Sorting a round's exits into cause and consequences, and the report as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from elaunch.agent.failure.evidence import Evidence, Failure
from elaunch.agent.failure.report import render
from elaunch.agent.failure.verdict import build, summary
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.endings import exit_code
from tests.agent.histories import checkpoint, left

TRACEBACK = ("Traceback (most recent call last):", '  File "t.py", line 1, in f', "ValueError: b")


def end(rank: int, exitcode: int, at: float = 0.0, stopped: bool = False) -> Failure:
    """Make one worker's end; ``at`` counts from the round's start."""
    return left(
        rank,
        exitcode,
        17e8 + at,
        local_rank=rank % 4,
        stopped=stopped,
        stdout_path=f"/logs/{rank}/stdout.log",
        stderr_path=f"/logs/{rank}/stderr.log",
    )


def test_workers_are_sorted() -> None:
    """By what happened to them, in the order noticed; success is no news."""
    exits = [
        end(6, 0, 1),
        end(5, 7, 12.3),
        end(4, 1, 12.335),
        end(7, -15, 13, stopped=True),
    ]
    report = build("t.py", "h", 2, exits, 1, Evidence(started_at=17e8))
    assert report.first.exit.rank == 5
    assert [f.exit.rank for f in report.victims] == [4]
    assert [f.exit.rank for f in report.stopped] == [7]
    assert report.victims[0].ms_after_first == 35
    assert report.seconds_into_round == pytest.approx(12.3)


def test_stopped_workers_are_in_the_order_of_their_ranks() -> None:
    """Which of them was gone first says nothing."""
    ended = [end(2, 1), *(end(rank, -15, stopped=True) for rank in (3, 0, 1))]
    report = build("t.py", "h", 0, ended, 2)
    assert [f.exit.rank for f in report.stopped] == [0, 1, 3]


def test_stopped_workers_that_exit_0_are_kept_apart_from_success() -> None:
    """One that handled SIGTERM well was still stopped."""
    report = build("t.py", "h", 0, [end(0, 3), end(1, 0, stopped=True), end(2, 0)], 0)
    assert [f.exit.rank for f in report.stopped] == [1]
    assert report.victims == ()


def test_clocks_that_step_back() -> None:
    """No negative times."""
    exits = [end(0, 3, 10), end(1, 3, 5)]
    report = build("t.py", "h", 0, exits, 0, Evidence(started_at=17e8 + 60))
    assert (report.seconds_into_round, report.victims[0].ms_after_first) == (0, 0)


@pytest.mark.parametrize(
    ("exitcode", "code", "text"),
    [
        (7, 7, "rank 1 exited with code 7"),
        (255, 255, "rank 1 exited with code 255"),
        (256, 1, "rank 1 exited with code 256"),
        (0, 1, "rank 1 exited with code 0"),
        (-9, 137, "rank 1 was killed by SIGKILL"),
        (-15, 143, "rank 1 was killed by SIGTERM"),
        (-40, 168, "rank 1 was killed by signal 40"),
    ],
)
def test_exit_code_and_summary(exitcode: int, code: int, text: str) -> None:
    """The command's exit code is the first failed worker's, and never 0."""
    assert exit_code(exitcode) == code
    assert summary(build("t.py", "h", 0, [end(1, exitcode)], 1)) == text


@pytest.mark.parametrize(
    "word", ["DataLoader worker (pid ", "unrecognized arguments: .", "a", "[", "\x1b[0"]
)
def test_a_message_of_a_mebibyte(tmp_path: Path, word: str) -> None:
    """Whatever it consists of, to look for its cause takes no minutes."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": (word * (1 << 20))[: 1 << 20]}))
    began = time.process_time()
    made = build("t.py", "h", 0, [replace(end(0, 1), error_file=str(path))], 0)
    assert made.first.error and not made.first.error.problem
    assert time.process_time() - began < 30


def test_what_a_worker_has_said_on_stdout_only(tmp_path: Path) -> None:
    """Where it has a file, and stderr is empty; it is no cause, unless it is a traceback."""
    path = tmp_path / "stdout.log"
    path.write_text("x\n" * 99_999 + "Address already in use\nE   assert 1 == 2\n1 failed\n")
    silent = replace(end(0, 1), stdout_path=str(path), tail=())
    first = build("t.py", "h", 0, [silent], 0).first
    assert first.traceback[-2:] == ("E   assert 1 == 2", "1 failed")
    assert (first.traceback_from, first.message, first.explanation.code) == ("stdout", "", "")
    shown = render(build("t.py", "h", 0, [silent], 0))
    assert "It wrote nothing to stderr. Last lines of its stdout:\n" in shown
    path.write_text("\n".join(TRACEBACK))
    assert build("t.py", "h", 0, [silent], 0).first.message == "ValueError: b"
    path.unlink()
    assert build("t.py", "h", 0, [silent], 0).first.traceback == ()


def test_error_file_wins_over_stderr(tmp_path: Path) -> None:
    """It is the script's own word."""
    path = tmp_path / "error.json"
    message = {
        "message": "ValueError: file",
        "extraInfo": {"py_callstack": "T\nValueError: file\n"},
    }
    path.write_text(json.dumps({"message": message}))
    exit = replace(end(0, 1), error_file=str(path), tail=TRACEBACK)
    first = build("t.py", "h", 0, [exit], 0).first
    assert (first.message, first.traceback_from) == ("ValueError: file", "error file")
    assert first.traceback == ("T", "ValueError: file")

    path.write_text("{torn")
    first = build("t.py", "h", 0, [exit], 0).first
    assert (first.message, first.traceback_from) == ("ValueError: b", "stderr")
    assert first.traceback == TRACEBACK
    assert first.error and first.error.problem.startswith("error file is corrupt: ")


def test_explanations_use_the_round() -> None:
    """Facts of the machine reach the table of causes."""
    known = Evidence(local_world_size=4, shm_free=1 << 20)
    tail = (*TRACEBACK[:2], "RuntimeError: CUDA error: invalid device ordinal")
    first = build("t.py", "h", 0, [replace(end(5, 1), tail=tail)], 1, known).first
    assert "RANK is 5 here" in first.explanation.text
    assert (
        "/dev/shm has 1 MiB left"
        in build("t", "h", 0, [end(0, -7)], 0, known).first.explanation.text
    )
    oom = build("t", "h", 0, [replace(end(0, -9), oom_kill=True)], 0).first
    assert oom.explanation.text.startswith("Out of memory")


def test_to_dict(tmp_path: Path) -> None:
    """The documented schema; JSON-able; sizes bounded."""
    first = replace(end(1, 1, 2), tail=(*TRACEBACK[:2], *["    f()"] * 900, "ValueError: b"))
    exits = [first, end(0, -9, 2.5), end(2, -15, 3, stopped=True)]
    known = Evidence(started_at=17e8, noticed_monotonic=4.5)
    report = json.loads(json.dumps(build("t.py", "h", 3, exits, 1, known).to_dict()))
    worker = report.pop("first")
    victims, stopped = report.pop("victims"), report.pop("stopped")
    assert report == {
        "schema": 1,
        "name": "t.py",
        "host": "h",
        "round": 3,
        "headline": "rank 1 failed at t.py:1 in f: ValueError: b",
        "summary": "rank 1 exited with code 1",
        "exit_code": 1,
        "seconds_into_round": 2.0,
        "noticed_monotonic": 4.5,
        "explanation": None,
        "likely_victim": False,
        "likelier": None,
        "code": None,
        "culprit": None,
        "culprit_ranks": [],
        "at_step": None,
        "steps_lost": None,
        "follows": None,
        "hang": None,
        "meanwhile": None,
    }
    traceback = worker.pop("traceback").split("\n")
    assert len(traceback) == 200 and "… 704 lines left out, see /logs/1/stderr.log" in traceback
    assert worker == {
        "rank": 1,
        "local_rank": 1,
        "pid": 4001,
        "exitcode": 1,
        "signal": None,
        "ended": "exited with code 1",
        "at": 17e8 + 2,
        "ms_after_first": 0,
        "stopped_by_us": False,
        "oom_kill": False,
        "timer": "",
        "message": "ValueError: b",
        "traceback_from": "stderr",
        "error_file": None,
        "error_file_problem": None,
        "stdout_path": "/logs/1/stdout.log",
        "stderr_path": "/logs/1/stderr.log",
        "explanation": None,
        "code": None,
    }
    assert [(w["rank"], w["signal"], w["ms_after_first"]) for w in victims] == [(0, "SIGKILL", 500)]
    assert "killed from outside" in victims[0]["explanation"]
    assert [(w["rank"], w["signal"], w["explanation"]) for w in stopped] == [(2, "SIGTERM", None)]


def failed(rank: int, exitcode: int, *tail: str, oom_kill: bool = False) -> Failure:
    """Return the end of a worker that has written these lines."""
    return replace(end(rank, exitcode), tail=tail, oom_kill=oom_kill)


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:40312"


@pytest.mark.parametrize(
    ("ends", "known", "headline"),
    [
        ([failed(1, 1, *TRACEBACK)], {}, "rank 1 failed at t.py:1 in f: ValueError: b"),
        ([failed(1, 7)], {}, "rank 1 exited with code 7"),
        (
            [failed(1, -9, oom_kill=True)],
            {},
            "rank 1 was killed by SIGKILL: out of memory",
        ),
        (
            [failed(0, 1, *TRACEBACK[:2], LOST), failed(1, 1, *TRACEBACK)],
            {},
            "rank 1 failed at t.py:1 in f: ValueError: b",
        ),
        (
            [failed(0, 1, *TRACEBACK[:2], LOST)],
            {},
            "rank 0 exited with code 1, which a rank does whose peer was gone before",
        ),
        ([failed(0, 1, *TRACEBACK)], {"culprit": "it was rank 3"}, "it was rank 3"),
        (
            [failed(0, 1, *TRACEBACK[:2], f"ValueError: {'x' * 999}")],
            {},
            f"rank 0 failed at t.py:1 in f: ValueError: {'x' * (299 - 42)}…",
        ),
    ],
    ids=["error", "code", "oom", "likelier", "victim", "culprit", "long"],
)
def test_the_headline_names_who_is_to_blame(
    ends: list[Failure], known: dict[str, str], headline: str
) -> None:
    """And nobody, where the first is likely a victim of a rank that is not known."""
    made = build("t.py", "h", 0, ends, ends[0].exit.local_rank)
    made = replace(made, culprit=Culprit((), known["culprit"])) if known else made
    assert made.headline == headline
    assert made.to_dict()["headline"] == headline


def test_what_follows_and_what_it_costs() -> None:
    """The checkpoint of the next round, and the steps behind it; nothing where it is not known."""
    made = build("t.py", "h", 3, [end(1, 1)], 1, Evidence(at_step=43))
    made = replace(made, culprit=Culprit((1,), "it was rank 1"))
    assert (made.steps_lost, made.to_dict()["follows"]) == (None, None)
    made = replace(made, follows=Round(4, 2, checkpoint=checkpoint(40, "/ck/40.pt")))
    found = made.to_dict()
    assert (found["at_step"], found["steps_lost"], found["culprit"]) == (43, 3, "it was rank 1")
    assert found["culprit_ranks"] == [1]
    assert found["follows"] == {"round": 4, "resumed_step": 40, "checkpoint": "/ck/40.pt"}
    assert render(made).startswith("it was rank 1\nrank 1 (local_rank 1, pid 4001) on host h")
    assert render(made).endswith(
        "\nRound 4 resumes from step 40; 3 steps lost (it was at step 43): /ck/40.pt\n"
    )
    assert replace(made, known=Evidence(at_step=39)).steps_lost is None
    assert replace(made, follows=Round(4, 2)).steps_lost is None


def test_tracebacks_of_many_are_bounded() -> None:
    """The first worker's stays, however many others there are."""
    tail = tuple("x" * 2000 for _ in range(20))
    exits = [
        replace(end(n, 3), exit=events.Exit(0, n, n, n, 3, 0.0), tail=tail) for n in range(100)
    ]
    made = build("t.py", "h", 0, exits, 0)
    assert made.first.traceback and made.victims[0].traceback
    assert not made.victims[-1].traceback
    assert len(json.dumps(made.to_dict())) < 2 << 20
