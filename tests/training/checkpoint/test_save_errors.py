"""What ``save`` and ``load`` refuse, on all ranks, by name; nothing is committed then."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elaunch
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.training.checkpoint.dcp import read
from elaunch.training.checkpoint.state import tensors
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, network, plain, train

KINDS = ("SaveError: ",)


def tried(work: Callable[[], Any]) -> str:
    """Return the error of elaunch that ``work`` raises; empty if it raises none."""
    try:
        work()
    except elaunch.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Broken:
    """Refuses on one rank, with an exception that is none of elaunch's."""

    def __init__(self, rank: int, error: type[BaseException] = KeyError) -> None:
        self.rank, self.error = rank, error

    def state_dict(self) -> dict[str, Any]:
        """Return nothing of interest."""
        if dist.get_rank() == self.rank:
            raise self.error("out of order")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


class Stubborn(Broken):
    """Refuses to load on one rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return something."""
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse."""
        if dist.get_rank() == self.rank:
            raise self.error("cannot take it")


class Unpicklable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no way")


def refused_saves(ctx: Any, block: bool) -> Any:
    """Try to save what cannot be; then save what can."""
    from torch.distributed.checkpoint.api import CheckpointException

    rank, save = ctx.distributed.rank, ctx.checkpoint.save
    model = plain()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    other = torch.optim.SGD(plain().parameters(), lr=1.0)
    sparse = torch.eye(3).to_sparse()
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
    told = [
        tried(lambda state=state: save(state, 1, block=block))
        for state in (
            {"model": model, "optimizer": optimizer.state_dict()},
            {"trainer": {"inner": {"opt": optimizer.state_dict()}}},
            {"model": model, "optimizer": other},
            {"optimizer": optimizer},
            {"a": model, "b": model, "optimizer": optimizer},
            {"sparse": sparse},
            {"quantised": quantised},
            {"meta": torch.empty(2, device="meta")},
            {"broken": Broken(1)},
            {"broken": Broken(0, AssertionError)},
            {"broken": CheckpointExceptionRaiser(CheckpointException)},
            {"x": Unpicklable()},
            {"a.b": 1, "a": {"b": 2}},
            [1, 2],
        )
    ]
    told.append(tried(lambda: save({"x": 1}, 1 + rank, block=block)))
    told.append(tried(lambda: save({"x": 1}, -1, block=block)))
    told.append(tried(lambda: save({"x": 1}, 1, metadata={"a": {"b": rank}}, block=block)))
    told.append(tried(lambda: save({"x": 1}, torch.tensor(1), block=block)))  # type: ignore[arg-type]
    told.append(tried(lambda: save({"x": 1}, 1, block=rank == 0)))
    assert ctx.checkpoint.list() == []
    save({"x": 1}, 7, block=block)
    ctx.checkpoint.wait()
    told.append(tried(lambda: save({"x": 1}, 7, block=block)))
    return told, [found.step for found in ctx.checkpoint.list()]


class CheckpointExceptionRaiser(Broken):
    """Raises torch's exception that is no Exception."""

    def __init__(self, kind: Any) -> None:
        super().__init__(0)
        self.kind = kind

    def state_dict(self) -> dict[str, Any]:
        """Raise it on rank 0."""
        if dist.get_rank() == 0:
            raise self.kind("read", {0: (OSError("inner reason"), None)})
        return {"x": 1}


