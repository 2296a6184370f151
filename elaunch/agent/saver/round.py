"""What the saver works with: its plan, and the round that runs. Frozen."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elaunch.agent.policy import events
from elaunch.agent.policy.actions import StartRound
from elaunch.agent.policy.state import State
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.config import Settings
from elaunch.rendezvous.plan import Plan

if TYPE_CHECKING:
    from elaunch.agent.saver.peers import SaverPeers


@dataclass(frozen=True)
class SaverPlan:
    """What the saver works with.

    Attributes:
        settings: of the run.
        post: sends events to the loop; any thread may call.
        finishing: has the directory's lock.
        read_plan: reads the plan from the store, now, and never waits for ever; raises StoreError
            or RecordError. None in a job of one node.
        peers: sends reports and shards to the other nodes' agents. None in a job of one node.
    """

    settings: Settings
    post: Callable[[events.Event], None]
    finishing: DirectoryFinisher
    read_plan: Callable[[], Plan] | None = None
    peers: SaverPeers | None = None


@dataclass(frozen=True)
class SaverRound:
    """What the saver knows of the round that runs.

    Attributes:
        round: its number.
        first_rank, nproc: of this node's workers.
        resumed: the name of the checkpoint that it resumed from, or "".
        plan: of a job of several nodes.
        name: of this node in the plan.
    """

    round: int
    first_rank: int
    nproc: int
    resumed: str = ""
    plan: Plan | None = None
    name: str = ""

    @property
    def own_ranks(self) -> frozenset[int]:
        """The ranks of this node's workers."""
        return frozenset(range(self.first_rank, self.first_rank + self.nproc))

    def node_of(self, rank: int) -> int:
        """Return the node rank of the node that ``rank`` runs on."""
        first = 0
        for node_rank, node in enumerate(self.plan.nodes if self.plan else ()):
            first += node.slots
            if rank < first:
                return node_rank
        return 0


def round_of(state: State, action: StartRound) -> SaverRound:
    """Return what the saver knows of the round that ``action`` begins."""
    resumed = "" if action.checkpoint is None else os.path.basename(str(action.checkpoint.path))
    return SaverRound(
        round=action.round,
        first_rank=action.first_rank,
        nproc=state.limits.nproc,
        resumed=resumed,
        plan=state.plan,
        name=state.name,
    )
