"""The plan of ``elaunch wrap``, made before anything starts: rank, environment, log files.

The launcher's variables are read by elaunch.launchers. Torchrun's variables are set from
them; the six numbers always, everything else only where it is not set: inside a job of elaunch or
torchrun (a worker that calls mpirun) the round's own store and run id stay in use.

A rank that ``--rank-env`` gives may be all that is known: nothing says how many ranks there are, or
this is a worker that starts ranks of its own. Then the command's variables stay as they are.
"""

from __future__ import annotations

import os
import re
import socket
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elaunch import env, launchers
from elaunch.agent.logs.files import round_directory
from elaunch.agent.logs.plan import LogPlan
from elaunch.config import endpoints
from elaunch.config.values import StreamMap, did_you_mean
from elaunch.errors import PlacementError, UsageError
from elaunch.files import own_directory
from elaunch.hosts import LOOPBACK
from elaunch.launchers import LauncherNames, Numbers, launcher_numbers, meeting_point
from elaunch.proc import process_name
from elaunch.runs import statedir


@dataclass(frozen=True)
class WrapRequest:
    """The options of ``elaunch wrap``'s command line; times are in seconds."""

    command: tuple[str, ...]
    rank_env: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    log_dir: Path | None = None
    redirects: StreamMap = field(default_factory=StreamMap)
    tee: StreamMap = field(default_factory=lambda: StreamMap(3))
    role: str = "default"
    shutdown_timeout: float = 30.0
    wait_for_children: float = 0.0


@dataclass(frozen=True)
class WrapPlan:
    """One wrapped rank: what is started, in which environment, and where its output goes.

    ``launched`` says that a launcher of the table started this process, as its parent.
    """

    command: tuple[str, ...]
    rank: int
    job: str
    round: int
    environ: Mapping[str, str]
    logs: LogPlan
    shutdown_timeout: float
    wait_for_children: float
    launched: bool

    @property
    def is_python(self) -> bool:
        """Whether the command is Python itself, which ends its own helpers."""
        return re.fullmatch(r"python[\d.]*t?", os.path.basename(self.command[0])) is not None


def plan(request: WrapRequest, environ: Mapping[str, str]) -> WrapPlan:
    """Return what is to be done for this rank.

    Raises UsageError where rank, size, node or meeting point can neither be read nor derived, where
    rank 0's port is taken, and where the log directory cannot be made.
    """
    try:
        return _plan(request, environ)
    except PlacementError as error:
        raise UsageError(str(error)) from error


