"""An agent's saver and its workers, over a real socket; workers that are killed are processes."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy import events
from elaunch.agent.policy.state import Limits, Phase, State, refusal
from elaunch.agent.policy.turn import Round
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.saver import saver, service
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.workers.links import WorkerLinks
from elaunch.checkpoint.records import Checkpoint, Image, ShardHeader, Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.config import resolve
from elaunch.errors import SaveError
from elaunch.training.agentlink import AgentLink
from elaunch.training.checkpoint.saver import AgentSaverClient, connected
from elaunch.wire.control import ask
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import StagedShard
from tests.agent.saver.workerend import client, end, linked
from tests.launching import wait_until

LONG = 60.0
ROOT = Path(__file__).parent.parent.parent.parent

WORKER = """
import json, os, signal, sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.wire.worker import StagedShard
from tests.agent.saver.workerend import client

socket, place, rank, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
saver = client(socket, rank, rank, place, 0)
saver.connect(0)
if when == "connected":
    os.kill(os.getpid(), signal.SIGKILL)
assert saver.begin(True, 60.0)
memory = saver.memory(8)
memory[:4] = b"NEW!"
if when == "copying":
    os.kill(os.getpid(), signal.SIGKILL)
memory[4:8] = b"%04d" % rank
part = ShardHeader(rank, 2, "digits", {"steps_completed": 10})
handed = StagedShard(Stage(10, 0, "u"), part, ((f"part-{rank}", ((0, 8),)),))
if when == "sent":
    line = json.dumps({"op": "staged", "n": 0, "shard": asdict(handed), "memory": saver._inode})
    saver._link._channel._sock.send(line.encode() + b"\\n")
    os.kill(os.getpid(), signal.SIGKILL)
if when == "torn":
    saver._link._channel._sock.send(b'{"op": "staged", "n": 0, "shard": {"sta')
    os.kill(os.getpid(), signal.SIGKILL)
