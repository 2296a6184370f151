"""The log files of a run on one node: their names, and when their bytes came.

Below the log directory (docs/logs.md):

====================================  ==========================================================
attempt_<round>/<local rank>/stdout.log    exactly the bytes that the worker wrote
                            /stderr.log
attempt_<round>/arrivals              lines ``<seconds since the epoch> <rank> <local rank>
                                      <stream> <size>``: what that file got behind so many bytes
                                      came then, or up to RESOLUTION_S later
====================================  ==========================================================

The agent notes an arrival before it writes the bytes, so a reader that first looks at a file's size
and then reads the arrivals knows the time of each byte. Files without arrivals (of an agent that
noted none, of a full disk) have the time of their last change.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from elaunch.files import open_regular

RESOLUTION_S: Final = 0.1
"""Of one file's bytes no more than one arrival is noted in so many seconds."""
ARRIVALS: Final = "arrivals"
STREAMS: Final = ("stdout", "stderr")
_NAME: Final = re.compile(
    r"attempt_(?P<round>\d{1,9})/(?:(?P<local>\d{1,9})/(?P<stream>stdout|stderr)\.log|arrivals)",
    re.ASCII,
)
_LINE: Final = re.compile(rb"(\d{1,12}\.\d{1,9}) (\d{1,9}) (\d{1,9}) (stdout|stderr) (\d{1,18})")


class LogName(NamedTuple):
    """A worker's log file."""

    round: int
    local_rank: int
    stream: str

    def __str__(self) -> str:
        return f"attempt_{self.round}/{self.local_rank}/{self.stream}.log"


class Arrival(NamedTuple):
    """From ``size`` on the bytes of a file came ``at`` that time, in seconds since the epoch."""

    at: float
    rank: int
    local_rank: int
    stream: str
    size: int

    def line(self) -> bytes:
        """Return it as it stands in the file."""
        return (f"{self.at:.3f} {self.rank} {self.local_rank} {self.stream} {self.size}\n").encode()


class LogTree:
    """The log files below ``root``, as a reader finds them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self) -> dict[str, tuple[int, float]]:
        """Return size and time of the last change of each log file; raises OSError."""
        return dict(self._found())

    def read(self, name: str, at: int, most: int) -> bytes:
        """Return up to ``most`` bytes of a file from ``at`` on; raises OSError."""
        if _NAME.fullmatch(name) is None:
            raise FileNotFoundError(f"{name!r} is no log file")
        with open_regular(self.root / name, os.O_NOFOLLOW) as file:
            return os.pread(file.fileno(), most, at)

    def _found(self) -> Iterator[tuple[str, tuple[int, float]]]:
        for number in _entries(self.root):
            for place in _entries(number):
                name = f"{number.name}/{place.name}"
                if place.name == ARRIVALS:
                    yield from _seen(name, place)
                else:
                    files = ((f"{name}/{path.name}", path) for path in _entries(place))
                    yield from (one for file in files for one in _seen(*file))


def _seen(name: str, path: os.DirEntry[str]) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield name, size and time of a log file; nothing where it is none, or is gone."""
    with contextlib.suppress(FileNotFoundError):
        if _NAME.fullmatch(name):
            seen = path.stat()
            yield name, (seen.st_size, seen.st_mtime)


def _entries(place: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return what is in a directory; nothing where it is none, or is gone."""
    try:
        with os.scandir(place) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def parse_name(name: str) -> LogName | None:
    """Return which worker's log file a name is; None for another one."""
    found = _NAME.fullmatch(name)
    if found is None or found["stream"] is None:
        return None
    return LogName(int(found["round"]), int(found["local"]), found["stream"])


def parse_arrivals(data: bytes) -> tuple[list[Arrival], int]:
    """Return the arrivals in whole lines, and how many bytes these have; others are left out."""
    end = data.rfind(b"\n") + 1
    found = []
    for line in data[:end].split(b"\n"):
        if match := _LINE.fullmatch(line):
            at, rank, local_rank, stream, size = (part.decode() for part in match.groups())
            found.append(Arrival(float(at), int(rank), int(local_rank), stream, int(size)))
    return found, end
