"""The one settings object of a job: made once, checked once, passed whole.

``Settings.notices`` are one-line remarks on what was given and has no effect; the command line
prints them on stderr.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from elaunch.checkpoint.records import Checkpoint, Keep
from elaunch.config import checkpoint, checks, command, files, rdzvconf, values
from elaunch.config.command import Command, Mode
from elaunch.config.flags.flag import Answers, JobFile, collect, from_variables
from elaunch.config.flags.table import TABLE
from elaunch.config.rendezvous import RendezvousSettings, resolve_meeting
from elaunch.config.values import Moment, StreamMap
from elaunch.env import HPARAMS, NCCL_ASYNC_ERRORS, RoundFacts, worker_environment
from elaunch.errors import UsageError

__all__ = ["Settings", "StreamMap", "resolve"]


class Settings(Struct, frozen=True):
    """Everything that a job is asked to be; field by field in docs/flags.md."""

    entrypoint: str
    args: tuple[str, ...]
    mode: Mode
    name: str
    name_given: bool
    run_id: str
    run_id_given: bool
    min_nodes: int
    max_nodes: int
    nproc_per_node: str
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_conf: Mapping[str, str]
    standalone: bool
    node_rank: int
    master_addr: str | None
    master_port: int | None
    local_addr: str | None
    max_restarts: int
    restart_budget: Literal["progress", "lifetime"]
    max_same_failures: int
    monitor_interval: float
    start_method: Literal["forkserver", "spawn"]
    preload: tuple[str, ...]
    role: str
    log_dir: str | None
    redirects: StreamMap
    tee: StreamMap
    local_ranks_filter: frozenset[int] | None
    log_line_prefix_template: str
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    logs_specs: str | None
    numa_binding: str | None
    event_log_handler: str
    health_check_port: int | None
    metrics_port: tuple[str, int] | None
    dashboard: tuple[str, int | None] | None
    file_timer: bool
    timer_file: Path | None
    signals_to_handle: tuple[signal.Signals, ...]
    forward_signals: tuple[signal.Signals, ...]
    preempt_signals: tuple[signal.Signals, ...]
    preempt_at: Moment | None
    notice_command: str | None
    on_event: str | None
    shutdown_timeout: float
    sibling_grace: float
    wait_for_children: float
    virtual_local_rank: bool
    hang_timeout: float | Literal["auto"] | None
    progress: bool
    progress_regex: str | None
    no_stacks: bool
    checkpoint_dir: Path | str | None
    init_from: Checkpoint | None
    checkpoint_glob: str | None
    require_resume: bool
    checkpoint_local: bool
    checkpoint_replicas: int
    checkpoint_memory: int | None
    checkpoint_keep: Keep
    env: Mapping[str, str]
    workdir: Path | None
    tmp: Literal["private", "shared"]
    rendezvous: RendezvousSettings | None
    exit_codes: Literal["elaunch", "torchrun"]
    torchrun_report: bool
    keep_runs: int
    interpreter: str
    dry_run: bool
    detach: bool
    log_level: str
    notices: tuple[str, ...]

    def worker_facts(self) -> RoundFacts:
        """Return what these settings are to a worker; a round adds its own facts."""
        directory, keep, start = self.checkpoint_dir, self.checkpoint_keep, self.init_from
        return RoundFacts(
            run_id=self.run_id,
            max_restarts=self.max_restarts,
            role=self.role,
            checkpoint_dir=None if directory is None else str(directory),
            signals_to_handle=",".join(each.name for each in self.signals_to_handle),
            virtual_local_rank=self.virtual_local_rank,
            run_id_given=self.run_id_given,
            checkpoint_local=self.checkpoint_local,
            checkpoint_keep=keep.to_json() if keep else "",
            init_from="" if start is None else str(start.path),
        )


def resolve(
    line: Mapping[str, str], words: Sequence[str], environ: Mapping[str, str], cwd: Path
) -> Settings:
    """Return the settings of one job.

    Args:
        line: the flags of the command line as text, by the flag's name.
        words: the script and its arguments from the command line; may be empty.
        environ: the launcher's environment.
        cwd: the launcher's current directory.

    Raises:
        UsageError: whatever is wrong, with flag, value, source, reason and fix.
    """
    job = job_file(line, environ, cwd)
    answers = collect(TABLE.values(), line, environ, job)
    checks.refused(answers)
    chosen = command.choose(words, job.entrypoint, answers)
    start = checks.directory(answers, cwd)
    place, meet = resolve_meeting(answers, environ, start)
    env = _environment(job)
    workers_environ = {**environ, **env}
    python = command.interpreter(answers, chosen, start)
    command.check(chosen, answers, start, python, workers_environ)
    command.preload(answers, start, python, workers_environ)
    checks.counted(answers, python)
    checks.devices(answers, workers_environ)
    remarks = [] if meet else checks.master(answers, place)
    if meet:
        checks.hosting(answers, meet)
    checks.servers(answers, alone=meet is None)
    remarks += checks.remarks(answers, chosen, place, environ)
    return Settings(
        **{
            **_plain(answers),
            **_derived(answers, chosen),
            **_named(answers, chosen, meet),
            **_places(answers, chosen, start),
            "rdzv_backend": place.backend,
            "rdzv_endpoint": place.endpoint,
            "master_addr": place.master_addr,
            "master_port": place.master_port,
            "preempt_at": checks.preempt_at(answers, environ),
            "rendezvous": meet,
            "interpreter": python,
            "env": env,
            "notices": (*job.notices, *remarks),
        }
    )


def job_file(line: Mapping[str, str], environ: Mapping[str, str], cwd: Path) -> JobFile:
    """Return the job file that the command line or a variable names; an empty one without it.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    variable = from_variables(TABLE["file"], environ)
    shown = line.get("file") or (variable.text if variable else "")
    if "file" in line and not shown:
        raise UsageError("--file: '' does not name a file")
    if not shown:
        return JobFile()
    if why := values.unfit(shown):
        raise UsageError(f"--file: {shown!r} {why}")
    from elaunch.config import jobfile  # PyYAML is for those who have one

    try:
        return jobfile.load(files.absolute(shown, cwd), shown)
    except UsageError as error:
        error.code = "E-JOB-FILE"
        raise


