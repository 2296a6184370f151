"""The search: newest complete checkpoint, with a reason for each that is skipped."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elaunch.checkpoint import layout, nodelocal
from elaunch.checkpoint.formats import deepspeed, filetree
from elaunch.checkpoint.records import Checkpoint, SearchOutcome
from elaunch.checkpoint.search.latest import find_latest
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import UsageError
from tests.checkpoint import makers, storages

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


def choice(root: Path, glob: str | None = None) -> tuple[Checkpoint | None, dict[str, str]]:
    """Return the choice, and the reasons by name."""
    search = find_latest(root, glob=glob)
    return search.checkpoint, {passed.path.name: passed.reason for passed in search.passed_over}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", ["checkpoint_3", "step_3", "checkpoint-3", "3"])
def test_a_state_of_accelerate(tmp_path: Path, name: str, safe: bool) -> None:
    path = save_state(tmp_path / name, safe=safe)
    save_state(tmp_path / name.replace("3", "2"))
    assert choice(tmp_path) == (Checkpoint(path, 3, "accelerate"), {})


def test_a_state_of_accelerate_without_a_number(tmp_path: Path) -> None:
    """As in Accelerate's own examples; one with a number in its name is newer or older by that."""
    path = save_state(tmp_path / "my_checkpoint")
    assert choice(tmp_path) == (Checkpoint(path, 3, "accelerate"), {})
    newer = save_state(tmp_path / "step_4")
    assert choice(tmp_path)[0] == Checkpoint(newer, 4, "accelerate")


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
    assert choice(tmp_path) == (Checkpoint(path, 4, "accelerate"), {})


def test_automatic_names_of_accelerate(tmp_path: Path) -> None:
    save_state(tmp_path / "checkpoints" / "checkpoint_9")
    path = save_state(tmp_path / "checkpoints" / "checkpoint_10")
    assert choice(tmp_path)[0] == Checkpoint(path, 10, "accelerate")


def test_a_state_of_accelerate_that_is_not_whole(tmp_path: Path) -> None:
    good = save_state(tmp_path / "checkpoint_1")
    makers.truncate(save_state(tmp_path / "checkpoint_2") / "optimizer.bin", 100)
    (save_state(tmp_path / "checkpoint_3", 3) / "random_states_1.pkl").unlink()
    for rank in range(2):
        (save_state(tmp_path / f"checkpoint_{4 + rank}", 1) / "random_states_0.pkl").unlink()
    makers.truncate(save_state(tmp_path / "checkpoint_6") / "model.safetensors", 50)
    chosen, reasons = choice(tmp_path)
    assert chosen == Checkpoint(good, 1, "accelerate")
    assert "optimizer.bin is truncated" in reasons["checkpoint_2"]
    assert reasons["checkpoint_3"] == "missing: random_states_1.pkl: the save did not finish"
    assert reasons["checkpoint_4"] == "no checkpoint of a known format is in it"
    assert "model.safetensors" in reasons["checkpoint_6"]


def test_a_state_of_accelerate_that_rank_0_did_not_finish(tmp_path: Path) -> None:
    """The other ranks write one small file each, long before rank 0 has written its large ones."""
    good = save_state(tmp_path / "checkpoint_1")
    torn = save_state(tmp_path / "checkpoint_2", 3)
    for name in ("optimizer.bin", "random_states_0.pkl"):
        (torn / name).unlink()
    chosen, reasons = choice(tmp_path)
    assert chosen == Checkpoint(good, 1, "accelerate")
    assert reasons["checkpoint_2"] == "missing: random_states_0.pkl: the save did not finish"


