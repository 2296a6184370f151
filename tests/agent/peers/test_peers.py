"""The peers: shards and replicas reach the right agent whole, and strangers get nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field

import pytest

from elaunch.agent.peers.messages import PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peer, Peers
from elaunch.agent.saver import saver as savers
from elaunch.checkpoint.records import ShardHeader, ShardReport, Stage
from elaunch.errors import SaveError
from elaunch.wire.stream import HELLO, OPENING, PEER, REPLY, Caller, Unauthenticated, call_up
from elaunch.wire.worker import StagedShard
from tests.agent.peersrig import HERE, agents, tell
from tests.threadless import no_threads

STAGE = Stage(120, 3, "abc")
DEADLINE = 20.0


def shard(size: int) -> StagedShard:
    """Return a part of two files that together take ``size`` bytes."""
    images = (("__0_0.distcp", ((0, size - 10),)), ("rng.bin", ((size - 10, 10),)))
    return StagedShard(STAGE, ShardHeader(1, 2, "digits", {"steps_completed": 120}, "h", 7), images)


def serve_peers(saver: Keeper, peers: Peers) -> None:
    """Have the requests about shards answered."""
    savers.serve_peers(saver, peers)  # type: ignore[arg-type]


@dataclass
class Keeper:
    """The saver of one node, as its peers call it."""

    shards: dict[tuple[int, int, int], tuple[StagedShard, memoryview]] = field(default_factory=dict)
    reports: list[object] = field(default_factory=list)
    room: bytearray = field(default_factory=bytearray)
    served: int = 0
    overwrites: bool = False
    full: bool = False

    def on_report(self, report: ShardReport) -> None:
        """Note it."""
        self.reports.append(report)

    def held(self, wanted: tuple[int, int, str]) -> list[int]:
        """Return the ranks whose parts are there."""
        return [
            rank for step, round_number, rank in self.shards if wanted[:2] == (step, round_number)
        ]

    def serve_shard(
        self, step: int, round_number: int, rank: int
    ) -> tuple[StagedShard, memoryview] | None:
        """Return the part, the first time only if it is overwritten meanwhile."""
        self.served += 1
        if self.overwrites and self.served > 1:
            return None
        return self.shards.get((step, round_number, rank))

    def replica_room(self, shard: StagedShard) -> memoryview:
        """Return room, or refuse."""
        if self.full:
            raise SaveError("no memory left for a replica")
        self.room = bytearray(shard.end)
        return memoryview(self.room)

    def replica_came(self, shard: StagedShard) -> None:
        """Note it."""
        self.reports.append(("replica", shard))


def test_seals_and_failures_reach_the_node_that_they_are_for() -> None:
    """With the manifest's bytes as they were."""
    manifest = bytes(range(256)).decode("latin-1")
    sent = [
        ShardReport("written", STAGE, 5, 6, manifest=manifest),
        ShardReport("writing", STAGE, 3, 6),
        ShardReport("failed", STAGE, 3, 6, problem="no space left"),
    ]
    with agents(3) as made:
        savers = [Keeper() for _ in made]
        for peers, saver in zip(made, savers, strict=True):
            serve_peers(saver, peers)
        for report in sent:
            made[2].report(0, report, DEADLINE)
        assert savers[0].reports == sent
        assert savers[1].reports == savers[2].reports == []


def test_no_thread_for_another_agent() -> None:
    """It is turned away, and served when threads can be had."""
    with agents(2) as made:
        serve_peers(Keeper(), made[0])
        report = ShardReport("writing", STAGE, 3, 6)
        with no_threads(), pytest.raises(Undelivered):
            made[1].report(0, report, DEADLINE)
        made[1].report(0, report, DEADLINE)


