"""An agent's way into the rendezvous: join, publish its status, read plans, leave.

=============  ====================================================================================
thread         its one blocking call
=============  ====================================================================================
entry          enrol, update, renew, withdraw: what elaunch.rendezvous.member asks for next
follower       ``store.follow``: the newest plan
coordinator    ``store.await_leadership``, then elaunch.rendezvous.coordinator while it leads
=============  ====================================================================================

The threads post news (elaunch.rendezvous.events) and change nothing of the agent itself.
``publish`` never blocks; ``leave`` blocks for a bounded time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from elaunch.errors import StoreError, StoreUnreachable
from elaunch.rendezvous import events
from elaunch.rendezvous.coordinator import Coordinator
from elaunch.rendezvous.coordinatorstate import CoordinatorState, draw_job_and_jitter
from elaunch.rendezvous.decide.view import Rules, Search, SearchResult
from elaunch.rendezvous.events import Effect, Fence, Idle, MeetingFailed, News, Open, Task
from elaunch.rendezvous.member import MemberState
from elaunch.rendezvous.plan import NodeStatus, Plan
from elaunch.rendezvous.records import RecordError, decode_plan
from elaunch.rendezvous.waiting import What
from elaunch.store.protocol import Post, Store

SLICE = 5.0
"""Seconds of one wait for leadership, or for a plan where another look at the newest may help."""
LONG_SLICE = 20.0
"""Seconds of one wait for a plan; each costs a look at the store."""
PAUSE = 0.2
JOIN = 0.5
"""Seconds for the threads to end."""
LINGER = 3.0
"""Seconds that the agent which hosts the store stays so that the others read the end."""

log = logging.getLogger("elaunch")


def random_name() -> str:
    """Return a name for one enrolment: 6 hex digits."""
    return os.urandom(3).hex()


class World(Struct, frozen=True):
    """The agent, as far as a meeting needs it.

    Attributes:
        post: takes news; called from several threads, must not block.
        search: looks for the newest complete checkpoint, as {path, step, format}; may raise.
        fence: has all workers killed at that moment of ``clock`` unless it is called again.
        clock: monotonic seconds.
        make_name: a new random name for each enrolment.
    """

    post: Callable[[News], None]
    search: Callable[[Search], SearchResult]
    fence: Callable[[float], None]
    clock: Callable[[], float] = time.monotonic
    make_name: Callable[[], str] = random_name


class Meeting:
    """Owns this agent's membership in its job: the connection to the store, the entry, the threads.

    ``store_opener`` opens the store within the seconds that it is given, or raises StoreError;
    ``secret`` returns what signs the records in the store that it opened last.
    """

    def __init__(
        self,
        store_opener: Callable[[float], Store],
        rules: Rules,
        secret: Callable[[], bytes | None],
        world: World,
    ) -> None:
        self._open = store_opener
        self._rules = rules
        self._secret = secret
        self._world = world
        lock = threading.RLock()
        self._changed, self._joined = threading.Condition(lock), threading.Condition(lock)
        self._member = MemberState(rules, secret(), world.make_name, world.clock())
        self._store: Store | None = None
        self._first_post: tuple[Store, Post] | None = None  # the plan when that store was opened
        self._coordinator: Coordinator | None = None
        self._decided: CoordinatorState | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def name(self) -> str:
        """Our own name among the members; "" while we are not one."""
        return self._member.name

    def start(self, record: NodeStatus) -> None:
        """Join the job with ``record``; what comes of it is posted."""
        self._member = MemberState(
            self._rules, self._secret(), self._world.make_name, self._world.clock()
        )
        self._member.publish(record)
        loops = {"entry": self._keep_entry, "follower": self._follow, "coordinator": self._lead}
        for name, loop in loops.items():
            thread = threading.Thread(
                target=self._run, args=(loop,), name=f"rendezvous-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def publish(self, record: NodeStatus) -> None:
        """Make ``record`` our entry as soon as the store takes it; the newest one wins."""
        with self._changed:
            self._member.publish(record)
            self._changed.notify_all()

    def leave(self, timeout: float) -> None:
        """Remove our entry and let go of the store, in ``timeout`` seconds at most.

        The agent that hosts the store waits LINGER seconds for others to read that the job is over;
        where no agent stays, the last one waits until it leads and has ended the job.
        """
        until = time.monotonic() + timeout
        member, finished = self._member, False
        with self._changed:
            if self._threads:
                self._await(lambda: member.written or not member.name, until)
                self._await(self._has_decided, until)
        if self._threads and self._ends_the_job():
            with self._changed:
                self._await(self._knows_the_end, until)
        with self._changed:
            if self._threads:
                if self._rules.hosted_by_me and self._is_over():
                    self._await(self._is_alone, min(until, time.monotonic() + LINGER))
                finished = self._coordinator is not None and (self._is_over() or self._is_alone())
                member.withdraw()
                self._changed.notify_all()
                self._await(lambda: member.gone, until)
            store, self._closed = self._store, True
            coordinator = self._coordinator
            self._changed.notify_all()
            self._joined.notify_all()
        if coordinator is not None:
            coordinator.stop()
        if store is not None:
            if finished:
                self._clear(store)
            store.close()
        # One that is in the middle of an attempt to reach the store ends with the process.
        until = min(until, time.monotonic() + JOIN)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def read_plan(self) -> Plan:
        """Return the newest plan that the store has now; any thread may ask.

        It is as slow as the store, whose calls have deadlines. Raises StoreError, also for an agent
        that is no member at present, and RecordError.
        """
        with self._changed:
            store = self._store if self._member.name and not self._closed else None
        if store is None:
            raise StoreUnreachable("this agent is cut off from it")
        post = store.latest()
        if post is None:
            raise StoreUnreachable(f"{store.name} has no plan of this job")
        return decode_plan(post, self._secret(), "the coordinator")

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────

    def _await(self, ready: Callable[[], bool], until: float) -> None:
        self._changed.wait_for(ready, max(0.0, until - time.monotonic()))

    def _has_decided(self) -> bool:
        """Whether this agent, if it leads, has decided upon its own last record."""
        if self._coordinator is None or not self._member.name:
            return True
        return self._decided is not None and self._decided.has_own_record(self._member.newest)

    def _ends_the_job(self) -> bool:
        """Whether no agent is left that could end the job after this one."""
        with self._changed:
            store = self._store
        if store is None or self._knows_the_end():
            return False
        try:
            return self._member.ends_the_job(
                {n: lease.value for n, lease in store.members().items()}
            )
        except StoreError as exc:
            log.debug("this agent leaves without knowing who stays: %s", exc)
            return False

    def _knows_the_end(self) -> bool:
        plan = self._member.plan
        gone = not self._member.name
        return gone or self._is_over() or (plan is not None and plan.phase == "over")

    def _is_over(self) -> bool:
        return self._decided is not None and self._decided.plan.phase == "over"

    def _is_alone(self) -> bool:
        return self._decided is None or self._decided.others == 0

    def _clear(self, store: Store) -> None:
        try:
            store.clear()
        except StoreError as exc:
            log.warning("what the job wrote stays in the store: %s", exc)

    # ── threads ──────────────────────────────────────────────────────────────────────────────────

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as exc:
            log.exception("the rendezvous has failed")
            self._world.post(MeetingFailed(70, f"the rendezvous has failed: {exc!r}"))

    def _keep_entry(self) -> None:
        member, clock = self._member, self._world.clock
        while not self._closed:
            with self._changed:
                task = member.next(clock())
                if isinstance(task, Idle):
                    self._changed.wait(None if task.until is None else task.until - clock())
                    continue
            sent = clock()
            problem = self._perform(task)
            with self._changed:
                effects = member.done(task, sent, clock(), problem)
                self._post(effects)
                self._changed.notify_all()
                if member.name:
                    self._joined.notify_all()
            for effect in effects:
                if isinstance(effect, Fence):
                    self._world.fence(effect.until)

    def _perform(self, task: Task) -> StoreError | None:
        try:
            if isinstance(task, Open):
                self._reopen(task.seconds)
                return None
            store = self._store
            assert store is not None  # Open comes first
            member_call(store, task, self._rules.heartbeat_timeout)
        except StoreError as exc:
            return exc
        return None

    def _reopen(self, seconds: float) -> None:
        with self._changed:
            old, self._store = self._store, None
        if old is not None:
            old.close()
        store = self._open(seconds)
        self._member.secret = self._secret()
        try:
            post = store.latest()
            with self._changed:
                self._member.opened(store.name, post)
        except StoreError:
            store.close()
            raise
        with self._changed:
            self._store = store
            self._first_post = None if post is None else (store, post)

    def _post(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Fence):
                self._world.post(effect)

    def _enrolled(self) -> tuple[Store, str] | None:
        """Wait until we are a member; None when this meeting is closed."""
        with self._changed:
            self._joined.wait_for(lambda: self._closed or (self._store and self._member.name))
            if self._closed or self._store is None:
                return None
            return self._store, self._member.name

    def _follow(self) -> None:
        while True:
            enrolled = self._enrolled()
            if enrolled is None:
                return
            store, _ = enrolled
            try:
                post = self._next_post(store)
                if post is None and self._look_due():
                    self._look(store)
            except StoreError as exc:
                self._unread("reading", exc)
                continue
            self._read("reading")
            if post is not None:
                self._receive(store, post)

    def _next_post(self, store: Store) -> Post | None:
        """Wait a while for the next post; raises StoreError."""
        member = self._member
        with self._changed:
            first = self._first_post
            if first is not None and first[0] is store:
                self._first_post = None
                return first[1]
        removed = member.old_job is not None and member.plan is None
        looks = member.refused is not None or removed
        seconds = SLICE if looks else max(SLICE, min(LONG_SLICE, self._rules.remind))
        post = store.follow(member.follows, seconds)
        if post is None and member.refused is not None:
            post = store.latest()  # the same version may have been written again
        if post is None and removed:
            post = store.latest()  # the plan of the job before may have been removed
            member.after = 0 if post is None else member.after
        return post

    def _receive(self, store: Store, post: Post) -> None:
        with self._changed:
            if store is not self._store:
                return
            self._post(self._member.receive(post))
            if post == self._member.refused and self._coordinator is not None:
                self._coordinator.reread()

    def _look_due(self) -> bool:
        with self._changed:
            return self._member.look_due(self._world.clock())

    def _look(self, store: Store) -> None:
        """Read the store because nothing was received for long; raises StoreError."""
        post = store.latest()
        members = {name: lease.value for name, lease in store.members().items()}
        with self._changed:
            if store is not self._store:
                return
            if post is not None:
                self._post(self._member.receive(post))
            self._post(self._member.looked(members, self._world.clock()))
            self._changed.notify_all()

    def _lead(self) -> None:
        while True:
            enrolled = self._enrolled()
            if enrolled is None:
                return
            store, name = enrolled
            try:
                if store.await_leadership(name, SLICE):
                    self._coordinate(store, name)
                else:
                    self._read("leading")
                    self._evict_coordinator(store)
            except RecordError as exc:
                self._world.post(MeetingFailed(exc.exit_code, str(exc)))
                return
            except StoreError as exc:
                self._unread("leading", exc)

    def _evict_coordinator(self, store: Store) -> None:
        """Evict the agent that leads, if it must be gone; raises StoreError."""
        with self._changed:
            overdue, known = self._member.plan_overdue(self._world.clock()), self._member.after
        leader = store.unsteady_leader() if overdue else ""
        if not leader:
            return
        post = store.latest()
        with self._changed:
            overdue = self._member.plan_overdue(self._world.clock(), leader)
        same = post is not None and post.version == known  # or only the watch is broken
        if overdue and same and store.evict(leader):
            log.warning("the coordinator has published nothing for long: evicted")

    def _read(self, what: What) -> None:
        """Note that something could be read."""
        with self._changed:
            self._post(self._member.read(what))

    def _unread(self, what: What, problem: StoreError) -> None:
        """Note that something could not be read, and wait a moment before the next try."""
        with self._changed:
            self._post(self._member.unread(what, problem, self._world.clock()))
        self._pause()

    def _coordinate(self, store: Store, name: str) -> None:
        state = CoordinatorState(
            name, self._rules, self._secret(), self._member.old_job, draw_job_and_jitter
        )
        coordinator = Coordinator(
            store,
            state,
            self._world.search,
            self._world.clock,
            self._note_decided,
            self._note_published,
        )
        with self._changed:
            self._coordinator, self._decided = coordinator, None
            self._changed.notify_all()
        try:
            why = coordinator.run(self._member.opened_at, self._member.plan)
            log.debug("%s coordinates no more: %s", name, why)
        finally:
            with self._changed:
                self._coordinator = None
                self._changed.notify_all()

    def _note_published(self, problem: StoreError | None) -> None:
        with self._changed:
            self._post(self._member.plan_published(problem, self._world.clock()))
            self._changed.notify_all()

    def _note_decided(self, state: CoordinatorState) -> None:
        with self._changed:
            self._decided = state
            self._read("leading")
            self._changed.notify_all()

    def _pause(self) -> None:
        """Wait a moment before the next try; the entry's thread judges how long is too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, PAUSE)


def member_call(store: Store, task: Task, ttl: float) -> None:
    """Make the call to the store that ``task`` stands for; raises StoreError."""
    if isinstance(task, events.Enrol):
        store.enrol(task.name, task.value, ttl)
    elif isinstance(task, events.Update):
        store.update(task.value)
    elif isinstance(task, events.Renew):
        store.renew()
    elif isinstance(task, events.Withdraw):
        store.withdraw()
