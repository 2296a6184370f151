"""Stages and shards for the tests of storages: small, each with a content of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from elaunch.checkpoint.storage.storage import Committed, Image, ShardHeader, Stage, Storage


def stage(step: int = 120, round_: int = 3) -> Stage:
    """Return a new stage."""
    return Stage(step, round_, str(uuid4()))


def header(rank: int, world_size: int = 2, step: int = 120, **metadata: Any) -> ShardHeader:
    """Return the header of a rank's shard, of run "digits"."""
    return ShardHeader(rank, world_size, "digits", {"steps_completed": step, **metadata})


def write(
    storage: Storage, at: Stage, files: Mapping[int, Mapping[str, bytes]] | None = None
) -> None:
    """Write all ranks' shards and manifests; ``files``: rank → name → content."""
    files = files or {rank: {f"rank{rank}.bin": bytes([rank]) * 1000} for rank in range(2)}
    for rank, content in files.items():
        images = [Image(name, [data]) for name, data in content.items()]
        storage.write_shard(at, header(rank, len(files), at.step), images)


def save(storage: Storage, step: int = 120, round_: int = 3) -> Committed:
    """Write and commit a checkpoint of two ranks."""
    at = stage(step, round_)
    write(storage, at)
    return storage.commit(at, lambda: None)


def save_scripts_files(storage: Storage, step: int = 120, round_: int = 3) -> Committed:
    """Commit what the scripts of two ranks wrote: own files, and one that both wrote."""
    at = stage(step, round_)
    for rank in range(2):
        below = storage.open_stage(at, rank)
        (below / "sub").mkdir()
        for name, content in ((f"sub/{rank}.bin", bytes([rank])), ("both.bin", b"both")):
            (below / name).write_bytes(content)
        storage.write_manifest(at, header(rank, 2, step), storage.own_files(at, below), below)
    return storage.commit(at, lambda: None)


def finish_what_is_held(storage: Storage) -> None:
    """Finish stages of which agents have shards in memory, then the same when they have none.

    What is held is committed where the storage has all of it, however long ago its round was.
    """
    whole, half = stage(1), stage(2)
    write(storage, whole)
    storage.write_shard(half, header(0, step=2), [Image("a", [b"x"])])
    after, held = whole.round + 2, [whole.name, half.name]
    done = storage.finish_stages("digits", after=after, held=held)
    assert [found.uuid for found in done] == [whole.uuid]
    assert storage.manifests(half).keys() == {0}
    assert storage.finish_stages("digits", after=after) == []
    assert storage.manifests(half) == {}
