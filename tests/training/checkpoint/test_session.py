"""What the agents have chosen for the round, as the script's calls know it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage
from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.session import CheckpointSession
from elaunch.training.launch import read
from tests.checkpoint import makers
from tests.opens import opened_below
from tests.training.checkpoint.agentrig import SavingAgent
from tests.training.checkpoint.ddprig import Ranks, saved
from tests.training.checkpoint.rig import Job, checkpoints, stages

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
PLACE |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def test_the_choice_of_another_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a directory a name that could be one at a URL is looked up nowhere."""
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", str(tmp_path))
    chosen = tmp_path / "step-40.r0.backup"
    told = {"ELAUNCH_RUN_ID": "digits", "ELAUNCH_CHECKPOINT_DIR": str(tmp_path)}
    told |= {"ELAUNCH_RESUME_FROM": str(chosen), "ELAUNCH_RESUME_STEP": "40"}
    nobody = cast("Any", None)
    session = CheckpointSession(read(told | PLACE), nobody, nobody, nobody, "digits", given=True)
    latest = session.latest()
    assert latest is not None and (latest.place, latest.step) == (chosen, 40)


@pytest.mark.slow
def test_the_choice_is_opened_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of 512 ranks opens one file, however many checkpoints are beside it."""
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", str(tmp_path))
    for step in range(50):
        chosen = makers.own(tmp_path, step)
    told = {"ELAUNCH_RUN_ID": "digits", "ELAUNCH_CHECKPOINT_DIR": str(tmp_path)}
    info = read({**told, **PLACE, "ELAUNCH_RESUME_FROM": str(chosen), "ELAUNCH_RESUME_STEP": "49"})
    nobody = cast("Any", None)
    with opened_below(tmp_path) as opened:
        for _ in range(512):
            latest = CheckpointSession(info, nobody, nobody, nobody, "digits", given=True).latest()
            assert latest is not None and latest.step == 49
    assert opened == [f"{chosen.name}/metadata.json"] * 512


def test_the_choice_at_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the uuid is part of the directory's name; it is elaunch's own all the same."""
    url, stage = f"memory://{uuid.uuid4().hex}", Stage(40, 2, uuid.uuid4().hex)
    storage = open_storage(url)
    storage.prepare("digits", given=True)
    part = ShardHeader(0, 1, "digits", {"steps_completed": 40})
    storage.write_shard(stage, part, [Image("model.pt", [b"x"])])
    saved = storage.commit(stage, lambda: None)
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", url)
    told = {"ELAUNCH_RUN_ID": "digits", "ELAUNCH_CHECKPOINT_DIR": url, "ELAUNCH_RESUME_STEP": "40"}
    info = read({**told, **PLACE, "ELAUNCH_RESUME_FROM": str(saved.place)})
    nobody = cast("Any", None)  # any rank learns it alone
    session = CheckpointSession(info, nobody, nobody, nobody, "digits", given=True)
    assert session.latest() == saved


@pytest.mark.slow
def test_one_rank_cannot_reach_its_agent(start: Callable[..., Job], tmp_path: Path) -> None:
    """Then no rank saves in the background; rank 0's agent is asked for the fence all the same."""
    script = """
import torch.distributed
torch.distributed.init_process_group("gloo")
if rank == 1:
    ck._session.link.close()
    ck._session.link.problem = "/x.sock: No such file or directory"
parts = ck._session.together(None)
asked = []
if rank == 0:
    fence = parts.saver.fence
    parts.saver.fence = lambda number: asked.append(number) or fence(number)
store(10)
handles = [ck.save({"a": 1}, step, block=False) for step in (20, 30)]
assert all(one.done() for one in handles)
found = [one.result().step for one in handles]
say(json.dumps([parts.foreground, parts.saver is None, asked, found]))
"""
    with contextlib.closing(SavingAgent(tmp_path / "agent", tmp_path / "checkpoints", 2)) as agent:
        job = start(script, 2, env=agent.environment)
        (_, said, logged), (_, other, nothing) = [job.ends(rank) for rank in range(2)]
    why = "rank 1 cannot reach its agent (/x.sock: No such file or directory)"
    assert json.loads(said) == [why, False, [0, 0, 0], [20, 30]], logged
    assert json.loads(other) == [why, True, [], [20, 30]], nothing
    assert logged.count(f"{why}: the workers write checkpoints themselves") == 1
    assert logged.count(f"save(block=False) blocks until the checkpoint is committed: {why};") == 1
    assert "cannot reach" not in nothing


