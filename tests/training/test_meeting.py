"""What it costs the ranks of a large job to meet: requests and bytes, against a real TCPStore."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack

import pytest

from elaunch.store.tcp import wire
from elaunch.training.channel import meeting
from elaunch.training.channel.meeting import Layout, RankRecord
from elaunch.training.launch import Placement
from elaunch.training.stores.roundstore import RoundStore
from tests.training.channelrig import PATIENCE, StoreHost

ON_A_NODE = 8


@pytest.fixture(scope="module")
def host() -> StoreHost:
    return StoreHost()


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count requests, and bytes both ways."""
    cost = [0, 0]
    send, read = wire.Connection.send, wire.Connection.read

    def counting_send(line: wire.Connection, requests: Iterable[bytes], until: float) -> None:
        sent = list(requests)
        cost[:] = cost[0] + len(sent), cost[1] + sum(map(len, sent))
        send(line, sent, until)

    def counting_read(line: wire.Connection, count: int, until: float) -> bytes:
        cost[1] += count
        return read(line, count, until)

    monkeypatch.setattr(wire.Connection, "send", counting_send)
    monkeypatch.setattr(wire.Connection, "read", counting_read)
    return cost


class World:
    """Ranks of one job, which do what ``elaunch.init()`` does with the store, one by one."""

    def __init__(self, host: StoreHost, size: int, cost: list[int], shared: bool = False) -> None:
        """With ``shared`` all use one connection: a resolver may need a tenth of a second each."""
        self.costs: list[tuple[int, int]] = []
        """Requests and bytes of each rank, the last one's without those by which it places all."""
        self.all = 0
        """Bytes of all ranks."""
        until = time.monotonic() + PATIENCE
        places = [host.place(rank, size, ON_A_NODE, f"job of {size}") for rank in range(size)]
        stores = list(map(RoundStore, places))
        with ExitStack() as stack:
            ranks = []
            for place, store in zip(places, stores, strict=True):
                cost[:] = 0, 0
                me = record_of(place)
                if not shared or not ranks:
                    line = store.connect(until)
                    stack.callback(line.close)
                last = meeting.announce(line, place, me, until)
                ranks.append((line, place, store, me, tuple(cost)))
            assert last
            cost[:] = 0, 0
            meeting.publish_layouts(line, size, me, until)
            self.all = cost[1]
            for line, place, store, me, before in ranks:
                cost[:] = 0, 0
                if me.rank < size - 1:
                    layout = meeting.read_layout(
                        meeting.await_layout(line, place, store, me, until), me
                    )
                    assert isinstance(layout, Layout) and layout.size == size
                self.costs.append((before[0] + cost[0], before[1] + cost[1]))
                self.all += self.costs[-1][1]


def record_of(place: Placement) -> RankRecord:
    """Return a record as long as those of a large job."""
    return RankRecord(
        rank=place.rank,
        node=place.cross_rank,
        local=place.local_rank,
        local_size=place.local_size,
        host=f"node-{place.cross_rank:05d}.cluster",
        pid=100_000 + place.rank,
        machine=f"c3ff9a12-2d4d-43f7-a8a8-5d0e52d2b7a5 4:{place.cross_rank + 4026531840}",
        unix=f"elaunch-{place.rank:032x}",
        addr="10.20.30.40",
        addr_given=True,
        port=40000,
    )


def test_a_rank_reads_the_same_however_many_there_are(host: StoreHost, cost: list[int]) -> None:
    """But for the one that comes last, which reads all records and writes all places."""
    small, large = (World(host, n * ON_A_NODE, cost, shared=True) for n in (8, 32))
    # Rank 0 has opened the connection.
    assert {one[0] for one in large.costs[1:]} == {one[0] for one in small.costs[1:]}
    most = max(one[1] for one in small.costs)
    assert max(one[1] for one in large.costs) < most + 100 < 5000
    assert large.all < 2500 * len(large.costs)


@pytest.mark.trial
def test_4096_ranks_meet(host: StoreHost, cost: list[int]) -> None:
    """In seconds of one core, and in bytes of all ranks together."""
    began, used = time.monotonic(), time.process_time()
    world = World(host, 4096, cost, shared=True)
    seconds, used = time.monotonic() - began, time.process_time() - used
    print(f"{seconds:.2f} s, of it {used:.2f} of CPU; {world.all / 1e6:.1f} MB")
    assert world.all <= 10e6 and used < 8.0
