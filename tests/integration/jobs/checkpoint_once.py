"""Save twice, alone and without torch, so that every system call of it can be looked at: ``DIR``.

The first as a script that writes its files itself, the second as an agent that writes memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import elaunch
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    with elaunch.init(announce=False) as ctx:
        with ctx.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
            (path / "deep").mkdir()
            (path / "deep" / "data.bin").write_bytes(bytes(5000))
            (path / "more.bin").write_bytes(b"more")
        storage = open_storage(directory)
        stage = Stage(2, 0, "once")
        storage.open_stage(stage)
        images = [Image("deep/data.bin", [bytes(5000)]), Image("more.bin", [b"mo", b"re"])]
        part = ShardHeader(0, 1, storage.listed()[0].run_id, {"steps_completed": 2})
        storage.write_shard(stage, part, images)
        storage.commit(stage, lambda: None)
