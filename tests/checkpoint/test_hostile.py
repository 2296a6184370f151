"""What strangers can put into a checkpoint directory is refused in words, and in seconds."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.formats.pickles import Inert, load_inert, mapping
from elaunch.checkpoint.search import latest
from elaunch.errors import CheckpointError
from tests.checkpoint import hostile, makers

ELAUNCH = (sys.executable, "-m", "elaunch")
RUN = ["run", "--start-method=spawn", "--checkpoint-dir"]
PATIENCE = 280.0  # a hang takes years, and a busy machine some seconds


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that has hostile candidates only."""
    path = tmp_path_factory.mktemp("hostile")
    hostile.fill(path)
    return path


@pytest.mark.slow
def test_a_search_passes_over_all_of_it(root: Path) -> None:
    """The search is a process of its own: a crash or a hang of it must not be this one's."""
    code = (
        "import sys, pathlib, elaunch.checkpoint.search.latest as latest\n"
        "found = latest.find_latest(pathlib.Path(sys.argv[1]))\n"
        "assert found.checkpoint is None, found.checkpoint\n"
        "for passed in found.passed_over: print(passed.path.name, passed.reason)\n"
    )
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.split()[0] for line in done.stdout.splitlines()} == {
        path.name for path in root.iterdir()
    }
    assert max(map(len, done.stdout.splitlines())) < 400
    assert "step_98 .metadata is larger than 268435456 bytes" in done.stdout


@pytest.mark.trial
@pytest.mark.parametrize("words", [["checkpoints", "ls"], ["checkpoints", "verify"], RUN])
def test_commands_answer(root: Path, words: list[str]) -> None:
    command = [*ELAUNCH, *words, str(root), *(["--no-python", "true"] if words is RUN else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert ("skipped" if words is RUN else "step_98") in done.stdout + done.stderr


def test_keys_that_hash_at_once_stay() -> None:
    content = {"a": 1, 2: 3, (4, 5): 6, None: 8, 1.5: 9, True: 10, 2**70: 11}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = mapping(load_inert(pickle.dumps(content, protocol), "keys")) or {}
        kept = {key: value for key, value in content.items() if key not in ((4, 5), 2**70)}
        plain = {key: value for key, value in read.items() if not isinstance(key, Inert)}
        assert len(read) == len(content)
        assert kept.items() <= plain.items()


def test_a_whole_checkpoint_beside_it_is_found(tmp_path: Path) -> None:
    makers.safetensors(tmp_path / "step_3.safetensors")
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_9" / ".metadata").write_bytes(next(iter(hostile.PICKLES.values())))
    found = latest.find_latest(tmp_path, glob="step_*")
    assert found.checkpoint is not None and found.checkpoint.step == 3


@pytest.mark.slow
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.trial)])
def test_every_flip_in_commit_is_noticed(tmp_path: Path, stride: int) -> None:
    path = makers.own(tmp_path)
    commit = path / layout.COMMIT
    described = layout.checksum((path / layout.METADATA).read_bytes())
    makers.edit_json(commit, metadata=described)
    own.verify(path, "digits")
    whole = commit.read_bytes()
    for bit in range(0, len(whole) * 8, stride):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        commit.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            own.verify(path, "digits")


def test_all_manifests_together_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = makers.own(tmp_path)
    sizes = [file.stat().st_size for file in path.glob("manifest.*")]
    monkeypatch.setattr(own, "MANIFESTS_LIMIT", sum(sizes))
    own.verify(path, "digits")
    monkeypatch.setattr(own, "MANIFESTS_LIMIT", sum(sizes) - 1)
    with pytest.raises(CheckpointError, match=r"manifest.rank-00001.json is larger than"):
        own.verify(path, "digits")
