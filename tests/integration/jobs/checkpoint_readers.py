"""Read what one process saves again and again, from many: ``DIR MODE READERS SECONDS``.

MODE ``elaunch``: ``store_path``, which keeps two, and readers that look for the newest and hold it
while they read; ``plain``: ``torch.save`` to one name. Prints ``{"saved": n, "read": n,
"failed": n, "why": {"an error": n}}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import elaunch
import elaunch.training.context
from elaunch.checkpoint.retention import reading
from elaunch.checkpoint.search.latest import find_latest

SIZE = 20_000
PAUSE_S = 0.03
LEAST, SAVES = 2, 5
"""Reads of each reader, and saves, however busy the machine is."""
LATE_S = 60.0


def state_of(step: int) -> dict[str, Any]:
    """Return what is saved at a step."""
    return {"step": step, "weights": torch.full((SIZE,), float(step))}


def check(state: dict[str, Any]) -> None:
    """Raise ValueError for a mixture."""
    if not bool((state["weights"] == state["step"]).all()):
        raise ValueError("torn")


def read_elaunch(directory: Path) -> bool:
    """Read the newest; False if it was removed before it was held."""
    found = find_latest(directory).checkpoint
    if found is None:
        return False
    try:
        hold = reading(found.path)
        hold.__enter__()
    except FileNotFoundError:
        return False
    try:
        check(torch.load(found.path / "state.pt", weights_only=True))
    finally:
        hold.__exit__(None, None, None)
    return True


def read_plain(directory: Path) -> bool:
    """Read the one file."""
    path = directory / "state.pt"
    if not path.exists():
        return False
    check(torch.load(path, weights_only=True))
    return True


def reader(read: Callable[[Path], bool], directory: Path, until: float) -> dict[str, Any]:
    """Read until then, and on a busy machine until something was read."""
    done, failed, why = 0, 0, Counter[str]()
    while time.monotonic() < until or (done + failed < LEAST and time.monotonic() < until + LATE_S):
        try:
            done += read(directory)
        except Exception as error:  # whatever a reader can run into is what is counted
            failed += 1
            why[f"{type(error).__name__}: {error}"[:100]] += 1
        time.sleep(PAUSE_S)
    return {"read": done, "failed": failed, "why": dict(why.most_common(3))}


def write_elaunch(directory: Path, until: float) -> int:
    """Commit until then, SAVES times at least; return how often."""
    os.environ["ELAUNCH_CHECKPOINT_DIR"] = str(directory)
    step = 0
    with elaunch.init(announce=False) as ctx:
        while time.monotonic() < until or step < SAVES:
            step += 1
            metadata = {"steps_completed": step}
            with ctx.checkpoint.store_path(metadata, keep=elaunch.Keep(last=2)) as (path, _):
                torch.save(state_of(step), path / "state.pt")
    return step


def write_plain(directory: Path, until: float) -> int:
    """Write in place until then; return how often."""
    step = 0
    while time.monotonic() < until or step < SAVES:
        step += 1
        torch.save(state_of(step), directory / "state.pt")
    return step


def fork(work: Callable[[], Any]) -> int:
    """Start it in a process; return where its answer can be read."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, json.dumps(work()).encode())
        os._exit(0)
    os.close(writes)
    return reads


def main() -> None:
    """Start them, and add up."""
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    until = time.monotonic() + float(sys.argv[4])
    read = read_elaunch if mode == "elaunch" else read_plain
    write = write_elaunch if mode == "elaunch" else write_plain
    pipes = [fork(lambda: write(directory, until))]
    pipes += [fork(lambda: reader(read, directory, until)) for _ in range(int(sys.argv[3]))]
    saved, *found = [json.load(os.fdopen(pipe)) for pipe in pipes]
    total = {name: sum(one[name] for one in found) for name in ("read", "failed")}
    why = sum((Counter(one["why"]) for one in found), Counter())
    print(json.dumps({"saved": saved, **total, "why": why}))


if __name__ == "__main__":
    main()
