"""The rendezvous of a job of one node: its coordinator decides in the agent's own loop. ::

    the agent's status, the end of a search ──► CoordinatorState ──► PlanSeen, posted to the agent

There is no other agent to agree with, so there is no store, no record as bytes and no thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elaunch.rendezvous.coordinatorstate import CoordinatorState, draw_job_and_jitter
from elaunch.rendezvous.decide.view import Publish, Rules, Search, SearchResult, Wait
from elaunch.rendezvous.events import News, PlanSeen
from elaunch.rendezvous.plan import NodeStatus

NAME = "standalone"


def rules_of_one(
    max_restarts: int,
    lifetime_budget: bool = False,
    has_checkpoint_dir: bool = False,
    *,
    max_same_failures: int = 0,
) -> Rules:
    """Return the rules for one node, which waits for no other."""
    return Rules(
        min_nodes=1,
        max_nodes=1,
        standalone=True,
        settle=0.0,
        heartbeat_timeout=0.0,
        join_timeout=math.inf,
        remind=math.inf,
        max_restarts=max_restarts,
        lifetime_budget=lifetime_budget,
        max_same_failures=max_same_failures,
        has_checkpoint_dir=has_checkpoint_dir,
    )


class Standalone:
    """The one agent of a job and its coordinator; the agent's loop is the only caller.

    ``post`` takes plans; ``search`` begins to look for a checkpoint, for :meth:`found`; ``draw`` as
    in CoordinatorState.
    """

    def __init__(
        self,
        rules: Rules,
        post: Callable[[News], None],
        search: Callable[[Search], None],
        *,
        clock: Callable[[], float],
        draw: Callable[[], tuple[str, float]] = draw_job_and_jitter,
    ) -> None:
        self._state = CoordinatorState(NAME, rules, None, None, draw)
        self._post = post
        self._search = search
        self._clock = clock

    def start(self, record: NodeStatus) -> None:
        """Begin the job with this agent's first status."""
        self._state.begin(None, self._clock())
        self.publish(record)

    def publish(self, record: NodeStatus) -> None:
        """Note this agent's status; :meth:`decide` follows."""
        self._state.on_status(record, self._clock())

    def found(self, result: SearchResult) -> None:
        """Note what the search has found; :meth:`decide` follows."""
        self._state.on_found(result)

    def decide(self) -> float | None:
        """Post the plans that follow; return when to decide again even if nothing happens."""
        while True:
            step, _ = self._state.step(self._clock())
            if isinstance(step, Publish):
                self._state.on_published(step, True, self._clock())
                self._post(PlanSeen(step.plan, NAME))
            elif isinstance(step, Search):
                self._search(step)
            elif isinstance(step, Wait):
                return None if step.until == math.inf else step.until
