"""Directories of Accelerate and DeepSpeed, and any that a pattern picks, as these write them."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from elaunch.checkpoint import nodelocal
from elaunch.checkpoint.formats import deepspeed, filetree
from elaunch.checkpoint.records import Checkpoint
from elaunch.checkpoint.search.latest import find_latest
from tests.checkpoint import makers

HOUR = 3600.0


@pytest.fixture(autouse=True)
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be young but where a test is about that."""
    monkeypatch.setattr(filetree, "OLD_S", 0.0)


def save_state(path: Path, ranks: int = 2, *, safe: bool = True) -> Path:
    """Write what ``Accelerator.save_state`` of 1.15 leaves, in its order."""
    path.mkdir(parents=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if safe:
        makers.safetensors(path / "model.safetensors")
    else:
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.bin")
    torch.save({"last_epoch": 3}, path / "scheduler.bin")
    torch.save({"seed": 4}, path / "sampler.bin")
    for rank in range(ranks):
        states = {"step": 3, "random_state": random.getstate(), "torch_manual_seed": torch.ones(4)}
        torch.save(states, path / f"random_states_{rank}.pkl")
    torch.save({"count": 1}, path / "custom_checkpoint_0.pkl")
    return path


def save_checkpoint(
    root: Path, tag: str = "global_step20", ranks: int = 2, *, latest: bool = True, stage: int = 2
) -> Path:
    """Write what DeepSpeed's ``engine.save_checkpoint(root, tag)`` leaves, in its order."""
    path = root / tag
    path.mkdir(parents=True)
    states = {"module": {"w": torch.ones(4)}, "global_steps": 20}
    for rank in range(ranks):
        if stage == 3:
            torch.save(states, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(states, path / "mp_rank_00_model_states.pt")
        torch.save(
            {"w": torch.ones(4)}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    (root / "zero_to_fp32.py").write_text("print('a script of DeepSpeed')\n")
    if latest:
        (root / "latest").write_text(tag)
    return path


def found(root: Path, glob: str | None = None) -> tuple[Checkpoint | None, dict[str, str]]:
    """Return the choice, and the reasons by name."""
    search = find_latest(root, glob=glob)
    return search.checkpoint, {passed.path.name: passed.reason for passed in search.passed_over}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", ["checkpoint_3", "step_3", "checkpoint-3", "3"])
def test_a_state_of_accelerate(tmp_path: Path, name: str, safe: bool) -> None:
    path = save_state(tmp_path / name, safe=safe)
    save_state(tmp_path / name.replace("3", "2"))
    assert found(tmp_path) == (Checkpoint(path, 3, "accelerate"), {})


def test_a_state_of_accelerate_without_a_number(tmp_path: Path) -> None:
    """As in Accelerate's own examples; one with a number in its name is newer or older by that."""
    path = save_state(tmp_path / "my_checkpoint")
    assert found(tmp_path) == (Checkpoint(path, 3, "accelerate"), {})
    newer = save_state(tmp_path / "step_4")
    assert found(tmp_path)[0] == Checkpoint(newer, 4, "accelerate")


def test_a_directory_without_a_number_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lost+found: nobody takes it for a checkpoint."""
    path = save_state(tmp_path / "step_4")
    (tmp_path / "lost+found").mkdir()
    real = os.listdir

    def listdir(place: Path) -> list[str]:
        if Path(place).name == "lost+found":
            raise PermissionError(13, "Permission denied", str(place))
        return real(place)

    monkeypatch.setattr(os, "listdir", listdir)
    assert found(tmp_path) == (Checkpoint(path, 4, "accelerate"), {})


def test_automatic_names_of_accelerate(tmp_path: Path) -> None:
    save_state(tmp_path / "checkpoints" / "checkpoint_9")
    path = save_state(tmp_path / "checkpoints" / "checkpoint_10")
    assert found(tmp_path)[0] == Checkpoint(path, 10, "accelerate")


def test_a_state_of_accelerate_that_is_not_whole(tmp_path: Path) -> None:
    good = save_state(tmp_path / "checkpoint_1")
    makers.truncate(save_state(tmp_path / "checkpoint_2") / "optimizer.bin", 100)
    (save_state(tmp_path / "checkpoint_3", 3) / "random_states_1.pkl").unlink()
    for rank in range(2):
        (save_state(tmp_path / f"checkpoint_{4 + rank}", 1) / "random_states_0.pkl").unlink()
    makers.truncate(save_state(tmp_path / "checkpoint_6") / "model.safetensors", 50)
    chosen, reasons = found(tmp_path)
    assert chosen == Checkpoint(good, 1, "accelerate")
    assert "optimizer.bin is truncated" in reasons["checkpoint_2"]
    assert reasons["checkpoint_3"] == "missing: random_states_1.pkl: the save did not finish"
    assert reasons["checkpoint_4"] == "no checkpoint of a known format is in it"
    assert "model.safetensors" in reasons["checkpoint_6"]


def test_accelerate_with_sharded_models(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoint_5")
    (path / "model.safetensors").unlink()
    makers.dcp_directory(path / "pytorch_model_fsdp_0")
    assert found(tmp_path)[0] == Checkpoint(path, 5, "accelerate")
    (path / "pytorch_model_fsdp_0" / ".metadata").unlink()
    (path / "pytorch_model_fsdp_0" / ".metadata.tmp").write_bytes(b"x")
    chosen, reasons = found(tmp_path)
    assert chosen is None and "pytorch_model_fsdp_0" in reasons["checkpoint_5"]


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoint_5")
    (path / "model.safetensors").unlink()
    save_checkpoint(path, "pytorch_model")
    assert found(tmp_path)[0] == Checkpoint(path, 5, "accelerate")
    makers.truncate(path / "pytorch_model" / "mp_rank_00_model_states.pt", 80)
    assert "pytorch_model/: mp_rank_00" in found(tmp_path)[1]["checkpoint_5"]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_given_the_directory_with_latest(tmp_path: Path, stage: int) -> None:
    save_checkpoint(tmp_path, "global_step10", stage=stage)
    save_checkpoint(tmp_path, stage=stage)
    assert found(tmp_path) == (Checkpoint(tmp_path, 20, "deepspeed"), {})
    assert (tmp_path / "latest").read_text() == "global_step20"


@pytest.mark.parametrize("tag", ["global_step20", "epoch2"])
def test_deepspeed_below_a_directory_of_each_step(tmp_path: Path, tag: str) -> None:
    save_checkpoint(tmp_path / "step_5", tag)
    assert found(tmp_path) == (Checkpoint(tmp_path / "step_5", 5, "deepspeed"), {})


def test_a_tag_without_a_number_has_its_step_inside(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "best")
    assert found(tmp_path) == (Checkpoint(tmp_path, 20, "deepspeed"), {})


def test_deepspeed_without_latest(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, latest=False)
    assert found(tmp_path)[0] == Checkpoint(path, 20, "deepspeed")


def test_a_save_of_deepspeed_that_did_not_finish(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "global_step10")
    save_checkpoint(tmp_path, latest=False)
    chosen, reasons = found(tmp_path)
    assert chosen == Checkpoint(tmp_path, 10, "deepspeed")
    told = "the save did not finish: latest still names global_step10"
    assert reasons == {"global_step20": told}


def test_a_damaged_tag_and_what_latest_names_then(tmp_path: Path) -> None:
    older = save_checkpoint(tmp_path, "global_step10")
    (save_checkpoint(tmp_path) / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    search = find_latest(tmp_path)
    assert (search.checkpoint, search.found) == (Checkpoint(tmp_path, 10, "deepspeed"), older)
    assert search.passed_over[0].reason.startswith("missing: bf16_zero_pp_rank_0_mp_rank_00")
    assert deepspeed.point_to(older) == "global_step20"
    assert (tmp_path / "latest").read_text() == "global_step10"
    assert deepspeed.point_to(older) == ""


@pytest.mark.parametrize(
    "content", [b"", b"../x", b"/etc", b"\xff", b"nowhere", b"a\0b", b"x" * 9999]
)
def test_a_latest_that_names_nothing(tmp_path: Path, content: bytes) -> None:
    """Whatever ``latest`` says, nothing outside is looked at, and nothing is raised."""
    save_checkpoint(tmp_path)
    (tmp_path / "latest").write_bytes(content)
    assert found(tmp_path)[0] == Checkpoint(tmp_path, 20, "deepspeed")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "latest").write_bytes(content)
    assert found(tmp_path)[0] == Checkpoint(tmp_path, 20, "deepspeed")


def test_a_trainer_with_deepspeed(tmp_path: Path) -> None:
    path = makers.trainer(tmp_path, 20, weights=False)
    save_checkpoint(path)
    assert found(tmp_path)[0] == Checkpoint(path, 20, "huggingface")
    makers.truncate(path / "global_step20" / "mp_rank_00_model_states.pt", 80)
    assert found(tmp_path)[0] is None


def anything(path: Path) -> Path:
    """Write files of several kinds into a directory."""
    (path / "deep").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, path / "deep" / "model.pt")
    makers.safetensors(path / "weights.safetensors")
    (path / "args.json").write_text(json.dumps([1, 2]))
    (path / "notes.txt").write_text("by hand")
    (path / "raw.bin").write_bytes(b"\0" * 100)
    (path / "done").touch()
    return path


def test_any_directory_that_a_pattern_picks(tmp_path: Path) -> None:
    path = anything(tmp_path / "save_7")
    assert found(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")
    assert found(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("deep/model.pt", b"PK\3\4", "deep/: model.pt is truncated"),
        ("deep/model.pt", b"", "deep/: model.pt is empty"),
        ("deep/model.pt", b"\0" * 50, "deep/: model.pt is not a zip"),
        ("weights.safetensors", b"\0", "weights.safetensors is truncated"),
        ("args.json", b'{"a": ', "args.json is not valid JSON"),
        ("raw.bin", b"PK\3\4", "raw.bin is truncated"),
        (".metadata", b"x", ".metadata is not a readable pickle"),
    ],
)
def test_a_picked_directory_with_a_torn_file(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (anything(tmp_path / "save_7") / name).write_bytes(content)
    chosen, reasons = found(tmp_path, "save_*")
    assert chosen is None and reason in reasons["save_7"]


def test_a_picked_directory_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "save_6").mkdir()
    os.mkfifo(anything(tmp_path / "save_7") / "pipe")
    (anything(tmp_path / "save_8") / "gone").symlink_to("nowhere")
    chosen, reasons = found(tmp_path, "save_*")
    assert chosen is None
    assert reasons["save_7"] == "not a regular file: pipe"
    assert reasons["save_8"] == "missing: gone"
    assert reasons["save_6"] == "it is empty"


@pytest.mark.slow
def test_a_picked_directory_must_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young one is watched for a while, an old one is not."""
    monkeypatch.setattr(filetree, "OLD_S", 60.0)
    monkeypatch.setattr(filetree, "STEADY_S", 1.0)
    path = anything(tmp_path / "save_7")
    over = threading.Event()

    def write() -> None:
        with (path / "log.txt").open("w") as file:
            while not over.wait(0.01):
                file.write("more")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        chosen, reasons = found(tmp_path, "save_*")
    finally:
        over.set()
        writer.join()
    assert chosen is None
    assert reasons["save_7"].startswith("it is still being written: ")
    assert found(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")
    for file in path.rglob("*"):
        os.utime(file, (time.time() - HOUR,) * 2)
    monkeypatch.setattr(filetree, "STEADY_S", HOUR)
    assert found(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")


def test_nodes_tell_each_other_of_them(tmp_path: Path) -> None:
    save_state(tmp_path / "checkpoint_3")
    anything(tmp_path / "save_7")
    assert [one.step for one in nodelocal.list_local(tmp_path, None, None)[0]] == [3]
    (picked,) = nodelocal.list_local(tmp_path, "save_*", None)[0]
    looked = nodelocal.find_whole(tmp_path, picked, bool)
    assert (looked.problem, looked.format) == ("", "directory")
    assert {file.path for file in looked.wanted or ()} >= {"deep/model.pt", "notes.txt"}