@pytest.mark.ranks
@pytest.mark.parametrize("block", [True, False], ids=["block", "memory"])
def test_refused_saves(tmp_path: Path, block: bool) -> None:
    """Every error is the same on both ranks and says what to do; the next save works."""
    said = in_group(refused_saves, 2, tmp_path, block, agent=not block)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    told, steps = said[0]
    assert steps == [7] and all(line.startswith(KINDS) for line in told), told
    raw, nested, foreign, without, twice, sparse, quantised, meta, *rest = told
    assert "optimizer is optimizer.state_dict()" in raw and '"optimizer": optimizer}' in raw
    assert "trainer.inner.opt is optimizer.state_dict()" in nested
    assert "no module of the state has all parameters of optimizer (modules: model)" in foreign
    assert "there is no module in it" in without
    assert "several modules of the state (a, b)" in twice
    assert "sparse cannot be saved: it is sparse" in sparse and "to_dense()" in sparse
    assert "quantised (torch.quint8)" in quantised and "int_repr()" in quantised
    assert "meta cannot be saved: it has no data" in meta
    broken, asserted, torchs, pickles, collision, no_dict, steps_differ, *others = rest
    negative, metadata, no_number, blocks, again = others
    assert "rank 1 on host" in broken and "KeyError: 'out of order'" in broken
    assert "rank 0 on host" in asserted and "AssertionError" in asserted
    assert "rank 0 on host" in torchs and "inner reason" in torchs
    assert "x, a Unpicklable, cannot be pickled: torch.save: TypeError: no way" in pickles
    assert "two values of the state would have the key 'a.b'" in collision
    assert "the state is a dict with names as keys" in no_dict
    assert "differs: 1 on rank 0, 2 on rank 1" in steps_differ
    assert "-1" in negative and "a.b" in metadata
    assert "steps_completed is tensor(1), a Tensor: give a whole number" in no_number
    assert "block differs: True on rank 0, False on rank 1" in blocks
    assert "step-00000007.r0 is there already" in again


def refused_loads(ctx: Any) -> Any:
    """Try to load what does not fit; then load what does."""
    rank, load = ctx.distributed.rank, ctx.checkpoint.load
    model = plain()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    saved = {"model": model, "optimizer": optimizer, "step": 3, "list": [torch.ones(2)], "s": {}}
    ctx.checkpoint.save({**saved, "taker": Stubborn(1)}, 3)
    before = bits(model.state_dict())
    wider = nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 7, bias=False))
    more = {**saved, "extra": 1, **({"mine": 2} if rank == 1 else {})}
    less = {key: saved[key] for key in ("model", "step")}
    told = [
        tried(lambda state=state: load({**state, "taker": Broken(9)}))
        for state in (
            {**saved, "optimizer": optimizer.state_dict()},
            more,
            less,
            {**more, "list": [torch.ones(3)]},
            {**saved, "model": wider, "optimizer": torch.optim.Adam(wider.parameters())},
            {**saved, "step": torch.tensor([0])},
            {**saved, "list": 5},
        )
    ]
    told.append(tried(lambda: load({**saved, "taker": Stubborn(1)})))
    told.append(tried(lambda: load(saved, which="step-00000099.r0")))
    assert bits(model.state_dict()) == before
    partial = {"model": plain(1), "new": "stays"}
    load(partial, strict=False)
    assert bits(partial["model"].state_dict()) == before and partial["new"] == "stays"
    return told


@pytest.mark.ranks
def test_refused_loads(tmp_path: Path) -> None:
    """Missing, unexpected and misfitting keys together, with the ranks where it is not all."""
    said = in_group(refused_loads, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    assert all(line.startswith("CheckpointError: load") for line in said[0]), said[0]
    raw, more, less, both, wider, kind, other, stubborn, nowhere = said[0]
    assert "optimizer is optimizer.state_dict()" in raw
    assert "missing in the checkpoint: extra, mine on rank 1" in more
    assert "in the checkpoint only: list.0, optimizer.param_groups.0.amsgrad" in less
    assert "list.0 (size (2,) there, (3,) here)" in both and "extra" in both
    assert "model.0.weight (size (12, 8) there, (13, 8) here)" in wider
    assert "step (a value there, a tensor here)" in kind
    assert "missing in the checkpoint: list" in other and "only: list.0" in other
    assert "rank 1 on host" in stubborn and "cannot take it" in stubborn
    assert "step-00000099.r0" in nowhere and "step-00000003.r0" in nowhere


def no_group(ctx: Any) -> Any:
    """Save and load without a process group."""
    save, load = ctx.checkpoint.save, ctx.checkpoint.load
    elsewhere = tried(lambda: save({"x": 1}, 1))
    with ctx.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
        (path / "x").write_text("1")
    return elsewhere, tried(lambda: load({"x": 1}))


@pytest.mark.ranks
def test_no_process_group(tmp_path: Path) -> None:
    """Two ranks would write the same files: an error that names the call."""
    said = in_group(no_group, 2, tmp_path, env={"GROUP": "no"})
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    assert all("init_process_group()" in line for line in said[0][:1]), said
    (alone,) = in_group(alone_work, 1, tmp_path / "alone", env={"GROUP": "no"})
    assert alone == 4


def alone_work(ctx: Any) -> Any:
    """One rank needs no process group."""
    ctx.checkpoint.save({"model": network(), "step": 4}, 4)
    state = {"model": network(1), "step": 0}
    ctx.checkpoint.load(state)
    return state["step"]


def damaged(ctx: Any, how: str) -> Any:
    """Damage a checkpoint that rank 0 takes for whole, and load it."""
    rank = ctx.distributed.rank
    model = plain()
    ctx.checkpoint.latest()  # looked for, and verified, before there is anything
    found = ctx.checkpoint.save({"model": model, "value": "x" * 100}, 1).committed
    if rank == 0:
        damage(found.place, how)
    ctx.distributed.barrier()
    into = {"model": plain(1), "value": ""}
    first = tried(lambda: ctx.checkpoint.load(into, which=found.uuid))
    return first, found.place


def damage(place: Path, how: str) -> None:
    """Do something to the files of a checkpoint."""
    data = place / "__1_0.distcp"
    if how == "short":
        os.truncate(data, 100)
    elif how == "gone":
        data.unlink()
    elif how == "garbled":
        data.write_bytes(b"\xff" * data.stat().st_size)
    elif how == "metadata":
        (place / ".metadata").write_bytes(b"\x80\x04garbage")
    else:
        (place / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("short", "__1_0.distcp is truncated"),
        ("gone", "__1_0.distcp is missing"),
        ("garbled", "bad checksum: __1_0.distcp"),
        ("metadata", "bad checksum: .metadata"),
        ("foreign", "bad checksum: .metadata"),
    ],
)
def test_damaged_files(tmp_path: Path, how: str, words: str) -> None:
    """An error on both ranks that names the file; torch's own never comes out."""
    said = in_group(damaged, 2, tmp_path, how)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    assert said[0][0].startswith("CheckpointError: load") and words in said[0][0], said[0][0]


