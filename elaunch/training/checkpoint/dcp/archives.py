"""The archives in a ``.distcp`` file: each piece of a tensor, and each value, is a torch.save zip.

::

    prefix    zip headers, the pickle with dtype, shape and strides      the same for every tensor
    hole      the elements                                               of one dtype and shape
    suffix    the other records, the zip's directory

So prefix and suffix are made once, without the elements, and a save copies nothing but elements. A
value's archive may be longer than needed: what follows is the zip's comment, which readers skip, so
that a number that grows by a byte moves nothing that lies behind it.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch

from elaunch.errors import CheckpointError
from elaunch.training.unpickling import Careful, Names, PickleRefused

with contextlib.suppress(ImportError):  # the first torch.save imports it: a fork's server has it
    import torch.utils.serialization.config

ALIGNMENT: Final = 64
"""Where archives begin in their file; their elements are aligned to it as well."""
LONGEST_COMMENT: Final = 2048
"""A zip's may have 65535 bytes; torch looks for what is before it in the last 4096."""
_COMMENT_LENGTH: Final = 2
"""Bytes at the end of a zip without a comment that say so."""


@dataclass(frozen=True)
class Template:
    """The archive of a dense tensor but for its elements, of which there are ``hole`` bytes."""

    prefix: bytes
    suffix: bytes
    hole: int

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return len(self.prefix) + self.hole + len(self.suffix)


class _Sparse(io.RawIOBase):
    """A file that remembers what was written where, and not what was skipped."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self._at = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; torch skips what it does not write."""
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end is not known")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def write(self, data: Any) -> int:
        """Remember ``data`` and its place."""
        content = bytes(data)
        self.pieces.append((self._at, content))
        self._at += len(content)
        return len(content)


@lru_cache(maxsize=1 << 17)  # a save asks for all of its shapes, one after the other: no fewer
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template:
    """Return the archive of a contiguous tensor on the CPU; raise CheckpointError for odd dtypes.

    Costs no memory for the elements, whatever the shape.
    """
    # Not touched, so these are no pages: only addresses.
    tensor = torch.empty(shape, dtype=dtype)
    file = _Sparse()
    try:
        with torch.serialization.skip_data():
            torch.save(tensor, file)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"torch.save cannot write {dtype}: {error}") from error
    return _split(file.pieces, tensor.numel() * tensor.element_size())


def _split(pieces: list[tuple[int, bytes]], hole: int) -> Template:
    before, after = bytearray(), bytearray()
    end, found = 0, 0
    for at, content in sorted(pieces):
        if at != end:
            found += at - end
        (after if found else before).extend(content)
        end = at + len(content)
    if found != hole:
        raise CheckpointError(
            f"torch.serialization.skip_data() of torch {torch.__version__} leaves out {found} "
            f"bytes of a tensor of {hole}: this version of elaunch does not know its format"
        )
    return Template(bytes(before), bytes(after), hole)


def pack(value: object) -> bytes:
    """Return a value's archive. Raises whatever pickling it raises."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(archive: Any, also: Names | None = None) -> Any:
    """Return what :func:`pack` was given, tensors in it on the CPU.

    A value is a pickle, which may name what elaunch.training.unpickling knows to be harmless, and
    ``also``: without it what the script has named to ``torch.serialization.add_safe_globals``.
    Raises PickleRefused for anything else, and what torch.load raises.
    """
    refuse_script(archive)

    class ArchiveReader(Careful):
        """Reads with the names of this call; torch.load makes it."""

        def __init__(self, file: Any, **kwargs: Any) -> None:
            super().__init__(file, also=also, **kwargs)

    # torch.load takes whatever has an Unpickler for a module.
    reader: Any = SimpleNamespace(Unpickler=ArchiveReader, load=_no_old_format, __name__=__name__)
    file = io.BytesIO(archive)
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=reader)


def refuse_script(archive: Any) -> None:
    """Raise PickleRefused for what torch.load would read as TorchScript, which is a program."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        if any(name.rpartition("/")[2] == "constants.pkl" for name in file.namelist()):
            raise PickleRefused("it is a program in TorchScript, no value")


def _no_old_format(*_: object, **__: object) -> NoReturn:
    raise PickleRefused("it is no zip archive of torch.save")


def unpack_tensor(archive: Any) -> torch.Tensor:
    """Return the tensor in an archive, of any version of torch; raises what torch.load raises."""
    tensor = torch.load(io.BytesIO(archive), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it holds a {type(tensor).__name__}, not a tensor")
    return tensor


def length_for(size: int, last: int = 0) -> int:
    """Return how long an archive of ``size`` bytes is made: as ``last`` time, if it fits."""
    if size <= last <= size + LONGEST_COMMENT:
        return last
    return aligned(size)


def padded(archive: bytes, size: int) -> bytes:
    """Return an archive without a comment as one of ``size`` bytes, by giving it a comment."""
    room = size - len(archive)
    if not 0 <= room <= LONGEST_COMMENT:
        raise ValueError(f"an archive of {len(archive)} bytes cannot get {size}")
    return b"".join(
        (archive[:-_COMMENT_LENGTH], room.to_bytes(_COMMENT_LENGTH, "little"), bytes(room))
    )


def aligned(size: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return size + -size % ALIGNMENT