def _plain(answers: Answers) -> dict[str, Any]:
    """Return the converted value of each flag of which ``Settings`` has a field."""
    names = {name: name.replace("_", "-") for name in Settings.__struct_fields__}
    return {name: answers[flag] for name, flag in names.items() if flag in answers.flags}


def _derived(answers: Answers, chosen: Command) -> dict[str, Any]:
    """Return the fields that are made of one or two flags, or of a flag and the command."""
    grace, spawn = answers["sibling-grace"], answers["start-method"] == "spawn" or chosen.is_stdin
    if not answers.is_set("sibling-grace"):
        grace = min(grace, answers["shutdown-timeout"])
    low, high = answers["nnodes"]
    if high > 1 and answers["wait-for-children"]:
        # The others would begin a round, or a newcomer's, beside what a node still waits for.
        raise UsageError(
            "--wait-for-children: only for a job of one node; with several, let the process ignore "
            "SIGTERM, and give it --sibling-grace"
        )
    handle, forward = checks.signals(answers)
    return {
        "sibling_grace": grace,
        "rdzv_conf": rdzvconf.without_password(answers["rdzv-conf"]),
        "min_nodes": low,
        "max_nodes": high,
        "start_method": "spawn" if spawn else "forkserver",
        "signals_to_handle": handle,
        "forward_signals": forward,
        "preempt_signals": checks.preempt_signals(answers, (*handle, *forward)),
    }


def _places(answers: Answers, command: Command, start: Path) -> dict[str, Any]:
    return {
        "log_dir": checks.log_dir(answers, start),
        "timer_file": checks.timer_file(answers, start),
        "checkpoint_dir": checkpoint.place(answers, start, command.args),
        "init_from": checkpoint.init_from(answers, start),
        "checkpoint_keep": checkpoint.keep(answers),
        "workdir": start if answers["workdir"] else None,
    }


def _named(answers: Answers, command: Command, meet: RendezvousSettings | None) -> dict[str, Any]:
    """Return the job's names; several nodes need one run id, so nothing in it is random then.

    Raises:
        UsageError: the run id is missing where jobs of several users would be taken for one.
    """
    name = answers["name"] or command.name
    run_id = answers["rdzv-id"]
    word = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100] or "run"
    if meet and not run_id:
        if meet.backend == "etcd":
            raise UsageError(
                "--rdzv-id is missing: etcd may hold many jobs, and the nodes of this one find "
                "each other by it; give a name of its own, the same on all nodes"
            )
        run_id = word
    return {
        "entrypoint": command.entrypoint,
        "args": command.args,
        "mode": command.mode,
        "name": name,
        "name_given": bool(answers["name"]),
        "run_id": run_id or f"{word}-{os.urandom(3).hex()}",
        "run_id_given": bool(run_id),
    }


def _environment(job: JobFile) -> dict[str, str]:
    """Return the job file's variables for the workers; those that elaunch sets are refused."""
    reserved = _reserved() if job.environment else frozenset()
    for name, given in job.environment.items():
        if name in reserved:
            raise UsageError(
                f"{given.where}: the variable {name} is set by elaunch for each worker; "
                "a job file cannot set it"
            )
    made = {name: given.text for name, given in job.environment.items()}
    return made if job.hparams is None else {**made, HPARAMS: job.hparams.text}


def _reserved() -> frozenset[str]:
    facts = RoundFacts(
        run_id="",
        checkpoint_dir="",
        checkpoint_local=True,
        checkpoint_keep="{}",
        init_from="PATH",
        run_id_given=True,
        channel_key="KEY",
        resume_uuid="UUID",
    )
    made = frozenset(worker_environment(facts, 0, "", {})) | {HPARAMS}
    return made - {NCCL_ASYNC_ERRORS}
