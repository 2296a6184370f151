"""The run's own directory for temporary files."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from elaunch.agent.workers.tempdir import (
    RunTemp,
    compiler_caches,
    remove_abandoned,
    remove_torn,
)
from elaunch.env import SCRATCH
from elaunch.proc import own_prefix


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``tmp_path`` the machine's directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_each_run_has_its_own_and_leaves_nothing(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what a killed worker could not remove: sockets, empty directories."""
    one, other = RunTemp("private", {}), RunTemp("private", {})
    assert one.path is not None and one.path != other.path
    assert one.variables["TMPDIR"] == one.path and Path(one.path).stat().st_mode & 0o777 == 0o700
    left = Path(one.path, "pymp-x1")
    left.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(left)  # a socket's address is short
        listener.bind("listener-y")
        monkeypatch.chdir(shared)
    os.mkfifo(left / "pipe")
    Path(one.path, "torch-dump_tracebackAb3x").write_text("cut sh")
    assert (one.close(), other.close()) == (None, None)
    (cache,) = shared.iterdir()
    assert list(cache.iterdir()) == []


def test_files_are_kept(shared: Path) -> None:
    """They may be all that a job has saved."""
    temp = RunTemp("private", {})
    assert temp.path is not None
    saved = Path(temp.path, "sub", "model.checkpoint")
    saved.parent.mkdir()
    saved.write_text("weights")
    Path(temp.path, "empty").mkdir()
    assert temp.close() == temp.path
    assert saved.read_text() == "weights" and not Path(temp.path, "empty").exists()


