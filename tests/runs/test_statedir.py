"""elaunch.runs.statedir: where state is kept, names, atomic files, deletion."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.runs import statedir


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/elaunch/runs"),
        ({"HOME": "/h"}, "/h/.local/state/elaunch/runs"),
        ({"XDG_STATE_HOME": "", "HOME": "/h"}, "/h/.local/state/elaunch/runs"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/elaunch/runs"),
        ({"HOME": "not/absolute"}, None),
    ],
)
def test_state_root(environ: dict[str, str], root: str | None) -> None:
    assert statedir.state_root(environ) == (root and Path(root))


def test_without_home_the_password_file_tells() -> None:
    root = statedir.state_root({})
    assert root == Path("~/.local/state/elaunch/runs").expanduser() or "HOME" in os.environ


@given(st.text())
def test_every_text_becomes_a_visible_file_name(text: str) -> None:
    name = statedir.file_name(text)
    assert name not in ("", ".", "..")
    assert not name.startswith((".", "-"))
    assert "/" not in name
    assert len(name.encode()) <= statedir.MAX_NAME


@given(st.text(max_size=30), st.text(max_size=30))
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assert (statedir.file_name(one) == statedir.file_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train-3fa2c1", "train-3fa2c1"),
        ("a/b c", "a%2Fb%20c"),
        ("..", "%2E."),
        ("-x", "%2Dx"),
        ("", "%"),
        ("ä", "%C3%A4"),
        ("bad\udcff", "bad%ED%B3%BF"),
    ],
)
def test_file_name(text: str, name: str) -> None:
    assert statedir.file_name(text) == name


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    one, other = statedir.file_name("x" * 300 + "1"), statedir.file_name("x" * 300 + "2")
    assert one != other


def test_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        statedir.make_private(tmp_path / "a" / "b")
        path = statedir.claim(tmp_path / "a" / "b", "run")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, *path.parents[:2])] == [0o700] * 3


def test_claim_numbers_taken_names(tmp_path: Path) -> None:
    names = [statedir.claim(tmp_path, "run").name for _ in range(3)]
    assert names == ["run", "run.2", "run.3"]


@pytest.mark.slow
def test_many_claims_try_few_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would be 125,000 for 500 agents that share a home directory."""
    tries: list[Path] = []
    make = statedir._mkdir
    monkeypatch.setattr(statedir, "_mkdir", lambda path: (tries.append(path), make(path)))
    assert len({statedir.claim(tmp_path, "run") for _ in range(500)}) == 500
    assert len(tries) < 500 * (statedir.CLOSE + 16)


def test_concurrent_claims_never_share_a_directory(tmp_path: Path) -> None:
    claimed: list[Path] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait(60)
        claimed.extend(statedir.claim(tmp_path, "run") for _ in range(5))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(claimed)) == len(claimed) == 40


def test_require_own_refuses_links_and_closes_what_is_open(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        statedir.require_own(tmp_path / "link")
    (tmp_path / "own").mkdir(mode=0o755)
    statedir.require_own(tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_require_own_refuses_what_belongs_to_others(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(PermissionError):
        statedir.require_own(tmp_path / "theirs")


def test_fallback_is_skipped_while_it_is_not_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fallback = statedir.fallback_root()
    assert fallback == tmp_path / f"elaunch-{os.geteuid()}" / "runs"
    state = Path("/s/elaunch/runs")
    assert list(statedir.roots({"XDG_STATE_HOME": "/s"})) == [state]
    fallback.parent.symlink_to("/")
    assert list(statedir.roots({"XDG_STATE_HOME": "/s"})) == [state]
    fallback.parent.unlink()
    fallback.parent.mkdir()
    assert list(statedir.roots({"XDG_STATE_HOME": "/s"})) == [state, fallback]


def test_replace_file_is_private_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    statedir.replace_file(path, b"one")
    statedir.replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(OSError):
        statedir.replace_file(path, b"new")
    assert os.listdir(tmp_path) == ["state.json"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    contents = [bytes([65 + i]) * (1 << 18) for i in range(4)]
    statedir.replace_file(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for round in range(60):
            statedir.replace_file(path, contents[round % 4])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert path.read_bytes() in contents
    writer.join(60)


def test_delete_goes_by_name_first_and_trash_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "stdout.log").write_text("x" * 5000)
    assert statedir.disk_bytes(tmp_path / "run") >= 5000
    assert statedir.delete(tmp_path / "run")
    assert not statedir.delete(tmp_path / "run")
    (tmp_path / f"{statedir.TRASH_PREFIX}old.1" / "logs").mkdir(parents=True)
    statedir.empty_trash(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from elaunch.runs.statedir import locked\n"
        "count = Path(sys.argv[1], 'count')\n"
        "for _ in range(200):\n"
        "    with locked(Path(sys.argv[1], 'lock')):\n"
        "        count.write_text(str(int(count.read_text()) + 1))\n"
    )
    (tmp_path / "count").write_text("0")
    root = Path(__file__).parent.parent.parent
    counters = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=root) for _ in range(3)
    ]
    assert [counter.wait(60) for counter in counters] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "600"