saver.staged(handed)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Rig:
    """An agent that keeps checkpoints for two workers in ``tmp_path / "ck"``."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.place = tmp_path / "ck"
        self.socket = tmp_path / "agent.sock"
        script = tmp_path / "train.py"
        script.write_text("")
        line = {"checkpoint-dir": str(self.place)}
        settings = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
        changes = {"run_id": "digits", "run_id_given": True, **changes}
        self.settings = structs.replace(settings, **changes)
        self.storage = open_storage(self.place)
        self.storage.prepare("digits", given=True)
        self.inbox: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
        self.seen: list[events.Event] = []
        self.state = State(Limits(2), phase=Phase.RUNNING)
        self.finisher = DirectoryFinisher(self.settings)
        self.saver = AgentSaver(SaverSetup(self.settings, self.inbox.put, self.finisher))
        self.links = WorkerLinks(self.inbox.put, self.saver.serve)
        self.links.start()
        self.control = ControlSocket(self.socket, dict, attach=self.links.adopt)
        self.control.start()
        self.begin(0)
        threading.Thread(target=self._loop, daemon=True).start()

    def begin(self, number: int) -> None:
        self.state = structs.replace(self.state, round=number)
        round_ = Round(number, 2)
        self.links.begin(round_)
        self.saver.begin(round_)

    def _loop(self) -> None:
        while (event := self.inbox.get()) is not None:
            if isinstance(event, events.FenceAsked):
                event.answer(refusal(self.state, event.round))
            self.seen.append(event)

    def worker(self, rank: int, number: int = 0) -> AgentSaverClient:
        made = client(self.socket, rank, rank, str(self.place), number)
        made.connect(number)
        return made

    def settle(self, seconds: float = LONG) -> events.SavesSettled:
        self.saver.settle(seconds)
        wait_until(lambda: self._settled() is not None, LONG)
        found = self._settled()
        assert found is not None
        return found

    def _settled(self) -> events.SavesSettled | None:
        found = [event for event in self.seen if isinstance(event, events.SavesSettled)]
        return found[-1] if found else None

    def killed(self, rank: int, when: str) -> None:
        """Run a worker that SIGKILLs itself."""
        argv = [sys.executable, "-c", WORKER, str(self.socket), str(self.place), str(rank), when]
        done = subprocess.run(argv, timeout=LONG, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL

    @property
    def names(self) -> list[str]:
        return [found.name for found in self.storage.listed()]

    def close(self) -> None:
        self.control.close()
        self.links.close()
        self.saver.close()
        self.inbox.put(None)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    monkeypatch.setattr(saver, "LAST_WAIT_S", 0.0)  # a part that was not sent comes no more
    made.close()


def test_what_a_search_has_committed_is_kept_by_rule(rig: Rig) -> None:
    """Where each node has a directory, what the round resumes from is known at its begin."""
    for step in (10, 20, 30):
        header = ShardHeader(0, 1, "digits", {"steps_completed": step}, keep={"last": 1})
        stage = Stage(step, 0, f"u{step}")
        rig.storage.write_shard(stage, header, [Image("part-0", [b"bytes"])])
        if step < 30:
            rig.storage.commit(stage, lambda: None)
    rig.finisher.finish(rig.place, "digits")
    assert rig.names == ["step-00000010.r0", "step-00000020.r0", "step-00000030.r0"]
    found = Checkpoint(rig.place / "step-00000010.r0", 10, "elaunch", 0)
    rig.saver.begin(Round(1, 2, checkpoint=found))
    wait_until(lambda: rig.names == ["step-00000010.r0", "step-00000030.r0"], LONG)


def test_a_worker_that_was_kept_begins_anew(rig: Rig) -> None:
    """On its old connection: all else is of the round before. It may have another rank."""
    zero, one = rig.worker(0), rig.worker(1)
    assert one.begin(True, LONG)
    one.memory(8)[:8] = b"old data"
    kept = Round(1, 2, kept={1: 0})
    rig.state = structs.replace(rig.state, round=1, kept=kept.kept)
    rig.links.begin(kept)
    rig.saver.begin(kept)
    with pytest.raises(SaveError, match="round 0 is over: round 1 runs here"):
        one.begin(True, LONG)
    one._placement = SimpleNamespace(rank=0, local_rank=1)  # it is alone for now
    one.connect(1)
    assert one.begin(True, LONG)
    memory = one.memory(8)
    memory[:8] = b"new data"
    header = ShardHeader(0, 1, "digits", {"steps_completed": 20})
    one.staged(StagedShard(Stage(20, 1, "v"), header, (("part-0", ((0, 8),)),)))
    assert one.wait(LONG) is not None and rig.names == ["step-00000020.r1"]
    new = rig.worker(0, 1)
    one._placement = SimpleNamespace(rank=1, local_rank=1)
    one.connect(1)
    for rank, worker in enumerate((new, one)):
        assert worker.begin(True, LONG)
        worker.memory(8)[:8] = b"all data"
        worker.staged(shard(30, rank, 1))
    assert one.wait(LONG) is not None and "step-00000030.r1" in rig.names
    end(zero, one, new)


def shard(step: int, rank: int, number: int = 0, size: int = 8) -> StagedShard:
    """Return a part of ``size`` bytes at the beginning of the memory."""
    part = ShardHeader(rank, 2, "digits", {"steps_completed": step})
    stage = Stage(step, number, f"u{step}")
    return StagedShard(stage, part, ((f"part-{rank}", ((0, size),)),))


def save(workers: list[AgentSaverClient], step: int, number: int = 0) -> None:
    """Have all workers leave ``step`` and their rank in their memory."""
    for worker in workers:
        assert worker.begin(True, LONG)
    for rank, worker in enumerate(workers):
        worker.memory(8)[:8] = b"%04d%04d" % (step, rank)
        worker.staged(shard(step, rank, number))


def test_nothing_is_made_before_a_worker_connects(rig: Rig) -> None:
    """A job that saves nothing has no thread of the saver's, and its end waits for nothing."""
    assert rig.saver.record() is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("requests")]
    assert rig.settle() == events.SavesSettled(0)


def test_a_save(rig: Rig) -> None:
    """Both parts are on the disk, and what they were made of is still in memory."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    done = [worker.wait(LONG) for worker in workers]
    assert [each and each.name for each in done] == ["step-00000010.r0"] * 2
    assert done[0] == rig.storage.find("step-00000010.r0")
    found = workers[0].recall(10, 0, [0, 1, 7], "u10", LONG)
    assert {rank: bytes(files[f"part-{rank}"]) for rank, files in found.items()} == {
        0: b"00100000",
        1: b"00100001",
    }
    assert workers[1].recall(10, 0, [0], "another", LONG) == {}
    assert events.SaverUsed(0) in rig.seen
    record = rig.saver.record()
    assert record is not None
    assert record["step"] == 10


def test_what_the_ranks_commit_themselves_counts(rig: Rig) -> None:
    """With what the agent has committed. Without an agent the checkpoint is there all the same."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    done = workers[0].wait(LONG)
    assert done is not None
    for step in (20, 30):
        workers[0].committed(dataclasses.replace(done, step=step), 0.25)
    record = rig.saver.record()
    assert record is not None
    assert (record["step"], record["commits"], record["seconds"]) == (30, 3, 0.25)
    rig.saver.close()
    workers[0].committed(done, 0.25)


