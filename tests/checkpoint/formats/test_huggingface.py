"""Hugging Face Trainer checkpoints: state, weights of every kind, optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from elaunch.checkpoint.formats import huggingface
from elaunch.checkpoint.formats.archives import number_inside
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with one safetensors file."""
    return makers.trainer(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    return makers.trainer(tmp_path / "bare", weights=False)


def refused(path: Path, reason: str, step: int = 120) -> None:
    """Assert that the checkpoint is refused for this reason."""
    with pytest.raises(CheckpointError) as raised:
        huggingface.verify(path, step)
    assert reason in str(raised.value)


def test_a_whole_one_passes(path: Path) -> None:
    huggingface.verify(path, 120)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        makers.saved(path / name)
    huggingface.verify(path, 120)


@pytest.mark.parametrize(("there", "lacks"), [((0,), 1), ((1,), 0), ((0, 1, 3), 2)])
def test_a_rank_whose_random_state_is_missing(
    path: Path, there: tuple[int, ...], lacks: int
) -> None:
    """Each rank writes its own, which a kill may forestall when rank 0 has written all of its."""
    for rank in there:
        makers.saved(path / f"rng_state_{rank}.pth")
    refused(path, f"missing: rng_state_{lacks}.pth: the save did not finish")
    makers.saved(path / f"rng_state_{lacks}.pth")
    huggingface.verify(path, 120)


@pytest.mark.parametrize(
    ("ranks", "there", "lacks"), [(3, (0, 1), 2), (4, (0, 2), 1), (2, (1,), 0), (3, (0, 1, 7), 2)]
)
def test_the_last_ranks_random_states_count_where_the_arguments_tell_how_many(
    path: Path, ranks: int, there: tuple[int, ...], lacks: int
) -> None:
    makers.training_arguments(path, ranks)
    for rank in there:
        makers.saved(path / f"rng_state_{rank}.pth")
    refused(path, f"missing: rng_state_{lacks}.pth: the save did not finish")


@pytest.mark.parametrize(("ranks", "there"), [(1, (0, 2)), (2, (0, 1, 3)), (3, (0, 1, 2))])
def test_random_states_of_an_earlier_larger_world_are_in_nobodys_way(
    path: Path, ranks: int, there: tuple[int, ...]
) -> None:
    """A torn checkpoint of four ranks is written again by those that are left."""
    makers.training_arguments(path, ranks)
    for rank in there:
        makers.saved(path / f"rng_state_{rank}.pth")
    huggingface.verify(path, 120)


def test_a_checkpoint_of_weights_alone_needs_no_random_states(path: Path) -> None:
    """By ``save_only_model``."""
    makers.training_arguments(path, 3)
    huggingface.verify(path, 120)


@pytest.mark.parametrize("ranks", [None, "3", 0, -1, True, 10**12])
def test_arguments_that_tell_no_number_of_ranks(path: Path, ranks: object) -> None:
    """Neither those of an old Transformers, nor nonsense, cost more than a look."""
    makers.training_arguments(path, ranks)
    for rank in (0, 1):
        makers.saved(path / f"rng_state_{rank}.pth")
    if ranks == 10**12:
        refused(path, "missing: rng_state_2.pth")
    else:
        huggingface.verify(path, 120)


class MadeByAMethod:
    """An object whose pickle calls what another call returned, which no inert object takes."""

    @classmethod
    def made(cls) -> MadeByAMethod:
        return cls()

    def __reduce__(self) -> tuple[object, ...]:
        return (MadeByAMethod.made, ())


def test_arguments_that_cannot_be_read_refuse_nothing(path: Path) -> None:
    makers.saved(path / "training_args.bin", MadeByAMethod())
    for rank in (0, 1):
        makers.saved(path / f"rng_state_{rank}.pth")
    huggingface.verify(path, 120)
    with pytest.raises(CheckpointError, match="not callable"):
        number_inside(path / "training_args.bin", "distributed_state")


def test_the_state(path: Path) -> None:
    refused(path, "trainer_state.json says global_step 120", step=130)
    makers.edit_json(path / "trainer_state.json", global_step=None)
    refused(path, "trainer_state.json: global_step is None")
    (path / "trainer_state.json").unlink()
    refused(path, "missing: trainer_state.json")


def test_every_truncation_of_the_state_is_noticed(path: Path) -> None:
    state = path / "trainer_state.json"
    for size in reversed(range(state.stat().st_size)):
        makers.truncate(state, size)
        refused(path, "trainer_state.json")


def test_no_weights(bare: Path) -> None:
    refused(bare, "no weights: none of model.safetensors, pytorch_model.bin")


def test_truncated_safetensors(path: Path) -> None:
    makers.truncate(path / "model.safetensors", 100)
    refused(path, "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_weights_by_torch_save(bare: Path, name: str) -> None:
    makers.saved(bare / name)
    huggingface.verify(bare, 120)
    makers.truncate(bare / name, 500)
    refused(bare, f"{name} is truncated")


def test_adapters_count_as_weights(bare: Path) -> None:
    makers.safetensors(bare / "adapter_model.safetensors")
    huggingface.verify(bare, 120)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(bare: Path, kind: str) -> None:
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    shards = [f"{stem}-0000{number}-of-00002.{kind}" for number in (1, 2)]
    for shard in shards:
        (makers.safetensors if kind == "safetensors" else makers.saved)(bare / shard)
    index = bare / f"{stem}.{kind}.index.json"
    makers.write_json(index, {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}})
    huggingface.verify(bare, 120)
    makers.truncate(bare / shards[1], 60)
    refused(bare, shards[1])
    (bare / shards[1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"00002-of-00002"):
        huggingface.verify(bare, 120)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": "../../secret"}}, "outside the checkpoint"),
        ({"weight_map": {"a": 3}}, "no path"),
    ],
)
def test_bad_indexes(bare: Path, index: object, reason: str) -> None:
    makers.write_json(bare / "model.safetensors.index.json", index)
    refused(bare, f"model.safetensors.index.json {'has' if 'has' in reason else 'names'}")
    refused(bare, reason)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_1.pth", "scheduler.pt"])
def test_a_torn_optimizer_is_no_resume(path: Path, name: str) -> None:
    makers.saved(path / name)
    makers.truncate(path / name, 700)
    refused(path, f"{name} is truncated")


def test_fsdp_directories(bare: Path, tmp_path: Path) -> None:
    made = makers.dcp_directory(tmp_path / "made")
    shutil.copytree(made, bare / "pytorch_model_fsdp_0")
    huggingface.verify(bare, 120)
    shutil.copytree(made, bare / "optimizer_0")
    huggingface.verify(bare, 120)
    (bare / "optimizer_0" / ".metadata").unlink()
    refused(bare, "optimizer_0/: .metadata is missing")


def test_what_a_trainer_wrote(path: Path, tmp_path: Path) -> None:
    assert huggingface.looks_like(path, ["trainer_state.json"])
    assert huggingface.looks_like(path, ["model.safetensors"])
    assert not huggingface.looks_like(tmp_path / "step_1", ["model.safetensors"])
    assert not huggingface.looks_like(path, [".metadata"])
