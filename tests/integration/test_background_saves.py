"""Checkpoints that the agent writes: its workers, or itself, are signalled and killed meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from tests.launching import Launcher, Running, wait_until

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "jobs"
LONG = 60.0


def flags(place: Path, *more: str) -> list[str]:
    """Return the command line up to the job's own words."""
    line = ["run", "--nproc-per-node=2", "--run-id=digits", f"--checkpoint-dir={place}"]
    return [*line, "--max-restarts=2", *more, str(JOBS / "background_saves.py"), str(place)]


def names(place: Path) -> list[str]:
    """Return what is committed."""
    return [found.name for found in open_storage(place).listed()]


def slowed(elaunch: Launcher, word: str, place: Path, *words: str) -> Running:
    """Start a job whose agent is held up; return when it is."""
    argv = [sys.executable, str(JOBS / "slowagent.py"), str(elaunch.directory), word]
    running = elaunch.start_command([*argv, *flags(place), *words])
    wait_until((elaunch.directory / "reached").exists, LONG)
    return running


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_right_after_it_saved(
    elaunch: Launcher, tmp_path: Path, rank: int
) -> None:
    """No step is lost, and the next round finds all parts in the agent's memory."""
    place = tmp_path / "ck"
    done = elaunch.run([*flags(place), f"20:kill={rank}"])
    assert done.returncode == 0, done.stderr
    for each in (0, 1):
        line = f"{each} resumes from step-00000020.r0, in memory: ['20.0', '20.1']"
        assert line in done.stdout.splitlines()
    assert names(place) == ["step-00000010.r0", "step-00000020.r0", "step-00000030.r1"]
    assert [path.name for path in (place / ".stage").iterdir()] == []
    shown = elaunch.run(["status", "digits"]).stdout
    assert "saves" in shown
    assert "step 30 committed" in shown


def test_the_agent_is_told_to_end_while_it_writes(elaunch: Launcher, tmp_path: Path) -> None:
    """It writes what is in memory within the grace; the exit code is that of the signal."""
    place = tmp_path / "ck"
    running = slowed(elaunch, "write=10", place, "10:wait")
    running.wait_for_line("handed over 10")
    running.send_signal(signal.SIGTERM)
    running.wait_for_line("SIGTERM received", stream="stderr")
    (elaunch.directory / "go").touch()
    assert running.wait().returncode == 143
    assert names(place) == ["step-00000010.r0"]


def test_the_agent_is_killed_before_it_commits(elaunch: Launcher, tmp_path: Path) -> None:
    """All parts were sealed: the next start commits them, and resumes from there."""
    place = tmp_path / "ck"
    running = slowed(elaunch, "commit=20", place, "20:wait")
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert names(place) == ["step-00000010.r0"]
    done = elaunch.run(flags(place))
    assert done.returncode == 0, done.stderr
    assert "0 resumes from step-00000020.r0, in memory: []" in done.stdout.splitlines()
    assert names(place)[:2] == ["step-00000010.r0", "step-00000020.r0"]


def test_the_agent_is_killed_while_it_writes(elaunch: Launcher, tmp_path: Path) -> None:
    """What is not whole is cleared at the next start, which takes the one before."""
    place = tmp_path / "ck"
    running = slowed(elaunch, "write=20", place, "20:wait")
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = elaunch.run(flags(place))
    assert done.returncode == 0, done.stderr
    assert "0 resumes from step-00000010.r0, in memory: []" in done.stdout.splitlines()
    assert [path.name for path in (place / ".stage").iterdir()] == []


def test_storage_that_hangs_does_not_hold_up_the_end(elaunch: Launcher, tmp_path: Path) -> None:
    """It is named, what was lost too, and the job goes on from the checkpoint before."""
    place = tmp_path / "ck"
    argv = [sys.executable, str(JOBS / "slowagent.py"), str(elaunch.directory), "write=20"]
    words = flags(place, "--shutdown-timeout=1")
    running = elaunch.start_command([*argv, *words, "20:kill=1"])
    running.wait_for_line("lost what was in memory only: step-00000020.r0", stream="stderr")
    line = running.wait_for_line("0 resumes from").string
    assert "resumes from step-00000010.r0" in line
    (elaunch.directory / "go").touch()
    assert running.wait().returncode == 0
    assert "step-00000030.r1" in names(place)
    assert "step-00000020.r0" not in names(place)


