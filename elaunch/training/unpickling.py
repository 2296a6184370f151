"""Pickles that others may have written: what they can name is a list, and nothing else is called.

A pickle runs code by naming a callable and having it called. Here a name is looked up in tables;
any other is refused before anything is imported or called for it.

================  ==================================================================================
reader            for
================  ==================================================================================
``load_listed``   large pickles of classes that all are known beforehand: C speed, and no class that
                  is named can be changed, since the pickle gets a stand-in that makes its
                  instances; nor can a member of an enum
``Careful``       values of any kind: an unpickler in Python that knows what it calls and what it
                  fills. It takes plain values of Python, numpy and torch, what the script has named
                  to ``torch.serialization.add_safe_globals``, and what its caller names
================  ==================================================================================

``named_by(value)`` are the classes and functions that a value of this process is made of: a load
into a place where such a value stands now accepts them.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, EnumMeta
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar, Final, NoReturn

Name = tuple[str, str]
Names = Mapping[Name, Any]
_OLD_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_OLD_NAMES: Final = {"long": "int", "unicode": "str", "xrange": "range"}
"""Names of Python 2 that protocol 2 uses, which torch.save writes."""
_GETATTR: Final = ("builtins", "getattr")
_IMMUTABLE: Final = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE."""

_PLAIN: Final[Mapping[str, str]] = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list object range set slice "
    "str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "argparse": "Namespace",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "ipaddress": "IPv4Address IPv6Address",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath",
    "random": "Random",
    "types": "SimpleNamespace",
    "uuid": "SafeUUID UUID",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "torch": "Generator Size device",
    "torch._C": "Generator",
    "torch._utils": "_rebuild_meta_tensor_no_storage _rebuild_parameter _rebuild_tensor "
    "_rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage",
}
"""Classes and functions that make a value of nothing but what they are given.

``_check_arguments`` says of what, and ``_FILLED`` which of their instances are filled afterwards.
"""
_FILLED: Final = frozenset(
    "argparse.Namespace collections.Counter collections.OrderedDict collections.defaultdict "
    "collections.deque numpy.ndarray random.Random torch._C.Generator types.SimpleNamespace "
    "uuid.UUID".split()
)
CHECKPOINT: Final[Mapping[str, str]] = {
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata "
    "MetadataIndex StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem "
    "WriteItemType",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING TensorProperties",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
    "pathlib": "Path PosixPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath PurePosixPath PureWindowsPath",
    "types": "SimpleNamespace",
}
"""The classes with which torch.distributed.checkpoint describes tensors and files."""