def test_memory_is_the_same_until_it_grows(rig: Rig) -> None:
    """And what was seen of the smaller one does no harm."""
    worker = rig.worker(0)
    small = worker.memory(100)
    part = small[:4]
    assert worker.memory(50) is small
    large = worker.memory(1 << 20)
    assert large.nbytes >= 1 << 20
    part[:] = b"late"
    assert bytes(large[:4]) == bytes(4)


def test_more_memory_than_there_may_be(tmp_path: Path) -> None:
    """The error has the numbers and the flag; what was there is still there."""
    rig = Rig(tmp_path, checkpoint_memory=1 << 20)
    try:
        worker = rig.worker(0)
        worker.memory(1000)
        with pytest.raises(SaveError, match=r"4\.00 MiB: .* of 1\.00 MiB \(--checkpoint-memory\)"):
            worker.memory(4 << 20)
        with pytest.raises(SaveError, match="memory"):
            rig.worker(1).memory(1 << 20)
    finally:
        rig.close()


def test_what_was_begun_is_recalled_no_more(rig: Rig) -> None:
    """A worker that is killed in the middle of the copy leaves half of two checkpoints there."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    workers[0].wait(LONG)
    assert workers[0].begin(True, LONG)
    assert set(workers[1].recall(10, 0, [0, 1], "", LONG)) == {0, 1}, "not all ranks have begun"
    workers[0].memory(8)
    wait_until(lambda: set(workers[1].recall(10, 0, [0, 1], "", LONG)) == {1}, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["staged", "sent"])
def test_a_worker_that_is_killed_after_it_handed_over(rig: Rig, when: str) -> None:
    """It has no answer to wait for: the part is the agent's, and the next round has it."""
    rig.killed(0, when)
    rig.killed(1, when)
    assert rig.settle().lost == ()
    assert rig.names == ["step-00000010.r0"]
    found = rig.storage.find("step-00000010.r0")
    assert (Path(found.place) / "part-1").read_bytes() == b"NEW!0001"
    rig.begin(1)
    for rank in (0, 1):
        files = rig.worker(rank, 1).recall(10, 0, [0, 1], found.uuid, LONG)
        assert bytes(files[1 - rank][f"part-{1 - rank}"]) == b"NEW!%04d" % (1 - rank)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["connected", "copying", "torn"])
def test_a_worker_that_is_killed_before_it_handed_over(rig: Rig, when: str) -> None:
    """Nothing is committed, the part of the other one is discarded, the one before stays."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 5)
    workers[0].wait(LONG)
    workers[1].close()
    rig.killed(1, when)
    assert workers[0].begin(True, LONG)
    workers[0].memory(8)[:] = bytes(len(workers[0].memory(8)))
    workers[0].staged(shard(10, 0))
    with pytest.raises(SaveError, match="rank 1 ended before handing over a part"):
        workers[0].wait(LONG)
    workers[0].close()
    rig.settle()
    assert rig.names == ["step-00000005.r0"]
    wait_until(lambda: not list((rig.place / ".stage").iterdir()), LONG)


def test_the_next_round_has_the_same_memory(rig: Rig) -> None:
    """Nothing is made or touched anew; what was there goes when a save begins."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    end(*workers)
    assert rig.settle().lost == ()
    assert rig.names == ["step-00000010.r0"]
    rig.begin(1)
    workers = [rig.worker(0, 1), rig.worker(1, 1)]
    assert bytes(workers[0].memory(8)[:8]) == b"00100000"
    save(workers, 20, 1)
    assert workers[0].recall(10, 0, [0, 1], "", LONG) == {}
    done = workers[0].wait(LONG)
    assert done is not None
    assert done.name == "step-00000020.r1"


