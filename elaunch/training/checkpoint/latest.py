"""The result of ``latest()`` where no agent has chosen one on the disk: see ``elaunch.init()``.

Agents may have chosen one that they have in memory, and still write: the ranks put together what
their agents know of it. Where no agent has chosen, rank 0 looks (with a directory on each node,
each node's first rank does), by documents and sizes; contents are compared when the checkpoint is
read. It makes no directory, and holds the lock only while it brings to an end what an earlier job
left in stages. A script that has saved nothing yet pays one look at a name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elaunch import env
from elaunch.errors import CheckpointError, ElaunchError
from elaunch.training.distributed import INIT, for_purpose

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.storage import Committed, Location, Storage
    from elaunch.training.agentlink import AgentLink
    from elaunch.training.distributed import DistributedContext
    from elaunch.training.launch import Info

log = logging.getLogger("elaunch")


class Decided(NamedTuple):
    """The result, the same on all ranks: a checkpoint, or why none could be looked for."""

    found: Committed | None = None
    problem: str = ""

    def latest(self, place: Callable[[], Location]) -> Committed | None:
        """Return the checkpoint as this node calls it; CheckpointError with the problem."""
        if self.problem:
            raise CheckpointError(f"looking for the latest checkpoint: {self.problem}")
        if self.found is None:
            return None
        where = place()
        if isinstance(where, str):
            return self.found
        return replace(self.found, place=where / self.found.name)


def has_chosen(info: Info) -> bool:
    """Whether agents have chosen the latest: they also lock the directory and finish its stages."""
    return info.launcher == "elaunch" and info.checkpoint_dir is not None


def decide(
    distributed: DistributedContext,
    info: Info,
    run_id: str,
    given: bool,
    link: AgentLink | None = None,
) -> Decided | None:
    """Return what ``latest()`` is; None where agents have chosen one that is on the disk.

    ALL ranks call it together. ``given``: the run id is the same when the job is started again;
    else any run's count. ``link`` leads to this node's agent.
    """
    if has_chosen(info):
        uuid = os.environ.get(env.RESUME_UUID, "")
        return _in_memory(distributed, info, uuid, link) if uuid else None
    mine = Decided()
    if distributed.rank == 0 or distributed.local_rank == 0:
        try:
            mine = _look(distributed, info, run_id, given)
        except (ElaunchError, OSError, ImportError) as error:
            mine = Decided(problem=f"rank {distributed.rank}: {error}")
    decisions = for_purpose(distributed, INIT).allgather(mine)
    if problem := next((one.problem for one in decisions if one.problem), ""):
        return Decided(problem=problem)
    found = [one.found for one in decisions if one.found is not None]
    return Decided(max(found, key=lambda one: one.age, default=None))


def _in_memory(
    distributed: DistributedContext, info: Info, uuid: str, link: AgentLink | None
) -> Decided | None:
    """Return what the agents have in memory as the checkpoint that they write at this time.

    ALL ranks call it together; the first of each node asks its agent.
    """
    from elaunch.checkpoint.assemble import describe, merge_metadata
    from elaunch.wire.worker import ANSWER_S, StagedShard, shard_from_json

    mine, problem = list[StagedShard](), ""
    if distributed.local_rank == 0 and link is not None:
        try:
            answer, _ = link.ask("resumed", ANSWER_S, uuid=uuid)
            mine = [shard_from_json(shard) for shard in answer["shards"]]
        except (OSError, ValueError, KeyError) as error:
            problem = f"rank {distributed.rank}: what its agent has in memory: {error}"
    everyone: list[tuple[list[StagedShard], str]] = for_purpose(distributed, INIT).allgather(
        (mine, problem)
    )
    if problem := next((one for _, one in everyone if one), ""):
        return Decided(problem=problem)
    shards = {shard.header.rank: shard for theirs, _ in everyone for shard in theirs}
    lead = shards.get(0)
    if lead is None or len(shards) != lead.header.world_size:
        return None  # an agent is gone since; it may be on the disk
    metadata = merge_metadata({rank: shard.header.metadata for rank, shard in shards.items()})
    document = {
        **lead.extra,
        "step": lead.stage.step,
        "round": lead.stage.round,
        "uuid": uuid,
        "run_id": lead.header.run_id,
        "world_size": lead.header.world_size,
        "metadata": metadata,
        "size": sum(shard.size for shard in shards.values()),
    }
    assert info.resume_from is not None  # named with its uuid
    return Decided(describe(info.resume_from, lead.stage.final, document))


def newest(
    storage: Storage, run_id: str | None, verify: Callable[[Committed], None] | None = None
) -> Committed | None:
    """Return the newest checkpoint of a run that is whole; ``run_id`` None: of any run.

    ``verify`` raises for one that is not; without it documents and sizes count.
    """
    from elaunch.checkpoint.search.latest import newest_in

    own = (found for found in storage.newest_first() if run_id in (None, found.run_id))
    found, passed = newest_in(own, verify or partial(storage.verify, content=False))
    for one in passed:
        log.warning("an older checkpoint is looked for: %s: %s", one.path, one.reason)
    return found


def _look(distributed: DistributedContext, info: Info, run_id: str, given: bool) -> Decided:
    if not _is_there(run_id or info.run_id, os.environ):
        return Decided()
    from elaunch.checkpoint.storage.storage import open_storage
    from elaunch.training.checkpoint import where

    place, _ = where.location_of(info, run_id, os.environ)
    local = where.is_local(info, os.environ)
    if distributed.rank != 0 and not local:
        return Decided()
    storage = open_storage(place, local)
    if info.launcher != "elaunch":
        where.finish(storage, run_id, given)
    run = run_id if given else None
    if not local:
        return Decided(newest(storage, run))
    # What a node lacks of it, the others may have; that is seen when it is read.
    own = (found for found in storage.newest_first() if run in (None, found.run_id))
    return Decided(next(own, None))


def _is_there(run_id: str, environ: Mapping[str, str]) -> bool:
    """Whether there may be checkpoints; others say what else is wrong with it."""
    from elaunch.checkpoint.search.locations import default_location

    given = environ.get(env.CHECKPOINT_DIR, "")
    place = Path(given) if given else default_location(run_id, environ)
    return "://" in given or (place is not None and place.is_dir())
