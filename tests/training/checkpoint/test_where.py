"""Where checkpoints are, and what nodes share: two nodes that are processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage
from elaunch.errors import SaveError, UsageError
from elaunch.training.checkpoint import where
from elaunch.training.launch import Info, read
from tests.training.checkpoint.rig import Job, checkpoints, committed, stages, user_files

Start = Callable[..., Job]
NODE_0 = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def info(**environ: str) -> Info:
    """Return what a lone process knows with these variables."""
    return read(environ)


def test_the_place() -> None:
    """A variable, a URL in it, else below the state directory; said which."""
    alone = info()
    assert where.location_of(alone, "a b", {"XDG_STATE_HOME": "/s"}) == (
        Path("/s/elaunch/a%20b/checkpoints"),
        False,
    )
    given = {"ELAUNCH_CHECKPOINT_DIR": "/c", "XDG_STATE_HOME": "/s"}
    assert where.location_of(alone, "x", given) == (Path("/c"), True)
    at_url = {"ELAUNCH_CHECKPOINT_DIR": "memory://c/d"}
    assert where.location_of(alone, "x", at_url) == ("memory://c/d", True)
    as_file = {"ELAUNCH_CHECKPOINT_DIR": "file:///c%20d"}
    assert where.location_of(alone, "x", as_file) == (Path("/c d"), True)
    relative, _ = where.location_of(alone, "x", {"ELAUNCH_CHECKPOINT_DIR": "c"})
    assert relative == Path.cwd() / "c"
    with pytest.raises(UsageError, match=r"ELAUNCH_CHECKPOINT_DIR='s3://' is a URL without a buck"):
        where.location_of(alone, "x", {"ELAUNCH_CHECKPOINT_DIR": "s3://"})
    # The directory of all runs is not one run's.
    runs, _ = where.location_of(alone, "runs", {"XDG_STATE_HOME": "/s"})
    assert runs == Path("/s/elaunch/runs.run/checkpoints")


def test_the_rule_of_the_flags() -> None:
    assert not where.keep_of({})
    assert where.keep_of({"ELAUNCH_CHECKPOINT_KEEP": '{"last": 3}'}).last == 3
    for text in ("{", '{"first": 1}', "[]", '{"last": 0}'):
        with pytest.raises(UsageError, match="ELAUNCH_CHECKPOINT_KEEP="):
            where.keep_of({"ELAUNCH_CHECKPOINT_KEEP": text})


@pytest.mark.slow
def test_variables_that_mean_nothing(start: Start, tmp_path: Path) -> None:
    """On all ranks the variable, its value and what to write; a word for yes is one."""
    two = info(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", **NODE_0)
    for text, local in (("1", True), ("yes", True), ("0", False), ("off", False), ("", False)):
        assert where.is_local(two, {"ELAUNCH_CHECKPOINT_LOCAL": text}) is local
    script = """
told = [tried(lambda: store(1))]
os.environ["ELAUNCH_CHECKPOINT_LOCAL"] = "1" if rank == 0 else "maybe"
told.append(tried(lambda: store(2)))
os.environ["ELAUNCH_CHECKPOINT_LOCAL"] = ""
del os.environ["ELAUNCH_CHECKPOINT_KEEP"]
told.append(type(store(3)).__name__)
say(json.dumps(told))
"""
    env = {"ELAUNCH_CHECKPOINT_KEEP": "xx", "ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "c")}
    ended = start(script, 2, env=env).said()
    assert ended == [ended[0]] * 2
    rule, local_, third = ended[0]
    assert "ELAUNCH_CHECKPOINT_KEEP='xx' is no rule of what is kept: it is no JSON; write" in rule
    assert "rank 1 on " in local_ and "_LOCAL='maybe' is neither yes nor no; write 1" in local_
    assert third == "str"


# Every file is the same file, by what the kernel says: as two machines' disks may have it.
SAME_NUMBERS = """
real = os.stat
def fake(path, *args, **options):
    found = real(path, *args, **options)
    return os.stat_result((found[0], 7, 7, *found[3:]), found.__reduce__()[1][1])
