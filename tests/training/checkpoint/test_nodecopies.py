"""What nodes with a directory each send each other: how much, to whom, and what if one cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.training.checkpoint.rig import HEAD, TAIL, Job
from tests.training.rankrig import PATIENCE

MIB = 1 << 20
SIZE = 24 * MIB
"""Bytes of a file of two pieces."""

LITTLE = """
import resource
def little_memory(bytes):
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + bytes, resource.RLIM_INFINITY))
"""

LACKING = f"""
def received():
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {{name.strip(): int(rest.split()[0]) for name, rest in (l.split(":") for l in lines)}}
    return sum(count for name, count in counts.items() if name != "lo")

local = ctx.distributed.local_rank
store(1, {{str(rank): "x" * ({SIZE} if rank == 0 else 1)}})
with ck.restore_path() as path:
    pass
if rank == 4:
    (path / "0").unlink()
ctx.distributed.barrier()
before = received()
if local:
    little_memory({8 * MIB})
with ck.restore_path() as path:
    size = (path / "0").stat().st_size
say(json.dumps([size, received() - before]))
"""


@pytest.mark.slow
def test_a_file_travels_once_for_each_node_that_lacks_it(
    cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    """No other node receives it; nor does a rank of that node that has no memory for a piece."""
    nodes = cluster(3).nodes
    script = tmp_path / "rank.py"
    script.write_text(HEAD.replace("TIMEOUT", str(PATIENCE)) + LITTLE + LACKING + TAIL)
    started = []
    for rank in range(6):
        node, local = divmod(rank, 2)
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": 6,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": 3,
            "MASTER_ADDR": "node1",
            "MASTER_PORT": 4711,
            "ELAUNCH_CHECKPOINT_DIR": tmp_path / f"copies{node}",
            "ELAUNCH_CHECKPOINT_LOCAL": 1,
        }
        env = {name: str(value) for name, value in numbers.items()}
        started.append(nodes[node].popen([sys.executable, script], env))
    said = []
    for running in started:
        done = running.wait(2 * PATIENCE)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert [size for size, _ in said] == [SIZE] * 6
    of_nodes = [max(count for _, count in said[at : at + 2]) for at in (0, 2, 4)]
    assert SIZE <= of_nodes[2] < SIZE + 2 * MIB, of_nodes
    assert max(of_nodes[:2]) < 2 * MIB, of_nodes


@pytest.mark.slow
def test_a_rank_that_cannot_read_what_others_lack(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """All ranks raise and name it; what they gather afterwards is what they give."""
    env = {
        "ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "node{node}"),
        "ELAUNCH_CHECKPOINT_LOCAL": "1",
    }
    script = f"""
import elaunch.training.checkpoint.nodecopies as nodecopies
with ck.store_path({{"steps_completed": 1}}, shard=True) as (path, _):
    with open(path / str(rank), "w") as file:
        file.truncate({64 * MIB} if rank == 0 else 1)
nodecopies.PIECE = {64 * MIB}  # no memory of that size lies here, to be used again
if rank == 0:
    little_memory({16 * MIB})
def read():
    with ck.restore_path("step-00000001.r0"):
        return "read"
said = tried(read)
after = ctx.distributed.allgather(rank)
if rank == 0:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
say(json.dumps([said, after, tried(read)]))
"""
    said: list[Any] = start(LITTLE + script, 2, nodes=2, env=env).said()
    assert said[0] == said[1]
    error, after, again = said[0]
    assert error.startswith("CheckpointError: ") and "rank 0 on host" in error, error
    assert "reading 0: MemoryError" in error
    assert after == [0, 1] and again == "read"
