"""What a fault at each step of a save leaves: the old checkpoint or the new one, never half."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import CheckpointError
from tests import programs
from tests.training.checkpoint.agentrig import SavingAgent
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.rig import Job, checkpoints, committed, stages

Start = Callable[..., Job]

DIES = """
calls, at = [0], {at}
def counted(name):
    real = getattr(os, name)
    def call(*args, **options):
        if rank == 0 and armed and threading.current_thread() is threading.main_thread():
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    setattr(os, name, call)
armed = False
for name in ("rename", "replace", "fsync", "mkdir", "open"):
    counted(name)
store(10, {{f"{{rank}}": "ten"}})
armed = True
say(json.dumps(tried(lambda: store(20, {{f"{{rank}}": "twenty"}})[:0])))
if rank == 0:
    say(json.dumps(calls[0]))
os._exit(0)
"""


@pytest.mark.slow
def test_a_chief_killed_at_any_call(start: Start, tmp_path: Path) -> None:
    """The other is told; the next start has step 10 or 20, whole, and no stage is left."""
    job = start(DIES.format(at=0), 2)
    steps = json.loads(job.ends(0)[1].splitlines()[-1])
    job.close()
    assert steps > 20
    taken = []
    for at in [*range(1, steps, max(1, steps // 4)), steps]:
        directory = tmp_path / f"at{at}"
        directory.mkdir()
        job = Job(directory, DIES.format(at=at), 2)
        try:
            assert job.ends(0)[0] == -9, f"call {at}"
            said = json.loads(job.ends(1)[1].splitlines()[-1])
        finally:
            job.close()
        assert said.startswith("PeerLost: ") and "rank 0 (host " in said, f"call {at}"
        again = Job(directory, "say(json.dumps([ck.latest().step, len(ck.list())]))", 2)
        try:
            (step, count), other = again.said()
        finally:
            again.close()
        assert other == [step, count]
        assert (step, count) in ((10, 1), (20, 2)), f"call {at}"
        place = checkpoints(directory)
        assert stages(place) == []
        for found in open_storage(place).listed():
            open_storage(place).verify(found)
        taken.append(step)
    assert taken == sorted(taken) and taken[0] == 10 and taken[-1] == 20


@pytest.mark.slow
def test_a_round_that_is_over_commits_nothing(start: Start, tmp_path: Path) -> None:
    """The fence is asked before the commit; all ranks are told its reason."""
    script = """
store(10)
if rank == 0:
    def over(round_number):
        raise SaveError(f"round {round_number} is over")
    ck._session.alone().saver.fence = over
say(json.dumps([tried(lambda: store(20)), [each.step for each in ck.list()]]))
"""
    place = tmp_path / "checkpoints"
    with contextlib.closing(SavingAgent(tmp_path / "agent", place, 2)) as agent:
        one, other = start(script, 2, env=agent.environment).said()
    assert one == other
    assert one[0].startswith("SaveError: store_path of step 20: rank 0 on host")
    assert one[0].endswith("round 0 is over")
    assert one[1] == [10]
    assert stages(place) == []


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB, or with other options."""
    path = tmp_path / "disk"
    path.mkdir()
    options = getattr(request, "param", "size=4m")
    argv = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    refused = subprocess.run(argv, capture_output=True).returncode != 0
    programs.allowed("no right to mount" if refused else None)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["size=64m,nr_inodes=40"], indirect=True)
def test_a_disk_without_inodes(start: Start, small_disk: Path) -> None:
    """What may go makes room for files, however many bytes are free."""
    script = """
import torch.distributed
torch.distributed.init_process_group("gloo")
tiny = {"x": torch.zeros(4)}
for step in range(10, 100, 10):
    ck.save(tiny, step, keep=Keep(last=3))
ctx.distributed.barrier()  # rank 0 has retired the rest
kept = [each.step for each in ck.list()]
def grow():
    for step in range(100, 200, 10):
        ck.save(tiny, step, keep=Keep(last=99))
say(json.dumps([kept, tried(grow)]))
"""
    env = {"ELAUNCH_CHECKPOINT_DIR": str(small_disk / "ckpt")}
    (kept, full), other = start(script, 2, env=env).said()
    assert kept == [70, 80, 90] and other == [kept, full]
    assert "no inodes left on" in full


def saves_without_inodes(ctx: Any, disk: Path, block: bool) -> str:
    """Use up the inodes, save, and return what that raises."""
    save = ctx.checkpoint.save
    save({"x": 1}, 1, block=block)
    ctx.checkpoint.wait()
    if ctx.distributed.rank == 0:
        with contextlib.suppress(OSError):
            for number in range(1000):
                (disk / f"file{number}").touch()
    ctx.distributed.barrier()
    try:
        save({"x": 1}, 2, block=block)
        ctx.checkpoint.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("agent", [False, True], ids=["block", "memory"])
