"""A job whose agent writes its checkpoints, without torch: 2 ranks, 4 bytes each.

Arguments: the checkpoint directory, then words:

==============  =================================================================================
``K:kill=R``    when step K was handed over in round 0, rank R is killed at once
``K:wait``      when step K was handed over in round 0, all wait to be ended
``K:leave``     when step K was handed over, all end at once, without a word, with 0
==============  =================================================================================
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import elaunch
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.training.checkpoint.saver import connected
from elaunch.wire.worker import StagedShard

STEPS = (10, 20, 30)
LONG = 60.0

place, words = Path(sys.argv[1]), sys.argv[2:]
with elaunch.init(announce=False) as ctx:
    ranks, info = ctx.distributed, ctx.info
    storage = open_storage(place)
    if ranks.rank == 0:
        storage.prepare(info.run_id, given=True)
    ranks.barrier()
    saver, lacks = connected(ctx._agent, ranks.placement, str(storage.place), info.round)
    assert saver is not None, lacks
    begin = info.resume_step or 0
    if info.resume_from is not None:
        found = storage.find(info.resume_from.name)
        parts = saver.recall(found.step, found.round, [0, 1], found.uuid, LONG)
        said = sorted(bytes(part).decode() for files in parts.values() for part in files.values())
        print(f"{ranks.rank} resumes from {info.resume_from.name}, in memory: {said}", flush=True)
        ranks.barrier()
    for step in [step for step in STEPS if step > begin]:
        assert saver.begin(True, LONG)
        saver.memory(4)[:4] = b"%02d.%d" % (step, ranks.rank)
        stage = Stage(step, info.round, ranks.broadcast(os.urandom(4).hex()))
        part = ShardHeader(ranks.rank, ranks.size, info.run_id, {"steps_completed": step})
        saver.staged(StagedShard(stage, part, ((f"part-{ranks.rank}", ((0, 4),)),)))
        ranks.barrier()
        print(f"{ranks.rank} handed over {step}", flush=True)
        if info.round == 0 and f"{step}:kill={ranks.rank}" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{step}:leave" in words:
            os._exit(0)
        if info.round == 0 and any(word.startswith(f"{step}:") for word in words):
            threading.Event().wait(LONG)
    saver.wait(LONG)
    saver.close()
