"""The six numbers of a rank, and where ranks meet whose launcher hosts no store.

The numbers are checked, read from a launcher's variables, and derived where that is certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from elaunch import env
from elaunch.errors import PlacementError
from elaunch.hosts import LOOPBACK
from elaunch.launchers import table
from elaunch.launchers.table import LauncherNames, number


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
    names = table.TORCH
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
        local_size = table.slurm_local_size(environ, node_rank)
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
        addr = next(iter(table.slurm_hosts(environ)), "")
    if not addr:
        raise PlacementError(
            f"MASTER_ADDR is not set, and {names.title} does not say where rank 0 of "
            f"{numbers.cross_size} nodes is: give its address, `mpirun -x MASTER_ADDR=HOST …` or "
            "`elaunch wrap --master-addr HOST …`"
        )
    port = given_port(environ)
    job = table.job_name(names, environ)
    if port is None and not job:
        raise PlacementError(
            f"MASTER_PORT is not set, and {names.title} gives the job no name to make a port of: "
            "set it, the same for all ranks, or give `elaunch wrap --master-port`"
        )
    return addr, port or table.derived_port(job)


def given_port(environ: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT, None where it is not set; raises PlacementError for no port."""
    port = number(environ, ("MASTER_PORT",))
    if port is not None and not 0 < port < 65536:
        raise PlacementError(f"MASTER_PORT is {port}; ports go from 1 to 65535")
    return port
