"""One agent as a member of its job: when to write, when to renew, when it counts as cut off.

MemberState decides and never blocks: ``next`` returns the one call to the store that comes now,
``done`` takes its result, ``receive`` takes a post. It has no thread and no clock, so that a
simulation can drive it; elaunch.rendezvous.meeting drives it for real. ::

    Open ──► Enrol ──► Renew, Update … ──► Withdraw
              ▲            │ the entry is gone, or could be: CutOff
              └────────────┘ under another name: Rejoined

The fence. A renewal that was *sent* at t keeps the entry until t + ttl at least, so until then no
coordinator can have given this agent up. The server process kills all workers at t + 5/6 ttl,
unless a later renewal has moved that moment. Where it is proven that nobody decides, it moves on
without renewals: etcd that gets a leader again gives every lease its full time again; a TCPStore
may be hosted anew and empty, so there it moves by ttl / HOSTED only. An agent that finds such a
store ends its workers at once and enrols there, with what it has seen of the job
(``NodeStatus.seen``); the new host's first round waits for those that cannot (``opened_at``,
elaunch.rendezvous.decide.members).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from elaunch.errors import (
    LeaseLost,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreReplaced,
    StoreUnreachable,
)
from elaunch.rendezvous import records
from elaunch.rendezvous.decide.view import FENCE, HOSTED, Rules
from elaunch.rendezvous.events import (
    CutOff,
    Effect,
    Enrol,
    Fence,
    Idle,
    MeetingFailed,
    Open,
    PlanSeen,
    Rejoined,
    Renew,
    StoreBack,
    StoreSilent,
    Task,
    Update,
    Withdraw,
)
from elaunch.rendezvous.plan import JobSeen, NodeStatus, Plan
from elaunch.rendezvous.waiting import Hopeless, Overdue, Waiting, What, is_last, owes
from elaunch.store.protocol import Post

RENEWALS = 6
"""Most renewals in the lifetime of an entry; the fence falls such a part before its end."""
NO_LEADER = 2.0
"""Seconds that an etcd takes to elect a leader, in which no renewal is answered."""
RETRY_FIRST, RETRY_MOST = 0.05, 0.25
SHORTEST = 0.5
"""Seconds that even the last attempt to open the store has, so that it can say what is there."""
REFUSING = 5.0
"""Seconds in which an agent has to find one plan that it can read: another process may have written
others, which the coordinator's next one replaces."""

log = logging.getLogger("elaunch")


def renewal_period(ttl: float, hosted: bool) -> float:
    """Return the seconds between two renewals of an entry that lives ``ttl`` seconds without one.

    It is a sixth of them: a TCPStore that is ``hosted`` anew begins a round after a third, and all
    agents are to have found it by then. With etcd it is up to a fourth, where the fence then still
    outlasts the election of a leader, so that long-lived entries cost the store less.
    """
    sixth = ttl / RENEWALS
    return sixth if hosted else max(sixth, min(ttl / 4, ttl * FENCE - NO_LEADER))