def test_a_part_is_copied_from_memory_to_memory() -> None:
    """Of several frames, and one of a size that no frame has."""
    size = 9_000_001
    memory = memoryview(os.urandom(size + 100))
    taken = bytearray(size + 500)
    with agents(2) as made:
        saver = Keeper({(120, 3, 1): (shard(size), memory)})
        serve_peers(saver, made[0])
        assert made[1].ask_held(0, (120, 3, "abc"), DEADLINE) == [1]
        assert made[1].ask_held(0, (110, 3, "abc"), DEADLINE) == []
        found = made[1].fetch_shard(0, (120, 3, 1), lambda _: memoryview(taken), DEADLINE)
        assert found == shard(size)
        assert taken[:size] == memory[:size]
        assert made[1].fetch_shard(0, (120, 3, 0), lambda _: memoryview(taken), DEADLINE) is None
        saver.served, saver.overwrites = 0, True
        assert made[1].fetch_shard(0, (120, 3, 1), lambda _: memoryview(taken), DEADLINE) is None


def test_a_replica_lies_in_the_neighbours_memory() -> None:
    """Or is refused in its words, and says whose they are."""
    size = 5_000_000
    memory = memoryview(os.urandom(size))
    with agents(2) as made:
        saver = Keeper()
        serve_peers(saver, made[1])
        made[0].push_replica(1, shard(size), memory, DEADLINE)
        assert saver.reports == [("replica", shard(size))]
        assert saver.room == memory
        saver.full = True
        with pytest.raises(
            Undelivered, match=r"agent of node node1 \(127.*no memory left"
        ) as caught:
            made[0].push_replica(1, shard(size), memory, DEADLINE)
        assert not caught.value.gone


def test_an_agent_that_has_ended_is_told_from_one_that_is_silent() -> None:
    """The first at once, the second at the deadline."""
    with agents(2) as made, socket.create_server((HERE, 0)) as silent:
        made[1].close()
        with pytest.raises(Undelivered, match="nobody listens there") as caught:
            made[0].report(1, ShardReport("failed", STAGE, 0, 6), DEADLINE)
        assert caught.value.gone
        peer = Peer("nodeX", HERE, silent.getsockname()[1])
        with pytest.raises(Undelivered, match=r"nodeX.*cannot be reached: no answer") as caught:
            made[0].call(peer, time.monotonic() + 0.3)
        assert not caught.value.gone


def test_an_agent_that_dies_in_the_middle_is_gone() -> None:
    """Whoever waits for its bytes hears it."""

    def die(line: PeerConnection, _: object) -> None:
        line.send({"ok": True})
        line.close()

    with agents(2) as made:
        made[0].handle("file", die)
        line = made[1].call(made[1].node(0), time.monotonic() + DEADLINE)
        with line, pytest.raises(Undelivered, match="ended in the middle of sending") as caught:
            line.ask({"do": "file"})
            line.receive_into(memoryview(bytearray(10)), lambda _: None)
        assert caught.value.gone


@pytest.mark.slow
def test_one_that_is_slow_is_waited_for_and_one_that_hangs_is_not() -> None:
    """As long as it gets further."""
    release = threading.Event()

    def slow(line: PeerConnection, request: dict[str, bool]) -> dict[str, bool]:
        for number in range(1, 14):
            line.send({"busy": number if request["moves"] else 1})
            release.wait(0.1)
        return {"ok": True}

    with agents(2) as made:
        made[0].handle("slow", slow)
        peer = made[1].node(0)
        with made[1].call(peer, time.monotonic() + DEADLINE, patience=1.0) as line:
            assert line.ask({"do": "slow", "moves": True}) == {"ok": True}
        line = made[1].call(peer, time.monotonic() + DEADLINE, patience=1.0)
        with line, pytest.raises(Undelivered, match=r"makes no progress for 1 s") as caught:
            line.ask({"do": "slow", "moves": False})
        assert not caught.value.gone


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, b"s"])
def test_another_job_is_kept_out(secret: bytes | None) -> None:
    """Also where the run id is the same; and let in once both have the plan of one job."""
    with agents(2, secret) as made:
        tell([made[1]], job="another")
        peer = made[0].node(1)
        with pytest.raises(Undelivered, match="does not take us"):
            made[0].call(peer, time.monotonic() + 3.0)
        tell(made)
        made[0].call(peer, time.monotonic() + DEADLINE).close()


