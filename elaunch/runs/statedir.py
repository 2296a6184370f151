"""Where a user's state is kept on disk, and how files in it are made, closed to other users.

``$XDG_STATE_HOME/elaunch/runs``, by default ``~/.local/state/elaunch/runs``. Where the user has no
home or it cannot be written: ``elaunch-<uid>/runs`` in the directory for temporary files. Others
may write there too, so that place is used only while it is a real directory of this user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from elaunch import env
from elaunch.files import open_regular
from elaunch.text import size

TRASH_PREFIX: Final = ".trash-"
CLOSE: Final = 24
"""Names that are tried one after the other: more than a user's kept runs of one id."""

# A name in a file system is at most 255 bytes; this leaves room for a suffix.
MAX_NAME: Final = 128
MAX_FILE: Final = 64 << 20
"""Bytes of a file that is read whole; a record of 2,000 ranks has one hundredth of that."""


def state_root(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of all runs after the XDG rules; None when the user has no home."""
    base = environ.get(env.STATE_HOME, "")
    # The specification says that a relative path is to be ignored.
    if not os.path.isabs(base):
        home = environ.get("HOME", "") or _home_by_uid()
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, ".local", "state")
    return Path(base, "elaunch", "runs")


def fallback_root() -> Path:
    """Return the directory of all runs where there is no state directory.

    Raises OSError where no directory for temporary files can be written.
    """
    import tempfile

    return Path(tempfile.gettempdir(), f"elaunch-{os.geteuid()}", "runs")


def roots(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories in which this user's runs may be; they need not exist."""
    root = state_root(environ)
    if root is not None:
        yield root
    with contextlib.suppress(OSError):
        fallback = fallback_root()
        require_own(fallback.parent)
        yield fallback


def make_private(path: Path) -> None:
    """Make ``path`` and its missing parents, each readable by the user only (the XDG rule)."""
    if path.is_dir():
        return
    make_private(path.parent)
    with contextlib.suppress(FileExistsError):
        _mkdir(path)


def require_own(path: Path) -> None:
    """Raise OSError unless ``path`` is a directory of this user; close it to all others."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PermissionError(1, f"{path} is not a directory of this user")
    if info.st_mode & 0o077:
        path.chmod(0o700)


def claim(root: Path, name: str) -> Path:
    """Make a directory that did not exist: ``root/name``, else ``name.2``, ``name.3`` and so on.

    Thousands of agents may share the root. After CLOSE names one that finds its name taken goes on
    by ever larger numbers drawn at random, so that each of N makes about log N tries and not N.
    """
    number = tries = 1
    while True:
        path = root / (name if number == 1 else f"{name}.{number}")
        try:
            _mkdir(path)
        except FileExistsError:
            number += 1 if tries < CLOSE else 1 + draw() % (1 << min(tries - CLOSE, 40))
            tries += 1
            continue
        return path


def draw() -> int:
    """Return a random number below 2**64."""
    return int.from_bytes(os.urandom(8), "big")


def file_name(text: str) -> str:
    """Return ``text`` as a file name: no separator, not hidden, of bounded length."""
    raw = text.encode("utf-8", "surrogatepass")
    name = re.sub(rb"[^A-Za-z0-9_.=@+-]", lambda odd: b"%%%02X" % odd[0][0], raw).decode()
    if name.startswith((".", "-")):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > MAX_NAME:
        import zlib

        name = f"{name[: MAX_NAME - 9]}-{zlib.crc32(raw):08x}"
    return name or "%"


def read_file(path: Path) -> bytes:
    """Return what a file has; raise OSError where it is no regular file, or far too long."""
    with open_regular(path, os.O_NOFOLLOW) as file:
        length = os.fstat(file.fileno()).st_size
        if length > MAX_FILE:
            raise OSError(errno.EFBIG, f"it has {size(length)}")
        return file.read(MAX_FILE)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file in one step; raise OSError when that fails, the old file stays.

    Only one thread may replace a file at a time. Nothing is synced: the file survives any death of
    the process, and waiting for the disk would be part of every restart.
    """
    draft = path.with_name(f".{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that several processes share, in a file of its own; blocks until it is free.

    It goes with the process that holds it. Raises OSError where there can be no such file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def subdirectories(root: Path) -> list[Path]:
    """Return the directories in ``root``, no links; none where it cannot be read."""
    try:
        with os.scandir(root) as entries:
            return [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def disk_bytes(root: Path) -> int:
    """Return the disk space in bytes that the files below ``root`` take."""
    total = 0
    for directory, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def delete(path: Path) -> bool:
    """Delete a directory, first by name, so that no reader sees half of it; tell if it went."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{os.getpid()}")
    try:
        path.rename(trash)
    except OSError:
        return False
    _remove_tree(trash)
    return True


def empty_trash(root: Path) -> None:
    """Finish what a :func:`delete` that was killed left behind."""
    for path in subdirectories(root):
        if path.name.startswith(TRASH_PREFIX):
            _remove_tree(path)


def _mkdir(path: Path) -> None:
    path.mkdir(mode=0o700)
    # The umask may have taken even the user's own rights.
    path.chmod(0o700)


def _home_by_uid() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def _remove_tree(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
