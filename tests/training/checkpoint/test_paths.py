"""store_path: files that the script writes itself, by one rank and by all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.checkpoint.rig import Job, checkpoints, committed, stages, user_files

Start = Callable[..., Job]


@pytest.mark.trial
@pytest.mark.slow
def test_all_ranks_write_one_checkpoint(start: Start, tmp_path: Path) -> None:
    """The union of the files, the merge of the metadata, one uuid; seen by all, at once."""
    script = """
assert ck.latest() is None
ctx.train.report_validation_metrics(10, {"loss": 0.5})
uuids = ctx.distributed.allgather(store(
    10, {f"state_{rank}": f"{rank}", "sub/same": "same"}, metadata={f"rank_{rank}": "ok"}))
with ck.restore_path() as path:
    read = sorted(p.name for p in path.rglob("s*"))
found = ck.latest()
say(json.dumps([uuids, found.uuid, found.step, found.run_id, ck.get_metadata(uuids[0]), read,
    [each.name for each in ck.list()], found.metrics, str(found.place)]))
"""
    first, *others = start(script, 3).said()
    assert others == [first] * 2
    uuids, uuid, step, run_id, metadata, read, names, metrics, place = first
    assert len({*uuids, uuid}) == 1 and (step, run_id) == (10, "job")
    assert metadata == {"steps_completed": 10, "rank_0": "ok", "rank_1": "ok", "rank_2": "ok"}
    assert read == ["same", "state_0", "state_1", "state_2", "sub"]
    assert names == ["step-00000010.r0"]
    assert metrics == {"loss": 0.5, "validation.loss": 0.5}
    assert Path(place) == checkpoints(tmp_path) / "step-00000010.r0"
    files = user_files(Path(place))
    assert files == {"state_0": "0", "state_1": "1", "state_2": "2", "sub/same": "same"}
    listed = [
        file["path"]
        for rank in range(3)
        for file in json.loads((Path(place) / f"manifest.rank-{rank:05d}.json").read_text())[
            "files"
        ]
    ]
    assert sorted(listed) == sorted(files)
    assert stages(checkpoints(tmp_path)) == []


CONFLICTS = {
    "metadata": ("store(10, metadata={'k': rank})", ["k is 0 (rank 0), 1 (rank 1)"]),
    "content": (
        "store(10, {'a/x': f'{rank}'})",
        ["a/x: different content: 1 bytes (rank 0), 1 bytes (rank 1)"],
    ),
    "size": ("store(10, {'x': 'x' * (rank + 1)})", ["x: different content", "2 bytes (rank 1)"]),
    "directory": (
        "store(10, {'x/y' if rank else 'x': 'z'})",
        ["x is a file of rank 0 and a directory of rank 1"],
    ),
    "step": ("store(10 + rank)", ["steps_completed differs: 10 on rank 0, 11 on rank 1"]),
    "no step": ("store(None if rank else 10)", ["rank 1 on host", "no 'steps_completed'"]),
    "negative": ("store(-1)", ["ranks 0, 1 on host", "steps_completed is -1"]),
    "bool": ("store(True)", ["steps_completed is True, a bool"]),
    "float": ("store(10.0)", ["steps_completed is 10.0, a float"]),
    "no dict": ("ck.store_path([('a', 1)], shard=True).__enter__()", ["give a dict"]),
    "no JSON": ("store(10, metadata={'x': {1, 2}})", ["metadata['x'] is a set"]),
    "reserved": ("store(10, {'COMMIT': ''} if rank else {})", ["rank 1 on host", "'COMMIT'"]),
    "mixed": ("store(10) if rank else ck.restore_path('x').__enter__()", ["different calls"]),
}


@pytest.mark.slow
def test_what_contradicts_itself_is_an_error_on_all_ranks(start: Start, tmp_path: Path) -> None:
    """The same error on both, with keys, ranks and values; nothing is committed, and it goes on."""
    calls = [call for call, _ in CONFLICTS.values()]
    script = f"""