os.stat = fake
"""


@pytest.mark.slow
def test_a_checkpoint_of_step_0_is_in_nobodys_way(start: Start, tmp_path: Path) -> None:
    """The first job's first one has the lowest name that there is; the next job opens all the same.

    What is left to be seen by the other ranks is taken back.
    """
    for step in (0, 1):
        assert start(f"store({step}); say(0)", 2).said() == [0, 0]
    place = checkpoints(tmp_path)
    assert committed(place) == ["step-00000000.r0", "step-00000001.r1"]
    assert stages(place) == []
    assert not (place / layout.PROBE).exists()


def test_an_agents_stages_are_the_agents(tmp_path: Path) -> None:
    """Without its lock nothing there is touched, whatever the flags."""
    storage = open_storage(tmp_path)
    storage.prepare("digits", given=True)
    stage = Stage(10, 0, "u")
    storage.write_shard(
        stage, ShardHeader(0, 1, "digits", {"steps_completed": 10}), [Image("x", [b"x"])]
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ELAUNCH_ROUND": "3"}
    told = info(ELAUNCH_RUN_ID="digits", **place)
    assert (told.launcher, told.checkpoint_dir) == ("elaunch", None)
    assert where.take(storage, told, "digits", given=False) == where.DirectoryOwner("digits", 3)
    assert stages(tmp_path) == [stage.name]


def test_what_is_committed_for_the_dead_is_kept_by_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an agent, too; nothing goes where an older one than the newest is committed."""
    storage = open_storage(tmp_path)
    storage.prepare("digits", given=True)

    def stage(step: int) -> Stage:
        made = Stage(step, 0, f"u{step}")
        part = ShardHeader(0, 1, "digits", {"steps_completed": step}, keep={"last": 2})
        storage.write_shard(made, part, [Image("x", [b"x"])])
        return made

    monkeypatch.setenv("ELAUNCH_CHECKPOINT_KEEP", '{"last": 1}')
    for step in (10, 20, 40):
        storage.commit(stage(step), lambda: None)
    for step, kept in ((30, [10, 20, 30, 40]), (50, [40, 50])):
        stage(step)
        where.finish(storage, "digits", given=True)
        assert [found.step for found in storage.listed()] == kept


def test_the_lock_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was killed a moment ago may have it still; another job's is not given back."""
    monkeypatch.setattr(where, "LOCK_AGAIN_S", 0.0)
    asked: list[int] = []

    class Taken:
        def lock(self) -> str:
            asked.append(1)
            if len(asked) < 3:
                raise SaveError("taken")
            return "locked"

    storage = cast("Any", Taken())
    assert cast("Any", where.lock(storage)) == "locked"
    assert len(asked) == 3
    asked.clear()
    monkeypatch.setattr(where, "LOCK_S", 0.0)
    with pytest.raises(SaveError, match="taken"):
        where.lock(storage)


def directories(tmp_path: Path) -> dict[str, str]:
    """Return the variable that gives each node its own directory."""
    return {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "node{node}")}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["", SAME_NUMBERS], ids=["", "same-numbers"])
def test_nodes_that_share_nothing_are_told_so(start: Start, tmp_path: Path, numbers: str) -> None:
    """On all ranks, with the directory, before anything is written."""
    quick = "import elaunch.training.checkpoint.where as w; w.SEEN_S = 0.2\n"
    script = numbers + quick + "say(json.dumps([tried(lambda: store(i)) for i in (1, 2)]))"
    ended = start(script, 4, nodes=2, env=directories(tmp_path)).said()
    assert ended == [ended[0]] * 4
    for text in ended[0]:
        assert text.startswith("CheckpointError: looking for the checkpoint directory: ranks 2, 3")
        assert f"{tmp_path / 'node1'} of host" in text
        assert "is not the directory that rank 0 writes to" in text
        assert "--checkpoint-local" in text
    assert committed(tmp_path / "node0") == []
    assert stages(tmp_path / "node0") == []


