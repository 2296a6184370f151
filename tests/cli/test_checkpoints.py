"""``elaunch checkpoints`` on real directories: what it shows, finds, refuses and converts."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.checkpoint import retention
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Committed
from elaunch.cli import execute
from tests.checkpoint import makers, storages
from tests.opens import opened_below
from tests.views.conftest import Play, environ, play

__all__ = ["environ", "play"]

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    environ: dict[str, str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Return what runs ``elaunch checkpoints …`` here: (exit code, what it printed)."""
    monkeypatch.setattr(os, "environ", dict(environ))

    def run(*words: object) -> tuple[int, str]:
        capfd.readouterr()
        code = execute(["checkpoints", *map(str, words)])
        told = capfd.readouterr()
        assert not (told.out and told.err), told
        return code, told.out + told.err

    return run


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """Return a directory with the steps 100, 110 and 120."""
    storage = PosixStorage(tmp_path / "ck")
    storage.prepare("digits", given=True)
    for step, loss in ((100, 3.0), (110, 1.5), (120, 2.25)):
        commit(storage, step, loss)
    return tmp_path / "ck"


def commit(storage: PosixStorage, step: int, loss: float, round_: int = 0) -> Committed:
    """Commit a checkpoint of two ranks with a metric."""
    at = storages.stage(step, round_)
    storages.write(storage, at)
    extra = {"metrics": {"loss": loss}, "durations": {"write": 0.5}, "versions": {"elaunch": "1"}}
    return storage.commit(at, lambda: None, extra)