def test_a_worker_of_a_round_that_is_over(rig: Rig) -> None:
    """It may neither begin nor hand over nor commit, and one that comes late is not let in."""
    late = rig.worker(0)
    assert late.begin(True, LONG)
    late.memory(8)
    rig.begin(1)
    with pytest.raises(SaveError, match=r"round 0 is over: round 1 runs here|agent is gone"):
        late.staged(shard(10, 0))
    with pytest.raises(SaveError, match="round 0 does not run here; it is round 1"):
        rig.worker(0, 0)
    current = rig.worker(1, 1)
    current.fence(1)
    with pytest.raises(SaveError, match="round 0 may not commit any more: the job is in round 1"):
        current.fence(0)
    assert rig.names == []


def test_a_part_that_cannot_be(rig: Rig) -> None:
    """Not begun, of another rank, of another run, beyond the memory: the next call raises it."""
    worker = rig.worker(0)

    def refused(one: StagedShard, reason: str) -> None:
        worker.staged(one)
        for rank in (0, 1):  # the save is over for the others, too
            with pytest.raises(SaveError, match=f"was not committed: .*{reason}") as raised:
                (worker if rank == 0 else other).begin(True, LONG)
            assert raised.value.lost
        assert worker.begin(True, LONG)

    other = rig.worker(1)
    refused(shard(10, 0), "no save was begun")
    refused(shard(11, 0), "no memory was asked for")
    worker.memory(8)
    refused(shard(12, 1), "it is of rank 1 and round 0")
    refused(shard(13, 0, size=1 << 30), "it lies beyond")
    header = dataclasses.replace(shard(14, 0).header, run_id="other")
    refused(dataclasses.replace(shard(14, 0), header=header), "it is of run other")
    worker._inode += 1
    refused(shard(15, 0), "it lies in memory that the worker has no more")
    assert os.listdir(rig.place / ".stage") == []


def test_a_save_that_is_known_to_be_over_costs_no_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has reported it; the memory's old content is recalled no more all the same."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    wait_until(lambda: all(worker._over for worker in workers), LONG)
    with monkeypatch.context() as patch:
        patch.setattr(AgentSaverClient, "_ask", lambda *_, **__: pytest.fail("it asks"))
        save(workers, 20)
        assert [done.last.step for done in workers if done.last is not None] == [10, 10]
    wait_until(lambda: workers[1].recall(10, 0, [0, 1], "", LONG) == {}, LONG)
    assert [worker.wait(LONG) is not None for worker in workers] == [True, True]
    assert rig.names == ["step-00000010.r0", "step-00000020.r0"]


