"""elaunch.runs.directory: making, finding, listing and pruning run directories."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import RunDirError, UsageError
from elaunch.runs import directory
from elaunch.runs.directory import RunDir, create, find, list_runs, prune
from tests import programs
from tests.opens import opened_below
from tests.views.played_agent import new_record

DEAD_TICKS = 1


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give a state directory, and a directory for temporary files, of this test alone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    places = {"XDG_STATE_HOME": "state", "HOME": "home", "TMPDIR": "tmp"}
    return {name: str(tmp_path / place) for name, place in places.items()}


def recorded(
    environ: dict[str, str], run_id: str, started_at: float = 0.0, **changes: Any
) -> RunDir:
    """Make a run directory with a record; its agent is this process, and so it is live."""
    run = create(run_id, environ)
    record = new_record(run, run_id, [])
    record["agent"] |= changes.pop("agent", {})
    run.write_state(record | {"started_at": time.time() + started_at} | changes)
    return run


def ended(environ: dict[str, str], run_id: str, started_at: float = 0.0) -> RunDir:
    """Make the directory of a run that ended."""
    agent = {"start_ticks": DEAD_TICKS}
    return recorded(environ, run_id, started_at, agent=agent, state="COMPLETED")


def test_the_layout(environ: dict[str, str], tmp_path: Path) -> None:
    run = create("train-3fa2c1", environ)
    assert run == RunDir(tmp_path / "state/elaunch/runs/train-3fa2c1")
    assert run.notice is None
    assert run.socket == run.path / "agent.sock"
    assert run.logs == run.path / "logs"
    assert run.report(2, "json") == run.report(2, ".json") == run.path / "failure-2.json"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.write_state(new_record(run, "train-3fa2c1", [1]))
    assert stat.S_IMODE(run.state_file.stat().st_mode) == 0o600
    assert run.read_state()["run_id"] == "train-3fa2c1"


def test_two_runs_may_share_an_id(environ: dict[str, str]) -> None:
    assert [create("a/b", environ).path.name for _ in range(2)] == ["a%2Fb", "a%2Fb.2"]


@pytest.mark.slow
def test_concurrent_agents_get_directories_of_their_own(environ: dict[str, str]) -> None:
    code = "import os, elaunch.runs.directory as d; print(d.create('job', os.environ).path)"
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environ, stdout=subprocess.PIPE
        )
        for _ in range(6)
    ]
    paths = {agent.communicate(timeout=60)[0] for agent in agents}
    assert len(paths) == 6


@pytest.mark.parametrize("kind", ["file in the way", "no home", "name too long", "dead link"])
def test_without_a_state_directory_there_is_another_place_and_a_notice(
    environ: dict[str, str], tmp_path: Path, kind: str
) -> None:
    if kind == "file in the way":
        (tmp_path / "state").touch()
    elif kind == "no home":
        environ = {"XDG_STATE_HOME": "relative", "HOME": "relative"}
    elif kind == "name too long":
        environ = {"XDG_STATE_HOME": "/" + "x" * 300}
    else:
        (tmp_path / "state").symlink_to(tmp_path / "nowhere")
    run = create("job", environ)
    assert run.path == tmp_path / "tmp" / f"elaunch-{os.geteuid()}" / "runs" / "job"
    assert stat.S_IMODE(run.path.parents[1].stat().st_mode) == 0o700
    assert run.notice is not None
    assert str(run.path) in run.notice
    run.write_state(new_record(run, "job", []))
    assert find("job", environ).path == run.path


def test_a_record_that_is_not_there(environ: dict[str, str]) -> None:
    """A run that has just begun has none yet; one whose directory was removed had one."""
    run = create("train", environ)
    with pytest.raises(RunDirError, match=r"state.json is not there: nothing was recorded yet"):
        run.read_state()
    shutil.rmtree(run.path)
    with pytest.raises(RunDirError, match=r"train is not there: it was removed"):
        run.read_state()


def test_a_read_only_state_directory(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    code = (
        "import os, sys, tempfile; tempfile.tempdir = sys.argv[1]; "
        "from elaunch.runs.directory import create; print(create('job', os.environ).notice)"
    )
    mount = f'mount --bind -o ro "$XDG_STATE_HOME" "$XDG_STATE_HOME" && exec {sys.executable} "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", "-c", code, str(tmp_path / "tmp")],
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        programs.allowed(f"no namespaces here: {done.stderr}")
    assert "cannot be used (Read-only file system)" in done.stdout, done.stderr


def test_no_place_at_all_says_what_to_do(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    (tmp_path / "tmp" / f"elaunch-{os.geteuid()}").symlink_to("/")
    with pytest.raises(RunDirError, match="set XDG_STATE_HOME"):
        create("job", environ)


def test_writing_to_a_directory_that_was_removed(environ: dict[str, str]) -> None:
    run = create("job", environ)
    shutil.rmtree(run.path)
    with pytest.raises(RunDirError, match=r"cannot write .*No such file"):
        run.write_state(new_record(run, "job", []))


def test_reading_what_is_not_there_or_torn(environ: dict[str, str]) -> None:
    run = create("job", environ)
    with pytest.raises(RunDirError, match="nothing was recorded yet"):
        run.read_state()
    run.state_file.write_text('{"schema": 1, "ru')
    with pytest.raises(RunDirError, match="is not JSON"):
        run.read_state()


def test_runs_are_listed_from_new_to_old(environ: dict[str, str], tmp_path: Path) -> None:
    recorded(environ, "old", -100)
    recorded(environ, "new", 10)
    recorded(environ, "middle", -50)
    bare = create("bare", environ)
    os.utime(bare.path, (time.time() - 70, time.time() - 70))
    (bare.path.parent / ".trash-x").mkdir()
    (bare.path.parent / "file").touch()
    (bare.path.parent / "link").symlink_to(tmp_path)
    assert [run.path.name for run in list_runs(environ)] == ["new", "middle", "bare", "old"]


def test_no_directory_means_no_runs(environ: dict[str, str]) -> None:
    assert list_runs(environ) == []
    assert prune(environ) == []
    with pytest.raises(UsageError, match="no run is recorded in"):
        find("x", environ)


def test_find(environ: dict[str, str]) -> None:
    digits = recorded(environ, "digits-3fa2c1")
    resnet = recorded(environ, "resnet-99aabb")
    odd = recorded(environ, "a/b")
    assert find("digits-3fa2c1", environ) == digits
    assert find("dig", environ) == digits
    assert find("resnet-99", environ) == resnet
    assert find("a/b", environ) == odd
    assert find("a%2Fb", environ) == odd
    assert find(str(digits.path), {"XDG_STATE_HOME": "/nowhere"}) == digits


def test_find_reads_each_record_once(environ: dict[str, str], tmp_path: Path) -> None:
    """Thousands of agents may have theirs in one home that they share."""
    for run_id in ("digits-1", "digits-2", "resnet"):
        recorded(environ, run_id)
    for name in ("resnet", "res", "resnet.1"):
        with opened_below(tmp_path) as opened:
            find(name, environ)
        assert sum(path.endswith("state.json") for path in opened) == 3


def test_of_runs_with_one_id_the_live_one_is_found(environ: dict[str, str]) -> None:
    first = recorded(environ, "job", -50)
    second = ended(environ, "job", -10)
    assert find("job", environ) == first
    assert find("jo", environ) == first
    assert find("job.2", environ) == second
    assert [directory.handle(run) for run in (first, second)] == ["job.1", "job.2"]


def test_of_live_runs_with_one_id_that_of_this_machine_is_found(environ: dict[str, str]) -> None:
    """Nodes that share a home keep their runs in one place; each can ask its own agent only."""
    here = recorded(environ, "7", -50)
    elsewhere = recorded(environ, "7", -10, agent={"host": "another"}, state="RUNNING")
    assert find("7", environ) == here
    here.write_state(here.read_state() | {"agent": elsewhere.read_state()["agent"]})
    assert find("7", environ) == elsewhere


def test_a_run_id_that_ends_as_a_handle_does(environ: dict[str, str]) -> None:
    """Each of its runs can be named."""
    first, second = ended(environ, "v1.0", -50), ended(environ, "v1.0", -10)
    assert [directory.handle(run) for run in (first, second)] == ["v1.0.1", "v1.0.2"]
    assert find("v1.0", environ) == second
    assert [find(name, environ) for name in ("v1.0.1", "v1.0.2")] == [first, second]


def test_of_ended_runs_with_one_id_the_newest_is_found(environ: dict[str, str]) -> None:
    first, second = ended(environ, "job", -50), ended(environ, "job", -10)
    assert find("job", environ) == second
    assert find("job.1", environ) == first


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("digist-1", "there is no run 'digist-1'; the nearest: digits-1"),
        ("digits-", "'digits-' fits 2 runs: digits-1, digits-2; give more of it"),
        ("", "there is no run ''; the newest: digits-1, digits-2, resnet"),
        ("zzz", "there is no run 'zzz'; the newest: digits-1, digits-2, resnet"),
        ("/etc", "there is no run '/etc'"),
    ],
)
def test_an_unknown_run_names_the_nearest(environ: dict[str, str], run: str, message: str) -> None:
    for age, name in enumerate(["digits-1", "digits-2", "resnet"]):
        recorded(environ, name, -age)
    with pytest.raises(UsageError) as caught:
        find(run, environ)
    assert message in str(caught.value)


def test_prune_keeps_the_newest_and_every_live_one(environ: dict[str, str]) -> None:
    live = recorded(environ, "live", -1000)
    starting = create("starting", environ)
    runs = [ended(environ, f"run-{age}", -age) for age in range(6)]
    deleted = prune(environ, keep=3)
    assert deleted == [run.path for run in (runs[5], runs[4], runs[3])]
    assert {run.path for run in list_runs(environ)} == {
        run.path for run in (live, starting, *runs[:3])
    }


def test_prune_keeps_failed_runs_longer(environ: dict[str, str]) -> None:
    """Neither completed runs nor refused command lines nor a lack of room push them out."""
    dead = {"start_ticks": DEAD_TICKS}
    changes: dict[str, Any] = {"state": "FAILED", "exit_code": 2, "world_size": None}
    refused = [recorded(environ, f"r{n}", -n, agent=dead, **changes) for n in (1.5, 2.5)]
    failed = [recorded(environ, f"f{n}", -90 - n, agent=dead, state="FAILED") for n in range(3)]
    runs = [ended(environ, f"run-{age}", -age) for age in range(4)]
    gone = (*reversed(refused), runs[3], runs[2], failed[2])
    assert prune(environ, keep=2) == [run.path for run in gone]
    for run in (*failed[:2], *runs[:2]):
        (run.path / "log").write_bytes(b"x" * 100_000)
    assert prune(environ, max_bytes=350_000) == [runs[1].path]


def test_of_many_agents_few_prune(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them reads the directories of all; the first ones always do."""
    pruned: list[int] = []
    for number in range(1, 4097):
        monkeypatch.setattr(directory, "prune", lambda *_, number=number: pruned.append(number))
        directory.prune_for(RunDir(Path("run"), number=number), environ)
    assert pruned[:8] == list(range(1, 9))
    assert len(pruned) < 200  # 58 on average
    create("run.2024", environ)
    assert [create(run_id, environ).number for run_id in ("run.2024", "run")] == [2, 1]