def test_accelerate_with_sharded_models(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoint_5")
    (path / "model.safetensors").unlink()
    makers.dcp_directory(path / "pytorch_model_fsdp_0")
    assert choice(tmp_path)[0] == Checkpoint(path, 5, "accelerate")
    (path / "pytorch_model_fsdp_0" / ".metadata").unlink()
    (path / "pytorch_model_fsdp_0" / ".metadata.tmp").write_bytes(b"x")
    chosen, reasons = choice(tmp_path)
    assert chosen is None and "pytorch_model_fsdp_0" in reasons["checkpoint_5"]


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    path = save_state(tmp_path / "checkpoint_5")
    (path / "model.safetensors").unlink()
    save_checkpoint(path, "pytorch_model")
    assert choice(tmp_path)[0] == Checkpoint(path, 5, "accelerate")
    makers.truncate(path / "pytorch_model" / "mp_rank_00_model_states.pt", 80)
    assert "pytorch_model/: mp_rank_00" in choice(tmp_path)[1]["checkpoint_5"]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_is_given_the_directory_with_latest(tmp_path: Path, stage: int) -> None:
    save_checkpoint(tmp_path, "global_step10", stage=stage)
    save_checkpoint(tmp_path, stage=stage)
    assert choice(tmp_path) == (Checkpoint(tmp_path, 20, "deepspeed"), {})
    assert (tmp_path / "latest").read_text() == "global_step20"


@pytest.mark.parametrize("tag", ["global_step20", "epoch2"])
def test_deepspeed_below_a_directory_of_each_step(tmp_path: Path, tag: str) -> None:
    save_checkpoint(tmp_path / "step_5", tag)
    assert choice(tmp_path) == (Checkpoint(tmp_path / "step_5", 5, "deepspeed"), {})


def test_a_tag_without_a_number_has_its_step_inside(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "best")
    assert choice(tmp_path) == (Checkpoint(tmp_path, 20, "deepspeed"), {})


def test_deepspeed_without_latest(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, latest=False)
    assert choice(tmp_path)[0] == Checkpoint(path, 20, "deepspeed")


def test_a_save_of_deepspeed_that_did_not_finish(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "global_step10")
    save_checkpoint(tmp_path, latest=False)
    chosen, reasons = choice(tmp_path)
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
    assert choice(tmp_path)[0] == Checkpoint(tmp_path, 20, "deepspeed")
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_7" / "latest").write_bytes(content)
    assert choice(tmp_path)[0] == Checkpoint(tmp_path, 20, "deepspeed")


def test_a_trainer_with_deepspeed(tmp_path: Path) -> None:
    path = makers.trainer(tmp_path, 20, weights=False)
    save_checkpoint(path)
    assert choice(tmp_path)[0] == Checkpoint(path, 20, "huggingface")
    makers.truncate(path / "global_step20" / "mp_rank_00_model_states.pt", 80)
    assert choice(tmp_path)[0] is None


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
    assert choice(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")
    assert choice(tmp_path)[0] is None


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
    chosen, reasons = choice(tmp_path, "save_*")
    assert chosen is None and reason in reasons["save_7"]


def test_a_picked_directory_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "save_6").mkdir()
    os.mkfifo(anything(tmp_path / "save_7") / "pipe")
    (anything(tmp_path / "save_8") / "gone").symlink_to("nowhere")
    chosen, reasons = choice(tmp_path, "save_*")
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
        chosen, reasons = choice(tmp_path, "save_*")
    finally:
        over.set()
        writer.join()
    assert chosen is None
    assert reasons["save_7"].startswith("it is still being written: ")
    assert choice(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")
    for file in path.rglob("*"):
        os.utime(file, (time.time() - HOUR,) * 2)
    monkeypatch.setattr(filetree, "STEADY_S", HOUR)
    assert choice(tmp_path, "save_*")[0] == Checkpoint(path, 7, "directory")


def test_nodes_tell_each_other_of_them(tmp_path: Path) -> None:
    save_state(tmp_path / "checkpoint_3")
    anything(tmp_path / "save_7")
    assert [one.step for one in nodelocal.list_local(tmp_path, None, None)[0]] == [3]
    (picked,) = nodelocal.list_local(tmp_path, "save_*", None)[0]
    looked = nodelocal.find_whole(tmp_path, picked, bool)
    assert (looked.problem, looked.format) == ("", "directory")
    assert {file.path for file in looked.wanted or ()} >= {"deep/model.pt", "notes.txt"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory to copy."""
    return makers.dcp_directory(tmp_path_factory.mktemp("dcp") / "template")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file to copy; its global_step is 120."""
    return makers.saved(tmp_path_factory.mktemp("zip") / "template.pt")


def reasons(search: SearchOutcome) -> dict[str, str]:
    """Return the names skipped with their reasons, in order."""
    return {over.path.name: over.reason for over in search.passed_over}


def found(search: SearchOutcome) -> str | None:
    """Return the name of the checkpoint found."""
    return search.checkpoint.path.name if search.checkpoint else None


def test_nothing_there(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing") == SearchOutcome(None, ())
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    (tmp_path / "file").touch()
    assert reasons(find_latest(tmp_path / "file")) == {"file": "Not a directory: file"}


def test_the_order_is_step_then_round_never_time(tmp_path: Path) -> None:
    for step, round_ in ((120, 0), (90, 7), (120, 10), (120, 9), (110, 30)):
        path = makers.own(tmp_path, step, round_)
        os.utime(path, (0, 2_000_000_000 - 1000 * step - 10 * round_))
    path = tmp_path / "step-00000120.r10"
    assert find_latest(tmp_path) == SearchOutcome(Checkpoint(path, 120, "elaunch", 10), ())


def test_numbers_are_compared_as_numbers(tmp_path: Path, template: Path) -> None:
    for name in ("step_9", "step_10", "step_0002"):
        shutil.copytree(template, tmp_path / name)
    assert find_latest(tmp_path) == SearchOutcome(Checkpoint(tmp_path / "step_10", 10, "dcp"), ())


def test_newer_incomplete_ones_are_passed_over_newest_first(tmp_path: Path, template: Path) -> None:
    makers.own(tmp_path, 90)
    makers.own(tmp_path, 100, 1)
    shutil.copytree(template, tmp_path / "step_110")
    torn = Path(shutil.copytree(template, tmp_path / "step_120"))
    size = (torn / "__0_0.distcp").stat().st_size
    makers.truncate(torn / "__0_0.distcp", 512)
    (Path(shutil.copytree(template, tmp_path / "step_130")) / "__0_0.distcp").unlink()
    (makers.own(tmp_path, 140, 2) / layout.COMMIT).unlink()
    makers.trainer(tmp_path, 150, weights=False)
    (tmp_path / "step_160").mkdir()
    search = find_latest(tmp_path)
    assert search.checkpoint == Checkpoint(tmp_path / "step_110", 110, "dcp")
    told = reasons(search)
    assert list(told) == ["step_160", "checkpoint-150", "step-00000140.r2", "step_130", "step_120"]
    assert told["step_160"] == "it is empty"
    assert told["checkpoint-150"].startswith("no weights")
    assert told["step-00000140.r2"] == "not committed: COMMIT is missing"
    assert told["step_130"] == "missing: __0_0.distcp"
    assert told["step_120"] == f"truncated: __0_0.distcp has 512 bytes, .metadata wants {size}"


def test_older_ones_are_not_even_opened(tmp_path: Path) -> None:
    makers.own(tmp_path, 100)
    (tmp_path / "step_99").mkdir()
    os.mkfifo(tmp_path / "step_99" / ".metadata")
    assert find_latest(tmp_path).passed_over == ()


def test_all_formats_side_by_side(tmp_path: Path, template: Path, archive: Path) -> None:
    made = {
        "step-00000010.r0": ("elaunch", 10, makers.own(tmp_path, 10)),
        "global_step20": ("dcp", 20, shutil.copytree(template, tmp_path / "global_step20")),
        "checkpoint-30": ("huggingface", 30, makers.trainer(tmp_path, 30)),
        "epoch=0-step=40.ckpt": (
            "lightning",
            40,
            shutil.copy(archive, tmp_path / "epoch=0-step=40.ckpt"),
        ),
        "step=50.ckpt": ("lightning", 50, shutil.copytree(template, tmp_path / "step=50.ckpt")),
        "last.ckpt": ("lightning", 120, shutil.copy(archive, tmp_path / "last.ckpt")),
        "checkpoint-130": ("dcp", 130, shutil.copytree(template, tmp_path / "checkpoint-130")),
    }
    shutil.copy(archive, tmp_path / "step=50.ckpt" / "meta.pt")
    for name, (format_, step, path) in reversed(made.items()):
        search = find_latest(tmp_path)
        assert search.checkpoint
        assert search.passed_over == ()
        assert (found(search), search.checkpoint.format, search.checkpoint.step) == (
            name,
            format_,
            step,
        )
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def test_of_another_run(tmp_path: Path) -> None:
    makers.own(tmp_path, 200, run_id="mnist")
    makers.own(tmp_path, 100, run_id="digits")
    search = find_latest(tmp_path, run_id="digits")
    assert found(search) == "step-00000100.r0"
    assert reasons(search) == {"step-00000200.r0": "belongs to run mnist"}
    assert found(find_latest(tmp_path)) == "step-00000200.r0"


def test_stage_quarantine_and_temporary_names_are_not_looked_at(
    tmp_path: Path, template: Path
) -> None:
    makers.own(tmp_path / ".stage", 500)
    makers.own(tmp_path / ".quarantine", 500)
    (tmp_path / "latest").symlink_to(".quarantine/step-00000500.r0")
    (tmp_path / "step_501").symlink_to(".stage/step-00000500.r0")
    for name in (".step_500", "step_500.tmp", "tmp-checkpoint-500", "tmp_500"):
        shutil.copytree(template, tmp_path / name)
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    assert find_latest(tmp_path, glob="**/*500*") == SearchOutcome(None, ())


def test_a_copy_from_a_url(tmp_path: Path) -> None:
    """It has another name there, by which no storage in a directory knows it; renamed it is one."""
    pytest.importorskip("fsspec")
    made = storages.save(open_storage(f"file://{tmp_path}"), 120, 3)
    search = find_latest(tmp_path)
    name = Path(str(made.place)).name
    assert found(search) is None
    assert reasons(search) == {
        name: "it has the name of a checkpoint at a URL; rename it to step-00000120.r3"
    }
    (tmp_path / name).rename(tmp_path / "step-00000120.r3")
    assert found(find_latest(tmp_path)) == "step-00000120.r3"


def test_things_that_are_no_checkpoints_are_not_mentioned(tmp_path: Path, archive: Path) -> None:
    (tmp_path / "logs_2024" / "plots").mkdir(parents=True)
    (tmp_path / "version_0").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "run.json").touch()
    shutil.copy(archive, tmp_path / "step_120.pt")
    shutil.copy(archive, tmp_path / "checkpoint_120.pth")
    assert find_latest(tmp_path) == SearchOutcome(None, ())


def test_directories_that_sound_like_checkpoints_are(tmp_path: Path, template: Path) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "model.msgpack").touch()
    shutil.copytree(template, tmp_path / "best")
    assert reasons(find_latest(tmp_path)) == {
        "best": "no number in its name, so its step is not known; "
        "save each step into a new directory, as step-100",
        "step_5": "no checkpoint of a known format is in it",
    }


def test_a_lightning_file_without_a_step(tmp_path: Path, archive: Path) -> None:
    makers.saved(tmp_path / "model_7.ckpt", {"weights": 1})
    shutil.copy(archive, tmp_path / "last.ckpt")
    makers.truncate(tmp_path / "last.ckpt", 300)
    (tmp_path / "epoch=1.ckpt").mkdir()
    told = reasons(find_latest(tmp_path))
    assert "no step= in its name and no global_step in it" in told["model_7.ckpt"]
    assert told["last.ckpt"].startswith("last.ckpt is truncated")
    assert told["epoch=1.ckpt"] == "missing: meta.pt"
    assert found(find_latest(tmp_path, glob="*_*.ckpt")) == "model_7.ckpt"


def test_a_glob_picks_torch_save_files(tmp_path: Path, archive: Path) -> None:
    for name in ("step_9.pt", "step_10.pt", "step_11.pt", "step_x.pt", "step_12.pt.tmp"):
        shutil.copy(archive, tmp_path / name)
    makers.truncate(tmp_path / "step_11.pt", 1000)
    makers.own(tmp_path, 500)
    search = find_latest(tmp_path, glob="step_*")
    assert search.checkpoint == Checkpoint(tmp_path / "step_10.pt", 10, "torch.save")
    told = reasons(search)
    assert list(told) == ["step_x.pt", "step_11.pt"]
    assert told["step_x.pt"] == "no number in its name, so its step is not known"
    assert told["step_11.pt"].startswith("step_11.pt is truncated")


def test_a_glob_picks_directories_and_other_files(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path / "a" / "b" / "step_7")
    makers.safetensors(tmp_path / "a" / "w_6.safetensors")
    makers.own(tmp_path / "a", 5)
    assert found(find_latest(tmp_path, glob="**/step_*")) == "step_7"
    search = find_latest(tmp_path, glob="a/*.safetensors")
    path = tmp_path / "a" / "w_6.safetensors"
    assert search.checkpoint == Checkpoint(path, 6, "safetensors")
    assert found(find_latest(tmp_path, glob="a/step-*")) == "step-00000005.r0"
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    (tmp_path / "logs_9").mkdir()
    assert reasons(find_latest(tmp_path, glob="logs_*")) == {"logs_9": "it is empty"}


def test_a_glob_that_leaves_the_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--checkpoint-glob"):
        find_latest(tmp_path, glob="../*.pt")
    with pytest.raises(UsageError, match="--checkpoint-glob"):
        find_latest(tmp_path, glob="")


def test_links_are_not_counted_twice(tmp_path: Path, template: Path) -> None:
    torn = Path(shutil.copytree(template, tmp_path / "step_120"))
    (torn / ".metadata").unlink()
    (tmp_path / "latest").symlink_to("step_120")
    (tmp_path / "step_121").symlink_to(torn)
    assert list(reasons(find_latest(tmp_path))) == ["step_120"]


def test_links_to_other_disks_count(
    tmp_path: Path, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("disk")
    target = Path(shutil.copytree(template, other / "step_120"))
    (tmp_path / "latest").symlink_to(target)
    assert find_latest(tmp_path).checkpoint == Checkpoint(target, 120, "dcp")
    (tmp_path / "step_130").symlink_to(shutil.copytree(template, other / "plain"))
    assert find_latest(tmp_path).checkpoint == Checkpoint(tmp_path / "step_130", 130, "dcp")
    shutil.rmtree(other)
    assert find_latest(tmp_path) == SearchOutcome(None, ())


def test_a_root_that_is_a_link(tmp_path: Path) -> None:
    path = makers.own(tmp_path / "real", 5)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "latest").symlink_to(path.name)
    search = find_latest(tmp_path / "link")
    assert search.checkpoint == Checkpoint(tmp_path / "link" / path.name, 5, "elaunch", 0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_nobody(folder: Path) -> str:
    """Return what the search prints for a user who is not root."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from elaunch.checkpoint.search.latest import find_latest\n"
        "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        "search = find_latest(Path(sys.argv[1]))\n"
        "print(search.checkpoint and search.checkpoint.path.name)\n"
        "for over in search.passed_over: print(over.path.name, over.reason)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.slow
def test_what_may_not_be_read_is_passed_over(open_folder: Path, template: Path) -> None:
    makers.own(open_folder, 1)
    for name in ("step_2", "step_3"):
        shutil.copytree(template, open_folder / name)
    (open_folder / "step_2" / ".metadata").chmod(0)
    (open_folder / "step_3").chmod(0)
    told = as_nobody(open_folder).splitlines()
    assert told == [
        "step-00000001.r0",
        "step_3 permission denied: step_3",
        "step_2 permission denied: .metadata",
    ]
    open_folder.chmod(0)
    told = as_nobody(open_folder).splitlines()
    assert told == ["None", f"{open_folder.name} permission denied: {open_folder.name}"]


@pytest.mark.slow
def test_retention_while_it_searches(tmp_path: Path, template: Path) -> None:
    for step in range(200):
        shutil.copytree(template, tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "__0_0.distcp").unlink(missing_ok=step > 0)
    shutil.copy(template / "__0_0.distcp", tmp_path / "step_0")
    newest_first = [tmp_path / f"step_{step}" for step in range(199, 0, -1)]

    def remove() -> None:
        for path in newest_first:
            shutil.rmtree(path)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        while remover.is_alive():
            search = find_latest(tmp_path)
            assert found(search) == "step_0"
            kinds = {over.reason.partition(":")[0] for over in search.passed_over}
            assert kinds <= {
                "missing",
                ".metadata is missing",
                "it vanished while it was read",
                "it is empty",
                "no checkpoint of a known format is in it",
            }
    finally:
        remover.join()


@pytest.mark.trial
@pytest.mark.slow
def test_ten_thousand_entries(tmp_path: Path, archive: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"step_{number}.pt").touch()
    makers.own(tmp_path, 50)
    started = time.thread_time()  # CPU time: it is the same on a busy machine
    assert found(find_latest(tmp_path)) == "step-00000050.r0"
    shutil.copy(archive, tmp_path / "step_9990.pt")
    search = find_latest(tmp_path, glob="*.pt")
    assert found(search) == "step_9990.pt"
    assert len(search.passed_over) == 9
    assert time.thread_time() - started < 5


def test_a_search_changes_nothing(tmp_path: Path, template: Path) -> None:
    makers.own(tmp_path, 3)
    (makers.own(tmp_path, 4) / layout.COMMIT).unlink()
    shutil.copytree(template, tmp_path / "step_2")
    makers.trainer(tmp_path, 5, weights=False)

    def listing() -> list[tuple[str, int, int]]:
        status = [(str(path), path.stat()) for path in sorted(tmp_path.rglob("*"))]
        return [(name, entry.st_mtime_ns, entry.st_size) for name, entry in status]

    before = listing()
    find_latest(tmp_path)
    find_latest(tmp_path, glob="**/*")
    assert listing() == before


@pytest.mark.slow
def test_the_search_needs_no_torch() -> None:
    code = "import sys, elaunch.checkpoint.search.latest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_small_state_in_json(tmp_path: Path) -> None:
    """The newest that is whole; what was cut off, or is no object, is skipped by name."""
    makers.write_json(tmp_path / "step_10.json", {"x": 1})
    (tmp_path / "step_20.json").write_text('{"x": 1')
    (tmp_path / "step_30.json").write_text("[]")
    (tmp_path / "step_40.json").write_text("")
    search = find_latest(tmp_path, glob="step_*.json")
    assert search.checkpoint == Checkpoint(tmp_path / "step_10.json", 10, "json")
    reasons = {p.path.name: p.reason for p in search.passed_over}
    assert "is not valid JSON" in reasons["step_20.json"]
    assert reasons["step_30.json"] == "step_30.json holds no JSON object"
    assert reasons["step_40.json"] == "step_40.json is empty"
