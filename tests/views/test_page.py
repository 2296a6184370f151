"""elaunch.views.layout and runpage: what is shown for one run and for several."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from rich.console import Console

from elaunch.runs.directory import RunDir
from elaunch.runs.identity import SUSPENDED
from elaunch.runs.job import (
    AgentState,
    JobDocument,
    LatestCheckpoint,
    NodeSeen,
    WorkerSeen,
    progress_of,
    round_nodes,
)
from elaunch.runs.record import AwaitedRecord, Record
from elaunch.runs.usage import Usage
from elaunch.views.json import one_run
from elaunch.views.layout import Table, plain, styled
from elaunch.views.page import list_page, parts_of, run_page
from tests.views.played_agent import new_record

NOW = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
FAILURE = {
    "schema": 1,
    "host": "node0",
    "round": 2,
    "seconds_into_round": 4.23,
    "first": {
        "rank": 1,
        "local_rank": 1,
        "pid": 4711,
        "ended": "exited with code 7",
        "message": "RuntimeError: boom\nsecond line \x1b[31m",
        "explanation": "It ran out of luck.",
    },
}


def viewed(
    path: Path, state: str = "RUNNING", agent: AgentState = "answers", **changes: Any
) -> JobDocument:
    """Return a view of a run of two workers as it might be taken at NOW."""
    run = RunDir(path)
    changes = {"started_at": NOW - 192, "reason": None} | changes
    record = cast("Record", new_record(run, "train-3fa2c1", [101, 102]) | changes)
    record["agent"] |= {"pid": 99, "host": "node0", "user": "ada"}
    used = Usage(98.7, 612 << 20, 9, 150.0, 1288 << 20)
    job = JobDocument(run, record, state, record["reason"], agent, NOW, nodes=round_nodes(record))
    steps = progress_of(record, job.live)
    return replace(
        job,
        workers=tuple(
            WorkerSeen(one, one["state"], used if job.live else None, steps.get(one["rank"]))
            for one in record["workers"]
        ),
    )


def drawn(page: Any, width: int) -> str:
    """Return what a terminal of ``width`` columns without colours shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(styled(page, width))
    return file.getvalue()


def test_the_rank_that_comes_last(tmp_path: Path) -> None:
    """It needs attention where the others wait for it, as long as the run lives."""
    lateness = {
        "collectives": 60,
        "until": NOW,
        "seconds": 12.4,
        "held": 0.21,
        "slow": 2,
        "ranks": [{"rank": 2, "last": 46, "behind_s": 0.021}],
        "why": "",
    }
    told = (
        "rank 2 arrived last in 46 of 60 collectives, 21 ms behind; the others waited 21 % of 12 s"
    )
    lines = plain(run_page(viewed(tmp_path, lateness=lateness))).splitlines()
    assert f"  attention: {told}" in lines and f"  last        {told}" in lines
    for changes in ({"state": "COMPLETED"}, {"lateness": lateness | {"slow": None}}):
        text = plain(run_page(viewed(tmp_path, **{"lateness": lateness, **changes})))
        assert "attention" not in text and f"  last        {told}" in text


def test_the_rank_for_which_the_others_wait(tmp_path: Path) -> None:
    """What is written there may be a hostile name of a collective."""
    found = {"ranks": [1], "text": "rank 1 has not entered x\x1b #7"}
    lines = plain(run_page(viewed(tmp_path, awaited=found))).splitlines()
    assert "  attention: rank 1 has not entered x\\x1b #7" in lines


def test_another_nodes_ranks_wait(tmp_path: Path) -> None:
    """The rank for which they wait is of this node, say, on which none does."""
    found: AwaitedRecord = {"ranks": [1], "text": "rank 1 has not entered all_reduce #7"}
    view = viewed(tmp_path)
    view = replace(view, nodes=(*view.nodes, NodeSeen(1, "node2", 2, 2, awaited=found)))
    assert "  attention: rank 1 has not entered all_reduce #7" in plain(run_page(view)).splitlines()
    assert one_run(view)["awaited"] == found and "awaited" not in one_run(viewed(tmp_path))


def test_a_victim_is_said_to_be_one(tmp_path: Path) -> None:
    """Of one whose culprit is known nobody is told to look for it."""
    first = parts_of(FAILURE["first"]) | {"explanation": "Look for another rank."}
    for accused, told in (([0], "Rank 1 is a victim of that."), ([], "Look for another rank.")):
        failure = {**FAILURE, "first": first, "likely_victim": True, "culprit_ranks": accused}
        text = plain(run_page(viewed(tmp_path, "FAILED", "ended", failure=failure, round=2)))
        assert f"  {told}" in text.splitlines()