def listed(command: Command, where: object) -> dict[str, Any]:
    """Return ``ls --json``."""
    code, told = command("ls", where, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(told)
    return found


def names(saves: Path) -> list[str]:
    """Return what is committed."""
    return [found.name for found in PosixStorage(saves).listed()]


# ── ls, show ─────────────────────────────────────────────────────────────────────────────────────


def test_a_list_reads_one_document_of_each(command: Command, saves: Path) -> None:
    """Not the manifests, nor the files: there may be thousands."""
    with opened_below(saves) as opened:
        code, said = command("ls", saves)
    assert code == 0 and "step-00000120.r0" in said
    names = sorted(name for name in opened if "/" in name and not name.startswith("."))
    assert names == [f"step-00000{step}.r0/metadata.json" for step in (100, 110, 120)]


def test_the_list(command: Command, saves: Path) -> None:
    """From old to new, with size, pin, state and metrics."""
    assert command("pin", saves, "110") == (0, "pinned step-00000110.r0\n")
    code, told = command("ls", saves)
    rows = [line.split() for line in told.splitlines()]
    assert code == 0 and rows[0] == ["directory", str(saves)]
    assert rows[2] == ["NAME", "STEP", "SIZE", "AGE", "FORMAT", "PINNED", "STATE", "loss"]
    body = [(row[0], row[1], row[-4], row[-3], row[-2], row[-1]) for row in rows[3:]]
    assert body == [
        ("step-00000100.r0", "100", "elaunch", "-", "committed", "3"),
        ("step-00000110.r0", "110", "elaunch", "yes", "committed", "1.5"),
        ("step-00000120.r0", "120", "elaunch", "-", "committed", "2.25"),
    ]


def test_the_list_as_json(command: Command, saves: Path) -> None:
    """All that is known of each."""
    said = listed(command, saves)
    assert (said["directory"], said["newest"]) == (str(saves), "step-00000120.r0")
    last = said["checkpoints"][-1]
    assert (last["state"], last["step"], last["round"], last["pinned"]) == (
        "committed",
        120,
        0,
        False,
    )
    assert (last["run_id"], last["world_size"], last["metrics"]) == ("digits", 2, {"loss": 2.25})
    assert last["size"] >= 2000 and last["written"] > 1e9
    assert (said["quarantined"], said["unfinished"]) == ([], [])


def test_what_is_not_good_is_listed_with_the_reason(command: Command, saves: Path) -> None:
    """In quarantine, without COMMIT, unfinished."""
    storage = PosixStorage(saves)
    storage.quarantine(storage.find("step-00000110.r0"), "bad checksum: rank0.bin")
    (saves / "step-00000120.r0" / "COMMIT").unlink()
    storages.write(storage, storages.stage(130, 1))
    code, told = command("ls", saves)
    assert code == 0
    assert "quarantined: bad checksum: rank0.bin" in told
    assert "damaged: not committed: COMMIT is missing" in told
    assert "unfinished: not committed: it is being written, or its writers are gone" in told
    said = listed(command, saves)
    assert said["newest"] == "step-00000100.r0"
    assert said["quarantined"][0]["name"] == "step-00000110.r0"
    assert command("verify", saves, "step-00000110.r0")[0] == 1


def test_a_metric_is_shown_once(command: Command, saves: Path) -> None:
    """It is kept by its name, and by that of its group, for --checkpoint-keep-best."""
    kept = {
        "loss": 2.0,
        "training.loss": 9.0,
        "validation.loss": 2.0,
        "lr": 0.1,
        "training.lr": 0.1,
    }
    storage = PosixStorage(saves)
    at = storages.stage(130, 0)
    storages.write(storage, at)
    storage.commit(at, lambda: None, {"metrics": kept})
    told = command("ls", saves)[1]
    head = next(line for line in told.splitlines() if "NAME" in line)
    assert head.split()[7:] == ["loss", "training.loss", "lr"]
    told = command("show", saves)[1]
    assert "metric training.loss" in told and "validation.loss" not in told
    assert json.loads(command("show", saves, "--json")[1])["metrics"] == kept


def test_one_checkpoint(command: Command, saves: Path) -> None:
    """The newest without a name; its files and who wrote it; also as JSON."""
    code, told = command("show", saves)
    assert code == 0 and "step-00000120.r0" in told
    for words in ("world size  ", "metric loss", "2.25", "metadata steps_completed", "rank1.bin"):
        assert words in told
    code, told = command("show", saves, "100", "--json")
    said = json.loads(told)
    assert (code, said["name"], said["metadata"]) == (
        0,
        "step-00000100.r0",
        {"steps_completed": 100},
    )
    assert [(file["path"], file["rank"]) for file in said["files"]] == [
        ("rank0.bin", 0),
        ("rank1.bin", 1),
    ]


def test_names(command: Command, saves: Path) -> None:
    """A step, its latest round, a uuid and its beginning, latest, a path."""
    newer = commit(PosixStorage(saves), 110, 9.0, round_=2)
    uuid = newer.uuid
    for name in ("110", uuid, uuid[:8], "step-00000110.r2"):
        code, told = command("show", saves, name, "--json")
        assert (code, json.loads(told)["name"]) == (0, "step-00000110.r2"), name
    code, told = command("show", saves / "step-00000100.r0", "--json")
    assert (code, json.loads(told)["name"]) == (0, "step-00000100.r0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "{}", "999"], "{} has no checkpoint '999'; there are 3, the newest: step-"),
        (["show", "{}", "step-00000120.r1"], "; did you mean 'step-00000120.r0'?"),
        (["ls", "{}/nowhere"], "there is no directory '{}/nowhere'"),
        (["ls", "{}/run.json"], "run.json' is a file; give the directory that it is in"),
        (["ls", "no-such-run"], "there is no run 'no-such-run'"),
        (["show", "{}/.stage", "latest"], "has no checkpoint to resume from"),
        (["show", "{}/.stage", "7"], "has no checkpoint '7'; there is none at all"),
        (["verify", "{}/.stage"], "has no checkpoints"),
        (["export", "{}", "100", "{}/no/dir/x.pt"], "there is no directory"),
        (["export", "{}", "100", "{}/run.json"], "is there already; give another name"),
        (["export", "{}", "100", "{}/" + 300 * "x"], "cannot be written: File name too long"),
        (["ls", "file://{}/nowhere"], "there is no directory '{}/nowhere'"),
        (["ls", "s3://"], "'s3://' is a URL without a bucket; write s3://BUCKET/PATH"),
        (["import", "{}/run.json", "gs:///x", "--step=1"], "'gs:///x' is a URL without a bucket"),
    ],
)
def test_what_is_not_there(command: Command, saves: Path, words: list[str], told: str) -> None:
    """Exit code 2, with the name and what there is; nothing is changed."""
    code, said = command(*(word.format(saves) for word in words))
    assert code == 2 and told.format(saves) in said
    assert len(names(saves)) == 3


def test_a_uuid_that_several_begin_with(command: Command, saves: Path) -> None:
    """Both are named."""
    for path in saves.glob("step-*/metadata.json"):
        makers.edit_json(path, uuid=f"abc-{path.parent.name}")
    code, told = command("show", saves, "abc")
    assert code == 2 and "'abc' begins 3 uuids: of step-00000100.r0, step-00000110.r0" in told


