"""The newest checkpoint, on the disk or in the agents' memory. Pure.

An agent whose workers have ended publishes which shards of saves that are not committed it has in
memory (``NodeStatus.held``). A save of which the nodes of the next round have every shard is as
good as a checkpoint: the round resumes from it, and its write to the disk goes on beside the round.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from elaunch.rendezvous.decide.view import Rules, View
from elaunch.rendezvous.plan import HeldShards, NodeStatus, PlanCheckpoint
from elaunch.text import count


def newest(view: View, names: Iterable[str] | None = None) -> PlanCheckpoint | None:
    """Return the newest checkpoint, of what the search found and ``names`` (all: None) have.

    Of one that is on the disk by now, that is returned.
    """
    found = view.search_result.checkpoint if view.search_result else None
    members = view.present if names is None else names
    held = _whole([view.present[name].record for name in members])
    if held is None or (found is not None and _age(found) >= (held.step, held.round)):
        return found
    from elaunch.checkpoint.formats.own import FORMAT  # only jobs with such saves need it

    return PlanCheckpoint(held.path, held.step, FORMAT, held.uuid)


def awaited(view: View, rules: Rules, ended_at: float) -> tuple[str, float] | None:
    """Return why, and until when, the search waits for agents that still write out a save.

    The shards of a lost node may be on the disk; with what the others still write they may make a
    checkpoint. A save that can be loaded from memory is not waited for, nor one of which a living
    node has no shard.
    """
    records = [one.record for one in view.present.values() if one.record.held]
    whole = _whole(records)
    best = (-1, -1) if whole is None else (whole.step, whole.round)
    late = [
        record
        for record in records
        if any(
            held.writing and (held.step, held.round) > best and _may_be(held, records, view)
            for held in record.held
        )
    ]
    if not late:
        return None
    return f"waiting for {count(len(late))} to write out a save", ended_at + rules.preempt_grace


def _whole(records: Sequence[NodeStatus]) -> HeldShards | None:
    """Return the newest save of which these agents have every shard."""
    saves = {held.uuid: held for record in records for held in record.held}
    whole = [held for held in saves.values() if not _missing(held, records)]
    return max(whole, key=lambda held: (held.step, held.round), default=None)


def _missing(wanted: HeldShards, records: Sequence[NodeStatus]) -> set[int]:
    there = (held.ranks for record in records for held in record.held if held.uuid == wanted.uuid)
    return set(range(wanted.world_size)).difference(*there)


def _may_be(held: HeldShards, records: Sequence[NodeStatus], view: View) -> bool:
    """Whether only shards of lost nodes are missing: those may be on the disk."""
    if held.round != view.plan.round:
        return True  # who had those ranks is not known any more
    return all(_is_gone(rank, view) for rank in _missing(held, records))


def _is_gone(rank: int, view: View) -> bool:
    first = 0
    for node in view.plan.nodes:
        first += node.slots
        if rank < first:
            return node.name not in view.present
    return True


def _age(found: PlanCheckpoint) -> tuple[int, int]:
    """Return how new a checkpoint is; outside of elaunch's layout the step alone counts."""
    from elaunch.checkpoint import layout

    name = os.path.basename(found.path)
    parsed = layout.parse_step_name(name) or layout.parse_stage_name(name)
    return (found.step, -1) if parsed is None else (parsed[0], parsed[1])
