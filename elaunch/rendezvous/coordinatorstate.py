"""The coordinator's state, and what follows from it; no method blocks.

Changes of the members go in, steps come out: a plan to publish, a read of the published one, a
search for a checkpoint, an eviction, a wait. It has no thread, no clock and no store, so that a
simulation can drive it; elaunch.rendezvous.coordinator drives it for real, for one node and for
several.

Where an answer is lost, it is not known whether a plan was published. Then the published plan is
read again and believed, and what follows from it is decided anew.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from elaunch.rendezvous import records, times
from elaunch.rendezvous.decide import members
from elaunch.rendezvous.decide.decide import decide
from elaunch.rendezvous.decide.view import (
    Absent,
    Evict,
    Present,
    Publish,
    Rules,
    Search,
    SearchResult,
    View,
    Wait,
)
from elaunch.rendezvous.plan import Node, NodeStatus, Plan, column

if TYPE_CHECKING:
    from elaunch.store.protocol import Change, Post

REFUSALS_LOGGED = 5
"""Agents whose refused records are logged one by one."""
RETRY = 0.2
"""Seconds before the plan is read again after it could not be."""

log = logging.getLogger("elaunch")


class Reread(Struct, frozen=True):
    """Read the plan: another one may be in the store than the coordinator knows."""


def draw_job_and_jitter() -> tuple[str, float]:
    """Return a new incarnation id, and which part of a backoff to wait."""
    return os.urandom(16).hex(), random.uniform(0.5, 1.0)


class CoordinatorState:
    """A coordinator's knowledge, and what follows from it; no method blocks.

    ``old_job`` is the incarnation id in a plan that was over before this agent joined: another job
    has this run id now. ``draw`` as :func:`draw_job_and_jitter`.
    """

    def __init__(
        self,
        me: str,
        rules: Rules,
        secret: bytes | None,
        old_job: str | None,
        draw: Callable[[], tuple[str, float]],
    ) -> None:
        self.me = me
        self.ended = ""
        """Why it leads no more, if so."""
        self._rules = rules
        self._secret = secret
        self._old_job = old_job
        self._draw = draw
        self._version = 0
        self._plan = Plan("")
        self._listed: tuple[Sequence[Node], bytes] = (), b""
        self._members: frozenset[str] = frozenset()
        self._ignored: frozenset[str] = frozenset()
        self._superseded = ""
        self._present: dict[str, Present] = {}
        self._absent: dict[str, Absent] = {}
        self._refused: set[str] = set()
        self._logged_at = 10
        self._arrivals = 0
        self._members_known = False
        self._unconfirmed: Publish | None = None
        """The plan of which it is not known whether the store has accepted it."""
        self._refused_post = self._reread = False
        self._reread_at = 0.0
        self._view = View(me, self._plan, self._present, self._absent)

    @property
    def plan(self) -> Plan:
        """The plan as this coordinator last saw it in the store, or the empty one."""
        return self._plan

    @property
    def others(self) -> int:
        """How many other agents are members."""
        return len(self._present) - (self.me in self._present)

    def has_own_record(self, seq: int) -> bool:
        """Return whether this agent's own record with that number is in what it decides by."""
        own = self._present.get(self.me)
        return own is None or own.record.seq >= seq

    def begin(
        self, post: Post | None, now: float, opened: float = 0.0, known: Plan | None = None
    ) -> None:
        """Take over from the plan as it is, in a store that was ``opened`` then.

        ``known`` is the newest plan that this agent has read, where the store's cannot be read.

        Raises:
            RecordError: it has read none, and the store is not its own: it must not lead.
        """
        self._view = replace(
            self._view,
            leads_since=now,
            phase_since=now,
            published_at=now,
            last_newcomer_at=now,
            store_opened=opened,
        )
        if post is None:
            self._adopt(Plan(self._draw()[0]), 0, now)
            return
        try:
            plan = self._decoded(post, "the last coordinator")
        except records.RecordError as exc:
            if known is None and not self._rules.hosted_by_me:
                advice = "remove it if no agent of this job runs, or choose another --rdzv-id"
                raise records.RecordError(f"{exc}; {advice}") from exc
            # Its writer cannot sign: others have read what we have, or nothing in a new store.
            log.warning("%s", exc)
            new = Plan(self._draw()[0], reason="the job begins")
            self._adopt(known or new, post.version, now)
            self._view = replace(self._view, unannounced=True)
            return
        if plan.phase != "over" or plan.job != self._old_job:
            self._adopt(plan, post.version, now)
            return
        self._superseded = plan.job
        names = column(plan.nodes, "name")
        self._ignored = frozenset((*names, *plan.spares, *plan.joining))
        reason = "the last job with this run id is over; this one begins"
        self._adopt(Plan(self._draw()[0], reason=reason), post.version, now)
        self._view = replace(self._view, unannounced=True)

    def on_changes(self, changes: Sequence[Change], now: float) -> None:
        """Write changes of the members into the view; the first ones are all members."""
        for change in changes:
            if change.name in self._ignored:
                continue
            if change.value is None:
                self._on_gone(change.name, "left" if change.cause == "left" else "expired", now)
                continue
            try:
                record = records.decode_agent(change.value, self._secret, change.name)
            except records.RecordError as exc:
                self._refuse(change.name, exc)
                continue
            self._on_record(change.name, record, now)
        self._know_members(now)

    def on_status(self, record: NodeStatus, now: float) -> None:
        """Note the status of this agent itself, which is the only member."""
        self._on_record(self.me, record, now)
        self._know_members(now)

    def _know_members(self, now: float) -> None:
        if not self._members_known:
            self._members_known = True
            self._note_absent(now)

    def _refuse(self, name: str, problem: records.RecordError) -> None:
        """Log it once for each of the first names, then whenever there are ten times as many."""
        if name in self._refused:
            return
        self._refused.add(name)
        number = len(self._refused)
        if number <= REFUSALS_LOGGED:
            log.warning("%s", problem)
        elif number == self._logged_at:
            self._logged_at *= 10
            log.warning(
                "the records of %s agents were refused so far; the last: %s", number, problem
            )

    def on_found(self, found: SearchResult) -> None:
        """Note the result of the search for a checkpoint."""
        self._view = replace(self._view, search_result=found, searching=False)

    def on_evicted(self, evicted: bool, now: float) -> None:
        """Note that the step was taken, and whether the store may have done it."""
        evicted = evicted or self._view.evicted
        self._view = replace(self._view, evicted=evicted, evict_tried_at=now)

    def step(self, now: float) -> tuple[Publish | Reread | Search | Wait | Evict, str]:
        """Return what to do now, and why."""
        if not self._members_known:
            return Wait(), "reading the members"
        if self._reread:
            return Reread(), "reading the plan"
        if self._unconfirmed is not None:
            wait = now < self._reread_at
            return (Wait(self._reread_at) if wait else Reread()), "reading the plan"
        step, reason = decide(self._view, now, self._rules)
        if isinstance(step, Search):
            self._view = replace(self._view, searching=True)
        if not isinstance(step, Publish):
            return step, reason
        plan = replace(step.plan, coordinator=self.me)
        if plan.phase == "over":
            plan = replace(plan, times=times.of_round(self._view, now))
        return Publish(plan, self._version + 1), reason

    def encoded(self, step: Publish) -> tuple[bytes, bytes]:
        """Return a plan and its nodes as bytes for the store; raises RecordError."""
        nodes = step.plan.nodes
        if nodes is not self._listed[0]:  # of 4,096 nodes it takes milliseconds
            self._listed = nodes, records.encode_nodes(nodes)
        listed = self._listed[1]
        return records.encode_plan(step.plan, self._secret, step.version, listed), listed

    def on_published(self, step: Publish, accepted: bool | None, now: float) -> None:
        """Note whether the store has accepted the plan of ``step``; None: it did not answer."""
        if accepted:
            self._adopt(step.plan, step.version, now)
            return
        self._unconfirmed, self._refused_post = step, accepted is False
        self._reread_at = now if self._refused_post else now + RETRY

    def reread(self) -> None:
        """Note that another process seems to have written a plan."""
        self._reread = self._unconfirmed is None

    def on_no_plan(self, now: float) -> None:
        """Note that the plan could not be read."""
        self._reread_at = now + RETRY

    def on_plan(self, post: Post | None, now: float) -> None:
        """Note the plan in the store after a post of ours may have failed, and believe it."""
        step, self._unconfirmed, self._reread = self._unconfirmed, None, False
        version = 0 if post is None else post.version
        if self._refused_post and step is not None and version == step.version - 1:
            self.ended = "the leadership is lost"
        elif post is None or version < self._version:
            # The plan was removed, or overwritten: it is posted again, and counted anew.
            self._version = version
            self._view = replace(self._view, unannounced=self._plan.phase != "over")
        elif version > self._version:
            self._believe(post, now)

    def _believe(self, post: Post, now: float) -> None:
        try:
            plan = self._decoded(post, "another coordinator")
        except records.RecordError as exc:
            # Its writer cannot sign, and ours may be overwritten: it is posted again, above that.
            log.debug("%s", exc)
            self._version = post.version
            self._view = replace(self._view, unannounced=True)
            return
        if plan.coordinator == self.me:
            self._adopt(plan, post.version, now)
        else:
            self.ended = "another agent leads"

    def _decoded(self, post: Post, sender: str) -> Plan:
        return records.decode_plan(post, self._secret, sender)

    # ── how news are written down ────────────────────────────────────────────────────────────────

    def _adopt(self, plan: Plan, version: int, now: float) -> None:
        old = self._plan
        self._plan, self._version = plan, version
        view = replace(self._view, plan=plan, published_at=now, unannounced=False)
        if (plan.phase, plan.round, plan.job) != (old.phase, old.round, old.job):
            view = replace(view, phase_since=now)
        if (plan.round, plan.job) != (old.round, old.job):
            view = replace(view, round_began=now, search_result=None, searching=False)
            view = replace(view, evicted=False, jitter=self._draw()[1])
        self._view = view
        if plan.nodes != old.nodes:
            self._members = frozenset(column(plan.nodes, "name"))
            for name in set(self._absent) - self._members:
                del self._absent[name]
            if self._members_known:
                self._note_absent(now)

    def _note_absent(self, now: float) -> None:
        for name in self._members - self._present.keys() - self._absent.keys():
            self._absent[name] = Absent("unknown", now)

    def _on_gone(self, name: str, cause: Literal["left", "expired"], now: float) -> None:
        present = self._present.pop(name, None)
        if name == self.me:
            self.ended = "its lease is gone"
        if name in self._members:
            last = present.record if present else None
            self._absent.setdefault(name, Absent(cause, now, last))
        elif present is not None:
            self._view = replace(self._view, last_newcomer_at=now)

    def _note_seen(self, record: NodeStatus) -> None:
        """Note how far an agent has seen the job, if the store may know less than it does."""
        seen, plan = members.goes_on(record, self._rules), self._plan
        if seen is None or (seen.job == plan.job and not seen.lost):
            return
        known = members.further(self._view.known, seen, record, self._rules)
        if seen.lost and plan.round < 0 and seen.round == known.round:
            self._plan = plan = replace(plan, job=seen.job)  # it is the same job
        self._view = replace(self._view, known=known, plan=plan)

    def _on_record(self, name: str, record: NodeStatus, now: float) -> None:
        if record.seen is not None and record.seen.job == self._superseded:
            return  # it was cut off while its job ended, and will read so
        self._note_seen(record)
        old = self._present.get(name)
        failed_at = None
        if record.failure is not None:
            failed_at = now - record.failure.age
        if old is None:
            self._arrivals += 1
            self._present[name] = Present(record, now, self._arrivals, now, failed_at)
            if name not in self._members:
                self._view = replace(self._view, last_newcomer_at=now)
            return
        if record.seq < old.record.seq:
            return  # a write that was on its way for long
        same_round = record.round == old.record.round
        if record.state == "running" and record.round == self._plan.round and not same_round:
            self._view = replace(self._view, round_began=now)
        if failed_at is not None and old.failed_at is not None and same_round:
            failed_at = min(failed_at, old.failed_at)
        changed = old.changed if same_round and record.state == old.record.state else now
        self._present[name] = Present(record, old.since, old.number, changed, failed_at)