@pytest.mark.slow
def test_each_node_has_its_own(start: Start, tmp_path: Path) -> None:
    """Every node keeps its ranks' files and everybody's manifests; the documents are the same."""
    env = {**directories(tmp_path), "ELAUNCH_CHECKPOINT_LOCAL": "1"}
    script = """
def conflict():
    store(20, {"x": str(rank)})
wrong = [tried(conflict), tried(lambda: store(20, metadata={"k": rank}))]
store(20, {"y": "y"})
store(30, {f"{rank}": str(rank)}, metadata={f"rank_{rank}": "ok"}, keep=Keep(last=1))
ctx.distributed.barrier()
say(json.dumps([wrong, [each.step for each in ck.list()], ck.get_metadata("step-00000030.r0")]))
"""
    ended = start(script, 4, nodes=2, env=env).said()
    assert ended == [ended[0]] * 4
    wrong, left, metadata = ended[0]
    assert wrong[0].startswith("SaveError: ") and "different content" in wrong[0]
    assert "k is 0 (rank 0), 1 (rank 1), 2 (rank 2), 3 (rank 3)" in wrong[1]
    assert left == [30]
    assert metadata == {"steps_completed": 30, **{f"rank_{rank}": "ok" for rank in range(4)}}
    nodes = [tmp_path / f"node{node}" for node in range(2)]
    assert [stages(node) for node in nodes] == [[], []]
    assert [committed(node) for node in nodes] == [["step-00000030.r0"]] * 2
    copies = [node / "step-00000030.r0" for node in nodes]
    assert user_files(copies[0]) == {"0": "0", "1": "1"}
    assert user_files(copies[1]) == {"2": "2", "3": "3"}
    manifests = [f"manifest.rank-{rank:05d}.json" for rank in range(4)]
    for name in ("COMMIT", "metadata.json", *manifests):
        assert (copies[0] / name).read_bytes() == (copies[1] / name).read_bytes(), name


@pytest.mark.slow
def test_nodes_give_each_other_what_they_lack(start: Start, tmp_path: Path) -> None:
    """The newest that is whole over all copies; who lacks files, or all of it, gets them."""
    env = {**directories(tmp_path), "ELAUNCH_CHECKPOINT_LOCAL": "1"}
    store = "store({step}, {{f'sub/{{rank}}': f'{step} ' + 'x' * 99}})\n"
    first = store.format(step=10) + store.format(step=20) + "say(0)"
    assert start(first, 2, nodes=2, env=env).said() == [0, 0]
    (tmp_path / "node1" / "step-00000020.r0" / "sub" / "1").write_text("damaged")
    metadata = tmp_path / "node1" / "step-00000010.r0" / "metadata.json"
    metadata.write_text(metadata.read_text().replace("{", "{ ", 1))  # COMMIT was of another
    # One node more than there was, with nothing; files larger than a piece.
    read = """
import elaunch.training.checkpoint.nodecopies as nodecopies
nodecopies.PIECE = 10
bad = tried(lambda: ck.restore_path("step-00000020.r0").__enter__())
with ck.restore_path() as path:
    content = [(path / "sub" / f"{each}").read_text()[:3] for each in (0, 1)]
say(json.dumps([content, ck.latest().step, path.parent.name, bad]))
"""
    ended = start(read, 3, nodes=3, env=env).said()
    assert [found[:3] for found in ended] == [
        [["10 ", "10 "], 10, f"node{node}"] for node in range(3)
    ]
    assert {found[3] for found in ended} == {
        "CheckpointError: step-00000020.r0 is incomplete on the nodes that are here: sub/1"
    }
    for node in range(3):
        place = tmp_path / f"node{node}"
        open_storage(place).verify(open_storage(place).find("step-00000010.r0"))