@pytest.mark.parametrize("word", ["", "30:leave"])
def test_the_last_save_of_a_job_that_is_done(elaunch: Launcher, tmp_path: Path, word: str) -> None:
    """It is waited for, however short the shutdown may be: nobody is in a hurry."""
    place = tmp_path / "ck"
    argv = [sys.executable, str(JOBS / "slowagent.py"), str(elaunch.directory), "write=30"]
    words = flags(place, "--shutdown-timeout=0.1")
    running = elaunch.start_command([*argv, *words, *filter(None, [word])])
    running.wait_for_line("0 handed over 30")
    if word:
        running.wait_for_line(r"still writing out the save of step 30, for \d+ s", stream="stderr")
    else:
        wait_until((elaunch.directory / "reached").exists, LONG)
    (elaunch.directory / "go").touch()
    assert running.wait().returncode == 0
    assert names(place)[-1] == "step-00000030.r0"


@pytest.mark.trial
def test_a_last_save_that_is_lost_is_no_good_end(elaunch: Launcher, tmp_path: Path) -> None:
    """A signal cuts the waiting short; the exit code tells, also where all workers ended with 0."""
    place = tmp_path / "ck"
    argv = [sys.executable, str(JOBS / "slowagent.py"), str(elaunch.directory), "write=30"]
    running = elaunch.start_command([*argv, *flags(place, "--shutdown-timeout=1"), "30:leave"])
    running.wait_for_line("still writing out the save of step 30", stream="stderr")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 74
    assert "was not committed" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "result: STOPPED" in last
    assert "their last checkpoint was in memory only, and is lost" in last


def test_a_request_to_end_leaves_the_last_save_its_time(elaunch: Launcher, tmp_path: Path) -> None:
    """However short the shutdown may be; and the job is done, not to be queued again."""
    place = tmp_path / "ck"
    argv = [sys.executable, str(JOBS / "slowagent.py"), str(elaunch.directory), "write=30"]
    running = elaunch.start_command([*argv, *flags(place, "--shutdown-timeout=0.1"), "30:leave"])
    running.wait_for_line("still writing out the save of step 30", stream="stderr")
    running.send_signal(signal.SIGUSR1)
    running.wait_for_line("SIGUSR1 received: no round follows this one", stream="stderr")
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(2.0)  # twenty times the grace
    (elaunch.directory / "go").touch()
    assert running.wait().returncode == 0
    assert names(place)[-1] == "step-00000030.r0"


def test_two_jobs_in_one_directory(elaunch: Launcher, tmp_path: Path) -> None:
    """The second one is told who has it, before any worker is started."""
    place = tmp_path / "ck"
    first = elaunch.start([*flags(place), "10:wait"])
    first.wait_for_line("1 handed over 10")
    second = elaunch.run(flags(place))
    assert second.returncode == 2
    assert f"in use by another job (process {first.pid} on" in second.stderr
    assert second.stdout == ""
    first.send_signal(signal.SIGTERM)
    assert first.wait().returncode == 143


def test_a_worker_that_is_killed_between_saves_by_auto(elaunch: Launcher, tmp_path: Path) -> None:
    """The ranks save the same steps, and resume from the last of them."""
    line = ["run", "--nproc-per-node=2", f"--checkpoint-dir={tmp_path / 'ck'}", "--max-restarts=1"]
    done = elaunch.run([*line, str(JOBS / "autosave.py")])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    saved = {line.split()[-1] for line in lines if " saved " in line}
    assert len(saved) == 1 and "a save stops the training for" in done.stderr
    for rank in (0, 1):
        begun = [line for line in lines if line.startswith(f"rank {rank} begins")]
        assert begun == [f"rank {rank} begins at {step}" for step in ("0", *saved)]
        assert f"rank {rank} ends after 11" in lines
