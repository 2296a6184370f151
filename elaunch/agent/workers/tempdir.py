"""A directory for temporary files of its own for each run, so that two jobs of a host never clash.

Many scripts write ``tempfile.gettempdir() + "/model.checkpoint"``, as PyTorch's DDP tutorial does:
in the shared ``/tmp`` two such jobs load each other's weights. With ``--tmp private`` (the default)
the workers' TMPDIR is a new directory, the same in all rounds. A TMPDIR, TEMP or TMP that is set is
a decision (schedulers make it, per job): nothing is changed. The TMPDIR that another elaunch has
made for its workers is no decision: a job that a worker starts gets a directory of its own in it.

At the end the directory goes, with what is empty or a socket in it. Files that the workers left are
kept and pointed out. The next run does that for an agent that was killed with its server, and
removes what a killed ``elaunch.run()``, or a killed save to a URL, has left
(:func:`remove_abandoned`): the directory's name says whose it is.

TorchInductor's cache is meant to outlive a job, and stays where it is without elaunch. A variable
names it, and a link in the run's directory leads to it: TorchInductor looks for its precompiled
headers (150 MB, seconds to make) below TMPDIR whatever the variable is. What lies in that cache is
executed; where another user owns it or may write to it, the job's is in its own directory.

TorchInductor writes libraries in place, and takes for compiled what has its name. So one whose
compiler was killed would end every later process that wants it: :func:`remove_torn`.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from elaunch import env, proc

NAMES = ("TMPDIR", "TEMP", "TMP")
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
TORCHS_STACKS: Final = "torch-dump_traceback"
"""How the file begins into which torch writes the stacks that it is asked for, and which it leaves
where the worker ends meanwhile."""
LOCKS: Final = "locks"
"""Where TorchInductor has its locks, below each directory of a cache."""
_ELF: Final = struct.Struct("<4sBB34xQ10xHH2x")  # magic, 64 bits, order, then section headers


class RunTemp:
    """Owns the run's directory for temporary files; ``variables`` go into the environment."""

    def __init__(self, choice: str, environ: Mapping[str, str]) -> None:
        self.path: str | None = None
        self._link: str | None = None
        self.variables: dict[str, str] = {}
        if choice == "shared" or any(_is_decision(environ.get(name, "")) for name in NAMES):
            return
        shared = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix=proc.own_prefix())
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
        remove_abandoned(self.path)
        _clear(self.path)
        return self.path if os.path.isdir(self.path) else None


def remove_abandoned(place: str | None = None) -> None:
    """Clear this user's directories in ``place``, or where it has them, whose processes are gone.

    A run's is cleared as ``close`` would.
    """
    user, link = os.getuid(), f"{env.CACHE_PREFIX}{_user()}"
    named = re.compile(rf"{re.escape(env.TEMP_PREFIX)}(\d+\.(\d+)\.\d+)-")
    with contextlib.suppress(OSError), os.scandir(place or tempfile.gettempdir()) as found:
        for one in found:
            made = named.match(one.name)
            if made is None or made[1].partition(".")[0] != proc.namespace_number():
                continue  # what another container has made may be in use there
            is_ours = one.is_dir(follow_symlinks=False) and (
                one.stat(follow_symlinks=False).st_uid == user
            )
            if not is_ours or proc.mark(int(made[2])) == made[1]:
                continue
            if one.name.startswith(env.SCRATCH, made.end()):
                shutil.rmtree(one.path, ignore_errors=True)
                continue
            remove_abandoned(one.path)
            _remove_link(os.path.join(one.path, link))
            _clear(one.path)


def _clear(path: str) -> None:
    """Remove a directory with what is empty or a socket in it; links are not followed."""
    for directory, _, names in os.walk(path, topdown=False):
        for name in names:
            _remove_unless_file(os.path.join(directory, name))
        with contextlib.suppress(OSError):  # not empty: it holds what is to be kept
            os.rmdir(directory)


def compiler_caches(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return where workers with these variables have what TorchInductor compiles, and headers."""
    try:
        top = environ.get("TMPDIR") or tempfile.gettempdir()
    except FileNotFoundError:  # none can be written, in a read-only container
        top = "/tmp"
    default = Path(top, f"{env.CACHE_PREFIX}{_user()}")
    cache = Path(environ.get(INDUCTOR_CACHE) or default)
    return {"cache": cache, "headers": default / "precompiled_headers"}


def is_own(path: str | Path) -> bool:
    """Return whether this user alone may write there; False for what is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def remove_torn(caches: Mapping[str, Path], since: float = 0.0) -> list[Path]:
    """Remove from caches of this user's own what a killed compiler has left cut short; return it.

    Args:
        caches: from :func:`compiler_caches`.
        since: the time from which on files are looked at that were written.
    """
    removed = []
    for path in _compiled(caches):
        with contextlib.suppress(OSError):  # another process has removed it
            if path.stat().st_mtime >= since and _is_torn(path) and not is_written(path):
                path.unlink()
                removed.append(path)
    return removed


def is_written(path: Path) -> bool:
    """Return whether a process holds TorchInductor's lock on a file of the cache."""
    key = path.name.partition(".")[0]
    locks = {path.parent / LOCKS, path.parent.parent / LOCKS}
    for lock in (directory / f"{key}.lock" for directory in locks):
        try:
            with open(lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            return True
    return False


def _compiled(caches: Mapping[str, Path]) -> Iterator[Path]:
    for top in filter(is_own, set(caches.values())):
        for directory, _, names in os.walk(top):
            yield from (Path(directory, name) for name in names if name.endswith((".so", ".gch")))


def _is_torn(path: Path) -> bool:
    """Return whether a library lacks what its header names, or a header's compilation its end.

    Linkers write the header last; GCC replaces a first word, gpcWrite, when all else is written.
    """
    with open(path, "rb") as file:
        header = file.read(_ELF.size)
        size = os.fstat(file.fileno()).st_size
    if path.suffix == ".gch":
        return not header or header.startswith(b"gpcWrite")
    if len(header) < _ELF.size:
        return True
    magic, bits, order, sections, length, number = _ELF.unpack(header)
    if (bits, order) != (2, 1) and magic == b"\x7fELF":
        return False  # of another machine: nothing is known of it
    return bool(magic != b"\x7fELF" or sections + length * number > size)


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
        is_torchs = os.path.basename(path).startswith(TORCHS_STACKS)
        if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or is_torchs:
            os.unlink(path)


def _user() -> str:
    """Return the user's name as TorchInductor writes it into the name of its cache."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