def test_one_in_quarantine(command: Command, saves: Path) -> None:
    """A step finds it if no other has it, and it is said where it lies; the list can be JSON."""
    storage = PosixStorage(saves)
    commit(storage, 130, float("nan"))
    assert json.loads(command("show", saves, "--json")[1])["metrics"] == {"loss": None}
    assert command("ls", saves, "--json")[1].count("NaN") == 0
    for found in storage.listed():
        storage.quarantine(found, "bad checksum: rank0.bin")
    code, told = command("show", saves, "110")
    assert code == 0 and "step-00000110.r0" in told and "bad checksum: rank0.bin" in told
    code, told = command("rm", saves, "110")
    at = f"{saves}/.quarantine/step-00000110.r0"
    assert code == 2 and f"step-00000110.r0 is in quarantine: remove {at} yourself" in told
    code, told = command("show", saves, "7")
    assert code == 2 and "; there is none but in quarantine: step-00000100.r0, step-" in told
    code, told = command("verify", saves, "110")
    assert code == 1 and "bad checksum" in told
    commit(storage, 110, 1.0, round_=1)
    assert json.loads(command("show", saves, "110", "--json")[1])["state"] == "committed"


def test_an_empty_directory(command: Command, tmp_path: Path) -> None:
    """It has none; that is no error."""
    assert command("ls", tmp_path / "tmp") == (0, f"  {tmp_path / 'tmp'} has no checkpoints\n")


# ── verify ───────────────────────────────────────────────────────────────────────────────────────


def test_all_are_good(command: Command, saves: Path) -> None:
    """Without names: all of them."""
    code, told = command("verify", saves)
    assert code == 0
    assert [line.split()[:2] for line in told.splitlines()[1:]] == [
        [name, "good"] for name in names(saves)
    ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", "missing: rank1.bin"),
        ("truncated", "truncated: rank1.bin has 10 bytes, its manifest wants 1000"),
        ("flipped", "bad checksum: rank1.bin"),
        ("manifest", "missing: manifest.rank-00001.json (world size 2)"),
        ("metadata", "metadata.json does not have the checksum in COMMIT"),
    ],
)
def test_damage_is_found(command: Command, saves: Path, damage: str, reason: str) -> None:
    """Exit code 1, the file and what is wrong; the others are good."""
    path = saves / "step-00000110.r0"
    data = path / "rank1.bin"
    if damage == "missing":
        data.unlink()
    elif damage == "truncated":
        makers.truncate(data, 10)
    elif damage == "flipped":
        content = bytearray(data.read_bytes())
        content[500] ^= 1
        data.write_bytes(content)
    elif damage == "manifest":
        (path / "manifest.rank-00001.json").unlink()
    else:
        makers.edit_json(path / "metadata.json", metrics={"loss": 0.0})
    code, told = command("verify", saves, "--json")
    said = {row["name"]: row["reason"] for row in json.loads(told)["checkpoints"]}
    assert code == 1
    assert said == {
        "step-00000100.r0": None,
        "step-00000110.r0": reason,
        "step-00000120.r0": None,
    }
    code, told = command("verify", path)
    assert code == 1 and reason in told
    assert command("verify", saves, "latest")[0] == 0


def test_other_formats(command: Command, tmp_path: Path) -> None:
    """What the reader says of them, in the list and in the verdict; they are not removed."""
    root = tmp_path / "hf"
    makers.trainer(root, 10)
    makers.trainer(root, 20, weights=False)
    makers.safetensors(root / "checkpoint-10" / "model.safetensors")
    code, told = command("ls", root)
    assert code == 0 and "huggingface" in told and "damaged: " in told
    said = listed(command, root)
    assert [(row["name"], row["state"]) for row in said["checkpoints"]] == [
        ("checkpoint-10", "complete"),
        ("checkpoint-20", "damaged"),
    ]
    code, told = command("verify", root)
    assert code == 1 and "complete (its format has no checksums)" in told
    assert command("verify", root, "10")[0] == 0
    code, told = command("rm", root, "10")
    assert code == 2 and "is not a committed checkpoint in elaunch's own layout" in told
    code, told = command("pin", root, "10")
    assert code == 2 and "retention leaves it alone anyway" in told
    code, told = command("export", root, "10", tmp_path / "x.pt")
    assert code == 1 and "has no .metadata: it was not written by torch.distributed" in told


