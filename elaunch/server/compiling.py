"""Have the next round's workers find done what ``torch.compile`` does once in each process.

A restarted worker finds its kernels in TorchInductor's cache. Its first compiled step still takes
seconds of what is the same in all: the imports, a hash of torch's source, whether compiler and
processor agree on vector instructions, and whether the precompiled header is that of the headers
as they are, for which other processes are started. So the server does that as soon as a worker
begins to compile; the imports are elaunch.server.preload's.

What takes other processes or threads is found out in a fork (:func:`find_out`), since the server
must not wait for a compiler, and :func:`adopt` enters it into torch's own caches. The fork also
begins to compile a function, up to the compiler's start, and so learns what torch imports then.
All that is internal to torch: where it has other names nothing is done.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from elaunch.server import processes

FIRST = "torch._inductor.compile_fx"
MODULES = (FIRST, "torch.utils.cpp_extension", "torch._dynamo.backends.inductor")
_KEY = ("torch._inductor.codecache", "torch_key")
_ISA = ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list")
_HEADER = ("torch._inductor.codecache", "_precompile_header")
_MAKE = ("torch._inductor.codecache", "_worker_compile_cpp")
_CONFIG = "torch._inductor.config"
_NAMES = ("torch._dynamo.funcname_cache", "get_funcname")
_NAMED = ("torch.nn.functional", "torch.nn.modules.")
"""Modules, or packages of such, that most models call: a trace names each function."""
_SHOWN = ("TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG", "TORCHDYNAMO_")
"""How the variables begin by which a person sees what is compiled: it would be seen there."""

Found = dict[str, Any]


class _Enough(BaseException):
    """Ends a compilation; no exception that torch handles."""


def may_open_devices() -> bool:
    """Return whether torch is built for devices, which this process must never open."""
    version = sys.modules.get("torch.version")
    return any(getattr(version, kind, None) is not None for kind in ("cuda", "hip", "xpu"))


def find_out() -> Found:
    """Return what a worker finds out at its first compilation; called in a fork of the server."""
    found: Found = {}
    key, isa = _function(*_KEY), _function(*_ISA)
    if key is not None:
        found["key"] = key().hex()
    kind = _vector_isa()
    if isa is not None and kind is not None:
        builds: dict[str, bool] = {}
        build = kind.check_build

        def note(self: Any, code: str) -> bool:
            builds[_build_name(self, code)] = result = bool(build(self, code))
            return result

        kind.check_build = note
        isa()
        found["builds"] = builds
    if not may_open_devices() and not any(name.startswith(_SHOWN) for name in os.environ):
        found |= processes.call_in_fork(_begin_to_compile) or {}  # None where there is no compiler
    return found


def _begin_to_compile() -> Found:
    """Return which header a compilation asks for, and the modules that it imports until then."""
    import torch

    headers: dict[str, str] = {}
    ask, makers = _function(*_HEADER), vars(sys.modules[_MAKE[0]])

    def note(*question: str, **options: Any) -> str:
        makers[_MAKE[1]] = lambda *_: None  # the workers make a header that is missing
        headers[_digest(*question)] = ask(*question, **options)
        raise _Enough

    def stop(*_: object) -> None:
        raise _Enough

    if ask is not None:
        makers[_HEADER[1]] = note
    makers[_MAKE[1]] = stop
    if (config := sys.modules.get(_CONFIG)) is not None:
        setattr(config, "compile_threads", 1)  # noqa: B010  no pool of processes: here, not there
    before = set(sys.modules)
    with contextlib.suppress(_Enough):
        # Of a call: the functions that are called are looked up in torch's lists of them.
        torch.compile(lambda x: torch.nn.functional.relu(x))(torch.zeros(8))
    new = {name: module for name, module in sys.modules.items() if name not in before}
    files = [name for name, module in new.items() if getattr(module, "__spec__", None) is not None]
    return {"headers": headers, "modules": [name for name in files if name.startswith("torch.")]}


def adopt(found: Found) -> None:
    """Enter what :func:`find_out` has returned into the caches of torch in this process."""
    key, isa, kind = _function(*_KEY), _function(*_ISA), _vector_isa()
    if "key" in found:
        with contextlib.suppress(AttributeError, RuntimeError):  # it cannot be set, or is already
            key.set(bytes.fromhex(found["key"]))
    if headers := found.get("headers"):
        vars(sys.modules[_HEADER[0]])[_HEADER[1]] = _recall(headers, _function(*_HEADER))
    builds = found.get("builds")
    if kind is None or isa is None or not builds or not any(builds.values()):
        return  # the script may know of another compiler
    build = kind.check_build
    kind.check_build = lambda self, code: builds.get(_build_name(self, code), False)
    isa()
    kind.check_build = build


def fill_tables(meanwhile: Callable[[], None]) -> None:
    """Have torch make the tables that each process makes at its first compilation.

    ``meanwhile`` is called before each.
    """
    import torch

    tables: list[Callable[[], object]] = [
        torch.compiler.list_backends,
        torch.overrides.get_overridable_functions,
    ]
    if (name := _function(*_NAMES)) is not None:
        modules = [module for module in list(sys.modules) if module.startswith(_NAMED)]
        tables += [functools.partial(name, sys.modules[module].__file__, 1) for module in modules]
    for make in (*tables, _look_through_modules):
        meanwhile()
        make()


def _look_through_modules() -> None:
    """Have Python remember the file of each module, by asking for the module of foreign code.

    It asks every module, and one that is made on demand may raise whatever it likes.
    """
    with contextlib.suppress(Exception):
        inspect.getmodule(compile("", "<nowhere>", "exec"))


def _recall(headers: Mapping[str, str], ask: Callable[..., str]) -> Callable[..., str]:
    """Return what answers for a header that is known, and is there, without asking a compiler.

    A header of a compiler that has been replaced meanwhile is not taken by the new one.
    """

    @functools.wraps(ask)
    def recall(*question: str, **options: Any) -> str:
        path = headers.get(_digest(*question))
        return path if path and os.path.exists(f"{path}.gch") else ask(*question, **options)

    return recall


def _function(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _vector_isa() -> Any:
    kind = _function(_ISA[0], "VecISA")
    return kind if hasattr(kind, "check_build") else None


def _build_name(isa: Any, code: str) -> str:
    return _digest(f"{isa} {isa.build_arch_flags()} {code}")


def _digest(*texts: str) -> str:
    import hashlib  # a server that forks nothing does without

    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
