"""How a script names the checkpoint that it means: of this run, or of another one to begin from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError, ContextError
from elaunch.training.checkpoint.context import CheckpointContext
from tests.training.checkpoint.ddprig import Ranks, saved
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, plain, train

WAYS: dict[str, Callable[[Committed], Any]] = {
    "name": lambda found: found.name,
    "uuid": lambda found: found.uuid,
    "path": lambda found: found.place,
    "text": lambda found: f"{found.place}/",
    "relative": lambda found: os.path.relpath(found.place),
    "committed": lambda found: found,
}


def content(path: Path) -> str:
    """Return what ``saved`` wrote, as a number."""
    return str(torch.load(path / "state.pt", weights_only=True)["x"])


@pytest.mark.parametrize("way", WAYS)
def test_every_call_takes_every_name(ranks: Ranks, way: str) -> None:
    """Name, uuid, path in all forms, and what other calls returned."""

    def work(checkpoint: CheckpointContext, rank: int) -> Any:
        first, *_ = [saved(checkpoint, {"x": step}, step) for step in (1, 2, 3)]
        which = WAYS[way](first)
        state = {"x": 0}
        with checkpoint.restore_path(which) as path:
            read = content(path)
        told = checkpoint.get_metadata(which)
        found = checkpoint.load(state, which=which)  # on return all ranks have read
        if rank == 0:
            checkpoint.pin(which)
            checkpoint.unpin(which)
            checkpoint.quarantine(which, "for a test")
            checkpoint.delete(WAYS[way](checkpoint.list()[0]))
        return read, state["x"], found == first, told, rank or len(checkpoint.list())

    said = ranks.run(2, work).all()
    assert said == [("1", 1, True, {"steps_completed": 1}, count) for count in (1, 1)]


def test_what_names_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """The error repeats it; what is not in this directory is not deleted."""
    other = Ranks(tmp_path / "other")

    def save(checkpoint: CheckpointContext, _: int) -> Any:
        return saved(checkpoint, {"x": 1}, 1).place

    def work(checkpoint: CheckpointContext, _: int) -> None:
        saved(checkpoint, {"x": 2}, 2)
        with pytest.raises(ContextError, match=r"^load\(uuid=…\): write which=$"):
            checkpoint.load({"x": 0}, uuid=place)  # type: ignore[call-arg]
        with pytest.raises(ContextError, match=r"^restore_path\(uuid=…\): write which=$"):
            checkpoint.restore_path(uuid=place)  # type: ignore[call-arg]
        for wrong in (5, "", b"step"):
            with pytest.raises(ContextError, match="names no checkpoint: give a name, a uuid"):
                checkpoint.get_metadata(wrong)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="nowhere is not there"):
            checkpoint.load({"x": 0}, which=tmp_path / "nowhere")
        for refused in (checkpoint.delete, checkpoint.pin, checkpoint.unpin):
            with pytest.raises(CheckpointError, match="is no checkpoint of"):
                refused(place)
        state = {"x": 0}
        found = checkpoint.load(state, which=place)
        assert (state["x"], found.step) == (1, 1)
        assert checkpoint.get_metadata(place) == {"steps_completed": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELAUNCH_CHECKPOINT_DIR", str(other.place))
        (place,) = other.run(1, save).all()
    ranks.run(1, work).all()
    assert place.exists()


def test_ranks_that_name_different_ones(ranks: Ranks) -> None:
    """An error on all of them."""

    def work(checkpoint: CheckpointContext, rank: int) -> str:
        found = [saved(checkpoint, {"x": step}, step) for step in (1, 2)]
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load({"x": 0}, which=found[rank])
        return str(raised.value)

    one, two = ranks.run(2, work).all()
    assert one == two and "the ranks ask for different checkpoints: rank 0 for 'step-0" in one


# ── another run's ────────────────────────────────────────────────────────────────────────────────


def warm(ctx: Any, block: bool) -> Any:
    """Save in this run's directory."""
    model = plain(3)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    ctx.checkpoint.save({"model": model, "optimizer": optimizer}, 500, block=block)
    ctx.checkpoint.wait()
    return bits(model.state_dict())