# ── rm, pin ──────────────────────────────────────────────────────────────────────────────────────


def test_removal(command: Command, saves: Path) -> None:
    """What it names goes at once, and once; nothing else."""
    code, told = command("rm", saves, "100", "step-00000110.r0", "step-00000100.r0")
    assert (code, told) == (0, "removed step-00000100.r0\nremoved step-00000110.r0\n")
    assert names(saves) == ["step-00000120.r0"]
    assert os.listdir(saves / ".trash") == []


def test_what_is_needed_is_not_removed_without_force(command: Command, saves: Path) -> None:
    """The newest, a pinned one, one that is read; if one of several may not go, none goes."""
    command("pin", saves, "100")
    for name, told in (
        ("latest", "is the newest, which the next start resumes from"),
        ("100", "is pinned: unpin it, or give --force"),
    ):
        code, said = command("rm", saves, "110", name)
        assert code == 2 and told in said
    with retention.reading(saves / "step-00000110.r0"):
        code, said = command("rm", saves, "110")
        assert code == 2 and "is being read; wait, or give --force" in said
    assert len(names(saves)) == 3
    assert command("rm", saves, "100", "120", "--force")[0] == 0
    assert names(saves) == ["step-00000110.r0"]
    assert os.listdir(saves / ".pins") == []


@pytest.mark.slow
def test_what_a_living_run_has_resumed_from(command: Command, saves: Path, play: Play) -> None:
    """It stays until the next is committed; the run also names the directory."""
    resumed = {"path": str(saves / "step-00000100.r0"), "step": 100, "format": "elaunch"}
    play(run_id="digits", checkpoint_dir=str(saves), checkpoint=resumed)
    code, told = command("rm", saves, "100")
    assert code == 2 and "is what the living run digits has resumed from" in told
    code, told = command("ls", "digits")
    assert code == 0 and "committed, digits has resumed from it" in told
    assert listed(command, "dig")["resumed_from"] == {"step-00000100.r0": "digits"}


@pytest.mark.slow
def test_a_directory_whose_checkpoints_a_glob_names(
    command: Command, play: Play, tmp_path: Path
) -> None:
    """The run that has used it knows it."""
    (tmp_path / "ckpt").mkdir()
    for step in (7, 8):
        makers.saved(tmp_path / "ckpt" / f"step_{step}.pt")
    play(run_id="own", checkpoint_dir=str(tmp_path / "ckpt"), checkpoint_glob="step_*.pt")
    for where in ("own", tmp_path / "ckpt", f"{tmp_path}/ckpt/", f"file://{tmp_path}/ckpt"):
        code, told = command("ls", where)
        assert code == 0 and "step_7.pt" in told and "step_8.pt" in told, told


def test_a_run_without_a_directory(command: Command, play: Play, environ: dict[str, str]) -> None:
    """What its script has saved beside its record is found; else the fix is named."""
    play(run_id="plain")
    code, told = command("ls", "plain")
    assert code == 2 and "had no --checkpoint-dir, and its script has saved nothing" in told
    storage = PosixStorage(Path(environ["XDG_STATE_HOME"]) / "elaunch" / "plain" / "checkpoints")
    storage.prepare("plain", given=True)
    commit(storage, 5, 1.0)
    assert listed(command, "plain")["newest"] == "step-00000005.r0"


def test_pins(command: Command, saves: Path) -> None:
    """Set and taken back, as often as one likes."""
    for _ in range(2):
        assert command("pin", saves, "100", "latest")[0] == 0
    assert sorted(os.listdir(saves / ".pins")) == ["step-00000100.r0", "step-00000120.r0"]
    for _ in range(2):
        assert command("unpin", saves, "100") == (0, "unpinned step-00000100.r0\n")
    assert os.listdir(saves / ".pins") == ["step-00000120.r0"]


# ── export, import ───────────────────────────────────────────────────────────────────────────────


def state() -> dict[str, Any]:
    """Return what a script saves: a model, an optimizer with a state, plain values."""
    import torch

    model = torch.nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": {"nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0, 3)},
        "step": 120,
        "names": ["a", "b"],
    }


def same(one: Any, two: Any) -> bool:
    """Tell whether two states are equal to the bit."""
    import torch

    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        flat = [tensor.flatten().view(torch.uint8).tolist() for tensor in (one, two)]
        return bool((one.dtype, one.shape, flat[0]) == (two.dtype, two.shape, flat[1]))
    return bool(type(one) is type(two) and one == two)