said = [tried(lambda: eval(call)) for call in {calls!r}]
store(20, {{f"{{rank}}": ""}})
say(json.dumps(said))
"""
    one, other = start(script, 2).said()
    for (name, (_, parts)), text, same in zip(CONFLICTS.items(), one, other, strict=True):
        assert text == same, name
        kind = "CheckpointError" if name == "mixed" else "SaveError"
        assert text.startswith(f"{kind}: "), (name, text)
        assert all(part in text for part in parts), (name, text)
    place = checkpoints(tmp_path)
    assert committed(place) == ["step-00000020.r0"]
    assert stages(place) == []


@pytest.mark.slow
def test_links_and_fifos_are_refused(start: Start) -> None:
    """On both ranks, by name."""
    script = """
def link():
    with ck.store_path({"steps_completed": 1}, shard=True) as (path, _):
        if rank == 1:
            (path / "link").symlink_to("/etc/passwd")
def fifo():
    with ck.store_path({"steps_completed": 1}, shard=True) as (path, _):
        os.mkfifo(path / "fifo")
say(json.dumps([tried(link), tried(fifo)]))
"""
    one, other = start(script, 2).said()
    assert one == other
    assert "rank 1 on host" in one[0] and "link is a symbolic link" in one[0]
    assert "fifo is a FIFO" in one[1]


@pytest.mark.slow
def test_one_rank_alone(start: Start, tmp_path: Path) -> None:
    """Rank 0 stores and waits for nobody; the others are told at once; all restore it."""
    script = """
stored = tried(lambda: store(10, {"model": "m"}, shard=False))
again = tried(lambda: store(10, {"model": "m"}, shard=False)) if rank == 0 else ""
bad = tried(lambda: store(-1, shard=False)) if rank == 0 else ""
ours = tried(lambda: store(20, {"manifest.rank-00000.json": "m"}, shard=False)) if rank == 0 else ""
with ck.restore_path() as path:
    content = (path / "model").read_text()
say(json.dumps([stored, content, again, bad, ours, ck.latest().step, len(ck.list())]))
"""
    chief, other = start(script, 2).said()
    refused = "ContextError: store_path(shard=False) on rank 1: only rank 0 may save by itself; put"
    assert other[0].startswith(refused)
    assert len(chief[0]) == 32
    assert chief[1] == other[1] == "m"
    assert "is there already, and a committed checkpoint is never replaced" in chief[2]
    assert "SaveError: steps_completed is -1" in chief[3]
    assert "a checkpoint's file cannot be called 'manifest.rank-00000.json'" in chief[4]
    assert chief[5:] == other[5:] == [10, 1]


@pytest.mark.slow
def test_blocks_in_all_shapes(start: Start, tmp_path: Path) -> None:
    """Empty; nested; in another working directory, which may be gone at the end."""
    script = """
store(1)
with ck.store_path({"steps_completed": 2}, shard=True) as (path, _):
    (path / f"outer_{rank}").write_text("")
    store(3, {f"inner_{rank}": ""})
gone = Path(f"gone_{rank}")
gone.mkdir()
with ck.store_path({"steps_completed": 4}, shard=True) as (path, _):
    os.chdir(gone)
    (path / f"moved_{rank}").write_text("")
    os.rmdir(Path.cwd())
def nested():
    with ck.store_path({"steps_completed": 5}, shard=True):
        store(5)
os.chdir("/")
say(json.dumps([tried(nested), [each.step for each in ck.list()]]))
"""
    ended = start(script, 2).said()
    assert ended[0] == ended[1]
    assert "step-00000005.r0 is there already" in ended[0][0]
    assert f"elaunch checkpoints rm {tmp_path}" in ended[0][0]
    place = checkpoints(tmp_path)
    assert ended[0][1] == [1, 2, 3, 4, 5]
    assert user_files(place / "step-00000001.r0") == {}
    assert set(user_files(place / "step-00000002.r0")) == {"outer_0", "outer_1"}
    assert set(user_files(place / "step-00000003.r0")) == {"inner_0", "inner_1"}
    assert set(user_files(place / "step-00000004.r0")) == {"moved_0", "moved_1"}


@pytest.mark.slow
def test_a_rank_that_raises(start: Start, tmp_path: Path) -> None:
    """It gets its own exception, the others its words; the stage is gone; the next save works."""
    script = """