def test_prune_bounds_the_space_but_leaves_the_newest(environ: dict[str, str]) -> None:
    runs = [ended(environ, f"run-{age}", -age) for age in range(3)]
    for run in runs:
        (run.path / "log").write_bytes(b"x" * 100_000)
    assert prune(environ, max_bytes=250_000) == [runs[2].path]
    assert prune(environ, max_bytes=10) == [runs[1].path]
    assert [run.path for run in list_runs(environ)] == [runs[0].path]


def test_prune_leaves_what_may_live_elsewhere(environ: dict[str, str]) -> None:
    elsewhere = recorded(environ, "elsewhere", -500, agent={"host": "another"})
    over = recorded(environ, "over", -400, agent={"host": "another"}, state="FAILED")
    ended(environ, "new")
    assert prune(environ, keep=0) == [over.path]
    assert elsewhere.path.exists()
    long_ago = time.time() - directory.ELSEWHERE_KEEP_S - 1
    for path in (elsewhere.state_file, elsewhere.path):
        os.utime(path, (long_ago, long_ago))
    assert prune(environ, keep=0) == [elsewhere.path]


def test_prune_takes_an_unreadable_record_after_a_day(environ: dict[str, str]) -> None:
    ended(environ, "new")
    torn = create("torn", environ)
    torn.state_file.write_text("{")
    assert prune(environ, keep=0) == []
    long_ago = time.time() - directory.UNREADABLE_KEEP_S - 1
    for path in (torn.state_file, torn.path):
        os.utime(path, (long_ago, long_ago))
    assert prune(environ, keep=0) == [torn.path]


