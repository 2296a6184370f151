"""The command to start: a script, a module or a program; chosen, then looked for.

The command line's words win over the job file's ``entrypoint`` as a whole. In a file the entry
point is written as it would be typed: ``train.py --lr 0.1``, ``-m pkg.train``, ``python train.py``,
``python -m pkg.train``.

A module is found by its name as a worker would find it, without importing anything:
``importlib.util.find_spec`` imports the parents of a dotted name and so runs their code; here the
finders are asked part by part along the path that the worker will have.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import Final, Literal

from msgspec import Struct

from elaunch.config import files, values
from elaunch.config.files import near_file
from elaunch.config.flags.flag import Answers, Entrypoint
from elaunch.errors import UsageError

Mode = Literal["script", "module", "command", "run-path"]
CALLER: Final = "elaunch.torchrun.worker"
"""The module that calls a function for a program (elaunch.torchrun.calls)."""
_ELF: Final = b"\x7fELF"
_OTHER_SCRIPT: Final = re.compile(rb"#!(?!.*python)")
_MOST_READ: Final = 1 << 20
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_STDIN: Final = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_OPEN_FILE = re.compile(r"/(dev|proc/self)/fd/\d+")


class Command(Struct, frozen=True):
    """One command; ``interpreter`` is a path that the job file names, or None."""

    entrypoint: str
    args: tuple[str, ...]
    mode: Mode
    where: str = ""
    interpreter: str | None = None

    @property
    def is_stdin(self) -> bool:
        """Whether the script comes by stdin, for a plain process to read."""
        return self.mode == "script" and self.entrypoint == "-"

    @property
    def is_open_here(self) -> bool:
        """Whether the script is a file that this process has open: stdin, or ``/dev/fd/N``."""
        path = self.mode in ("script", "run-path") and self.entrypoint
        return self.is_stdin or path in _STDIN or bool(path and _OPEN_FILE.fullmatch(path))

    @property
    def name(self) -> str:
        """The job's name if none is given: a module's name, a file's without suffix."""
        stem = self.entrypoint if self.mode == "module" else Path(self.entrypoint).stem
        return stem or self.entrypoint

    @property
    def shown(self) -> str:
        """How messages call it: with the line of the job file that it is from."""
        return f"{self.entrypoint!r} (from {self.where})" if self.where else repr(self.entrypoint)


def choose(words: Sequence[str], entry: Entrypoint, answers: Answers) -> Command:
    """Return the command of the command line, or else of the job file.

    Raises:
        UsageError: there is none, or the switches for its kind contradict each other.
    """
    module = bool(answers["module"])
    if why := next(filter(None, map(values.unfit, words)), ""):
        raise UsageError(f"the command line {why}")
    if words:
        return Command(words[0], tuple(words[1:]), _mode(answers, module))
    if not entry.words:
        raise UsageError(
            "nothing to start: give a script (elaunch run [options] script.py [args]), "
            "or a job file with an entrypoint (-f job.yaml)"
        )
    rest, interpreter = list(entry.words), None
    if not answers["no-python"]:
        rest, interpreter = _without_python(rest)
    if rest[:1] == ["-m"]:
        module, rest = True, rest[1:]
    if not rest:
        raise UsageError(f"entrypoint (from {entry.where}): no script or module is named")
    if rest[0].startswith("-"):
        raise UsageError(
            f"entrypoint (from {entry.where}): {rest[0]!r} stands where the script is expected; "
            "flags of elaunch are keys of the file"
        )
    mode = _mode(answers, module)
    return Command(rest[0], tuple(rest[1:]), mode, entry.where, interpreter)


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(PurePath(word).name) is not None


def _without_python(words: list[str]) -> tuple[list[str], str | None]:
    """Return the words without a leading ``python -u``, and the interpreter if it is a special one.

    ``python`` and ``python3`` mean elaunch's own, a path or ``python3.12`` exactly that.
    """
    if not _is_python(words[0]):
        return words, None
    rest = words[1:]
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    return rest, None if words[0] in ("python", "python3") else words[0]


def _mode(answers: Answers, module: bool) -> Mode:
    no_python, run_path = answers["no-python"], answers["run-path"]
    if module and no_python:
        raise UsageError("--module and --no-python: a module is run by Python; give one of them")
    if module and run_path:
        raise UsageError("--module and --run-path: the one names a module, the other a file")
    if run_path:
        return "run-path"
    if no_python:
        return "command"
    return "module" if module else "script"


def check(
    found: Command, answers: Answers, start: Path, interpreter: str, environ: Mapping[str, str]
) -> None:
    """Check that the script, the module or the program can be started."""
    try:
        if found.is_stdin:
            _read_once(found, answers, "stdin")
        elif found.mode == "module":
            _module(found, start, interpreter, environ)
        elif found.mode == "command":
            _program(found, start, environ)
        else:
            _script(found, start, answers)
    except UsageError as error:
        error.code = "E-NO-SCRIPT"
        raise


def _read_once(found: Command, answers: Answers, what: str) -> None:
    """Refuse a script that can be read once where it would be read twice, or not at all."""
    low, high = answers["nnodes"]
    if answers["nproc-per-node"] != "1":
        why = f"several workers cannot read one {what}"
    elif answers["max-restarts"] or low < high:
        why = f"after a restart a worker would find the {what} empty"
    elif answers["detach"] and what == "stdin":
        why = "a job in the background has no stdin"
    else:
        return
    raise UsageError(f"script {found.shown}: {why}; save it to a file")


