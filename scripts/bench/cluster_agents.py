"""Some agents of a large job in one light process: ``python cluster_agents.py <JSON>``.

Each agent is elaunch's own Meeting with its own store connections; only workers are missing. The
bench (cluster_rounds.py) drives several such processes by lines on their stdin, and each answers
with lines of JSON on stdout, ``{"said": …, "mono": time.monotonic() of the last agent}``:

=======  ======================================  ==================================================
command  what every agent does                   answer
=======  ======================================  ==================================================
\\-       connects to the store                   ``ready``, once all are connected
go       enrols                                  ``running``, once all have read the plan
run      says that its workers run               ``told``
fail     the first one says that one failed      ``failed``, at once; each process: ``ending``, once
                                                 all its agents have read that they must stop
report   nothing                                 ``report``, with the trouble that there was so far
=======  ======================================  ==================================================

The argument: backend ("c10d" or "etcd"), endpoint, run_id, agents (here), first (number of the
first one here), of (agents in all), ttl (the heartbeat timeout), hosts (whether the first one here
hosts the TCPStore). Ends when stdin does, at once: nobody is left to say goodbye to.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

from msgspec.structs import replace

from elaunch.rendezvous.decide.view import Rules, SearchResult
from elaunch.rendezvous.events import News, PlanSeen, Rejoined, StoreBack
from elaunch.rendezvous.meeting import Meeting, World
from elaunch.rendezvous.plan import NodeStatus, Plan, WorkerFailure
from elaunch.store.protocol import Store

CONNECT_SECONDS = 120.0
FIRST_WAIT = 0.01
STACK_BYTES = 512 * 1024
SWITCH_SECONDS = 0.5
"""Python's turns, instead of 5 ms: each of a thousand threads that wait for theirs would otherwise
wake up 200 times a second to ask for it, which no agent with a process of its own does."""


@dataclass(frozen=True)
class Task:
    """The argument, as above."""

    backend: str
    endpoint: str
    run_id: str
    agents: int
    first: int
    of: int
    ttl: float
    hosts: bool

    @property
    def patience(self) -> float:
        """Seconds for an answer of the store; 2 by default, more where heartbeats have more."""
        return max(2.0, self.ttl / 6)


def record_of(number: int) -> NodeStatus:
    """Return the record of an agent of a large job, with what a real one would say."""
    facts = {
        "python": "3.11.2",
        "torch": "2.13.0+cpu",
        "script": "sha256:9f86d081884c7d65",
        "argv": "sha256:60303ae22b998861",
        "environment": "sha256:fd61a03af4f77d87",
    }
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    return NodeStatus(f"node{number}", address, 40000 + number % 20000, 8, facts=facts)


def failure_of(number: int) -> WorkerFailure:
    """Return a worker's failure on the node ``number``, with a text of usual length."""
    text = "RuntimeError: CUDA error: an illegal memory access was encountered\n" * 12
    host = f"node{number}"
    return WorkerFailure(rank=number * 8, host=host, pid=12345, exitcode=1, text=text)


