"""Train nothing, step by step, until ``DIR/stop`` is there; then all ranks end with 0.

Arguments: the directory ``DIR``, which all nodes share, then any of these words:

=============  =================================================================================
gloo           the ranks meet at the start and in each step, as in training
time=SECONDS   of one step (0.02)
save=N         rank 0 saves ``DIR/step_<step>.pt``, whole, after each N-th step
fail=RkN,…     rank R exits with 7 in round k when ``DIR/fail.<round>`` is there (``1r0``)
=============  =================================================================================

Each worker prints ``up rank=R round=K pid=P``; then, in the first and each 25th step,
``step N rank R world W round K``; at its end ``done …``. It writes the wall clock, which all nodes
of a test share, into ``DIR/began.<round>.<rank>`` once and into ``DIR/seen.<round>.<rank>`` in each
step: what a worker did that should have been dead can be seen there.
"""

import os
import sys
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ["ELAUNCH_ROUND"])
SHOWN = 25


def say(text):
    # One write: a line is never cut, whatever else writes to the same pipe.
    os.write(1, f"{text}\n".encode())


def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)


def no_reduce(wanted):
    return wanted


def gloo():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def reduce(wanted):
        total = torch.tensor([1.0, float(wanted)])
        dist.all_reduce(total)
        assert total[0].item() == SIZE, total
        return total[1].item() == SIZE

    return reduce


def save(directory, step):
    import pickle
    import zipfile

    path = directory / f"step_{step}.pt"
    with zipfile.ZipFile(path.with_suffix(".tmp"), "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"step": step}))
    path.with_suffix(".tmp").rename(path)


def main(directory, words):
    given = dict(word.partition("=")[::2] for word in words)
    seconds, every = float(given.get("time", 0.02)), int(given.get("save", 0))
    fails = f"{RANK}r{ROUND}" in given.get("fail", "").split(",")
    say(f"up rank={RANK} round={ROUND} pid={os.getpid()}")
    say(f"resume rank={RANK} round={ROUND} from={os.environ['ELAUNCH_RESUME_STEP']}")
    agree = gloo() if "gloo" in given else no_reduce
    write(directory / f"began.{ROUND}.{RANK}", repr(time.time()))
    first = step = int(os.environ["ELAUNCH_RESUME_STEP"] or 0)
    while not agree((directory / "stop").exists()):
        step += 1
        write(directory / f"seen.{ROUND}.{RANK}", repr(time.time()))
        if step == first + 1 or step % SHOWN == 0:
            say(f"step {step} rank {RANK} world {SIZE} round {ROUND}")
        if fails and (directory / f"fail.{ROUND}").exists():
            os._exit(7)
        if every and step % every == 0 and RANK == 0:
            save(directory, step)
        time.sleep(seconds)
    say(f"done rank={RANK} round={ROUND} step={step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
