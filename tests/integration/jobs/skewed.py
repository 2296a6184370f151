"""Train nothing, each rank at a pace of its own, until should_preempt() says to end.

Arguments: ``DIR SKEW MEET ASKER``. In each step rank R sleeps R times SKEW seconds and up to 10 ms
by chance; every MEET steps the ranks meet (0: never). Rank ASKER asks for the end by itself once
``DIR/ask`` is there (-1: none does). Each rank writes ``DIR/up.<rank>`` after two calls that said
no, and into ``DIR/end.<rank>`` the number of the call that said yes.
"""

import random
import sys
import time
from pathlib import Path

import elaunch


def main(directory, skew, meet, asker):
    with elaunch.init(timeout=60, announce=False) as ctx:
        rank, step = ctx.distributed.rank, 0
        while True:
            step += 1
            time.sleep(rank * skew + random.uniform(0, 0.01))
            if meet and step % meet == 0:
                assert ctx.distributed.allgather(step) == [step] * ctx.distributed.size
            if rank == asker and (directory / "ask").exists():
                ctx.preempt.request("a rank's own wish")
            if ctx.preempt.should_preempt():
                break
            if step == 2:
                (directory / f"up.{rank}").touch()
        (directory / f"end.{rank}").write_text(str(step))
        # Once told, always told.
        assert all(ctx.preempt.should_preempt() for _ in range(3))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:]))