IMPORTS = "import tempfile; from elaunch.env import SCRATCH; from elaunch.proc import own_prefix"
MAKE = """
import os, signal
from elaunch.agent.workers.tempdir import RunTemp
temp = RunTemp("private", {})
print(temp.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_those_of_killed_agents_are_cleared(shared: Path) -> None:
    """With what is empty; not those of living agents, files, nor what a link leads to."""
    killed = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", MAKE],
            env=os.environ | {"TMPDIR": str(shared)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        killed.append(Path(done.stdout.strip()))
    empty, full, linked = killed
    (empty / "pymp-x1").mkdir()
    (full / "model.checkpoint").write_text("weights")
    elsewhere = shared / "elsewhere"
    (elsewhere / "empty").mkdir(parents=True)
    (linked / "link").symlink_to(elsewhere)
    living = RunTemp("private", {})
    assert living.path is not None
    planted = shared / f"{empty.name}_"
    planted.symlink_to(elsewhere)
    remove_abandoned()
    assert [path.exists() for path in (empty, full, linked)] == [False, True, True]
    assert (full / "model.checkpoint").read_text() == "weights"
    assert (elsewhere / "empty").is_dir() and Path(living.path).is_dir()
    assert living.close() is None


def test_what_a_killed_call_has_left_is_removed(shared: Path) -> None:
    """The pickled function and the results are nobody's any more."""
    call = "tempfile.mkdtemp(prefix=own_prefix(SCRATCH))"
    done = subprocess.run(
        [sys.executable, "-c", f"{IMPORTS}; print({call})"],
        env=os.environ | {"TMPDIR": str(shared)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    dead, living = Path(done.stdout.strip()), Path(tempfile.mkdtemp(prefix=own_prefix(SCRATCH)))
    for path in (dead, living):
        (path / "call").write_bytes(b"pickled")
    remove_abandoned()
    assert (dead.exists(), living.exists()) == (False, True)


SAVE = """
import os, signal
from elaunch.checkpoint.records import Stage
from elaunch.checkpoint.storage.storage import open_storage
storage = open_storage("memory://bucket/ck")
path = storage.open_stage(Stage(4, 0, "a1"))
(path / "model.pt").write_bytes(b"half")
print(path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("private", [False, True])
def test_what_a_killed_save_to_a_url_has_left_is_removed(shared: Path, private: bool) -> None:
    """From the TMPDIR of the job's own at its end, else by the next job; not what lives."""
    run = RunTemp("private", {})
    assert run.path is not None
    place = run.path if private else str(shared)
    done = subprocess.run(
        [sys.executable, "-c", SAVE],
        env=os.environ | {"TMPDIR": place},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    left = Path(done.stdout.strip())
    assert left.is_dir() and left.parent == Path(place)
    remove_abandoned()
    assert left.is_dir() is private and Path(run.path).is_dir()
    assert run.close() is None
    assert not left.exists()


@pytest.mark.parametrize(
    ("choice", "environ"),
    [("shared", {}), ("private", {"TMPDIR": "/scratch"}), ("private", {"TMP": "/scratch"})],
)
def test_who_has_decided_is_not_overruled(
    shared: Path, choice: str, environ: dict[str, str]
) -> None:
    """Schedulers set TMPDIR for each job."""
    temp = RunTemp(choice, environ)
    assert (temp.path, temp.variables, temp.close()) == (None, {}, None)


def test_the_cache_of_the_compiler_outlives_the_run(shared: Path) -> None:
    """It is where TorchInductor would have put it, unless somebody has said where."""
    temp = RunTemp("private", {})
    cache = Path(temp.variables["TORCHINDUCTOR_CACHE_DIR"])
    assert cache.parent == shared and cache.name.startswith("torchinductor_")
    assert cache.stat().st_mode & 0o777 == 0o700
    decided = RunTemp("private", {"TORCHINDUCTOR_CACHE_DIR": "/cache"})
    assert "TORCHINDUCTOR_CACHE_DIR" not in decided.variables
    for one in (temp, decided):  # headers go below TMPDIR in either case
        headers = Path(one.variables["TMPDIR"], cache.name, "precompiled_headers")
        headers.mkdir(parents=True, exist_ok=True)
        assert one.close() is None
    assert [path.name for path in cache.iterdir()] == ["precompiled_headers"]


@pytest.mark.parametrize("how", ["writable by others", "another's", "another's link", "a file"])
def test_a_cache_that_others_may_write_to_is_not_used(shared: Path, how: str) -> None:
    """What lies there is executed: the job's is in its own directory then."""
    if how.startswith("another") and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    first = RunTemp("private", {})
    cache = Path(first.variables["TORCHINDUCTOR_CACHE_DIR"])
    first.close()
    if how == "writable by others":
        cache.chmod(0o770)
    else:
        cache.rmdir()
        if how == "a file":
            cache.touch()
        elif how == "another's":
            cache.mkdir()
        else:
            cache.symlink_to(shared)
        if how != "a file":
            os.chown(cache, 1, -1, follow_symlinks=False)
    temp = RunTemp("private", {})
    assert list(temp.variables) == ["TMPDIR"]
    assert temp.path is not None and os.listdir(temp.path) == []
    assert temp.close() is None


def test_the_directory_of_an_outer_job_is_no_decision(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that a worker starts has its own, in that of the worker, which stays."""
    outer = RunTemp("private", {})
    assert outer.path is not None
    monkeypatch.setattr(tempfile, "tempdir", outer.path)
    inner = RunTemp("private", {"TMPDIR": outer.path})
    assert inner.variables["TORCHINDUCTOR_CACHE_DIR"] == outer.variables["TORCHINDUCTOR_CACHE_DIR"]
    assert inner.path is not None and Path(inner.path).parent == Path(outer.path)
    assert inner.close() is None and Path(outer.path).is_dir()
    assert RunTemp("shared", outer.variables).path is None


def test_compiled_code_that_is_cut_short_goes(tmp_path: Path) -> None:
    """TorchInductor would take it for whole, for ever. What is being written stays."""
    whole = Path(msgspec._core.__file__).read_bytes()
    caches = compiler_caches({"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    for place in ("ab", "locks", caches["headers"]):
        (tmp_path / place).mkdir(parents=True)
    cut = {f"cut{size}": whole[:size] for size in (0, 1, 63, 64, 4096, len(whole) - 1)}
    rows = {"kept": whole, "sparse": bytes(len(whole)), "busy": whole[:64], **cut}
    for name, data in rows.items():
        (tmp_path / "ab" / f"{name}.main.so").write_bytes(data)
    (caches["headers"] / "half.h.gch").write_bytes(b"gpcWrite.014")
    (caches["headers"] / "whole.h.gch").write_bytes(b"gpch.014")
    (tmp_path / "ab" / "busy.main.cpp").touch()
    with (tmp_path / "locks" / "busy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gone = {path.name.partition(".")[0] for path in remove_torn(caches)}
    assert gone == {"sparse", "half", *cut}
    assert remove_torn(caches, since=2 * os.stat(tmp_path / "ab" / "busy.main.so").st_mtime) == []
    assert [path.name for path in remove_torn(caches)] == ["busy.main.so"]
    left = {path.name for path in tmp_path.rglob("*") if path.suffix in (".so", ".gch", ".cpp")}
    assert left == {"kept.main.so", "whole.h.gch", "busy.main.cpp"}


def test_a_cache_of_others_is_left_alone(tmp_path: Path) -> None:
    """Others may write to it, and another user's is none of this one's business."""
    (tmp_path / "x.main.so").touch()
    tmp_path.chmod(0o777)
    assert remove_torn({"cache": tmp_path, "headers": tmp_path / "none"}) == []
    assert (tmp_path / "x.main.so").exists()


def test_a_machine_without_a_directory_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a container with a read-only root may be: the agent ended with a traceback."""

    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert remove_torn(compiler_caches({"TORCHINDUCTOR_CACHE_DIR": "/nowhere"})) == []
    assert compiler_caches({})["cache"].parent == Path("/tmp")
