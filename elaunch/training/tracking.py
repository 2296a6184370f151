"""The run directory and the record of a run that no agent keeps: torchrun's, mpirun's, a lone one.

The first worker of each node makes the directory (elaunch.runs.directory) and its record; each
worker writes its own end into it, under ``record.lock``:

=============================================  ==========================================
what happened                                  state of the run on this node
=============================================  ==========================================
the context is open in some worker             RUNNING
a worker closed it with an exception           FAILED
all closed it, none with an exception          COMPLETED
Ctrl-C ended them                              STOPPED
a worker ended without closing it (SIGKILL)    LOST, or FAILED if others closed theirs later
=============================================  ==========================================

The record's ``agent`` is a worker that has not closed its context, so that it is seen when the last
one is killed. Torchrun restarts its workers: each of its rounds is a start of one run, with a
directory of its own, as if the same job were started again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elaunch.endings import INTERRUPTED
from elaunch.errors import ContextError, RunDirError
from elaunch.proc import process_name
from elaunch.runs.directory import RunDir, create, prune_for
from elaunch.runs.identity import (
    WorkerRecord,
    agent_of,
    note_start,
    worker_is_alive,
)
from elaunch.runs.record import (
    LIVE_STATES,
    Record,
    SavesRecord,
    add_round,
    first_record,
    new_round,
    new_worker,
)
from elaunch.runs.statedir import locked
from elaunch.training.distributed import INIT, for_purpose
from elaunch.training.launch import Placement

if TYPE_CHECKING:
    from elaunch.training.distributed import DistributedContext

log = logging.getLogger("elaunch")

LOCK: Final = "record.lock"
PRUNE_S: Final = 0.5
"""How long the end waits for old runs to be deleted; the next run goes on with it."""
NOTE_S: Final = 0.5
"""How long a save waits for the record, and the end ten times: its disk may hang."""


class Tracking:
    """Keeps one node's part of a run; every worker of the node has one.

    Args:
        distributed: the ranks; they agree on the run id, and on the directory on each node.
        name: of the run; by default the script's.

    ``run_id`` is known after :meth:`start`; ``run_id_given`` if a person has chosen it, so that it
    is the same whenever this job is started again, and another's is another job.
    """

    def __init__(self, distributed: DistributedContext, name: str | None = None) -> None:
        self._distributed = distributed
        self._name = name or _script_name()
        self.run_id, self.run_id_given = "", False
        self._run: RunDir | None = None
        self._pruning: threading.Thread | None = None
        self._noting: threading.Thread | None = None

    @property
    def directory(self) -> Path:
        """The run directory of this node, after :meth:`start`."""
        if self._run is None:
            raise ContextError("the run is not tracked yet: start() was not called")
        return self._run.path

    def start(self) -> None:
        """Make the record. All ranks call it together.

        Blocks until they have. Raises RunDirError on all ranks of a node that has no place for it.
        """
        ranks = for_purpose(self._distributed, INIT)
        run_id = ranks.broadcast(self._choose_id() if ranks.rank == 0 else "")
        self.run_id, self.run_id_given = run_id, _is_chosen(ranks.placement, run_id)
        pids = ranks.gather_local((ranks.rank, os.getpid()))
        opened: tuple[str, str] | None = None
        if pids is not None:
            try:
                opened = ("", str(self._open(run_id, pids).path))
            except (RunDirError, OSError) as error:
                opened = (str(error), "")
        problem, path = ranks.broadcast_local(opened)
        if problem:
            raise RunDirError(problem)
        self._run = RunDir(Path(path))

    def end(self, error: BaseException | None = None) -> None:
        """Note that this worker has ended, by ``error`` or well; each rank calls it by itself.

        A record that cannot be written is reported on stderr; the script's own end stays as it is.
        """
        if self._run is None:
            return
        if self._pruning is not None:
            self._pruning.join(PRUNE_S)
        if self._noting is not None:
            self._noting.join(NOTE_S)
        problem = self._note(lambda record: _note_end(record, error), 10 * NOTE_S)
        if problem:
            print(f"elaunch: the end of this run is not recorded: {problem}", file=sys.stderr)

    def note_saves(self, saves: SavesRecord) -> None:
        """Put what this process has saved into the record; the rank that commits calls it.

        A record that cannot be written is no error: the checkpoint is there.
        """

        def count(record: Record) -> None:
            record["saves"] = saves

        if self._run is not None and (problem := self._note(count, NOTE_S)):
            log.debug("what was saved is not recorded: %s", problem)

    def _note(self, change: Callable[[Record], None], seconds: float) -> str:
        """Change the record; return why that is not done, as after ``seconds`` at most."""
        run, problems = self._run, [f"it takes longer than {seconds:g} s"]
        assert run is not None

        def note() -> None:
            try:
                with locked(run.path / LOCK):
                    record = run.read_state()
                    change(record)
                    run.write_state(record)
                problems[:] = [""]
            except (RunDirError, OSError) as problem:
                problems[:] = [str(problem)]

        if self._noting is None or not self._noting.is_alive():
            self._noting = threading.Thread(target=note, name="elaunch-record", daemon=True)
            try:
                self._noting.start()
            except RuntimeError as problem:  # no thread can be started
                return str(problem)
            self._noting.join(seconds)
        return problems[0]

    def _choose_id(self) -> str:
        placement = self._distributed.placement
        if given := _given_id(placement, os.environ):
            return given
        # All rounds of one torchrun are one run.
        starter = process_name(os.getppid()) if placement.launcher == "torchrun" else ""
        some = hashlib.sha256(starter.encode()).digest() if starter else os.urandom(3)
        return f"{self._name}-{some[:3].hex()}"

    def _open(self, run_id: str, pids: Sequence[tuple[int, int]]) -> RunDir:
        """Return this node's directory with a record that says that all workers run."""
        placement = self._distributed.placement
        run = create(run_id, os.environ)
        if run.notice:
            print(f"elaunch: {run.notice}", file=sys.stderr)
        record = self._first_record(run, run_id)
        record["state"] = "RUNNING"
        record["round"] = record["restarts"]["used"] = placement.round
        record["world_size"], record["nproc_per_node"] = placement.size, placement.local_size
        now = time.time()
        record["workers"] = [
            _worker(rank, local_rank, pid, now) for local_rank, (rank, pid) in enumerate(pids)
        ]
        add_round(record, new_round(placement.round, None))
        run.write_state(record)
        self._pruning = threading.Thread(
            target=prune_for, args=(run, os.environ), name="prune", daemon=True
        )
        self._pruning.start()
        return run

    def _first_record(self, run: RunDir, run_id: str) -> Record:
        launcher = self._distributed.placement.launcher
        record = first_record(run_id, self._name, run.path)
        record["launcher"] = record["start_method"] = launcher
        record["argv"] = list(sys.orig_argv)
        record["entrypoint"] = sys.argv[0] if sys.argv else ""
        allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
        record["restarts"]["max"] = int(allowed) if allowed.isdecimal() else 0
        return record