@pytest.mark.slow
def test_two_may_prune_at_once(environ: dict[str, str]) -> None:
    runs = [ended(environ, f"run-{age}", -age) for age in range(20)]
    code = (
        "import os; from elaunch.runs.directory import prune; print(len(prune(os.environ, keep=1)))"
    )
    pruners = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | environ, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    counts = [int(pruner.communicate(timeout=60)[0]) for pruner in pruners]
    assert sum(counts) == 19
    assert os.listdir(runs[0].path.parent) == ["run-0"]


def test_the_round_in_which_an_earlier_run_was_killed(environ: dict[str, str]) -> None:
    """The newest of that id decides, and only where its agent is dead and did not end the run."""
    dead = {"start_ticks": DEAD_TICKS}
    recorded(environ, "job", -50.0, agent=dead, state="RUNNING", round=2, world_size=4)
    recorded(environ, "other", -10.0, agent=dead, state="RUNNING", round=9, world_size=4)
    recorded(environ, "job")
    assert directory.killed_in("job", environ) == 2
    recorded(environ, "job", -40.0, agent=dead, state="STARTING", world_size=None)
    assert directory.killed_in("job", environ) == -1
    ended(environ, "job", -30.0)
    assert directory.killed_in("job", environ) is None
    assert directory.killed_in("none", environ) is None


