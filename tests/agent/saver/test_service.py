"""Savers of several nodes: two agents in one process that call each other's functions."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.saver import commitrules, inflight, queue, saver
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.saver.service import SaverService, ServedWorker
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.workers.links import WorkerLinks
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.records import Checkpoint, ShardHeader, ShardReport, Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.config import resolve
from elaunch.errors import SaveError, StoreUnreachable
from elaunch.rendezvous.plan import Node, Plan, PlanCheckpoint
from elaunch.training.checkpoint.handle import SaveInFlight
from elaunch.training.checkpoint.saver import AgentSaverClient
from elaunch.wire import local
from elaunch.wire.local import LocalChannel, Requests
from elaunch.wire.worker import StagedShard
from tests.agent.saver.workerend import client, end
from tests.launching import wait_until

LONG = 60.0
NODES = (Node("aa", "host0", "10.0.0.1", 1, "x"), Node("bb", "host1", "10.0.0.2", 1, "x"))
FIRST = Plan("job", 0, "running", nodes=NODES)


class Agent:
    """One node's saver and the worker that uses it; ``others`` are the agents by node rank."""

    def __init__(self, root: Path, node_rank: int, others: list[Agent], **changes: Any) -> None:
        self.home = root / f"node{node_rank}"
        self.home.mkdir()
        self.node_rank = node_rank
        self.others = others
        self.gone = False
        self.plan: Plan | Exception = FIRST
        self.seen: list[events.Event] = []
        script = self.home / "train.py"
        script.write_text("")
        self.place = changes.pop("place", root / "ck")
        line = {"checkpoint-dir": str(self.place), "nnodes": "2", "rdzv-id": "digits"}
        line |= {"rdzv-backend": "c10d", "rdzv-endpoint": "localhost:29400"}
        settings = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, self.home)
        settings = structs.replace(settings, **changes)
        self.finisher = DirectoryFinisher(settings)
        self.saver = AgentSaver(SaverSetup(settings, self.seen.append, self.finisher))
        self.saver.meet(self.read_plan, self)  # type: ignore[arg-type]  # its peers, too
        self.links = WorkerLinks(self.seen.append, self.saver.serve)
        self.links.start()
        self.control = ControlSocket(self.home / "agent.sock", dict, attach=self.links.adopt)
        self.control.start()
        self.begin(FIRST)

    def begin(self, plan: Plan, name: str = "") -> None:
        self.plan = plan
        name = name or NODES[self.node_rank].name
        rank = plan.node_rank(name)
        assert rank is not None
        found = plan.checkpoint
        checkpoint = found and Checkpoint(Path(found.path), found.step, found.format, 0, found.uuid)
        round_ = Round(plan.round, 1, checkpoint=checkpoint, plan=plan, name=name)
        self.links.begin(round_)
        self.saver.begin(round_)

    def read_plan(self) -> Plan:
        if isinstance(self.plan, Exception):
            raise self.plan
        return self.plan

    def worker(self, rank: int, number: int = 0) -> AgentSaverClient:
        saver = client(self.home / "agent.sock", rank, 0, str(self.place), number)
        saver.connect(number)
        return saver

    def settle(self, holds: bool = False) -> events.SavesSettled:
        before = len(self._settled())
        self.saver.settle(LONG, holds=holds)
        wait_until(lambda: len(self._settled()) > before, LONG)
        return self._settled()[-1]

    def _settled(self) -> list[events.SavesSettled]:
        return [event for event in self.seen if isinstance(event, events.SavesSettled)]

    def close(self) -> None:
        self.control.close()
        self.links.close()
        self.saver.close()

    # ── Peers ──

    def handle(self, op: str, handler: object) -> None:
        """Requests do not come by messages here: see ``_peer``."""

    def _peer(self, node_rank: int) -> AgentSaver:
        peer = self.others[node_rank]
        if peer.gone or self.gone:
            raise SaveError(f"the agent of node host{node_rank} is gone")
        return peer.saver

    def report(self, node_rank: int, report: ShardReport, timeout: float) -> None:
        self._peer(node_rank).on_report(report)

    def ask_held(self, node_rank: int, wanted: tuple[int, int, str], timeout: float) -> list[int]:
        return self._peer(node_rank).held(wanted)

    def fetch_shard(
        self,
        node_rank: int,
        part: tuple[int, int, int],
        into: Callable[[int], memoryview],
        timeout: float,
    ) -> StagedShard | None:
        found = self._peer(node_rank).serve_shard(*part)
        if found is None:
            return None
        shard, memory = found
        into(shard.end)[: shard.end] = memory[: shard.end]
        return shard

    def push_replica(
        self, node_rank: int, shard: StagedShard, memory: memoryview, timeout: float
    ) -> None:
        peer = self._peer(node_rank)
        peer.replica_room(shard)[: shard.end] = memory[: shard.end]
        peer.replica_came(shard)