class MemberState:
    """One agent's membership in the job, as far as the agent knows."""

    def __init__(
        self, rules: Rules, secret: bytes | None, make_name: Callable[[], str], now: float
    ) -> None:
        self._rules = rules
        self.secret = secret
        """The key that signs the records, ours and those of others; None: nothing does."""
        self._make_name = make_name
        self._ttl = rules.heartbeat_timeout
        self.name = ""
        """Our own name among the members, "" while we are not one."""
        self.plan: Plan | None = None
        """The newest plan of this job."""
        self.old_job: str | None = None
        """The job that had this run id before and was over when we came."""
        self.after = 0
        """Version of the newest post that was received and is a plan."""
        self.refused: Post | None = None
        """The post that was refused last, if none was accepted since."""
        self._refusal = ""
        self._refused_at: float | None = None
        self.store_name = ""
        self.opened_at = now
        """When the store was asked to open that we use, or host."""
        self._furthest: Plan | None = None
        self._lost = False  # the store has lost its memory, and no round has begun since
        self._record: NodeStatus | None = None
        self._seq = self._written = 0
        self._hosted = False
        self._opened = self._stale_entry = self._withdrawing = False
        self._ever_joined = self._cut_off = self._silent = self._failed = False
        self._last_answer = now
        self._fence = now
        self._renew_at = now
        self._retry_at = now
        self._retries = 0
        self._rewrite_until = now
        self._rewrite_at: float | None = None
        self._problem = ""
        self._overdue = Overdue()
        self._problem_at = -math.inf
        self._waiting = Waiting(rules, now)
        self._moved = False
        self._owed: int | None = None  # version of the plan that is to be followed by another
        self._owed_by, self._owed_since = "", now

    # ── what the agent wants ─────────────────────────────────────────────────────────────────────

    def publish(self, record: NodeStatus) -> None:
        """Make ``record`` our entry."""
        self._moved = True
        self._seq += 1
        self._record = replace(records.fitting(record), seq=self._seq, seen=self._seen())

    def withdraw(self) -> None:
        """Have our entry removed for good."""
        self._withdrawing = True

    @property
    def newest(self) -> int:
        """The number of the newest record."""
        return self._seq

    @property
    def written(self) -> bool:
        """Whether the newest record is in the store."""
        return bool(self.name) and self._written == self._seq

    @property
    def gone(self) -> bool:
        """Whether nothing of ours is in the store, as far as we know, and nothing will be."""
        return self._failed or (self._withdrawing and not self.name and not self._stale_entry)

    # ── what comes next ──────────────────────────────────────────────────────────────────────────

    def next(self, now: float) -> Task:
        """Return the next call to the store."""
        if self.gone or self._record is None:
            return Idle()
        if now < self._retry_at:
            return Idle(self._retry_at)
        if self._withdrawing or self._stale_entry:
            return Withdraw() if self._opened else self._opening(now)
        if not self._opened:
            return self._opening(now)
        if not self.name:
            if self._ever_joined:
                self._seq += 1
                self._record = replace(self._record, seq=self._seq, seen=self._seen())
            name = self._make_name()
            return Enrol(name, records.encode(self._record, self.secret, name), self._seq)
        again = self._rewrite_at is not None and now >= self._rewrite_at
        unwritten = self._written != self._seq or again
        late = now - self._renew_at
        if late >= self._ttl / RENEWALS or (late >= 0 and not unwritten):
            return Renew()
        if unwritten:
            return Update(records.encode(self._record, self.secret, self.name), self._seq)
        return Idle(min(self._renew_at, self._rewrite_at or self._renew_at))

    def done(self, task: Task, sent: float, now: float, problem: StoreError | None) -> list[Effect]:
        """Note the result of ``task``, begun at ``sent``, and return what follows from it."""
        if isinstance(task, Open):
            self.opened_at = sent
        if problem is None:
            effects = self._answered(now)
            if isinstance(task, Update | Enrol):
                effects += self._overdue.done("entry")
            effects += self._succeeded(task, sent, now)
            if self._is_refusing(now):
                effects += self._give_up(self._refusal)
        elif isinstance(problem, LeaseLost | StoreReplaced):
            self._last_answer = now
            self._opened = self._opened and isinstance(problem, LeaseLost)
            self._lost = self._lost or isinstance(problem, StoreReplaced)
            effects = self._cut(str(problem), stale=False)
        elif isinstance(problem, StoreDenied | records.RecordError) and not self._ever_joined:
            effects = self._give_up(str(problem))
        else:
            effects = self._unanswered(task, now, problem)
        return effects

    def opened(self, store_name: str, post: Post | None) -> None:
        """Note the newest post of a store that was opened just now."""
        self.store_name = store_name
        self._hosted = store_name.startswith("TCPStore")
        self._opened = True
        self.after = 0
        if post is not None and (self._lost or not self._ever_joined):
            plan = self._plan_of(post)
            over = plan is not None and plan.phase == "over"
            if plan is not None and over and (self.plan is None or plan.job != self.plan.job):
                self.old_job, self.after = plan.job, post.version

    @property
    def follows(self) -> int:
        """The version above which the next post is waited for."""
        return self.after if self.refused is None else max(self.after, self.refused.version)

    def receive(self, post: Post) -> list[Effect]:
        """Note a post; one that is refused counts as not received."""
        if post.version == self.after or post == self.refused:
            return []
        plan = self._plan_of(post)
        if plan is None:
            return []
        self.after = post.version
        if plan.job == self.old_job:
            if not self._lost or plan.phase == "over":
                return []
            self.old_job = None  # etcd was restored to a moment when that job ran: it goes on
        another = self.plan is not None and plan.job != self.plan.job
        if another and not (self._hosted or self._lost):
            return self._give_up(
                "the job ended while this agent was cut off, and another with its run id has begun"
            )
        self.plan = plan
        self._moved = True
        if self._furthest is None or plan.round > self._furthest.round:
            self._lost = False
        self._furthest = _further(self._furthest, plan)
        return [PlanSeen(plan, self.name)]

    # ── waiting for others ───────────────────────────────────────────────────────────────────────

    def look_due(self, now: float) -> bool:
        """Return whether to read the plan and the members: this agent waits and receives nothing.

        The answers are for :meth:`receive` and :meth:`looked`.
        """
        rests = self._record is not None and self._record.rests
        over = self.plan is not None and self.plan.phase == "over"
        if self._moved or not self.name or not rests or over or self._withdrawing:
            self._moved = False
            self._waiting.restart(now)
        return self._waiting.due(now)

    def looked(self, members: Mapping[str, bytes], now: float) -> list[Effect]:
        """Note the members as they are, and return what follows for an agent that waits."""
        known = self._decoded(members)
        if not self.look_due(now):
            return []
        found = self._waiting.looked(self.plan, self.name, known, now)
        if not isinstance(found, Hopeless):
            return [found]
        last = f"; the store's last error: {self._problem}"
        return self._give_up(
            found.problem + (last if self._problem_at >= self._waiting.since else "")
        )

    def plan_overdue(self, now: float, leader: str = "") -> bool:
        """Return whether a plan has been owed for so long that the coordinator must be gone.

        ``leader`` leads now: it has the whole time again if it is another than we thought.
        """
        plan = self.plan
        if plan is None or not self.written or not owes(plan, self._record):
            self._owed = None
            return False
        if self.after != self._owed:
            self._owed, self._owed_by, self._owed_since = self.after, plan.coordinator, now
        if leader and leader != self._owed_by:
            self._owed_by, self._owed_since = leader, now
        limit = 2 * (self._ttl if plan.phase == "running" else self._rules.remind)
        return now - self._owed_since >= limit

    def ends_the_job(self, members: Mapping[str, bytes]) -> bool:
        """Return whether this agent is to end the job before it leaves, by the members."""
        return bool(self.name) and is_last(self.plan, self.name, self._decoded(members))

    def _decoded(self, members: Mapping[str, bytes]) -> dict[str, NodeStatus]:
        known: dict[str, NodeStatus] = {}
        for name, value in members.items():
            with contextlib.suppress(records.RecordError):  # the coordinator names its sender
                known[name] = records.decode_agent(value, self.secret, name)
        return known

    def unread(self, what: What, problem: StoreError, now: float) -> list[Effect]:
        """Note that something could not be read; that may not last for ever."""
        self._note_problem(problem, now)
        return [*self._undone(what, problem, now), *self._give_up_if_overdue(now)]

    def read(self, what: What) -> list[StoreBack]:
        """Note that it could be read."""
        return self._overdue.done(what)

    def _undone(self, what: What, problem: StoreError, now: float) -> list[StoreSilent]:
        """Note what the store did not do; workers that run need no more than our lease."""
        works = self._record is not None and self._record.state == "running"
        spared = works and what != "plan" and isinstance(problem, StoreDenied | StoreFull)
        return self._overdue.refused(what, problem, now, needed=not spared)

    def _note_problem(self, problem: StoreError, now: float) -> None:
        """Keep what the store refused, for the error of an agent that waits in vain."""
        self._problem, self._problem_at = str(problem), now

    def _plan_of(self, post: Post) -> Plan | None:
        """Return a post's plan; None if it is refused, which ``refused`` then keeps."""
        try:
            known = () if self.plan is None else self.plan.nodes
            plan = records.decode_plan(post, self.secret, "the coordinator", known)
        except records.RecordError as exc:
            if str(exc) != self._refusal:
                log.warning("%s", exc)
            self.refused, self._refusal = post, str(exc)
            return None
        self.refused, self._refusal, self._refused_at = None, "", None
        return plan

    def _is_refusing(self, now: float) -> bool:
        """Whether no plan of this job could be read for a while: our secret may be another one."""
        if self.refused is None or self.plan is not None:
            return False
        if self._refused_at is None:
            self._refused_at = now
        return now - self._refused_at >= REFUSING

    def plan_published(self, problem: StoreError | None, now: float) -> list[Effect]:
        """Note whether this agent, which coordinates, could publish a plan."""
        if problem is None:
            return [*self._overdue.done("plan")]
        return self.unread("plan", problem, now)

    # ── how it went ──────────────────────────────────────────────────────────────────────────────

    def _answered(self, now: float) -> list[Effect]:
        self._last_answer = now
        self._retries = 0
        if not self._silent:
            return []
        self._silent = False
        return [StoreBack()] if self.name else []

    def _succeeded(self, task: Task, sent: float, now: float) -> list[Effect]:
        if isinstance(task, Enrol):
            return self._joined(task, sent)
        if isinstance(task, Withdraw):
            self.name, self._stale_entry = "", False
            return []
        if isinstance(task, Update):
            # An earlier write may be on its way still and come after this one: write again.
            self._written = task.seq
            doubtful = now < self._rewrite_until
            self._rewrite_at = now + self._ttl / RENEWALS if doubtful else None
            return []
        if isinstance(task, Renew):
            return self._renewed(sent, now)
        return []

    def _joined(self, task: Enrol, sent: float) -> list[Effect]:
        self.name = name = task.name
        self._moved = True
        self._written = task.seq
        self._rewrite_at = None
        effects = [*self.read("reading"), *self.read("leading"), *self._keep(sent)]
        if self._ever_joined:
            self._cut_off = False
            effects.append(Rejoined(name))
            if self.plan is not None:
                effects.append(PlanSeen(self.plan, name))
        self._ever_joined = True
        return effects

    def _renewed(self, sent: float, now: float) -> list[Effect]:
        if now >= self._fence:
            return self._cut("the renewal of its entry was too late", stale=True)
        return self._keep(sent)

    def _keep(self, sent: float) -> list[Effect]:
        self._fence = sent + self._ttl * FENCE
        self._renew_at = sent + renewal_period(self._ttl, self._hosted)
        return [Fence(self._fence)]

    def _unanswered(self, task: Task, now: float, problem: StoreError) -> list[Effect]:
        effects: list[Effect] = []
        self._note_problem(problem, now)
        self._retry_at = now + min(RETRY_MOST, RETRY_FIRST * 2.0 ** min(self._retries, 10))
        self._retries += 1
        if isinstance(problem, StoreClosed):
            self._opened = False
        if isinstance(task, Update):
            self._rewrite_until = now + self._ttl
        if isinstance(task, Enrol):
            self._stale_entry = True  # it may be there all the same
        nobody = isinstance(problem, StoreUnreachable) and problem.nobody_decides
        if self.name and now < self._fence and nobody:
            share = 1 / HOSTED if self._hosted else FENCE
            self._fence = max(self._fence, now + self._ttl * share)
            effects.append(Fence(self._fence))
            if not self._silent:
                self._silent = True
                effects.append(StoreSilent(f"{problem}; the workers go on meanwhile"))
        if self.name and now >= self._fence:
            effects += self._cut(f"no answer from the store: {problem}", stale=True)
        elif not self.name and self._ever_joined and not self._rules.hosted_by_me:
            self._opened = self._stale_entry = False  # perhaps another connection gets through
        if self._withdrawing:
            self.name, self._stale_entry = "", False  # it expires by itself
        if now - self._last_answer >= self._limit:
            effects += self._give_up(self._lost_store(now))
        if isinstance(task, Update | Enrol):
            effects += self._undone("entry", problem, now)
        return effects + self._give_up_if_overdue(now)

    @property
    def _limit(self) -> float:
        """For how many seconds this agent goes on without the store."""
        return self._rules.store_timeout if self._ever_joined else self._rules.join_timeout

    def _opening(self, now: float) -> Open:
        return Open(max(SHORTEST, self._last_answer + self._limit - now))

    def _give_up_if_overdue(self, now: float) -> list[Effect]:
        problem = self._overdue.overdue(now, self._last_answer, self._limit)
        if not problem:
            return []
        return self._give_up(f"{self.store_name} {problem}, the last attempt: {self._problem}")

    def _cut(self, reason: str, stale: bool) -> list[Effect]:
        """We are no member any more, or cannot know; ``stale``: our entry may be there."""
        self.name = ""
        self._stale_entry = stale
        self._retry_at = 0.0
        if self._cut_off or not self._ever_joined:
            return []
        self._cut_off = True
        return [CutOff(reason)]

    def _give_up(self, problem: str) -> list[Effect]:
        if self._failed:
            return []
        self._failed = True
        self.name = ""
        return [MeetingFailed(StoreError.exit_code, problem)]

    def _lost_store(self, now: float) -> str:
        if not self._ever_joined:
            return f"cannot join: {self._problem}, for {now - self._last_answer:.0f} s"
        text = f"lost the store, {self.store_name}: no answer for {now - self._last_answer:.0f} s"
        text += f", the last attempt: {self._problem}"
        if self._hosted:
            text += (
                "; the agent that hosts it is gone or cannot be reached; "
                "etcd (--rdzv-backend etcd) survives the loss of any node"
            )
        return text

    def _seen(self) -> JobSeen | None:
        plan = self._furthest
        if plan is None:
            return None
        return JobSeen(
            job=plan.job,
            phase=plan.phase,
            round=plan.round,
            restarts=plan.restarts,
            without_progress=plan.without_progress,
            step=None if plan.checkpoint is None else plan.checkpoint.step,
            lost=self._lost and not self._hosted,
        )


def _further(old: Plan | None, new: Plan) -> Plan:
    """Return the plan by which the job was further: a store may know less than it did."""
    if old is None or new.phase == "over" or new.round > old.round:
        return new
    return new if new.job == old.job and new.round == old.round else old
