"""Save by torch.distributed.checkpoint's own asynchronous process, and leave it alone: ``DIR``.

Step 1 is saved by ``ctx.checkpoint.commit`` when the process is done. In round 0 the worker is then
killed while that process writes step 2, slowly, to the path that the next commit would take. Each
round prints ``resumes from STEP`` and ``orphan alive: BOOL``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import elaunch


class Slow(dcp.FileSystemWriter):
    """Says which process it is, and takes a while."""

    def __init__(self, path: Path, marks: Path) -> None:
        super().__init__(path)
        self.marks = marks

    def finish(self, metadata: Any, results: Any) -> None:
        """Write .metadata after the trainer's death."""
        (self.marks / "orphan").write_text(str(os.getpid()))
        until = time.monotonic() + 30
        while not (self.marks / "go").exists() and time.monotonic() < until:
            time.sleep(0.01)
        super().finish(metadata, results)
        (self.marks / "finished").touch()


def main() -> None:
    """Save, save in another process, end."""
    marks = Path(sys.argv[1])
    with elaunch.init(timeout=60, announce=False) as ctx:
        dist.init_process_group("gloo")
        latest = ctx.checkpoint.latest()
        print(f"resumes from {None if latest is None else latest.step}", flush=True)
        state = {"weights": torch.ones(1000)}
        if ctx.info.round == 0:
            path = ctx.checkpoint.stage_path(1)
            dcp.save(state, checkpoint_id=path)
            ctx.checkpoint.commit(path, 1)
            path = ctx.checkpoint.stage_path(2)
            kind = AsyncCheckpointerType.PROCESS
            dcp.async_save(state, storage_writer=Slow(path, marks), async_checkpointer_type=kind)
            while not (marks / "orphan").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        orphan = (marks / "orphan").read_text()
        print(f"orphan alive: {Path(f'/proc/{orphan}').exists()}", flush=True)
        (marks / "go").touch()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