class PickleRefused(pickle.UnpicklingError):
    """A pickle names, or does, what is not on the list; ``name`` is what it names, or ""."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


def _key(module: str, name: str) -> Name:
    module = _OLD_MODULES.get(module, module)
    return module, _OLD_NAMES.get(name, name) if module == "builtins" else name


def _refuse(module: str, name: str) -> NoReturn:
    full = f"{module}.{name}"
    raise PickleRefused(f"it names {ascii(full)[1:-1][:200]}, which is not loaded unasked", full)


def reach(module: str, name: str) -> Any:
    """Return what is called ``name`` in a module; PickleRefused where there is none."""
    found: Any = _module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        _refuse(module, name)
    return found


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# ── what a value is made of ──────────────────────────────────────────────────────────────────────


class _Naming(pickle.Pickler):
    """Notes what the pickle of a value would name, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: dict[Name, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Note classes and functions; skip what is large and names nothing of its own."""
        if isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self.found[obj.__module__ or "", obj.__qualname__] = obj
            return None
        kind = type(obj)
        plain = kind in (bytes, str, int, float, bool, bytearray, type(None))
        large = kind.__module__ in ("torch", "numpy") and hasattr(obj, "ndim")
        return 0 if plain or large else None


def named_by(values: Iterable[object]) -> Names:
    """Return what the pickles of ``values`` name, and what was named to torch.

    Names of Python's own library are left out: the tables have what is harmless of it.
    """
    naming = _Naming()
    for value in values:
        try:
            naming.dump(value)
        except Exception:  # noqa: S112 - whatever a class raises that cannot be pickled
            continue
    found = {
        (module, name): one
        for (module, name), one in naming.found.items()
        if module.partition(".")[0] not in _LIBRARY
    }
    return {**found, **named_to_torch()}


_LIBRARY: Final = sys.stdlib_module_names - {"__main__"} | {"numpy", "torch", ""}


class Anything(dict[Name, Any]):
    """Allows every name: for what the user trusts."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what the name stands for."""
        return reach(*key)


class Records(dict[Name, Any]):
    """Allows, beside the names in it, the records that elaunch's own ranks send each other."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what the name stands for, ``default`` if it is not allowed."""
        module, name = key
        if key in self:
            return self[key]
        if name in CHECKPOINT.get(module, "").split():
            return reach(module, name)
        if not module.startswith("elaunch."):
            return default
        found = reach(module, name)
        frozen = getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
        return found if frozen and isinstance(found, type) else default


def named_to_torch() -> Names:
    """Return what the script has named to ``torch.serialization.add_safe_globals``."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[Name, Any] = {}
    for one in torch.serialization.get_safe_globals():
        if isinstance(one, tuple):
            module, _, name = str(one[1]).rpartition(".")
            found[module, name] = one[0]
        else:
            found[one.__module__, one.__qualname__] = one
    return found


# ── known classes, quickly ───────────────────────────────────────────────────────────────────────


class _Member:
    """A member of an enum as a pickle gets it: equal to the real one, which everybody shares."""

    __slots__ = ("_real",)

    def __init__(self, real: Enum) -> None:
        self._real = real

    def __eq__(self, other: object) -> bool:
        return self._real is other

    def __hash__(self) -> int:
        return hash(self._real)


def _member(of: Any, name: Any) -> Any:
    """Return a member by its name: Python 3.11.0 to 3.11.3 pickle it as a call of getattr."""
    enum = getattr(of, "stands_for", of)
    if not isinstance(enum, EnumMeta) or type(name) is not str or name not in enum.__members__:
        raise PickleRefused("it calls getattr with what is no member of an enum")
    return enum[name] if enum is of else _Member(enum[name])


def _stand_in(real: Any) -> Any:
    """Return what a pickle gets for ``real``: itself where nobody can change that.

    Else a class that makes its instances: of this pickle alone, whatever that does to it.
    """
    if isinstance(real, FunctionType):
        return lambda *args: real(*args)
    if not isinstance(real, type) or real.__flags__ & _IMMUTABLE:
        return real

    def make(_: type, *args: Any) -> Any:
        # NEWOBJ makes what BUILD fills, REDUCE calls: of dataclasses only the first is needed.
        is_filled = hasattr(real, "__dataclass_fields__")
        made = real.__new__(real, *args) if is_filled else real(*args)
        return _Member(made) if isinstance(made, Enum) else made

    return type(real.__name__, (), {"__new__": make, "stands_for": real})


class _Listed(pickle.Unpickler):
    """Finds classes by a function, and gives the pickle their stand-ins."""

    def __init__(self, file: io.BytesIO, find: Callable[[str, str], Any]) -> None:
        super().__init__(file)
        self._find = find
        self._made: dict[Name, Any] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what the pickle gets for a name."""
        key = _key(module, name)
        if key not in self._made:
            self._made[key] = _stand_in(_member if key == _GETATTR else self._find(*key))
        return self._made[key]


def load_listed(data: bytes | memoryview, find: Callable[[str, str], Any]) -> Any:
    """Return what is pickled in ``data``; ``find(module, name)`` returns a class or refuses it.

    Raises what unpickling raises; PickleRefused is an UnpicklingError.
    """
    copyreg.clear_extension_cache()  # what is in it is not looked up
    return _Listed(io.BytesIO(data), find).load()


# ── values of any kind ───────────────────────────────────────────────────────────────────────────

# The unpickler in Python, and how its instructions are called in its table of them.
_InPython: Any = pickle._Unpickler


class Careful(_InPython):  # type: ignore[misc]
    """Unpickles values; calls and fills nothing but what it was allowed to.

    Args:
        file, buffers: as for pickle.Unpickler.
        also: names that are allowed beside the plain ones; those named to torch if not given.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def __init__(
        self, file: Any, *, also: Names | None = None, buffers: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(file, buffers=buffers, **kwargs)
        self._also: Names = named_to_torch() if also is None else also
        self._named: dict[int, Any] = {}
        self._checked: set[int] = set()  # those of the plain ones

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for; PickleRefused if it is not on the list."""
        key = _key(module, name)
        found = _plain(*key)
        self._checked.add(id(found))
        if found is None:
            found = self._also.get(key)
            if found is None:
                _refuse(*key)
            self._checked.discard(id(found))
        self._named[id(found)] = found
        return found

    def get_extension(self, code: int) -> NoReturn:
        """Refuse: the registry of extensions may name anything."""
        raise PickleRefused(f"it names extension {code} of copyreg")

    def _check_called(self, called: Any, args: Any, by_name: Any = ()) -> None:
        if id(called) not in self._named:
            raise PickleRefused(f"it calls {type(called).__name__}, which it has not named")
        if id(called) in self._checked and (by_name or not _may_be_called(called, args)):
            name = getattr(called, "__name__", "what is no function")
            raise PickleRefused(f"it calls {name} with what no pickle of one has")

    def _instantiate(self, klass: Any, k: Any) -> None:
        self._check_called(klass, tuple(k))
        super()._instantiate(klass, k)

    def load_reduce(self) -> None:
        """Call something that was named."""
        self._check_called(*self.stack[-2:])
        _InPython.load_reduce(self)

    def load_newobj(self) -> None:
        """Make an instance of a class that was named."""
        self._check_called(*self.stack[-2:])
        _InPython.load_newobj(self)

    def load_newobj_ex(self) -> None:
        """Make an instance of a class that was named, with arguments by name."""
        self._check_called(*self.stack[-3:])
        _InPython.load_newobj_ex(self)

    def load_build(self) -> None:
        """Fill an instance; numpy's only with what they are.

        Never what the process shares: a class, a function, a member of an enum.
        """
        state, filled = self.stack[-1], self.stack[-2]
        kind = type(filled)
        if id(filled) in self._named or isinstance(filled, type | FunctionType | Enum):
            raise PickleRefused(f"it changes {getattr(filled, '__name__', 'what it has named')}")
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(filled, numpy.dtype):
            _check_dtype(filled, state)
        elif numpy is not None and isinstance(filled, numpy.ndarray):
            _check_array(filled, state)
        elif kind.__module__.partition(".")[0] in _LIBRARY and not (
            f"{kind.__module__}.{kind.__qualname__}" in _FILLED or self._is_allowed(kind)
        ):
            raise PickleRefused(f"it changes a {kind.__name__}")
        _InPython.load_build(self)

    def _is_allowed(self, kind: type) -> bool:
        """Tell whether a class was found among those that are allowed beside the plain ones."""
        return id(kind) in self._named and id(kind) not in self._checked

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build


def load_careful(data: Any, also: Names | None = None) -> Any:
    """Return what is pickled in ``data``, as :class:`Careful` reads it; raises what it raises."""
    return Careful(io.BytesIO(data), also=also).load()


def _may_be_called(called: Any, args: Any) -> bool:
    """Tell whether something plain may be called so: nothing that takes an address, or a size."""
    if type(args) is not tuple or not callable(called):
        return False
    module, name = called.__module__ or "", called.__name__
    first = args[0] if args else None
    if name.startswith("_rebuild_tensor"):
        torch = sys.modules["torch"]
        return isinstance(first, torch.storage.TypedStorage | torch.storage.UntypedStorage)
    if module.partition(".")[0] == "numpy" and name != "_frombuffer":
        return _numpy_may_make(name, args)
    if module == "torch.storage":
        return called is _load_storage
    if name == "Fraction" and type(first) is str:
        return "e" not in first.lower()  # the power of ten would be worked out
    if name == "defaultdict":
        args = args[1:]
    if module in ("builtins", "collections") or name == "Size":
        allowed = (bool, str, bytes, bytearray, float, complex, list, tuple, dict, set, frozenset)
        whole = name in ("int", "float", "complex", "bool", "range", "slice", "deque")
        return all(type(arg) in allowed or (whole and _is_number(arg)) for arg in args)
    return True


def _is_number(value: object) -> bool:
    return value is None or type(value) is int


def _numpy_may_make(name: str, args: tuple[Any, ...]) -> bool:
    numpy = sys.modules["numpy"]
    if name == "dtype":
        spec = args[0] if args else None
        return type(spec) is str and re.fullmatch(r"[<>|=]?[?a-zA-Z]\d{0,9}", spec) is not None
    if name == "scalar":
        return isinstance(args[0], numpy.dtype) and not args[0].hasobject if args else False
    if name != "_reconstruct" or len(args) != 3 or not isinstance(args[0], type):
        return False
    return issubclass(args[0], numpy.ndarray) and args[1:] == ((0,), b"b")


def _check_array(array: Any, state: Any) -> None:
    """Refuse a state for which numpy would read more than is there."""
    numpy = sys.modules["numpy"]
    if type(array).__setstate__ is not numpy.ndarray.__setstate__:
        return  # a class of the script's own
    fits = array.base is None and isinstance(state, tuple) and len(state) == 5
    if fits:
        _, shape, dtype, _, content = state
        fits = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
        wanted, size = (list, 1) if getattr(dtype, "hasobject", False) else (bytes, None)
        size = getattr(dtype, "itemsize", 0) if size is None else size
        fits = fits and type(content) is wanted and len(content) == math.prod(shape) * size
    if not fits:
        raise PickleRefused("it holds an array of numpy whose elements are not those of its shape")


def _check_dtype(dtype: Any, state: Any) -> None:
    """Refuse a state that makes another type of it: numpy would take numbers for addresses."""
    if not (isinstance(state, tuple) and len(state) >= 8 and _is_of(dtype, state)):
        raise PickleRefused("it holds an array of numpy of a type that is not loaded unasked")


def _is_of(dtype: Any, state: tuple[Any, ...]) -> bool:
    version, order, base, names, fields, size, alignment, flags = state[:8]
    if version not in (3, 4) or order not in ("<", ">", "|", "=") or base is not None:
        return False
    if alignment not in (-1, 1, 2, 4, 8, 16, 32):
        return False
    if dtype.kind in "mM" and not _is_unit(state[8:]):
        return False
    if names is None and fields is None:
        return size in (-1, dtype.itemsize) and flags == dtype.flags
    if dtype.kind != "V" or size != dtype.itemsize or type(fields) is not dict:
        return False
    if type(names) is not tuple or fields.keys() != set(names) or len(names) != len(fields):
        return False
    return not flags & ~_HARMLESS and all(_is_field(dtype, field) for field in fields.values())


def _is_unit(stated: tuple[Any, ...]) -> bool:
    """Tell whether what a dtype of times adds is a unit, and how many of them."""
    if not stated:
        return True
    unit = stated[0][1] if type(stated[0]) is tuple and len(stated[0]) == 2 else None
    counts = unit[1:] if type(unit) is tuple and len(unit) in (4, 5) else ()
    return bool(counts) and all(type(count) is int and 0 < count < 2**31 for count in counts)


_HARMLESS: Final = 0x10 | 0x80
"""Flags of a dtype with fields that hold no Python objects."""


def _is_field(whole: Any, field: Any) -> bool:
    numpy = sys.modules["numpy"]
    if not (isinstance(field, tuple) and len(field) >= 2 and isinstance(field[0], numpy.dtype)):
        return False
    inner, offset = field[:2]
    fits = type(offset) is int and 0 <= offset <= whole.itemsize - inner.itemsize
    return fits and not inner.hasobject


def _plain(module: str, name: str) -> Any:
    if (module, name) == _GETATTR:
        return _member
    if (module, name) == ("_codecs", "encode"):
        return _encode
    if (module, name) == ("torch.storage", "_load_from_bytes"):
        return _load_storage
    if (module, name) == ("torch._utils", "_rebuild_sparse_tensor"):
        return _rebuild_sparse
    if name in _PLAIN.get(module, "").split():
        return reach(module, name)
    return None if name.startswith("_") else torch_kind(module, name)


def torch_kind(module: str, name: str) -> Any:
    """Return the dtype, layout or memory format of torch that a name stands for; None if none."""
    torch = sys.modules.get("torch")
    if module != "torch" or torch is None:
        return None
    found = getattr(torch, name, None)
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return found if isinstance(found, kinds) else None


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes as protocol 2 has them."""
    if encoding != "latin1":
        raise PickleRefused(f"it encodes with {ascii(encoding)[:40]}")
    return text.encode("latin1")


def _load_storage(content: bytes) -> Any:
    """Return the memory of a tensor in a pickle that is not torch.save's."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _rebuild_sparse(layout: Any, data: Any) -> Any:
    """Return a sparse tensor whose indices are within it."""
    import torch

    with torch.sparse.check_sparse_tensor_invariants():
        return torch._utils._rebuild_sparse_tensor(layout, data)
