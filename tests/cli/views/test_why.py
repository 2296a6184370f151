"""``elaunch why`` and ``elaunch explain``: the card from the run directory, whatever is in it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.failure.causes import TEXTS
from elaunch.agent.failure.explain import CAUSES, sentence
from elaunch.agent.failure.report import render
from elaunch.agent.failure.verdict import build
from elaunch.cli import execute
from elaunch.runs import directory
from elaunch.runs.directory import KEPT_REPORTS, RunDir
from elaunch.runs.record import first_record, new_round
from tests.agent.histories import left

TAIL = ("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'einops'")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the runs of a test in a directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no other test's runs


def run_of(run_id: str = "r1", state: str = "FAILED", **fields: Any) -> RunDir:
    """Make the directory of a run with this record."""
    run = directory.create(run_id, os.environ)
    record = first_record(run_id, run_id, run.path) | {"state": state} | fields
    run.write_state(record)  # type: ignore[arg-type]
    return run


def failed(run: RunDir, number: int = 0, rank: int = 1) -> None:
    """Write the report of a failed round as the agent does."""
    made = build("t.py", "node0", number, [left(rank, 1, 17e8, tail=TAIL)], rank)
    run.report(number, "json").write_text(json.dumps(made.to_dict()))
    run.report(number, "txt").write_text(render(made))


def why(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    """Run ``elaunch why`` and return what it prints, or its error."""
    assert execute(["why", *args]) == code
    out, err = capsys.readouterr()
    return err if code else out


def document(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    """Return what ``elaunch why --json`` prints."""
    found: dict[str, Any] = json.loads(why(capsys, "--json", *args))
    return found


def test_the_newest_failed_round(capsys: pytest.CaptureFixture[str]) -> None:
    """How the run stands, the report without torchrun's table, the rounds before."""
    run = run_of(exit_code=1, reason="rank 1 exited with code 1; --max-restarts is 0")
    failed(run, 0, rank=0)
    failed(run, 12)
    text = why(capsys)
    assert text.startswith("r1: FAILED: rank 1 exited with code 1; --max-restarts is 0\n(read at ")
    assert "rank 1 (local_rank 1, pid 4001) on host node0 exited with code 1" in text
    assert "(elaunch explain E-IMPORT)" in text and "ChildFailedError" not in text
    assert text.endswith(f"\n  round 0: rank 0 failed: {TAIL[-1]} (E-IMPORT)\n")
    assert "round 12: rank 1" in why(capsys, "r1", "--round", "0")
    found = document(capsys, "r1")
    assert (found["round"], found["code"], found["problem"]) == (12, "E-IMPORT", None)
    assert found["card"]["first"]["message"] == TAIL[-1]


@pytest.mark.slow
def test_rounds_that_no_failure_here_has_begun(capsys: pytest.CaptureFixture[str]) -> None:
    """A node was lost, or joined: there is no card, but a reason; also beside a card."""
    lost = "node node2 (10.0.0.2) was lost: no heartbeat for 3 s; going on with 1 node, 8 workers"
    reasons = ["first start", lost, "rank 1 exited with code 1; restart 1 of 3", "node2 joins"]
    history = [new_round(number, reason) for number, reason in enumerate(reasons)]
    run = run_of(state="RUNNING", exit_code=None, history=history[:2])
    assert "No round has failed on this node.\n\nRounds before which none failed" in why(capsys)
    assert why(capsys).endswith(f"and why each began:\n  round 1: {lost}\n")
    failed(run, 1)
    run.write_state(run.read_state() | {"history": history})  # type: ignore[arg-type]
    assert why(capsys).endswith(f"began:\n  round 3: node2 joins\n  round 1: {lost}\n")
    assert document(capsys)["began"][0] == {"round": 3, "reason": "node2 joins"}


@pytest.mark.slow
def test_it_is_shown_while_the_job_runs_and_after_its_agent_was_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run directory has it in any case."""
    run = run_of(state="RUNNING")
    failed(run)
    assert "r1: RUNNING" in why(capsys) and "E-IMPORT" in why(capsys)
    record = first_record("r1", "r1", run.path)
    record["state"], record["agent"]["start_ticks"] = "RUNNING", 1
    run.write_state(record)
    text = why(capsys)
    assert "r1: LOST: the agent" in text and "E-IMPORT" in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "failure-0.json is empty"),
        ('{"schema": 1, "fir', "failure-0.json is not valid JSON"),
        ("[1]", "failure-0.json holds no JSON object"),
        ("[" * 100_000, "failure-0.json is not valid JSON"),
        (None, "failure-0.json: No such file or directory"),
        ("fifo", "not a regular file: failure-0.json"),
    ],
)
def test_a_torn_or_hostile_report(
    content: str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence says what is wrong with it; what people read is still shown."""
    run = run_of()
    failed(run)
    path = run.report(0, "json")
    path.unlink()
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(content)
    text = why(capsys)
    assert f"({problem}" in text and "rank 1 (local_rank 1, pid 4001)" in text
    assert document(capsys)["problem"].startswith(problem)


