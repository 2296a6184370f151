"""A first pass over a pickle that is about to be read: is it sane, and what would hash in C?

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

import re
from collections.abc import Iterator

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
