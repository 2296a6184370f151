"""The coordinator's search where every node has its own checkpoint directory.

1. Every member sends its ranks' manifests of saves that may not be committed everywhere
   (``staged``), receives those of the others, and lists the checkpoints that it has something of
   (``kept``).
2. From new to old: each that has something of the checkpoint reads it and lists the files that are
   whole; what they have together is complete, or the checkpoint is skipped.
3. The nodes of the next round fetch what they lack from those that have it. One that cannot makes
   the next older checkpoint the choice, for all.

All that is done before the round is published, so that no worker starts from less. An agent that
cannot be reached has probably died: what it has does not count, and the round waits until it is no
member any more, or for a search that reaches it. The round waits as well where one node cannot
reach the other that it fetches from. One that stays a member and cannot be reached ends the job
with an error that names it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import convert, to_builtins

from elaunch.agent.nodes.status import AT_REST
from elaunch.agent.peers.directory import Manifests
from elaunch.agent.peers.messages import Undelivered
from elaunch.agent.peers.peers import PATIENCE, Peer, Peers
from elaunch.agent.policy import events
from elaunch.checkpoint import records
from elaunch.checkpoint.nodelocal import (
    LocalCheckpoint,
    NodeFiles,
    StageManifests,
    UnitedFiles,
    merged_manifests,
    unite,
)
from elaunch.errors import CheckpointError
from elaunch.rendezvous.decide.view import Search, SearchResult
from elaunch.rendezvous.plan import NodeStatus, PlanCheckpoint
from elaunch.text import listed

AT_ONCE: Final = 32
GATHER_PATIENCE: Final = 3 * PATIENCE
"""Seconds without progress of a node that fetches: one that it fetches from may hang meanwhile."""
AGAIN: Final = 0.2
MOST_SHOWN: Final = 3

Answer = TypeVar("Answer")

log = logging.getLogger("elaunch")


class LocalSearch:
    """Finds the newest checkpoint that the nodes have together, and has all of them get it.

    Args:
        peers: reaches the other agents, and this one.
        heartbeat_timeout: seconds after which a dead agent is no member any more.
        post: sends the loop what was found, for its log.
        require: whether it is an error if there are checkpoints and none is whole.
        patience: seconds for which a member that cannot be reached is waited for.
    """

    def __init__(
        self,
        peers: Peers,
        heartbeat_timeout: float,
        post: Callable[[events.Event], None],
        *,
        require: bool = False,
        patience: float = 0.0,
    ) -> None:
        self._peers = peers
        self._patience = patience
        self._require = require
        self._reach = 2 * heartbeat_timeout + 1.0
        self._post = post
        self._unreached: dict[str, float] = {}
        """Agents that the search before could not reach, and since when (monotonic)."""

    def __call__(self, asked: Search) -> SearchResult:
        """Return the checkpoint that lies whole on every node of ``SearchResult.ready``.

        Raises CheckpointError: an agent cannot be reached for long, its storage cannot be read, or
        there are checkpoints and none can be had.
        """
        # By node rank, where that is known: of two contents the lower node's is taken.
        there = dict.fromkeys((*asked.nodes, *asked.present))
        nodes = {n: asked.present[n] for n in there if asked.present[n].state in AT_REST}
        targets = [name for name in asked.nodes or nodes if name in nodes]
        for name in self._unreached.keys() - set(targets):
            nodes.pop(name, None)  # a spare that nobody reaches holds up nobody
        search = _OneSearch(self._peers, nodes, targets, self._reach)
        before, began = self._unreached, time.monotonic()
        try:
            found = search.run()
        except Undelivered as error:
            raise CheckpointError(f"--checkpoint-local: {error}") from error
        finally:
            self._unreached = {name: before.get(name, began) for name in search.unreached}
        for name in targets:
            waited = time.monotonic() - before.get(name, math.inf)
            if name in search.unreached and waited >= self._patience:
                raise CheckpointError(
                    f"--checkpoint-local: for {waited:.0f} s {search.unreached[name]}; it has been "
                    "a member all the time"
                )
            if name in search.unreached and name not in before:
                log.warning(
                    "waiting for its checkpoints, up to %g s: %s",
                    self._patience,
                    search.unreached[name],
                )
        if search.unreached:
            return SearchResult(again=True)
        self._post(events.CheckpointChosen(found))
        chosen = found.checkpoint
        if chosen is None and self._require and found.passed_over:
            first = found.passed_over[0]
            raise CheckpointError(
                f"--require-resume is given, and all {len(found.passed_over)} checkpoints were "
                f"skipped; {first.path}: {first.reason}"
            )
        if chosen is None:
            return SearchResult(ready=frozenset(targets))
        found_there = PlanCheckpoint(str(chosen.path), chosen.step, chosen.format)
        return SearchResult(found_there, ready=frozenset(targets))


class _OneSearch:
    """One search: what the agents answered in it."""

    def __init__(
        self,
        peers: Peers,
        nodes: Mapping[str, NodeStatus],
        targets: Sequence[str],
        reach: float,
    ) -> None:
        self._peers = peers
        self._members = {
            name: Peer(record.host, record.addr, record.peer_port) for name, record in nodes.items()
        }
        self._targets = targets
        self._reach = reach
        self._passed_over: list[records.PassedOver] = []
        self._failed: list[str] = []
        self.unreached: dict[str, str] = {}

    def run(self) -> records.SearchOutcome:
        """Return what was found and is now on all targets; nothing if ``unreached`` has a node."""
        holders: dict[LocalCheckpoint, list[str]] = {}
        manifests = self._manifests()
        if self.unreached:  # one of them may have what makes a stage of another complete
            return records.SearchOutcome(None)
        for name, theirs in self._of_all(
            manifests, lambda name: self._checkpoints(name, manifests[name])
        ).items():
            for one in theirs:
                holders.setdefault(one, []).append(name)
        for checkpoint in sorted(holders, key=lambda one: one.age, reverse=True):
            if self.unreached:
                break
            names = holders[checkpoint]
            found = self._of_all(names, partial(self._find_whole, checkpoint))
            union = unite([found[name] for name in names if name in found])
            if self.unreached:
                break
            if union.missing:
                self._pass_over(checkpoint, names, _lacks(union))
            elif self._gather(checkpoint, union, names):
                round_number = checkpoint.round if checkpoint.round >= 0 else None
                path = Path(checkpoint.path)
                newest = records.Checkpoint(path, checkpoint.step, union.format, round_number)
                return records.SearchOutcome(newest, tuple(self._passed_over))
        if self._failed and not self.unreached:
            raise CheckpointError(f"--checkpoint-local: {'; '.join(self._failed)}")
        return records.SearchOutcome(None, tuple(self._passed_over))

    # ── one checkpoint ───────────────────────────────────────────────────────────────────────────

    def _gather(
        self, checkpoint: LocalCheckpoint, union: UnitedFiles, names: Sequence[str]
    ) -> bool:
        """Have all targets get the files that they lack; return whether they all have."""
        numbers = {name: number for number, name in enumerate(names)}
        lacking = {name: union.lacking(numbers.get(name, -1)) for name in self._targets}
        nodes = [self._members[name] for name in names]
        request = {"do": "gather", "checkpoint": checkpoint, "nodes": nodes}

        def fetch(name: str) -> str:
            try:
                self._ask(name, {**request, "files": lacking[name]}, GATHER_PATIENCE)
            except Undelivered as error:
                if error.gone:
                    raise
                return str(error)
            return ""

        work = [name for name, files in lacking.items() if files]
        problems = [problem for problem in self._of_all(work, fetch).values() if problem]
        if problems:
            self._failed += [
                f"step {checkpoint.step} ({checkpoint.path}): {problem}" for problem in problems
            ]
            self._pass_over(checkpoint, names, "; ".join(problems))
        return not problems and not self.unreached

    def _pass_over(self, checkpoint: LocalCheckpoint, names: Iterable[str], reason: str) -> None:
        hosts = ", ".join(sorted({self._members[name].host for name in names}))
        self._passed_over.append(
            records.PassedOver(Path(checkpoint.path), f"{reason} (on {hosts})")
        )

    # ── asking ───────────────────────────────────────────────────────────────────────────────────

    def _manifests(self) -> dict[str, StageManifests]:
        """Return for each node that was reached the manifests of the stages that it has."""
        answers = self._of_all(
            self._members, lambda name: self._ask(name, {"do": "staged"}, PATIENCE)
        )
        staged = {name: _manifests_in(one) for name, one in answers.items()}
        merged = merged_manifests(staged.values())
        for stage in merged:
            done = next((name for name, one in answers.items() if stage in one["committed"]), None)
            if done is not None:
                request = {"do": "manifests", "name": stage}
                known = self._of_all([done], partial(self._ask, request=request, patience=PATIENCE))
                merged = merged_manifests([merged, *(_manifests_in(one) for one in known.values())])
        return {name: {stage: merged[stage] for stage in own} for name, own in staged.items()}

    def _checkpoints(self, name: str, manifests: StageManifests) -> list[LocalCheckpoint]:
        answer = self._ask(name, {"do": "kept", "manifests": manifests}, PATIENCE)
        host = self._members[name].host
        for path, reason in answer["passed_over"]:
            self._passed_over.append(records.PassedOver(Path(f"{host}:{path}"), str(reason)))
        return convert(answer["kept"], list[LocalCheckpoint])

    def _find_whole(self, checkpoint: LocalCheckpoint, name: str) -> NodeFiles:
        try:
            answer = self._ask(name, {"do": "look", "checkpoint": checkpoint}, PATIENCE)
        except Undelivered as error:
            if error.gone:
                raise
            return NodeFiles(problem=str(error))
        return convert(answer["looked"], NodeFiles)

    def _ask(self, name: str, request: Mapping[str, Any], patience: float) -> Mapping[str, Any]:
        """Ask an agent, as long as it makes progress; Undelivered, ``gone`` if it is not reached.

        One that refuses may be starting: for a while it is tried again.
        """
        peer, until = self._members[name], time.monotonic() + self._reach
        if peer.port == self._peers.port and peer.addr == self._peers.host:
            peer = self._peers.here()
        while True:
            try:
                connection = self._peers.call(peer, until, patience)
                break
            except Undelivered as error:
                if time.monotonic() + AGAIN >= until:
                    raise Undelivered(str(error), True) from error
            time.sleep(AGAIN)
        with connection:
            return connection.ask(to_builtins(request, str_keys=True))

    def _of_all(self, names: Iterable[str], ask: Callable[[str], Answer]) -> dict[str, Answer]:
        """Ask all at the same time; those that are gone are noted, other errors are raised."""
        answers = {}
        with ThreadPoolExecutor(AT_ONCE, "checkpoint-search") as threads:
            asked = {name: threads.submit(ask, name) for name in names}
        for name, answer in asked.items():
            try:
                answers[name] = answer.result()
            except Undelivered as error:
                if not error.gone:
                    raise
                self.unreached[name] = str(error)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._members[name]} answers nonsense: {error!r}"
                ) from error
        return answers


def _manifests_in(answer: Mapping[str, Any]) -> Manifests:
    return convert(answer["manifests"], Manifests, str_keys=True)


def _lacks(union: UnitedFiles) -> str:
    what = listed([path or "it" for path in union.missing], MOST_SHOWN)
    return f"no node has all of it: {what}" if union.files else what
