"""The programs that tests call: those of ``scripts/programs.txt``, and no others.

A test session runs with a PATH of one directory, which has a link to each program of the list that
this machine has, and three for Python itself. A test that calls something else fails wherever it
runs, and not only on the machine that lacks it.

``make test`` passes ``--strict-machine``: scripts/setup-system.sh has run, so a test that lacks a
program fails. Without it, as in ``make check``, the test is skipped. A right that cannot be
installed, such as that to make namespaces, is a reason to skip everywhere but in CI.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from elaunch import proc

LIST = Path(__file__).parents[1] / "scripts" / "programs.txt"
STRICT = "ELAUNCH_TESTS_STRICT"
"""Set for the processes of a session in which no program may be missing."""

_PREFIX = "elaunch-tests-"
_EVERYWHERE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def listed() -> dict[str, str]:
    """Return each program's Debian package."""
    lines = LIST.read_text().splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {row[0]: row[1] for row in rows}


def make_directory(kind: str) -> Path:
    """Make a directory outside ``tmp_path``: its path is short, and others may be let in.

    The caller removes it, and the next session what one that was killed has left.
    """
    own = proc.process_name(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{own}-{kind}-"))


def remove_abandoned() -> None:
    """Remove the directories of test processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        made = path.name.removeprefix(_PREFIX).partition("-")[0]
        if proc.process_name(int(made.partition(".")[0])) != made:
            shutil.rmtree(path, ignore_errors=True)


def directory_of_links() -> Path:
    """Make the directory that is the PATH of a session; the caller removes it."""
    remove_abandoned()
    directory = make_directory("programs")
    search = os.environ.get("PATH", "") + ":" + _EVERYWHERE
    for program in listed():
        found = shutil.which(program, path=search)
        if found is not None:
            (directory / program).symlink_to(os.path.realpath(found))
    # A link would not find its virtual environment.
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (directory / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (directory / name).chmod(0o755)
    return directory


def needed(*programs: str) -> None:
    """End the test where a program is missing: skipped, or failed under ``make test``."""
    packages = listed()
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        names = ", ".join(f"{program} ({packages[program]})" for program in missing)
        why = f"not installed: {names}: scripts/setup-system.sh --trials installs them"
        (pytest.fail if os.environ.get(STRICT) else pytest.skip)(why)


def allowed(problem: str | None) -> None:
    """End the test where ``problem`` says that this user or kernel lacks a right; see above."""
    if problem:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(problem)
