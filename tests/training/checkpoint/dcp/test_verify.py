"""A flipped bit in what this job has written: found while it is read, by the rank that reads it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.checkpoint import layout
from elaunch.checkpoint.manifests import FileEntry, encode_checked
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.checksums import BLOCK, checksum_of
from elaunch.errors import DamageError
from elaunch.training.checkpoint.dcp.sources import MemoryDamage, Source
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


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────


SIZE = 2400 * KIB


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """Write a file of three blocks, of 1024, 1024 and 352 KiB, and its manifest."""
    content = os.urandom(SIZE)
    (tmp_path / "file").write_bytes(content)
    sealed(tmp_path, checksum_of(tmp_path / "file"))
    return content


def sealed(path: Path, checksum: str) -> None:
    """Write the manifest of the file."""
    entry = FileEntry("file", SIZE, checksum)
    part = ShardHeader(0, 1, "run", {}, "here", 1)
    (path / layout.manifest_name(0)).write_bytes(encode_checked(Stage(1, 0, "u"), part, [entry]))


PIECES = [
    [(0, 300), (300, 2400)],
    [(100, 1100), (1500, 2100)],
    [(1300, 2400), (0, 1300)],
    [(0, 10), (1200, 1201)],
    [],
    [(0, 1100), (200, 1200), (100, 2400)],
]
IDS = ["all", "with gaps", "backwards", "small ones", "nothing", "twice"]


@pytest.mark.parametrize("held", [False, True], ids=["from the file", "from memory"])
@pytest.mark.parametrize("pieces", PIECES, ids=IDS)
@pytest.mark.parametrize("flipped", [None, 0, 1450 * KIB, SIZE - 1])
def test_what_is_read_is_compared(
    tmp_path: Path, content: bytes, pieces: list[tuple[int, int]], flipped: int | None, held: bool
) -> None:
    """All of each block of which something is read, in whatever order."""
    if flipped is not None:
        flip(tmp_path / "file", flipped)
    source = Source("here", tmp_path)
    source.path = tmp_path
    if held:
        source.hold({"file": memoryview((tmp_path / "file").read_bytes())})
    target = memoryview(bytearray(SIZE))
    touched = {at // 1024 for start, end in pieces for at in range(start, end)}
    damaged = flipped is not None and flipped // BLOCK in touched
    says = pytest.raises(MemoryDamage if held else DamageError, match="bad checksum: file")
    with says if damaged else contextlib.nullcontext():
        for number, (start, end) in enumerate(pieces):
            if number % 2:
                assert len(source.read("file", start * KIB, (end - start) * KIB))
            else:
                source.read_into("file", start * KIB, target[start * KIB : end * KIB])
        source.finish()
    source.close()


@pytest.mark.parametrize("flipped", [False, True])
def test_a_checksum_for_the_whole(tmp_path: Path, content: bytes, flipped: bool) -> None:
    """Of the version before: all of the file is read with its first byte."""
    sealed(tmp_path, f"sha256:{hashlib.sha256(content).hexdigest()}")
    if flipped:
        flip(tmp_path / "file", SIZE - 1)
    source = Source("here", tmp_path)
    source.path = tmp_path
    with pytest.raises(DamageError) if flipped else contextlib.nullcontext():
        assert source.read("file", 0, 1) == content[:1]
    source.close()


def test_what_no_manifest_has(tmp_path: Path) -> None:
    """Is read as it is; so is what is in memory before the directory is seen here."""
    (tmp_path / "another").write_bytes(b"some")
    source = Source("here", tmp_path)
    source.path = tmp_path
    assert source.read("another", 0, 4) == b"some"
    source.close()
    unseen = Source("here", tmp_path / "not yet")
    unseen.hold({"file": memoryview(b"more")})
    assert unseen.read("file", 0, 4) == b"more"


def test_a_damaged_manifest(tmp_path: Path, content: bytes) -> None:
    """Is damage as well."""
    (tmp_path / layout.manifest_name(0)).write_bytes(b"{")
    source = Source("here", tmp_path)
    source.path = tmp_path
    with pytest.raises(DamageError, match=r"manifest\.rank-00000\.json is not valid JSON"):
        source.read("file", 0, 1)
    source.close()


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
        found = ctx.checkpoint.load(own, strict=strict, which=newest if named else None)
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


@pytest.mark.slow
def test_where_a_mixture_could_come_of_it(tmp_path: Path) -> None:
    """With strict=False it is an error: a key that the older one lacks would have a new value."""
    said = in_group(damaged, 2, tmp_path, "__0_0.distcp", False, False)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    told, steps = said[0]
    assert "step-00000002.r0: bad checksum: __0_0.distcp" in told and steps == [1]


@pytest.mark.ranks
def test_one_that_was_asked_for(tmp_path: Path) -> None:
    """It is an error, and stays where it is."""
    said = in_group(damaged, 2, tmp_path, "__1_0.distcp", True, True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    told, steps = said[0]
    assert "step-00000002.r0: bad checksum: __1_0.distcp" in told and steps == [1, 2]


def other_world(ctx: Any, flipped: str) -> Any:
    """Load on another number of ranks what nobody verifies before, since it is known as whole."""
    newest = ctx.checkpoint.list()[-1]
    ctx.checkpoint._session.known.whole.update(one.uuid for one in ctx.checkpoint.list())
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
    """Each looks at what it reads."""
    assert in_group(saved, 2, tmp_path) == [None, None]
    assert in_group(other_world, size, tmp_path, "") == [(2, [2.0])] * size
    assert in_group(other_world, size, tmp_path, "__1_0.distcp") == [(1, [1.0])] * size


def from_memory(ctx: Any) -> Any:
    """Save; load out of a memory in which a bit is flipped."""
    ctx.checkpoint.save(state(1), 1)
    newest, rank = ctx.checkpoint.latest(), ctx.distributed.rank
    recalled = []

    def recall(_step: int, _round: int, ranks: Any, *_: Any) -> Any:
        held: dict[int, dict[str, memoryview]] = {}
        for one in ranks:
            names = [f"__{one}_0.distcp", *([".metadata"] if one == 0 else [])]
            content = {name: bytearray(Path(newest.place, name).read_bytes()) for name in names}
            if one == 1:
                content[names[0]][len(content[names[0]]) // 2] ^= 16
            held[one] = {name: memoryview(content[name]) for name in names}
        recalled.append(sorted(held))
        return held

    ctx.checkpoint._session.together(None).saver.recall = recall
    own = state(7)
    found = ctx.checkpoint.load(own)
    told = bits(own["model"].state_dict()), own["big"].unique().tolist(), own["step"]
    assert recalled, rank
    return told, found.step, len(ctx.checkpoint.list())


@pytest.mark.ranks
def test_memory_that_has_changed(tmp_path: Path) -> None:
    """The files are read instead, on all ranks, and stay where they are."""
    said = in_group(from_memory, 2, tmp_path, agent=True)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said[0]
    assert said[0] == ((bits(plain(1).state_dict()), [1.0], 1), 1, 1)


def one_tensor(ctx: Any) -> Any:
    """Save what one rank writes for all."""
    ctx.checkpoint.save({"x": torch.ones(4)}, 1)


def asked_for(ctx: Any) -> Any:
    """Load; return whose shards were asked for, and whose there are."""
    asked, session = set[int](), ctx.checkpoint._session
    saver: Any = SimpleNamespace(recall=lambda _step, _round, ranks, *_: asked.update(ranks) or {})
    session._call = replace(session.together(None), saver=saver)
    found = ctx.checkpoint.load({"x": torch.zeros(4)})
    there = [rank for rank in range(3) if Path(found.place, f"__{rank}_0.distcp").exists()]
    return sorted(asked), there


@pytest.mark.ranks
def test_another_number_of_ranks_asks_for_what_it_reads(tmp_path: Path) -> None:
    """A shard is fetched as a whole: that of the rank's own number may be one that nobody needs."""
    assert in_group(one_tensor, 3, tmp_path) == [None] * 3
    said = in_group(asked_for, 2, tmp_path)
    assert not isinstance(said[0], Raised), said[0]
    first, second = said
    assert second[0] == second[1] == first[1], (first, second)
    assert first[0] == sorted({0, *first[1]})
