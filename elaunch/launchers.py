"""The launcher that has started this process, and the rank and size that it gives.

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

The six numbers of a rank are checked, read from those variables, and derived where that is certain.
``meeting_point`` finds where ranks meet whose launcher hosts no store.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, Literal, NamedTuple

from elaunch import env
from elaunch.errors import PlacementError
from elaunch.hosts import LOOPBACK

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


def rank_names() -> list[str]:
    """Return each rank variable once, in the order of the table."""
    return list(dict.fromkeys(name for x in LAUNCHERS for name in x.rank))


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


@dataclass(frozen=True)
class Numbers:
    """A rank's place among all ranks, among those of its node (local), and its node's (cross).

    Raises PlacementError, at once, if they contradict each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise PlacementError(f"{name} is {value!r}, which is no whole number")
        for kind in ("", "local_", "cross_"):
            self._check_pair(f"{kind}rank", f"{kind}size")
        self._check_whole()

    def _check_pair(self, rank_name: str, size_name: str) -> None:
        rank, size = getattr(self, rank_name), getattr(self, size_name)
        if size < 1:
            raise PlacementError(f"{size_name} is {size}; it is 1 or more")
        if not 0 <= rank < size:
            raise PlacementError(
                f"{rank_name} is {rank}, but {size_name} is {size}: "
                f"{rank_name} goes from 0 to {size - 1}"
            )

    def _check_whole(self) -> None:
        size, local_size, cross_size = self.size, self.local_size, self.cross_size
        if local_size > size:
            raise PlacementError(f"local_size is {local_size}, more than size, which is {size}")
        if cross_size > size:
            raise PlacementError(
                f"cross_size is {cross_size}, more nodes than ranks: size is {size}"
            )
        if (cross_size == 1) != (local_size == size):
            raise PlacementError(
                f"cross_size is {cross_size} and local_size is {local_size}, but size is {size}: "
                + (
                    "all ranks of one node are local"
                    if cross_size == 1
                    else "the ranks of the other nodes are missing"
                )
            )
        if local_size + cross_size - 1 > size:
            raise PlacementError(
                f"local_size is {local_size} and cross_size is {cross_size}: that is at least "
                f"{local_size + cross_size - 1} ranks, but size is {size}"
            )
        filled = self.cross_rank * local_size + self.local_rank
        if local_size * cross_size == size and self.rank != filled:
            raise PlacementError(
                f"rank is {self.rank}, but cross_rank {self.cross_rank} × local_size {local_size} "
                f"+ local_rank {self.local_rank} is {filled}"
            )


def torch_numbers(environ: Mapping[str, str]) -> Numbers:
    """Return the numbers that torchrun, ``elaunch run`` or ``elaunch wrap`` set.

    With ``--virtual-local-rank`` LOCAL_RANK is 0 for all; the local rank returned is the real one.

    Raises PlacementError that names the first variable that is missing or wrong.
    """
    names = TORCH
    rank, size, local_rank, local_size, node_rank, nodes = (
        _needed(environ, field)
        for field in (
            names.rank,
            names.size,
            names.local_rank,
            names.local_size,
            names.node_rank,
            names.nodes,
        )
    )
    if local_rank == 0 and len(env.named_devices(environ.get(env.VISIBLE_DEVICES, ""))) == 1:
        if local_size * nodes == size:
            real = rank - node_rank * local_size
        else:
            # Both launchers call the directory of a worker's error file by its local rank.
            directory = PurePath(environ.get(env.ERROR_FILE, "")).parent.name
            real = int(directory) if directory.isdecimal() else 0
        local_rank = real if 0 <= real < local_size else 0
    return Numbers(rank, size, local_rank, local_size, node_rank, nodes)


