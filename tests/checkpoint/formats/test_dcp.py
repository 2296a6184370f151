"""torch.distributed.checkpoint directories, written by torch itself."""

from __future__ import annotations

import collections
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elaunch.checkpoint.formats import dcp
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that one process wrote."""
    return makers.dcp_directory(tmp_path_factory.mktemp("dcp") / "step_120")


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(template, tmp_path / "step_120"))


def refused(path: Path, reason: str) -> None:
    """Assert that the checkpoint is refused for this reason."""
    with pytest.raises(CheckpointError) as raised:
        dcp.verify(path)
    assert reason in str(raised.value)


def test_whole_directories_pass(path: Path) -> None:
    dcp.verify(path)


@pytest.mark.trial
@pytest.mark.slow
def test_fsdp2_by_two_processes(tmp_path: Path) -> None:
    path = makers.fsdp2_directory(tmp_path)
    dcp.verify(path)
    shard = path / "__1_0.distcp"
    size = shard.stat().st_size
    makers.truncate(shard, size // 2)
    wanted = f"truncated: __1_0.distcp has {size // 2} bytes, .metadata wants {size}"
    refused(path, wanted)
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        dcp.verify(path)


def test_the_last_byte_of_a_shard_matters(path: Path) -> None:
    size = (path / "__0_0.distcp").stat().st_size
    makers.truncate(path / "__0_0.distcp", size - 1)
    refused(path, f"truncated: __0_0.distcp has {size - 1} bytes, .metadata wants {size}")


def test_without_metadata_the_save_did_not_finish(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")
    refused(path, ".metadata is missing: the save did not finish")


def test_an_empty_metadata_after_a_power_cut(path: Path) -> None:
    makers.truncate(path / ".metadata", 0)
    refused(path, ".metadata is empty")


@pytest.mark.slow
def test_every_truncation_of_the_metadata_is_noticed(path: Path) -> None:
    whole = (path / ".metadata").read_bytes()
    for size in reversed(range(1, len(whole))):
        makers.truncate(path / ".metadata", size)
        refused(path, ".metadata is not a readable pickle")


def test_a_metadata_of_zeros(path: Path) -> None:
    (path / ".metadata").write_bytes(b"\0" * 900)
    refused(path, ".metadata is not a readable pickle")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damage_raises_anything_else(path: Path, template: Path, data: st.DataObject) -> None:
    damaged = bytearray((template / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (path / ".metadata").write_bytes(damaged)
    try:
        dcp.verify(path)
    except (CheckpointError, FileNotFoundError) as error:
        assert str(error)


class Evil:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_malicious_metadata_runs_nothing(path: Path, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    evil = pickle.dumps({"storage_data": Evil(f"touch {proof}")})
    (path / ".metadata").write_bytes(evil)
    refused(path, ".metadata has no storage_data")
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists()


def piece(path: object, offset: object = 0, length: object = 4) -> SimpleNamespace:
    """Return what stands for torch's ``_StorageInfo``; older versions have no descriptors."""
    return SimpleNamespace(relative_path=path, offset=offset, length=length)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ({0: piece("../x")}, "outside the checkpoint"),
        ({0: piece("/etc/passwd")}, "outside the checkpoint"),
        ({0: piece("a\0b")}, "no path"),
        ({0: piece(None)}, "without file, offset and length"),
        ({0: piece("a", "0")}, "without file, offset and length"),
        ({0: piece("a", 0, None)}, "without file, offset and length"),
        ({0: "a"}, "without file, offset and length"),
        (None, "no storage_data"),
        ([1], "no storage_data"),
    ],
)
def test_metadata_of_another_make(tmp_path: Path, pieces: object, reason: str) -> None:
    metadata = SimpleNamespace(state_dict_metadata={}, storage_data=pieces)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, reason)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_and_ordered_dicts(tmp_path: Path, protocol: int) -> None:
    pieces = collections.OrderedDict(a=piece("sub/a", 4, 4), b=piece("sub/a", 0, 4))
    metadata = SimpleNamespace(state_dict_metadata={}, storage_data=pieces)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"1234567")
    refused(tmp_path, "truncated: sub/a has 7 bytes, .metadata wants 8")
    (tmp_path / "sub" / "a").write_bytes(b"12345678")
    dcp.verify(tmp_path)


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dcp.verify(tmp_path / "step_120")


def test_what_torch_leaves_behind() -> None:
    assert dcp.looks_like(["__0_0.distcp"])
    assert dcp.looks_like([".metadata.tmp"])
    assert not dcp.looks_like(["metadata", "model.pt"])
