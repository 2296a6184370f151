"""Pins in a directory and at a URL."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from elaunch.checkpoint import shelves
from elaunch.errors import CheckpointError
from elaunch.files import NotOwnError

NAME, OTHER = "step-00000120.r3", "step-00000007.r0"


@pytest.fixture(params=["directory", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Return an empty place of either kind."""
    if request.param == "directory":
        return tmp_path
    pytest.importorskip("fsspec")
    return f"memory://pins-{uuid.uuid4().hex}"


def test_pins_are_set_and_taken_back(place: Path | str) -> None:
    """Each as often as one likes."""
    assert shelves.pinned(place) == frozenset()
    shelves.unpin(place, NAME)
    for name in (NAME, OTHER, NAME):
        shelves.pin(place, name)
    assert shelves.pinned(place) == {NAME, OTHER}
    shelves.unpin(place, NAME)
    shelves.unpin(place, NAME)
    assert shelves.pinned(place) == {OTHER}


def test_other_names_are_neither_pinned_nor_read(tmp_path: Path) -> None:
    """A path out of the directory, another's checkpoint, a stray file."""
    for name in ("../x", "checkpoint-120", ""):
        with pytest.raises(CheckpointError, match="cannot be pinned: only checkpoints in elaunch"):
            shelves.pin(tmp_path, name)
    (tmp_path / ".pins").mkdir()
    (tmp_path / ".pins" / "note.txt").touch()
    assert shelves.pinned(tmp_path) == frozenset()


def test_a_directory_without_rights_says_so(tmp_path: Path) -> None:
    """Never taken for one without pins: what is pinned would be removed."""
    (tmp_path / ".pins").write_text("")
    with pytest.raises(NotOwnError):
        shelves.pinned(tmp_path)
