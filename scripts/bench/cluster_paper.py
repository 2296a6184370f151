"""A round of thousands of agents on paper: requests and bytes, from the real records' sizes.

A round that follows a failure is, for each agent: the plan that ends the old one, its own word that
it has ended, the plan of the new one, its own word that it runs. Between rounds there is nothing
but heartbeats. What is added up is the very bytes that elaunch sends and gets, without the headers
of TCP; a frame of gRPC counts with its 14 bytes. Where another node is in the round, each agent
reads the list of nodes, too.

=========  =====================================  =================================================
backend    for each agent and plan                for each agent and word of its own
=========  =====================================  =================================================
TCPStore   a wait, a read                         a push, a heartbeat; popped by the host
etcd       an event of its watch                  a transaction; an event of the coordinator's watch
=========  =====================================  =================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from cluster_agents import failure_of, record_of
from cluster_figures import C10D, OURS, Case, Figure, Options, Trial
from figures import Sample
from msgspec.structs import replace

from elaunch.rendezvous import records
from elaunch.rendezvous.plan import Node, Plan, PlanCheckpoint

TTL = 3.0
RENEWALS_A_SECOND = 6 / TTL
RUN_ID = "pretraining-7b-4711"
FRAME = 14
BOOKKEEPING = 92
"""Bytes that HTTP/2 adds to a renewal: four or five window updates, etcd's ping and its answer; as
seen on a connection, on which there is nothing else."""
PLANS = WORDS = 2
"""Plans that each agent reads, and words of its own that it writes, in a round."""


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
        Figure("paper-nodes", "… bytes of its list of nodes", "count"),
        Figure("paper-round-requests", "… requests in a round, of all agents", "count"),
        Figure("paper-round-bytes", "… bytes in a round, of all agents", "MB"),
        Figure("paper-changed-bytes", "… the same in a round with other nodes", "MB"),
        Figure("paper-steady-requests", "… heartbeats and readings, of all agents", "/s"),
        Figure("paper-steady-bytes", "… bytes of one agent between rounds", "B/s"),
    )
    measure = partial(_measure, options.paper_agents)
    return [Case("paper", "on paper", figures, measure, dict.fromkeys(OURS, 1))]


def _measure(agents: int, trial: Trial) -> Mapping[str, Sample]:
    word = records.encode(replace(record_of(agents - 1), state="ended", round=41), None, "agent")
    ending = plan_of(agents)
    nodes = records.encode_nodes(ending.nodes)
    plan = records.encode_plan(ending, None, 1, nodes)
    costs = _tcp if trial.column == C10D else _etcd
    in_round, steady = costs(agents, word, plan)
    return {
        "paper-record": Sample(float(len(word))),
        "paper-plan": Sample(float(len(plan))),
        "paper-nodes": Sample(float(len(nodes))),
        "paper-round-requests": Sample(in_round.requests),
        "paper-round-bytes": Sample(in_round.size / 1e6),
        "paper-changed-bytes": Sample((in_round.size + agents * len(nodes)) / 1e6),
        "paper-steady-requests": Sample(steady.requests),
        "paper-steady-bytes": Sample(steady.size / agents),
    }


def plan_of(agents: int) -> Plan:
    """Return the plan that ends a round of so many nodes after a failure."""
    said = [record_of(number) for number in range(agents)]
    nodes = [Node(f"{n:06x}", r.host, r.addr, r.slots, r.role) for n, r in enumerate(said)]
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


def _tcp(agents: int, word: bytes, plan: bytes) -> tuple[Cost, Cost]:
    from elaunch.store.tcp import host, wire

    root, name, version = f"{RUN_ID}/", "00abcd", "123"
    put = host.put_notice(name, TTL, word)
    beat = len(wire.add(host.counter_of(name), 1)) + 8
    kept = len(wire.multi_put([(f"{root}s/{name}", b"+" + word)]))
    told = len(wire.push(root + "in", put)) + beat
    told += len(wire.pop(root + "in")) + 8 + 8 + len(put) + kept
    post = len(wire.wait(f"{root}b/{version}")) + 1 + 8 + len(plan)
    keys = [root + key for key in ("head", f"b/{version}", f"n/{version}", f"l/{version}")]
    post += len(wire.multi_get(keys)) + 2 * (8 + len(version)) + 8
    puts = WORDS * -(-agents // host.PUTS)
    in_round = Cost(agents * (PLANS * 2 + WORDS * 3), agents * (PLANS * post + WORDS * told))
    in_round = Cost(in_round.requests + puts, in_round.size)

    readings = host.READINGS / TTL
    reading = len(wire.multi_get([host.counter_of(name)] * agents)) + agents * (8 + 5)
    size = agents * beat * RENEWALS_A_SECOND + reading * readings
    return in_round, Cost(agents * RENEWALS_A_SECOND + readings, size)


def _etcd(agents: int, word: bytes, plan: bytes) -> tuple[Cost, Cost]:
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

    write = rpc.TxnRequest(compare=[still], success=[txns.put(key, word, lease)])
    answered = rpc.TxnResponse(header=header, succeeded=True)
    told = framed(write) + framed(answered) + event(key, word)
    post = event(keys.plan, b"123\n" + plan)
    in_round = Cost(agents * (PLANS + WORDS * 2) + PLANS, agents * (PLANS * post + WORDS * told))

    renewal = framed(rpc.LeaseKeepAliveRequest(ID=lease))
    renewal += framed(rpc.LeaseKeepAliveResponse(header=header, ID=lease, TTL=3)) + BOOKKEEPING
    steady = Cost(agents * RENEWALS_A_SECOND, agents * renewal * RENEWALS_A_SECOND)
    return in_round, steady
