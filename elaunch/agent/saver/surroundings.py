"""What the save queue needs of an agent, its QueueSurroundings: fence, other nodes, retention."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.plan import SaverPlan
from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Committed, Stage
from elaunch.checkpoint.retention.delete import Keep, Retiring
from elaunch.checkpoint.storage.storage import Storage
from elaunch.errors import SaveError, StoreError
from elaunch.rendezvous.plan import Plan
from elaunch.rendezvous.records import RecordError
from elaunch.wire.saver import Handed

FENCE_S: Final = 10.0
"""Seconds for the loop to answer whether that is still the round."""
PEER_S: Final = 30.0
"""Seconds for the agent of rank 0's node to take a report of a shard."""

TRY_S: Final = 2.0
"""Seconds of one attempt; between two the round may have ended."""
AGAIN_S: Final = 0.1

log = logging.getLogger("elaunch")


class RoundSurroundings:
    """The surroundings of an agent's saves; ``round`` is set at the begin of each round.

    ``released`` is called when a shard's memory is read no more; ``has_all`` returns whether every
    shard of a save is in this agent's memory.
    """

    def __init__(
        self,
        plan: SaverPlan,
        storage: Storage,
        released: Callable[[Handed], None],
        has_all: Callable[[Stage], bool],
    ) -> None:
        self._plan = plan
        self.released = released
        self._has_all = has_all
        self.on_commit: Callable[[Stage], object] = lambda _: None
        """Called for each save that was committed here."""
        self.round: Round | None = None
        self._saved_in: Round | None = None
        """The round that has saved what this one resumes from, out of memory."""
        self.ending = False
        """Whether the round's workers have ended: the committer may be gone with its node."""
        self._changed = threading.Condition()
        self._undecided = False
        self._retiring = Retiring(storage, plan.settings.checkpoint_keep)

    def begin(self, round_: Round) -> None:
        """Note the round that begins, and with it what may be committed."""
        before = self.round
        stage = "" if round_.checkpoint is None else round_.checkpoint.stage
        parsed = layout.parse_stage_name(stage)
        if before is not None and parsed is not None and parsed[1] == before.round:
            self._saved_in = before
        self.round, self.ending = round_, False
        self.decide(True)

    def decide(self, decided: bool) -> None:
        """Note whether it is known what becomes of saves that are still in memory."""
        with self._changed:
            self._undecided = not decided
            self._changed.notify_all()

    def own_ranks(self) -> frozenset[int]:
        """Return the ranks of this node's workers."""
        return frozenset() if self.round is None else self.round.own_ranks

    def commits(self, handed: Handed) -> bool:
        """Whether rank 0 runs here; with a directory on each node, each node commits its own."""
        found = self.round
        if found is None or found.plan is None or handed.local:
            return True
        committer = self._committer(handed.stage)
        return committer is not None and found.plan.node_rank(found.name) == committer

    def _committer(self, stage: Stage) -> int | None:
        """Return the node that commits a save: rank 0's, or the first that has taken part in it.

        Agents that have all got new names, as of a store that has lost its memory, do not know who
        that is: then each that has all of it commits, and one of them is the first.
        """
        found, before = self.round, self._saved_in
        if found is None or found.plan is None:
            return None
        if found.round == stage.round:
            return found.node_of(0)
        if not found.resumes(stage) or before is None or before.plan is None:
            return None
        nodes, was_there = enumerate(found.plan.nodes), before.plan.node_rank
        places = (rank for rank, node in nodes if was_there(node.name) is not None)
        own = found.plan.node_rank(found.name) if self._has_all(stage) else None
        return next(places, own)

    def is_orphaned(self, handed: Handed) -> bool:
        """Whether the round resumes from this shard's save, and the node of its rank is gone."""
        found, before = self.round, self._saved_in
        if found is None or found.plan is None or before is None or before.plan is None:
            return False
        name = before.plan.nodes[before.node_of(handed.part.rank)].name
        there = found.plan.node_rank(name) is not None or name in found.plan.spares
        return found.resumes(handed.stage) and not there

    def check_round(self, round_number: int, uuid: str = "") -> None:
        """Raise SaveError unless that is still the round, as the store knows, or else the loop.

        A round that has resumed from the save ``uuid`` out of memory is as good as its own.
        """
        if self._plan.read_plan is not None:
            problem = self._ask_store(self._plan.read_plan, round_number, uuid)
        else:
            problem = self._ask_loop(round_number, uuid)
        if problem:
            raise SaveError(f"round {round_number} may not commit any more: {problem}")

    def fence(self, stage: Stage) -> None:
        """Check a save's round when it is known whether the next one resumes from it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._undecided)
            try:
                self.check_round(stage.round, stage.uuid)
            except SaveError:
                if self._undecided:
                    continue  # the round has ended meanwhile
                raise
            return

    def _ask_store(self, read_plan: Callable[[], Plan], round_number: int, uuid: str) -> str:
        known = self.round
        try:
            plan = read_plan()
        except (StoreError, RecordError) as error:
            return f"the store cannot be asked: {error}"
        if known is None or known.plan is None or plan.job != known.plan.job:
            return "the store has another job with this run id"
        resumed = "" if plan.checkpoint is None else plan.checkpoint.uuid
        if plan.round != round_number and (not uuid or uuid != resumed):
            return f"the job is in round {plan.round}"
        return "the next round is being formed" if plan.phase == "forming" else ""

    def _ask_loop(self, round_number: int, uuid: str) -> str:
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._plan.post(events.FenceAsked(round_number, answers.put, uuid))
        try:
            return answers.get(timeout=FENCE_S)
        except queue.Empty:
            return f"the agent did not answer within {FENCE_S:g} s"

    # ── other nodes ──────────────────────────────────────────────────────────────────────────────

    def sealed(self, handed: Handed, manifest: bytes) -> None:
        """Send those that commit the manifest of a shard; SaveError if they cannot be reached.

        At the end of a round that is no error: the shard is on the disk, and the search for the
        next checkpoint finds it there.
        """
        self._to_each(handed, lambda node: self._tell_sealed(node, handed, manifest))

    def _to_each(self, handed: Handed, send: Callable[[int], None]) -> None:
        """Send to all who wait for a shard; then raise the SaveError of the first that fails."""
        failed: list[SaveError] = []
        for node_rank in self._committers(handed):
            try:
                send(node_rank)
            except SaveError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _tell_sealed(self, node_rank: int, handed: Handed, manifest: bytes) -> None:
        peers, until = self._plan.peers, time.monotonic() + PEER_S
        while peers is not None:
            try:
                peers.send_sealed(node_rank, handed.stage, handed.part.rank, manifest, TRY_S)
                return
            except SaveError as error:
                if self.ending:
                    log.debug("who commits %s was not told: %s", handed.stage.name, error)
                    return
                if time.monotonic() >= until:
                    raise
            with self._changed:
                self._changed.wait_for(lambda: self.ending, AGAIN_S)

    def failed(self, handed: Handed, problem: str) -> None:
        """Report to those that commit that a shard will not come."""
        peers, stage = self._plan.peers, handed.stage
        for node_rank in self._committers(handed):
            if peers is None:
                return
            try:
                peers.send_failed(node_rank, stage, handed.part.rank, problem, PEER_S)
            except SaveError as error:
                said = "node %d does not know that %s failed: %s"
                log.warning(said, node_rank, stage.name, error)

    def writing(self, handed: Handed) -> None:
        """Report to those that commit that a shard is on its way; raises SaveError."""
        peers, stage, part = self._plan.peers, handed.stage, handed.part
        if peers is not None:
            self._to_each(
                handed,
                lambda node: peers.send_writing(node, stage, part.rank, part.world_size, TRY_S),
            )

    def _committers(self, handed: Handed) -> list[int]:
        """Return the other nodes that wait for this shard."""
        found, committer = self.round, self._committer(handed.stage)
        if found is None or found.plan is None or committer is None:
            return []
        own = found.plan.node_rank(found.name)
        nodes = range(len(found.plan.nodes)) if handed.local else [committer]
        return [node for node in nodes if node != own]

    # ── retention ────────────────────────────────────────────────────────────────────────────────

    def committed(self, handed: Handed, done: Committed) -> None:
        """Remove what may go now, then report the commit: what comes next needs room."""
        self._retiring.apply(_rule_of(handed), {done.name})
        self.on_commit(handed.stage)

    def make_room(self, handed: Handed) -> bool:
        """Remove what may go once this one is committed; whether any went."""
        needed = handed.size * (1 if handed.local else handed.part.world_size)
        # What the round resumed from is needed until there is a newer one.
        staying = {*handed.protected, "" if self.round is None else self.round.resumed}
        gone = self._retiring.make_room(_rule_of(handed), needed, staying)
        if gone:
            log.warning("no room for %s: removed %s", handed.stage.final, ", ".join(gone))
        return bool(gone)


def _rule_of(handed: Handed) -> Keep | None:
    return None if handed.keep is None else Keep(**handed.keep)