def one_reader_fails(ctx: Any) -> Any:
    """Have one rank's disk fail in the middle of a load."""
    ctx.checkpoint.save({"model": plain()}, 1)
    if ctx.distributed.rank == 1:

        def fail(*_: Any) -> None:
            raise OSError(5, "Input/output error", "__0_0.distcp")

        read.read_tensors = fail  # type: ignore[assignment]
        tensors.memory_of = fail  # type: ignore[assignment]
    first = tried(lambda: ctx.checkpoint.load({"model": plain(1)}))
    second = tried(lambda: ctx.checkpoint.save({"model": plain()}, 2))
    return first, second, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
def test_one_rank_fails(tmp_path: Path) -> None:
    """Both ranks raise and name it, in a load and in a save."""
    said = in_group(one_reader_fails, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    first, second, steps = said[0]
    assert "rank 1 on host" in first and "Input/output error" in first
    assert "rank 1 on host" in second and "Input/output error" in second and steps == [1]


def failing_background(ctx: Any) -> Any:
    """Save four times, where the agent cannot write the shard of rank 1 in the first three."""
    save, wait = ctx.checkpoint.save, ctx.checkpoint.wait
    model = {"model": plain()}
    first = save(model, 1, block=False)
    told = [tried(wait), tried(first.result), tried(wait)]
    second = save(model, 2, block=False)
    told += [tried(lambda: save(model, 3, block=False)), tried(second.result)]
    third = save(model, 3, block=False)
    told += [tried(third.result), tried(third.result)]
    fourth = save(model, 4, block=False)
    return told, fourth.result().step, wait().step


@pytest.mark.ranks
def test_a_shard_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get it in the next call, once; its handle raises it each time."""
    write = PosixStorage.write_shard

    def fail(self: PosixStorage, stage: Stage, part: ShardHeader, images: Any) -> bytes:
        if part.rank == 1 and stage.step < 4:
            raise OSError(5, "Input/output error", "/disk")
        return write(self, stage, part, images)

    monkeypatch.setattr(PosixStorage, "write_shard", fail)
    said = in_group(failing_background, 2, tmp_path, agent=True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    told, *steps = said[0]
    assert steps == [4, 4] and told.pop(2) == ""
    for text, at in zip(told, (1, 1, 2, 2, 3, 3), strict=True):
        assert text.startswith("SaveError: wait: " if at != 2 else "SaveError: save: ")
        assert f"step-{at:08d}.r0 was not committed: rank 1: Input/output error" in text
