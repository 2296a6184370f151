"""Run directories: where a run keeps its record, its socket, its logs and its failure reports.

``$XDG_STATE_HOME/elaunch/runs/<run id>/`` (by default ``~/.local/state``), closed to other users:

======================  ==========================================================================
.reserve                room on the disk for the last record, should the disk be full by then
state.json              the record (``elaunch.runs.record``), replaced atomically at each change
agent.sock              the agent's Unix socket while it lives (``elaunch.wire.control``)
logs/                   default place of the workers' logs
console.log             what the agent shows, with ``--detach``
failure-<round>.json    the failure report of a round for programs; those of the last 100 stay
failure-<round>.txt     the same for people
recorder-*              where the workers of a round answer, see ``elaunch.wire.recorder``
metrics.*               what the script has reported (``elaunch.training.metrics``)
======================  ==========================================================================

The directory's name is the run id with odd characters as ``%XX``; where it is taken, ``<run id>.2``
and so on. The process that makes a directory owns it: ``mkdir`` decides between agents that start
together. Where no state directory can be made (no HOME, read-only, full), another place is taken
(``elaunch.runs.statedir``); readers look in both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elaunch import env
from elaunch.errors import RunDirError, UsageError
from elaunch.runs.identity import condition
from elaunch.runs.record import FINAL_STATES, LIVE_STATES, Record, parse
from elaunch.runs.statedir import (
    claim,
    delete,
    disk_bytes,
    draw,
    empty_trash,
    fallback_root,
    file_name,
    make_private,
    read_file,
    replace_file,
    require_own,
    roots,
    state_root,
    subdirectories,
)

KEEP_RUNS: Final = 20
KEEP_BYTES: Final = 1 << 30
PRUNERS: Final = 8
STATE_FILE: Final = "state.json"
CONSOLE: Final = "console.log"
KEPT_REPORTS: Final = 100
_REPORT: Final = re.compile(r"failure-(\d{1,9})\.(?:json|txt)", re.ASCII)
RESERVE_BYTES: Final = 1 << 18
RESERVE_HALVED: Final = 5

# How long a directory is left alone when it is unknown whether its agent lives: without a readable
# record (it may be starting), and with an agent on a host or in a container that cannot be seen.
UNREADABLE_KEEP_S: Final = 86_400.0
ELSEWHERE_KEEP_S: Final = 90 * 86_400.0


@dataclass(frozen=True)
class RunDir:
    """The directory of one run; ``notice`` says why it is not in its usual place.

    ``number`` is the one in its name, where the process that made it has it from :func:`create`.
    """

    path: Path
    notice: str | None = None
    number: int = field(default=1, compare=False)

    @property
    def socket(self) -> Path:
        """Return the path of the agent's socket; it may be longer than an address can be."""
        return self.path / "agent.sock"

    @property
    def timers(self) -> Path:
        """Return the path of the named pipe for the workers' timers, if none was named."""
        return self.path / "timers"

    @property
    def logs(self) -> Path:
        """Return the default directory of the workers' logs; it may not exist yet."""
        return self.path / "logs"

    @property
    def state_file(self) -> Path:
        """Return the path of the record."""
        return self.path / STATE_FILE

    def report(self, round: int, suffix: str) -> Path:
        """Return the path of the failure report of ``round``; ``suffix`` is ``json`` or ``txt``."""
        return self.path / f"failure-{round}.{suffix.removeprefix('.')}"

    def reports(self) -> list[int]:
        """Return the rounds that have a failure report, the newest first."""
        found = (_REPORT.fullmatch(name) for name in os.listdir(self.path))
        return sorted({int(match[1]) for match in found if match}, reverse=True)

    def drop_reports(self) -> None:
        """Remove the oldest failure reports; KEPT_REPORTS stay."""
        for number in self.reports()[KEPT_REPORTS:]:
            for suffix in ("json", "txt"):
                self.report(number, suffix).unlink(missing_ok=True)

    def write_state(self, record: Mapping[str, object] | Record) -> None:
        """Replace the record; raise RunDirError when it cannot be written, the old one stays.

        Only one thread may write.
        """
        text = json.dumps(record, separators=(",", ":"))
        self.write_state_text(text, is_last=record["state"] in FINAL_STATES)

    def write_state_text(self, text: str, is_last: bool) -> None:
        """Replace the record by ``text``, as :meth:`write_state` does."""
        try:
            self._replace_state(text.encode(), is_last)
        except OSError as exc:
            raise RunDirError(f"cannot write {self.state_file}: {exc.strerror}") from exc

    def _replace_state(self, content: bytes, is_last: bool) -> None:
        try:
            replace_file(self.state_file, content)
        except OSError as error:
            if not is_last or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The end of a run is worth more than the rest: without it the run would count as lost.
            self._reserve.unlink(missing_ok=True)
            replace_file(self.state_file, content)
        if is_last:
            self._reserve.unlink(missing_ok=True)

    @property
    def _reserve(self) -> Path:
        return self.path / ".reserve"

    def reserve(self) -> None:
        """Take room on the disk for the last record, where the file system can do that.

        On one that is nearly full that is a half, a quarter, … of what a large job needs.
        """
        with contextlib.suppress(OSError):
            fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _allocate(fd)
            finally:
                os.close(fd)

    def read_state(self) -> Record:
        """Return the record; raise RunDirError when there is none or it cannot be understood."""
        try:
            raw = read_file(self.state_file)
        except FileNotFoundError:
            if not self.path.is_dir():
                raise RunDirError(f"{self.path} is not there: it was removed") from None
            raise RunDirError(f"{self.state_file} is not there: nothing was recorded yet") from None
        except OSError as exc:
            raise RunDirError(f"cannot read {self.state_file}: {exc.strerror}") from exc
        return parse(raw, str(self.state_file))