@pytest.mark.slow
def test_a_flipped_bit_in_one_nodes_copy(start: Start, tmp_path: Path) -> None:
    """Is found while it is read; the next older one is taken, on all nodes."""
    env = {**directories(tmp_path), "ELAUNCH_CHECKPOINT_LOCAL": "1"}
    script = """
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in (1, 2):
    ck.save({"x": torch.full((5000,), float(step))}, step)
ck.load({"x": torch.zeros(5000)})  # each node has all files now
if rank == 1:
    path = Path(ck.latest().place, "__0_0.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)
dist.barrier()
own = {"x": torch.zeros(5000)}
found = ck.load(own)
say(json.dumps([found.step, own["x"].unique().tolist()]))
"""
    assert start(script, 2, nodes=2, env=env).said() == [[1, [1.0]]] * 2
    assert [committed(tmp_path / f"node{node}") for node in (0, 1)] == [["step-00000001.r0"]] * 2
    (reason,) = (tmp_path / "node1" / ".quarantine").glob("step-00000002.r0*.json")
    assert "bad checksum: __0_0.distcp" in reason.read_text()


@pytest.mark.slow
def test_local_on_shared_storage_is_refused(start: Start, tmp_path: Path) -> None:
    """Two chiefs in one directory would take each other's stages."""
    env = {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "c"), "ELAUNCH_CHECKPOINT_LOCAL": "1"}
    ended = start("say(json.dumps(tried(lambda: store(1))))", 2, nodes=2, env=env).said()
    assert ended[0] == ended[1]
    assert ended[0].startswith("CheckpointError: ")
    assert "another" in ended[0] or "leave the flag out" in ended[0]


@pytest.mark.slow
@pytest.mark.parametrize("made_up", ["none", "0ae16ae3-8c57-40ed-b6e0-3047148ddcaa"])
def test_an_id_that_nobody_chose(start: Start, tmp_path: Path, made_up: str) -> None:
    """Each start has another; what is in the directory is gone on with, under its first id."""
    env = {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "c"), "TORCHELASTIC_RUN_ID": made_up}
    script = """
found = ck.latest()
store(10 if found is None else found.step + 10)
say(json.dumps([found and found.step, ck.list()[0].run_id]))
"""
    first = start(script, 2, env=env).said()
    assert first[0][0] is None
    other = {**env, "TORCHELASTIC_RUN_ID": made_up.replace("0ae", "1ae")}
    assert start(script, 2, env=other).said() == [[10, first[0][1]]] * 2


@pytest.mark.slow
def test_a_url(start: Start, tmp_path: Path) -> None:
    """Through fsspec, which cannot rename: all ranks store, one of each node fetches for them."""
    script = """
import elaunch.training.checkpoint.where as where
where.parse_location = lambda text: text  # not as the path that it stands for
store(10, {f"{rank}": str(rank), "same": "same"})
refused = [tried(lambda: store(20, {"x": str(rank)}))]
refused += [tried(lambda: store(20, metadata={"k": rank}))]
with ck.restore_path() as path:
    read = sorted((each.name, each.read_text()) for each in path.iterdir() if len(each.name) < 5)
there = path.exists()
ctx.distributed.barrier()
say(json.dumps([refused, read, there and rank, str(path), ck.directory, ck.latest().step,
    [each.step for each in ck.list()]]))
"""
    url = f"file://{tmp_path / 'c'}"
    one, other = start(script, 2, env={"ELAUNCH_CHECKPOINT_DIR": url}).said()
    assert one[:2] == other[:2] and one[3:] == other[3:]
    assert "x: different content" in one[0][0] and "k is 0 (rank 0), 1 (rank 1)" in one[0][1]
    assert one[1] == [["0", "0"], ["1", "1"], ["same", "same"]]
    assert not Path(one[3]).exists()
    assert one[4:] == [url, 10, [10]]
