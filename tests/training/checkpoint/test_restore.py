"""restore_path, latest, delete: what all ranks read, and what nobody takes away meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.context import CheckpointContext
from tests.training.checkpoint.ddprig import Ranks, saved
from tests.training.checkpoint.rig import Job, checkpoints, committed

Start = Callable[..., Job]


@pytest.mark.slow
def test_which_checkpoint(start: Start) -> None:
    """By uuid, by name, the latest; what is not there is told on all ranks with what is."""
    script = """
said = [tried(lambda: ck.restore_path().__enter__()), tried(ck.get_metadata)]
uuid = store(10, {f"{rank}": "ten"})
store(20, {f"{rank}": "twenty"})
def read(which):
    with ck.restore_path(which) as path:
        return (path / "1").read_text()
said += [read(uuid), read("step-00000010.r0"), read(None)]
said += [tried(lambda: read("nothing"))]
said += [tried(lambda: read(uuid if rank else None))]
said += [tried(lambda: read(uuid if rank else "step-00000010.r0"))]
def raises():
    with ck.restore_path():
        raise ValueError(f"rank {rank}")
tried(raises)
said += [ck.get_metadata(uuid), tried(lambda: ck.get_metadata("nothing"))]
say(json.dumps(said))
"""
    one, other = start(script, 2).said()
    assert one == other
    assert one[0].startswith("CheckpointError: restore_path: there is no checkpoint yet")
    assert one[1].startswith("CheckpointError: get_metadata: there is no checkpoint yet")
    assert one[2:5] == ["ten", "ten", "twenty"]
    assert "has no checkpoint 'nothing'" in one[5] and "step-00000020.r0" in one[5]
    for text in one[6:8]:
        assert "CheckpointError: restore_path: the ranks ask for different checkpoints" in text
    assert one[8] == {"steps_completed": 10}
    assert "has no checkpoint 'nothing'" in one[9]


@pytest.mark.slow
def test_the_latest_does_not_change_by_what_others_commit(start: Start) -> None:
    """Neither by rank 0 alone, until all ranks ask for it; nor is it another on some rank."""
    script = """
store(10)
before = ck.latest().step
if rank == 0:
    store(20, shard=False)
ctx.distributed.barrier()
then = [ck.latest().step, ck.list()[-1].step]
with ck.restore_path() as path:
    read = path.name
say(json.dumps([before, then, read, ck.latest().step]))
"""
    assert start(script, 2).said() == [[10, [10, 20], "step-00000020.r0", 20]] * 2


@pytest.mark.slow
def test_what_is_read_is_not_deleted(start: Start, tmp_path: Path) -> None:
    """Neither by a call nor by retention, until the last reader is done."""
    script = """
store(10, {f"{rank}": "ten"})
store(20)
if rank == 1:
    with ck.restore_path("step-00000010.r0") as path:
        ctx.distributed.barrier()
        ctx.distributed.barrier()
        say(json.dumps((path / "1").read_text()))
else:
    with ck.restore_path("step-00000010.r0"):
        ctx.distributed.barrier()
    refused = tried(lambda: ck.delete("step-00000010.r0"))
    store(30, shard=False, keep=Keep(last=1))
    left = [each.step for each in ck.list()]
    ctx.distributed.barrier()
ctx.distributed.barrier()
if rank == 0:
    ck.delete("step-00000010.r0")
    say(json.dumps([refused, left, tried(lambda: ck.delete("step-00000010.r0"))]))
"""
    chief, other = start(script, 2).said()
    assert other == "ten"
    refused, left, gone = chief
    assert refused == ("CheckpointError: step-00000010.r0 stays: a process is reading it just now")
    assert 10 in left
    assert "has no checkpoint 'step-00000010.r0'" in gone
    assert "step-00000010.r0" not in committed(checkpoints(tmp_path))


@pytest.mark.slow
def test_what_the_round_resumed_from_is_not_deleted(start: Start) -> None:
    """Before there is a newer one."""
    assert start("store(10)\nsay(0)", 1).said() == [0]
    script = """
found = ck.latest()
refused = tried(lambda: ck.delete(found.uuid))
store(20)
ck.delete(found.uuid)
say(json.dumps([refused, [each.step for each in ck.list()]]))
"""
    ((refused, left),) = start(script, 1).said()
    assert "step-00000010.r0 stays: this round resumed from it" in refused
    assert left == [20]


@pytest.mark.slow
def test_the_latest_is_gone(start: Start, tmp_path: Path) -> None:
    """Deleted, put aside, torn: all ranks take the newest that is whole; if none is, nothing."""
    script = """
for step in (10, 20, 30, 40, 50, 60):
    store(step, {f"{rank}": str(step)})
def read():
    with ck.restore_path() as path:
        return [(path / "1").read_text(), ck.latest().step]
said = []
for take in (lambda: ck.delete("step-00000060.r0"),
             lambda: ck.quarantine("step-00000050.r0", "NaN"),
             lambda: (ck.directory / "step-00000040.r0" / "0").unlink(),
             lambda: (ck.directory / "step-00000030.r0" / "COMMIT").write_text("{"),
             lambda: [ck.delete("step-00000010.r0"), ck.delete("step-00000020.r0")]):
    if rank == 0:
        take()
    ctx.distributed.barrier()
    said.append(tried(read))
    ctx.distributed.barrier()