def test_a_worker_that_ends_while_it_overwrites_what_it_did_not_ask_for(rig: Rig) -> None:
    """The agent knows of it before the first byte: nobody loads half of two checkpoints."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    wait_until(lambda: all(worker._over for worker in workers), LONG)
    for worker in workers:
        assert worker.begin(True, LONG) and worker._is_quick
    workers[0].memory(8)[:4] = b"TORN"
    end(*workers)
    assert rig.settle().lost == ()
    rig.begin(1)
    found = rig.worker(1, 1).recall(10, 0, [0, 1], "", LONG)
    assert {rank: bytes(files["part-1"]) for rank, files in found.items()} == {1: b"00100001"}


def test_what_is_reported_of_an_older_save_counts_no_more(rig: Rig) -> None:
    """Else memory that the agent is writing out would be overwritten."""
    worker = rig.worker(0)
    save([worker, rig.worker(1)], 10)
    wait_until(lambda: bool(worker._over), LONG)
    assert worker.begin(True, LONG)
    worker.memory(8)
    worker.staged(shard(20, 0))
    assert not worker.begin(False), "rank 1 has not staged its shard"


def test_a_request_that_is_none_and_not_answered(rig: Rig) -> None:
    """The worker is dropped: nobody waits for the shard that it should have been."""
    workers = [rig.worker(0), rig.worker(1)]
    for worker in workers:
        assert worker.begin(True, LONG)
        worker.memory(8)
    workers[0].staged(shard(10, 0))
    workers[1]._post("staged", shard={"stage": 7}, memory=0)
    with pytest.raises(SaveError, match="rank 1 ended before handing over a part"):
        workers[0].wait(LONG)


def test_what_the_saver_refuses(rig: Rig) -> None:
    """A rank of another node, another directory, a request that is none."""
    rig.worker(1)
    with pytest.raises(SaveError, match="rank 7 with local rank 1 is not of this node"):
        client(rig.socket, 7, 1, str(rig.place), 0).connect(0)
    with pytest.raises(SaveError, match="a run has one directory"):
        client(rig.socket, 0, 0, "/elsewhere", 0).connect(0)
    with pytest.raises(SaveError, match="needs the numbers"):
        client(rig.socket, "x", 0, "/", 0).connect(0)
    with pytest.raises(SaveError, match="round 3 does not run here; it is round 0"):
        client(rig.socket, 0, 0, str(rig.place), 3).connect(3)


def test_a_part_that_cannot_be_handed_over(rig: Rig) -> None:
    """All ranks take the save back: it is over at once, and the next one is not held up."""
    workers = [rig.worker(0), rig.worker(1)]
    for worker in workers:
        assert worker.begin(True, LONG)
        worker.memory(8)
    workers[0].staged(shard(10, 0))
    workers[1].staged(shard(10, 1, size=1 << 30))
    for worker in workers:
        worker.abandon(shard(10, 0).stage)
    save(workers, 20)  # neither is told again of what it has taken back
    assert [worker.wait(LONG) is not None for worker in workers] == [True, True]
    assert rig.names == ["step-00000020.r0"]
    wait_until(lambda: not list((rig.place / ".stage").iterdir()), LONG)


def test_an_agent_that_refuses_the_round_is_no_agent_that_is_gone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is the fence: nobody writes by himself then."""
    monkeypatch.setenv("ELAUNCH_AGENT_SOCKET", str(rig.socket))
    rank: Any = SimpleNamespace(rank=1, local_rank=1)
    saver, lacks = connected(linked(rig.socket, 1, 0), rank, str(rig.place), 0)
    assert saver is not None and lacks == ""
    with pytest.raises(SaveError, match="round 7 is over: round 0 runs here"):
        connected(linked(rig.socket, 1, 0), rank, str(rig.place), 7)
    with pytest.raises(SaveError, match="round 7 does not run here; it is round 0"):
        connected(linked(rig.socket, 1, 7), rank, str(rig.place), 7)


def test_an_agent_that_cannot_be_reached(tmp_path: Path) -> None:
    """No socket, nobody behind it, no variable: no error, but the reason."""
    rank: Any = SimpleNamespace(rank=0, local_rank=0, round=0)
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(str(dead))
    page = ProgressPage()
    for path, words in (
        (tmp_path / "none.sock", "none.sock: No such file"),
        (dead, "dead.sock: Connection refused"),
        (None, "ELAUNCH_AGENT_SOCKET is not set"),
    ):
        link = None if path is None else AgentLink(path, page, rank)
        if link is not None:
            link.start()
        saver, lacks = connected(link, rank, str(tmp_path), 0)
        assert saver is None and words in lacks
    page.close()


def test_two_jobs_in_one_directory(rig: Rig, tmp_path: Path) -> None:
    """The second one's rank 0 is told who has it."""
    rig.worker(0)
    (tmp_path / "other").mkdir()
    other = Rig.__new__(Rig)
    os.symlink(rig.place, tmp_path / "other" / "ck")
    Rig.__init__(other, tmp_path / "other")
    try:
        with pytest.raises(SaveError, match=rf"in use by another job \(process {os.getpid()} on"):
            other.worker(0)
    finally:
        other.close()


def test_a_directory_that_is_not_the_flags(tmp_path: Path) -> None:
    """What an earlier job left there is brought to an end, once the lock says that it has ended."""
    rig = Rig(tmp_path, checkpoint_dir=None)
    try:
        part = ShardHeader(0, 1, "digits", {"steps_completed": 10})
        rig.storage.write_shard(Stage(10, 0, "u"), part, [Image("x", [b"x"])])
        held = rig.storage.lock()
        with pytest.raises(SaveError, match="in use by another job"):
            rig.worker(0)
        assert rig.names == []
        held.close()
        end(rig.worker(1))
        assert rig.names == []
        rig.worker(0)
        assert rig.names == ["step-00000010.r0"]
    finally:
        rig.close()


