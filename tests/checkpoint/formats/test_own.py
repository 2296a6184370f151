"""elaunch's own layout: each kind of damage is noticed, and named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A committed checkpoint of two ranks."""
    return makers.own(tmp_path)


def refused(path: Path, reason: str, run_id: str | None = None) -> None:
    """Assert that the checkpoint is refused with a reason that begins like this."""
    with pytest.raises(CheckpointError) as raised:
        own.verify(path, run_id)
    assert str(raised.value).startswith(reason)


def test_a_committed_checkpoint_passes(path: Path) -> None:
    own.verify(path, None)
    own.verify(path, "digits")


def test_unknown_keys_and_files_are_no_matter(path: Path) -> None:
    makers.edit_json(path / layout.COMMIT, token="x")
    makers.edit_json(path / layout.METADATA, torch="2.13", lr=0.1)
    (path / "notes.txt").write_text("by hand")
    own.verify(path, None)


def test_without_commit(path: Path) -> None:
    (path / layout.COMMIT).unlink()
    refused(path, "not committed: COMMIT is missing")


def test_of_another_run(path: Path) -> None:
    refused(path, "belongs to run digits", run_id="mnist")


def test_renamed_to_another_step(path: Path) -> None:
    other = path.rename(path.with_name(layout.step_name(130, 0)))
    refused(other, "metadata.json says step 120 of round 0")


def test_a_rank_without_manifest(path: Path) -> None:
    (path / layout.manifest_name(1)).unlink()
    refused(path, "missing: manifest.rank-00001.json (world size 2)")
    makers.commit(path)
    refused(path, "missing: manifest.rank-00001.json (world size 2)")


def test_more_manifests_than_ranks(path: Path) -> None:
    shutil.copy(path / layout.manifest_name(1), path / layout.manifest_name(2))
    refused(path, "manifest.rank-00002.json is there, but the world size is 2")


def test_absurd_world_sizes(path: Path) -> None:
    makers.edit_json(path / layout.METADATA, world_size=10**15)
    refused(path, "missing: manifest.rank-00002.json")
    makers.edit_json(path / layout.METADATA, world_size=0)
    refused(path, "metadata.json: world_size is 0")


def test_a_manifest_changed_after_the_commit(path: Path) -> None:
    makers.edit_json(path / layout.manifest_name(0), host="there")
    refused(path, "the manifests do not have the digest in COMMIT")


def test_a_manifest_of_the_wrong_rank(path: Path) -> None:
    makers.edit_json(path / layout.manifest_name(0), rank=1)
    makers.commit(path)
    refused(path, "manifest.rank-00000.json says it is of rank 1")


def test_a_missing_file(path: Path) -> None:
    (path / "model.pt").unlink()
    with pytest.raises(FileNotFoundError):
        own.verify(path, None)


def test_a_truncated_file(path: Path) -> None:
    makers.truncate(path / "rank1" / "rng.bin", 99)
    refused(path, "truncated: rank1/rng.bin has 99 bytes, its manifest wants 100")


def test_a_longer_file(path: Path) -> None:
    makers.truncate(path / "model.pt", 1000)
    refused(path, "changed: model.pt has 1000 bytes, its manifest wants 448")


def test_a_flipped_bit(path: Path) -> None:
    content = bytearray((path / "model.pt").read_bytes())
    content[200] ^= 1
    (path / "model.pt").write_bytes(content)
    refused(path, "bad checksum: model.pt")


@pytest.mark.parametrize("name", [layout.COMMIT, layout.METADATA, layout.manifest_name(1)])
def test_every_truncation_of_a_document_is_noticed(path: Path, name: str) -> None:
    for size in reversed(range((path / name).stat().st_size)):
        makers.truncate(path / name, size)
        with pytest.raises(CheckpointError):
            own.verify(path, None)


@pytest.mark.parametrize("name", [layout.COMMIT, layout.METADATA, layout.manifest_name(0)])
def test_a_newer_schema_is_not_guessed(path: Path, name: str) -> None:
    makers.edit_json(path / name, schema=2)
    if name.startswith("manifest"):
        makers.commit(path)
    refused(path, f"{name} has schema 2, this elaunch reads 1")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "manifest.rank-00000.json has no list of files"),
        ("model.pt", "manifest.rank-00000.json has no list of files"),
        (["model.pt"], "manifest.rank-00000.json: 'model.pt' describes no file"),
        ([{"path": "../x", "size": 1}], "manifest.rank-00000.json names '../x', which is outside"),
        ([{"path": "x", "size": 1}], "manifest.rank-00000.json: x has the unknown checksum None"),
        ([{"path": "x", "size": "1", "checksum": "sha256:"}], "manifest.rank-00000.json: size is"),
        (
            [{"path": "x", "size": 1, "checksum": "md5:1"}],
            "manifest.rank-00000.json: x has the unk",
        ),
    ],
)
def test_malformed_manifests(path: Path, files: object, reason: str) -> None:
    makers.edit_json(path / layout.manifest_name(0), files=files)
    makers.commit(path)
    refused(path, reason)


def test_a_file_that_is_no_file(path: Path) -> None:
    (path / "model.pt").unlink()
    (path / "model.pt").mkdir()
    refused(path, "not a regular file: model.pt")