def test_a_running_run(tmp_path: Path) -> None:
    view = viewed(
        tmp_path,
        reason="rank 1 was killed by SIGKILL",
        round=1,
        restarts={"used": 1, "without_progress": 1, "max": 3, "budget": "progress"},
        checkpoint_dir="/c",
        checkpoint={"path": "/c/step_20.pt", "step": 20, "format": "torch.save"},
    )
    text = plain(run_page(view))
    assert "  restarts    1 of 3 used\n" in text
    view = replace(view, latest=LatestCheckpoint("/c/step_40.pt", 40, "torch.save", 12.3))
    text = plain(run_page(view))
    lines = text.splitlines()
    assert lines[0] == "train-3fa2c1  RUNNING  for 3m 12s"
    assert lines[1] == "  rank 1 was killed by SIGKILL"
    assert "  restarts    0 of 3 used; 1 in all" in lines
    assert "  checkpoint  step 40, 12 s old (torch.save): /c/step_40.pt" in lines
    assert "  resumed     round 1 from step 20: /c/step_20.pt" in lines
    assert "rank  local_rank  pid  state    CPU %      RSS  tree RSS  threads" in lines
    assert "   0           0  101  RUNNING     99  612 MiB  1.26 GiB        9" in lines
    assert lines == [line.rstrip() for line in lines]


def test_many_ranks_of_one_node(tmp_path: Path) -> None:
    """They have a row each, and no other node is spoken of."""
    view = viewed(tmp_path)
    shown = plain(run_page(replace(view, workers=65 * view.workers[:1])))
    assert shown.count(" RUNNING ") >= 65 and "other nodes" not in shown


def test_the_cause_of_a_failure_comes_first(tmp_path: Path) -> None:
    (tmp_path / "failure-2.txt").touch()
    view = viewed(
        tmp_path,
        "FAILED",
        "ended",
        round=2,
        reason="rank 1 exited with code 7; no restart is left",
        exit_code=7,
        ended_at=NOW - 2,
        failure=FAILURE,
    )
    lines = plain(run_page(view)).splitlines()
    assert lines[:6] == [
        "train-3fa2c1  FAILED  exit code 7",
        "  rank 1 exited with code 7; no restart is left",
        "  rank 1 (local_rank 1, pid 4711) on node0 exited with code 7, 4.2 s into round 2",
        "  RuntimeError: boom",
        "  second line \\x1b[31m",
        "  It ran out of luck.",
    ]
    assert f"  report      {tmp_path}/failure-2.txt" in lines


def test_a_failure_of_an_earlier_round_is_not_the_cause(tmp_path: Path) -> None:
    view = viewed(tmp_path, "FAILED", "ended", round=3, reason="out of luck", failure=FAILURE)
    assert "boom" not in plain(run_page(view))


ENDED = {"rank": 1, "local_rank": 1, "pid": 7, "ended": "exited"}


@pytest.mark.parametrize(
    "failure",
    [
        {},
        {"first": None},
        {"first": {"rank": 1}},
        {"round": 0},
        {"round": 0, "first": "x"},
        {"round": 0, "hang": ["x"]},
        {"round": 0, "hang": {"stacks": {"main": "x"}}},
        {
            "round": 0,
            "hang": {"stacks": ["x", {"main": "x", "ranks": [0]}, {"main": [], "ranks": 1}]},
        },
    ],
)
def test_a_report_of_another_schema_does_no_harm(tmp_path: Path, failure: dict[str, Any]) -> None:
    view = viewed(tmp_path, "FAILED", "ended", reason="rank 1 failed", failure=failure)
    assert "\n  rank 1 failed\n\n" in plain(run_page(view))


def test_a_report_with_something_else_in_a_field(tmp_path: Path) -> None:
    """The rest of it is shown."""
    failure = {"round": 0, "host": "h", "first": ENDED, "seconds_into_round": [1]}
    view = viewed(tmp_path, "FAILED", "ended", reason="r", failure=failure)
    assert "\n  rank 1 (local_rank 1, pid 7) on h exited, in round 0\n" in plain(run_page(view))


