"""Reading plain files: nothing blocks, nothing leaves the checkpoint's directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.storage.files import (
    explain,
    inside,
    is_temporary,
    open_regular,
    read_json,
    regular_size,
    sounds_like_checkpoint,
    step_in_name,
    text_in,
    whole_number,
)
from elaunch.errors import CheckpointError


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_1.pt")
    for read in (open_regular, regular_size, read_json):
        with pytest.raises(CheckpointError, match=r"not a regular file: step_1\.pt"):
            read(tmp_path / "step_1.pt")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_regular(tmp_path)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "\ud800", None, 3, ["a"]]
)
def test_paths_stay_inside(tmp_path: Path, name: object) -> None:
    with pytest.raises(CheckpointError, match="the manifest names"):
        inside(tmp_path, name, "the manifest")


def test_paths_below_are_fine(tmp_path: Path) -> None:
    assert inside(tmp_path, "a/./b..c", "m") == tmp_path / "a" / "b..c"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\0\0\0\0", "is empty"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "no JSON object"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_bad_json(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.json .*{reason}|a\.json {reason}"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", [None, True, -1, 1.0, "1", [1]])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"a\.json: step is"):
        whole_number({"step": value}, "step", "a.json")
    assert whole_number({"step": 0}, "step", "a.json") == 0


def test_reasons_for_what_the_system_says(tmp_path: Path) -> None:
    file, gone = str(tmp_path / "shard" / "a.bin"), tmp_path / "gone"
    assert explain(FileNotFoundError(errno.ENOENT, "", file), tmp_path) == "missing: shard/a.bin"
    assert "vanished" in explain(FileNotFoundError(errno.ENOENT, "", str(gone / "a")), gone)
    assert explain(PermissionError(errno.EACCES, "", file), tmp_path).startswith(
        "permission denied"
    )
    assert explain(OSError(errno.EIO, ""), tmp_path) == "Input/output error"
    assert explain(OSError("odd"), tmp_path) == "odd"
    name = f"Stale file handle: {tmp_path.name}"
    assert explain(OSError(errno.ESTALE, "", str(tmp_path)), tmp_path) == name


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_120", 120),
        ("step-120", 120),
        ("Step120", 120),
        ("steps_120", 120),
        ("120", 120),
        ("00120", 120),
        ("checkpoint_120", 120),
        ("global_step120", 120),
        ("epoch_3_step_120", 120),
        ("epoch=3-step=120", 120),
        ("step_120_epoch_3", 120),
        ("iter_0000120", 120),
        ("model_v2", 2),
        ("v1.120", 120),
        ("latest", None),
        ("step", None),
        ("stepping_up_7", 7),
        ("step_٣", None),
    ],
)
def test_step_of_a_directory(name: str, step: int | None) -> None:
    assert step_in_name(name, is_file=False) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_120.pt", 120),
        ("step_120.pt2", 120),
        ("ckpt_120.pt2", 120),
        ("ckpt.120", 120),
        ("step_120_rank0.pt", 120),
        ("epoch=3-step=120-loss=0.25.ckpt", 120),
        ("model_7_120.pth", 120),
        ("last.pt", None),
    ],
)
def test_step_of_a_file(name: str, step: int | None) -> None:
    assert step_in_name(name, is_file=True) == step


@given(st.integers(min_value=0), st.sampled_from(["step_{}.pt", "a1-step-{:08d}", "x3_{}.pth"]))
def test_any_number_is_read_back(step: int, template: str) -> None:
    assert step_in_name(template.format(step), is_file=True) == step


@pytest.mark.parametrize(
    "name",
    ".tmp step_5.pt.tmp tmp-checkpoint-5 tmp_5 .step_5 step_5.tmp.pt step_5.pt.tmp.4711".split(),
)
def test_temporary_names(name: str) -> None:
    assert is_temporary(name)


def test_finished_names_are_not_temporary() -> None:
    assert not any(map(is_temporary, ["step_5.pt", "attempt_5", "checkpoint-5", "5"]))


def test_what_people_take_for_a_checkpoint() -> None:
    names = ["step_5", "checkpoint-5", "ckpt5", "120", "logs_2024", "version_0", "run12"]
    assert [sounds_like_checkpoint(name) for name in names] == [True] * 4 + [False] * 3


def test_the_text_in_a_document(tmp_path: Path) -> None:
    """Of what has none, or would hold a reader up, nothing is returned."""
    (tmp_path / "run.json").write_text('{"run_id": "digits", "created": 1.0}')
    assert text_in(tmp_path, "run.json", "run_id") == "digits"
    assert text_in(tmp_path, "run.json", "created") == ""
    assert text_in(tmp_path, "gone.json", "run_id") == ""
    assert text_in("s3://bucket/run", "run.json", "run_id") == ""
    (tmp_path / "torn.json").write_text('{"run_id": "dig')
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("torn.json", "pipe.json"):
        assert text_in(tmp_path, name, "run_id") == ""
