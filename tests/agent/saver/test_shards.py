"""Which agents are asked for shards: 64 nodes of 8 ranks, whose connections are counted."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy.turn import Round
from elaunch.agent.saver.memory import CheckpointMemory
from elaunch.agent.saver.shards import FETCHED_AT_ONCE, REPLICA, Shards
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.errors import SaveError
from elaunch.rendezvous.plan import Node, Plan
from elaunch.wire.worker import StagedShard

NODES, EACH = 64, 8
UUID = "u120"


class Network:
    """The agents of a job by name, and what they connect to each other for."""

    def __init__(self, nodes: int = NODES) -> None:
        self.agents = {f"a{number}": Agent(self, f"a{number}") for number in range(nodes)}
        self.asked: Counter[str] = Counter()
        self.gone: set[str] = set()

    def begin(self, number: int, names: list[str]) -> None:
        """Have the agents of these names begin a round together."""
        nodes = tuple(Node(name, name, "10.0.0.1", EACH, "x") for name in names)
        plan = Plan("job", number, "running", nodes=nodes)
        for name in names:
            self.agents[name].begin(Round(number, EACH, plan=plan, name=name))

    def load(self, number: int, names: list[str], uuid: str = UUID) -> int:
        """Have each rank load its own shard; return how many of them and ``.metadata`` it got."""
        found = 0
        for at, name in enumerate(names):
            for rank in range(at * EACH, (at + 1) * EACH):
                shards = self.agents[name].shards
                came = shards.find((120, number, uuid), [0, rank], 60.0)
                found += len(came)
                shards.find((120, number, uuid), [r for r in (rank,) if r not in came], 60.0)
        return found


class Agent:
    """One node's shards, and its peers: calls to the others' agents, which are counted."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.name = name
        self.lived: set[int] = set()
        self.memory = CheckpointMemory(1 << 30)
        plan: Any = SaverSetup(None, lambda _: None, None, peers=self)  # type: ignore[arg-type]
        self.shards = Shards(plan, self.memory, self.lived)

    def begin(self, round_: Round) -> None:
        """Take part in a round."""
        self.lived.add(round_.round)
        self.round = round_
        self.shards.begin(round_)

    def save(self, replica: bool = False) -> None:
        """Keep what this node's ranks leave of step 120, or the node's before it."""
        first, plan = self.round.first_rank, self.round.plan
        assert plan is not None
        world = EACH * len(plan.nodes)
        for k in range(EACH):
            rank = (first + k - EACH) % world if replica else first + k
            part = ShardHeader(rank, world, "digits", {"steps_completed": 120})
            stage = Stage(120, self.round.round, UUID)
            shard = StagedShard(stage, part, ((f"__{rank}_0.distcp", ((0, 8),)),))
            name = f"{REPLICA}{rank}" if replica else f"worker {k}"
            self.shards.keep(name, shard, self.memory.lease(name, 8))

    def _peer(self, node_rank: int) -> Shards:
        plan = self.round.plan
        assert plan is not None
        name = plan.nodes[node_rank].name
        self.network.asked[self.name] += 1
        if name in self.network.gone:
            raise SaveError(f"the agent of {name} is gone")
        return self.network.agents[name].shards

    def ask_held(self, node_rank: int, wanted: tuple[int, int, str], timeout: float) -> list[int]:
        """Return what the other one has."""
        return self._peer(node_rank).held(wanted)

    def fetch_shard(
        self,
        node_rank: int,
        part: tuple[int, int, int],
        into: Callable[[int], memoryview],
        timeout: float,
    ) -> StagedShard | None:
        """Copy a shard."""
        found = self._peer(node_rank).serve(*part)
        if found is None:
            return None
        shard, memory = found
        into(shard.end)[: shard.end] = memory[: shard.end]
        return shard


