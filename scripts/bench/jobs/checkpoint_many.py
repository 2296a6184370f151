"""Make many checkpoints in a directory, and look there for the newest, and for one by its name.

Arguments: a directory that is not there, how many, of how many ranks. Prints JSON: the processor
time in seconds of each look, the files in the page cache. One is written by elaunch; the others
have its files as hard links and documents of their own, as a commit makes them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.search.latest import find_latest
from elaunch.checkpoint.storage.storage import Image, ShardHeader, Stage, open_storage

DOCUMENTS = (layout.METADATA, layout.COMMIT)


def main() -> None:
    """Do it."""
    root, count, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    storage, stage = open_storage(root), Stage(0, 0, uuid.uuid4().hex)
    storage.prepare("many", given=True)
    for rank in range(ranks):
        part = ShardHeader(rank, ranks, "many", {layout.STEPS_COMPLETED: 0})
        storage.write_shard(stage, part, [Image(f"__{rank}_0.distcp", [bytes(1000)])])
    extra = {"metrics": {"loss": 1.5}, "versions": {"torch": "2.13.0"}}
    first = Path(storage.commit(stage, lambda: None, extra).place)
    for step in range(1, count):
        _copy(first, root, step)
    looks = {}
    for name, look in (
        ("search", lambda: find_latest(root).checkpoint),
        ("name", lambda: open_storage(root).find(layout.step_name(count // 2, 0))),
    ):
        look()  # imports, and fills the page cache
        begun = time.process_time()
        found = look()
        looks[name] = time.process_time() - begun
        assert found is not None
        assert found.step == (count - 1 if name == "search" else count // 2)
    print(json.dumps(looks))


def _copy(first: Path, root: Path, step: int) -> None:
    """Make the checkpoint of ``step`` out of the first one."""
    path = root / layout.step_name(step, 0)
    path.mkdir()
    for name in set(os.listdir(first)) - set(DOCUMENTS):
        os.link(first / name, path / name)
    described = json.loads((first / layout.METADATA).read_bytes())
    described |= {"step": step, "uuid": uuid.uuid4().hex}
    content = json.dumps(described).encode()
    (path / layout.METADATA).write_bytes(content)
    commit = json.loads((first / layout.COMMIT).read_bytes())
    commit[layout.METADATA_SUM] = layout.checksum(content)
    (path / layout.COMMIT).write_text(json.dumps(commit))


if __name__ == "__main__":
    main()