def test_requests_that_are_none(rig: Rig) -> None:
    """Each gets its error; the next one is served."""
    link = linked(rig.socket, 1, 0)
    said = [link.ask("memory", LONG, size=8)[0]]
    first = {"round": 0, "rank": 1, "local_rank": 1, "place": str(rig.place)}
    said.append(link.ask("checkpoint", LONG, **first)[0])
    requests: list[dict[str, Any]] = [{"op": "dance"}, {"op": []}, {"op": "memory", "size": "x"}]
    requests += [{"op": "staged", "shard": {}}, {"op": "abandon"}]
    said += [link.ask(seconds=LONG, **request)[0] for request in requests]
    assert [answer["ok"] for answer in said] == [False, True, *[False] * 4, True]
    link.close()


def test_an_answer_that_comes_too_late_is_passed_over(rig: Rig) -> None:
    """Each rank waits for its own time only, and the next answer is that to the next request."""
    workers = [rig.worker(0), rig.worker(1)]
    save(workers[:1], 10)
    assert not workers[0].begin(False)
    with pytest.raises(SaveError, match=r"is not committed after 0\.05 s"):
        workers[0].wait(0.05)
    workers[1].begin(True, LONG)
    workers[1].memory(8)
    workers[1].staged(shard(10, 1))
    assert workers[0].wait(LONG) is not None


def test_storage_that_hangs_does_not_hold_up_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent goes on after the deadline; the next round's worker gets other memory."""
    from elaunch.checkpoint.storage.posix import PosixStorage

    opened, write = threading.Event(), PosixStorage.write_shard

    def hang(*args: Any) -> bytes:
        assert opened.wait(LONG)
        return write(*args)

    monkeypatch.setattr(PosixStorage, "write_shard", hang)
    try:
        workers = [rig.worker(0), rig.worker(1)]
        save(workers, 10)
        end(*workers)
        settled = rig.settle(0.2)
        assert settled.lost == ("step-00000010.r0: the storage has not taken it in time",)
        assert rig.finisher.unfinished() == ("step-00000010.r0.u10",)
        rig.begin(1)
        memory = rig.worker(0, 1).memory(8)
        assert bytes(memory[:8]) == bytes(8), "it is memory that a thread still reads"
    finally:
        opened.set()
    wait_until(lambda: not rig.saver.unfinished(), LONG)
    assert rig.names == []


def test_an_agent_that_is_gone(rig: Rig) -> None:
    """Every call says so, at once; so does one from a forked process."""
    worker = rig.worker(0)
    rig.close()
    with pytest.raises(SaveError, match="agent is gone"):
        worker.begin(True, LONG)
    worker._pid = 0
    with pytest.raises(SaveError, match="forked"):
        worker.fence(0)


def test_the_memory_is_given_back(rig: Rig) -> None:
    """At the end, and with it the lock."""
    worker = rig.worker(0)
    worker.memory(64 << 20)
    before = shared()
    rig.close()
    worker._view = None
    wait_until(lambda: before - shared() >= 32 << 20, LONG)
    rig.storage.lock().close()


def shared() -> int:
    """Return the shared memory that this process has in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("RssShmem")]
    return int(found.split()[1]) * 1024


def test_closing_waits_for_the_agent_and_tells_what_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a script is the last moment to be told."""
    from elaunch.checkpoint.storage.posix import PosixStorage

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr(PosixStorage, "write_shard", fail)
    workers = [rig.worker(0), rig.worker(1)]
    save(workers, 10)
    for worker in workers:
        with pytest.raises(SaveError, match=r"Input/output error \(/disk\)"):
            worker.close()
        worker.close()


def test_the_first_worker_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While what saves is imported and made, status is answered and the loop goes on."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        goes_on.wait(LONG)
        return open_storage(*args)

    monkeypatch.setattr(service, "open_storage", slow)
    rig = Rig(tmp_path)
    workers: list[AgentSaverClient] = []
    connecting = [
        threading.Thread(target=lambda rank=rank: workers.append(rig.worker(rank)), daemon=True)
        for rank in (0, 1)
    ]
    for each in connecting:
        each.start()
    try:
        assert begun.wait(LONG)
        assert ask(rig.socket, {"op": "status"}, LONG) == {}
        looked = threading.Thread(target=rig.saver.record, daemon=True)
        looked.start()
        looked.join(LONG)
        assert not looked.is_alive(), "the loop waits for the imports"
    finally:
        goes_on.set()
    for each in connecting:
        each.join(LONG)
    assert len(workers) == 2
    end(*workers)
    rig.settle()
    rig.close()
