"""The variables by which launchers other than elaunch give a process its place, in one table.

A process belongs to the first launcher of the table whose rank variable and mark it has. The order
matters: mpirun inside a Slurm job leaves Slurm's variables in place, and they are then those of
mpirun's own step; ``srun --mpi=pmi2`` sets ``PMI_RANK`` beside its own, which hold more.

==========  =======================  =====================  ====================  =================
launcher    rank                     size                   local rank, size      node rank, nodes
==========  =======================  =====================  ====================  =================
Open MPI    OMPI_COMM_WORLD_RANK     OMPI_COMM_WORLD_SIZE   …_LOCAL_RANK, …_SIZE  derived
MVAPICH     MV2_COMM_WORLD_RANK      MV2_COMM_WORLD_SIZE    …_LOCAL_RANK, …_SIZE  derived
Hydra       PMI_RANK                 PMI_SIZE               MPI_LOCALRANKID,      derived
                                                            MPI_LOCALNRANKS
Slurm       SLURM_PROCID             SLURM_STEP_NUM_TASKS   SLURM_LOCALID, …      SLURM_NODEID, …
PMI         PMI_RANK                 PMI_SIZE               derived               derived
PMIx        PMIX_RANK                –                      derived               derived
Horovod     HOROVOD_RANK             HOROVOD_SIZE           HOROVOD_LOCAL_…       HOROVOD_CROSS_…
torch       RANK                     WORLD_SIZE             LOCAL_RANK,           GROUP_RANK,
                                                            LOCAL_WORLD_SIZE      GROUP_WORLD_SIZE
==========  =======================  =====================  ====================  =================

``OMPI_COMM_WORLD_NODE_RANK`` is not the rank of the node: it counts the processes on it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from elaunch import env
from elaunch.errors import PlacementError

Family = Literal["mpi", "slurm", "torch"]
FIRST_PORT: Final = 20000
PORTS: Final = 10000
MOST_HOSTS: Final = 100_000
"""A list of hosts that stands for more of them is taken for nonsense."""


class LauncherNames(NamedTuple):
    """The variables of one launcher; of several names the first that is set counts.

    ``mark`` has to be set, too. ``job`` are the variables that distinguish one job from another
    and ``secret`` is a random value that only the job's processes receive.
    """

    title: str
    family: Family
    rank: tuple[str, ...]
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    mark: str = ""
    job: tuple[str, ...] = ()
    secret: str = ""


TORCH: Final = LauncherNames(
    title="torchrun or `elaunch run`",
    family="torch",
    rank=("RANK",),
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
    nodes=("GROUP_WORLD_SIZE",),
    job=("TORCHELASTIC_RUN_ID",),
)
OPEN_MPI: Final = LauncherNames(
    title="mpirun of Open MPI",
    family="mpi",
    rank=(env.OPEN_MPI_RANK,),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    nodes=("OMPI_MCA_orte_num_nodes",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    secret=env.OPEN_MPI_SECRET,
)
SLURM: Final = LauncherNames(
    title="srun",
    family="slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    mark="SLURM_STEP_ID",
)
PMI: Final = LauncherNames(
    title="an MPI launcher with PMI",
    family="mpi",
    rank=("PMI_RANK",),
    size=("PMI_SIZE",),
    job=("PMI_JOBID", "PMI_ID"),
)
LAUNCHERS: Final = (
    OPEN_MPI,
    LauncherNames(
        title="mpirun of MVAPICH",
        family="mpi",
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        job=("MPIRUN_ID", "PMI_ID"),
    ),
    PMI._replace(
        title="mpiexec of MPICH or Intel MPI",
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        mark="MPI_LOCALRANKID",
        job=("PMI_JOBID", "PMI_PORT"),
    ),
    SLURM,
    PMI,
    LauncherNames(
        title="an MPI launcher with PMIx",
        family="mpi",
        rank=("PMIX_RANK",),
        job=("PMIX_NAMESPACE",),
    ),
    LauncherNames(
        title="horovodrun",
        family="mpi",
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        node_rank=("HOROVOD_CROSS_RANK",),
        nodes=("HOROVOD_CROSS_SIZE",),
        job=("HOROVOD_GLOO_RENDEZVOUS_PORT",),
    ),
    TORCH,
)


def find(environ: Mapping[str, str], *families: Family) -> LauncherNames | None:
    """Return the first launcher of the table, or of ``families``, that started this process."""
    for names in LAUNCHERS:
        marked = not names.mark or environ.get(names.mark)
        if (not families or names.family in families) and marked and first_set(environ, names.rank):
            return names
    return None


def rank_names(*families: Family) -> list[str]:
    """Return each rank variable, of ``families`` if given, once and in the order of the table."""
    chosen = (x for x in LAUNCHERS if not families or x.family in families)
    return list(dict.fromkeys(name for x in chosen for name in x.rank))


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of ``names`` that has a value, or an empty string."""
    return next((name for name in names if environ.get(name)), "")