@pytest.mark.slow
def test_a_file_goes_in_and_comes_out_equal_to_the_bit(command: Command, tmp_path: Path) -> None:
    """As a committed checkpoint of DCP in between; a second one of a step is a later round."""
    import torch

    saved, root = state(), tmp_path / "ck"
    torch.save(saved, tmp_path / "in.pt")
    code, told = command("import", tmp_path / "in.pt", root, "--step", 120, "--run-id", "digits")
    assert (code, told) == (0, f"committed step-00000120.r0 of run digits in {root}\n")
    assert command("import", tmp_path / "in.pt", root, "--step=120")[0] == 0
    found = PosixStorage(root).listed()
    assert [(one.name, one.run_id) for one in found] == [
        ("step-00000120.r0", "digits"),
        ("step-00000120.r1", "digits"),
    ]
    assert found[0].metadata == {
        "steps_completed": 120,
        "imported_from": "in.pt",
        "number_keys": [["optimizer", "state"]],
    }
    assert command("verify", root)[0] == 0
    assert command("export", root, "120", tmp_path / "out.pt")[0] == 0
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), saved)
    assert [path.name for path in tmp_path.glob(".out*")] == []


def test_dicts_without_a_key(command: Command, tmp_path: Path) -> None:
    """DCP leaves them out; alone, in lists, beside numbers, behind an URL of files."""
    import torch

    one = torch.ones(1)
    saved = {
        "fresh": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "only": {"a": {"b": {}}},
        "list": [{}, one, {}, {"c": [{}]}, {}],
        "numbers": {0: {}, 7: {"x": {}}, 8: one},
        "whole": ({}, {1: {}}, [{}]),
        "plain": [None, []],
        "e": {},
    }
    torch.save(saved, tmp_path / "in.pt")
    root = f"file://{tmp_path}/ck"
    assert command("import", tmp_path / "in.pt", root, "--step=1")[0] == 0
    assert names(tmp_path / "ck") == ["step-00000001.r0"]
    assert command("export", root, "1", tmp_path / "out.pt")[0] == 0
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), saved)
    torch.save({"e": {}}, tmp_path / "in.pt")
    assert command("import", tmp_path / "in.pt", root, "--step=2")[0] == 0
    assert command("export", root, "2", tmp_path / "out.pt", "--force")[0] == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True) == {"e": {}}
    assert command("rm", root, "1")[0] == command("verify", root)[0] == 0