def _needed(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    value = number(environ, names)
    if value is None:
        raise PlacementError(
            f"{names[0]} is not set: torchrun, `elaunch run` and `elaunch wrap` set it; start the "
            "script with one of them, or give the numbers to DistributedContext"
        )
    return value


def launcher_numbers(
    names: LauncherNames, environ: Mapping[str, str], rank: int | None = None
) -> Numbers:
    """Return the numbers that a launcher of the table set; what it does not set is derived.

    Args:
        names: the launcher.
        environ: what it set.
        rank: the rank where it is known from elsewhere.

    Raises PlacementError that names the variable to give where nothing gives it for certain.
    """
    rank = number(environ, names.rank) if rank is None else rank
    size = _known(environ, names, "size", "WORLD_SIZE")
    if rank is None:
        raise PlacementError(f"{names.rank[0]} is not set: {names.title} sets it")
    node_rank, nodes = number(environ, names.node_rank), number(environ, names.nodes)
    local_size = number(environ, names.local_size)
    if names.family == "slurm" and node_rank is not None:
        local_size = slurm_local_size(environ, node_rank)
    if local_size is None and (size == 1 or nodes == 1):
        local_size = size
    local_rank = number(environ, names.local_rank)
    if local_rank is None and local_size == size:
        local_rank = rank
    if local_size is None:
        local_size = _known(environ, names, "local_size", "LOCAL_WORLD_SIZE")
    if local_rank is None:
        local_rank = _known(environ, names, "local_rank", "LOCAL_RANK")
    if node_rank is None or nodes is None:
        node_rank, nodes = _node(environ, (rank, size, local_rank, local_size), nodes)
    return Numbers(rank, size, local_rank, local_size, node_rank, nodes)


def _known(environ: Mapping[str, str], names: LauncherNames, field: str, own_name: str) -> int:
    """Return a number from the launcher's variable, or from the one that a user sets instead."""
    own = getattr(names, field)
    value = number(environ, (*own, own_name))
    if value is None:
        sets = f"{own[0]} is not set, which {names.title} sets" if own else ""
        raise PlacementError(
            f"{sets or names.title + ' does not say the ' + field}; set {own_name} for each rank"
        )
    return value


def _node(
    environ: Mapping[str, str], four: tuple[int, int, int, int], nodes: int | None
) -> tuple[int, int]:
    """Return the node's rank and the number of nodes, where the nodes are filled one by one.

    Where the number of nodes is known, no other layout passes unseen: nodes of different sizes have
    one on which ``local_size * nodes`` is not ``size``; of two nodes that are not filled one after
    the other, one has a rank that fits neither the first nor the last.
    """
    rank, size, local_rank, local_size = four
    if local_size == size:
        return 0, 1
    if local_size * (nodes or 0) == size and rank % local_size == local_rank:
        return rank // local_size, size // local_size
    before = rank - local_rank
    if nodes == 2 and before in (0, size - local_size):
        return int(before > 0), 2
    given = number(environ, ("GROUP_RANK",)), number(environ, ("GROUP_WORLD_SIZE",))
    if given[0] is not None and given[1] is not None:
        return given[0], given[1]
    raise PlacementError(
        f"which node rank {rank} is on does not follow from local_rank {local_rank}, local_size "
        f"{local_size}, size {size} and {nodes or 'an unknown number of'} nodes (they are unequal, "
        "or not filled one after the other): set GROUP_RANK and GROUP_WORLD_SIZE, the node's rank "
        "and the number of nodes, for each rank"
    )


def meeting_point(
    names: LauncherNames, numbers: Numbers, environ: Mapping[str, str]
) -> tuple[str, int] | None:
    """Return the address and the port at which rank 0 hosts the store; None for one rank.

    Raises PlacementError that names what has to be given where nothing gives it.
    """
    if numbers.size == 1:
        return None
    addr = environ.get("MASTER_ADDR", "")
    if not addr and numbers.cross_size == 1:
        addr = LOOPBACK
    if not addr and names.family == "slurm":
        addr = next(iter(slurm_hosts(environ)), "")
    if not addr:
        raise PlacementError(
            f"MASTER_ADDR is not set, and {names.title} does not say where rank 0 of "
            f"{numbers.cross_size} nodes is: give its address, `mpirun -x MASTER_ADDR=HOST …` or "
            "`elaunch wrap --master-addr HOST …`"
        )
    port = given_port(environ)
    job = job_name(names, environ)
    if port is None and not job:
        raise PlacementError(
            f"MASTER_PORT is not set, and {names.title} gives the job no name to make a port of: "
            "set it, the same for all ranks, or give `elaunch wrap --master-port`"
        )
    return addr, port or derived_port(job)


def given_port(environ: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT, None where it is not set; raises PlacementError for no port."""
    port = number(environ, ("MASTER_PORT",))
    if port is not None and not 0 < port < 65536:
        raise PlacementError(f"MASTER_PORT is {port}; ports go from 1 to 65535")
    return port
