"""``elaunch profile``: py-spy looks at a real process; what is wrong is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.hangs import stacks
from elaunch.cli import execute
from elaunch.runs.directory import RunDir, create
from elaunch.runs.record import first_record, new_worker

BUSY = "def spins():\n    while True: sum(range(1000))\nprint('up', flush=True)\nspins()\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Yield a run whose rank 3 is a busy process; this process is its agent."""
    home = {"XDG_STATE_HOME": str(tmp_path / "state")}
    monkeypatch.setenv(*next(iter(home.items())))
    monkeypatch.chdir(tmp_path)
    found = create("job", home)
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        record = first_record("job", "job", found.path)
        record["state"] = "RUNNING"
        record["workers"] = [new_worker(3, 0) | {"pid": process.pid, "state": "RUNNING"}]  # type: ignore[list-item]
        found.write_state(record)
        yield found
        process.kill()


@pytest.mark.slow
def test_a_flame_graph_of_a_rank(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """With the function in which it is."""
    assert execute(["profile", "job", "1s", "--rank", "3"]) == 0, capsys.readouterr()
    shown = Path("profile-job-rank3.svg").read_text()
    assert "<svg" in shown and "spins (busy.py" in shown
    assert "profile-job-rank3.svg: 1 s of pid" in capsys.readouterr().out


@pytest.mark.slow
def test_a_rank_that_only_waits(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no graph of it, and what shows it is named."""
    waits = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        record = run.read_state()
        record["workers"][0]["pid"] = process.pid
        run.write_state(record)
        assert execute(["profile", "job", "1s", "--rank", "3"]) == 69
        process.kill()
    shown = capsys.readouterr().err
    assert "its threads have only waited" in shown and "`elaunch stacks` shows where" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job", "--rank", "4"], "--rank 4 of run job does not run on this node; here: rank 3;"),
        (["job", "x", "--rank", "3"], "DURATION x: is none; give 1s to 3600s, as 10s or 2m"),
        (["job", "0", "--rank", "3"], "DURATION 0: is none"),
        (["nosuch", "--rank", "3"], "there is no run 'nosuch'"),
        (["--rank", "4"], "--rank 4 of run job does not run on this node; here: rank 3;"),
        (["10s", "--rank", "4"], "--rank 4 of run job does not run on this node"),
        (["3601s", "--rank", "3"], "DURATION 3601s: is none; give 1s to 3600s"),
        (["10", "--rank", "3"], "there is no run '10'"),
        (["job", "--rank", "3", "-o", "/nowhere/x.svg"], "/nowhere cannot be written"),
    ],
)
def test_bad_input_is_refused(
    run: RunDir, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, and nothing is written."""
    assert execute(["profile", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path().glob("*.svg"))


def test_the_extra_is_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where py-spy is missing; and why, where it sees nothing."""
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    assert execute(["profile", "job", "--rank", "3"]) == 2
    assert "py-spy is not installed: pip install 'elaunch[stacks]'" in capsys.readouterr().err
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: "/bin/false")
    assert execute(["profile", "job", "1s", "--rank", "3"]) == 69
    assert "py-spy has written nothing" in capsys.readouterr().err