def _allocate(fd: int) -> None:
    for halved in range(RESERVE_HALVED):
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, RESERVE_BYTES >> halved)
            return


def create(run_id: str, environ: Mapping[str, str]) -> RunDir:
    """Make the directory of a new run and return it; raise RunDirError when no place is left.

    Safe against other agents that start a run of the same id at the same moment.
    """
    name = file_name(run_id)
    root = state_root(environ)
    if root is None:
        why = "neither XDG_STATE_HOME nor HOME names a directory"
    else:
        try:
            make_private(root)
            return _made(claim(root, name), name)
        except OSError as exc:
            why = f"{root} cannot be used ({exc.strerror})"
    try:
        fallback = fallback_root()
        make_private(fallback.parent)
        require_own(fallback.parent)
        make_private(fallback)
        path = claim(fallback, name)
    except OSError as exc:
        raise RunDirError(
            f"no place for the record of the run: {why}, nor the directory for temporary files "
            f"({exc.strerror}); set XDG_STATE_HOME to a directory that you can write to"
        ) from exc
    return _made(path, name, f"{why}: the record of this run is in {path}")


def _made(path: Path, name: str, notice: str | None = None) -> RunDir:
    run = RunDir(path, notice, int(path.name[len(name) + 1 :] or 1))
    run.reserve()
    return run


def list_runs(environ: Mapping[str, str]) -> list[RunDir]:
    """Return every kept run of this user, the newest first; those without a record by file time."""
    return [run for run, _ in records(environ)]


def records(environ: Mapping[str, str]) -> list[tuple[RunDir, Record | None]]:
    """Return the same with their records, each of which is read once; None for no readable one."""
    return _newest_first(_kept(environ))


