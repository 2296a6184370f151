"""Reading pickles of unknown origin without running anything of them.

A pickle runs code by naming a callable and having it called. Here every name, whatever it is,
resolves to ``Inert``: a class whose construction, state and item setters only remember their
arguments. Nothing is imported, so torch need not be there, and classes that moved between torch's
versions read alike. What comes out are dicts, lists, strings and numbers as they were, with
``Inert`` objects in the place of everything else.

Nothing is hashed but what hashes at once: a dict's key that is a container, or a number of more
than 64 bits, is replaced by an ``Inert`` object. Sets come out as ``Inert`` objects, too.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from elaunch.checkpoint.formats.pickleops import without_hashing
from elaunch.errors import CheckpointError

PICKLE_LIMIT = 2**30
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
    """What a pickled dict becomes: it takes for keys only what hashes at once."""

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
