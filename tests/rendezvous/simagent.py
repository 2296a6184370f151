"""One simulated agent: the real MemberState and CoordinatorState, and workers that are numbers.

What its threads and its loop do in elaunch.rendezvous.meeting and elaunch.agent is done here by
events; nothing of what they decide is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import structs

from elaunch.errors import LeaseLost, StoreError, StoreReplaced
from elaunch.rendezvous import events
from elaunch.rendezvous.coordinatorstate import CoordinatorState, Reread
from elaunch.rendezvous.decide.view import Evict, Publish, Rules, Search, SearchResult
from elaunch.rendezvous.events import CutOff, Effect, Fence, Idle, MeetingFailed, Open, PlanSeen
from elaunch.rendezvous.member import MemberState
from elaunch.rendezvous.plan import NodeStatus, Plan, Survivors, WorkerFailure
from tests.rendezvous.simstore import Client, Link

if TYPE_CHECKING:
    from tests.rendezvous.simulation import Simulation

PAUSE = 0.2


@dataclass
class Workers:
    """The workers of one node in one round; all of them are one.

    Those that ``stay`` wait for the next round; ``survivors`` as in NodeStatus.
    """

    job: str
    round: int
    ending: bool = False
    failed: bool = False
    failed_at: float = 0.0
    finished: bool = False
    stay: bool = False
    survivors: Survivors = ""


@dataclass
class Agent:
    """A process that starts workers; ``number`` says which, ``host`` where."""

    sim: Simulation
    number: int
    host: int
    rules: Rules
    link: Link
    alive: bool = True
    frozen: bool = False
    exit_code: int | None = None
    problem: str = ""
    fence: float = 0.0
    workers: Workers | None = None
    plan: Plan | None = None
    name: str = ""
    own_name: str = ""
    own_round: int = -1
    cut_off: bool = False
    ready: bool = False
    told_to_go: bool = False
    last: Workers | None = None
    coordinator: CoordinatorState | None = None
    lingers: int = 0
    deaf: bool = False
    heard_at: float = 0.0
    deferred: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sim = self.sim
        self.client = Client(sim.engine, sim.store, self.link)
        self.member = MemberState(self.rules, b"secret", self._make_name, sim.engine.now)
        self._names = 0
        self._busy = False
        self._heard_at = 0.0
        self._following = self._leading = False
        self.say()
        self.later(sim.random.uniform(0.0, 1.5), self._become_ready)
        self.entry()

    def _make_name(self) -> str:
        self._names += 1
        return f"a{self.number}.{self._names}"

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Have this process do something, unless it is dead then; a frozen one does it later."""

        def act() -> None:
            if not self.alive:
                return
            if self.frozen:
                self.deferred.append(act)
            else:
                action()

        self.sim.engine.after(delay, act)

    # ── what its threads do ──

    def entry(self) -> None:
        """Do what comes next for our entry."""
        if self._busy or not self.alive or self.frozen:
            return
        now = self.sim.engine.now
        task = self.member.next(now)
        if isinstance(task, Idle):
            if task.until is not None:
                self.later(task.until - now + 1e-9, self.entry)
            return
        self._busy = True
        self._call(task, lambda value: self.later(0.0, lambda: self._entry_done(task, now, value)))

    def _call(self, task: Any, answer: Callable[[Any], None]) -> None:
        client = self.client
        if isinstance(task, Open):
            client.lost = True  # it is closed
            client = self.client = Client(self.sim.engine, self.sim.store, self.link)
            client.call(lambda: client.store.post, answer)
            return
        store, name = client.store, client.name
        if isinstance(task, events.Enrol):
            client.name = task.name
            client.call(lambda: store.enrol(task.name, task.value, self._ttl()), answer)
        elif isinstance(task, events.Update):
            client.writes = number = client.writes + 1
            client.call(lambda: store.update(name or "", task.value, number), answer)
        elif isinstance(task, events.Renew):
            client.call(lambda: store.renew(name or ""), answer)
        else:
            client.call(lambda: store.withdraw(name), answer)

    def _ttl(self) -> float:
        return self.rules.heartbeat_timeout

    def _entry_done(self, task: Any, sent: float, value: Any) -> None:
        self._busy = False
        problem = value if isinstance(value, StoreError) else None
        effects: list[Effect] = []
        if isinstance(task, Open) and problem is None:
            place = "TCPStore at sim" if self.sim.setting.hosted else "etcd at sim"
            self.member.opened(place, value)
        effects += self.member.done(task, sent, self.sim.engine.now, problem)
        self._take(effects)
        self.entry()
        if self.member.name and not self._following:
            self._following = self._leading = True
            self._follow()
            self._lead()
        if self.told_to_go and self.member.gone:
            self._exit()

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Fence):
                self._move_fence(effect.until)
            else:
                # One queue: what was posted first is heard first.
                at = self.sim.engine.now + self.sim.random.uniform(0.0, 0.004)
                self._heard_at = max(self._heard_at, at)
                delay = self._heard_at - self.sim.engine.now
                self.later(delay, lambda e=effect: self.hear(e))

    def _follow(self) -> None:
        client, after = self.client, self.member.after

        def ready() -> Any:
            post = client.store.post
            return post if post is not None and post.version > after else None

        def answered(value: Any) -> None:
            if isinstance(value, StoreError):
                self.later(PAUSE, self._follow)
                return
            if value is not None and client is self.client:
                self._take(self.member.receive(value))
            if value is None and self.member.look_due(self.sim.engine.now):
                self._look(client)
            else:
                self._follow()

        client.wait(ready, 5.0, lambda value: self.later(0.0, lambda: answered(value)))

    def _look(self, client: Client) -> None:
        """Read the store, since nothing was received for long."""
        store = client.store

        def read() -> tuple[Any, dict[str, bytes]]:
            return store.post, {name: entry.value for name, entry in store.entries.items()}

        def answered(value: Any) -> None:
            if isinstance(value, StoreError):
                self._take(self.member.unread("reading", value, self.sim.engine.now))
                self.later(PAUSE, self._follow)
                return
            post, members = value
            if client is self.client:
                effects = self.member.receive(post) if post is not None else []
                self._take(effects + self.member.looked(members, self.sim.engine.now))
            self._follow()

        client.call(read, lambda value: self.later(0.0, lambda: answered(value)))

    def _lead(self) -> None:
        client, name = self.client, self.member.name
        if not name:
            self.later(PAUSE, self._lead)
            return

        def answered(value: Any) -> None:
            if value is True and self.member.name == name and client is self.client:
                client.offset = 0
                client.call(lambda: client.store.post, lambda v: self.later(0.0, lambda: begin(v)))
                return
            if value is None and self.member.plan_overdue(self.sim.engine.now):
                client.call(
                    lambda: client.store.leader, lambda v: self.later(0.0, lambda: evict(v))
                )
            else:
                again(PAUSE if isinstance(value, StoreError) else 0.0)

        def evict(leader: Any) -> None:
            who = leader if isinstance(leader, str) else ""
            if self.member.plan_overdue(self.sim.engine.now, who) and client.store.unsteady:
                client.call(lambda: client.store.evict(name, who), lambda _: again(0.0))
            else:
                again(0.0)

        def again(pause: float) -> None:
            self.later(pause, self._lead)

        def begin(post: Any) -> None:
            if isinstance(post, StoreError):
                self.later(PAUSE, self._lead)
                return
            draw = self.sim.draw
            state = CoordinatorState(name, self.rules, b"secret", self.member.old_job, draw)
            state.begin(post, self.sim.engine.now, self.member.opened_at)
            self.coordinator = state
            if client.store.unsteady:
                state.on_evicted(True, self.sim.engine.now)
            self._changes(client, state)
            self._step(client, state)

        def ready() -> Any:
            return client.store.take_lead(name) or None

        client.wait(ready, 5.0, lambda value: self.later(0.0, lambda: answered(value)))

    # ── what its coordinator's threads do ──

    def _changes(self, client: Client, state: CoordinatorState) -> None:
        if self.coordinator is not state:
            return
        store, offset = client.store, client.offset

        def ready() -> Any:
            if store.leader != state.me:
                raise LeaseLost(f"{state.me} does not lead")
            if offset == 0:
                from elaunch.store.protocol import Change

                all_there = [Change(n, e.value, "put") for n, e in store.entries.items()]
                return (len(store.log), all_there) if all_there else None
            return (len(store.log), store.log[offset:]) if len(store.log) > offset else None

        def answered(value: Any) -> None:
            if self.coordinator is not state:
                return
            if isinstance(value, StoreReplaced | LeaseLost):
                state.ended = str(value)
                self._step(client, state)
                return
            if isinstance(value, StoreError):
                self.later(PAUSE, lambda: self._changes(client, state))
                return
            if value is not None and not self.deaf:
                client.offset, changes = value
                state.on_changes(changes, self.sim.engine.now)
                self._step(client, state)
            self._changes(client, state)

        client.wait(ready, 2.0, lambda value: self.later(0.0, lambda: answered(value)))

    def _step(self, client: Client, state: CoordinatorState) -> None:
        """Take a step unless one is under way."""
        if self.coordinator is not state or getattr(state, "acting", False):
            return
        if state.ended:
            self.coordinator = None
            self._lead()
            return
        now = self.sim.engine.now
        step, _ = state.step(now)

        def on(action: Callable[[Any], None]) -> Callable[[Any], None]:
            state.acting = True  # type: ignore[attr-defined]

            def done() -> None:
                state.acting = False  # type: ignore[attr-defined]
                self._step(client, state)

            def answered(value: Any) -> None:
                action(value)
                done()

            return lambda value: self.later(0.0, lambda: answered(value))

        if isinstance(step, Publish):

            def published(value: Any) -> None:
                problem = value if isinstance(value, StoreError) else None
                accepted = None if problem else value
                self._take(self.member.plan_published(problem, self.sim.engine.now))
                state.on_published(step, accepted, self.sim.engine.now)

            store, name, value = client.store, client.name, state.encoded(step)
            client.call(lambda: store.publish(name, step.version, *value), on(published))
        elif isinstance(step, Reread):

            def read(value: Any) -> None:
                if isinstance(value, StoreError):
                    state.on_no_plan(self.sim.engine.now)
                else:
                    state.on_plan(value, self.sim.engine.now)

            client.call(lambda: client.store.post, on(read))
        elif isinstance(step, Evict):
            store, me, (first, *_), may = client.store, state.me, step.names, client.store.unsteady

            def evicted(_: Any) -> None:
                state.on_evicted(may, self.sim.engine.now)

            client.call(lambda: may and store.evict(me, first), on(evicted))
        elif isinstance(step, Search):

            def found() -> None:
                state.on_found(SearchResult(self.sim.checkpoint(), probes=step.probes))
                self._step(client, state)

            self.later(self.sim.random.uniform(0.001, 0.3), found)
        elif step.until is not None:
            self.later(step.until - now + 1e-9, lambda: self._step(client, state))

    # ── what its loop does ──

    def _become_ready(self) -> None:
        self.ready = True
        self.rest()
        self.say()

    def hear(self, news: Any) -> None:
        """Take news as the agent's loop does."""
        self.heard_at = self.sim.engine.now
        if isinstance(news, PlanSeen):
            self.plan, self.name = news.plan, news.name
            self.rest()
        elif isinstance(news, CutOff):
            self.cut_off = True
            self.stop(0.0)
            self.say()
        elif isinstance(news, MeetingFailed):
            self.problem, self.exit_code = news.problem, news.exit_code
            self.go(news.exit_code)
        elif type(news).__name__ == "Rejoined":
            self.cut_off = False
            self.own_name, self.own_round = "", -1
            self.name = news.name
            self.say()

    def go(self, code: int) -> None:
        """End: stop the workers, cease to be a member, and then the process."""
        self.exit_code = code
        if self.told_to_go:
            return
        self.told_to_go = True
        self.stop(self.sim.random.uniform(0.0, 0.3))
        self.say()
        self.rest()

    def rest(self) -> None:
        """Do what the plan says, if it says something to us."""
        plan, workers = self.plan, self.workers
        if workers is not None:
            if self.told_to_go or plan is None:
                return
            gone_on = plan.round > workers.round or plan.node_rank(self.own_name) is None
            if workers.stay:
                self._rest_while_they_stay(plan, workers)
            elif plan.phase != "running" or gone_on:
                stay = self.sim.setting.stand and not gone_on
                stay = stay and plan.cause in ("failure", "lost")
                stay = stay and plan.phase == "ending" and not (workers.ending or workers.failed)
                grace = self.sim.random.uniform(0.0, 0.3)
                self.later(grace, lambda: self._stay(workers)) if stay else self.stop(grace)
            return
        if self.told_to_go:
            self._leave()
            return
        if plan is None or not self.ready:
            return
        if plan.phase == "over":
            self.go(plan.exit_code or 0)
            return
        mine = plan.node_rank(self.name) is not None and not self.cut_off
        newer = self.own_name != self.name or plan.round > self.own_round
        if mine and newer and plan.phase == "running":
            if plan.keeps(self.name, 1):  # it has ended before this round began
                self.own_name, self.own_round = self.name, plan.round
                self.last = Workers(plan.job, plan.round, failed=True, survivors="wait")
            else:
                self._begin(plan)
        elif mine and newer:
            self.own_name, self.own_round, self.last = self.name, plan.round, None
        self.say()

    def _stay(self, workers: Workers) -> None:
        """Keep the workers of a round in which others have failed."""
        if self.workers is workers and not (workers.ending or workers.failed):
            workers.stay, workers.survivors = True, "work"
            self.say()
            self.rest()

    def _rest_while_they_stay(self, plan: Plan, workers: Workers) -> None:
        if workers.ending:
            return
        mine = plan.node_rank(self.name) is not None and not self.cut_off
        newer = plan.phase == "running" and plan.round > self.own_round
        if plan.phase == "over":
            self.go(plan.exit_code or 0)
        elif newer and mine and plan.keeps(self.name, 1):
            self._begin(plan)
            self.say()
        elif newer or (plan.phase == "forming" and plan.anew is None):
            self.stop(self.sim.random.uniform(0.0, 0.3))
            self.say()

    def _leave(self) -> None:
        """Withdraw once the others know; who hosts the store waits for them."""
        hosting = self.rules.hosted_by_me and self.coordinator is not None
        if hosting and self.coordinator is not None:
            unheard = not self.coordinator.has_own_record(self.member.newest)
            waiting = self.coordinator.plan.phase == "over" and self.coordinator.others > 0
            self.lingers += 1
            if (unheard or waiting) and self.lingers < 60:
                self.later(0.05, self._leave)
                return
        if hosting:
            self._withdraw()
            return
        self.lingers += 1
        if self.member.name and not self.member.written and self.lingers < 60:
            self.later(0.05, self._leave)
            return
        entries = self.client.store.entries

        def looked(value: Any) -> None:
            last = not isinstance(value, StoreError) and self.member.ends_the_job(value)
            self._await_end(5.0 if last else 0.0)

        def members() -> dict[str, bytes]:
            return {name: entry.value for name, entry in entries.items()}

        self.client.call(members, lambda value: self.later(0.0, lambda: looked(value)))

    def _await_end(self, seconds: float) -> None:
        """Withdraw when the job is over, or that many seconds later."""
        plan = self.member.plan
        if seconds <= 0.0 or not self.member.name or (plan is not None and plan.phase == "over"):
            self._withdraw()
        else:
            self.later(0.05, lambda: self._await_end(seconds - 0.05))

    def _withdraw(self) -> None:
        self.member.withdraw()
        self.later(2.0, self._exit)
        self.entry()

    def _exit(self) -> None:
        self.alive = False
        self.sim.on_exit(self)

    def _begin(self, plan: Plan) -> None:
        self.own_name, self.own_round = self.name, plan.round
        self.last = Workers(plan.job, plan.round)
        self.workers = None
        if self.sim.engine.now >= self.fence:
            return  # the server has killed them at once
        self.workers = self.last
        self.sim.on_start(self, plan)

    def stop(self, grace: float) -> None:
        """Have the workers end within ``grace`` seconds."""
        workers = self.workers
        if workers is None or workers.ending:
            return
        workers.ending, workers.survivors = True, ""
        self.later(grace + 0.01, lambda: self._workers_gone(workers))

    def _workers_gone(self, workers: Workers) -> None:
        if self.workers is workers:
            self.workers = None
        self.say()
        self.rest()

    def worker_ends(self, workers: Workers, failed: bool) -> None:
        """A worker ends by itself."""
        if self.workers is not workers or workers.ending:
            return
        workers.failed, workers.finished = failed, not failed
        workers.failed_at = self.sim.engine.now
        if failed and self.sim.setting.stand:
            self.workers, workers.survivors = None, "wait"
            self.later(0.0, self.rest)
        elif failed:
            self.later(0.0, lambda: self.stop(self.sim.random.uniform(0.0, 0.3)))
        else:
            self.workers = None
            self.later(0.0, self.rest)
        self.later(0.0, self.say)

    def _move_fence(self, until: float) -> None:
        self.fence = until

        def fall() -> None:
            if self.fence <= self.sim.engine.now and self.workers is not None:
                self.workers.ending, self.workers.survivors = True, ""
                self.workers = None
                self.later(0.0, self.rest)
                self.later(0.0, self.say)

        self.sim.engine.after(until - self.sim.engine.now + 1e-9, fall)

    @property
    def waits(self) -> bool:
        """Whether this agent is a member, no worker of it works, and it waits for others."""
        on = self.alive and not self.frozen and bool(self.member.name) and self.ready
        over = self.plan is not None and self.plan.phase == "over"
        rests = self.workers is None or self.workers.stay
        return on and rests and not self.told_to_go and not over

    def say(self) -> None:
        """Publish how this agent is."""
        record = self._record()
        old = getattr(self, "_said", None)
        if record != old:
            self._said = record
            self.heard_at = self.sim.engine.now
            self.member.publish(record)
            self.entry()

    def _record(self) -> NodeStatus:
        rules = self.rules
        base = NodeStatus(
            f"node{self.host}",
            f"10.0.0.{self.host}",
            4000 + self.number,
            1,
            hint=self.host if rules.static else None,
        )
        taking_part = bool(self.own_name) and self.own_name == self.name and not self.cut_off
        if self.told_to_go:
            number = self.own_round if taking_part else -1
            code = self.exit_code
            return structs.replace(
                base, state="leaving", round=number, reason="told to", exit_code=code
            )
        if not taking_part:
            at_rest = self.workers is None and self.ready
            return structs.replace(base, state="ready" if at_rest else "joining")
        last, failure, workers = self.last, None, self.workers
        if last is not None and last.failed:
            failure = WorkerFailure(
                rank=0, host=base.host, pid=self.number, exitcode=7, text="boom"
            )
        if workers is not None and (workers.ending or not workers.stay):
            state = "failed" if failure else "running"
            return structs.replace(base, state=state, round=self.own_round, failure=failure)
        state = "finished" if last is not None and last.finished else "ended"
        return structs.replace(
            base,
            state=state,
            round=self.own_round,
            failure=failure,
            kept=() if workers is None else (0,),
            survivors="" if last is None else last.survivors,
        )
