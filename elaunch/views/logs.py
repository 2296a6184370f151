"""The workers' output, as a reader of a run finds, merges and follows it (docs/logs.md).

Each node of the run is a tree of files (``elaunch.runs.logtree``): this node's own, or that of a
run directory on a home that the nodes share; where there is none, its agent reads them, while the
run lives. What several files hold is shown in the order in which it came; a detached agent's own
output is in ``console.log``.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from elaunch import text
from elaunch.errors import ElaunchError, RunDirError, UsageError
from elaunch.runs.directory import CONSOLE, RunDir, is_live, records, run_id_of
from elaunch.runs.identity import condition
from elaunch.runs.logtree import ARRIVALS, STREAMS, LogName, LogTree, parse_arrivals, parse_name
from elaunch.runs.record import FINAL_STATES, Record
from elaunch.views.agents import RemoteTree
from elaunch.views.watch import require_reader

if TYPE_CHECKING:
    from elaunch.views.store import JobStore

PAUSE_S: Final = 0.2
MOST_RANKS: Final = 1_000_000
CHUNK: Final = 1 << 20
AGAIN_S: Final = 10.0
"""Seconds until a node that did not answer is asked again."""
AHEAD: Final = 1 << 16
"""Bytes of a file that are read at once where several files are merged."""
LONGEST: Final = 16 << 20
"""Bytes of a line that are held until it is whole; of a longer one so many are a line."""


@dataclass(frozen=True)
class Choice:
    """The lines to show; None for all. ``node`` is a node rank or a host; ``since`` is in seconds
    since the epoch."""

    ranks: frozenset[int] | None = None
    round: int | None = None
    streams: tuple[str, ...] = STREAMS
    node: str | None = None
    since: float | None = None
    grep: re.Pattern[bytes] | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing was chosen."""
        return self == Choice()

    def takes(self, file: FollowedLog) -> bool:
        """Return whether the lines of a file are among them."""
        return (
            file.node.is_meant(self.node)
            and (self.ranks is None or file.rank in self.ranks)
            and self.round in (None, file.name.round)
            and file.name.stream in self.streams
        )

    @property
    def exact(self) -> bool:
        """Whether the bytes of one rank are wanted, as they are."""
        return self.ranks is not None and len(self.ranks) == 1


@dataclass(frozen=True)
class LogNode:
    """The log files of one node; its first worker has ``first_rank`` where a file has no arrivals.

    ``tree`` has them here, or as its agent reads them. ``place`` names its log directory in
    messages; ``here``: it can be read without its agent.
    """

    rank: int
    host: str
    tree: LogTree | RemoteTree
    place: str
    first_rank: int
    here: bool = True

    def is_meant(self, chosen: str | None) -> bool:
        """Return whether ``--node`` means it."""
        return chosen in (None, str(self.rank), self.host, self.host.partition(".")[0])


def nodes_of(run: RunDir, chosen: str | None, environ: Mapping[str, str]) -> list[LogNode]:
    """Return the nodes of a run whose logs are to be shown, by their ranks.

    Raises UsageError where no files are kept or left, or no node of the run is the chosen one.
    """
    own = run.read_state()
    name = own["run_id"]
    if own["log_dir"] is None:
        why = "no agent kept its output" if "launcher" in own else "--log-dir /dev/null"
        raise UsageError(f"RUN {name} has no log files: {why}")
    both = [(run, own), *_siblings(run, own, environ)]
    found = [_node(of, record) for of, record in both if record["log_dir"]]
    over = own["state"] in FINAL_STATES or not is_live(run)
    if over and not any(os.path.isdir(node.place) for node in found):
        where = f"{own['log_dir']} is not there; it was on {own['agent']['host']}"
        raise UsageError(f"RUN {name} has no log files here: {where}")
    found = sorted([*found, *_elsewhere(run, own, found)], key=lambda node: node.rank)
    return _meant(found, chosen, f"run {name} has logs here of node")