@pytest.mark.parametrize(
    ("agent", "note"),
    [
        ("silent", "(agent does not answer)"),
        ("stopped", f"({SUSPENDED.format(pid=99)})"),
        ("elsewhere", "(on node0; not checked from here)"),
    ],
)
def test_doubts_about_the_agent_are_in_the_title(
    tmp_path: Path, agent: AgentState, note: str
) -> None:
    title = plain(run_page(viewed(tmp_path, agent=agent))).splitlines()[0]
    assert title == f"train-3fa2c1  RUNNING  {note} for 3m 12s"


def progress(source: str, *workers: dict[str, Any], **limit: Any) -> dict[str, Any]:
    """Return what an agent tells of progress."""
    known = {"step": None, "progress": None, "status": "", "section": "", "doing": ""}
    rows = [
        {"rank": rank, "local_rank": rank, **known, "silent_s": None, **worker}
        for rank, worker in enumerate(workers)
    ]
    return {"source": source, "limit_s": None, "learning": False, "workers": rows, **limit}


def test_how_far_the_workers_are(tmp_path: Path) -> None:
    """By the script: steps, percent and status; by rank also what it does."""
    told = progress(
        "script",
        {"step": 41, "progress": 0.37, "status": "warming up", "silent_s": 0.4},
        {"step": 42, "section": "eval", "doing": "barrier #3", "silent_s": 12.0},
        limit_s=600.0,
    )
    lines = plain(run_page(viewed(tmp_path, progress=told))).splitlines()
    assert "  progress      41 to 42 steps, 37 % (by the script)" in lines
    assert "  status        warming up" in lines
    assert "  hang timeout  10m 00s" in lines
    (row,) = (line for line in lines if line.startswith("   1"))
    assert row.endswith("42  in section eval, 12 s ago, last call barrier #3")


@pytest.mark.parametrize(
    ("source", "worker", "text"),
    [
        ("log lines", {"step": 1}, "1 step (by log lines)"),
        ("checkpoints", {"step": 400}, "400 steps (by checkpoints)"),
        ("CPU time", {}, "no step is known; watched by CPU time"),  # of the version before
        ("script", {}, "none is known: the script has reported nothing yet"),
        ("script", {"silent_s": 1.0}, "no step is known; watched by the script"),
        ("log lines", {}, "none is known: no line has matched --progress-regex yet"),
    ],
)
def test_which_source_is_in_use(
    tmp_path: Path, source: str, worker: dict[str, Any], text: str
) -> None:
    page = plain(run_page(viewed(tmp_path, progress=progress(source, worker, worker))))
    assert f"  progress    {text}\n" in page


SAVES = {
    "step": None,
    "committed_at": None,
    "seconds": 0.0,
    "saving": None,
    "problem": "",
    "commits": 0,
}
DONE = {"step": 120, "committed_at": NOW - 12.0, "seconds": 0.84, "commits": 9}


@pytest.mark.parametrize(
    ("state", "saves", "texts"),
    [
        ("RUNNING", {}, ["none yet"]),
        ("RUNNING", DONE, ["step 120 committed 12 s ago, in 0.84 s, 9 in all"]),
        (
            "RUNNING",
            DONE | {"saving": 130},
            ["step 120 committed 12 s ago, in 0.84 s, 9 in all, step 130 is being written"],
        ),
        ("LOST", {"saving": 130}, ["one was unfinished"]),
        ("RUNNING", {"problem": "rank 1: it is full"}, ["none yet", "rank 1: it is full"]),
    ],
)
def test_what_the_agent_writes(
    tmp_path: Path, state: str, saves: dict[str, Any], texts: list[str]
) -> None:
    """The newest commit, what is on its way, what came to nothing."""
    agent: AgentState = "answers" if state == "RUNNING" else "gone"
    lines = plain(run_page(viewed(tmp_path, state, agent, saves=SAVES | saves))).splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("  saves "))
    shown = [line.removeprefix("  saves").strip() for line in lines[at : at + len(texts)]]
    assert shown == texts


def test_another_node_has_the_count_of_saves(tmp_path: Path) -> None:
    """Rank 0 commits, and its agent knows."""
    page = plain(run_page(viewed(tmp_path, saves=SAVES, node_rank=1)))
    assert "  saves       counted on node 0\n" in page


def test_a_limit_that_is_being_learned(tmp_path: Path) -> None:
    view = viewed(tmp_path, progress=progress("script", {"step": 3}, learning=True))
    told = "auto: 5m 00s for a rank that others wait for; the run's own pauses are not known yet"
    assert f"  hang timeout  {told}\n" in plain(run_page(view))


