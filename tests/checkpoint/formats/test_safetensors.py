"""safetensors files have exactly the bytes that their header announces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.formats.safetensors import check_safetensors
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


def test_whole_files_pass(tmp_path: Path) -> None:
    check_safetensors(makers.safetensors(tmp_path / "model.safetensors"))
    check_safetensors(makers.safetensors(tmp_path / "none.safetensors", {}))
    check_safetensors(makers.safetensors(tmp_path / "zero.safetensors", {"a": b""}))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    file = makers.safetensors(tmp_path / "model.safetensors")
    for size in reversed(range(file.stat().st_size)):
        makers.truncate(file, size)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            check_safetensors(file)


def test_the_reason_has_both_sizes(tmp_path: Path) -> None:
    file = makers.safetensors(tmp_path / "model.safetensors")
    size = file.stat().st_size
    makers.truncate(file, size - 1)
    with pytest.raises(CheckpointError) as raised:
        check_safetensors(file)
    reason = f"truncated: model.safetensors has {size - 1} bytes, its header wants {size}"
    assert str(raised.value) == reason
    makers.truncate(file, size + 1)
    with pytest.raises(CheckpointError, match="damaged"):
        check_safetensors(file)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"data_offsets": [1]}}',
        b'{"a": {"data_offsets": [0, "1"]}}',
        b'{"a": {"data_offsets": [0, true]}}',
    ],
)
def test_bad_headers(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check_safetensors(file)


@given(st.binary(max_size=40))
def test_noise_is_never_whole(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.safetensors"
    file.write_bytes(b"\x10" + noise)
    with pytest.raises(CheckpointError):
        check_safetensors(file)
