"""What ``save(block=False)`` returns: with an agent, which has it in flight, and without one."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import elaunch
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from tests.launching import wait_until
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import plain

LONG = 60.0


def handles(ctx: Any, go: Path) -> Any:
    """Use handles while the agent cannot write yet, and after ``go`` is there."""
    checkpoint, rank = ctx.checkpoint, ctx.distributed.rank
    first = checkpoint.save({"x": 1}, 20, block=False)
    told: list[Any] = [first.step, first.done(), first.skipped, str(checkpoint.latest())]
    skipped = checkpoint.save({"x": 1}, 30, block=False, when_busy="skip")
    told += [skipped.skipped, skipped.done(), skipped.result()]
    try:
        first.result(timeout=0.2)
    except elaunch.SaveError as error:
        told.append("step-00000020.r0 is not committed after 0.2 s" in str(error))
    ctx.distributed.barrier()
    if rank == 0:
        go.touch()
    wait_until(first.done, LONG)
    second = checkpoint.save({"x": 1}, 10, block=False)  # of a lower step
    told += [found.name for found in (first.result(), checkpoint.latest())]
    told += [found.name for found in (second.result(), second.result(), checkpoint.latest())]
    told += [second.done(), checkpoint.wait().name]
    return told


@pytest.mark.ranks
def test_a_handle_with_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done when it is committed; each has its own checkpoint, whatever came after."""
    write, go = PosixStorage.write_shard, tmp_path / "go"

    def slow(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        pause = threading.Event()
        while not go.exists():
            pause.wait(0.01)
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", slow)
    said = in_group(handles, 2, tmp_path, go, agent=True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    newest, lower = "step-00000020.r0", "step-00000010.r0"
    expected = [20, False, False, "None", True, True, None, True]
    assert said[0] == [*expected, newest, newest, lower, lower, newest, True, newest]


def without_an_agent(ctx: Any) -> Any:
    """Save twice with ``block=False``."""
    checkpoint, logged = ctx.checkpoint, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elaunch").addHandler(handler)
    checkpoint.reserve({"model": plain()})
    found = [checkpoint.save({"model": plain()}, step, block=False) for step in (1, 2)]
    told = [(one.done(), one.skipped, one.result().name) for one in found]
    return told, checkpoint.wait().name, checkpoint.latest().name, logged


@pytest.mark.ranks
def test_a_handle_without_an_agent(tmp_path: Path) -> None:
    """The checkpoint is committed when the call returns; why it blocks is said once."""
    names = ["step-00000001.r0", "step-00000002.r0"]
    for rank, said in enumerate(in_group(without_an_agent, 2, tmp_path)):
        assert not isinstance(said, Raised), said
        *found, logged = said
        assert found == [[(True, False, name) for name in names], names[1], names[1]]
        why = "save(block=False) blocks until the checkpoint is committed: no agent runs here;"
        assert [text.startswith(why) for text in logged] == [True] * (rank == 0)


def known_too_late(ctx: Any) -> Any:
    """Have one rank alone learn that a save has come to nothing; then end."""
    handle = ctx.checkpoint.save({"x": 1}, 1, block=False)
    if ctx.distributed.rank == 0:
        wait_until(handle.done, LONG)
    try:
        ctx.checkpoint.save({"x": 1}, 2, block=False)
    except elaunch.SaveError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_rank_that_has_asked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``done`` hides no error from the next call of all ranks."""

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error", "/disk")

    monkeypatch.setattr(PosixStorage, "write_shard", fail)
    said = in_group(known_too_late, 2, tmp_path, agent=True)
    assert said[0] == said[1] and "step-00000001.r0 was not committed" in said[0], said
    assert said[0].startswith("save: ranks 0, 1 on host")


def patient(ctx: Any) -> Any:
    """Save, save again and wait, on storage that takes three times as long as the ranks' limit."""
    ctx.distributed.timeout = 1.0
    first = ctx.checkpoint.save({"x": 1}, 10, block=False)
    second = ctx.checkpoint.save({"x": 1}, 20, block=False)
    told = [first.result().name, ctx.checkpoint.wait().name, second.result().name]
    ctx.checkpoint.save({"x": 1}, 30, block=False)
    try:
        ctx.checkpoint.save({"x": 1}, 40, block=False, timeout=0.5)
    except elaunch.SaveError as error:
        told.append("the save before is still in flight after 0.5 s" in str(error))
    return [*told, ctx.checkpoint.wait().name]


@pytest.mark.slow
def test_storage_that_takes_longer_than_ranks_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as long as it takes something, where the script gives no timeout."""
    write = PosixStorage.write_shard

    def slow(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        threading.Event().wait(3.0)
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", slow)
    said = in_group(patient, 2, tmp_path, agent=True)
    names = [f"step-{step:08d}.r0" for step in (10, 20, 20)]
    assert said == 2 * [[*names, True, "step-00000030.r0"]]