def _script(found: Command, start: Path, answers: Answers) -> None:
    path = start / found.entrypoint
    if why := files.problem(path):
        raise UsageError(f"script {found.shown} {why}{_script_hint(found, path)}")
    stdin = found.entrypoint in _STDIN
    if found.is_open_here and not stdin:
        raise UsageError(f"script {found.shown}: no worker has this open file; save it to a file")
    if path.is_fifo() or (stdin and answers["detach"]):
        _read_once(found, answers, "stdin" if stdin else "pipe")
    if path.is_dir():
        if not os.path.isfile(path / "__main__.py"):
            raise UsageError(
                f"script {found.shown} is a directory without a __main__.py; name a file in it"
            )
        path = path / "__main__.py"
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {found.shown} may not be read by this user")
    if path.is_file():
        with open(path, "rb") as file:
            source = file.read(_MOST_READ)
        what = "program" if source.startswith(_ELF) else ""
        if _OTHER_SCRIPT.match(source) or path.suffix in (".sh", ".bash", ".zsh"):
            what = "" if _is_parsed(source) else "shell script"
        if what:
            what = f"is a {what}, not a Python script"
            raise UsageError(f"script {found.shown} {what}{_program_hint(found, 'it')}")


def _is_parsed(source: bytes) -> bool:
    """Whether it is Python after all: some scripts begin as one of the shell's."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _script_hint(found: Command, path: Path) -> str:
    if found.entrypoint.startswith("-"):
        return "; flags come before the script"
    near = near_file(path)
    if _is_python(found.entrypoint) or (not near and shutil.which(found.entrypoint)):
        return _program_hint(found, "a program that is not a Python script")
    if not near and "/" not in found.entrypoint and not found.entrypoint.endswith(".py"):
        return "; to start a module by its name, use -m"
    return near


def _program_hint(found: Command, it: str) -> str:
    if _is_python(found.entrypoint):
        return f"; leave {found.entrypoint!r} out: Python runs the script anyway"
    return f"; to start {it}, use --no-python"


def _module(found: Command, start: Path, interpreter: str, environ: Mapping[str, str]) -> None:
    if interpreter != sys.executable:
        return  # another Python has other modules, and only it knows them
    why = why_not_runnable(found.entrypoint, worker_path(start, environ))
    if why:
        raise UsageError(f"--module: {found.shown} {why}")


def _program(found: Command, start: Path, environ: Mapping[str, str]) -> None:
    name = found.entrypoint
    if "/" not in name:
        if not shutil.which(name, path=environ.get("PATH")):
            hint = near_file(start / name) if os.path.isfile(start / name) else ""
            hint = f"; for the file in {str(start)!r} write './{name}'" if hint else ""
            raise UsageError(f"--no-python: the program {found.shown} is not on PATH{hint}")
        return
    path = start / name
    if why := files.problem(path):
        raise UsageError(f"--no-python: {found.shown} {why}{near_file(path)}")
    if path.is_dir() or not os.access(path, os.X_OK):
        raise UsageError(
            f"--no-python: {found.shown} cannot be executed; make it executable (chmod +x), "
            "or leave --no-python out for a Python script"
        )


def interpreter(answers: Answers, found: Command, start: Path) -> str:
    """Return the Python of the workers: the job file's, PYTHON_EXEC, or the agent's own."""
    name = found.interpreter or answers["interpreter"]
    if not name:
        return sys.executable
    path = shutil.which(str(start / name) if "/" in name else name)
    if path is None:
        origin = "entrypoint" if found.interpreter else "PYTHON_EXEC"
        raise UsageError(f"{origin}: {name!r} is not a program that can be executed")
    return path


def preload(answers: Answers, start: Path, python: str, environ: Mapping[str, str]) -> None:
    """Check that the modules which the user wants in the fork server exist."""
    if not answers.is_set("preload") or python != sys.executable:
        return
    for name in answers["preload"]:
        why = why_not_found(name.removeprefix("+"), worker_path(start, environ))
        if why:
            raise answers.fault("preload", f"names {name}, which {why}")


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
    if "/" in name or not all(name.split(".")):
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
        path = os.path.normpath(name.removesuffix(".py")).lstrip("./")
        dotted = path.replace("/", ".")
        return f"; a module is named without directories and .py: did you mean {dotted!r}?"
    return ""


def _nearest(part: str, done: list[str], path: Sequence[str]) -> str:
    import pkgutil

    # Among all that is installed something is always a little like the name.
    near = ""
    for entries, cutoff in (path if done else path[:1], 0.6), (path, 0.8):
        names = [info.name for info in pkgutil.iter_modules(list(entries))]
        near = near or values.nearest(part, names, cutoff=cutoff)
    if near:
        return f"; did you mean {'.'.join([*done, near])!r}?"
    if done:
        return ""
    where = f"in {path[0]}, nor elsewhere on sys.path"
    return f" {where}; go to the directory that contains {part!r}, or set PYTHONPATH to it"
