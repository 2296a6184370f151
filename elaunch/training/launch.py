"""Where this process stands in its job, and where the job's ranks meet.

Read from what the launcher set, or given as numbers, and checked; the error names the value that
does not fit. Nothing here uses the network.

==========  ===============================  ==================================================
launcher    found by                         where the ranks meet
==========  ===============================  ==================================================
elaunch     ELAUNCH_RUN_ID                   the round's store, hosted by elaunch
torchrun    RANK … , TORCHELASTIC_RUN_ID     MASTER_ADDR:MASTER_PORT, hosted by torchrun or, without
                                             TORCHELASTIC_USE_AGENT_STORE=True, by rank 0
mpi, slurm  elaunch.launchers                MASTER_ADDR:MASTER_PORT if set, else 127.0.0.1 or the
                                             step's first host, and a port made of the job's id
explicit    numbers that the script gives    chief_ip:chief_port, else the launcher's store, else on
                                             one node a port made of the process that started all
alone       none of these                    nowhere: one rank
==========  ===============================  ==================================================

On several nodes under mpirun nothing says where rank 0 is: MASTER_ADDR has to be given. Which node
a rank is on follows from equal nodes that are filled one after the other; where they are not, some
rank sees it (its own numbers do not fit), and GROUP_RANK and GROUP_WORLD_SIZE have to be given.

A script sees it as :func:`info`: run, round, nodes, slots, and what to resume from. No process is
asked for it, no rank waits for another, and torch is not imported. It stays the same for as long as
the process lives, unless that goes on in another round (elaunch.training.steps.world).

=======================  ===========================================================
Determined's ClusterInfo  here
=======================  ===========================================================
slot_ids                 ``slots`` (their number), ``slot_ids`` (their local ranks)
container_addrs          ``node_addrs``
container_rank           ``node_rank``
latest_checkpoint        ``resume_from``, or :func:`latest_checkpoint`
trial.trial_id           ``run_id``
trial.hparams            ``hparams``
=======================  ===========================================================
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from elaunch import env, launchers
from elaunch.env import HPARAMS, INIT_FROM
from elaunch.errors import PlacementError
from elaunch.hosts import LOOPBACK
from elaunch.launchers import (
    LauncherNames,
    Numbers,
    first_set,
    given_port,
    launcher_numbers,
    meeting_point,
    number,
    torch_numbers,
)
from elaunch.proc import process_name

Launcher = Literal["elaunch", "torchrun", "mpi", "slurm", "explicit", "alone"]


class Placement(NamedTuple):
    """Where this process stands; ``cross`` is its node among the nodes (torchrun's GROUP).

    ``store`` is where the round's TCPStore is or is to be; None for one rank. ``hosts_store``:
    nobody hosts it for the ranks, so that rank 0 does. ``scope`` sets this job and this round apart
    from every other in the same store. ``addr`` is this node's own address for others, empty where
    it is not known. ``secret`` is known to the job's processes only; None where there is none.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    store: tuple[str, int] | None
    hosts_store: bool
    scope: str
    run_id: str
    round: int
    addr: str
    secret: bytes | None


def current(environ: Mapping[str, str]) -> Placement:
    """Return where the launcher that started this process put it; alone if there was none.

    Torch's variables come first: set by hand under another launcher, they are meant.

    Raises PlacementError if a launcher's variables are incomplete or contradict each other.
    """
    if first_set(environ, ("RANK", "TORCHELASTIC_RUN_ID")):
        return from_torch(environ)
    names = launchers.find(environ, "mpi", "slurm")
    if names is None or (names.family == "slurm" and number(environ, names.size) == 1):
        return alone(environ)
    return _of_launcher(names, environ)


def alone(environ: Mapping[str, str]) -> Placement:
    """Return the placement of a process that is the whole job."""
    return _placement("alone", Numbers(0, 1, 0, 1, 0, 1), None, "", environ)


def from_torch(environ: Mapping[str, str]) -> Placement:
    """Return the placement that torchrun, ``elaunch run`` or ``elaunch wrap`` set.

    Raises PlacementError that names a missing or wrong variable.
    """
    numbers = torch_numbers(environ)
    launcher = _who_set_torch(environ, numbers)
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    found = _placement(launcher, numbers, _given_store(environ), job, environ)
    hosted = launcher == "elaunch" or environ.get(env.AGENT_STORE) == "True"
    return found._replace(hosts_store=found.hosts_store and not hosted)


def explicit(
    given: Mapping[str, Any],
    chief_ip: str | None,
    chief_port: int | None,
    environ: Mapping[str, str],
) -> Placement:
    """Return the placement that a script gives in numbers; several nodes need ``chief_ip``.

    ``given`` has the six numbers by name; ``local_size`` may be a sequence of one for each node.
    Without ``chief_port`` the ranks meet in the store of the launcher that started them, or of the
    launcher that started what started them; the numbers need not be those of that launcher. Where
    there is none, ranks of one node that one process has started find a port by that.

    Raises PlacementError where there is no such store, for a bad address or port, and for numbers
    that contradict each other.
    """
    numbers = _by_hand(given)
    if numbers.cross_size > 1 and not chief_ip:
        raise PlacementError(
            f"chief_ip is missing: cross_size is {numbers.cross_size}, so the other nodes have to "
            "know the address of rank 0's"
        )
    if chief_port is not None and not 0 < chief_port < 65536:
        raise PlacementError(f"chief_port is {chief_port}; ports go from 1 to 65535")
    outer = environ.get("ELAUNCH_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID", "")
    hosted = chief_port is None and (
        bool(environ.get("ELAUNCH_RUN_ID")) or environ.get(env.AGENT_STORE) == "True"
    )
    store: tuple[str, int] | None
    if numbers.size == 1:
        store = None
    elif hosted:
        store = _given_store(environ)
    else:
        store = (chief_ip or LOOPBACK, chief_port or _explicit_port(numbers, environ))
    found = _placement("explicit", numbers, store, outer, environ)
    # The processes of this job may also be in a context of the launcher's own numbers.
    scope = f"{found.scope}/{numbers.size}by{numbers.cross_size}"
    return found._replace(scope=scope, hosts_store=found.hosts_store and not hosted)


def _by_hand(given: Mapping[str, Any]) -> Numbers:
    """Return the numbers that a script gives, once they fit all nodes and not only this one.

    ``local_size`` is one number, or a sequence of one for each node. Raises PlacementError.
    """
    sizes, cross_size, node = given["local_size"], given["cross_size"], given["cross_rank"]
    if not isinstance(sizes, Sequence):
        numbers = Numbers(**given)
        if sizes * cross_size != numbers.size:
            raise PlacementError(
                f"size is {numbers.size}, but local_size {sizes} × cross_size {cross_size} is "
                f"{sizes * cross_size}; where nodes have different numbers of ranks, give "
                f"local_size as a list of {cross_size} numbers, one for each node"
            )
        return numbers
    if len(sizes) != cross_size:
        raise PlacementError(
            f"local_size is {sizes!r}, {len(sizes)} numbers, but cross_size is {cross_size}: give "
            "one number for each node"
        )
    mine = sizes[node] if isinstance(node, int) and 0 <= node < cross_size else 1
    numbers = Numbers(**{**given, "local_size": mine})
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PlacementError(f"local_size is {sizes!r}, and {size!r} is no number of ranks")
    if sum(sizes) != numbers.size:
        raise PlacementError(
            f"local_size is {sizes!r}, together {sum(sizes)}, but size is {numbers.size}"
        )
    if numbers.rank != (filled := sum(sizes[:node]) + numbers.local_rank):
        raise PlacementError(
            f"rank is {numbers.rank}, but local_size {sizes!r} and local_rank {numbers.local_rank} "
            f"on node {node} (cross_rank) make it {filled}"
        )
    return numbers


def _explicit_port(numbers: Numbers, environ: Mapping[str, str]) -> int:
    port = given_port(environ)
    if port is not None:
        return port
    names = launchers.find(environ, "mpi", "slurm")
    job = launchers.job_name(names, environ) if names else ""
    if not job and numbers.cross_size == 1:
        job = environ.get(env.STARTER) or process_name(os.getppid())
    if not job:
        raise PlacementError(
            "chief_port is missing: give a port that is free on rank 0's node, or set MASTER_PORT, "
            "the same for all ranks"
        )
    return launchers.derived_port(job)


def _who_set_torch(environ: Mapping[str, str], numbers: Numbers) -> Launcher:
    if environ.get("ELAUNCH_RUN_ID"):
        return "elaunch"
    if environ.get(env.AGENT_STORE):
        return "torchrun"
    names = launchers.find(environ, "mpi", "slurm")
    if names is not None and number(environ, names.rank) == numbers.rank:
        return "slurm" if names.family == "slurm" else "mpi"
    return "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "explicit"


def _given_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if number(environ, ("WORLD_SIZE",)) == 1 and not environ.get("MASTER_PORT"):
        return None
    missing = first_unset(environ, ("MASTER_ADDR", "MASTER_PORT"))
    port = given_port(environ)
    if missing or port is None:
        raise PlacementError(
            f"{missing} is not set: torchrun, `elaunch run` and `elaunch wrap` set it"
        )
    return environ["MASTER_ADDR"], port


def first_unset(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first of ``names`` that has no value, or an empty string."""
    return next((name for name in names if not environ.get(name)), "")


def _of_launcher(names: LauncherNames, environ: Mapping[str, str]) -> Placement:
    numbers = launcher_numbers(names, environ)
    job = launchers.job_name(names, environ)
    store = meeting_point(names, numbers, environ)
    return _placement("slurm" if names.family == "slurm" else "mpi", numbers, store, job, environ)


def _placement(
    launcher: Launcher,
    numbers: Numbers,
    store: tuple[str, int] | None,
    job: str,
    environ: Mapping[str, str],
) -> Placement:
    inside = launcher in ("elaunch", "explicit") and environ.get("ELAUNCH_RUN_ID")
    run_id = environ["ELAUNCH_RUN_ID"] if inside else job
    round_name = "ELAUNCH_ROUND" if inside else "TORCHELASTIC_RESTART_COUNT"
    in_rounds = launcher in ("elaunch", "torchrun", "explicit")
    round_number = (number(environ, (round_name,)) or 0) if in_rounds else 0
    several = numbers.size > 1
    return Placement(
        launcher=launcher,
        **vars(numbers),
        store=store if several else None,
        hosts_store=several,
        # torchrun counts no restart when a node joins or leaves, and keeps the store.
        scope=f"{run_id or launcher}/{round_number}"
        + ("" if inside or not several else f".{numbers.size}"),
        run_id=run_id,
        round=round_number,
        addr=_own_addr(environ, numbers) if launcher == "elaunch" else "",
        secret=_secret(environ, launcher),
    )


def _own_addr(environ: Mapping[str, str], numbers: Numbers) -> str:
    addrs = [addr for addr in environ.get("ELAUNCH_NODE_ADDRS", "").split(",") if addr]
    return addrs[numbers.cross_rank] if len(addrs) == numbers.cross_size else ""


def _secret(environ: Mapping[str, str], launcher: Launcher) -> bytes | None:
    key = environ.get(env.CHANNEL_KEY, "")
    if key:
        try:
            return bytes.fromhex(key)
        except ValueError:
            raise PlacementError(f"{env.CHANNEL_KEY} is not in hexadecimal digits") from None
    names = launchers.find(environ, "mpi") if launcher == "mpi" else None
    shared = environ.get(names.secret, "") if names else ""
    return hashlib.sha256(shared.encode()).digest() if shared else None


@dataclass(frozen=True)
class Info:
    """This process's place in its job, as the launcher has set it; the same all through a round.

    Attributes:
        run_id: the run's id; empty where the launcher gives none.
        round: 0 at the first start, one more at each restart.
        restart_reason: why this round began; empty in round 0 and under other launchers.
        node_addrs: addresses of all nodes, in the order of their node ranks. Under other launchers
            they are not all known before the ranks have met (``ctx.distributed.node_addrs`` then
            has them): those of Slurm's step, loopback on one node, else none.
        node_rank: this node's place in ``node_addrs`` (torchrun's GROUP_RANK).
        nodes: the number of nodes.
        slots: workers on this node.
        rank, local_rank, world_size: this worker's place.
        resume_from: the checkpoint that all ranks of this round resume from; None at a fresh start
            and under other launchers. A Path, or the text of its URL.
        resume_step: its step; None where it has none.
        init_from: what --init-from names, another run's checkpoint that this run begins from at
            step 0 while it has none of its own; None without it.
        checkpoint_dir: ``--checkpoint-dir``, a Path or the text of a URL; None without it and under
            other launchers.
        launcher: who started this process: ``elaunch``, ``torchrun``, ``mpi``, ``slurm``,
            ``explicit`` (torch's variables, set by hand), ``alone``.
        hparams: ``hyperparameters`` of the job file (``elaunch run -f``); empty without.
    """

    run_id: str
    round: int
    restart_reason: str
    node_addrs: tuple[str, ...]
    node_rank: int
    nodes: int
    slots: int
    rank: int
    local_rank: int
    world_size: int
    resume_from: Path | str | None
    resume_step: int | None
    init_from: Path | str | None
    checkpoint_dir: Path | str | None
    launcher: Launcher
    hparams: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_warm_start(self) -> bool:
        """Whether ``resume_from`` is another run's: what ``init_from`` names, with step 0."""
        return self.init_from is not None and self.resume_from == self.init_from

    @property
    def slot_ids(self) -> tuple[int, ...]:
        """The local ranks of this node's slots."""
        return tuple(range(self.slots))


def info() -> Info:
    """Return what the launcher set for this process.

    Any rank may call it alone, before or without ``elaunch.init()``; it does not block.

    Raises PlacementError if a launcher's variables are incomplete or contradict each other.
    """
    return read(os.environ)


def latest_checkpoint() -> Path | str | None:
    """Return the checkpoint to resume from, chosen once for the whole round.

    The agents chose it before the round began: it is the same on all ranks, and stays the same
    while newer ones are written. None at a fresh start and under other launchers; text for what is
    at a URL. Any rank may call it alone; it does not block.
    """
    return _resume_from(os.environ)


def read(environ: Mapping[str, str], here: Placement | None = None) -> Info:
    """Return the facts of ``environ``; ``here`` where the ranks come from elsewhere."""
    here = current(environ) if here is None else here
    by_agent = bool(environ.get("ELAUNCH_RUN_ID"))
    resume_from = _resume_from(environ)
    directory = environ.get("ELAUNCH_CHECKPOINT_DIR", "")
    init_from = environ.get(INIT_FROM, "")
    return Info(
        run_id=here.run_id,
        round=here.round,
        restart_reason=environ.get("ELAUNCH_RESTART_REASON", "") if by_agent else "",
        node_addrs=_node_addrs(environ, here, by_agent),
        node_rank=here.cross_rank,
        nodes=here.cross_size,
        slots=here.local_size,
        rank=here.rank,
        local_rank=here.local_rank,
        world_size=here.size,
        resume_from=resume_from,
        resume_step=None if resume_from is None else _step(environ),
        init_from=_path_or_url(init_from) if init_from else None,
        checkpoint_dir=_path_or_url(directory) if by_agent and directory else None,
        launcher=here.launcher,
        hparams=_hparams(environ),
    )


def _hparams(environ: Mapping[str, str]) -> Mapping[str, Any]:
    text = environ.get(HPARAMS, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PlacementError(f"{HPARAMS}={text[:80]!r} is not an object of JSON")
    return found


def _path_or_url(text: str) -> Path | str:
    return text if "://" in text else Path(text)


def _resume_from(environ: Mapping[str, str]) -> Path | str | None:
    chosen = environ.get("ELAUNCH_RESUME_FROM", "") if environ.get("ELAUNCH_RUN_ID") else ""
    return _path_or_url(chosen) if chosen else None


def _step(environ: Mapping[str, str]) -> int | None:
    step = environ.get("ELAUNCH_RESUME_STEP", "")
    if not step:
        return None
    try:
        return int(step)
    except ValueError:
        raise PlacementError(f"ELAUNCH_RESUME_STEP={step!r} is not a whole number") from None


def _node_addrs(environ: Mapping[str, str], here: Placement, by_agent: bool) -> tuple[str, ...]:
    """Return what is known of all nodes' addresses without asking other ranks."""
    addrs: tuple[str, ...] = ()
    if by_agent:
        addrs = tuple(a for a in environ.get("ELAUNCH_NODE_ADDRS", "").split(",") if a)
    elif here.launcher == "slurm":
        addrs = tuple(launchers.slurm_hosts(environ))
    if len(addrs) == here.cross_size:
        return addrs
    return (LOOPBACK,) if here.cross_size == 1 else ()
