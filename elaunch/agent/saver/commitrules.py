"""Which node commits a save, the fence before it, the reports to that node, and retention after."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Final, Literal

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Committed, Keep, ShardReport, Stage
from elaunch.checkpoint.retention import Retiring
from elaunch.checkpoint.storage.storage import Storage
from elaunch.errors import SaveError, StoreError, StoreUnreachable
from elaunch.rendezvous.plan import Plan
from elaunch.rendezvous.records import RecordError
from elaunch.wire.worker import StagedShard

FENCE_S: Final = 10.0
"""Seconds for the loop, or the store, to answer whether that is still the round."""
PEER_S: Final = 30.0
"""Seconds for the agent of rank 0's node to take a report of a shard."""

TRY_S: Final = 2.0
"""Seconds of one attempt; between two the round may have ended."""
AGAIN_S: Final = 0.1

log = logging.getLogger("elaunch")


class CommitRules:
    """The rules by which one agent's saves are committed; the threads of its save queue call them.

    ``round`` is set at the begin of each round. ``released`` is called when a shard's memory is
    read no more, whether the shard was written or not; ``has_all`` returns whether every shard of a
    save is in this agent's memory.
    """

    def __init__(
        self,
        setup: SaverSetup,
        storage: Storage,
        released: Callable[[StagedShard], None],
        has_all: Callable[[Stage], bool],
    ) -> None:
        self._setup = setup
        self.released = released
        self._has_all = has_all
        self.on_commit: Callable[[Stage], object] = lambda _: None
        """Called for each save that was committed here."""
        self.round: Round | None = None
        self._saved_in: Round | None = None
        """The round that saved, in memory, what this one resumes from."""
        self.ending = False
        """Whether the round's workers have ended: the node that commits may be gone."""
        self._changed = threading.Condition()
        self._undecided = False
        self._retiring = Retiring(storage, setup.settings.checkpoint_keep)

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

    # ── the commit ──────────────────────────────────────────────────────────────────────────────

    def own_ranks(self) -> frozenset[int]:
        """Return the ranks of this node's workers, which stage their shards here."""
        return frozenset() if self.round is None else self.round.own_ranks

    def commits(self, shard: StagedShard) -> bool:
        """Whether this agent commits the save of ``shard``.

        Rank 0's does; where each node has a directory of its own, each does.
        """
        now = self.round
        if now is None or now.plan is None or shard.local:
            return True
        committer = self._committer(shard.stage)
        return committer is not None and now.plan.node_rank(now.name) == committer

    def _committer(self, stage: Stage) -> int | None:
        """Return the node that commits a save: rank 0's, or the first that has taken part in it.

        If all agents have new names, as after a store has lost its memory, that node is not known:
        then each agent that has all of the save commits, and the first to do so succeeds.
        """
        now, before = self.round, self._saved_in
        if now is None or now.plan is None:
            return None
        if now.round == stage.round:
            return now.node_of(0)
        if not now.resumes(stage) or before is None or before.plan is None:
            return None
        nodes, was_there = enumerate(now.plan.nodes), before.plan.node_rank
        ranks = (rank for rank, node in nodes if was_there(node.name) is not None)
        own = now.plan.node_rank(now.name) if self._has_all(stage) else None
        return next(ranks, own)

    def is_orphaned(self, shard: StagedShard) -> bool:
        """Whether the round resumes from this shard's save, and the node of its rank is gone."""
        now, before = self.round, self._saved_in
        if now is None or now.plan is None or before is None or before.plan is None:
            return False
        name = before.plan.nodes[before.node_of(shard.header.rank)].name
        there = now.plan.node_rank(name) is not None or name in now.plan.spares
        return now.resumes(shard.stage) and not there

    # ── the fence ────────────────────────────────────────────────────────────────────────────────

    def fence(self, stage: Stage) -> None:
        """Return if a save may be committed, which is known when the next round is decided.

        Raises SaveError unless its round is still the round, or the round has resumed from it.
        """
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

    def check_round(self, round_number: int, uuid: str = "") -> None:
        """Raise SaveError unless that is still the round, by the store or, on one node, the loop.

        A round that has resumed from the save ``uuid`` out of memory may commit it, too.
        """
        if self._setup.read_plan is not None:
            problem = self._ask_store(self._setup.read_plan, round_number, uuid)
        else:
            problem = self._ask_loop(round_number, uuid)
        if problem:
            raise SaveError(f"round {round_number} may not commit any more: {problem}")

    def _ask_store(self, read_plan: Callable[[], Plan], round_number: int, uuid: str) -> str:
        known, until = self.round, time.monotonic() + FENCE_S
        while True:
            try:
                plan = read_plan()
                break
            except (StoreError, RecordError) as error:
                silent = isinstance(error, StoreUnreachable)
                if not silent or self.ending or time.monotonic() >= until:
                    return f"the store cannot be asked: {error}"
            with self._changed:
                self._changed.wait_for(lambda: self.ending, AGAIN_S)
        if known is None or known.plan is None or plan.job != known.plan.job:
            return "the store has another job with this run id"
        resumed = "" if plan.checkpoint is None else plan.checkpoint.uuid
        if plan.round != round_number and (not uuid or uuid != resumed):
            return f"the job is in round {plan.round}"
        return "the next round is being formed" if plan.phase == "forming" else ""

    def _ask_loop(self, round_number: int, uuid: str) -> str:
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._setup.post(events.FenceAsked(round_number, answers.put, uuid))
        try:
            return answers.get(timeout=FENCE_S)
        except queue.Empty:
            return f"the agent did not answer within {FENCE_S:g} s"

    # ── reports to the nodes that commit ─────────────────────────────────────────────────────────

    def written(self, shard: StagedShard, manifest: bytes) -> None:
        """Send the manifest of a written shard; SaveError for a node that cannot be reached.

        At the end of a round that is no error: the shard is on the disk, and the search for the
        next checkpoint finds it there; a round that goes on with the save is sent it once more.
        """
        report = _report_of(shard, "written", manifest=manifest.decode("latin-1"))
        self._report(report, self._committers(shard), PEER_S)

    def _report(self, report: ShardReport, nodes: Collection[int], seconds: float) -> None:
        """Send a report to each of ``nodes`` until it has it, or the round ends.

        Raises the SaveError of a node that does not have it after ``seconds``.
        """
        peers, now, until, pause = self._setup.peers, self.round, time.monotonic() + seconds, 0.1
        while peers is not None and nodes:
            left: dict[int, SaveError] = {}
            for node_rank in nodes:
                try:
                    peers.report(node_rank, report, TRY_S)
                except SaveError as error:
                    left[node_rank] = error
            for node_rank, problem in left.items():
                if self.ending or self.round is not now:
                    what = f"{report.do} for {report.stage.name}"
                    log.debug("node %d has no report %s: %s", node_rank, what, problem)
                    return
                if time.monotonic() >= until:
                    raise problem
            nodes = left
            with self._changed:
                self._changed.wait_for(lambda: self.ending, pause)
            pause = min(2 * pause, TRY_S)

    def failed(self, shard: StagedShard, problem: str) -> None:
        """Report that a shard will not come, for as long as the round lasts: others wait for it."""
        report = _report_of(shard, "failed", problem=problem)
        self._report(report, self._committers(shard), math.inf)

    def writing(self, shard: StagedShard) -> None:
        """Report that a shard is still being written; SaveError for a node not reached."""
        self._report(_report_of(shard, "writing"), self._committers(shard), 0.0)

    def _committers(self, shard: StagedShard) -> list[int]:
        """Return the other nodes that commit the save of this shard, and so wait for it."""
        now, committer = self.round, self._committer(shard.stage)
        if now is None or now.plan is None or committer is None:
            return []
        own = now.plan.node_rank(now.name)
        nodes = range(len(now.plan.nodes)) if shard.local else [committer]
        return [node for node in nodes if node != own]

    # ── retention ────────────────────────────────────────────────────────────────────────────────

    def committed(self, shard: StagedShard, done: Committed) -> None:
        """Remove what may go now, then report the commit: what comes next needs room."""
        self._retiring.apply(_rule_of(shard), {done.name})
        self.on_commit(shard.stage)

    def make_room(self, shard: StagedShard) -> bool:
        """Remove what may go once this one is committed; return whether any was removed."""
        needed = shard.size * (1 if shard.local else shard.header.world_size)
        # What the round resumed from is needed until there is a newer one.
        staying = {*shard.protected, "" if self.round is None else self.round.resumed}
        gone = self._retiring.make_room(_rule_of(shard), needed, staying)
        if gone:
            log.warning("no room for %s: removed %s", shard.stage.final, ", ".join(gone))
        return bool(gone)


def _report_of(
    shard: StagedShard, do: Literal["written", "writing", "failed"], **more: str
) -> ShardReport:
    return ShardReport(do, shard.stage, shard.header.rank, shard.header.world_size, **more)


def _rule_of(shard: StagedShard) -> Keep | None:
    keep = shard.header.keep
    return None if keep is None else Keep(**keep)
