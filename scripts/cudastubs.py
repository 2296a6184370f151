"""Libraries of CUDA that do nothing, with which builds of torch for CUDA run on CPUs.

From 2.14 on torch has no other builds, and the libraries that they are linked with take 3 GB. On a
machine without a GPU nothing of them is called but the question for devices. The stub of a library
has the functions that torch's own libraries ask it for, with their versions. Each returns 100,
``cudaErrorNoDevice``. It lies beside torch's own libraries, where the loader looks for it.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

CUDAS = re.compile(r"lib(cu(?!da\.)|nccl|nv)")
"""Libraries that are replaced. libcuda is the driver's: torch opens it only where there is one."""
OWN_FUNCTIONS = re.compile(r"_*(cu|nccl|nv)[a-zA-Z0-9]*[A-Z_]")
"""How a function of CUDA is called, among those that are asked for without a version."""
NEEDED = re.compile(r"NEEDED\s+(\S+)")
UNDEFINED = re.compile(r"\*UND\*\s+[0-9a-f]+\s+(?:(?:\((\S+)\)|Base)\s+)?(\S+)$", re.M)


def make(libraries: Path) -> int:
    """Write the stubs that the libraries in a directory need, there; return how many.

    Needs objdump and gcc.
    """
    found = sorted(libraries.glob("*.so*"))
    needed = {name for path in found for name in NEEDED.findall(_dump("-p", path))}
    missing = sorted(name for name in needed - {p.name for p in found} if CUDAS.match(name))
    functions: dict[str, set[str]] = defaultdict(set)
    for version, name in (pair for path in found for pair in UNDEFINED.findall(_dump("-T", path))):
        if version or OWN_FUNCTIONS.match(name):
            functions[version].add(name)
    for library in missing:
        # A library's versions have its name, but for nvshmem's. The loader takes a function
        # without a version from any of them.
        version = "NVSHMEM" if "nvshmem" in library else library
        others = functions[""] if library == missing[0] else ()
        _compile(libraries / library, version, functions[version], others)
    return len(missing)


def _dump(option: str, path: Path) -> str:
    argv = ["objdump", option, str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def _compile(path: Path, version: str, names: Iterable[str], others: Iterable[str]) -> None:
    """Write one library, whose functions ``names`` have a version and ``others`` none."""
    source, script = path.with_suffix(".c"), path.with_suffix(".map")
    names, others = sorted(names), sorted(set(others) - set(names))
    lines = [f"long {name}(void) {{ return 100; }}" for name in (*names, *others)]
    source.write_text("\n".join(lines) + "\n")
    shown = " ".join(f"{name};" for name in names)
    script.write_text(f"{version} {{ global: {shown} }};\n" if names else "V { };\n")
    argv = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    argv += [f"-Wl,--version-script={script}", f"-o{path}", str(source)]
    subprocess.run(argv, check=True)
    source.unlink()
    script.unlink()