def nodes_of_job(job: JobStore, chosen: str | None) -> list[LogNode]:
    """Return the nodes of a job in a store, whose agents read their files."""
    found, first = [], 0
    for rank, node in enumerate(job.nodes):
        place = f"the logs of node {rank} {node.host}"
        tree = RemoteTree(job, rank)
        found.append(LogNode(rank, node.host, tree, place, first, here=False))
        first += node.slots
    if not found:
        raise UsageError(f"job {job.name} has no logs yet: its nodes have not met")
    return _meant(found, chosen, f"job {job.name} has node")


def _meant(found: list[LogNode], chosen: str | None, has: str) -> list[LogNode]:
    meant = [node for node in found if node.is_meant(chosen)]
    if not meant:
        known = text.listed([f"{node.rank} ({node.host})" for node in found])
        raise UsageError(f"--node {chosen}: {has} {known}")
    return meant


def _node(run: RunDir, record: Record) -> LogNode:
    place = str(record["log_dir"])
    if not os.path.isdir(place) and run.logs.is_dir():
        place = str(run.logs)  # the run directory was moved, or is another machine's
    rank = record.get("node_rank") or 0
    workers = record["workers"]
    first = workers[0]["rank"] - workers[0]["local_rank"] if workers else 0
    return LogNode(rank, record["agent"]["host"], LogTree(Path(place)), place, first)


def _siblings(
    run: RunDir, own: Record, environ: Mapping[str, str]
) -> Iterator[tuple[RunDir, Record]]:
    """Yield the runs of the same job's other agents, where the nodes share a home."""
    names = {node["name"] for node in own.get("nodes", ())}
    if len(names) < 2:
        return
    for other, record in records(environ):
        if record is None or record["run_id"] != own["run_id"] or other.path == run.path:
            continue
        nodes = record.get("nodes", [])
        if record.get("node_rank") is not None and any(node["name"] in names for node in nodes):
            yield other, record


def _elsewhere(run: RunDir, own: Record, known: Sequence[LogNode]) -> list[LogNode]:
    """Return the nodes of a live run whose files only their agents can read."""
    if condition(own["agent"]) != "alive" or own.get("node_rank") is None:
        return []
    rows, ranks = own.get("nodes", []), {node.rank for node in known}
    found, first = [], 0
    for rank in range(max(len(rows), own.get("node_count", 0))):
        row = rows[rank] if rank < len(rows) else None
        host = row["host"] if row else ""
        if rank not in ranks:
            place = f"the logs of node {rank} {host}".rstrip()
            found.append(LogNode(rank, host, RemoteTree(run, rank), place, first, here=False))
        first += row["slots"] if row else 0
    return found


def _left_out(run: RunDir | JobStore, known: Sequence[LogNode]) -> str:
    """Return which nodes' logs cannot be had here, since no agent is there to ask, or ""."""
    if not isinstance(run, RunDir):
        return ""
    own, ranks = run.read_state(), {node.rank for node in known}
    if condition(own["agent"]) == "alive" or own.get("node_rank") is None:
        return ""
    rows = enumerate(own.get("nodes", []))
    away = [f"{rank} ({row['host']})" for rank, row in rows if rank not in ranks]
    if not away:
        return ""
    return f"the logs of {text.count(len(away), 'node')} are not here: {text.listed(away)}"


def parse_ranks(flag: str, raw: str) -> frozenset[int]:
    """Return the ranks of ``3,7-9``; raises UsageError."""
    ranks: set[int] = set()
    for part in raw.split(","):
        span = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part, re.ASCII)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if first > last or last >= MOST_RANKS:
            raise UsageError(f"{flag} {raw}: {part!r} is no rank; give numbers and spans, as 3,7-9")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def directories(
    run: RunDir, nodes: Sequence[LogNode], choice: Choice
) -> list[tuple[int, int, str]]:
    """Return (rank, round, directory) for all that was chosen and is there.

    Raises UsageError for a rank or a round that is not there.
    """
    reader = Reader(run, nodes, choice)
    reader.look()
    return sorted(
        {
            (one.rank, one.name.round, f"{one.node.place}/{os.path.dirname(str(one.name))}")
            for one in reader.chosen()
        }
    )


