"""A worker without torch that saves and loads what its arguments say; the words of ``act.py``, and:

=================  =============================================================================
action             what it does
=================  =============================================================================
save=STEP[,SIZE]   store_path(shard=True): each rank writes ``part-RANK.bin`` (100 bytes)
calm=STEP[,SIZE]   the same; its error is printed, ``refused STEP: …``, and all goes on
load               print ``loaded STEP of ROUND, saved by N``, once the content was checked; or
                   ``nothing to load``
stale=STEP,ROUND   rank 0 commits a checkpoint as a worker of an earlier round would, and prints
                   ``refused STEP: …``; its stage stays, as if it had been killed then
late=STEP          commit a directory with ``part-RANK.bin`` in it; a process that still has its
                   file open writes to it afterwards
=================  =============================================================================
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import act  # from the script's own directory
import checkpoint_fault

import elaunch
from elaunch.checkpoint.storage.storage import ShardHeader, Stage, open_storage


def content(step: int, rank: int, size: int) -> bytes:
    """Return what a rank writes."""
    line = b"%d %d;" % (step, rank)
    return (line * (size // len(line) + 1))[:size]


def actions(ctx: elaunch.Context) -> dict[str, Callable[[str], None]]:
    """Return the actions that this file adds."""
    rank = ctx.distributed.rank

    def save(value: str) -> None:
        step, size = (int(word) for word in f"{value},100".split(",")[:2])
        metadata = {"steps_completed": step, "size": size}
        with ctx.checkpoint.store_path(metadata, shard=True) as (path, _):
            (path / f"part-{rank}.bin").write_bytes(content(step, rank, size))
        act.say(f"saved {step}")

    def calm(value: str) -> None:
        try:
            save(value)
        except (elaunch.SaveError, OSError) as error:
            act.say(f"refused {value.partition(',')[0]}: {type(error).__name__}: {error}")

    def load(_: str) -> None:
        latest = ctx.checkpoint.latest()
        if latest is None:
            act.say("nothing to load")
            return
        with ctx.checkpoint.restore_path() as path:
            size = ctx.checkpoint.get_metadata()["size"]
            for other in range(latest.world_size):
                found = (path / f"part-{other}.bin").read_bytes()
                assert found == content(latest.step, other, size), (latest, other)
        act.say(f"loaded {latest.step} of {latest.round}, saved by {latest.world_size}")

    def stale(value: str) -> None:
        step, round_ = map(int, value.split(","))
        if rank != 0:
            return
        storage = open_storage(ctx.checkpoint.directory)
        stage = Stage(step, round_, uuid.uuid4().hex)
        (storage.open_stage(stage) / "part-0.bin").write_bytes(content(step, 0, 100))
        metadata = {"steps_completed": step, "size": 100}
        storage.write_manifest(stage, ShardHeader(0, 1, ctx.info.run_id, metadata), ["part-0.bin"])
        try:
            saver = ctx.checkpoint._session.alone().saver
            storage.commit(stage, lambda: saver.fence(round_))
        except elaunch.SaveError as error:
            act.say(f"refused {step}: {error}")

    def late(value: str) -> None:
        step = int(value)
        own = ctx.checkpoint.stage_path(step)
        file = os.open(own / f"part-{rank}.bin", os.O_WRONLY | os.O_CREAT)
        os.write(file, content(step, rank, 100))
        metadata = {"size": 100}
        ctx.distributed.barrier()
        committed = ctx.checkpoint.commit(own, step, metadata)
        pid = os.fork()
        if pid == 0:
            os.pwrite(file, b"late", 50)
            os._exit(0)
        os.waitpid(pid, 0)
        act.say(f"saved {committed.step}")

    return {"save": save, "calm": calm, "load": load, "stale": stale, "late": late}


def main() -> None:
    """Do what the arguments say."""
    directory = Path(sys.argv[1])
    (directory / f"pid.{act.ROUND}.{act.RANK}").write_text(str(os.getpid()))
    checkpoint_fault.arm("worker")
    with elaunch.init(timeout=60, announce=False) as ctx:
        act.ACTIONS.update(actions(ctx))
        act.main(sys.argv[2:])


if __name__ == "__main__":
    main()
