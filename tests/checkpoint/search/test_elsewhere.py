"""What is meant by a path or URL that somebody gives as a checkpoint."""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.checkpoint.records import Checkpoint, Committed, Location
from elaunch.checkpoint.search.elsewhere import committed_at, find_at
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


def committed(place: Location, step: int) -> Committed:
    """Commit a checkpoint of one file."""
    storage, stage = open_storage(place), Stage(step, 0, uuid.uuid4().hex)
    storage.prepare("other", given=True)
    part = ShardHeader(0, 1, "other", {"steps_completed": step})
    storage.write_shard(stage, part, [Image("model.pt", [b"x" * step])])
    return storage.commit(stage, lambda: None)


def test_a_trainers_checkpoint_without_a_ranks_random_state(tmp_path: Path) -> None:
    """A new run has random numbers of its own."""
    path = makers.trainer(tmp_path, 7)
    makers.training_arguments(path, 3)
    makers.saved(path / "rng_state_0.pth")
    assert find_at(path) == Checkpoint(path, 7, "huggingface")


@pytest.mark.parametrize("at_url", [False, True])
def test_one_of_our_own(tmp_path: Path, at_url: bool) -> None:
    """By its path, and as the newest of its directory that is whole."""
    place: Location = f"memory://{uuid.uuid4().hex}" if at_url else tmp_path / "run"
    first, second = committed(place, 10), committed(place, 20)
    assert find_at(first.place).path == first.place
    found = find_at(place)
    assert (found.path, found.step, found.format) == (second.place, 20, "elaunch")
    assert committed_at(found) == (place, second)


def test_one_that_is_damaged(tmp_path: Path) -> None:
    """The one before is taken; nothing is put aside, since it is another's directory."""
    first, second = committed(tmp_path, 10), committed(tmp_path, 20)
    (Path(second.place) / "model.pt").write_bytes(b"y" * 20)
    assert find_at(tmp_path).path == first.place
    assert find_at(tmp_path, content=False).path == second.place
    with pytest.raises(CheckpointError, match=r"step-00000020\.r0: .*model\.pt"):
        find_at(Path(second.place))
    assert len(open_storage(tmp_path).listed()) == 2


def archive(path: Path) -> None:
    """Write a zip archive as torch.save does."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"x")


def trainer(path: Path) -> None:
    """Write a directory as the Trainer does."""
    path.mkdir()
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    archive(path / "pytorch_model.bin")


def files(path: Path) -> None:
    """Write a directory of no known format."""
    path.mkdir()
    (path / "weights").write_bytes(b"x")


def accelerated(path: Path) -> None:
    """Write a directory as Accelerate does, for two ranks."""
    path.mkdir()
    for rank in range(2):
        archive(path / f"random_states_{rank}.pkl")


def test_a_known_format_that_is_torn(tmp_path: Path) -> None:
    """Is refused, and not taken as a directory of some files."""
    accelerated(tmp_path / "torn")
    (tmp_path / "torn" / "random_states_1.pkl").rename(tmp_path / "torn" / "random_states_2.pkl")
    with pytest.raises(CheckpointError, match=r"missing: random_states_1\.pkl"):
        find_at(tmp_path / "torn")


def test_a_model_in_a_directory_of_a_trainers_name(tmp_path: Path) -> None:
    """Is taken as it is: nothing promises that a trainer's state was with it."""
    (tmp_path / "checkpoint-120").mkdir()
    archive(tmp_path / "checkpoint-120" / "pytorch_model.bin")
    assert find_at(tmp_path / "checkpoint-120").format == "other"


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("model.pt", archive, "other"),
        ("old.pt", lambda path: path.write_bytes(b"\x80\x02"), "other"),
        ("state.json", lambda path: path.write_text("{}"), "other"),
        ("final", trainer, "huggingface"),
        ("states", accelerated, "accelerate"),
        ("exported", files, "other"),
    ],
)
def test_other_formats(
    tmp_path: Path, name: str, make: Callable[[Path], object], kind: str
) -> None:
    """Whatever their names are."""
    make(tmp_path / name)
    found = find_at(tmp_path / name)
    assert (found.path, found.format) == (tmp_path / name, kind)
    assert committed_at(found)[0] is None


def test_the_newest_of_another_format(tmp_path: Path) -> None:
    """In a directory of checkpoints."""
    trainer(tmp_path / "checkpoint-7")
    assert find_at(tmp_path).path == tmp_path / "checkpoint-7"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.mkdir(), "holds no complete checkpoint"),
        (lambda path: path.touch(), "it is empty"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_bytes(b"PK broken"), "zip"),
        (lambda path: open_storage(path).prepare("other", given=True), "holds no complete"),
        (lambda path: (path / "step_5").mkdir(parents=True), "step_5: it is empty"),
    ],
)
def test_nothing_that_could_be_meant(
    tmp_path: Path, make: Callable[[Path], object], told: str
) -> None:
    """An error that names the path and the reason."""
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=told) as raised:
        find_at(tmp_path / "x")
    assert str(tmp_path / "x") in str(raised.value)
