"""What one node has: every kind of checkpoint, in part, damaged, foreign."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.nodelocal import LocalCheckpoint, NodeFiles, find_whole, list_local, unite
from tests.checkpoint import makers

RUN = "digits"


def only(root: Path, glob: str | None = None) -> LocalCheckpoint:
    """Return the one checkpoint that is there."""
    checkpoint, _ = list_local(root, glob, RUN)
    assert len(checkpoint) == 1
    return checkpoint[0]


def read_all(root: Path, checkpoint: LocalCheckpoint) -> NodeFiles:
    """Return what the node has of it."""
    return find_whole(root, checkpoint, lambda _: None)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_whole_checkpoint_has_all_that_it_wants(tmp_path: Path) -> None:
    """The documents included, with checksums that the others can check."""
    path = makers.own(tmp_path)
    checkpoint = only(tmp_path)
    assert (checkpoint.path, checkpoint.step, checkpoint.round, checkpoint.format) == (
        path.name,
        120,
        0,
        "elaunch",
    )
    found = read_all(tmp_path, checkpoint)
    assert found.wanted is not None
    assert set(found.files) == set(found.wanted)
    names = {entry.path for entry in found.files}
    assert {"model.pt", "rank1/rng.bin", layout.COMMIT, layout.METADATA} <= names
    assert unite([found]).files[-1].entry.path == layout.COMMIT


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(flip, "bad checksum"), (Path.unlink, "missing"), (lambda p: os.truncate(p, 3), "checksum")],
)
def test_a_damaged_file_is_not_told_of(tmp_path: Path, spoil: object, problem: str) -> None:
    """The rest is: another node may have the file whole."""
    path = makers.own(tmp_path)
    checkpoint = only(tmp_path)
    assert callable(spoil)
    spoil(path / "model.pt")
    found = read_all(tmp_path, checkpoint)
    assert problem in found.problem
    assert "model.pt" not in {entry.path for entry in found.files}
    assert unite([found]).missing == ("model.pt",)


def test_a_damaged_manifest_makes_all_of_it_worthless(tmp_path: Path) -> None:
    """It says what is whole; without it nothing can be told."""
    path = makers.own(tmp_path)
    checkpoint = only(tmp_path)
    flip(path / layout.manifest_name(0))
    found = read_all(tmp_path, checkpoint)
    assert (found.files, found.wanted) == ((), None)
    assert "do not have the digest" in found.problem


def test_what_is_foreign_or_torn_is_passed_over(tmp_path: Path) -> None:
    """With a reason; the newest comes first."""
    makers.own(tmp_path, 10)
    makers.own(tmp_path, 20)
    makers.own(tmp_path, 99, run_id="another")
    (makers.own(tmp_path, 98) / layout.COMMIT).unlink()
    (makers.own(tmp_path, 97) / layout.METADATA).write_text("{")
    checkpoint, passed_over = list_local(tmp_path, None, RUN)
    assert [one.step for one in checkpoint] == [20, 10]
    reasons = {passed.path.name[5:13]: passed.reason for passed in passed_over}
    assert reasons["00000099"] == "belongs to run another"
    assert "not committed" in reasons["00000098"]
    assert "metadata.json" in reasons["00000097"]


def test_another_checkpoint_of_the_same_name_is_another(tmp_path: Path) -> None:
    """A node that committed something else in the same round has nothing of this one."""
    makers.own(tmp_path / "a", 10)
    makers.own(tmp_path / "b", 10, ranks={0: {"model.pt": b"other"}})
    checkpoint = only(tmp_path / "a")
    assert checkpoint != only(tmp_path / "b")
    assert read_all(tmp_path / "b", checkpoint).files == ()


def test_a_directory_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    """And one that cannot be read is an error, not a fresh start."""
    assert list_local(tmp_path / "none", None, RUN) == ([], [])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        list_local(tmp_path / "file", None, RUN)


def test_links_out_of_the_directory_are_left_alone(tmp_path: Path) -> None:
    """Other nodes could not have it at the same place."""
    outside = makers.own(tmp_path / "outside", 30)
    root = tmp_path / "root"
    root.mkdir()
    (root / outside.name).symlink_to(outside)
    makers.own(root, 10)
    (root / "latest").symlink_to("step-00000010.r0")
    checkpoint, _ = list_local(root, None, RUN)
    assert [one.path for one in checkpoint if not (root / one.path).is_symlink()] == [
        "step-00000010.r0"
    ]


def test_a_file_of_torch_is_checked_byte_by_byte(tmp_path: Path) -> None:
    """By the checksums in the archive, which a search on shared storage does not read."""
    import torch

    file = tmp_path / "step_5.pt"
    torch.save({"w": torch.arange(1000.0)}, file)
    checkpoint = only(tmp_path, "step_*.pt")
    assert unite([read_all(tmp_path, checkpoint)]).missing == ()
    flip(file)
    assert "step_5.pt is damaged: Bad CRC-32" in read_all(tmp_path, checkpoint).problem


def test_parts_of_a_dcp_directory_are_told_of(tmp_path: Path) -> None:
    """Also where .metadata is on another node; together they are whole."""
    import torch
    import torch.distributed.checkpoint as dcp

    whole = tmp_path / "a" / "step_7"
    dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=str(whole))
    (whole / "notes.json").write_text("{}")
    part = tmp_path / "b" / "step_7"
    shutil.copytree(whole, part)
    (part / ".metadata").unlink()
    data = next(whole.glob("*.distcp"))
    checkpoint = only(tmp_path / "a")
    assert checkpoint == only(tmp_path / "b")
    assert unite([read_all(tmp_path / "a", checkpoint)]).missing == ()
    data.unlink()
    assert unite([read_all(tmp_path / "a", checkpoint)]).missing == (data.name,)
    assert unite([read_all(tmp_path / "b", checkpoint)]).missing == (".metadata is missing",)
    both = unite([read_all(tmp_path / "a", checkpoint), read_all(tmp_path / "b", checkpoint)])
    assert (both.missing, both.format) == ((), "dcp")
    assert both.files[-1].entry.path == ".metadata"


def test_other_directories_are_none(tmp_path: Path) -> None:
    """One that sounds like a checkpoint is told of, one that does not is not."""
    (tmp_path / "run2024").mkdir()
    (tmp_path / "run2024" / "log").write_text("x")
    (tmp_path / "step_3").mkdir()
    checkpoint, passed_over = list_local(tmp_path, None, RUN)
    assert checkpoint == []
    assert [(p.path.name, p.reason) for p in passed_over] == [("step_3", "it is empty")]


def test_documents_that_do_not_fit_leave_the_rest_whole(tmp_path: Path) -> None:
    """Killed between two renames, or one bit flipped: what the manifests list is there still."""
    path = makers.own(tmp_path, 50)
    makers.edit_json(path / layout.COMMIT, metadata="sha256:of another")
    ((checkpoint,), _) = list_local(tmp_path, None, "digits")
    found = find_whole(tmp_path, checkpoint, int)
    assert found.wanted is None
    assert "metadata.json does not have the checksum" in found.problem
    assert {"model.pt", "rank1/rng.bin"} < {one.path for one in found.files}
    assert {layout.METADATA, layout.COMMIT}.isdisjoint(one.path for one in found.files)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1), (2, 3)])
def test_random_states_of_other_nodes_ranks_are_not_missed(
    tmp_path: Path, ranks: tuple[int, ...]
) -> None:
    """Each node's ranks write theirs there, and a node may be lost with them."""
    path = makers.trainer(tmp_path)
    makers.training_arguments(path, 4)
    for rank in ranks:
        makers.saved(path / f"rng_state_{rank}.pth")
    found = read_all(tmp_path, only(tmp_path))
    assert (found.problem, found.format) == ("", "huggingface")
    assert not unite([found]).missing


def test_a_node_of_accelerate_whose_ranks_are_not_the_first(tmp_path: Path) -> None:
    """With ``save_on_each_node`` it has all of it, else random states alone, which are no whole."""
    path = tmp_path / "step_20"
    for rank in (2, 3):
        makers.saved(path / f"random_states_{rank}.pkl", {"step": 0})
    alone = read_all(tmp_path, only(tmp_path))
    assert alone.problem == "missing: random_states_0.pkl: the save did not finish"
    assert unite([alone]).missing
    makers.saved(path / "optimizer.bin")
    with_states = read_all(tmp_path, only(tmp_path))
    assert (with_states.problem, with_states.format) == ("", "accelerate")
    assert not unite([with_states]).missing