def _plan(request: WrapRequest, environ: Mapping[str, str]) -> WrapPlan:
    names, rank = _find(request.rank_env, environ)
    job = launchers.job_name(names, environ)
    restarts = launchers.number(environ, ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")) or 0
    placed = request.master_addr is not None or request.master_port is not None
    numbers = None
    if rank is None or placed or _has_numbers(names, rank, environ):
        numbers = launcher_numbers(names, environ, rank)
        rank = numbers.rank
        variables = _torch_variables(request, names, numbers, restarts, environ)
    else:
        variables = _unbuffered(environ)
        if not job and (starter := process_name(os.getppid())):
            variables[env.STARTER] = starter
    log_root = _log_root(request, job)
    if log_root is not None:
        variables[env.ERROR_FILE] = str(round_directory(log_root, restarts) / f"{rank}/error.json")
    local_rank = rank if numbers is None else numbers.local_rank
    return WrapPlan(
        command=request.command,
        rank=rank,
        job=job,
        round=restarts,
        environ={**environ, **variables},
        logs=_log_plan(request, local_rank, log_root, environ),
        shutdown_timeout=request.shutdown_timeout,
        wait_for_children=request.wait_for_children,
        launched=names.family != "torch",
    )


def _has_numbers(names: LauncherNames, rank: int, environ: Mapping[str, str]) -> bool:
    """Whether the variables say of this very rank how many others there are."""
    if launchers.number(environ, (*names.size, "WORLD_SIZE")) is None:
        return False
    # A worker of torchrun or elaunch that starts ranks of its own leaves them its variables.
    worker = launchers.number(environ, launchers.TORCH.rank)
    return names.family != "torch" or worker in (None, rank)


def _find(rank_env: str | None, environ: Mapping[str, str]) -> tuple[LauncherNames, int | None]:
    """Return the launcher that gives the numbers, and the rank where ``--rank-env`` names it."""
    found = launchers.find(environ)
    if rank_env is None:
        if found is None:
            raise UsageError(_no_launcher(environ))
        return found, None
    if rank_env.strip().isascii() and rank_env.strip().isdecimal():
        return found or launchers.TORCH, int(rank_env)
    named = tuple(name.strip() for name in rank_env.split(",") if name.strip())
    name = launchers.first_set(environ, named)
    if not name:
        raise UsageError(_none_named(named, environ))
    known = [names for names in launchers.LAUNCHERS if name in names.rank]
    if found is not None and name in found.rank:
        known = [found]
    owner = known[0] if known else found or launchers.TORCH
    return owner._replace(rank=(name,)), launchers.number(environ, (name,))


def _no_launcher(environ: Mapping[str, str]) -> str:
    known = ", ".join(launchers.rank_names())
    if environ.get("SLURM_JOB_ID"):
        how = "this is inside a Slurm job, but in no step of it: put `srun` before `elaunch wrap`"
    else:
        how = (
            "start it with mpirun or srun, as in `mpirun -np 4 elaunch wrap -- COMMAND`, or say "
            "where the rank is: --rank-env NAME"
        )
    return f"no launcher says which rank this is: none of {known} is set; {how}"


def _none_named(named: tuple[str, ...], environ: Mapping[str, str]) -> str:
    given = ", ".join(named)
    known = [name for name in launchers.rank_names() if environ.get(name)]
    hint = did_you_mean(named[0], known) if named else ""
    if known and not hint:
        hint = f"; {' and '.join(known)} {'is' if len(known) == 1 else 'are'} set"
    if not named:
        return f"--rank-env: it names no variable{hint}"
    what = "is not set" if len(named) == 1 else "are all not set"
    return f"--rank-env {given}: {given} {what}{hint}"


def _alone(environ: Mapping[str, str], job: str) -> tuple[str, int]:
    """Return a place for the store of one rank by itself: init_process_group wants one, too."""
    port = launchers.number(environ, ("MASTER_PORT",))
    if port is None and job:
        port = launchers.derived_port(job)
    if port is None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
    return environ.get("MASTER_ADDR") or LOOPBACK, port


def _check_port(addr: str, port: int, given: bool) -> None:
    problem = endpoints.why_not_free(addr, port)
    if problem is None:
        return
    which = "" if given else ", which was made of the job's id,"
    raise UsageError(
        f"port {port}{which} {problem}: rank 0 hosts the job's store there; give every rank "
        "another with --master-port PORT, or set MASTER_PORT",
        code="E-PORT-IN-USE",
    )


def _facts(
    request: WrapRequest, numbers: Numbers, store: tuple[str, int], job: str, restarts: int
) -> env.RoundFacts:
    first = numbers.rank - numbers.local_rank
    place = env.NodePlace(
        node_rank=numbers.cross_rank,
        addrs=("",) * numbers.cross_size,
        first_rank=first,
        world_size=numbers.size,
        first_role_rank=first,
        role_world_size=numbers.size,
    )
    return env.RoundFacts(
        run_id=job or "none",
        round=restarts,
        restarts=restarts,
        local_world_size=numbers.local_size,
        role=request.role,
        place=place,
        master_addr=store[0],
        master_port=store[1],
        signals_to_handle=env.HANDLED_SIGNALS,
    )


def _store(
    request: WrapRequest, names: LauncherNames, numbers: Numbers, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Return where the ranks meet; raise UsageError where rank 0 finds that the port is taken."""
    own = dict(environ)
    if request.master_addr is not None:
        own["MASTER_ADDR"] = request.master_addr
    if request.master_port is not None:
        own["MASTER_PORT"] = str(request.master_port)
    job = launchers.job_name(names, environ)
    addr, port = meeting_point(names, numbers, own) or _alone(own, job)
    # The launcher around this one may host the store that MASTER_PORT names.
    is_hosted = environ.get("ELAUNCH_RUN_ID") or environ.get(env.AGENT_STORE) == "True"
    if numbers.rank == 0 and not is_hosted:
        _check_port(addr, port, given="MASTER_PORT" in own)
    return addr, port


def _torch_variables(
    request: WrapRequest,
    names: LauncherNames,
    numbers: Numbers,
    restarts: int,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return torchrun's variables, without what only an agent's workers have.

    Without TORCHELASTIC_USE_AGENT_STORE the process of rank 0 hosts the store, as in any job that
    torchrun did not start.
    """
    store = _store(request, names, numbers, environ)
    facts = _facts(request, numbers, store, launchers.job_name(names, environ), restarts)
    variables = env.worker_environment(facts, numbers.local_rank, "", environ)
    kept = {
        name: value
        for name, value in variables.items()
        if not name.startswith("ELAUNCH_") and name not in (env.AGENT_STORE, env.ERROR_FILE)
    }
    held = ("TORCHELASTIC_", "ROLE_NAME")  # those of a launcher around this one
    changed = {n: v for n, v in kept.items() if not (n.startswith(held) and environ.get(n))}
    if len(os.sched_getaffinity(0)) == os.cpu_count():  # else the launcher has given out the cores
        changed |= env.default_omp_threads(environ, numbers.local_size)
    return changed | _unbuffered(environ)


def _unbuffered(environ: Mapping[str, str]) -> dict[str, str]:
    # A pipe is not a terminal: Python would keep what it prints until much later.
    return {"PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED") or "1"}


def _log_root(request: WrapRequest, job: str) -> Path | None:
    """Make the directory of this job's log files, which all its ranks share."""
    if request.log_dir is None:
        return None
    root = Path(request.log_dir, statedir.file_name(job or "wrap")).absolute()
    try:
        os.makedirs(root.parent, exist_ok=True)
        with own_directory(root, make=True) as made:
            made.chmod(0o700)
    except OSError as error:
        raise UsageError(
            f"--log-dir {request.log_dir}: cannot create a directory there: {error.strerror}",
            code="E-LOG-DIR",
        ) from error
    return root


def _log_plan(
    request: WrapRequest, local_rank: int, log_root: Path | None, environ: Mapping[str, str]
) -> LogPlan:
    """Return the plan of the one rank here, which the pump knows by its global rank."""
    redirects = request.redirects.of(local_rank)
    tee = request.tee.of(local_rank)
    template = environ.get(env.LOG_PREFIX_TEMPLATE)
    if template:
        template = string.Template(template).safe_substitute(local_rank=local_rank)
    return LogPlan(
        log_root=log_root,
        redirects=lambda rank: redirects,
        tee=lambda rank: tee,
        prefix_template=template,
        role=request.role,
        at_once=False,
    )
