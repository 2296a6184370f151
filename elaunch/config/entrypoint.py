"""The command to start: a script, a module or a program, by the command line or the job file.

The command line's words win over the file's ``entrypoint`` as a whole. In a file the entry point
is written as it would be typed: ``train.py --lr 0.1``, ``-m pkg.train``, ``python train.py``,
``python -m pkg.train``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from elaunch.config.flags import values
from elaunch.config.flags.answers import Answers
from elaunch.config.flags.given import Entrypoint
from elaunch.errors import UsageError

Mode = Literal["script", "module", "command", "run-path"]
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


@dataclass(frozen=True)
class Command:
    """One command; ``interpreter`` is a path that the job file names, or None."""

    entrypoint: str
    args: tuple[str, ...]
    mode: Mode
    where: str = ""
    interpreter: str | None = None

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


def _without_python(words: list[str]) -> tuple[list[str], str | None]:
    """Return the words without a leading ``python -u``, and the interpreter if it is a special one.

    ``python`` and ``python3`` mean elaunch's own, a path or ``python3.12`` exactly that.
    """
    if not _PYTHON.fullmatch(PurePath(words[0]).name):
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
