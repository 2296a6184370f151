"""Lightning's two forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.checkpoint.formats import lightning
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=120.ckpt", 120),
        ("step=120-v1.ckpt", 120),
        ("step=7-step=120.ckpt", 120),
        ("last.ckpt", None),
        ("step_120.ckpt", None),
    ],
)
def test_step_in_name(name: str, step: int | None) -> None:
    assert lightning.step_in_name(name) == step


def test_step_inside(tmp_path: Path) -> None:
    file = makers.saved(tmp_path / "last.ckpt", {"epoch": 3, "global_step": 121})
    assert lightning.step_inside(file) == 121
    folder = tmp_path / "epoch=3.ckpt"
    makers.saved(folder / "meta.pt", {"epoch": 3, "global_step": 122})
    assert lightning.step_inside(folder) == 122


def test_the_directory_form_needs_both_parts(tmp_path: Path) -> None:
    folder = makers.dcp_directory(tmp_path / "step=120.ckpt")
    with pytest.raises(FileNotFoundError, match=r"meta\.pt"):
        lightning.verify_directory(folder)
    makers.saved(folder / "meta.pt", {"global_step": 120})
    lightning.verify_directory(folder)
    makers.truncate(folder / "meta.pt", 100)
    with pytest.raises(CheckpointError, match=r"meta\.pt is truncated"):
        lightning.verify_directory(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata is missing"):
        lightning.verify_directory(folder)
