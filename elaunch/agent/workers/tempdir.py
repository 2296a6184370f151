"""A directory for temporary files of its own for each run, so that two jobs of a host never clash.

Many scripts write ``tempfile.gettempdir() + "/model.checkpoint"``, as PyTorch's DDP tutorial does:
in the shared ``/tmp`` two such jobs load each other's weights. With ``--tmp private`` (the default)
the workers' TMPDIR is a new directory, the same in all rounds. A TMPDIR, TEMP or TMP that is set is
a decision (schedulers make it, per job): nothing is changed. The TMPDIR that another elaunch has
made for its workers is no decision: a job that a worker starts gets a directory of its own in it.

At the end the directory goes, with what is empty or a socket in it. Files that the workers left are
kept and pointed out.

TorchInductor's cache is meant to outlive a job, and stays where it is without elaunch. A variable
names it, and a link in the run's directory leads to it: TorchInductor looks for its precompiled
headers (150 MB, seconds to make) below TMPDIR whatever the variable is. What lies in that cache is
executed; where another user owns it or may write to it, the job's is in its own directory.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from elaunch import env

NAMES = ("TMPDIR", "TEMP", "TMP")
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class RunTemp:
    """Owns the run's directory for temporary files; ``variables`` go into the environment."""

    def __init__(self, choice: str, environ: Mapping[str, str]) -> None:
        self.path: str | None = None
        self._link: str | None = None
        self.variables: dict[str, str] = {}
        if choice == "shared" or any(_is_decision(environ.get(name, "")) for name in NAMES):
            return
        shared = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix=env.TEMP_PREFIX)
        self.variables = {"TMPDIR": self.path}
        cache = _own_cache(os.path.join(shared, f"{env.CACHE_PREFIX}{_user()}"))
        if cache is None:
            return
        self._link = os.path.join(self.path, os.path.basename(cache))
        os.symlink(cache, self._link)
        if not environ.get(INDUCTOR_CACHE):
            self.variables[INDUCTOR_CACHE] = cache

    def close(self) -> str | None:
        """Remove the directory; return its path if files are left in it, which keeps it."""
        if self.path is None:
            return None
        if self._link is not None:
            _remove_link(self._link)
        for directory, _, names in os.walk(self.path, topdown=False):
            for name in names:
                _remove_unless_file(os.path.join(directory, name))
            with contextlib.suppress(OSError):  # not empty: it holds what is to be kept
                os.rmdir(directory)
        return self.path if os.path.isdir(self.path) else None


def compiler_caches(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return where workers with these variables have what TorchInductor compiles, and headers."""
    default = Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"{env.CACHE_PREFIX}{_user()}")
    cache = Path(environ.get(INDUCTOR_CACHE) or default)
    return {"cache": cache, "headers": default / "precompiled_headers"}


def is_own(path: str | Path) -> bool:
    """Return whether this user alone may write there; False for what is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_decision(path: str) -> bool:
    return bool(path) and not os.path.basename(path).startswith(env.TEMP_PREFIX)


def _own_cache(path: str) -> str | None:
    """Return where the directory is that only this user writes to, made if need be; or None."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if os.lstat(path).st_uid != os.getuid():  # also of a link: its owner may change it
            return None
    except OSError:
        return None
    real = os.path.realpath(path)
    return real if os.path.isdir(real) and is_own(real) else None


def _remove_link(path: str) -> None:
    with contextlib.suppress(OSError):  # the script has put something else there
        if os.path.islink(path):
            os.unlink(path)


def _remove_unless_file(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
            os.unlink(path)


def _user() -> str:
    """Return the user's name as TorchInductor writes it into the name of its cache."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