def find(run: str, environ: Mapping[str, str]) -> RunDir:
    """Return the run that ``run`` names: a run id, a directory, or a prefix that fits one run id.

    Where several runs have the id: the newest that is live on this machine, else one that may be
    live elsewhere, else the newest. Raises UsageError with the nearest names.
    """
    if os.sep in run and _has_record(run):
        return RunDir(Path(run).absolute())
    runs = records(environ)
    ids = list(dict.fromkeys(run_id_of(*one) for one in runs))
    fitting = [run_id for run_id in ids if run and run_id.startswith(run)]
    for same in (
        [one for one in runs if run_id_of(*one) == run],
        [one for one in runs if run in (one[0].path.name, handle(*one))],
        [one for one in runs if fitting == [run_id_of(*one)]],
    ):
        if same:
            live = [one for one in same if is_live(*one)]
            here = (one for one in live if one[1] and condition(one[1]["agent"]) != "elsewhere")
            return next(here, (live or same)[0])[0]
    raise UsageError(_no_such_run(run, ids, fitting, environ), code="E-NO-RUN")


def runs_of(run_id: str, environ: Mapping[str, str]) -> list[RunDir]:
    """Return the runs that have this id, the newest first."""
    return [run for run, record in records(environ) if run_id_of(run, record) == run_id]


def named(run: str | None, environ: Mapping[str, str]) -> RunDir:
    """Return what :func:`find` finds; with None the newest run of this user.

    Raises UsageError if there is none.
    """
    if run is not None:
        return find(run, environ)
    runs = list_runs(environ)
    if not runs:
        why = f"no run is recorded in {_places(environ)}; name a run directory"
        raise UsageError(why, code="E-NO-RUN")
    return runs[0]


def killed_in(run_id: str, environ: Mapping[str, str]) -> int | None:
    """Return the round in which the newest earlier run of that id was killed on this machine.

    None if there is no such run, or if its agent has ended it; -1 if no round had begun.
    """
    for record in _of_id(run_id, environ):
        state = condition(record["agent"])
        if state in ("alive", "stopped", "elsewhere"):
            continue
        killed = record["state"] in LIVE_STATES
        return (record["round"] if record["world_size"] is not None else -1) if killed else None
    return None


def continued(run: RunDir, run_id: str, environ: Mapping[str, str]) -> Record | None:
    """Return the record of the run that ``run``, of the same id, goes on with.

    That is the newest earlier one of this machine, unless it was completed: then another job has
    been given the same id.
    """
    if run.number == 1:
        return None
    for record in _of_id(run_id, environ):
        if condition(record["agent"]) in ("gone", "rebooted"):
            return None if record["state"] == "COMPLETED" else record
    return None


def _of_id(run_id: str, environ: Mapping[str, str]) -> Iterator[Record]:
    """Yield the records of all runs of that id, the newest first."""
    same_id = re.compile(re.escape(file_name(run_id)) + r"(\.\d+)?")
    runs = (run for run in _kept(environ) if same_id.fullmatch(run.path.name))
    for _, record in _newest_first(runs):
        if record is not None and record["run_id"] == run_id:
            yield record