def by_handle(ctx: Any) -> Any:
    """Load what a save has returned, once it is committed."""
    state = {"x": 1}
    first = ctx.checkpoint.save(state, 1)
    second = ctx.checkpoint.save({"x": 2}, 2, block=False)
    told = [ctx.checkpoint.load(state, which=first).step]
    second.result()
    told.append(ctx.checkpoint.load(state, which=second).step)
    return told, state["x"], ctx.checkpoint.get_metadata(first)


@pytest.mark.ranks
def test_what_a_save_has_returned(tmp_path: Path) -> None:
    """Names the checkpoint, whether it was waited for or not."""
    said = in_group(by_handle, 2, tmp_path, agent=True)
    assert said == [([1, 2], 2, {"steps_completed": 1})] * 2


def begun(ctx: Any, source: str) -> Any:
    """Begin from another run's weights; save; load what is there then."""
    told = []
    for step in (1, 2):
        model = plain(1)
        found = ctx.checkpoint.load({"model": model}, source=source, strict=False)
        told.append((found.step, found.run_id, bits(model.state_dict())))
        assert (ctx.checkpoint.latest() is None) is (step == 1)
        with torch.no_grad():
            model[0].weight.zero_()
        ctx.checkpoint.save({"model": model}, step)
    try:
        ctx.checkpoint.load({"model": plain(1)}, source=source, which=found)
    except ContextError as error:
        told.append(str(error))
    return told


@pytest.mark.ranks
def test_a_warm_start(tmp_path: Path) -> None:
    """From another run, on another number of ranks: step 0; then the own checkpoint wins."""
    weights = in_group(warm, 2, tmp_path / "old", False)
    place = tmp_path / "old" / "checkpoints"
    before = sorted(path.name for path in place.iterdir())
    said = in_group(begun, 3, tmp_path / "new", str(place))
    assert said[0] == said[1] == said[2] and not isinstance(said[0], Raised), said[0]
    first, second, both = said[0]
    assert first == (0, "job", weights[0])
    assert second[0] == 1 and second[2] != weights[0]
    assert "which and source were given" in both
    assert sorted(path.name for path in place.iterdir()) == before, "it is only read"


def by_environment(ctx: Any) -> Any:
    """Load without a word about a source."""
    state, again = {"x": 0}, {"x": 0}
    found = ctx.checkpoint.load(state)
    with ctx.checkpoint.restore_path() as path:
        read = path.name
    assert ctx.checkpoint.latest() is None
    ctx.checkpoint.save({"x": 8}, 1)
    own = ctx.checkpoint.load(again)
    return state["x"], found.step, read, again["x"], own.step


@pytest.mark.ranks
def test_a_warm_start_by_the_environment(tmp_path: Path) -> None:
    """What --init-from sets counts for every call that takes the latest, and without an agent."""
    torch.save({"x": 7}, tmp_path / "model.pt")
    env = {"ELAUNCH_INIT_FROM": str(tmp_path / "model.pt")}
    assert in_group(by_environment, 2, tmp_path, env=env) == [(7, 0, "model.pt", 8, 1)] * 2


def test_a_source_that_is_not_there(ranks: Ranks, tmp_path: Path) -> None:
    """An error on all ranks that names it; with a checkpoint of its own nobody looks at it."""

    def work(checkpoint: CheckpointContext, _: int) -> str:
        with pytest.raises(CheckpointError) as raised:
            checkpoint.load({"x": 1}, source=tmp_path / "gone")
        saved(checkpoint, {"x": 2}, 1)
        state = {"x": 0}
        checkpoint.load(state, source=tmp_path / "gone")
        assert state["x"] == 2
        return str(raised.value)

    one, two = ranks.run(2, work).all()
    assert one == two and f"{tmp_path / 'gone'} is not there" in one
