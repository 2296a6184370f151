"""What nodes tell each other of saves that were not committed everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.checkpoint import nodelocal
from elaunch.checkpoint.records import Image, ShardHeader, Stage
from elaunch.checkpoint.storage.storage import Storage, open_storage

STAGE = Stage(50, 0, "abc")


def node(root: Path, rank: int) -> tuple[Storage, bytes]:
    """Write one rank's shard, with its manifest, on its own disk."""
    storage = open_storage(root, local=True)
    storage.prepare("digits", True)
    part = ShardHeader(rank, 2, "digits", {"steps_completed": 50})
    return storage, storage.write_shard(STAGE, part, [Image(f"state_{rank}", [b"x"])])


def test_each_gets_what_the_other_has_sealed(tmp_path: Path) -> None:
    """And can commit then; of a stage that it does not have nothing is made."""
    roots = [tmp_path / str(rank) for rank in (0, 1)]
    made = [node(root, rank) for rank, root in enumerate(roots)]
    merged = nodelocal.merged_manifests([nodelocal.staged_manifests(root) for root in roots])
    assert merged == {STAGE.name: {0: made[0][1], 1: made[1][1]}}
    merged[Stage(60, 0, "other").name] = {0: b"{}"}
    for root, (storage, _) in zip(roots, made, strict=True):
        nodelocal.adopt_manifests(root, merged)
        (done,) = storage.finish_stages("digits")
        assert done.step == 50
        assert nodelocal.staged_manifests(root) == {}
        assert nodelocal.committed_paths(root) == {STAGE.name: root / STAGE.final}


def test_one_ranks_own_manifest_is_never_replaced(tmp_path: Path) -> None:
    """By whatever another node says."""
    _, manifest = node(tmp_path, 0)
    nodelocal.adopt_manifests(tmp_path, {STAGE.name: {0: b"{}"}})
    assert nodelocal.staged_manifests(tmp_path) == {STAGE.name: {0: manifest}}
    assert nodelocal.merged_manifests([{"s": {0: b"first"}}, {"s": {0: b"second"}}]) == {
        "s": {0: b"first"}
    }


def test_a_directory_that_elaunch_does_not_write_to(tmp_path: Path) -> None:
    """Has nothing to tell, whether it is there or not."""
    for root in (tmp_path, tmp_path / "none"):
        assert (nodelocal.staged_manifests(root), nodelocal.committed_paths(root)) == ({}, {})
        nodelocal.adopt_manifests(root, {STAGE.name: {0: b"{}"}})
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_is_discarded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is none: neither who tells of the stages nor who completes them fails."""
    storage, _ = node(tmp_path, 0)
    listed = nodelocal._stages(tmp_path)
    storage.discard(STAGE)
    monkeypatch.setattr(nodelocal, "_stages", lambda _: listed)
    assert nodelocal.staged_manifests(tmp_path) == {}
    nodelocal.adopt_manifests(tmp_path, {STAGE.name: {1: b"{}"}})
    assert not list((tmp_path / ".stage").glob("step-*"))