class Crowd:
    """The agents of this process; counts who has read which phase of the plan."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._gate = threading.Event()
        self._lock = threading.Lock()
        self._read: Counter[str] = Counter()
        self._trouble: Counter[str] = Counter()
        self._phases: dict[int, str] = {}
        self.numbers = range(task.first, task.first + task.agents)
        self.meetings: dict[int, Meeting] = {}

    def connect(self) -> None:
        """Connect every agent, and have their threads wait at the gate."""
        task = self._task
        for number in self.numbers:
            hosts = task.hosts and number == task.first
            store = host(task) if hosts else connect(task)
            store.follow(0, FIRST_WAIT)  # opens what agents wait on
            rules = Rules(task.of, task.of, heartbeat_timeout=task.ttl, hosted_by_me=hosts)
            world = World(
                lambda news, number=number: self._post(number, news),  # type: ignore[misc]
                lambda _: SearchResult(),
                lambda *_: None,
            )
            meeting = Meeting(OpenAtGate(self._gate, store, task), rules, lambda: None, world)
            meeting.start(record_of(number))
            self.meetings[number] = meeting
        self.say("ready", time.monotonic())

    def go(self) -> None:
        """Let every agent enrol."""
        self._gate.set()

    def run(self) -> None:
        """Have every agent say that its workers run in round 0."""
        for number, meeting in self.meetings.items():
            meeting.publish(replace(record_of(number), state="running", round=0))
        self.say("told", time.monotonic())

    def fail(self) -> None:
        """Have the first agent here say that a worker failed."""
        number = self._task.first
        failure = failure_of(number)
        failed = replace(record_of(number), state="failed", round=0, failure=failure)
        begin = time.monotonic()
        self.meetings[number].publish(failed)
        self.say("failed", begin)

    def report(self) -> None:
        """Say how many agents had trouble."""
        self.say("report", time.monotonic())

    def say(self, what: str, mono: float) -> None:
        """Write one line for the bench."""
        line = {"said": what, "mono": mono, "trouble": dict(self._trouble.most_common(5))}
        print(json.dumps(line), flush=True)

    def _post(self, number: int, news: News) -> None:
        now = time.monotonic()
        if isinstance(news, PlanSeen):
            if self._is_news(number, news.plan, news.name):
                self._count(number, news.plan.phase, now)
        elif not isinstance(news, Rejoined | StoreBack):
            with self._lock:
                self._trouble[f"{news}"[:200]] += 1

    def _is_news(self, number: int, plan: Plan, name: str) -> bool:
        """Look our rank up, as an agent does, and whether this phase is new to us."""
        known = plan.node_rank(name) is not None
        return known and self._phases.get(number) != plan.phase

    def _count(self, number: int, phase: str, now: float) -> None:
        with self._lock:
            self._phases[number] = phase
            self._read[phase] += 1
            complete = self._read[phase] == self._task.agents
        if complete:
            self.say(phase, now)


class OpenAtGate:
    """Hands out a store that is open already, once the gate opens; if that is lost, a new one."""

    def __init__(self, gate: threading.Event, store: Store, task: Task) -> None:
        self._gate = gate
        self._store: Store | None = store
        self._task = task

    def __call__(self, seconds: float) -> Store:
        """Return the store."""
        self._gate.wait()
        store, self._store = self._store, None
        return connect(self._task) if store is None else store


def host(task: Task) -> Store:
    """Host the TCPStore at the endpoint."""
    from elaunch.store.tcp import client

    address, _, port = task.endpoint.rpartition(":")
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, int(port)))
    listening.listen(4096)
    return client.host(listening, task.run_id)


def connect(task: Task) -> Store:
    """Connect one agent."""
    if task.backend == "c10d":
        from elaunch.store.tcp import client

        address, _, port = task.endpoint.rpartition(":")
        return client.connect(
            address, int(port), task.run_id, deadline=CONNECT_SECONDS, timeout=task.patience
        )
    from elaunch.store.etcd import client as etcd
    from elaunch.store.etcd.cluster import EtcdCluster

    endpoints = [one.rpartition(":") for one in task.endpoint.split(",")]
    members = tuple((address, int(port)) for address, _, port in endpoints)
    place = EtcdCluster(members, call_timeout=task.patience / 2, agents=task.agents)
    return etcd.connect(place, task.run_id, deadline=CONNECT_SECONDS)


def main() -> None:
    """Obey the bench until it closes our stdin."""
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.disable()  # it would look through the plans of all agents, again and again
    crowd = Crowd(Task(**json.loads(sys.argv[1])))
    crowd.connect()
    commands = {"go": crowd.go, "run": crowd.run, "fail": crowd.fail, "report": crowd.report}
    for line in sys.stdin:
        commands[line.strip()]()
    os._exit(0)


if __name__ == "__main__":
    main()