def test_how_far_a_run_was_that_is_over(tmp_path: Path) -> None:
    """How long ago a worker said anything is of no interest then."""
    told = progress("script", {"step": 7, "silent_s": 3.0}, limit_s=60.0)
    view = viewed(tmp_path, "COMPLETED", "ended", exit_code=0, ended_at=NOW, progress=told)
    page = plain(run_page(view))
    assert "7 steps (by the script)" in page
    assert "ago" not in page and "hang timeout" not in page


def test_where_the_workers_of_a_hung_run_were(tmp_path: Path) -> None:
    """In place of how elaunch has ended them."""
    stacks = [
        {"ranks": [1], "main": ['File "d.py", line 8 in read', 'File "t.py", line 3 in step']},
        {"ranks": [0, 2], "main": ['File "t.py", line 9 in barrier']},
    ]
    hang = {"hang": {"stacks": stacks}}
    reason = "rank 1 has made no progress for 60 s"
    view = viewed(tmp_path, "FAILED", "ended", round=2, reason=reason, failure=FAILURE | hang)
    assert plain(run_page(view)).splitlines()[1:4] == [
        f"  {reason}",
        '  rank 1: File "d.py", line 8 in read',
        '  ranks 0, 2: File "t.py", line 9 in barrier',
    ]


def test_rounds_are_shown_from_the_second_on_and_the_last_ten(tmp_path: Path) -> None:
    def rounds(count: int) -> list[dict[str, Any]]:
        return [
            {
                "round": number,
                "reason": f"because {number}" if number else None,
                "started_at": NOW - 100 + number,
                "ended_at": None if number == count - 1 else NOW - 99 + number,
                "recovery_s": 0.0517 if number else None,
                "resumed_step": 20 if number else None,
            }
            for number in range(count)
        ]

    assert "recovery" not in plain(run_page(viewed(tmp_path, history=rounds(1))))
    lines = plain(run_page(viewed(tmp_path, history=rounds(14)))).splitlines()
    shown = [line.split() for line in lines if "because" in line]
    assert [row[0] for row in shown] == [str(number) for number in range(4, 14)]
    assert shown[0] == ["4", "11:58:24", "1.0", "s", "0.052", "s", "20", "because", "4"]
    assert shown[-1][2:4] == ["1m", "27s"]
    document = one_run(viewed(tmp_path, history=rounds(14)))
    assert [entry["duration_s"] for entry in document["history"]][-2:] == [1.0, 87.0]


def test_a_lifetime_budget(tmp_path: Path) -> None:
    restarts = {"used": 2, "without_progress": 1, "max": 3, "budget": "lifetime"}
    assert "  restarts    2 of 3 used\n" in plain(run_page(viewed(tmp_path, restarts=restarts)))


def hosts(count: int) -> list[dict[str, Any]]:
    """Return the nodes of a job as a record has them."""
    return [
        {"name": f"{i:06x}", "host": f"node{i}", "addr": f"10.0.0.{i}", "slots": 2}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({}, []),
        (
            {"node_rank": 1, "nodes": hosts(2), "standby": False},
            ["node        1 of 2", "nodes       node0 (10.0.0.0), node1 (10.0.0.1)"],
        ),
        (
            {"node_rank": 70, "nodes": hosts(9), "node_count": 4096, "standby": False},
            [
                "node        70 of 4096",
                "nodes       "
                + ", ".join(f"node{i} (10.0.0.{i})" for i in range(8))
                + ", and 4088 more",
            ],
        ),
        (
            {"node_rank": None, "nodes": hosts(1), "standby": True},
            ["node        stands by as a spare", "nodes       node0 (10.0.0.0)"],
        ),
        ({"node_rank": None, "nodes": [], "standby": False}, []),
    ],
)
def test_a_node_of_several(tmp_path: Path, fields: dict[str, Any], lines: list[str]) -> None:
    text = plain(run_page(viewed(tmp_path, **fields)))
    assert [line.strip() for line in text.splitlines() if line.startswith("  node")] == lines


def test_a_failure_on_another_node_is_told(tmp_path: Path) -> None:
    failure = {"rank": 9, "exitcode": 7, "text": "RuntimeError: boom\non node2"}
    view = viewed(
        tmp_path, "FAILED", "ended", reason="rank 9 failed", job_failure=failure, nodes=hosts(2)
    )
    assert "\n  rank 9 failed\n  RuntimeError: boom\n  on node2\n" in plain(run_page(view))
    assert "boom" not in plain(run_page(viewed(tmp_path, job_failure=failure)))


