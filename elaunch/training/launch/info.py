"""What the launcher set for this process: run, round, nodes, slots, and what to resume from.

All of it is read from the environment: no process is asked, no rank waits for another, and
torch is not imported. It stays the same for as long as the process lives.

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

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaunch.env import HPARAMS, INIT_FROM
from elaunch.errors import PlacementError
from elaunch.hosts import LOOPBACK
from elaunch.launchers import table
from elaunch.training.launch import placement
from elaunch.training.launch.placement import Launcher, Placement


@dataclass(frozen=True)
class Info:
    """What the launcher set for this process; the same in one round, whenever it is asked.

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
    here = placement.current(environ) if here is None else here
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
        addrs = tuple(table.slurm_hosts(environ))
    if len(addrs) == here.cross_size:
        return addrs
    return (LOOPBACK,) if here.cross_size == 1 else ()
