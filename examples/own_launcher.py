"""The same tutorial with a launcher of its own: the script starts itself once per slot.

::

    elaunch run examples/own_launcher.py launcher
    python examples/own_launcher.py launcher
    elaunch run --nproc-per-node 4 examples/own_launcher.py

The last one needs no launcher: what ``launch`` does, and more, ``elaunch run`` does for any script.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed, wait

import increment

import elaunch

SLOTS = int(os.environ.get("SLOTS", "4"))


def launch(node: int) -> int:
    """Start a worker per slot and wait for all; the first failure ends the others, is returned."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    command = [sys.executable, __file__, "worker"]
    places = [[str(node * SLOTS + slot), str(slot)] for slot in range(SLOTS)]
    workers = [subprocess.Popen([*command, *place]) for place in places]
    with ThreadPoolExecutor(SLOTS) as threads:
        ends = [threads.submit(worker.wait) for worker in workers]
        try:
            code = next(filter(None, (end.result() for end in as_completed(ends))), 0)
            return code if code >= 0 else 128 - code
        finally:  # nothing is left to do where all have ended
            for worker in workers:
                worker.terminate()
            wait(ends, timeout=5)
            for worker in workers:
                worker.kill()


if __name__ == "__main__":
    info, distributed = elaunch.info(), None
    if sys.argv[1:] == ["launcher"]:
        sys.exit(launch(info.node_rank))
    if sys.argv[1:2] == ["worker"]:
        rank, local_rank = map(int, sys.argv[2:])
        mine = {"rank": rank, "local_rank": local_rank, "cross_rank": info.node_rank}
        all_ = {"size": info.nodes * SLOTS, "local_size": SLOTS, "cross_size": info.nodes}
        distributed = elaunch.DistributedContext(**mine, **all_, chief_ip=info.node_addrs[0])
    elif sys.argv[1:]:
        raise ValueError(f"{sys.argv[1]}: neither launcher nor worker")
    with elaunch.init(name="own_launcher", distributed=distributed) as ctx:
        increment.main(ctx, steps=100, seconds=0.01)
