"""safetensors files have exactly the bytes that their header announces."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.formats.archives import check_safetensors, check_zip, number_inside
from elaunch.errors import CheckpointError
from tests.checkpoint import makers


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small file by torch.save."""
    return makers.saved(tmp_path / "step_120.pt")


def test_whole_files_pass(archive: Path) -> None:
    check_zip(archive)
    assert number_inside(archive, "global_step") == 120


@pytest.mark.slow
def test_every_truncation_is_noticed(archive: Path) -> None:
    for size in reversed(range(archive.stat().st_size)):
        makers.truncate(archive, size)
        with pytest.raises(CheckpointError, match=r"truncated|empty|not a zip"):
            check_zip(archive)


@pytest.mark.slow
def test_every_hole_is_noticed(archive: Path) -> None:
    whole = archive.read_bytes()
    for start in range(0, len(whole) - 8, 7):
        archive.write_bytes(whole[:start] + whole[start + 8 :])
        with pytest.raises(CheckpointError):
            check_zip(archive)


def test_a_preallocated_file_that_was_never_filled(archive: Path) -> None:
    size = archive.stat().st_size
    makers.truncate(archive, 0)
    makers.truncate(archive, size)
    with pytest.raises(CheckpointError, match="not a zip archive"):
        check_zip(archive)


def test_a_filled_end_behind_an_empty_start(archive: Path) -> None:
    whole = archive.read_bytes()
    archive.write_bytes(b"\0" * 300 + whole[300:])
    with pytest.raises(CheckpointError, match=r"step_120.pt is damaged: no header of .*data.pkl"):
        check_zip(archive)


def test_a_flipped_bit_in_the_structure_is_noticed(archive: Path) -> None:
    whole = bytearray(archive.read_bytes())
    whole[whole.index(b"state_dict")] ^= 1
    archive.write_bytes(whole)
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        check_zip(archive)


def test_old_formats_and_other_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "step_1.pt"
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="old format"):
        check_zip(file)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_1.pt is empty"):
        check_zip(file)
    file.write_text("hello")
    with pytest.raises(CheckpointError, match="not a zip archive"):
        check_zip(file)
    with zipfile.ZipFile(file, "w"):
        pass
    with pytest.raises(CheckpointError, match="without members"):
        check_zip(file)


@pytest.mark.parametrize(
    ("content", "step"),
    [
        ({"global_step": 7}, 7),
        ({"global_step": True}, None),
        ({"global_step": "7"}, None),
        ({"global_step": -1}, None),
        ({"step": 7}, None),
        (torch.ones(3), None),
        ([7], None),
    ],
)
def test_global_step(tmp_path: Path, content: object, step: int | None) -> None:
    saved = makers.saved(tmp_path / "last.ckpt", content)
    assert number_inside(saved, "global_step") == step


def test_an_archive_without_a_pickle_has_no_step(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "arrays.npz", "w") as archive:
        archive.writestr("a.npy", b"1234")
    check_zip(tmp_path / "arrays.npz")
    assert number_inside(tmp_path / "arrays.npz", "global_step") is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small file by torch.save."""
    return makers.saved(tmp_path_factory.mktemp("zip") / "a.pt").read_bytes()


@pytest.mark.slow
@given(st.data())
def test_no_damage_raises_anything_else(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        # The directory and its end are where the parser has most to misunderstand.
        place = data.draw(
            st.integers(0, len(whole) - 1) | st.integers(len(whole) - 300, len(whole) - 1)
        )
        damaged[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    file.write_bytes(damaged)
    try:
        number_inside(file, "global_step")
    except CheckpointError as error:
        assert "fuzzed.pt" in str(error)


def test_whole_safetensors_pass(tmp_path: Path) -> None:
    check_safetensors(makers.safetensors(tmp_path / "model.safetensors"))
    check_safetensors(makers.safetensors(tmp_path / "none.safetensors", {}))
    check_safetensors(makers.safetensors(tmp_path / "zero.safetensors", {"a": b""}))


def test_every_truncation_of_safetensors_is_noticed(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["archive/data.pkl", "archive/code/__torch__.py"])
def test_a_member_that_inflates_is_not_read(tmp_path: Path, name: str) -> None:
    """A gigabyte in a thousandth of that: refused by what its header says, before any of it."""
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/version", "3")
        with archive.open(name, "w", force_zip64=True) as member:
            for _ in range(1024):
                member.write(b"N0" * 2**16)
    assert path.stat().st_size < 2**20
    for look in (check_zip, number_inside):
        with pytest.raises(CheckpointError, match=r"is compressed, and larger than 16777216 bytes"):
            look(path)


def test_a_number_in_a_large_pickle_is_not_looked_for(tmp_path: Path) -> None:
    """The file itself is whole all the same."""
    path = tmp_path / "last.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"N0" * 2**23 + b"N.")
    check_zip(path)
    with pytest.raises(CheckpointError, match="put step=N into the name"):
        number_inside(path, "global_step")
