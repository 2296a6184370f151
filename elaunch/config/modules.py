"""Find a module by its name as a worker would, without importing anything.

``importlib.util.find_spec`` imports the parents of a dotted name and so runs their code; here the
finders are asked part by part along the path that the worker will have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from elaunch.config.flags import values


def worker_path(directory: Path, environ: Mapping[str, str]) -> list[str]:
    """Return ``sys.path`` of a worker that runs a module in ``directory``."""
    extra = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    entries = [*(os.path.join(directory, part) for part in extra), *sys.path]
    return list(dict.fromkeys([str(directory), *filter(None, entries)]))


def why_not_runnable(name: str, path: Sequence[str]) -> str | None:
    """Return why ``python -m name`` would fail, or None if it is there or cannot be told."""
    why = why_not_found(name, path)
    if why is not None:
        return why
    found = _walk(name, path)
    if found is None or found.submodule_search_locations is None:
        return None
    if _find("__main__", list(found.submodule_search_locations)) is None and not _is_odd(found):
        return "is a package without a __main__.py, so it cannot be run"
    return None


def why_not_found(name: str, path: Sequence[str]) -> str | None:
    """Return why importing ``name`` would fail, or None if it is there or cannot be told."""
    if not all(part.isidentifier() for part in name.split(".")):
        return f"is not the name of a module{_slip(name)}"
    where: Sequence[str] = path
    done: list[str] = []
    for part in name.split("."):
        found = _find(part, where, top=not done)
        if found is None:
            return f"was not found{_inside(done)}{_slip(name) or _nearest(part, done, where)}"
        done.append(part)
        if len(done) == len(name.split(".")) or _is_odd(found):
            return None
        if found.submodule_search_locations is None:
            return f"was not found: {'.'.join(done)} is a module, not a package{_slip(name)}"
        where = list(found.submodule_search_locations)
    return None


def file_of(name: str, path: Sequence[str]) -> Path | None:
    """Return the file that ``python -m name`` runs, or None if it cannot be told."""
    found = _walk(name, path)
    if found is not None and found.submodule_search_locations is not None:
        found = _find("__main__", list(found.submodule_search_locations))
    return Path(found.origin) if found and found.has_location and found.origin else None


def _walk(name: str, path: Sequence[str]) -> ModuleSpec | None:
    where, found = path, None
    for index, part in enumerate(name.split(".")):
        found = _find(part, where, top=index == 0)
        if found is None:
            return None
        where = list(found.submodule_search_locations or ())
    return found


def _find(part: str, path: Sequence[str], top: bool = False) -> ModuleSpec | None:
    """Ask the path, and for the first part of a name also the other finders of this Python."""
    found = PathFinder.find_spec(part, list(path))
    if found is not None or not top:
        return found
    for finder in sys.meta_path:
        if finder is PathFinder:
            continue
        found = finder.find_spec(part, None)
        if found is not None:
            return found
    return None


def _is_odd(spec: ModuleSpec) -> bool:
    """Whether a package changes where its modules are looked for while it is imported."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        return "__path__" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def _inside(done: list[str]) -> str:
    return f" in the package {'.'.join(done)}" if done else ""


def _slip(name: str) -> str:
    """Return the hint for a file's name that was given as a module's."""
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").strip("/").replace("/", ".")
        return f"; a module is named without directories and .py: did you mean {dotted!r}?"
    return ""


def _nearest(part: str, done: list[str], path: Sequence[str]) -> str:
    import pkgutil

    names = [info.name for info in pkgutil.iter_modules(list(path))]
    near = values.nearest(part, names)
    return f"; did you mean {'.'.join([*done, near])!r}?" if near else ""
