"""Reading pickles of unknown origin without running anything of them.

A pickle runs code by naming a callable and having it called. Here every name, whatever it is,
resolves to ``Inert``: a class whose construction, state and item setters only remember their
arguments. Nothing is imported, so torch need not be there, and classes that moved between torch's
versions read alike. What comes out are dicts, lists, strings and numbers as they were, with
``Inert`` objects in the place of everything else.

Nothing is hashed but what hashes at once: a dict's key that is a container, or a number of more
than 64 bits, is replaced by an ``Inert`` object. Sets come out as ``Inert`` objects, too.

A first pass over a pickle (``without_hashing``) tells whether it is sane, and what would hash in C.

The interpreter's unpickler is safe from damaged input except in three things. One flipped bit in a
length lets it read text as operations; a memo index of four random bytes makes it allocate
gigabytes; and the keys of a dict are hashed in C, which for nested tuples overruns the stack, or
takes 2^60 steps for 250 bytes, and handles no signal meanwhile. This pass follows the operations
from the first to STOP without executing any. It refuses what no pickler writes: unknown operations,
arguments that reach behind the end, memo indices that are larger than the pickle so far. And it
replaces what hashes by what asks Python, that is ``persistent_load``:

===========================  ==================  ===============================================
operation                    becomes             which leaves on the stack
===========================  ==================  ===============================================
EMPTY_DICT                   NONE BINPERSID      ``persistent_load(None)``, to be a dict that
                                                 looks at its keys
DICT, of protocol 0          POP_MARK and those  the same, without the items: picklers have none
EMPTY_SET                    EMPTY_TUPLE         ``persistent_load(())``, to be something with
                             BINPERSID           ``add``
FROZENSET                    TUPLE               a tuple
FRAME                        nothing             its length would be wrong; it is a hint
===========================  ==================  ===============================================
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from typing import Any

from elaunch.errors import CheckpointError

_STOP, _PUT, _LONG_BINPUT = b".pr"
_FRAME = 0x95
_REPLACED = {ord("}"): b"NQ", ord("d"): b"1NQ", 0x8F: b")Q", 0x91: b"t"}

# Operations by the bytes of their argument. BINPUT is among them: its index is one byte.
_FIXED = {
    0: b"(012NRb]aelut)soQ\x81\x85\x86\x87\x88\x89\x90\x92\x93\x94\x97\x98",
    1: b"Khq\x80\x82",
    2: b"M\x83",
    4: b"Jj\x84",
    8: b"G",
}
_LENGTHS = {  # operation -> bytes of the length that stands before its argument
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES = {**dict.fromkeys(b"FILSVgpP", 1), **dict.fromkeys(b"ci", 2)}  # lines of its argument

# A run of operations with fixed arguments; bounded, as each one costs the matcher memory.
_RUN = re.compile(
    b"(?s:%b){0,1000}" % b"|".join(b"[%b].{%d}" % (re.escape(o), n) for n, o in _FIXED.items())
)


def without_hashing(data: bytes, name: str) -> bytes:
    """Return the pickle that ``data``, from ``name``, begins with, rewritten by the table above.

    Raises CheckpointError unless it is well-formed.
    """
    return b"".join(_rewritten(data, name))


def _rewritten(data: bytes, name: str) -> Iterator[bytes]:
    position = kept = 0  # what lies between the two is yielded as it is
    while position < len(data):
        run = _RUN.match(data, position)
        if run and run.end() > position:
            position = run.end()
            continue
        operation = data[position]
        if operation == _STOP:
            yield data[kept : position + 1]
            return
        if operation in _REPLACED or operation == _FRAME:
            yield data[kept:position]
            yield _REPLACED.get(operation, b"")
            position = kept = position + (9 if operation == _FRAME else 1)
        else:
            position = _behind(data, position, name)
    raise CheckpointError(f"{name} is not a readable pickle: truncated, it has {len(data)} bytes")


def _behind(data: bytes, position: int, name: str) -> int:
    """Return the position behind the operation at ``position`` and its argument."""
    operation, start = data[position], position + 1
    if operation in _LENGTHS:
        end = start + _LENGTHS[operation]
        return end + int.from_bytes(data[start:end], "little")
    if operation == _LONG_BINPUT:
        end = start + 4
        index = int.from_bytes(data[start:end], "little")
    elif operation in _LINES:
        end = start
        for _ in range(_LINES[operation]):
            end = data.find(b"\n", end) + 1 or len(data)
        index = _decimal(data[start:end]) if operation == _PUT else 0
    elif any(operation in operations for operations in _FIXED.values()):
        return len(data)  # its argument is not all there
    else:
        raise CheckpointError(f"{name} is not a readable pickle: byte {position} is no operation")
    if index > position:
        raise CheckpointError(f"{name} is not a readable pickle: byte {position} jumps in the memo")
    return end


def _decimal(line: bytes) -> int:
    digits = line.rstrip(b"\n")
    return int(digits) if digits.isdigit() and len(digits) < 20 else 10**20


PICKLE_LIMIT = 2**28
"""Bytes of a pickle that is read: it holds a checkpoint's structure, not the tensors."""

# What the interpreter's unpickler raises for malformed input, by measurement and its source.
_MALFORMED = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class Inert:
    """Stands for an object of any class: keeps the pickled state, does nothing."""

    __slots__ = ("items", "state")
    items: dict[object, object]
    state: object

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Ignore what the real class would have been built from."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        if not hasattr(self, "items"):  # pickles may build an object without __init__
            self.items = _Dict()
        self.items[key] = value

    def append(self, _item: object) -> None:
        """Accept and forget an item of a list subclass."""

    def extend(self, _items: object) -> None:
        """Accept and forget items of a list subclass."""

    def add(self, _item: object) -> None:
        """Accept and forget an item of a set subclass."""


_KEYS = frozenset((bytes, float, bool, Inert, type(None)))


class _Dict(dict[object, object]):
    """A dict that takes as keys only what hashes at once; pickled dicts become one."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is not str and type(key) not in _KEYS and not _is_short(key):
            key = Inert()
        dict.__setitem__(self, key, value)


def _is_short(key: object) -> bool:
    return type(key) is int and -(2**63) <= key < 2**63


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str, /) -> Any:
        return Inert

    def persistent_load(self, pid: object, /) -> Any:
        return _Dict() if pid is None else Inert()  # see without_hashing


def load_inert(data: bytes, name: str) -> object:
    """Return the first object pickled in ``data`` in inert form.

    ``name`` is the file's name for the message; raises CheckpointError for a malformed pickle.
    """
    rewritten = without_hashing(data, name)
    try:
        return _InertUnpickler(io.BytesIO(rewritten)).load()
    except _MALFORMED as error:
        detail = str(error) or type(error).__name__
        raise CheckpointError(f"{name} is not a readable pickle: {detail}") from None


def attribute(value: object, name: str) -> object:
    """Return an attribute that the real object would have had, or None."""
    state = getattr(value, "state", None) if isinstance(value, Inert) else None
    if isinstance(state, tuple) and len(state) == 2:  # (__dict__, __slots__)
        state = state[0] if isinstance(state[0], dict) else state[1]
    return state.get(name) if isinstance(state, dict) else None


def mapping(value: object) -> dict[object, object] | None:
    """Return a dict or the items of an inert subclass of dict; None for anything else."""
    if isinstance(value, dict):
        return value
    return getattr(value, "items", None) if isinstance(value, Inert) else None