def pair(root: Path, **changes: Any) -> list[Agent]:
    """Return the agents of two nodes that share a directory."""
    open_storage(root / "ck").prepare("digits", given=True)
    agents: list[Agent] = []
    agents += [Agent(root, rank, agents, **changes) for rank in (0, 1)]
    return agents


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    made = pair(tmp_path)
    yield made
    monkeypatch.setattr(saver, "LAST_WAIT_S", 0.0)  # a part that was not sent comes no more
    for agent in made:
        agent.close()


def shard(
    step: int, rank: int, number: int = 0, local: bool = False, loads: bool = False
) -> StagedShard:
    """Return a part of 8 bytes."""
    part = ShardHeader(rank, 2, "digits", {"steps_completed": step})
    stage = Stage(step, number, f"u{step}")
    return StagedShard(stage, part, ((f"part-{rank}", ((0, 8),)),), local=local, loads=loads)


def save(workers: list[AgentSaverClient], step: int, **more: Any) -> None:
    """Have each worker leave ``step`` and its rank in its memory."""
    for worker in workers:
        assert worker.begin(True, LONG)
    for rank, worker in enumerate(workers):
        worker.memory(8)[:8] = b"%04d%04d" % (step, rank)
        worker.staged(shard(step, rank, **more))


def names(agents: list[Agent]) -> list[str]:
    return [found.name for found in open_storage(agents[0].place).listed()]


def test_the_agent_of_rank_0_commits(agents: list[Agent]) -> None:
    """It says what was committed; the other one knows of its own part only."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10)
    done = workers[0].wait(LONG)
    assert done is not None
    assert done.name == "step-00000010.r0"
    assert workers[1].wait(LONG) is None
    assert names(agents) == ["step-00000010.r0"]


def test_a_part_that_another_node_cannot_write(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are told, and no stage is left."""
    write = PosixStorage.write_shard

    def fail(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        if part.rank == 1:
            raise OSError(5, "Input/output error", "/disk")
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", fail)
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10)
    for worker in workers:
        with pytest.raises(SaveError, match=r"rank 1: .*Input/output error"):
            worker.wait(LONG)
    stages = Path(agents[0].place) / ".stage"
    wait_until(lambda: os.listdir(stages) == [], LONG)


def test_a_part_in_another_nodes_memory(agents: list[Agent]) -> None:
    """It is fetched once for the node, and forgotten when a save begins."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10)
    workers[0].wait(LONG)
    found = workers[0].recall(10, 0, [0, 1], "u10", LONG)
    assert bytes(found[1]["part-1"]) == b"00100001"
    agents[1].gone = True
    assert set(workers[0].recall(10, 0, [0, 1], "u10", LONG)) == {0, 1}
    assert workers[0].recall(10, 0, [1], "another", LONG) == {}
    assert workers[0].begin(True, LONG)
    workers[0].memory(8)
    assert workers[0].recall(10, 0, [0, 1], "u10", LONG) == {}


def test_the_next_round_finds_parts_where_the_nodes_are_now(agents: list[Agent]) -> None:
    """The nodes have changed places."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10)
    end(*workers)
    for agent in agents:
        agent.settle()
    second = structs.replace(FIRST, round=1, nodes=NODES[::-1])
    agents[0].others[:] = [agents[1], agents[0]]
    for agent in list(agents):
        agent.begin(second)
    one, other = agents
    for rank, agent in ((0, one), (1, other)):
        found = agent.worker(rank, 1).recall(10, 0, [0, 1], "u10", LONG)
        assert {r: bytes(f[f"part-{r}"]) for r, f in found.items()} == {
            0: b"00100000",
            1: b"00100001",
        }


