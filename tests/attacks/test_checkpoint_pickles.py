"""Checkpoints that another user has put into a directory that the job shares with him.

torchrun has no part in checkpoints: under it ``dcp.load`` reads ``.metadata`` with ``pickle.load``
and values with ``torch.load(weights_only=False)``, so each of these runs on every rank.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from elaunch.errors import CheckpointError
from elaunch.training import unpickling
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp.convert import to_torch_file
from tests.attacks.gadgets import Call, gadgets, runs_shell
from tests.launching import Launcher

NAMES = sorted(gadgets(Path("x")))


@dataclass
class Settings:
    """A class of the script's own."""

    width: int = 3


def saved(directory: Path, state: dict[str, Any]) -> Path:
    """Save a checkpoint as another program does; return its directory."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_metadata_runs_nothing(tmp_path: Path, name: str) -> None:
    """What names anything but DCP's classes is refused before it is called.

    torchrun: ``dcp.load`` runs it on all ranks.
    """
    mark = tmp_path / "ran"
    with pytest.raises(CheckpointError, match="is damaged: "):
        stored.read(gadgets(mark)[name], tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("inner", ["storage_data", "planner_data"])
def test_metadata_with_a_gadget_inside_runs_nothing(tmp_path: Path, inner: str) -> None:
    """A real ``.metadata``, in which one entry is a gadget. torchrun: as above."""
    mark = tmp_path / "ran"
    path = saved(tmp_path / "ck", {"a": torch.ones(2)}) / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    assert stored.read(path.read_bytes(), path.parent) == metadata
    getattr(metadata, inner)[MetadataIndex("b")] = runs_shell(mark)
    with pytest.raises(CheckpointError, match=r"damaged: PickleRefused: it names posix\.system"):
        stored.read(pickle.dumps(metadata), tmp_path)
    assert not mark.exists()


def test_metadata_changes_no_class(tmp_path: Path) -> None:
    """BUILD with a class in place of an instance would set its attributes. torchrun: it does."""
    named = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    attack = b"\x80\x02" + named + b"(N}X\x08\x00\x00\x00__init__cbuiltins\nlist\nst\x86b."
    with pytest.raises(CheckpointError, match="damaged"):
        stored.read(attack, tmp_path)
    before = Metadata.__init__
    attack = b"\x80\x02" + named + b"N}X\x08\x00\x00\x00__init__ctorch\nSize\ns\x86b."
    with pytest.raises(CheckpointError, match="sets '__init__' of a class"):
        stored.read(attack, tmp_path)
    assert Metadata.__init__ is before


def archive(data: bytes, *more: str) -> bytes:
    """Return a torch.save archive around a pickle."""
    file = io.BytesIO()
    torch.save(0, file)
    made = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("data.pkl") else old.read(name))
        for name in more:
            new.writestr(f"archive/{name}", b"\x80\x02}.")
    return made.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_value_runs_nothing(tmp_path: Path, name: str) -> None:
    """A value's pickle may name what is harmless and what the script has named.

    torchrun: ``dcp.load`` reads it with ``weights_only=False`` and runs it.
    """
    mark = tmp_path / "ran"
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        archives.unpack(archive(gadgets(mark)[name]))
    assert not mark.exists()


def test_a_value_is_no_program_and_no_old_file(tmp_path: Path) -> None:
    """torch.load would run TorchScript, and has other ways for old files. torchrun: it does."""
    with pytest.raises(unpickling.PickleRefused, match="TorchScript"):
        archives.unpack(archive(pickle.dumps(1), "constants.pkl"))
    mark, old = tmp_path / "ran", io.BytesIO()
    torch.save(runs_shell(mark), old, _use_new_zipfile_serialization=False)
    with pytest.raises((pickle.UnpicklingError, zipfile.BadZipFile)):
        archives.unpack(old.getvalue())
    assert not mark.exists()


def test_a_value_forges_no_type_of_numpy() -> None:
    """A dtype with Python objects that it does not admit makes addresses of numbers.

    torchrun: numpy takes them for addresses.
    """
    honest = np.zeros(2, dtype=[("a", "f4"), ("b", "i8")])
    assert (unpickling.load_careful(pickle.dumps(honest)) == honest).all()
    state = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    for forged in (
        state,
        (3, "<", None, None, None, -1, -1, 63),
        (3, "<", None, None, None, 99, 1, 0),
    ):
        data = pickle.dumps(_Dtype(forged))
        with pytest.raises(unpickling.PickleRefused, match="numpy"):
            unpickling.load_careful(data)


class _Dtype:
    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("V8", False, True), self.state


def test_nothing_is_called_that_was_not_named() -> None:
    """An instance that can be called is not called, and a class is not changed. torchrun: both."""
    import functools

    data = pickle.dumps(Call(functools.partial(int, base=2), "101"))
    with pytest.raises(unpickling.PickleRefused, match="calls partial, which it has not named"):
        unpickling.load_careful(data)
    with pytest.raises(unpickling.PickleRefused, match="it changes"):
        unpickling.load_careful(b"\x80\x02ccollections\nOrderedDict\nN}U\x01aK\x01s\x86b.")


def test_the_scripts_own_classes_are_loaded() -> None:
    """Where the state has a value of a class, or it was named to torch, values of it are taken."""
    data = archives.pack({"own": [Settings(5)]})
    with pytest.raises(unpickling.PickleRefused, match=r"names .*Settings"):
        archives.unpack(data)
    also = unpickling.named_by([{"x": Settings()}])
    assert archives.unpack(data, also) == {"own": [Settings(5)]}
    with torch.serialization.safe_globals([Settings]):
        assert archives.unpack(data) == {"own": [Settings(5)]}


@pytest.mark.parametrize("where", ["metadata", "value"])
def test_an_export_runs_nothing(tmp_path: Path, where: str) -> None:
    """``elaunch checkpoints export`` reads as ``load`` does. torchrun: its tool runs it."""
    mark = tmp_path / "ran"
    evil = runs_shell(mark)
    path = saved(tmp_path / "ck", {"a": torch.ones(2), "b": evil if where == "value" else 1})
    if where == "metadata":
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data["c"] = evil
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        to_torch_file(path, tmp_path / "out.pt")
    assert not mark.exists() and not (tmp_path / "out.pt").exists()


SCRIPT = """
import json, sys, torch, elaunch
with elaunch.init() as ctx:
    state = {"a": torch.zeros(2), "b": 1}
    try:
        ctx.checkpoint.load(state)
    except elaunch.CheckpointError as error:
        print(json.dumps(str(error)), flush=True)
"""


@pytest.mark.slow
def test_a_job_does_not_run_a_strangers_checkpoint(elaunch: Launcher, tmp_path: Path) -> None:
    """A checkpoint that appears in the job's directory: the agent finds it, the ranks refuse it.

    torchrun: a script that loads the newest with dcp.load runs what is in it, as the job's owner.
    """
    mark, script = tmp_path / "ran", tmp_path / "script.py"
    script.write_text(SCRIPT)
    saves = tmp_path / "saves"
    path = saved(saves / "step-7", {"a": torch.ones(2), "b": 1}) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["c"] = runs_shell(mark)
    path.write_bytes(pickle.dumps(metadata))
    done = elaunch.run(["run", "--checkpoint-dir", saves, script])
    assert done.returncode == 0, done.stderr
    assert "it names posix.system" in json.loads(done.stdout.splitlines()[-1])
    assert not mark.exists()
