"""elaunch.views.read.RunReader: workers and checkpoints of played runs."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path

import pytest

from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage
from elaunch.errors import RunDirError
from elaunch.runs.directory import RunDir, create
from elaunch.runs.identity import worker_is_alive
from elaunch.runs.job import JobDocument
from elaunch.views.json import listed, one_run
from elaunch.views.page import run_page
from elaunch.views.read import RunReader, read_all
from tests.launching import freeze, wait_until
from tests.runs.test_verdict import ended
from tests.views.conftest import Play
from tests.views.playing import final


def take(run: RunDir) -> JobDocument:
    """Read a run once."""
    return RunReader(run).read()


def save(path: Path, age_s: float) -> None:
    """Write what looks like a file of torch.save, changed ``age_s`` seconds ago."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", "x")
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))


def test_running_workers_are_measured(play: Play) -> None:
    reader = RunReader(play(2).run)
    view = reader.read()
    assert [worker.state for worker in view.workers] == ["RUNNING", "RUNNING"]
    for worker in view.workers:
        assert worker.usage is not None
        assert worker.usage.rss > 1 << 20
        assert worker.usage.threads == 1
    assert all(worker.usage for worker in reader.read().workers)


def test_workers_of_a_killed_agent_are_gone(play: Play) -> None:
    agent = play(2)
    agent.kill()
    workers = agent.record()["workers"]
    wait_until(lambda: not any(worker_is_alive(worker) for worker in workers), 30)
    view = take(agent.run)
    assert view.state == "LOST"
    assert [(worker.state, worker.usage) for worker in view.workers] == [("GONE", None)] * 2
    assert view.reason is not None
    assert view.reason.endswith("its workers were ended with it")


@pytest.mark.slow
def test_a_worker_that_ended_while_its_agent_was_suspended_is_gone(play: Play) -> None:
    """The record still has it running; what it says is not newer than the record."""
    agent = play(2)
    timing = {**ended(3.0)["timing"], "reports": "steps"}  # type: ignore[dict-item]
    agent.write(timing=timing)
    dead = agent.record()["workers"][0]
    freeze(agent.process.pid)
    os.kill(dead["pid"], signal.SIGKILL)
    wait_until(lambda: not worker_is_alive(dead), 30)
    view = take(agent.run)
    assert [worker.state for worker in view.workers] == ["GONE", "RUNNING"]
    document = one_run(view)
    assert agent.run.state_file.stat().st_mtime == document["written_at"] < document["read_at"]
    shown = " ".join(str(part) for part in run_page(view))
    assert "as of" in shown and "the record is not newer" in shown and "is train" in shown
    assert "advice" not in shown


def test_workers_that_ended_keep_their_exits(play: Play) -> None:
    agent = play(2)
    agent.end(**final("COMPLETED", agent.record(), exit_code=0))
    view = take(agent.run)
    assert [(w.state, w.record["exit"], w.usage) for w in view.workers] == [
        ("SUCCEEDED", "exit code 0", None)
    ] * 2


def test_workers_that_an_aborted_agent_left_in_its_record_are_gone(play: Play) -> None:
    agent = play(1)
    agent.end(state="FAILED", ended_at=agent.record()["started_at"] + 1)
    assert [worker.state for worker in take(agent.run).workers] == ["GONE"]


def test_the_newest_checkpoint_is_found_live(play: Play, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    resumed = {"path": str(root / "step_20.pt"), "step": 20, "format": "torch.save"}
    agent = play(0, checkpoint_dir=str(root), checkpoint_glob="step_*.pt", checkpoint=resumed)
    assert take(agent.run).latest is None
    save(root / "step_20.pt", 90)
    save(root / "step_40.pt", 30)
    latest = take(agent.run).latest
    assert latest is not None
    assert (latest.path, latest.step) == (str(root / "step_40.pt"), 40)
    assert latest.age_s == pytest.approx(30, abs=10)
    (root / "step_60.pt").write_bytes(b"PK torn")
    view = take(agent.run)
    assert view.latest is not None and view.latest.step == 40
    assert view.latest_note is not None and "skipped step_60.pt" in view.latest_note


@pytest.mark.slow
def test_the_look_at_a_checkpoint_of_elaunchs_own_is_cheap(play: Play, tmp_path: Path) -> None:
    """Sizes are compared, contents not read; a URL has its newest shown, too."""
    agent = play(0, checkpoint_dir=str(tmp_path / "c"))
    for place in (tmp_path / "c", f"file://{tmp_path / 'u'}"):
        storage = open_storage(place)
        storage.prepare("digits", given=True)
        for step in (10, 20):
            stage, part = (
                Stage(step, 0, f"u{step}"),
                ShardHeader(0, 1, "digits", {"steps_completed": step}),
            )
            storage.write_shard(stage, part, [Image("model.pt", [b"12345678"])])
            storage.commit(stage, lambda: None)
    newest = tmp_path / "c" / "step-00000020.r0" / "model.pt"
    newest.write_bytes(b"1234567X")
    latest = take(agent.run).latest
    assert latest is not None and latest.step == 20
    newest.write_bytes(b"1234")
    view = take(agent.run)
    assert view.latest is not None and view.latest.step == 10
    assert view.latest_note is not None and "truncated: model.pt" in view.latest_note
    at_url = take(play(0, checkpoint_dir=f"file://{tmp_path / 'u'}").run).latest
    assert at_url is not None and (at_url.step, at_url.format) == (20, "elaunch")


def test_a_checkpoint_directory_that_cannot_be_searched(play: Play, tmp_path: Path) -> None:
    view = take(play(0, checkpoint_dir=str(tmp_path), checkpoint_glob="../*").run)
    assert view.latest is None
    assert view.latest_note is not None and "cannot be looked for" in view.latest_note


def test_nothing_to_read(environ: dict[str, str]) -> None:
    run = create("job", environ)
    with pytest.raises(RunDirError, match="nothing was recorded yet"):
        run_page(take(run))


def test_the_documents_are_json_and_keep_the_record(play: Play, environ: dict[str, str]) -> None:
    agent = play(1)
    record = agent.record()
    document = json.loads(json.dumps(one_run(take(agent.run))))
    assert record.keys() <= document.keys()
    assert document["recorded_state"] == document["state"] == "RUNNING"
    assert document["agent"]["condition"] == "answers"
    assert document["latest_checkpoint"] is None
    (worker,) = document["workers"]
    assert record["workers"][0].keys() <= worker.keys()
    assert worker["rss_bytes"] > 0 and worker["tree_rss_bytes"] > 0 and worker["threads"] == 1
    assert worker["cpu_percent"] >= 0 and worker["tree_cpu_percent"] >= 0
    agent.kill()
    torn = create("torn", environ)
    torn.state_file.write_text("{")
    entries = {entry["run_id"]: entry for entry in listed(read_all(environ))}
    assert entries["train-3fa2c1"]["state"] == "LOST"
    assert entries["train-3fa2c1"]["recorded_state"] == "RUNNING"
    assert entries["torn"]["state"] == "UNREADABLE"
    assert entries["torn"]["started_at"] is None
    assert entries["torn"].keys() == entries["train-3fa2c1"].keys()