@pytest.mark.slow
def test_a_node_that_dies_loses_nothing_that_its_neighbour_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is written by who has the copy; whoever chooses commits it; it is recalled, too."""
    write = PosixStorage.write_shard
    agents = pair(tmp_path, checkpoint_replicas=1)
    begun, hanging = threading.Event(), threading.Event()

    def dead(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        if part.rank == 1 and not agents[1].gone:
            begun.set()
            hanging.wait(LONG)  # the node never gets to it
            raise SaveError("dead")
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", dead)
    try:
        workers = [agents[0].worker(0), agents[1].worker(1)]
        save(workers, 10)
        end(*workers)
        first = agents[0].saver
        wait_until(lambda: first.serve_shard(10, 0, 1) is not None, LONG)
        assert begun.wait(LONG)  # or its write would go on after its death
        agents[1].gone = True
        settled = agents[0].settle()
        assert settled.lost == ()
        storage = open_storage(agents[0].place)
        assert [done.name for done in storage.finish_stages("digits")] in (["step-00000010.r0"], [])
        assert names(agents) == ["step-00000010.r0"]
        agents[0].begin(structs.replace(FIRST, round=1, nodes=NODES[:1]))
        found = agents[0].worker(0, 1).recall(10, 0, [0, 1], "u10", LONG)
        assert bytes(found[1]["part-1"]) == b"00100001"
    finally:
        hanging.set()
        for agent in agents:
            agent.close()


def test_a_handle_knows_when_another_node_has_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent there after the save has returned, beside the write to the disk."""
    pushed, written = threading.Event(), threading.Event()
    push, write = Agent.push_replica, PosixStorage.write_shard

    def late(self: Agent, *args: Any) -> None:
        pushed.wait(LONG)
        push(self, *args)

    def slow(self: PosixStorage, *args: Any) -> bytes:
        written.wait(LONG)
        return write(self, *args)

    monkeypatch.setattr(Agent, "push_replica", late)
    monkeypatch.setattr(PosixStorage, "write_shard", slow)
    agents = pair(tmp_path, checkpoint_replicas=1)
    try:
        workers = [agents[0].worker(0), agents[1].worker(1)]
        save(workers, 10)
        parts: Any = None  # of a call of all ranks
        handles = [SaveInFlight(parts, worker, Stage(10, 0, "u10")) for worker in workers]
        assert not any(handle.replicated() or handle.done() for handle in handles)
        pushed.set()
        wait_until(lambda: all(handle.replicated() for handle in handles), LONG)
        assert not any(handle.done() for handle in handles)
        written.set()
        wait_until(lambda: all(handle.done() for handle in handles), LONG)
    finally:
        pushed.set()
        written.set()
        for agent in agents:
            agent.close()


def test_a_save_that_no_round_resumes_from_is_removed(tmp_path: Path) -> None:
    """One node has left before its shard was staged; the other one still has its own."""
    agents = pair(tmp_path)
    try:
        workers = [agents[0].worker(0), agents[1].worker(1)]
        save(workers, 10)
        assert workers[0].wait(LONG) is not None
        assert all(worker.begin(True, LONG) for worker in workers)
        workers[0].memory(8)[:8] = b"00200000"
        workers[0].staged(shard(20, 0, loads=True))
        stages = Path(agents[0].place) / ".stage"
        wait_until(lambda: len(os.listdir(stages)) == 1, LONG)
        agents[1].gone = True
        end(*workers)
        assert [one.step for one in agents[0].settle(holds=True).held] == [20]
        agents[0].finisher.held = frozenset(os.listdir(stages))  # as the coordinator's search does
        agents[0].finisher.finish(agents[0].place, "digits")
        assert os.listdir(stages) != []  # a round may resume from it
        agents[0].begin(structs.replace(FIRST, round=1, nodes=NODES[:1]))
        agents[0].worker(0, 1)
        wait_until(lambda: os.listdir(stages) == [], LONG)
    finally:
        for agent in agents:
            agent.close()


