"""Files of tensors, by ``torch.save`` or safetensors: is one whole, without its gigabytes read?

``torch.save`` writes a zip. Its central directory is at the end, so a truncated file has none.
Every member's local header must be where the directory says and its data must end before the
directory. The tensors' bytes are not read (their CRC stays unchecked); ``data.pkl``, small, is
checked with its CRC.

A ``.safetensors`` file is 8 bytes with the header's length (little-endian), the header in JSON,
then the tensors' bytes. The header gives each tensor's range; the largest end is the file's end.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from elaunch.checkpoint.formats.pickles import PICKLE_LIMIT, attribute, load_inert, mapping
from elaunch.checkpoint.storage.files import open_regular, parse_json, regular_size
from elaunch.errors import CheckpointError

PICKLE = "data.pkl"
DIRECTORY_LIMIT = 2**26  # bytes; an archive has about 100 of them for each tensor
NUMBER_LIMIT = 2**24
"""Bytes of a pickle in which a number is looked for: the interpreter reads it in one go."""
INFLATED_LIMIT = 2**24
"""Bytes of a member that is compressed: torch compresses nothing but the code of TorchScript."""

_CHUNK = 2**20
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC = b"PK\x03\x04"
# What zipfile raises for malformed input.
_MALFORMED = (
    zipfile.BadZipFile,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,  # encrypted, or a compression that is not supported
    ValueError,
    struct.error,
    zlib.error,
)


def check_zip(path: Path) -> None:
    """Raise CheckpointError unless the file is a whole archive with at least one member."""
    with _archive(path) as (file, archive):
        _check(file, archive, path.name)


def number_inside(path: Path, *keys: str) -> int | None:
    """Return the number >= 0 that a whole archive holds, or None.

    Each of ``keys`` is one of a dict, or an attribute, of what the one before leads to.
    """
    with _archive(path) as (file, archive):
        member = _check(file, archive, path.name)
        if member is None:
            return None
        if member.file_size > NUMBER_LIMIT:
            raise CheckpointError(
                f"{path.name}: {member.filename} is larger than {NUMBER_LIMIT} bytes: no number is"
                " looked for in it; put step=N into the name"
            )
        content = b"".join(_pieces(archive, member, path.name))
    found = load_inert(content, f"{path.name}:{PICKLE}")
    for key in keys:
        items = mapping(found)
        found = attribute(found, key) if items is None else items.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def check_sums(path: Path, progress: Callable[[int], object]) -> None:
    """Read every byte of an archive; raise CheckpointError where a member's CRC is wrong.

    ``progress`` is called with the number of bytes read.
    """
    with _archive(path) as (_, archive):
        for member in archive.infolist():
            for piece in _pieces(archive, member, path.name):
                progress(len(piece))


def _pieces(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Iterator[bytes]:
    """Yield a member's content; CheckpointError at the end if its CRC is wrong."""
    try:
        with archive.open(member) as content:
            while piece := content.read(_CHUNK):
                yield piece
    except _MALFORMED as error:
        raise CheckpointError(f"{name} is damaged: {error}") from None


class _Limited:
    """A file for ``zipfile``, which would read a directory of any size that the file claims."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Read as a file does, at most DIRECTORY_LIMIT bytes."""
        if size > DIRECTORY_LIMIT:
            raise zipfile.BadZipFile(f"its directory is larger than {DIRECTORY_LIMIT} bytes")
        return self._file.read(DIRECTORY_LIMIT if size < 0 else size)


@contextmanager
def _archive(path: Path) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
    with open_regular(path) as file:
        start = file.read(4)
        try:
            archive = zipfile.ZipFile(_Limited(file))
        except _MALFORMED as error:
            raise CheckpointError(f"{path.name} {_ailment(start)} ({error})") from None
        with archive:
            yield file, archive


def _ailment(start: bytes) -> str:
    if not start:
        return "is empty"
    if start == _LOCAL_MAGIC:
        return "is truncated: it begins as a zip archive and has no directory at its end"
    if start[:1] == b"\x80":
        return "is a bare pickle (torch.save's old format), which cannot be checked"
    return "is not a zip archive as torch.save writes them"


def _check(file: BinaryIO, archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo | None:
    """Check every member; return data.pkl, if there is one."""
    members = archive.infolist()
    if not members:
        raise CheckpointError(f"{name} is an archive without members")
    pickled = None
    for member in members:
        _check_member(file, archive, member, name)
        if pickled is None and member.filename.rpartition("/")[2] == PICKLE:
            pickled = member
    if pickled is not None:
        _check_pickle(archive, pickled, name)
    return pickled


def _check_member(
    file: BinaryIO, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str
) -> None:
    if member.compress_type != zipfile.ZIP_STORED and member.file_size > INFLATED_LIMIT:
        raise CheckpointError(
            f"{name}: {member.filename} is compressed, and larger than {INFLATED_LIMIT} bytes"
        )
    start = member.header_offset
    header = b""
    if start >= 0:
        header = os.pread(file.fileno(), _LOCAL_HEADER.size, start)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
        raise CheckpointError(f"{name} is damaged: no header of {member.filename} at {start}")
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    end = start + _LOCAL_HEADER.size + name_size + extra_size + member.compress_size
    if end > archive.start_dir:
        raise CheckpointError(
            f"{name} is damaged: {member.filename} ends at byte {end},"
            f" behind the start of the directory at {archive.start_dir}"
        )


def _check_pickle(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> None:
    if member.file_size > PICKLE_LIMIT:
        raise CheckpointError(f"{name}: {member.filename} is larger than {PICKLE_LIMIT} bytes")
    for _ in _pieces(archive, member, name):
        pass  # the CRC is compared at the end


HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError unless the file has exactly the bytes that its header announces."""
    name = path.name
    size = regular_size(path)
    with open_regular(path) as file:
        length_field = file.read(8)
        length = int.from_bytes(length_field, "little")
        if len(length_field) < 8 or length > min(HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{name} is truncated or damaged: {size} bytes, no whole header")
        header = parse_json(file.read(length), f"{name}: header")
    wanted = 8 + length + _data_size(header, name)
    if size < wanted:
        raise CheckpointError(f"truncated: {name} has {size} bytes, its header wants {wanted}")
    if size > wanted:
        raise CheckpointError(f"damaged: {name} has {size} bytes, its header wants {wanted}")


def _data_size(header: dict[str, Any], name: str) -> int:
    end = 0
    for tensor, entry in header.items():
        if tensor == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or type(offsets[1]) is not int:
            raise CheckpointError(f"{name}: header: {tensor} has no data_offsets")
        end = max(end, offsets[1])
    return end
