"""Have the next round's workers find done what ``torch.compile`` does once in each process.

A restarted worker finds its kernels in TorchInductor's cache. Its first compiled step still takes
seconds of what is the same in all: the imports, a hash of torch's source, and whether compiler and
processor agree on vector instructions, for which other processes are started. So the server does
that as soon as a worker begins to compile; the imports are elaunch.server.preload's.

What takes other processes or threads is found out in a fork (:func:`find_out`), since the server
must not wait for a compiler, and :func:`adopt` enters it into torch's own caches. Those are
internal to torch: where they have other names nothing is done.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

FIRST = "torch._inductor.compile_fx"
MODULES = (FIRST, "torch.utils.cpp_extension", "torch._dynamo.backends.inductor")
_KEY = ("torch._inductor.codecache", "torch_key")
_ISA = ("torch._inductor.cpu_vec_isa", "valid_vec_isa_list")

Found = dict[str, Any]


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
    return found


def adopt(found: Found) -> None:
    """Enter what :func:`find_out` has returned into the caches of torch in this process."""
    key, isa, kind = _function(*_KEY), _function(*_ISA), _vector_isa()
    if "key" in found:
        with contextlib.suppress(AttributeError, RuntimeError):  # it cannot be set, or is already
            key.set(bytes.fromhex(found["key"]))
    builds = found.get("builds")
    if kind is None or isa is None or not builds or not any(builds.values()):
        return  # the script may know of another compiler
    build = kind.check_build
    kind.check_build = lambda self, code: builds.get(_build_name(self, code), False)
    isa()
    kind.check_build = build


def _function(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _vector_isa() -> Any:
    kind = _function(_ISA[0], "VecISA")
    return kind if hasattr(kind, "check_build") else None


def _build_name(isa: Any, code: str) -> str:
    import hashlib  # a server that forks nothing does without

    text = f"{isa} {isa.build_arch_flags()} {code}"
    return hashlib.sha256(text.encode()).hexdigest()