def test_what_the_other_node_has_written_needs_no_copy(tmp_path: Path) -> None:
    """The round ends, both live: nothing is written twice, nothing is left in the stages."""
    agents = pair(tmp_path, checkpoint_replicas=1)
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10)
    done = workers[0].wait(LONG)
    end(*workers)
    for agent in agents:
        agent.settle()
        agent.close()
    assert done is not None
    assert os.listdir(Path(agents[0].place) / ".stage") == []


@pytest.mark.slow
def test_a_node_that_writes_for_long(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that commits hears of it all the time, and waits longer than for one that is mute.

    The one that writes waits for nobody but itself.
    """
    monkeypatch.setattr(inflight, "SHARD_DEADLINE_S", 2.0)
    monkeypatch.setattr(queue, "REPORT_S", 0.1)
    write = PosixStorage.write_shard

    def slow(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        if part.rank == 1:
            threading.Event().wait(4.0)
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", slow)
    workers = [agent.worker(rank) for rank, agent in enumerate(agents)]
    for rank, worker in enumerate(workers):
        assert worker.begin(True, LONG)
        worker.memory(8)
        worker.staged(shard(10, rank))
    workers[1].wait(LONG)  # raises what has become of its save
    done = workers[0].wait(LONG)
    assert done is not None and done.step == 10
    for worker in workers:
        end(worker)


def test_the_last_save_of_a_job_waits_for_the_other_node(agents: list[Agent]) -> None:
    """The round's end does not, since that node may be dead; the job's end does, for a while."""
    chief, other = agents
    worker = chief.worker(0)
    assert worker.begin(True, LONG)
    worker.memory(8)
    worker.staged(shard(10, 0))
    end(worker)
    assert chief.settle() == events.SavesSettled(0)
    storage = open_storage(chief.place)
    stage = Stage(10, 0, "u10")
    late = shard(10, 1)
    from elaunch.checkpoint.records import Image

    manifest = storage.write_shard(stage, late.header, [Image("part-1", [b"12345678"])])
    report = ShardReport("written", stage, 1, 2, manifest.decode("latin-1"))
    threading.Timer(0.1, other.report, (0, report, LONG)).start()
    chief.close()
    assert names(agents) == ["step-00000010.r0"]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (StoreUnreachable("nobody answers"), "the store cannot be asked: nobody answers"),
        (structs.replace(FIRST, round=1), "the job is in round 1"),
        (structs.replace(FIRST, job="x"), "the store has another job with this run id"),
        (structs.replace(FIRST, phase="forming"), "the next round is being formed"),
    ],
)
def test_the_fence_asks_the_store(
    agents: list[Agent], plan: Plan | Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the call, for a worker; and before COMMIT, where the stage is left as it is."""
    monkeypatch.setattr(commitrules, "FENCE_S", 0.1)
    workers = [agents[0].worker(0), agents[1].worker(1)]
    workers[0].fence(0)
    agents[0].plan = plan
    with pytest.raises(SaveError, match=f"round 0 may not commit any more: {reason}"):
        workers[0].fence(0)
    save(workers, 10)
    with pytest.raises(SaveError, match=reason):
        workers[0].wait(LONG)
    assert names(agents) == []
    assert os.listdir(Path(agents[0].place) / ".stage") == ["step-00000010.r0.u10"]


def test_the_fence_waits_for_a_store_that_is_silent_for_a_while(agents: list[Agent]) -> None:
    """An etcd that elects a leader costs no save, as it costs no round."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    agents[0].plan = StoreUnreachable("no answer within 0.3 s")
    save(workers, 10)
    threading.Timer(0.3, setattr, (agents[0], "plan", FIRST)).start()
    done = workers[0].wait(LONG)
    assert done is not None and done.step == 10


@pytest.mark.parametrize("phase", ["ending", "over"])
def test_a_round_that_ends_may_still_commit(agents: list[Agent], phase: Any) -> None:
    """What is in memory is written out before the next one is formed."""
    agents[0].plan = structs.replace(FIRST, phase=phase)
    agents[0].worker(0).fence(0)


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    """The agents of two nodes with a directory of its own each."""
    made = apart(tmp_path)
    yield made
    monkeypatch.setattr(saver, "LAST_WAIT_S", 0.0)
    for agent in made:
        agent.close()


def apart(root: Path, **changes: Any) -> list[Agent]:
    agents: list[Agent] = []
    for rank in (0, 1):
        place = root / f"disk{rank}"
        open_storage(place).prepare("digits", given=True)
        agents.append(Agent(root, rank, agents, place=place, checkpoint_local=True, **changes))
    return agents


def push(agent: Agent, step: int, rank: int, content: bytes) -> None:
    """Have a replica come."""
    part = shard(step, rank, local=True)
    agent.saver.replica_room(part)[:8] = content
    agent.saver.replica_came(part)


def test_a_directory_on_each_node(disks: list[Agent]) -> None:
    """Every node commits, with the seals of all."""
    workers = [disks[0].worker(0), disks[1].worker(1)]
    save(workers, 10, local=True)
    done = [worker.wait(LONG) for worker in workers]
    assert [each and each.name for each in done] == ["step-00000010.r0"] * 2
    for rank, agent in enumerate(disks):
        path = Path(agent.place) / "step-00000010.r0"
        assert [file.name for file in path.glob("part-*")] == [f"part-{rank}"]
        assert len(list(path.glob("manifest.*"))) == 2


def test_a_copy_goes_to_the_neighbours_own_disk(tmp_path: Path) -> None:
    """With its checkpoint, whenever it comes; the next one waits until it is there."""
    agents = apart(tmp_path, checkpoint_replicas=1)
    try:
        workers = [agents[0].worker(0), agents[1].worker(1)]
        for step in (10, 20):
            save(workers, step, local=True)
        for worker in workers:
            assert worker.begin(True, LONG)
        for agent in agents:
            own.verify(Path(agent.place) / "step-00000010.r0", "digits")
        end(*workers)
        for agent in agents:
            agent.settle()
            own.verify(Path(agent.place) / "step-00000020.r0", "digits")
            assert os.listdir(Path(agent.place) / ".stage") == []
    finally:
        for agent in agents:
            agent.close()


def test_only_what_was_sealed_is_copied(disks: list[Agent]) -> None:
    """Another content makes nothing whole; what is of no checkpoint here is dropped."""
    workers = [disks[0].worker(0), disks[1].worker(1)]
    push(disks[0], 5, 1, b"00050001")
    save(workers, 10, local=True)
    for worker in workers:
        worker.wait(LONG)
    path = Path(disks[0].place) / "step-00000010.r0"
    push(disks[0], 10, 1, b"00100009")
    push(disks[0], 10, 1, b"00100001")
    wait_until((path / "part-1").exists, LONG)
    own.verify(path, "digits")
    shutil.rmtree(path)
    push(disks[0], 10, 1, b"00100001")
    end(*workers)
    disks[0].settle()
    assert sorted(os.listdir(disks[0].place)) == [".lock", ".stage", ".trash", "run.json"]
    assert os.listdir(Path(disks[0].place) / ".stage") == []


def test_another_content_is_said(
    disks: list[Agent], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that cannot be written is logged by name, and fails no save."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    workers = [disks[0].worker(0), disks[1].worker(1)]
    save(workers, 10, local=True)
    workers[0].wait(LONG)
    push(disks[0], 10, 1, b"00100009")
    end(*workers)
    disks[0].settle()
    said = "this node's disk has no copy of rank 1's shard of step-00000010.r0: part-1 is not what"
    assert said in caplog.text
    assert not (Path(disks[0].place) / "step-00000010.r0" / "part-1").exists()
    assert os.listdir(Path(disks[0].place) / ".stage") == []


def test_a_copy_in_what_the_round_left_uncommitted(tmp_path: Path) -> None:
    """Who chooses the next checkpoint commits it, as the very one that the other node has."""
    agents = apart(tmp_path, checkpoint_replicas=1)
    agents[0].plan = structs.replace(FIRST, phase="forming")
    try:
        workers = [agents[0].worker(0), agents[1].worker(1)]
        save(workers, 10, local=True)
        assert workers[1].wait(LONG) is not None
        with pytest.raises(SaveError, match="the next round is being formed"):
            workers[0].wait(LONG)
        end(*workers)
        agents[0].settle()
        assert open_storage(agents[0].place, local=True).finish_stages("digits")
        one, other = (Path(agent.place) / "step-00000010.r0" for agent in agents)
        own.verify(one, "digits")
        for rank in (0, 1):
            name = f"manifest.rank-0000{rank}.json"
            assert (one / name).read_bytes() == (other / name).read_bytes()
    finally:
        for agent in agents:
            agent.close()


def test_a_part_that_another_node_cannot_hand_over(agents: list[Agent]) -> None:
    """All ranks take the save back, each with its own agent; the next one works."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    for worker in workers:
        assert worker.begin(True, LONG)
        worker.memory(8)
    workers[0].staged(shard(10, 0))
    for worker in workers:
        worker.abandon(shard(10, 0).stage)
    save(workers, 20)
    done = workers[0].wait(LONG)
    assert done is not None and done.step == 20
    assert workers[1].wait(LONG) is None
    wait_until(lambda: not os.listdir(Path(agents[0].place) / ".stage"), LONG)


def test_word_that_comes_before_any_worker(agents: list[Agent]) -> None:
    """Nobody here has saved anything: it is refused, not lost in silence."""
    assert agents[0].saver.serve_shard(10, 0, 1) is None
    with pytest.raises(SaveError, match="no worker of this node has saved anything"):
        agents[0].saver.replica_room(shard(10, 1))


def test_a_torn_answer_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later answer is read as its rest, and what the worker has sent is still done."""
    monkeypatch.setattr(local, "TAKEN_S", 0.1)
    abandoned: list[int] = []
    serving: Any = SimpleNamespace(
        queue=SimpleNamespace(
            wait=lambda rank, timeout: None,
            abandon=lambda rank, stage: abandoned.append(rank),
        ),
        last=lambda worker: {"committed": "x" * (4 << 20)},
    )
    ours, theirs = (LocalChannel(end) for end in socket.socketpair())
    served = ServedWorker(serving, Requests(theirs), 3, 0, 0)
    for number, op in enumerate(("wait", "abandon", "wait"), 1):
        served.serve({"op": op, "n": number})
    assert abandoned == [3]
    assert ours.receive() is None  # no whole message has come
    served.close()
    theirs.close()
    ours.close()


def hold_writes(monkeypatch: pytest.MonkeyPatch, ranks: set[int]) -> threading.Event:
    """Have the storage take nothing of these ranks' shards before the event is set."""
    write, opened = PosixStorage.write_shard, threading.Event()

    def held_up(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        if part.rank in ranks and part.copied is False:
            assert opened.wait(LONG)
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", held_up)
    return opened


def left_in_memory(agents: list[Agent]) -> Plan:
    """Have both nodes leave step 10 in memory; return the plan of a round that resumes from it."""
    workers = [agents[0].worker(0), agents[1].worker(1)]
    save(workers, 10, loads=True)
    end(*workers)
    path = f"{agents[0].place}/step-00000010.r0"
    for rank, agent in enumerate(agents):
        agent.saver.settle(LONG, holds=True)
        wait_until(agent._settled, LONG)
        (held,) = agent._settled()[0].held
        assert (held.path, held.uuid, held.world_size) == (path, "u10", 2)
        assert rank in held.ranks
    checkpoint = PlanCheckpoint(path, 10, "elaunch", "u10")
    return structs.replace(FIRST, round=1, checkpoint=checkpoint)


def test_a_save_goes_on_while_the_next_round_runs(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are recalled; what saves next waits for it; then it is committed, in round 1."""
    opened = hold_writes(monkeypatch, {0, 1})
    second = left_in_memory(agents)
    for agent in agents:
        agent.begin(second)
    workers = [agent.worker(rank, 1) for rank, agent in enumerate(agents)]
    found = workers[0].recall(10, 0, [0, 1], "u10", LONG)
    assert bytes(found[1]["part-1"]) == b"00100001"
    workers[0].memory(8)  # as reserve() does: nothing is overwritten by it
    assert not workers[0].begin(False) and not workers[1].begin(False)
    assert names(agents) == []
    opened.set()
    done = workers[0].wait(LONG)
    assert done is not None and (done.name, done.uuid) == ("step-00000010.r0", "u10")
    save(workers, 20, number=1)
    last = workers[0].wait(LONG)
    assert last is not None and last.name == "step-00000020.r1"


def test_a_save_that_the_next_round_does_not_resume_from(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never committed, however late the storage takes it, and its stage is cleared."""
    opened = hold_writes(monkeypatch, {0})
    second = structs.replace(left_in_memory(agents), checkpoint=None)
    for agent in agents:
        agent.begin(second)
    opened.set()
    wait_until(lambda: not agents[0].saver.unfinished(), LONG)
    wait_until(lambda: os.listdir(Path(agents[0].place) / ".stage") == [], LONG)
    assert names(agents) == []


def test_a_save_that_is_ready_before_the_choice_waits_for_it(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written, and nothing is committed before it is known what the round resumes from."""
    opened = hold_writes(monkeypatch, {0})
    second = left_in_memory(agents)
    opened.set()
    wait_until(lambda: not agents[0].saver.unfinished(), LONG)
    for agent in agents:
        agent.plan = structs.replace(FIRST, phase="forming")
    assert names(agents) == []
    for agent in agents:
        agent.begin(second)
    wait_until(lambda: names(agents) == ["step-00000010.r0"], LONG)


def test_the_choice_does_not_wait_for_a_commit_that_waits_for_it(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost whose shard is on the disk: the search commits what the living one has."""
    opened = hold_writes(monkeypatch, {0})
    left_in_memory(agents)
    living = agents[0]
    assert living._settled()[-1].held[0].writing
    of_the_lost = ".stage/*/manifest.rank-00001.json"
    wait_until(lambda: any(Path(living.place).glob(of_the_lost)), LONG)  # its write was not held
    agents[1].gone = True
    opened.set()
    wait_until(lambda: len(living._settled()) > 1, 20)  # no round begins before it is posted
    (held,) = living._settled()[-1].held
    assert not held.writing
    living.finisher.held = frozenset(["step-00000010.r0.u10"])
    living.finisher.finish(Path(living.place), "digits")
    assert names(agents) == ["step-00000010.r0"]


@pytest.mark.parametrize("name", ["bb", "zz"])
def test_the_node_that_commits_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its neighbour has its shard: it writes that too, and commits, whatever its name is now.

    The copy is written as one, though a worker of the next round has its rank here already.
    """
    agents = pair(tmp_path, checkpoint_replicas=1)
    # The lost node's own write goes no further: its agent is dead.
    dead, opened = hold_writes(monkeypatch, {0}), hold_writes(monkeypatch, {1})
    try:
        save_both = left_in_memory(agents)
        survivor = agents[1]
        wait_until(lambda: survivor.saver.serve_shard(10, 0, 0) is not None, LONG)
        agents[0].gone = True
        survivor.saver.settle(LONG, holds=True)
        wait_until(lambda: len(survivor._settled()) > 1, LONG)
        assert survivor._settled()[-1].held[0].ranks == (0, 1)
        nodes = (structs.replace(NODES[1], name=name),)
        joined, go_on = threading.Event(), SaverService._go_on

        def later(self: SaverService, uuid: str) -> None:
            assert joined.wait(LONG)
            go_on(self, uuid)

        monkeypatch.setattr(SaverService, "_go_on", later)
        survivor.begin(structs.replace(save_both, nodes=nodes), name)
        worker = survivor.worker(0, 1)
        joined.set()
        written = open_storage(survivor.place).manifests
        wait_until(lambda: 0 in written(Stage(10, 0, "u10")), LONG)
        found = worker.recall(10, 0, [0, 1], "u10", LONG)
        assert bytes(found[0]["part-0"]) == b"00100000"
        opened.set()
        done = worker.wait(LONG)
        assert done is not None and done.uuid == "u10"
    finally:
        dead.set()
        opened.set()
        for agent in agents:
            agent.close()