store(10, {f"{rank}": ""})
def raises(who):
    with ck.store_path({"steps_completed": 20}, shard=True) as (path, _):
        (path / f"{rank}").write_text("")
        if rank == who:
            raise ValueError("boom")
said = [tried(lambda: raises(who)) for who in (0, 1, 2)]
ctx.distributed.barrier()
left = os.listdir(ck.directory / ".stage")
latest = ck.latest().step
ctx.distributed.barrier()
store(20, {f"{rank}": ""})
say(json.dumps([said, left, latest]))
"""
    ended = start(script, 3).said()
    for rank, (said, left, latest) in enumerate(ended):
        assert (left, latest) == ([], 10)
        for who, text in enumerate(said):
            if who == rank:
                assert text == "ValueError: boom"
            else:
                assert text.startswith("SaveError: store_path of step 20")
                assert f"rank {who} on host" in text and text.endswith("ValueError: boom")
    assert committed(checkpoints(tmp_path)) == ["step-00000010.r0", "step-00000020.r0"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed(start: Start, tmp_path: Path, victim: int) -> None:
    """The others are told at once who it was; nothing is committed, the next start finds it so."""
    script = f"""
ck.latest()
store(10, {{f"{{rank}}": ""}})
def dies():
    with ck.store_path({{"steps_completed": 20}}, shard=True) as (path, _):
        (path / f"{{rank}}").write_text("")
        if rank == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
say(json.dumps([tried(dies), ck.latest().step]))
os._exit(0)
"""
    job = start(script, 3)
    for rank in {0, 1, 2} - {victim}:
        code, out, _ = job.ends(rank)
        text, latest = json.loads(out.splitlines()[-1])
        assert code == 0 and latest == 10
        assert text.startswith("PeerLost: ") and f"rank {victim} (host " in text
    place = checkpoints(tmp_path)
    assert committed(place) == ["step-00000010.r0"]
    assert len(stages(place)) == (victim == 0)
    job.close()
    assert start("say(json.dumps(ck.latest().step))", 2).said() == [10, 10]
    assert stages(place) == []


@pytest.mark.slow
def test_a_rank_that_hangs(start: Start, tmp_path: Path) -> None:
    """The others wait for the timeout, not longer, and name it; it cannot commit afterwards."""
    script = """
store(10, {f"{rank}": ""})
def hangs():
    with ck.store_path({"steps_completed": 20}, shard=True, timeout=1.0) as (path, _):
        if rank == 1:
            while os.listdir(ck.directory / ".stage"):
                time.sleep(0.01)
say(json.dumps([tried(hangs), tried(lambda: store(30))]))
os._exit(0)
"""
    job = start(script, 3)
    for rank in (0, 2):
        (first, second), code = (lambda e: (json.loads(e[1]), e[0]))(job.ends(rank))
        assert code == 0
        assert first.startswith("CollectiveTimeout: ") and "rank 1 (host " in first
        assert second.startswith("CollectiveTimeout: ")
    assert json.loads(job.ends(1)[1])[0].startswith(("CollectiveError", "PeerLost", "CollectiveT"))
    place = checkpoints(tmp_path)
    assert (committed(place), stages(place)) == (["step-00000010.r0"], [])


@pytest.mark.slow
def test_a_block_that_only_some_ranks_enter(start: Start) -> None:
    """Those in it are told who is missing; who is elsewhere is told what they call."""
    script = """
if rank == 0:
    said = tried(lambda: store(10, timeout=1.0))
    Path("said").touch()
else:
    said = ""
    while not Path("said").exists():
        time.sleep(0.01)
say(json.dumps(said))
os._exit(0)
"""
    job = start(script, 2)
    said = json.loads(job.ends(0)[1])
    assert said.startswith(
        "CollectiveTimeout: opening the checkpoint directory: allgather of ctx.checkpoint #"
    )
    assert "rank 1 (host " in said


@pytest.mark.slow
def test_shard_differs_on_ranks(start: Start) -> None:
    """Who may not store by itself is told at once; the other one that this rank has gone on."""
    script = """