def _script_name() -> str:
    return Path(sys.argv[0] if sys.argv else "").stem.lstrip("-") or "python"


def _given_id(placement: Placement, environ: Mapping[str, str]) -> str:
    """Return the run id that the launcher gives: torchrun's, or the number of Slurm's job.

    A job that is queued again keeps its number; what runs beside its first step is another run.
    """
    if placement.launcher in ("torchrun", "explicit"):
        return "" if placement.run_id == "none" else placement.run_id
    job = environ.get("SLURM_JOB_ID", "")
    if placement.launcher not in ("mpi", "slurm") or not job:
        return ""
    step = environ.get("SLURM_STEP_ID", "0")
    return f"{job}-{step}" if placement.launcher == "slurm" and step != "0" else job


def _is_chosen(placement: Placement, run_id: str) -> bool:
    """Tell whether a person has chosen the id: torchrun makes one up, a UUID, without --rdzv-id."""
    made_up = re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id)
    return placement.run_id == run_id and run_id != "none" and made_up is None


def _worker(rank: int, local_rank: int, pid: int, now: float) -> WorkerRecord:
    worker = new_worker(rank, local_rank)
    note_start(worker, pid, now)
    worker["state"] = "RUNNING"
    return worker


def _note_end(record: Record, error: BaseException | None) -> None:
    """Write the end of this process into the record, and that of the run if it is the last."""
    workers = record["workers"]
    own = next((worker for worker in workers if worker["pid"] == os.getpid()), None)
    if own is None:
        return  # a later round has begun
    _note_worker(own, *_ending(error))
    if error is not None and own["state"] == "FAILED" and record["state"] in LIVE_STATES:
        _finish(record, "FAILED", own, f"rank {own['rank']} failed: {_text_of(error)}")
    others = [worker for worker in workers if worker["state"] == "RUNNING"]
    for worker in others:
        if worker_is_alive(worker):
            record["agent"] = agent_of(worker["pid"] or 0)
            return
    for worker in others:
        _note_worker(worker, "FAILED", "ended without a word", None)
        if record["state"] in LIVE_STATES:
            who = f"rank {worker['rank']} (pid {worker['pid']})"
            reason = f"{who} ended without closing its context: it was killed, say"
            _finish(record, "FAILED", worker, reason)
    record["history"][-1]["ended_at"] = time.time()
    if record["state"] in LIVE_STATES:
        stopped = any(worker["state"] == "STOPPED" for worker in workers)
        _finish(record, "STOPPED" if stopped else "COMPLETED", own, None)


def _note_worker(worker: WorkerRecord, state: str, how: str, code: int | None) -> None:
    worker["state"], worker["exit"], worker["exit_code"] = state, how, code
    worker["ended_at"] = time.time()


def _finish(record: Record, state: str, worker: WorkerRecord, reason: str | None) -> None:
    record["state"], record["reason"] = state, reason
    record["exit_code"], record["ended_at"] = worker["exit_code"], time.time()


def _ending(error: BaseException | None) -> tuple[str, str, int]:
    """Return the state, the words and the exit code of a worker that ended by ``error``."""
    if error is None:
        return "SUCCEEDED", "exit code 0", 0
    if isinstance(error, KeyboardInterrupt):
        return "STOPPED", "KeyboardInterrupt", INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ("FAILED" if code else "SUCCEEDED"), f"exit code {code}", code
    return "FAILED", type(error).__name__, 1


def _text_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
