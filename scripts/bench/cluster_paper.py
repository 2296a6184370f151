"""A round of thousands of agents on paper: requests and bytes, from the real records' sizes.

A round that follows a failure is, for each agent: the plan that ends the old one, its record that
it has ended, the plan of the new one, its record that it runs. Between rounds there is nothing but
heartbeats. What is added up is the very bytes that elaunch sends and gets, without the headers
of TCP; a frame of gRPC counts with its 14 bytes. Where another node is in the round, each agent
reads the list of nodes, too. A request counts with its answer, what is sent unasked by itself.

============  ==================================  =================================================
backend       for each agent and plan             for each agent and record
============  ==================================  =================================================
hosted store  the plan, unasked                   a request
etcd          an event of its watch               a transaction; an event of the coordinator's watch
============  ==================================  =================================================
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from cluster_agents import failure_of, record_of
from cluster_figures import C10D, OURS, Case, Figure, Options, Trial
from figures import Sample
from msgspec.structs import replace

from elaunch.config.rendezvous import default_heartbeat
from elaunch.rendezvous import records
from elaunch.rendezvous.meeting import LONG_SLICE
from elaunch.rendezvous.member import renewal_period
from elaunch.rendezvous.plan import Node, Plan, PlanCheckpoint
from elaunch.store.tcp.messages import packed

RUN_ID = "pretraining-7b-4711"
FRAME = 14
BOOKKEEPING = 92
"""Bytes that HTTP/2 adds to a renewal: four or five window updates, etcd's ping and its answer; as
seen on a connection, on which there is nothing else."""
PLANS = RECORDS = 2
"""Plans that each agent reads, and records of its own that it writes, in a round."""


@dataclass(frozen=True)
class Cost:
    """Requests and bytes of all agents together."""

    requests: float
    size: float


def cases(options: Options) -> list[Case]:
    """Return the one case; it measures nothing but sizes."""
    agents = f"{options.paper_agents:,} agents on paper"
    figures = (
        Figure("paper-record", f"{agents}: bytes of one agent's record", "count"),
        Figure("paper-plan", "… bytes of the plan", "count"),
        Figure("paper-nodes", "… bytes of its list of nodes, as sent", "count"),
        Figure("paper-round-requests", "… requests in a round, of all agents", "count"),
        Figure("paper-round-bytes", "… bytes in a round, of all agents", "MB"),
        Figure("paper-changed-bytes", "… the same in a round with other nodes", "MB"),
        Figure("paper-steady-requests", "… heartbeats, of all agents", "/s"),
        Figure("paper-steady-bytes", "… bytes of one agent between rounds", "B/s"),
    )
    measure = partial(_measure, options.paper_agents)
    return [Case("paper", "on paper", figures, measure, dict.fromkeys(OURS, 1))]


def _measure(agents: int, trial: Trial) -> Mapping[str, Sample]:
    record = records.encode(replace(record_of(agents - 1), state="ended", round=41), None, "agent")
    ending = plan_of(agents)
    nodes = records.encode_nodes(ending.nodes)
    plan = records.encode_plan(ending, None, 1, nodes)
    costs, sent = (_tcp, packed(nodes)) if trial.column == C10D else (_etcd, nodes)
    in_round, steady = costs(agents, record, plan)
    return {
        "paper-record": Sample(float(len(record))),
        "paper-plan": Sample(float(len(plan))),
        "paper-nodes": Sample(float(len(sent))),
        "paper-round-requests": Sample(in_round.requests),
        "paper-round-bytes": Sample(in_round.size / 1e6),
        "paper-changed-bytes": Sample((in_round.size + agents * len(sent)) / 1e6),
        "paper-steady-requests": Sample(steady.requests),
        "paper-steady-bytes": Sample(steady.size / agents),
    }


def plan_of(agents: int) -> Plan:
    """Return the plan that ends a round of so many nodes after a failure."""
    said = [record_of(number) for number in range(agents)]
    names = random.Random(agents)
    nodes = [Node(f"{names.getrandbits(24):06x}", r.host, r.addr, r.slots, r.role) for r in said]
    checkpoint = PlanCheckpoint("/shared/run/step_00120000", 120000, "dcp")
    return Plan(
        "5eed1234",
        round=41,
        phase="ending",
        reason="worker rank 8 on node1 exited with 1",
        cause="failure",
        nodes=tuple(nodes),
        master_addr=said[0].addr,
        master_port=said[0].port,
        checkpoint=checkpoint,
        failure=failure_of(1),
        coordinator=nodes[0].name,
    )


def _tcp(agents: int, record: bytes, plan: bytes) -> tuple[Cost, Cost]:
    from elaunch.store.tcp import messages

    name, answer = "00abcd", messages.frame(True)
    written = messages.frame(messages.PutEntry(name, record)) + answer
    post = messages.frame(messages.SentPost(123, 119, plan, b""), messages.NEW_POST)
    size = PLANS * len(post) + RECORDS * len(written)
    beats = agents / renewal_period(default_heartbeat(agents), hosted=True)
    steady = beats * len(messages.frame(messages.RenewEntry(name)) + answer)
    look = messages.frame(messages.ReadPlan(123, 119)) + messages.frame(
        messages.SentPost(0, 0, b"", b"")
    )
    steady += agents * len(look) / LONG_SLICE
    return Cost(agents * (PLANS + RECORDS), agents * size), Cost(beats, steady)


def _etcd(agents: int, record: bytes, plan: bytes) -> tuple[Cost, Cost]:
    from elaunch.store.etcd import imports
    from elaunch.store.etcd.calls import Transactions
    from elaunch.store.etcd.cluster import keys_of

    loaded: Any = imports.load()
    rpc, keys = loaded.rpc, keys_of("/elaunch", RUN_ID)
    txns = Transactions(SimpleNamespace(loaded=loaded))  # type: ignore[arg-type]
    key, lease, revision = keys.agent("00abcd"), 7587880122438512659, 10_000_000
    still = txns.created(key, revision)
    header = {"cluster_id": 2**63, "member_id": 2**63, "revision": revision, "raft_term": 5}

    def framed(message: Any) -> int:
        return int(message.ByteSize()) + FRAME

    def event(key: bytes, value: bytes) -> int:
        answer = rpc.WatchResponse(header=header, watch_id=1)
        seen = answer.events.add().kv
        seen.key, seen.value, seen.version = key, value, 123
        seen.create_revision = seen.mod_revision = revision
        return framed(answer)

    write = rpc.TxnRequest(compare=[still], success=[txns.put(key, record, lease)])
    answered = rpc.TxnResponse(header=header, succeeded=True)
    told = framed(write) + framed(answered) + event(key, record)
    post = event(keys.plan, b"123\n" + plan)
    in_round = Cost(
        agents * (PLANS + RECORDS * 2) + PLANS, agents * (PLANS * post + RECORDS * told)
    )

    renewal = framed(rpc.LeaseKeepAliveRequest(ID=lease))
    renewal += framed(rpc.LeaseKeepAliveResponse(header=header, ID=lease, TTL=3)) + BOOKKEEPING
    renewals = agents / renewal_period(default_heartbeat(agents), hosted=False)
    steady = Cost(renewals, renewals * renewal)
    return in_round, steady
