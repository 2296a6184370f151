"""A directory for temporary files of its own for each run, so that two jobs of a host never clash.

Many scripts write ``tempfile.gettempdir() + "/model.checkpoint"``, as PyTorch's DDP tutorial does:
in the shared ``/tmp`` two such jobs load each other's weights. With ``--tmp private`` (the default)
the workers' TMPDIR is a new directory, the same in all rounds. A TMPDIR, TEMP or TMP that is set is
a decision (schedulers make it, per job): nothing is changed. The TMPDIR that another elaunch has
made for its workers is no decision: a job that a worker starts gets a directory of its own in it.

At the end the directory goes, with what is empty or a socket in it. Files that the workers left are
kept and pointed out. Caches that are meant to outlive a job (TorchInductor's) stay where they were.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
from collections.abc import Mapping

from elaunch import env

NAMES = ("TMPDIR", "TEMP", "TMP")
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class RunTemp:
    """Owns the run's directory for temporary files; ``variables`` go into the environment."""

    def __init__(self, choice: str, environ: Mapping[str, str]) -> None:
        self.path: str | None = None
        self.variables: dict[str, str] = {}
        if choice == "shared" or any(_is_decision(environ.get(name, "")) for name in NAMES):
            return
        shared = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix=env.TEMP_PREFIX)
        self.variables = {"TMPDIR": self.path}
        if not environ.get(INDUCTOR_CACHE):
            self.variables[INDUCTOR_CACHE] = os.path.join(shared, f"torchinductor_{_user()}")

    def close(self) -> str | None:
        """Remove the directory; return its path if files are left in it, which keeps it."""
        if self.path is None:
            return None
        for directory, _, names in os.walk(self.path, topdown=False):
            for name in names:
                _remove_unless_file(os.path.join(directory, name))
            with contextlib.suppress(OSError):  # not empty: it holds what is to be kept
                os.rmdir(directory)
        return self.path if os.path.isdir(self.path) else None


def _is_decision(path: str) -> bool:
    return bool(path) and not os.path.basename(path).startswith(env.TEMP_PREFIX)


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
        name = str(os.getuid())
    return re.sub(r'[\\/:*?"<>|]', "_", name)
