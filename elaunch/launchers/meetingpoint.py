"""The address and port at which ranks meet whose launcher hosts no store."""

from __future__ import annotations

from collections.abc import Mapping

from elaunch.errors import PlacementError
from elaunch.hosts import LOOPBACK
from elaunch.launchers import table
from elaunch.launchers.ranks import Numbers
from elaunch.launchers.table import LauncherNames, number


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