@dataclass(eq=False)
class FollowedLog:
    """A file that is read as far as it goes; ``prefix`` stands before each of its lines."""

    node: LogNode
    name: LogName
    rank: int
    changed: float = 0.0
    size: int = 0
    at: int = 0
    offsets: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    ahead: bytes = b""
    held: list[bytes] = field(default_factory=list)
    holds: int = 0

    def grown(self, size: int, changed: float) -> None:
        """Note how large the file is; one that was cut goes on at its new end."""
        self.size, self.changed = size, changed
        if self.at > size:
            self.at, self.ahead = size, b""

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that end with ``data``; what is not whole is held."""
        self.held.append(data)
        self.holds += len(data)
        if b"\n" not in data and self.holds < LONGEST:
            return []
        *lines, rest = b"".join(self.held).split(b"\n")
        if len(rest) >= LONGEST:
            lines, rest = [*lines, rest], b""
        self.held, self.holds = [rest] * bool(rest), len(rest)
        return lines

    def fresh(self, since: float | None) -> Iterator[tuple[float, int]]:
        """Yield (time, end) for each part that has not been read, as its bytes came."""
        start, at = self.at, bisect_left(self.offsets, self.at + 1)
        while start < self.size:
            end = min(self.size, self.offsets[at] if at < len(self.offsets) else self.size)
            came = self.times[at - 1] if at else self.changed
            if since is not None and came < since:
                self.at = end
            elif end > start:
                yield came, end
            start, at = end, at + 1

    def take(self, end: int) -> Iterator[bytes]:
        """Read on to ``end``, or to where the file ends by now; raises RunDirError."""
        while self.at < end:
            if not self.ahead:
                most = min(self.size - self.at, CHUNK if end - self.at > AHEAD else AHEAD)
                try:
                    self.ahead = self.node.tree.read(str(self.name), self.at, most)
                except OSError as error:
                    place = f"{self.node.place}/{self.name}"
                    raise RunDirError(f"cannot read {place}: {error.strerror or error}") from error
            data, self.ahead = self.ahead[: end - self.at], self.ahead[end - self.at :]
            if not data:
                self.at = end
                return
            self.at += len(data)
            yield data


class Reader:
    """Shows the output of some nodes of a run on two streams.

    ``warn`` takes a sentence for each other node that cannot be read, and one for those whose
    logs are not here; the rest is shown.
    """

    def __init__(
        self,
        run: RunDir | JobStore,
        nodes: Sequence[LogNode],
        choice: Choice,
        warn: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._run = run
        self._nodes = nodes
        self._choice = choice
        self._files: dict[tuple[int, LogName], FollowedLog] = {}
        self._warn = warn
        self._again: dict[int, float] = {}
        self._noted: dict[tuple[int, str], int] = {}

    @property
    def _name(self) -> str:
        return run_id_of(self._run) if isinstance(self._run, RunDir) else self._run.name

    def run(self, follow: bool, stdout: BinaryIO, stderr: BinaryIO) -> None:
        """Show what is there; with ``follow`` also what comes, until the run has ended."""
        out = {"stdout": stdout, "stderr": stderr}
        while True:
            # Asked first: what a run that has ended wrote is there.
            run = self._run
            live = follow and (is_live(run) if isinstance(run, RunDir) else run.live)
            self.look()
            self._show(out)
            if not live:
                self._end(out)
                if self._choice.node is None and (away := _left_out(self._run, self._nodes)):
                    self._warn(away)
            for stream in out.values():
                stream.flush()
            if not live:
                return
            require_reader()
            time.sleep(PAUSE_S)

    def look(self) -> None:
        """See how far the files are; raises RunDirError where a node's cannot be read."""
        for index, node in enumerate(self._nodes):
            if self._is_left_alone(node):
                continue
            try:
                self._see(index, node)
            except OSError as error:
                why = f"cannot read {node.place}: {error.strerror or error}"
                self._pass_over(node, RunDirError(why))
            except UsageError as error:
                self._pass_over(node, error)

    def _pass_over(self, node: LogNode, error: ElaunchError) -> None:
        """Go on without a node for a while, if it is another one that does not answer."""
        if node.here:
            raise error
        if node.rank not in self._again:
            self._warn(str(error))
        self._again[node.rank] = time.monotonic() + AGAIN_S

    def _is_left_alone(self, node: LogNode) -> bool:
        return time.monotonic() < self._again.get(node.rank, 0.0)

    def _see(self, index: int, node: LogNode) -> None:
        found = node.tree.files()
        for name, (size, changed) in found.items():
            if (known := parse_name(name)) is not None:
                if (index, known) not in self._files:
                    rank = node.first_rank + known.local_rank
                    self._files[index, known] = FollowedLog(node, known, rank)
                self._files[index, known].grown(size, changed)
        for name in found:
            if name.endswith(ARRIVALS):
                self._note(index, node, name)

    def chosen(self) -> list[FollowedLog]:
        """Return the files that are to be shown; UsageError if a rank or a round is not there."""
        files, wanted = list(self._files.values()), self._choice
        ranks = {file.rank for file in files}
        missing = (wanted.ranks or frozenset()) - ranks
        if ranks and missing:
            low, high = min(ranks), max(ranks)
            here = f"rank {low} is" if len(ranks) == 1 else f"ranks {low} to {high} are"
            where = "on this node" if len(self._nodes) == 1 else "there"
            raise UsageError(f"--rank {min(missing)} of run {self._name} is not {where}; {here}")
        rounds = {file.name.round for file in files}
        if rounds and wanted.round not in {None, *rounds}:
            low, high = min(rounds), max(rounds)
            there = f"round {low} only" if low == high else f"rounds {low} to {high}"
            raise UsageError(f"--round {wanted.round}: run {self._name} has {there}")
        return list(filter(wanted.takes, files))

    def _note(self, index: int, node: LogNode, name: str) -> None:
        """Read what has been added to the arrivals of a round."""
        number = int(name.split("/")[0].removeprefix("attempt_"))
        while True:
            at = self._noted.get((index, name), 0)
            data = node.tree.read(name, at, CHUNK)
            arrivals, used = parse_arrivals(data)
            self._noted[index, name] = at + used
            for one in arrivals:
                file = self._files.get((index, LogName(number, one.local_rank, one.stream)))
                # A clock that was set back, or a file that was cut, sorts nothing anew.
                if file is not None and one.size >= (file.offsets[-1] if file.offsets else 0):
                    file.rank = one.rank
                    file.times.append(max(one.at, file.times[-1] if file.times else 0.0))
                    file.offsets.append(one.size)
            if not used:
                return

    def _show(self, out: Mapping[str, BinaryIO]) -> None:
        parts = [
            (came, file.name.round, file.rank, file.name.stream, end, file)
            for file in self.chosen()
            for came, end in file.fresh(self._choice.since)
        ]
        for *_, end, file in sorted(parts, key=lambda part: part[:-1]):
            if self._is_left_alone(file.node):
                continue
            try:
                for data in file.take(end):
                    self._write(file, data, out[file.name.stream])
            except (RunDirError, UsageError) as error:
                self._pass_over(file.node, error)

    def _end(self, out: Mapping[str, BinaryIO]) -> None:
        """Show last lines that have no end."""
        for file in self._files.values():
            if file.held:
                self._write(file, b"\n", out[file.name.stream])

    def _write(self, file: FollowedLog, data: bytes, out: BinaryIO) -> None:
        grep, exact = self._choice.grep, self._choice.exact
        if exact and grep is None:
            out.write(data)
            return
        lines = file.lines(data)
        prefix, torchs = b"[rank %d]: " % file.rank, b"[rank%d]:" % file.rank
        shown = [line for line in lines if grep is None or grep.search(line)]
        if not exact:  # torch puts its own before each line of an exception
            shown = [line.removeprefix(torchs + b" ").removeprefix(torchs) for line in shown]
            shown = [prefix + line for line in shown]
        out.write(b"".join(line + b"\n" for line in shown))


def follow_console(run: RunDir, follow: bool, out: BinaryIO) -> bool:
    """Show what a detached agent has shown, as :meth:`Reader.run` does; False if there is none."""
    path = run.path / CONSOLE
    if not path.exists():
        return False
    at = 0
    while True:
        live = follow and is_live(run)
        try:
            data = _rest(path, at)
        except OSError as error:
            raise RunDirError(f"cannot read {path}: {error.strerror}") from error
        at += len(data)
        out.write(data)
        out.flush()
        if not live:
            return True
        require_reader()
        time.sleep(PAUSE_S)


def _rest(path: Path, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return file.read()