def test_a_report_that_the_disk_did_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    """The record has the last failure, too: it is no run in which no round has failed."""
    run = run_of(exit_code=1)
    failed(run, 3)
    record = run.read_state()
    record["failure"] = json.loads(run.report(3, "json").read_text())
    run.write_state(record)
    for suffix in ("json", "txt"):
        run.report(3, suffix).unlink()
    text = why(capsys)
    assert "rank 1 (local_rank 1, pid 4001) on node0 exited with code 1" in text
    assert "its report is not there" in text and "No round has failed" not in text
    found = document(capsys, "--round", "3")
    assert (found["round"], found["code"]) == (3, "E-IMPORT")
    failed(run, 3)
    assert "is not there" not in why(capsys)


def test_hostile_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes are written out; deep nesting is refused; other types are no traceback."""
    run = run_of(job_failure={"round": [], "text": "\x1b[31mred"})
    run.report(3, "txt").write_text("\x1b]0;title\x07gone")
    run.report(3, "json").write_text('{"code": {"a": 1}, "summary": 7, "follows": "x"}')
    run.report(2, "json").write_text('{"code": ["\\u001b"], "summary": {"a": "\\u001b[2J"}}')
    text = why(capsys)
    assert "\x1b" not in text and "\\x1b]0;title" in text
    assert document(capsys)["card"]["summary"] == 7
    run.report(3, "json").write_text('{"a":' * 900 + "1" + "}" * 900)
    done = execute(["why", "--json"])
    assert done in (0, 73) and "Traceback" not in capsys.readouterr().err


def test_a_failure_on_another_node(capsys: pytest.CaptureFixture[str]) -> None:
    """It comes first, unless a later round failed here."""
    run = run_of(job_failure={"round": 1, "rank": 9, "text": "rank 9 on node2 exited"})
    failed(run, 0)
    text = why(capsys)
    assert text.index("another node:\nrank 9 on node2 exited") < text.index("rank 1 (local_rank 1")
    failed(run, 2)
    assert "another node" not in why(capsys)


def test_a_job_that_ended_without_a_failed_round(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of the command is explained; of one that went well there is nothing to say."""
    run_of("few", exit_code=72, reason="1 of 2 nodes after 600 s")
    assert "E-TOO-FEW-NODES" in why(capsys, "few")
    assert document(capsys, "few")["code"] == "E-TOO-FEW-NODES"
    run_of("stuck", exit_code=69, reason="node2 (10.0.0.2) did not start round 0 in 600 s")
    assert "E-NODE-STUCK" in why(capsys, "stuck")  # the store is well
    run_of("lost", exit_code=69, reason="lost the store, etcd at e1:2379: no answer for 30 s")
    assert "E-STORE\n" in why(capsys, "lost")
    run_of("port", exit_code=2, code="E-PORT-IN-USE")  # more exact than the exit code
    assert "E-PORT-IN-USE" in why(capsys, "port")
    assert document(capsys, "port")["code"] == "E-PORT-IN-USE"
    run_of("well", "COMPLETED", exit_code=0)
    assert "No round has failed" in why(capsys, "well")


def test_what_cannot_be_checked_from_here(capsys: pytest.CaptureFixture[str]) -> None:
    """The run of another host that shares the directory; what it wrote may be old."""
    agent = {**first_record("r1", "r1", Path("/r"))["agent"], "host": "node7"}
    run_of(state="RUNNING", reason="first start", agent=agent)
    first, read = why(capsys).splitlines()[:2]
    assert first == "r1: RUNNING (on node7; not checked from here): first start"
    assert ", written " in read and read.endswith(" ago)")


def test_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors name what there is."""
    assert "no run is recorded" in why(capsys, code=2)
    run = run_of()
    assert "no round has failed" in why(capsys, "--round", "1", code=2)
    failed(run, 0)
    assert "those that have: 0" in why(capsys, "--round", "1", code=2)
    assert "the nearest: r1" in why(capsys, "r11", code=2)


def test_old_reports_go() -> None:
    """A job of very many rounds keeps the newest."""
    run = run_of()
    for number in range(KEPT_REPORTS + 3):
        run.report(number, "json").touch()
        run.report(number, "txt").touch()
    run.drop_reports()
    assert run.reports() == list(range(KEPT_REPORTS + 2, 2, -1))
    assert len(list(run.path.glob("failure-*"))) == 2 * KEPT_REPORTS


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """A part of the page, in any spelling of the code; all codes without one."""
    for code in ("E-SHM-FULL", "e-shm-full", "shm-full"):
        assert execute(["explain", code]) == 0
        out = capsys.readouterr().out
        assert out.startswith("E-SHM-FULL\n") and "--shm-size" in out
        assert "*" not in out.partition("Seen by")[0] and "`" not in out
    assert execute(["explain"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == list(CAUSES)


@pytest.mark.parametrize("code", ["E-SHMFULL", "nothing like it", "", "x" * 100_000, "\x1b[2J"])
def test_an_unknown_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest ones are named."""
    assert execute(["explain", code]) == 2
    out, err = capsys.readouterr()
    assert not out and "no code" in err and len(err) < 1000 and "\x1b" not in err
    if code == "E-SHMFULL":
        assert "the nearest: E-SHM-FULL" in err


def test_the_catalogue_is_well_formed() -> None:
    """Each code once, a sentence each."""
    rows = [cause for causes in TEXTS.values() for cause in causes]
    assert len({cause.code for cause in rows}) == len(rows)
    assert all(sentence(cause).endswith(".") for cause in CAUSES.values())
