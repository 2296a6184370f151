"""Stores of parity: private stores and process groups of all kinds, before and after a restart.

Two workers. In round 0 rank 1 fails after all of it, so round 1 does it again. With the argument
``again`` also the group of the launcher's store is made more than once in one process.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

OUT = os.environ["PARITY_OUT"]
RANK = int(os.environ["RANK"])
ROUND = os.environ["TORCHELASTIC_RESTART_COUNT"]
PATIENCE = timedelta(seconds=60)


def main():
    found = {"round": ROUND, "agent store": os.environ["TORCHELASTIC_USE_AGENT_STORE"]}
    found["env://"] = group(None)
    if "again" in sys.argv:
        found["again in one process"] = group(None)
    found["own store"] = own_store()
    found["tcp://"] = group(f"tcp://127.0.0.1:{agreed_port('tcp')}")
    if "again" in sys.argv:
        found["env:// at last"] = group("env://")
    found["variable"] = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == found["agent store"]
    with open(os.path.join(OUT, f"stores-{ROUND}-{RANK}.json"), "w") as file:
        json.dump(found, file)
    if ROUND == "0":
        # Both have written their files before one of them fails and ends the other.
        wait_for(f"stores-{ROUND}-{1 - RANK}.json")
        if RANK == 1:
            sys.exit(1)
        time.sleep(60)


def group(method):
    """Make a process group, use it and a part of it, and destroy it."""
    dist.init_process_group("gloo", init_method=method, rank=RANK, world_size=2, timeout=PATIENCE)
    value = torch.tensor([RANK + 1])
    dist.all_reduce(value)
    part = dist.new_group([1])
    if RANK == 1:
        dist.all_reduce(value, group=part)
    dist.barrier()
    dist.destroy_process_group()
    return value.item()


def own_store():
    """Make a TCPStore that rank 0 hosts."""
    store = dist.TCPStore("127.0.0.1", agreed_port("own"), 2, RANK == 0, timeout=PATIENCE)
    store.set(f"from {RANK}", "a value")
    found = store.get(f"from {1 - RANK}").decode()
    store.add("left", 1)
    until = time.monotonic() + 60
    while RANK == 0 and store.add("left", 0) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    return found


def agreed_port(name):
    """Return a port that was free on rank 0 a moment ago."""
    path = os.path.join(OUT, f"port-{name}-{ROUND}")
    if RANK == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with open(path + ".part", "w") as file:
            file.write(str(port))
        os.rename(path + ".part", path)
        return port
    wait_for(os.path.basename(path))
    with open(path) as file:
        return int(file.read())


def wait_for(name):
    until = time.monotonic() + 60
    while not os.path.exists(os.path.join(OUT, name)):
        assert time.monotonic() < until, name
        time.sleep(0.01)


if __name__ == "__main__":
    main()