say(json.dumps(tried(lambda: store(10, shard=rank == 0))))
"""
    chief, other = start(script, 2).said()
    assert other.startswith("ContextError: store_path(shard=False) on rank 1")
    assert chief.startswith("PeerLost: ") and "rank 1 (host " in chief


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "reason"),
    [("file", "File exists"), ("/proc/nothing", "No such file or directory")],
)
def test_a_directory_that_cannot_be(start: Start, tmp_path: Path, place: str, reason: str) -> None:
    """An error on all ranks before anybody enters the block."""
    (tmp_path / "file").write_text("")
    script = "say(json.dumps([tried(lambda: store(10)), tried(lambda: store(10))]))"
    ended = start(script, 2, env={"ELAUNCH_CHECKPOINT_DIR": place}).said()
    assert ended[0] == ended[1]
    for text in ended[0]:
        assert text.startswith("CheckpointError: opening the checkpoint directory: rank 0 on host")
        assert reason in text


@pytest.mark.slow
def test_two_jobs_in_one_directory(start: Start, tmp_path: Path) -> None:
    """The second is told who has it, and may read; another run's is refused by both ids."""
    env = {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "ckpt")}
    waits = 'store(10)\nsay("stored")\nwhile not Path("end").exists(): time.sleep(0.01)\n'
    first = start(waits + "say(0)", 1, env=env)
    assert first.line(0) == "stored"
    script = """
import elaunch.training.checkpoint.where as where
where.LOCK_S = 0.1
with ck.restore_path() as path:
    read = path.name
say(json.dumps([tried(lambda: store(20)), read, ck.latest().step]))
"""
    ended = start(script, 2, env=env).said()
    assert ended[0] == ended[1]
    assert "is in use by another job (process " + str(first.processes[0].pid) in ended[0][0]
    assert ended[0][1:] == ["step-00000010.r0", 10]
    (tmp_path / "end").touch()
    assert first.ends(0)[0] == 0
    other = {**env, "TORCHELASTIC_RUN_ID": "other"}
    (said,) = start("say(json.dumps(tried(lambda: store(20))))", 1, env=other).said()
    assert "belongs to run 'job', this is run 'other'" in said


@pytest.mark.slow
def test_a_second_start_goes_on(start: Start, tmp_path: Path) -> None:
    """It finds the checkpoint with its run id, and its names never collide with the first's."""
    script = """
found = ck.latest()
say(json.dumps([found and found.step, found and found.run_id, tried(lambda: store(10) and 1)]))
"""
    assert start(script, 2).said() == [[None, None, 1]] * 2
    assert start(script, 2).said() == [[10, "job", 1]] * 2
    assert committed(checkpoints(tmp_path)) == ["step-00000010.r0", "step-00000010.r1"]


@pytest.mark.slow
def test_retention_by_the_call_and_by_the_flags(start: Start, tmp_path: Path) -> None:
    """keep= of a call counts for it; else the rule in the environment; what is pinned stays."""
    script = """
for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0)):
    ctx.train.report_metrics("validation", step, {"loss": loss})
    store(step)
ctx.distributed.barrier()
first = [each.step for each in ck.list()]
if rank == 0:
    ck.pin(ck.list()[0].name)
ctx.distributed.barrier()
store(50, keep=Keep(last=1))
ctx.distributed.barrier()
second = [each.step for each in ck.list()]
if rank == 0:
    ck.unpin("step-00000020.r0")
ctx.distributed.barrier()
store(60, keep=Keep(last=2))
ctx.distributed.barrier()
say(json.dumps([first, second, [each.step for each in ck.list()],
    tried(lambda: store(70, keep="all")), ck.list()[-1].document["keep"]["last"]]))
"""
    env = {"ELAUNCH_CHECKPOINT_KEEP": json.dumps({"last": 2, "best": "loss", "mode": "min"})}
    ended = start(script, 2, env=env).said()
    assert ended[0] == ended[1]
    assert ended[0][:3] == [[20, 30, 40], [20, 50], [50, 60]]
    assert ended[0][3].startswith("ContextError: store_path: "), ended[0][3]
    assert "keep='all': write keep=elaunch.Keep(last='all')" in ended[0][3]
    assert ended[0][4] == 2  # for a process that commits it in the place of one that has died