@pytest.mark.parametrize("used", [0, 900 << 10], ids=["empty", "nearly full"])
def test_the_end_of_a_run_is_recorded_on_a_full_disk(
    environ: dict[str, str], tmp_path: Path, used: int
) -> None:
    """Else it would count as lost; what changes before the end is not worth the room."""
    programs.needed("mount", "umount")
    (tmp_path / "state").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", environ["XDG_STATE_HOME"]]
    refused = subprocess.run(mount, capture_output=True, text=True)
    programs.allowed(refused.stderr if refused.returncode else None)
    try:
        Path(environ["XDG_STATE_HOME"], "used").write_bytes(b"x" * used)
        run = create("full", environ)
        record = new_record(run, "full", [1, 2, 3])
        run.write_state(record | {"state": "RUNNING"})
        with pytest.raises(OSError, match="No space left"):
            (run.path / "logs").write_bytes(b"x" * (1 << 20))
        with pytest.raises(RunDirError, match="No space left"):
            run.write_state(record | {"state": "RESTARTING"})
        run.write_state(record | {"state": "FAILED"})
        assert run.read_state()["state"] == "FAILED"
        assert sorted(os.listdir(run.path)) == ["logs", "state.json"]
    finally:
        subprocess.run(["umount", "--lazy", environ["XDG_STATE_HOME"]], check=True)


@pytest.mark.parametrize("what", ["device", "pipe", "sparse"])
def test_a_record_that_would_never_end_is_not_read(tmp_path: Path, what: str) -> None:
    """One such directory would hold up the views of all runs."""
    run = RunDir(tmp_path)
    if what == "device":
        run.state_file.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(run.state_file)
    else:
        run.state_file.touch()
        os.truncate(run.state_file, 1 << 40)
    problems = {"device": "it is a link", "pipe": "it is not a regular file"}
    problem = problems.get(what, "it has 1.00 TiB")
    with pytest.raises(RunDirError, match=f"cannot read .*: {problem}"):
        run.read_state()
