"""Checkpoints that another user has put into a directory that the job shares with him.

torchrun has no part in checkpoints: under it ``dcp.load`` reads ``.metadata`` with ``pickle.load``
and values with ``torch.load(weights_only=False)``, so each of these runs on every rank.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import random
import sys
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from elaunch.errors import CheckpointError
from elaunch.training import unpickling
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.dcp import metadata as stored
from elaunch.training.checkpoint.dcp.convert import to_torch_file
from tests import warm
from tests.attacks.gadgets import gadgets, runs_shell
from tests.launching import Launcher
from tests.tables import each

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
    with pytest.raises(CheckpointError, match="does not say where the tensors are"):
        stored.read(attack, tmp_path)
    assert Metadata.__init__ is before


_ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
_GETATTR = b"cbuiltins\ngetattr\n"
_MEMBERS = {
    "by its value": _ENCODING + b"K\x00\x85R",
    "by its name": _GETATTR + _ENCODING + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT\x86R",
}
"""As Python pickles a member, and as 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) do."""
_SETS = {
    "a dict": b"}X\x04\x00\x00\x00evilK\x01sb",
    "slots": b"N}X\x04\x00\x00\x00evilK\x01s\x86b",
    "its value": b"}X\x07\x00\x00\x00_value_K\x02sb",
    "its class": b"N}X\x09\x00\x00\x00__class__ctorch\nSize\ns\x86b",
}


def unpickled(reader: str, attack: bytes) -> Any:
    """Return what ``reader`` makes of a pickle."""
    if reader == "metadata":
        return stored.read(attack, Path("ck"))
    return unpickling.load_careful(attack, unpickling.Records())


class ByName(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does."""

    def reducer_override(self, obj: object) -> Any:
        """Return the call that makes a member."""
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


@pytest.mark.parametrize("reader", ["metadata", "value"])
def test_members_of_enums_are_read_as_each_python_writes_them(reader: str) -> None:
    """A member by its name calls getattr, with an enum that is allowed and nothing else."""
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])
    metadata = Metadata({"a": tensor}, storage_data={})
    written = [io.BytesIO(), io.BytesIO()]
    pickle.Pickler(written[0], protocol=2).dump(metadata)
    ByName(written[1], protocol=2).dump(metadata)
    assert b"getattr" in written[1].getvalue()
    assert [unpickled(reader, one.getvalue()) for one in written] == [metadata, metadata]
    for of, name in ((_ENCODING, "mro"), (_ENCODING, "name"), (b"ctorch\nSize\n", "count")):
        word = b"X" + len(name).to_bytes(4, "little") + name.encode()
        with pytest.raises((CheckpointError, pickle.UnpicklingError), match="getattr"):
            unpickled(reader, b"\x80\x02" + _GETATTR + of + word + b"\x86R.")


@pytest.mark.parametrize("member", _MEMBERS)
@pytest.mark.parametrize("state", _SETS)
@pytest.mark.parametrize("reader", ["metadata", "value"])
def test_no_member_of_an_enum_is_changed(reader: str, state: str, member: str) -> None:
    """BUILD with a member in place of an instance would last as long as the process. torchrun: so.

    ``value``: what another rank sends, which may name DCP's classes, too.
    """
    members = [*_MEM_FORMAT_ENCODING]
    before = [(type(one), dict(vars(one))) for one in members]
    attack = b"\x80\x02" + _MEMBERS[member] + _SETS[state] + b"."
    with pytest.raises((CheckpointError, pickle.UnpicklingError)):
        unpickled(reader, attack)
    assert [(type(one), vars(one)) for one in members] == before


def test_metadata_has_no_extension() -> None:
    """A number stands for what copyreg knows, and may have been looked up already. torchrun: so."""
    copyreg.add_extension("posix", "getpid", 77)
    try:
        assert pickle.loads(b"\x82\x4d.") is os.getpid
        with pytest.raises(CheckpointError, match=r"names posix\.getpid"):
            stored.read(b"\x80\x02\x82\x4d)R.", Path("ck"))
    finally:
        copyreg.remove_extension("posix", "getpid", 77)


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