def number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the value of the first of ``names`` that is set; None if none is.

    Raises PlacementError for a value that is no number of 0 or more.
    """
    name = first_set(environ, names)
    if not name:
        return None
    value = environ[name]
    if not (value.isascii() and value.isdigit()):
        raise PlacementError(f"{name}={value!r} is not a number of 0 or more")
    return int(value)


def job_name(names: LauncherNames, environ: Mapping[str, str]) -> str:
    """Return what distinguishes this job from others on the same machines; may be empty."""
    if names.family == "slurm":
        job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
        return f"slurm-{job}.{environ.get('SLURM_STEP_ID', '0')}" if job else ""
    name = first_set(environ, names.job)
    value = environ.get(name, "")
    return f"{names.family}-{value}" if value and names.family != "torch" else value


def derived_port(job: str) -> int:
    """Return a port that all ranks of a job find without a message; 20000 to 29999."""
    return FIRST_PORT + zlib.crc32(job.encode("utf-8", "surrogateescape")) % PORTS


def slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this Slurm step in the order of its nodes; empty if unknown.

    Raises PlacementError for a list that cannot be read.
    """
    name = first_set(environ, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    return hosts_of(environ[name], name) if name else []


def slurm_local_size(environ: Mapping[str, str], node_rank: int) -> int | None:
    """Return how many tasks of this step are on a node: ``2(x3),1`` stands for 2, 2, 2, 1."""
    name = first_set(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if not name:
        return None
    at = 0
    for part in environ[name].split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise PlacementError(f"{name}={environ[name]!r} is not of the form 2(x3),1")
        at += int(found[2] or 1)
        if node_rank < at:
            return int(found[1])
    return None


def hosts_of(text: str, name: str = "the list of hosts") -> list[str]:
    """Expand Slurm's notation for hosts: ``n[1-3,07],m2`` is n1, n2, n3, n07, m2.

    Raises PlacementError, which calls it ``name``, for what is not of that form.
    """
    hosts: list[str] = []
    rest = text
    while rest:
        found = re.match(r"((?:[^\[\],\s]|\[[\d,-]+\])+)(?:,|$)", rest)
        if found is None or rest.endswith(","):
            raise PlacementError(f"{name}={text!r} is not a list of hosts as in n[1-3,7],m2")
        hosts += _expanded(found[1], name, MOST_HOSTS - len(hosts))
        rest = rest[found.end() :]
    return hosts


def _expanded(pattern: str, name: str, most: int) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    tails = _expanded(tail, name, most)
    numbers: list[str] = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        high = high or low
        if not (low.isdigit() and high.isdigit()) or int(high) - int(low) >= most:
            raise PlacementError(f"{name}: {pattern!r} is not of the form n[1-3,7]")
        numbers += [f"{i:0{len(low)}d}" for i in range(int(low), int(high) + 1)]
    return [f"{head}{middle}{end}" for middle in numbers for end in tails]