@pytest.mark.slow
def test_another_jobs_directory_gets_no_save_in_the_background(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """It is refused like one that blocks, and before anything is taken for it."""
    storage = open_storage(checkpoints(tmp_path))
    storage.prepare("job", given=True)
    script = """
import elaunch.training.checkpoint.where as where
where.LOCK_S = 0.0
say(json.dumps([tried(work) for work in (
    lambda: ck.save({"a": 1}, 10),
    lambda: ck.save({"a": 1}, 10, block=False),
    lambda: ck.reserve({"a": 1}),
    lambda: ck.wait() and 1,
)]))
"""
    with contextlib.closing(storage.lock()):
        (said,) = start(script, 1).said()
    for text in said[:3]:
        assert f"is in use by another job (process {os.getpid()} on" in text
    assert said[3] is None
    assert stages(checkpoints(tmp_path)) == []
    assert storage.listed() == []


@pytest.mark.slow
def test_a_refusal_of_one_agent_is_an_error_of_all(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """No rank goes on, and waits for the others, where one is refused."""
    script = """
if rank == 1:
    from elaunch.training.checkpoint import saver
    connected = saver.connected
    saver.connected = lambda *given: connected(*given[:3], given[3] + 7)
say(json.dumps(tried(lambda: store(10))))
"""
    with contextlib.closing(SavingAgent(tmp_path / "agent", tmp_path / "checkpoints", 2)) as agent:
        one, other = start(script, 2, env=agent.environment).said()
    assert one == other
    assert one.startswith("SaveError: opening the checkpoint directory: rank 1 on host")
    assert one.endswith("round 7 is over: round 0 runs here")


def tried(work: Callable[[], Any]) -> str:
    """Return what a call raises."""
    with pytest.raises((CheckpointError, OSError)) as raised:
        work()
    return str(raised.value)


def test_an_error_at_the_first_use_does_not_keep_the_lock(ranks: Ranks) -> None:
    """Once the directory can be used, the same job saves."""
    ranks.place.mkdir()
    (ranks.place / ".stage").touch()  # in the way of a directory

    def work(checkpoint: CheckpointContext, rank: int) -> Any:
        first = [tried(lambda: saved(checkpoint, {"x": 1}, 1)) for _ in range(2)]
        if rank == 0:
            open_storage(ranks.place).lock().close()
            (ranks.place / ".stage").unlink()
        return first, saved(checkpoint, {"x": 1}, 1).name

    for first, name in ranks.run(2, work).all():
        assert all("it is no directory" in text for text in first), first
        assert name == "step-00000001.r0"


def test_the_directory_of_another_run_is_not_locked(ranks: Ranks) -> None:
    """Nothing can be saved there, so whose it is may start."""
    open_storage(ranks.place).prepare("another", given=True)

    def work(checkpoint: CheckpointContext, _: int) -> None:
        assert "belongs to run 'another'" in tried(lambda: saved(checkpoint, {"x": 1}, 1))
        open_storage(ranks.place).lock().close()

    ranks.run(1, work).all()


def test_any_rank_may_ask_for_the_latest_alone(ranks: Ranks) -> None:
    """It was found when the job began: whole, and complete though its writer had died."""
    assert ranks.run(2, lambda checkpoint, _: checkpoint.latest()).all() == [None, None]
    assert not ranks.place.exists()
    ranks.run(2, lambda checkpoint, _: [saved(checkpoint, {"x": 1}, at) for at in (1, 2)]).all()
    storage, stage = open_storage(ranks.place), Stage(3, 0, uuid.uuid4().hex)
    storage.write_shard(
        stage, ShardHeader(0, 1, "job", {"steps_completed": 3}), [Image("x", [b"x"])]
    )

    def work(checkpoint: CheckpointContext, rank: int) -> Any:
        if rank == 0:  # the other one asks alone
            return None
        found = checkpoint.latest()
        open_storage(ranks.place).lock().close()  # nobody has it
        return found and (found.name, found.place)

    name = "step-00000003.r0"
    assert ranks.run(2, work).all() == [None, (name, ranks.place / name)]
    (ranks.place / name / "x").write_bytes(b"")
    name = "step-00000002.r0"
    assert ranks.run(2, work).all() == [None, (name, ranks.place / name)]
    with contextlib.closing(storage.lock()):
        latest = ranks.run(1, lambda checkpoint, _: checkpoint.latest()).all()
    assert latest[0] is not None and latest[0].name == name


def test_a_damaged_one_where_nothing_can_be_written(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be put aside; the one before is read all the same."""
    ranks.run(2, lambda checkpoint, _: [saved(checkpoint, {"x": at}, at) for at in (1, 2)]).all()
    path = ranks.place / "step-00000002.r0" / "state.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(PosixStorage, "quarantine", refuse)

    def work(checkpoint: CheckpointContext, _: int) -> Any:
        state = {"x": 0}
        found = checkpoint.load(state)
        return found.step, state["x"]

    assert ranks.run(2, work).all() == [(1, 1), (1, 1)]
    assert "step-00000002.r0 cannot be put into quarantine" in caplog.text
