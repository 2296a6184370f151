"""Which checkpoint a round starts from, and whether all nodes reach it. Pure.

An agent whose workers have ended publishes which shards of saves that are not committed it has in
memory (``NodeStatus.held``). A save of which the nodes of the next round have every shard is as
good as a checkpoint: the round resumes from it, and its write to the disk goes on beside the round.

Each agent, before it joins, writes an empty file to the checkpoint directory and publishes its name
(``NodeStatus.probe``). The search for the checkpoint of a round, on the coordinator's node, also
looks for the files of the round's newcomers. Those of the round before were looked for already.

======================  ============================================================================
not seen                what happens
======================  ============================================================================
before the first round  the job ends with exit code 2, on all nodes, and no worker was started
later                   the newcomer is left out and ends (``Plan.not_sharing``); the job goes on
======================  ============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from elaunch.errors import UsageError
from elaunch.rendezvous import text
from elaunch.rendezvous.decide.view import Rules, View
from elaunch.rendezvous.plan import HeldShards, NodeStatus, PlanCheckpoint
from elaunch.text import count, listed


def progressed(view: View) -> bool:
    """Whether a newer checkpoint is known of than the one that the plan's round resumed from."""
    before, found = view.plan.checkpoint, newest(view)
    return found is not None and found.step > (-1 if before is None else before.step)


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


NOT_SHARED = UsageError.exit_code


def probes(view: View, names: Iterable[str]) -> frozenset[str]:
    """Return the names of the files that newcomers among these agents have written."""
    before = {node.name for node in view.plan.nodes}
    records = [view.present[name].record for name in names if name not in before]
    return frozenset(record.probe for record in records if record.probe)


def is_unknown(view: View, names: Iterable[str]) -> bool:
    """Return whether the last search has not looked for all their files, or not on all of them."""
    found = view.search_result
    if found is None or found.again:
        return True
    if found.problem:
        return False
    names = frozenset(names)
    if found.ready is not None and not names <= found.ready:
        return True
    return not probes(view, names) <= found.probes


def not_sharing(view: View, names: Iterable[str]) -> tuple[str, ...]:
    """Return the newcomers whose files were looked for and not seen."""
    if view.search_result is None:
        return ()
    unseen = view.search_result.unseen
    return tuple(name for name in names if view.present[name].record.probe in unseen)


def with_sharing_nodes_only(view: View) -> View:
    """Return the view without newcomers whose directory is another one; the plan names them."""
    if view.plan.round < 0:
        return view
    found = not_sharing(view, view.present)
    if not found:
        return view
    present = {name: one for name, one in view.present.items() if name not in found}
    return replace(view, present=present, plan=replace(view.plan, not_sharing=found))


def sharing_problem(view: View, found: Iterable[str]) -> str:
    """Return the error for a first round: the directory, the nodes on either side, the fix."""
    records = [view.present[name].record for name in found]
    own = view.present[view.me].record if view.me in view.present else None
    here = f" on {_directory(own)}" if own is not None else ""
    return (
        "--checkpoint-dir is not one directory on all nodes: what "
        f"{_directories(records)} has written there is not seen{here}; mount one file system on "
        "all of them, or give --checkpoint-local if each node is to keep its own checkpoints"
    )


def _directory(record: NodeStatus) -> str:
    directory = record.facts.get("checkpoint_dir", "")
    return f"{text.node(record)} in {directory}" if directory else text.node(record)


def _directories(records: list[NodeStatus]) -> str:
    return listed([_directory(record) for record in records])