def test_newcomers_are_counted(tmp_path: Path) -> None:
    text = plain(run_page(viewed(tmp_path, node_rank=0, nodes=hosts(1), joining=2)))
    assert "  joining     2 more, with the next round\n" in text


def test_many_nodes_are_counted(tmp_path: Path) -> None:
    text = plain(run_page(viewed(tmp_path, node_rank=0, nodes=hosts(20))))
    assert "node7 (10.0.0.7), and 12 more\n" in text and "node8" not in text


def test_a_command_is_shown_so_that_a_shell_takes_it(tmp_path: Path) -> None:
    command = "  command  elaunch run --nproc-per-node 2 train.py --name 'a b'\n"
    assert command in plain(run_page(viewed(tmp_path)))


def test_columns_without_values_are_left_out(tmp_path: Path) -> None:
    tables = [p for p in run_page(viewed(tmp_path, "LOST", "gone")) if isinstance(p, Table)]
    assert [c.name for c in tables[0].columns] == ["rank", "local_rank", "pid", "state"]


def test_the_list(tmp_path: Path) -> None:
    one = viewed(tmp_path / "train-3fa2c1")
    two = viewed(tmp_path / "train-3fa2c1.2", "LOST", "gone", entrypoint="/a/b/long.py")
    torn = JobDocument(RunDir(tmp_path / "torn"), None, "UNREADABLE", "why", "gone", NOW)
    lines = plain(list_page([one, replace(two, agent="gone"), torn], False)).splitlines()
    columns = "run  state  round  restarts  world size  started  ended  duration  name  script"
    assert [re.split("  +", line.rstrip()) for line in lines] == [
        re.split("  +", columns),
        [
            "train-3fa2c1.1",
            "RUNNING",
            "0",
            "0/3",
            "2",
            "11:56:48",
            "-",
            "3m 12s",
            "train",
            "train.py",
        ],
        ["train-3fa2c1.2", "LOST", "0", "0/3", "2", "11:56:48", "-", "-", "train", "long.py"],
        ["torn", "UNREADABLE", *"--------"],
    ]


def test_no_runs() -> None:
    text = plain(list_page([], False))
    assert text == "  No run of this user is recorded on this machine.\n"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    view = viewed(
        tmp_path / ("x" * 90),
        "FAILED",
        "ended",
        reason="rank 1 was killed by SIGKILL; " * 5,
        failure=FAILURE,
        entrypoint="/data/" + "y" * 100,
    )
    for page in (run_page(view), list_page([view] * 3, False)):
        lines = drawn(page, width).splitlines()
        assert max(len(line) for line in lines) <= width


def test_eighty_columns_hold_the_list_and_the_workers_without_folding(tmp_path: Path) -> None:
    view = viewed(tmp_path)
    assert len(drawn(list_page([view], False), 80).splitlines()) == 2
    lines = drawn(run_page(view), 80).splitlines()
    assert "rank local_rank pid state   CPU %     RSS tree RSS threads" in [
        line.rstrip() for line in lines
    ]
    assert "script" in drawn(list_page([view], False), 120)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_is_cut_on_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    """Columns are left out instead, and never what a row is of."""
    view = viewed(tmp_path, "FAILED", "ended")
    record = cast(Record, {**view.known, "run_id": "a-name-of-some-length-3fa2c1"})
    shown = drawn(list_page([replace(view, record=record)], True), width)
    assert "FAILED" in shown and "a-name-o" in shown
    worker = {**record["workers"][0], "pid": 1234567, "exit": "was killed by SIGKILL"}
    workers = (WorkerSeen(cast(Any, worker), "FAILED"),)
    shown = drawn(run_page(replace(view, workers=workers)), width)
    assert "1234567" in shown and "FAILED" in shown.partition("pid")[2] and "SIGKILL" in shown


def test_states_are_coloured_and_text_is_never_markup(tmp_path: Path) -> None:
    view = viewed(tmp_path, "FAILED", "ended", reason="[bold]not markup[/bold]")
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    console.print(styled(run_page(view), 80))
    assert "\x1b[1;31m  FAILED\x1b[0m" in file.getvalue()
    assert "[bold]not markup[/bold]" in file.getvalue()