said.append(ck.latest())
store(70)
say(json.dumps([said, ck.latest().step]))
"""
    job = start(script, 2)
    ended = [job.ends(rank) for rank in range(2)]
    (one, other) = (json.loads(out.splitlines()[-1]) for _, out, _ in ended)
    assert one == other
    *read, nothing, none = one[0]
    assert read == [["50", 50], ["40", 40], ["30", 30], ["20", 20]]
    assert nothing.startswith("CheckpointError: restore_path: there is no checkpoint yet")
    assert none is None
    assert one[1] == 70
    assert ended[0][2].count("step-00000050.r0 is taken: step-00000060.r0 is gone") == 1
    assert "there is no other: step-00000020.r0 is gone" in ended[0][2]
    assert ended[1][2].count("is gone") == 0
    quarantined = os.listdir(checkpoints(tmp_path) / ".quarantine")
    assert {"step-00000040.r0", "step-00000050.r0"} <= set(quarantined)


@pytest.mark.slow
def test_what_was_read_is_still_what_the_round_resumed_from(start: Start) -> None:
    """It is not deleted after a load either, unless there is a newer one."""
    assert start("store(10)\nsay(0)", 1).said() == [0]
    script = """
with ck.restore_path():
    pass
refused = tried(lambda: ck.delete("step-00000010.r0"))
ck.delete(store(20))
say(json.dumps([refused, tried(lambda: ck.delete("step-00000010.r0"))]))
"""
    ((first, second),) = start(script, 1).said()
    assert first == second
    assert "step-00000010.r0 stays: this round resumed from it" in first


@pytest.mark.slow
def test_how_many_stay(start: Start) -> None:
    """What rank 0 has stored alone counts like any other; what was just stored stays."""
    script = """
store(10)
if rank == 0:
    store(20, shard=False, keep=Keep(last=3))
for step in (30, 40, 50, 60):
    store(step, keep=Keep(last=3))
ctx.distributed.barrier()
kept = [each.step for each in ck.list()]
ctx.distributed.barrier()
store(5, keep=Keep(last=1))
ctx.distributed.barrier()
say(json.dumps([kept, [each.step for each in ck.list()]]))
"""
    assert start(script, 2).said() == [[[40, 50, 60], [5, 60]]] * 2


@pytest.mark.slow
def test_a_damaged_one_is_put_aside(start: Start, tmp_path: Path) -> None:
    """The next older one is taken; the damaged one is kept with the reason. By name: an error."""
    assert start("store(10, {'x': 'ten'})\nstore(20, {'x': 'twenty'})\nsay(0)", 1).said() == [0]
    place = checkpoints(tmp_path)
    (place / "step-00000020.r0" / "x").write_text("twentY")
    script = """
said = tried(lambda: ck.restore_path("step-00000020.r0").__enter__())
with ck.restore_path() as path:
    read = (path / "x").read_text()
say(json.dumps([said, read, ck.latest().step]))
"""
    one, other = start(script, 2).said()
    assert one == other
    assert "bad checksum: x" in one[0]
    assert one[1:] == ["ten", 10]
    assert (place / ".quarantine" / "step-00000020.r0" / "x").read_text() == "twentY"
    assert committed(place) == ["step-00000010.r0"]


def test_quarantine_by_the_script(start: Start, tmp_path: Path) -> None:
    """With a reason; readers do not see it any more."""
    script = """
store(10)
ck.quarantine("step-00000010.r0", "the loss is NaN")
say(json.dumps([tried(lambda: ck.quarantine("x", " ")), ck.list()]))
"""
    ((refused, left),) = start(script, 1).said()
    assert refused.startswith("ContextError: quarantine() needs a reason")
    assert left == []
    place = checkpoints(tmp_path)
    (reason,) = (place / ".quarantine").glob("*.json")
    assert json.loads(reason.read_text())["reason"] == "the loss is NaN"


@pytest.mark.slow
def test_readers_while_checkpoints_come_and_go(start: Start) -> None:
    """Four jobs that only read, one that commits and removes: nobody sees half a checkpoint."""
    read = """
count = 0
while not Path("end").exists() or not count:
    found = ck.list()
    if found:
        content = tried(lambda: check(found[-1].uuid))
        assert content is None or "no checkpoint" in content or "is gone" in content, content
        count += content is None
say(json.dumps(count))
"""
    check = """
def check(uuid):
    with ck.restore_path(uuid) as path:
        names = {each.name for each in path.iterdir()}
        assert {"0", "1", "COMMIT", "metadata.json"} <= names, names
        assert (path / "0").read_text() == (path / "1").read_text() == "x" * 100_000
"""
    write = """
for step in range(1, 26):
    store(step, {f"{rank}": "x" * 100_000}, keep=Keep(last=1))
ctx.distributed.barrier()
Path("end").touch()
say(json.dumps(25))
"""
    env = {"ELAUNCH_CHECKPOINT_DIR": "ckpt"}
    writers = start(write, 2, env=env)
    readers = [start(check + read, 1, env=env) for _ in range(4)]
    assert writers.said() == [25, 25]
    for reader in readers:
        (count,) = reader.said()
        assert count > 0


def test_a_pinned_one_is_not_deleted(ranks: Ranks) -> None:
    """As with ``elaunch checkpoints rm``: it has to be unpinned first."""

    def work(checkpoint: CheckpointContext, _: int) -> Any:
        names = [saved(checkpoint, {"x": 1}, step).name for step in (1, 2)]
        checkpoint.pin(names[0])
        with pytest.raises(CheckpointError, match=f"{names[0]} stays: it is pinned; unpin"):
            checkpoint.delete(names[0])
        checkpoint.unpin(names[0])
        checkpoint.delete(names[0])
        return [found.step for found in checkpoint.list()]

    assert ranks.run(1, work).all() == [[2]]
    assert list((ranks.place / ".pins").iterdir()) == []