@pytest.mark.slow
def test_another_secret_is_kept_out() -> None:
    """Who reads the store knows the job's word, and that is not enough."""
    with agents(1, b"s") as made, agents(1, b"t") as others:
        tell([*made, *others], job="one")
        with pytest.raises(Undelivered, match="does not take us"):
            others[0].call(others[0].node(0), time.monotonic() + 3.0)


def test_before_the_first_plan_nobody_is_let_in() -> None:
    """There is nothing yet by which to know who belongs here; a caller waits for it."""
    early = Peers(HERE, "digits", None)
    early.start()
    try:
        with pytest.raises(Undelivered, match="not heard of a plan"):
            early.call(Peer("x", HERE, 1), time.monotonic() + 0.1)
        with agents(1, None) as made:
            peer = Peer("early", HERE, early.port)
            threading.Timer(0.2, tell, ([*made, early],)).start()
            made[0].call(peer, time.monotonic() + DEADLINE).close()
    finally:
        early.close()


def test_strangers_learn_nothing_and_stop_nobody() -> None:
    """Random bytes, half a handshake, an open connection each: the job goes on."""
    with agents(2) as made:
        saver = Keeper()
        serve_peers(saver, made[0])
        port = made[0].port
        with socket.create_connection((HERE, port)) as sock:
            sock.settimeout(DEADLINE)
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(OPENING))
            with pytest.raises(ConnectionResetError):
                assert sock.recv(1000) == b""
                raise ConnectionResetError  # both say: hung up, and not a byte came
        with socket.create_connection((HERE, port)) as sock:
            sock.settimeout(DEADLINE)
            sock.sendall(HELLO + bytes(32))
            assert len(sock.recv(1000)) == REPLY
            sock.sendall(bytes(1000))
            try:
                assert sock.recv(1000) == b""
            except ConnectionResetError:
                assert saver.reports == []
        with socket.create_connection((HERE, port)) as sock, pytest.raises(Unauthenticated):
            call_up(sock, b"guessed", port, Caller(PEER, 1), time.monotonic() + DEADLINE)
        idle = [socket.create_connection((HERE, port)) for _ in range(200)]
        made[1].report(0, ShardReport("written", STAGE, 1, 6, "{}"), DEADLINE)
        for sock in idle:
            sock.close()
        assert saver.reports == [ShardReport("written", STAGE, 1, 6, "{}")]


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "unknown"},
        {"do": 1},
        {"do": "written"},
        {"do": "written", "stage": {"step": -1, "round": 0, "uuid": "../x"}, "rank": 0},
        {"do": "shard", "step": "x", "round": 0, "rank": 0},
        {"do": "replica", "shard": {"images": 1}},
    ],
)
def test_requests_without_sense_are_refused(request_: dict[str, object]) -> None:
    """The one who asks hears it, and may go on."""
    with agents(2) as made:
        saver = Keeper()
        serve_peers(saver, made[0])
        with made[1].call(made[1].node(0), time.monotonic() + DEADLINE) as line:
            with pytest.raises(Undelivered, match="agent of node node0"):
                line.ask(request_)
            good = {"do": "shard", "step": 1, "round": 0, "rank": 0}
            assert line.ask(good) == {"ok": True}
        assert saver.reports == []


def test_a_round_without_that_node_has_nobody_to_ask() -> None:
    """A node rank that the plan has not, and an agent without a port."""
    with agents(1) as made, pytest.raises(Undelivered, match="the round has no node 7"):
        made[0].report(7, ShardReport("failed", STAGE, 0, 6), DEADLINE)
