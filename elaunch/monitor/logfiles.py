"""The files that workers' output is kept in, as a reader of a run finds and follows them.

``<log directory>/attempt_<round>/<local rank>/stdout.log`` (docs/logs.md); which rank a local rank
was is in the run's record. A detached agent's own output is in ``console.log``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from elaunch.errors import RunDirError, UsageError
from elaunch.runs.directory import CONSOLE, RunDir, is_live, run_id_of
from elaunch.runs.record import Record

PAUSE_S: Final = 0.2
CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class Choice:
    """What to show; None for all ranks, all rounds."""

    rank: int | None
    round: int | None
    streams: tuple[str, ...]

    @property
    def everything(self) -> bool:
        """Whether nothing was chosen."""
        return self.rank is None and self.round is None and len(self.streams) == 2


def directories(run: RunDir, choice: Choice) -> list[tuple[int, int, Path]]:
    """Return (rank, round, directory) for all that was chosen and is there.

    Raises UsageError for a rank or a round that is not there, and where no files are kept.
    """
    name, record = run_id_of(run), run.read_state()
    if record["log_dir"] is None:
        why = "no agent kept its output" if "launcher" in record else "--log-dir /dev/null"
        raise UsageError(f"RUN {name} has no log files: {why}")
    first = _first_rank(record)
    places = sorted(_places(Path(record["log_dir"])))
    found = [
        (first + local_rank, number, path)
        for number, local_rank, path in places
        if choice.rank in (None, first + local_rank) and choice.round in (None, number)
    ]
    if found:
        return found
    ranks = sorted({first + place[1] for place in places})
    if ranks and choice.rank is not None and choice.rank not in ranks:
        here = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} are"
        raise UsageError(f"--rank {choice.rank} of run {name} is not on this node; {here}")
    if choice.round is not None and places:
        rounds = sorted({place[0] for place in places})
        raise UsageError(
            f"--round {choice.round}: run {name} has rounds {rounds[0]} to {rounds[-1]}"
        )
    return []


def _places(root: Path) -> Iterator[tuple[int, int, Path]]:
    for path in root.glob("attempt_*/*"):
        number = re.fullmatch(r"attempt_(\d+)", path.parent.name)
        if number and path.name.isdecimal() and path.is_dir():
            yield int(number[1]), int(path.name), path


def _first_rank(record: Record) -> int:
    """Return the rank of this node's first worker, in the round that ran last."""
    workers = record["workers"]
    return workers[0]["rank"] - workers[0]["local_rank"] if workers else 0


@dataclass
class _FollowedFile:
    """A file that is read as far as it goes; ``prefix`` stands before each of its lines."""

    path: Path
    out: BinaryIO
    prefix: bytes
    at: int = 0
    held: bytearray = field(default_factory=bytearray)

    def copy(self) -> None:
        """Show what is new."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                while chunk := file.read(CHUNK):
                    self.at += len(chunk)
                    self._show(chunk)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunDirError(f"cannot read {self.path}: {error.strerror}") from error

    def end(self) -> None:
        """Show a last line that has no end."""
        if self.held:
            self._show(b"\n")

    def _show(self, chunk: bytes) -> None:
        if not self.prefix:
            self.out.write(chunk)
            return
        self.held += chunk
        *lines, rest = bytes(self.held).split(b"\n")
        self.held = bytearray(rest)
        self.out.write(b"".join(self.prefix + line + b"\n" for line in lines))


class Reader:
    """Shows the output of a run on two streams."""

    def __init__(self, run: RunDir, choice: Choice, stdout: BinaryIO, stderr: BinaryIO) -> None:
        self._run = run
        self._choice = choice
        self._out = {"stdout": stdout, "stderr": stderr}
        self._files: dict[tuple[Path, str], _FollowedFile] = {}
        self._console = choice.everything and (run.path / CONSOLE).exists()

    def run(self, follow: bool) -> None:
        """Show what is there; with ``follow`` also what comes, until the run has ended."""
        while True:
            # Asked first: what a run that has ended wrote is there.
            live = follow and is_live(self._run)
            for file in self._known():
                file.copy()
                if not live:
                    file.end()
            for stream in self._out.values():
                stream.flush()
            if not live:
                return
            threading.Event().wait(PAUSE_S)

    def _known(self) -> list[_FollowedFile]:
        if self._console:
            self._note(self._run.path / CONSOLE, "stdout", b"")
            return list(self._files.values())
        for rank, _, directory in directories(self._run, self._choice):
            prefix = b"" if self._choice.rank is not None else f"[rank {rank}]: ".encode()
            for stream in self._choice.streams:
                self._note(directory / f"{stream}.log", stream, prefix)
        return list(self._files.values())

    def _note(self, path: Path, stream: str, prefix: bytes) -> None:
        self._files.setdefault((path, stream), _FollowedFile(path, self._out[stream], prefix))
