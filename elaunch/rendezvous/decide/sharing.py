"""Whether the checkpoint directory is the same one on all nodes. Pure.

Each agent, before it joins, writes an empty file there and publishes its name
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

from collections.abc import Iterable

from msgspec.structs import replace

from elaunch.errors import UsageError
from elaunch.rendezvous import text
from elaunch.rendezvous.decide.view import View
from elaunch.rendezvous.plan import NodeStatus
from elaunch.text import listed

EXIT_CODE = UsageError.exit_code


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


def problem(view: View, found: Iterable[str]) -> str:
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
