"""Every call of ``ctx.checkpoint`` is a section: storage that is slow is no hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.wire.progress import PageReader, Reading
from tests.training.checkpoint.ddprig import Ranks
from tests.training.checkpoint.groups import in_group


def stage(checkpoint: CheckpointContext) -> Path:
    """Write a file where the next commit takes it from."""
    path = checkpoint.stage_path(50)
    (path / "file").write_text("1")
    return path


def block(checkpoint: CheckpointContext) -> None:
    """Store a file."""
    with checkpoint.store_path({"steps_completed": 30}, shard=True) as (path, _):
        (path / "file").write_text("1")


def read(checkpoint: CheckpointContext) -> None:
    """Read it."""
    with checkpoint.restore_path("step-00000010.r0"):
        pass


FIRST = "step-00000010.r0"
AT_ONCE = {"directory", "move", "pack", "unpack", "schedule", "follow"}
"""What speaks with no other rank and touches no storage."""
CALLS: dict[str, Callable[[CheckpointContext], Any]] = {
    "latest": lambda checkpoint: checkpoint.latest(),
    "save": lambda checkpoint: checkpoint.save({"x": 1}, 10),
    "load": lambda checkpoint: checkpoint.load({"x": 0}),
    "store_path": block,
    "restore_path": read,
    "stage_path": lambda checkpoint: checkpoint.stage_path(40),
    "commit": lambda checkpoint: checkpoint.commit(stage(checkpoint), 50),
    "reserve": lambda checkpoint: checkpoint.reserve({"x": torch.ones(2)}),
    "wait": lambda checkpoint: checkpoint.wait(),
    "check_same": lambda checkpoint: checkpoint.check_same({"x": 1}),
    "list": lambda checkpoint: checkpoint.list(),
    "get_metadata": lambda checkpoint: checkpoint.get_metadata(FIRST),
    "pin": lambda checkpoint: checkpoint.pin(FIRST),
    "unpin": lambda checkpoint: checkpoint.unpin(FIRST),
    "quarantine": lambda checkpoint: checkpoint.quarantine("step-00000030.r0", "for a test"),
    "delete": lambda checkpoint: checkpoint.delete(FIRST),
    "close": lambda checkpoint: checkpoint.close(),
}


def spied(target: Any, name: str, see: Callable[[], None]) -> None:
    """Have a method of one object look at the page before it does its work."""
    real = getattr(target, name)

    def call(*args: Any, **options: Any) -> Any:
        see()
        return real(*args, **options)

    setattr(target, name, call)


def test_every_call_is_a_section(ranks: Ranks) -> None:
    """From its first word with other ranks, or with the storage, to its last."""
    public = {name for name in vars(CheckpointContext) if not name.startswith("_")}
    assert public - AT_ONCE == set(CALLS)

    def work(checkpoint: CheckpointContext, _: int) -> dict[str, set[str]]:
        session, seen = checkpoint._session, []
        page = PageReader(os.dup(session.page.fd))

        def see() -> None:
            seen.append(page.read().section)

        spied(session.distributed, "_joined", see)
        for name in ("find", "listed", "quarantine", "remove"):
            spied(session.storage, name, see)
        found = {}
        for name, call in CALLS.items():
            seen.clear()
            if name == "close":
                session._stack.callback(see)
            call(checkpoint)
            found[name] = set(seen)
            assert page.read().section == ""
        return found

    (found,) = ranks.run(1, work).all()
    assert found.pop("latest") == set()  # elaunch.init() has looked: it asks nobody
    assert found == {name: {"checkpoint"} for name in CALLS if name != "latest"}


def waits(ctx: Any) -> list[tuple[str, float]]:
    """Return what the page says of each wait for a save in flight: its name, seconds left."""
    checkpoint, seen = ctx.checkpoint, list[tuple[str, float]]()
    session = checkpoint._session
    page, saver = PageReader(os.dup(session.page.fd)), session.together(None).saver

    def left(read: Reading) -> float:
        assert read.section == "checkpoint" and read.section_until is not None
        return read.section_until - time.monotonic()

    type(saver).is_over = False  # the agent may have reported the first save's end
    for name in ("begin", "wait", "close"):
        spied(saver, name, lambda name=name: seen.append((name, left(page.read()))))
    checkpoint.save({"x": 1}, 10, block=False, timeout=100.0)
    checkpoint.wait(timeout=200.0)
    checkpoint.save({"x": 1}, 20, block=False, timeout=100.0).result(timeout=300.0)
    checkpoint.close()
    return seen


@pytest.mark.ranks
def test_a_wait_for_the_own_save_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    """However short --hang-timeout is: by a section with a timeout, and not ten times that."""
    (seen,) = in_group(waits, 1, tmp_path, env={"GROUP": "no"}, agent=True)
    assert [name for name, _ in seen] == ["begin", "wait", "begin", "wait", "close"]
    for (_, left), seconds in zip(seen, (100, 200, 100, 300, 1800), strict=True):
        assert seconds < left < seconds + 30