@pytest.fixture(autouse=True)
def close_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the memory of all agents: each of up to 1,000 segments is two open files."""
    made: list[CheckpointMemory] = []
    begin = CheckpointMemory.__init__

    def noted(memory: CheckpointMemory, limit: int | None) -> None:
        begin(memory, limit)
        made.append(memory)

    monkeypatch.setattr(CheckpointMemory, "__init__", noted)
    yield
    for memory in made:
        memory.close()
    made.clear()
    gc.collect()  # an agent and its network refer to each other


def test_nobody_is_asked_in_the_first_round() -> None:
    """Whatever was saved before, by rounds of these numbers: no agent of the job has any of it."""
    network = Network()
    names = list(network.agents)
    network.begin(0, names)
    assert network.load(0, names) == network.load(7, names) == 0
    assert network.asked.total() == 0


@pytest.mark.slow
def test_nobody_is_asked_where_all_were_there_and_have_nothing() -> None:
    """The round has failed before its first save: it goes on from an earlier start's checkpoint."""
    network = Network()
    names = list(network.agents)
    for number in range(3):
        network.begin(number, names)
    assert network.load(1, names) == 0
    assert network.asked.total() == 0


@pytest.mark.slow
def test_the_ranks_that_stay_fetch_one_shard_and_metadata() -> None:
    """A node asks that of rank 0, and no other."""
    network = Network()
    names = list(network.agents)
    network.begin(0, names)
    for agent in network.agents.values():
        agent.save()
    network.begin(1, names)
    assert network.load(0, names) == 2 * NODES * EACH - 1
    assert network.asked == dict.fromkeys(names[1:], 2)  # once what is there, once for the shard
    assert network.load(0, names, "another") == 0
    assert network.asked.total() == 2 * (NODES - 1)


@pytest.mark.slow
def test_a_newcomer_asks_the_neighbour_that_has_the_replicas() -> None:
    """And finds all shards of the node whose place it has taken."""
    network = Network(NODES + 1)
    *names, spare = network.agents
    network.begin(3, names)
    for name in names:
        network.agents[name].save()
        network.agents[name].save(replica=True)
    network.gone.add(names[5])
    now = [*names[:5], spare, *names[6:]]
    network.begin(4, now)
    assert network.load(3, now) == 2 * NODES * EACH - 1
    assert network.asked[spare] == (1 + 1) + (1 + EACH)  # rank 0's node, the next one


@pytest.mark.slow
def test_a_newcomer_asks_each_node_once_for_what_nobody_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All its ranks share the answers, and so they do an agent that cannot be reached."""
    network = Network(NODES + 1)
    *names, spare = network.agents
    network.begin(0, names)
    network.gone.add(names[9])
    now = [*names[:5], spare, *names[6:]]
    network.begin(1, now)
    assert network.load(0, now) == 0
    assert network.asked == {spare: NODES - 1}
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0's shard is read from the disk: the agent of a9 is gone"
    ]


@pytest.mark.slow
def test_many_shards_are_fetched_at_the_same_time() -> None:
    """Workers that want the same one share it; memory for others is made meanwhile."""
    network = Network(2)
    names = list(network.agents)
    network.begin(0, names)
    for agent in network.agents.values():
        agent.save()
    one, other = network.agents.values()
    together = threading.Barrier(FETCHED_AT_ONCE, timeout=20.0)
    fetch, fetched = one.fetch_shard, []

    def slow(node_rank: int, part: tuple[int, int, int], *args: Any) -> StagedShard | None:
        fetched.append(part[2])
        together.wait()
        return fetch(node_rank, part, *args)

    one.fetch_shard = slow  # type: ignore[method-assign]
    found: list[int] = []
    wanted = range(EACH, 2 * EACH)

    def work() -> None:
        found.append(len(one.shards.find((120, 0, UUID), wanted, 60.0)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert found == [EACH, EACH]
    assert sorted(fetched) == list(wanted)
    assert other.memory.taken == EACH * 4096