def _text(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def _global(name: str) -> bytes:
    module, _, last = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + last.encode() + b"\n"


def _bytes(data: bytes) -> bytes:
    return _global("_codecs.encode") + _text(data.decode("latin1")) + _text("latin1") + b"\x86R"


_AT = b"\x8a\x06" + b"AAAAAA"  # an integer, 0x414141414141
_OBJECT = _global("numpy.dtype") + _text("O8") + b"\x89\x88\x87R"
_FORGED = _bytes(b"A" * 8)
_EMPTY = (
    _global("numpy.core.multiarray._reconstruct")
    + _global("numpy.ndarray")
    + b"K\x00\x85"
    + _bytes(b"b")
    + b"\x87R"
)
CHOOSES_ADDRESSES = {
    "a storage's allocator": _global("torch.storage.UntypedStorage")
    + b")}"
    + _text("allocator")
    + _AT
    + b"s\x92",
    "a storage's size": _global("torch.storage.UntypedStorage") + _AT + b"\x85R",
    "a typed storage": _global("torch.storage.TypedStorage") + b")R",
    "an array over bytes": _global("numpy.ndarray") + b"K\x01\x85" + _OBJECT + _FORGED + b"\x87R",
    "an array over bytes, NEWOBJ": _global("numpy.ndarray")
    + b"K\x01\x85"
    + _OBJECT
    + _FORGED
    + b"\x87\x81",
    "an array by _reconstructor": _global("copyreg._reconstructor")
    + _global("numpy.ndarray")
    + _global("builtins.object")
    + b"N\x87R",
    "an array by INST": b"(K\x01" + _OBJECT + _FORGED + b"inumpy\nndarray\n",
    "a partial": _global("functools.partial") + _global("numpy.ndarray") + b"K\x01\x86R",
    "a tensor of a type": _global("torch._tensor._rebuild_from_type_v2")
    + b"("
    + _global("builtins.list")
    + _global("builtins.list")
    + b")}tR",
    "a nested tensor": _global("torch._utils._rebuild_nested_tensor") + b")R",
    "objects that are not there": _EMPTY + b"(K\x01M\xe8\x03\x85" + _OBJECT + b"\x89]tb",
    "objects out of bytes": _EMPTY + b"(K\x01K\x01\x85" + _OBJECT + b"\x89" + _FORGED + b"tb",
    "fewer elements than the shape": _EMPTY
    + b"(K\x01M\xe8\x03\x85"
    + _global("numpy.dtype")
    + _text("f8")
    + b"\x89\x88\x87R\x89"
    + _FORGED
    + b"tb",
    "a scalar of objects": _global("numpy.core.multiarray.scalar") + _OBJECT + _FORGED + b"\x86R",
    "a type in words": _global("numpy.dtype") + _text("O,O") + b"\x85R",
    "a type without a size": _global("numpy.dtype")
    + _text("V8")
    + b"\x89\x88\x87R(K\x03"
    + _text("|")
    + b"NNNK\x08K\x00K\x00tb",
    "a unit of nothing": _global("numpy.dtype")
    + _text("M8")
    + b"\x89\x88\x87R(K\x04"
    + _text("<")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00N("
    + _bytes(b"ns")
    + b"K\x00K\x01K\x01t\x86tb",
    "many bytes": _global("builtins.bytearray") + _AT + b"\x85R",
    "a long list": _global("builtins.list") + _global("builtins.range") + _AT + b"\x85R\x85R",
    "a tensor over no storage": _global("torch._utils._rebuild_tensor_v2")
    + b"("
    + _global("types.SimpleNamespace")
    + b")RK\x00))\x89}tR",
    "a generator of numpy": _global("numpy.random._pickle.__generator_ctor")
    + _text("x")
    + _global("numpy.ndarray")
    + b"\x86R",
}


def test_a_value_chooses_no_address(tmp_path: Path) -> None:
    """No pickle makes numpy or torch read memory that it names, or more than it has brought.

    It stays so where the script has named numpy's types to torch, as torch advises.
    torchrun: the process dies, or reads what the stranger chooses.
    """
    for name, body in CHOOSES_ADDRESSES.items():
        for protocol in (2, 5):
            data = archive(b"\x80" + bytes([protocol]) + body + b".")
            (tmp_path / f"{name} {protocol}").write_bytes(data)
    done = warm.run([sys.executable, "-c", _READ, str(tmp_path)])  # it may die of it
    outcomes = [f"{path.name}: refused" for path in sorted(tmp_path.iterdir())]
    assert (done.returncode, done.stdout.splitlines()) == (0, outcomes * 2), done.stderr


_READ = """
import gc, sys, pathlib
import numpy as np, torch
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.unpickling import PickleRefused
gc.freeze()  # torch's million objects are not looked through for each file
paths = sorted(pathlib.Path(sys.argv[1]).iterdir())
for number, path in enumerate(paths * 2):
    if number == len(paths):
        torch.serialization.add_safe_globals([np.ndarray, np.dtype])
    print(path.name, end=": ", flush=True)
    try:
        print(repr(archives.unpack(path.read_bytes())))
    except PickleRefused:
        print("refused", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
    gc.collect()
"""


@each(
    "value",
    [
        np.zeros(3),
        np.array(["ab", "c"]),
        np.array([b"x", b"yz"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.timedelta64(3, "s"),
        np.array([{1: 2}, None], object),
        np.zeros((2, 0, 3)),
        np.zeros(2, np.dtype([("a", "f4"), ("b", "i8")], align=True)),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.float32(3),
        np.bool_(1),
        deque([1, torch.ones(2)], maxlen=4),
        defaultdict(list, a=[1]),
        OrderedDict(a=1),
        Counter("aab"),
        {"a": {1, 2}, "b": frozenset({3}), "c": bytearray(b"x"), "d": range(3), "e": slice(1, 2)},
        datetime(2020, 1, 2, tzinfo=timezone.utc),
        timedelta(3),
        Decimal("1.5"),
        Fraction(1, 3),
        Path("/x/y"),
        UUID(int=7),
        SimpleNamespace(a=1),
        Namespace(a=[torch.ones(1)]),
        1 + 2j,
        2**100,
        torch.float32,
        torch.Size([2, 3]),
        torch.device("cpu"),
        [torch.nn.Parameter(torch.ones(2)), torch.eye(3).to_sparse(), torch.ones(2).bfloat16()],
        torch.Generator().manual_seed(3).get_state(),
    ],
)
def test_plain_values_come_back(value: Any) -> None:
    """What docs/saving-state.md names: of Python, numpy and torch, by file and between ranks."""
    packed = archives.pack([value])
    between = unpickling.load_careful(pickle.dumps([value], 5))
    for back in (*archives.unpack(packed), *between):
        assert type(back) is type(value)
        assert repr(back) == repr(value)


def test_random_states_come_back() -> None:
    """Of Python and torch: those are compared by what comes next."""
    own, torchs = random.Random(5), torch.Generator().manual_seed(5)
    back, torchs_back = archives.unpack(archives.pack([own, torchs]))
    assert back.random() == own.random()
    assert torch.equal(torch.rand(3, generator=torchs), torch.rand(3, generator=torchs_back))


class _Dtype:
    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("V8", False, True), self.state


def test_nothing_is_called_that_was_not_named() -> None:
    """An instance that can be called is not called, and a class is not changed. torchrun: both."""
    with pytest.raises(unpickling.PickleRefused, match="calls Fraction, which it has not named"):
        unpickling.load_careful(b"\x80\x02cfractions\nFraction\n)R)R.")
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