@pytest.mark.parametrize("small_disk", ["size=64m,nr_inodes=200"], indirect=True)
def test_a_save_without_inodes(small_disk: Path, agent: bool) -> None:
    """Also where the stage is opened, and where an agent writes, the error speaks of inodes."""
    said = in_group(saves_without_inodes, 2, small_disk, small_disk, not agent, agent=agent)
    for error in said:
        assert not isinstance(error, Raised), error.text
        assert "no inodes left on" in error.lower() and "space" not in error, error


@pytest.mark.slow
def test_a_full_disk(start: Start, small_disk: Path) -> None:
    """What may go makes room for a save that can be repeated; else an error with the figures."""
    script = """
import torch.distributed
torch.distributed.init_process_group("gloo")
mega = {"x": torch.zeros(1 << 18)}
keep = Keep(last=2)
for step in (10, 20, 30, 40, 50):
    ck.save(mega, step, keep=keep)
kept = [each.step for each in ck.list()]
ck.save(mega, 60, keep=Keep(last=9))
def fills():
    with ck.store_path({"steps_completed": 80}, shard=True) as (path, _):
        (path / f"{rank}").write_bytes(bytes(1 << 20))
full = [tried(fills), tried(lambda: ck.save(mega, 90, keep=Keep(last=9)))]
ctx.distributed.barrier()
left = [each.step for each in ck.list()], os.listdir(ck.directory / ".stage")
ck.save(mega, 100, keep=Keep(last=1))
say(json.dumps([kept, full, left, tried(lambda: [each.step for each in ck.list()])]))
"""
    env = {"ELAUNCH_CHECKPOINT_DIR": str(small_disk / "ckpt")}
    one, other = start(script, 2, env=env).said()
    assert one[0] == [40, 50]
    assert one[2] == [[40, 50, 60], []]
    for text in (one[1][0], other[1][0]):
        assert (
            "o space left on" in text and "store_path of step 80" in text
        ) or "[Errno 28]" in text
    assert one[1][1] == other[1][1]
    assert one[1][1].startswith("SaveError: save of step 90, writing: rank 0 on host")
    assert f"no space left on {small_disk / 'ckpt'}: needs about 1.00 MiB, has " in one[1][1]
    assert committed(small_disk / "ckpt") == ["step-00000100.r0"]


GOES_AWAY = """
import torch.distributed
torch.distributed.init_process_group("gloo")
local = bool(os.environ.get("ELAUNCH_CHECKPOINT_LOCAL"))
state = {"x": torch.zeros(4)}
def goes(act):
    ctx.distributed.barrier()
    if rank == 1:
        act()
    ctx.distributed.barrier()
def background():
    ck.save(state, 50, block=False)
    ck.wait()
def staged():
    path = ck.stage_path(60)
    goes(lambda: os.rename(root, away) or os.mkdir(root))
    ck.commit(path, 60)
root, away = ck.directory, Path("away")
store(10)
said = [tried(staged)]
said += [tried(lambda: store(20, {f"{rank}": ""})), tried(lambda: ck.save(state, 30))]
said += [tried(lambda: ck.save(state, 40))]
said += [] if local else [tried(background)]
alone = tried(lambda: store(80, shard=False)) if rank == 0 and not local else ""
left = sorted(map(str, root.rglob("*"))) if rank == 1 else []
goes(lambda: os.rmdir(root))
said += [tried(lambda: ck.save(state, 81))]
said += [root.exists()] if rank == 1 else [False]
goes(lambda: os.rename(away, root))
store(90)
steps = [each.step for each in ck.list()]
ctx.distributed.barrier()
say(json.dumps([said, alone, left, steps]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_directory_that_goes_away(start: Start, tmp_path: Path, nodes: int) -> None:
    """Every way to save is refused on all ranks, for one reason; what is there stays empty.

    Also where each node has a directory of its own, and that of the second is gone.
    """
    env = {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "c{node}")}
    env |= {"ELAUNCH_CHECKPOINT_LOCAL": "1"} if nodes == 2 else {}
    ended = start(GOES_AWAY, 2, nodes=nodes, env=env).said()
    gone = tmp_path / f"c{nodes - 1}"
    why = f"{gone} is not the directory that this job began with (run.json is gone; was it"
    for said, alone, left, steps in ended:
        *texts, there = said
        assert all(text.startswith("SaveError: ") and why in text for text in texts), texts
        assert (there, left, steps) == (False, [], [10, 90])
        assert not alone or why in alone
    assert ended[0][0] == ended[1][0]
    assert (ended[0][1] == "") == (nodes == 2)
