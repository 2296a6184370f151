"""Prepares what a job of one node decides by: its own coordinator, and the status that it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import for_all_nodes
from elaunch.agent.workers.group import GroupPlan
from elaunch.rendezvous.coordinatorstate import result_of
from elaunch.rendezvous.decide.view import Search
from elaunch.rendezvous.events import SearchEnded
from elaunch.rendezvous.plan import NodeStatus
from elaunch.rendezvous.standalone import Standalone, rules_of_one


def standalone(
    plan: GroupPlan, say: Callable[[str], None], finishing: DirectoryFinisher
) -> tuple[StatusPublisher, Standalone]:
    """Return what gets this agent's status, and the coordinator; the host needs no name."""
    settings = plan.settings
    rules = rules_of_one(
        settings.max_restarts,
        lifetime_budget=settings.restart_budget == "lifetime",
        has_checkpoint_dir=settings.checkpoint_dir is not None,
    )
    look = for_all_nodes(settings, plan.post, finishing)

    def search(asked: Search) -> None:
        """Look in a thread of its own, since storage may hang."""
        threading.Thread(
            target=lambda: plan.post(SearchEnded(result_of(look, asked))),
            name="checkpoints",
            daemon=True,
        ).start()

    coordinator = Standalone(rules, plan.post, search, clock=time.monotonic)
    first = NodeStatus("", "", 0, 0, settings.role)
    return StatusPublisher(coordinator, first, say=say, post=plan.post), coordinator