def test_what_an_export_replaces(command: Command, tmp_path: Path) -> None:
    """A regular file, also behind a link; nothing else."""
    import torch

    makers.dcp_directory(tmp_path / "dcp" / "step_120")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target.pt").write_text("old")
    for name, target in (("link", "target.pt"), ("new", "new.pt"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    for name, told in (("fifo", "is no regular file"), ("loop", "symbolic links")):
        code, said = command("export", tmp_path / "dcp", "120", tmp_path / name, "--force")
        assert code == 2 and told in said
    for name, target in (("link", "target.pt"), ("new", "new.pt")):
        assert command("export", tmp_path / "dcp", "120", tmp_path / name, "--force")[0] == 0
        assert (tmp_path / name).is_symlink()
        assert torch.load(tmp_path / target, weights_only=True)["step"] == 120
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "loop").is_symlink()


def test_a_file_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    """What the system says of it, not what torch makes of that; nothing is left behind."""
    import torch

    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "in.pt")
    assert command("import", tmp_path / "in.pt", tmp_path / "ck", "--step=1")[0] == 0
    with no_file_beyond(1 << 16):
        code, told = command("export", tmp_path / "ck", "1", tmp_path / "out.pt")
        assert (code, told) == (1, f"elaunch: error: {tmp_path}/out.pt: File too large\n")
        code, told = command("import", tmp_path / "in.pt", tmp_path / "ck", "--step=2")
    assert code == 1 and told.endswith(": File too large\n") and str(tmp_path / "ck") in told
    assert names(tmp_path / "ck") == ["step-00000001.r0"]
    assert not list(tmp_path.glob("*out.pt*")) and not os.listdir(tmp_path / "ck" / ".stage")
    code, told = command("export", tmp_path / "ck", "1", "/proc/x.pt")
    assert code == 1 and told.startswith("elaunch: error: /proc/x.pt: ")


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Have the system refuse writes behind this offset of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_directory_of_dcp_alone_is_exported(command: Command, tmp_path: Path) -> None:
    """Also where the checkpoint itself is given."""
    import torch

    makers.dcp_directory(tmp_path / "dcp" / "step_120")
    code, _ = command("export", tmp_path / "dcp", "step_120", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert code == 0 and torch.equal(found["model"]["w"], torch.ones(32, 32))
    assert (found["step"], found["lr"]) == (120, {"a": 0.1})


def test_damage_is_not_exported(command: Command, tmp_path: Path) -> None:
    """A flipped bit of a tensor, which torch would not see; and no file is left behind."""
    makers.saved(tmp_path / "in.pt")
    root = tmp_path / "ck"
    assert command("import", tmp_path / "in.pt", root, "--step=1")[0] == 0
    data = next((root / "step-00000001.r0").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, told = command("export", root, "latest", tmp_path / "out.pt")
    assert code == 1 and "step-00000001.r0 is damaged: bad checksum: " in told
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    "what", ["text", "short", "list", "empty", "class", "zip", "keys", "mixed"]
)
def test_what_cannot_be_imported(command: Command, tmp_path: Path, what: str) -> None:
    """Exit code 1, the reason, and nothing is left in the directory."""
    import torch

    file, root = tmp_path / "in.pt", tmp_path / "ck"
    if what == "text":
        file.write_text("hello")
    elif what == "short":
        file.write_text("junk")
    elif what == "zip":
        makers.saved(file)
        makers.truncate(file, 100)
    else:
        things = {
            "list": [1],
            "empty": {},
            "class": {"a": Path("/x")},
            "keys": {1: 2},
            "mixed": {"a": {1: 2, "b": 3}},
        }
        torch.save(things[what], file)
    code, told = command("import", file, root, "--step=1")
    assert code == 1 and str(file) in told
    assert ("give --trust" in told) == (what == "class")
    assert names(root) == [] and os.listdir(root / ".stage") == []
    if what == "class":
        assert command("import", file, root, "--step=1", "--trust")[0] == 0


def test_another_run_has_the_directory(command: Command, saves: Path, tmp_path: Path) -> None:
    """Nothing is imported for a run that would not find it, nor beside a living job."""
    makers.saved(tmp_path / "in.pt")
    code, told = command("import", tmp_path / "in.pt", saves, "--step=1", "--run-id=other")
    assert code == 1 and "belongs to run 'digits'" in told
    lock = PosixStorage(saves).lock()
    code, told = command("import", tmp_path / "in.pt", saves, "--step=1")
    lock.close()
    assert code == 1 and str(os.getpid()) in told
    assert len(names(saves)) == 3


# ── the command ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_listing_does_not_import_torch(saves: Path, environ: dict[str, str]) -> None:
    """As no command but export and import does."""
    code = (
        "import sys; from elaunch.cli import execute\n"
        f"code = execute(['checkpoints', 'verify', {str(saves)!r}])\n"
        "print(code, [name for name in ('torch', 'rich') if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stderr


@pytest.mark.slow
def test_nobody_reads_on(saves: Path, environ: dict[str, str]) -> None:
    """As behind ``| head``: nothing is said of it."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "-m", "elaunch", "checkpoints", "show", str(saves)]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, timeout=60, env=environ)
    os.close(writing)
    assert done.stderr == b"" and done.returncode != 0


def test_a_url(command: Command) -> None:
    """The same commands, on storage that fsspec knows."""
    pytest.importorskip("fsspec")
    from elaunch.checkpoint.storage.storage import open_storage

    url = f"memory://cli-{os.getpid()}"
    storage = open_storage(url)
    storage.prepare("digits", given=True)
    for step in (1, 2):
        at = storages.stage(step, 0)
        storages.write(storage, at, {0: {"x.bin": b"x" * step}})
        storage.commit(at, lambda: None)
    assert [row["size"] > 0 for row in listed(command, url)["checkpoints"]] == [True, True]
    assert command("verify", url)[0] == 0
    assert command("pin", url, "1")[0] == 0
    assert command("rm", url, "1")[0] == 2
    assert command("unpin", url, "1")[0] == command("rm", url, "1")[0] == 0
    assert [row["name"] for row in listed(command, url)["checkpoints"]] == ["step-00000002.r0"]