def _has_record(directory: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(os.path.join(directory, STATE_FILE)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"RUN {directory!r} cannot be looked at: {error.strerror}") from None


def handle(run: RunDir, record: Record | None = None) -> str:
    """Return the run's name, unique among runs of the same id: ``<run id>.<number>``.

    Its ``record`` is read if it is not given, here and in what follows.
    """
    record, name = record or _read(run), run.path.name
    first = re.search(r"\.\d+$", name) is None
    if record is not None:
        first = name == file_name(record["run_id"])
    return f"{name}.1" if first else name


def unique_name(run: RunDir, environ: Mapping[str, str]) -> str:
    """Return the run's id, or its :func:`handle` if other runs have the same id."""
    run_id = run_id_of(run)
    return run_id if len(runs_of(run_id, environ)) < 2 else handle(run)


def run_id_of(run: RunDir, record: Record | None = None) -> str:
    """Return the id in the run's record; the directory's name where there is none."""
    record = record or _read(run)
    return run.path.name if record is None else record["run_id"]


def is_live(run: RunDir, record: Record | None = None) -> bool:
    """Tell whether the run's agent lives, or may live where that cannot be seen."""
    record = record or _read(run)
    if record is None:
        return _idle_s(run) < UNREADABLE_KEEP_S
    match condition(record["agent"]):
        case "alive" | "stopped":
            return True
        case "elsewhere":
            return record["state"] in LIVE_STATES and _idle_s(run) < ELSEWHERE_KEEP_S
        case _:
            return False


def prune_for(run: RunDir, environ: Mapping[str, str], keep: int | None = None) -> None:
    """Prune when a run begins; of very many with one id, on one shared home, only some do.

    Each reads what all have there. The more there are, the rarer one is drawn: of the first N about
    PRUNERS times log N.
    """
    if draw() % run.number < PRUNERS:
        prune(environ, _keep_runs(environ) if keep is None else keep)


def _keep_runs(environ: Mapping[str, str]) -> int:
    """Return what --keep-runs is for scripts that track a run without `elaunch run`."""
    text = environ.get(env.KEEP_RUNS, "")
    return max(1, int(text)) if re.fullmatch(r"[0-9]{1,9}", text) else KEEP_RUNS


def prune(
    environ: Mapping[str, str], keep: int = KEEP_RUNS, max_bytes: int = KEEP_BYTES
) -> list[Path]:
    """Delete the oldest ended runs and return their paths; the newest ended one always stays.

    ``keep`` bounds the number of completed runs and, for itself, that of the others that ended.
    Refused command lines go first. ``max_bytes`` bounds the disk space of all runs: completed ones
    go before the others. A live run is never deleted. Safe against agents that start, end or prune
    at the same moment.
    """
    deleted: list[Path] = []
    for root in roots(environ):
        empty_trash(root)
    runs = records(environ)
    sizes = {run: disk_bytes(run.path) for run, _ in runs}
    ended = [(run, record) for run, record in runs if not is_live(run, record)]
    refused = [  # the command line was wrong: no round has begun
        run
        for run, record in ended
        if record and (record["exit_code"], record["world_size"]) == (UsageError.exit_code, None)
    ]
    completed = [run for run, record in ended if record and record["state"] == "COMPLETED"]
    others = [run for run, _ in ended if run not in (*refused, *completed)]
    total = sum(sizes.values())
    for kind, number in ((refused, 0), (completed, keep), (others, keep)):
        for run in reversed([run for run in kind if run != ended[0][0]]):
            if len(kind) <= number and total <= max_bytes:
                break
            kind.remove(run)
            total -= sizes[run]
            if delete(run.path):
                deleted.append(run.path)
    return deleted


def _kept(environ: Mapping[str, str]) -> Iterator[RunDir]:
    for root in roots(environ):
        for path in subdirectories(root):
            if not path.name.startswith("."):
                yield RunDir(path)


def _newest_first(runs: Iterable[RunDir]) -> list[tuple[RunDir, Record | None]]:
    """Return runs with their records, each of which is read once."""

    def began(one: tuple[RunDir, Record | None]) -> float:
        run, record = one
        return time.time() - _idle_s(run) if record is None else record["started_at"]

    return sorted(((run, _read(run)) for run in runs), key=began, reverse=True)


def _read(run: RunDir) -> Record | None:
    try:
        return run.read_state()
    except RunDirError:
        return None


def _idle_s(run: RunDir) -> float:
    """Return the seconds since the directory or the record in it last changed."""
    changed = 0.0
    for path in (run.path, run.state_file):
        with contextlib.suppress(OSError):
            changed = max(changed, path.stat().st_mtime)
    return time.time() - changed


def _places(environ: Mapping[str, str]) -> str:
    return " or ".join(str(root) for root in roots(environ))


def _no_such_run(run: str, ids: list[str], fitting: list[str], environ: Mapping[str, str]) -> str:
    if fitting:
        return f"RUN {run!r} fits {len(fitting)} runs: {', '.join(fitting[:5])}; give more of it"
    if not ids:
        return f"there is no run {run!r}: no run is recorded in {_places(environ)}"
    import difflib

    nearest = difflib.get_close_matches(run, ids, n=3, cutoff=0.4)
    if nearest:
        return f"there is no run {run!r}; the nearest: {', '.join(nearest)}"
    return f"there is no run {run!r}; the newest: {', '.join(ids[:3])}"
