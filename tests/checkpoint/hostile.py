"""Files that strangers could put into a checkpoint directory, to hang or end who looks there."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

HUGE = 200 * 10**9
"""Bytes of files that are one hole."""

_DEEP = 200_000
"""Levels, of which each takes 48 bytes of a stack of 8 MiB and more where C recurses."""
_NESTED = b")" + b"2\x86" * 60  # each tuple holds the one before twice: 2^60 hashes
_LONG = b"\x8b" + struct.pack("<i", 2**20) + b"\x01" * 2**20
PICKLES: Mapping[str, bytes] = {
    "a key of 60 nested tuples": b"\x80\x02}" + _NESTED + b"Ns.",
    "the same among other keys": b"\x80\x02}(" + _NESTED + b"NK\x01Nu.",
    "the same in protocol 0": b"(" + _NESTED + b"Nd.",
    "the same in a set": b"\x80\x04\x8f(" + _NESTED + b"\x90.",
    "the same in a frozen set": b"\x80\x04(" + _NESTED + b"\x91.",
    "very many nested frozen sets": b"\x80\x04" + b"(" * _DEEP + b"N" + b"\x91" * _DEEP + b".",
    "the same in an object of a class": b"\x80\x02ccollections\nOrderedDict\n)R" + _NESTED + b"Ns.",
    "a key of very many nested tuples": b"\x80\x02})" + b"\x85" * _DEEP + b"Ns.",
    "very many nested tuples": b"\x80\x02)" + b"\x85" * 5 * _DEEP + b".",
    "very many nested dicts": b"\x80\x02" + b"}N" * _DEEP + b"N" + b"s" * _DEEP + b".",
    "one large number as many keys": b"\x80\x02" + _LONG + b"q\x00}(" + b"h\x00N" * _DEEP + b"u.",
    "keys that collide": b"\x80\x02}("
    + b"".join(
        b"\x8a\x0c" + ((2**61 - 1) * n).to_bytes(12, "little") + b"N" for n in range(1, _DEEP // 2)
    )
    + b"u.",
    "a piece at a number of a million digits": b"\x80\x02cx\nMetadata\n)\x81}X\x0c\x00\x00\x00"
    b"storage_data}K\x01cx\nInfo\n)\x81}(X\x0d\x00\x00\x00relative_pathX\x01\x00\x00\x00aX\x06\x00"
    b"\x00\x00offset" + _LONG + b"X\x06\x00\x00\x00lengthK\x01ubssb.",
}
JSONS: Mapping[str, bytes] = {
    "deep": b'{"schema": ' + b"[" * 2_000_000,
    "deep and closed": b'{"schema": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a long number": b'{"schema": ' + b"9" * 1_000_000 + b"}",
    "a long text": b'{"schema": "' + b"9" * 1_000_000 + b'"}',
}


def hole(path: Path, size: int = HUGE) -> None:
    """Write a file that has no bytes on the disk."""
    path.touch()
    os.truncate(path, size)


def archive(path: Path, pickled: bytes) -> None:
    """Write an archive as ``torch.save`` does, with this ``data.pkl``."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled)


def fill(root: Path) -> int:
    """Write all of it below ``root`` as candidates; return how many there are."""
    for number, pickled in enumerate(PICKLES.values()):
        (root / f"step_{number}").mkdir()
        (root / f"step_{number}" / ".metadata").write_bytes(pickled)
        archive(root / f"last{number}.ckpt", pickled)
    for number, document in enumerate(JSONS.values()):
        _own(root / f"step-0000000{number}.r0", document)
    (root / "step_98").mkdir()
    hole(root / "step_98" / ".metadata")
    for name in ("COMMIT", "metadata.json", "manifest.rank-00000.json"):
        path = root / f"step-0000001{len(name)}.r0"
        _own(path, b"{}")
        hole(path / name)
    trainer = root / "checkpoint-99"
    trainer.mkdir()
    hole(trainer / "trainer_state.json")
    (trainer / "model.safetensors").write_bytes(b"")
    hole(root / "step=97.ckpt")
    _endless_directory(root / "step=96.ckpt")
    return len(list(root.iterdir()))


def _own(path: Path, document: bytes) -> None:
    path.mkdir()
    for name in ("COMMIT", "metadata.json", "manifest.rank-00000.json"):
        (path / name).write_bytes(document)


def _endless_directory(path: Path) -> None:
    """Write an archive whose directory is said to have all of a hole's bytes."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as file:
        file.writestr("archive/data.pkl", b"N.")
    end = HUGE + 22
    hole(path)
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, HUGE - 64, 64))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, HUGE, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *(0xFFFF,) * 2, *(0xFFFFFFFF,) * 2, 0))
    assert path.stat().st_size > end
