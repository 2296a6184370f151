"""A job of simulated agents under a schedule of faults that a seed draws, and what must hold.

======================  ==========================================================================
always                  when workers of a round start, none of another round is alive anywhere, but
                        for those that stay, and that this round keeps
always                  no round runs twice, the round number only grows, versions follow each other
always                  nobody is in a round twice; a plan has at most ``max_nodes``
always                  no more restarts than the budget allows
always                  a new host goes on counting where the agents that came back were
always                  nobody waits for others in silence for longer than SILENCE
at the end              a job whose agents were all told to go is over, not lost
at the end              every agent has ended, within the deadline, and all with the job's code
======================  ==========================================================================

Faults come in the first FAULTS seconds. After that, links are whole and workers finish.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from elaunch.rendezvous import records
from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.plan import Plan, PlanCheckpoint
from elaunch.store.protocol import Post
from tests.rendezvous import simhurts
from tests.rendezvous.simagent import Agent
from tests.rendezvous.simstore import Engine, Link, Saved, SimStore

FAULTS = 14.0
JOIN_TIMEOUT = 12.0
STORE_TIMEOUT = 8.0
RESTART = 0.4
"""Seconds in which nobody can find a host of the TCPStore dead and have another one listen."""
END_TIMEOUT = 0.5
"""Seconds that an agent has to end a round where entries do not expire: less than some take."""
REMIND = 2.0
SILENCE = 30.0
"""Seconds in which an agent that waits receives or logs something, if no other has workers."""
MOST_POSTS = 150
DEADLINE = FAULTS + 90.0


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Setting:
    """What a seed draws before anything happens."""

    agents: int
    rules: Rules
    hosted: bool
    faults: int
    fails: float
    finishes: float
    stand: bool
    told_to_go: float | None = None


def draw_setting(rng: random.Random) -> Setting:
    """Return the job of a seed."""
    most = rng.randint(1, 4)
    static = rng.random() < 0.15
    saving = rng.random() < 0.4
    rules = Rules(
        min_nodes=most if static else rng.choice((1, rng.randint(1, most))),
        max_nodes=most,
        settle=rng.choice((0.2, 1.0, 2.0)),
        debounce=rng.choice((0.1, 0.5)),
        join_timeout=JOIN_TIMEOUT,
        remind=REMIND,
        heartbeat_timeout=rng.choice((3.0, 3.0, 6.0, 12.0)),
        store_timeout=STORE_TIMEOUT,
        end_timeout=END_TIMEOUT,
        max_restarts=rng.randint(0, 3),
        lifetime_budget=rng.random() < 0.5,
        on_join=rng.choice(("graceful", "now", "never")),
        static=static,
        has_checkpoint_dir=saving,
    )
    faults = rng.choice((0, 1, 2, 4, 8, 12))
    return Setting(
        agents=most if static else most + rng.choice((0, 0, 1, 2)),
        rules=rules,
        hosted=rng.random() < 0.5,
        faults=faults,
        told_to_go=rng.uniform(2.0, FAULTS) if not faults and rng.random() < 0.6 else None,
        fails=rng.choice((0.0, 0.2, 0.6)),
        finishes=rng.choice((0.0, 0.3)),
        stand=rng.random() < 0.5,
    )


class Simulation:
    """One job from its start to its end."""

    def __init__(self, seed: int, hurt: bool = False) -> None:
        """``hurt``: the store itself is hurt, too."""
        self.hurt = hurt
        self.engine = Engine(seed)
        self.random = self.engine.random
        self.setting = draw_setting(self.random)
        self.agents: list[Agent] = []
        self.plans: list[Plan] = []
        self.story: list[str] = []
        self.progress = 0
        self.saved: Saved | None = None
        self.stores = 0
        self.store = self._new_store()
        self._jobs = 0
        for host in range(self.setting.agents):
            late = self.random.random() < 0.3
            self.engine.after(
                self.random.uniform(0, 6.0 if late else 0.8), lambda h=host: self.launch(h)
            )
        for _ in range(self.setting.faults):
            self.engine.after(self.random.uniform(0.0, FAULTS), self._fault)
        self.engine.after(1.0, self._check_silence)
        if self.setting.told_to_go is not None:
            self.engine.after(self.setting.told_to_go, self._tell_all_to_go)
        if hurt:
            simhurts.schedule(self, random.Random(f"hurt {seed}"))

    def run(self) -> None:
        """Let it happen; raises Broken."""
        while self.engine.now < DEADLINE and self.engine.step():
            if self.engine.now > FAULTS and self.agents and not any(a.alive for a in self.agents):
                break
        left = [a for a in self.agents if a.alive]
        if left:
            newest = self.plans[-1] if self.plans else None
            raise Broken(
                f"at {self.engine.now:.1f} s still there: {list(map(_told, left))} {newest}"
            )
        self._check_codes()

    def draw(self) -> tuple[str, float]:
        """Return a job word and a jitter, as a coordinator draws them."""
        self._jobs += 1
        return f"job{self._jobs}", self.random.uniform(0.5, 1.0)

    def checkpoint(self) -> PlanCheckpoint | None:
        """Return the newest checkpoint."""
        if self.progress == 0:
            return None
        return PlanCheckpoint("/ck", self.progress, "dcp")

    # ── agents and their workers ──

    def launch(self, host: int) -> None:
        """Start an agent on a host."""
        hosting = self.setting.hosted and host == 0
        before = [agent for agent in self.agents if agent.host == 0]
        killed_in = None
        if hosting and before:
            self.store.up, self.store.replaced = False, True
            self.store = self._new_store()
            killed_in = before[-1].own_round
        rules = structs.replace(self.setting.rules, hosted_by_me=hosting, killed_in=killed_in)
        agent = Agent(self, len(self.agents), host, rules, Link())
        self.agents.append(agent)
        self.note(f"a{agent.number} starts on node{host}")

    def note(self, what: str) -> None:
        """Write a line of the story that is told of a seed that fails."""
        self.story.append(f"{self.engine.now:8.4f} {what}")

    def on_start(self, agent: Agent, plan: Plan) -> None:
        """Workers of a round start on a node."""
        self.note(f"a{agent.number} starts workers of {plan.job} round {plan.round}")
        for other in self.agents:
            if other.workers is None or other is agent:
                continue
            stays = other.workers.stay and other.workers.job == plan.job
            stays = stays and plan.node_rank(other.name) is not None
            if stays and plan.keeps(other.name, 1):
                continue
            if (other.workers.job, other.workers.round) != (plan.job, plan.round):
                raise Broken(
                    f"a{agent.number} starts round {plan.round} of {plan.job} "
                    f"while a{other.number} runs round {other.workers.round} of {other.workers.job}"
                )
        workers = agent.workers
        assert workers is not None
        if self.random.random() < 0.5:
            self.progress += 1
        chance = self.random.random()
        calm = self.engine.now > FAULTS
        if calm or chance < self.setting.finishes:
            self._end(agent, workers, self.random.uniform(0.5, 3.0), failed=False)
        elif chance < self.setting.finishes + self.setting.fails:
            self._end(agent, workers, self.random.uniform(0.0, 5.0), failed=True)
        else:
            self._end(agent, workers, FAULTS + 2.0 - self.engine.now, failed=False)

    def _end(self, agent: Agent, workers: Any, delay: float, failed: bool) -> None:
        def ends() -> None:
            if agent.workers is workers and not workers.ending and (failed or not workers.stay):
                self.note(f"a{agent.number}: workers {'fail' if failed else 'finish'}")
                agent.worker_ends(workers, failed)
                if failed:
                    self._hurt_peers(agent, workers.round)

        self.engine.after(delay, ends)

    def _hurt_peers(self, agent: Agent, round_number: int) -> None:
        """Workers that lose a peer fail, or hang, unless they stand."""
        if self.setting.stand and self.random.random() < 0.8:
            return
        for other in self.agents:
            workers = other.workers
            if other is agent or workers is None or workers.round != round_number:
                continue
            if self.random.random() < 0.5:
                self._end(other, workers, self.random.uniform(0.0, 0.5), failed=True)

    def on_exit(self, agent: Agent) -> None:
        """An agent's process ends by itself."""
        self.note(f"a{agent.number} exits with {agent.exit_code} {agent.problem}")
        agent.workers = None
        if agent.rules.hosted_by_me and agent.client.store is self.store:
            self.store.up = False

    # ── the plan ──

    def _new_store(self) -> SimStore:
        store = SimStore(self.engine)
        self.stores += 1
        store.in_order = not self.setting.hosted
        if self.setting.hosted:
            store.may_lead = self._hosts
        store.on_publish = self._on_publish
        return store

    def _hosts(self, name: str) -> bool:
        return self._agent(name).rules.hosted_by_me

    def _agent(self, name: str) -> Agent:
        return self.agents[int(name[1:].partition(".")[0])]

    def _on_publish(self, post: Post) -> None:
        plan = records.decode_plan(post, b"secret", "sim")
        self.note(f"v{post.version} {plan.phase} {plan.job} round {plan.round}: {plan.reason}")
        if post.version > MOST_POSTS:
            raise Broken(f"{post.version} posts")
        names = [node.name for node in plan.nodes]
        if len(set(names)) != len(names) or len(names) > self.setting.rules.max_nodes:
            raise Broken(f"nodes {names}")
        old = self.plans[-1] if self.plans else None
        if old is not None and old.phase == "over" and old.job == plan.job:
            raise Broken(f"{plan.job} was over")
        if old is not None and old.job == plan.job:
            began = plan.phase == "running" and old.phase != "running"
            if plan.round < old.round or (began and plan.round == old.round):
                raise Broken(f"round {plan.round} after {old.round}")
            if plan.round > old.round and not began:
                raise Broken(f"round {plan.round} without a start")
        begins = old is None or (plan.job, plan.round) != (old.job, old.round)
        if begins and plan.phase == "running":
            self._check_counts_on(plan)
        self._check_budget(plan)
        self.plans.append(plan)

    def on_lost(self) -> None:
        """Take what is on the plan for all that was ever posted: nobody else remembers."""
        post = self.store.post
        self.plans = [] if post is None else [records.decode_plan(post, b"secret", "sim")]
        self.stores += 1

    def _check_counts_on(self, plan: Plan) -> None:
        """Compare the plan with what agents say who have known the job in another store."""
        store = self.store
        if self._agent(plan.coordinator).deaf:
            return  # it does not hear them
        said = [(name, entry.value) for name, entry in store.entries.items()]
        if not self.hurt:  # else who said it may be gone before the host led again
            said += [(change.name, change.value) for change in store.log if change.value]
        for name, value in said:
            seen = records.decode_agent(value, b"secret", name).seen
            if seen is None or seen.phase == "over":
                continue
            if not seen.lost and (seen.job == plan.job or not self.setting.hosted):
                continue
            if plan.round <= seen.round or plan.restarts < seen.restarts:
                raise Broken(f"round {plan.round} of {plan.job} after {seen}")

    def _check_budget(self, plan: Plan) -> None:
        rules = self.setting.rules
        spent = plan.restarts if rules.lifetime_budget else plan.without_progress
        if spent > rules.max_restarts:
            raise Broken(f"{spent} restarts of {rules.max_restarts}")
        if self.stores == 1:
            counted = sum(
                new.phase == "running" and old.phase != "running" and old.cause == "failure"
                for old, new in itertools.pairwise([*self.plans, plan])
                if old.job == new.job == plan.job
            )
            said = sum(
                new.phase == "running" and old.phase != "running" and "; restart " in new.reason
                for old, new in itertools.pairwise([*self.plans, plan])
                if old.job == new.job == plan.job
            )
            # A failure in a round in which a node was lost, too, is not counted.
            if not plan.restarts == said <= counted:
                raise Broken(f"{plan.restarts} restarts, {said} said, {counted} failures")

    def _check_silence(self) -> None:
        working = (agent.workers for agent in self.agents if agent.workers is not None)
        works = any(not workers.stay for workers in working)
        for agent in self.agents:
            silent = self.engine.now - agent.heard_at
            if agent.waits and not works and silent > SILENCE:
                raise Broken(f"{_told(agent)} has waited in silence for {silent:.0f} s")
        self.engine.after(1.0, self._check_silence)

    def _tell_all_to_go(self) -> None:
        self.note("all agents are told to go")
        for agent in self.agents:
            agent.later(self.random.choice((0.0, 0.002, 0.02)), lambda a=agent: a.go(143))

    def _check_codes(self) -> None:
        ended = self.plans and self.plans[-1].phase == "over"
        told = self.setting.told_to_go is not None and not self.hurt
        if told and self.plans and not ended:
            raise Broken(f"all were told to go, and the last plan is {self.plans[-1]}")
        for agent in self.agents:
            plan = agent.plan
            if agent.exit_code is None or plan is None or plan.phase != "over":
                continue
            if agent.exit_code not in (plan.exit_code, 143, 69):
                raise Broken(f"a{agent.number} exits with {agent.exit_code}: {plan}")

    # ── faults ──

    def _fault(self) -> None:
        rng = self.random
        there = [agent for agent in self.agents if agent.alive]
        if not there:
            return
        agent = rng.choice(there)
        hosting = agent.rules.hosted_by_me
        kinds = {
            "kill": 3,
            "freeze": 3,
            "cut": 3,
            "cut out": 2,
            "cut in": 2,
            "lossy": 3,
            "slow": 2,
            "term": 1,
            "newcomer": 2,
            "silence": 1,
            "fail": 3,
            "deaf": 1,
            "restart": 6 if self.setting.hosted else 0,
        }
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "deaf":
            agent = next((one for one in there if one.coordinator is not None), agent)
            self.note(f"fault: the coordinator a{agent.number} receives nothing any more")
            agent.deaf = True
            return
        if kind == "restart":
            agent = next((one for one in there if one.rules.hosted_by_me), agent)
            hosting, kind = agent.rules.hosted_by_me, "kill"
        seconds = rng.choice((0.3, 1.0, 2.4, 2.8, 3.5, 6.0, 10.0)) * rng.uniform(0.8, 1.2)
        if hosting and kind not in ("kill", "term", "newcomer", "fail"):
            return  # it reaches its own store whatever the network does
        self.note(f"fault: {kind} a{agent.number} {seconds:.2f} s")
        self._strike(kind, agent, seconds)

    def _strike(self, kind: str, agent: Agent, seconds: float) -> None:
        link, after = agent.link, self.engine.after
        if kind == "kill":
            self._kill(agent, seconds)
        elif kind == "freeze":
            self.freeze(agent, seconds)
        elif kind in ("cut", "cut out", "cut in"):
            link.out_cut, link.in_cut = kind != "cut in", kind != "cut out"
            after(seconds, lambda: self._heal(link))
        elif kind == "lossy":
            link.lost = self.random.choice((0.1, 0.3, 0.6))
            after(seconds, lambda: self._heal(link))
        elif kind == "slow":
            link.slow = self.random.choice((0.1, 0.4, 0.8))
            after(seconds, lambda: self._heal(link))
        elif kind == "term":
            agent.later(0.0, lambda: agent.go(143))
        elif kind == "newcomer" and not self.setting.rules.static:
            self.launch(10 + len(self.agents))
        elif kind == "silence" and not self.setting.hosted:
            self.store.leaderless = True
            after(min(seconds, 4.0), self.store.restore)
            after(min(seconds, 4.0), self.store.touch)
        elif kind == "fail" and agent.workers is not None:
            self._end(agent, agent.workers, 0.0, failed=True)

    def _heal(self, link: Link) -> None:
        link.slow, link.lost, link.out_cut, link.in_cut = 0.005, 0.0, False, False

    def _kill(self, agent: Agent, seconds: float) -> None:
        agent.alive = False
        workers, agent.workers = agent.workers, None
        if workers is not None:
            self._hurt_peers(agent, workers.round)
        if agent.rules.hosted_by_me:
            self.store.up = False
        if self.random.random() < 0.5 or agent.rules.hosted_by_me:
            # The host's successor finds the store empty.
            delay = self.random.choice((RESTART, 2.0, seconds))
            self.engine.after(max(RESTART, delay), lambda: self.launch(agent.host))

    def freeze(self, agent: Agent, seconds: float) -> None:
        """Stop a process for a while."""
        agent.frozen = True

        def thaw() -> None:
            agent.frozen = False
            late, agent.deferred = agent.deferred, []
            for act in late:
                act()
            agent.entry()

        self.engine.after(seconds, thaw)


def _told(agent: Agent) -> str:
    return f"a{agent.number} {agent.name} {agent.member.name} {agent.workers} frozen={agent.frozen}"


def story(seed: int, hurt: bool = False) -> str:
    """Return what happens under a seed, and how it ends."""
    sim = Simulation(seed, hurt)
    try:
        sim.run()
        end = "all invariants hold"
    except Broken as exc:
        end = f"BROKEN: {exc}"
    return "\n".join([repr(sim.setting), *sim.story, end])
