"""A flipped bit in what this job has sealed: found while it is read, by one of the ranks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.training.checkpoint.context import CheckpointContext
from elaunch.training.checkpoint.dcp.verify import Verifier
from tests.training.checkpoint.ddprig import Ranks
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.models import bits, plain

KIB = 1 << 10


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file, and leave no trace in its times."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# ── hashing beside the reading ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 300), (300, 600)],
        [(100, 300), (500, 600)],
        [(300, 600), (0, 300)],
        [(0, 10), (10, 20)],
        [],
        [(0, 300), (200, 500), (100, 400)],
    ],
    ids=["all", "with gaps", "backwards", "small ones", "nothing", "twice"],
)
@pytest.mark.parametrize("flipped", [None, 0, 250 * KIB, 599 * KIB + 5])
def test_all_of_a_file_is_hashed(
    tmp_path: Path, pieces: list[tuple[int, int]], flipped: int | None
) -> None:
    """Whatever is read of it, in whatever order."""
    path, content = tmp_path / "file", os.urandom(600 * KIB)
    path.write_bytes(content)
    if flipped is not None:
        flip(path, flipped)
    verifier = Verifier(tmp_path, {"file": f"sha256:{hashlib.sha256(content).hexdigest()}"})
    found = path.read_bytes()
    for start, end in pieces:
        verifier.saw("file", start * KIB, memoryview(found[start * KIB : end * KIB]))
    verifier.saw("another", 0, memoryview(found))
    assert verifier.damage() == ("" if flipped is None else "bad checksum: file")
    verifier.close()


def test_memory_that_changes_while_it_is_hashed(tmp_path: Path) -> None:
    """Is not taken for damage of the file: that is read once more."""
    content = os.urandom(200 * KIB)
    (tmp_path / "file").write_bytes(content)
    verifier = Verifier(tmp_path, {"file": f"sha256:{hashlib.sha256(content).hexdigest()}"})
    verifier.saw("file", 0, memoryview(bytes(200 * KIB)))
    assert verifier.damage() == ""


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """Is no damage: it cannot be read just now."""
    verifier = Verifier(tmp_path, {"file": "sha256:0"})
    with pytest.raises(FileNotFoundError):
        verifier.damage()


# ── the loads ────────────────────────────────────────────────────────────────────────────────────


def state(seed: int) -> dict[str, Any]:
    """Return a state with tensors and values."""
    return {"model": plain(seed), "big": torch.full((100_000,), float(seed)), "step": seed}


def damaged(ctx: Any, name: str, strict: bool, named: bool) -> Any:
    """Save twice; flip a bit of the newer one; load."""
    for step in (1, 2):
        ctx.checkpoint.save(state(step), step)
    newest = ctx.checkpoint.latest()
    if ctx.distributed.rank == 0:
        path = Path(newest.place, name)
        flip(path, path.stat().st_size // 2)
    ctx.distributed.barrier()
    own = state(7)
    try:
        found = ctx.checkpoint.load(own, strict=strict, uuid=newest if named else None)
    except Exception as error:
        return str(error), [one.step for one in ctx.checkpoint.list()]
    told = bits(own["model"].state_dict()), own["big"].unique().tolist(), own["step"]
    return told, found.step, ctx.checkpoint.latest().step, len(ctx.checkpoint.list())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_the_next_older_one_is_taken(tmp_path: Path, name: str) -> None:
    """On all ranks, and the damaged one is put aside, with the reason."""
    said = in_group(damaged, 2, tmp_path, name, True, False)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    expected = bits(plain(1).state_dict()), [1.0], 1
    assert said[0] == (expected, 1, 1, 1)
    aside = tmp_path / "checkpoints" / ".quarantine"
    (reason,) = aside.glob("step-00000002.r0*.json")
    assert f"bad checksum: {name}" in reason.read_text()


def test_where_a_mixture_could_come_of_it(tmp_path: Path) -> None:
    """With strict=False it is an error: a key that the older one lacks would have a new value."""
    said = in_group(damaged, 2, tmp_path, "__0_0.distcp", False, False)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    told, steps = said[0]
    assert "step-00000002.r0: bad checksum: __0_0.distcp" in told and steps == [1]


def test_one_that_was_asked_for(tmp_path: Path) -> None:
    """It is an error, and stays where it is."""
    said = in_group(damaged, 2, tmp_path, "__1_0.distcp", True, True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    told, steps = said[0]
    assert "step-00000002.r0: bad checksum: __1_0.distcp" in told and steps == [1, 2]


def other_world(ctx: Any, flipped: str) -> Any:
    """Load on another number of ranks what nobody verifies before, since it is known as whole."""
    newest = ctx.checkpoint.list()[-1]
    ctx.checkpoint._opening.known.whole.update(one.uuid for one in ctx.checkpoint.list())
    if flipped and ctx.distributed.rank == 0:
        path = Path(newest.place, flipped)
        flip(path, path.stat().st_size // 2)
    ctx.distributed.barrier()
    own = state(7)
    found = ctx.checkpoint.load(own)
    return found.step, own["big"].unique().tolist()


def saved(ctx: Any) -> None:
    """Save twice."""
    for step in (1, 2):
        ctx.checkpoint.save(state(step), step)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_on_another_number_of_ranks(tmp_path: Path, size: int) -> None:
    """Each file is looked at by one of those that read it."""
    assert in_group(saved, 2, tmp_path) == [None, None]
    assert in_group(other_world, size, tmp_path, "") == [(2, [2.0])] * size
    assert in_group(other_world, size, tmp_path, "__1_0.distcp") == [(1, [1.0])] * size


@pytest.mark.parametrize("mode", ["all", "broadcast", "sequential"])
def test_one_file_for_all_ranks(ranks: Ranks, mode: Any) -> None:
    """Is looked at as well."""

    def work(checkpoint: CheckpointContext, rank: int) -> Any:
        found = [checkpoint.save_ddp({"big": torch.full((50_000,), step)}, step) for step in (1, 2)]
        if rank == 0:
            path = Path(found[1].place, "state.pt")
            flip(path, path.stat().st_size // 2)
        checkpoint._opening.distributed.barrier()
        own = {"big": torch.zeros(50_000, dtype=torch.int64)}
        taken = checkpoint.load_ddp(own, mode=mode)
        assert taken is not None
        return taken.step, own["big"].unique().tolist(), len(checkpoint.list())

    assert ranks.run(2, work).all() == [(1, [1], 1)] * 2
