"""elaunch.training.distributed between machines: network namespaces, with links that fail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.launching import Running

pytestmark = pytest.mark.slow

HEAD = """
import os, sys
from elaunch import CollectiveError, CollectiveTimeout, DistributedContext, PeerLost
rank, size, local_size, chief = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ctx = DistributedContext(rank=rank, size=size, local_rank=rank % local_size, local_size=local_size,
    cross_rank=rank // local_size, cross_size=size // local_size, chief_ip=chief, chief_port=4711)
def say(*words):
    print(*words, flush=True)
try:
    ctx.open(timeout=60)
    exec(open(sys.argv[5]).read())
except CollectiveError as error:
    say(type(error).__name__, error.missing, error)
ctx.close()
"""


@pytest.fixture
def start(cluster: Callable[[int], Cluster], tmp_path: Path) -> Callable[..., list[Running]]:
    """Start ranks, ``start(nodes, local_size, script)``; rank 0's node hosts the store."""

    def begin(nodes: Cluster, local_size: int, script: str, chief: str = "node1") -> list[Running]:
        head, body = tmp_path / "rank.py", tmp_path / "body.py"
        head.write_text(HEAD)
        body.write_text(script)
        size = local_size * len(nodes.nodes)
        return [
            nodes.nodes[rank // local_size].popen(
                [sys.executable, head, str(rank), str(size), str(local_size), chief, body]
            )
            for rank in range(size)
        ]

    return begin


TALK = """
import hashlib
assert ctx.node_addrs == ("10.20.0.1", "10.20.0.2", "10.20.0.3"), ctx.node_addrs
blob = os.urandom(1 << 20) * (1 + rank)
sums = ctx.allgather(hashlib.sha256(blob).digest())
for _ in range(2):
    assert [hashlib.sha256(b).digest() for b in ctx.allgather(blob)] == sums
    found = ctx.gather(blob)
    assert (found is None) == (rank > 0)
    assert not found or [hashlib.sha256(b).digest() for b in found] == sums
    assert hashlib.sha256(ctx.broadcast(blob)).digest() == sums[0]
    assert ctx.allgather_local(rank) == [rank // 2 * 2, rank // 2 * 2 + 1]
for step in range(50):
    assert ctx.allgather((rank, step)) == [(r, step) for r in range(size)]
say("ok")
"""


@pytest.mark.trial
def test_three_machines_of_two(
    cluster: Callable[[int], Cluster], start: Callable[..., list[Running]]
) -> None:
    """Over the store of one of them."""
    for running in start(cluster(3), 2, TALK):
        done = running.wait()
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_a_host_name_that_is_loopback_on_its_own_machine(
    cluster: Callable[[int], Cluster], start: Callable[..., list[Running]]
) -> None:
    """As Debian's installer has it: the others' way to it tells its address."""
    nodes = cluster(3)
    hosts = nodes[1].machine.directory / "hosts"
    hosts.write_text("127.0.1.1 node1\n" + hosts.read_text().replace("10.20.0.1 node1\n", ""))
    addresses = ("10.20.0.1", "10.20.0.2", "10.20.0.3")
    script = f"""
assert ctx.node_addrs == {addresses}, ctx.node_addrs
assert ctx.allgather(rank) == [0, 1, 2]
say("ok")
"""
    for running in start(nodes, 1, script):
        done = running.wait()
        assert (done.returncode, done.stdout) == (0, "ok\n")


def test_a_machine_that_is_cut_off_is_named_at_the_deadline(
    cluster: Callable[[int], Cluster], start: Callable[..., list[Running]]
) -> None:
    """By the others, and it names them: neither knows more."""
    script = """
ctx.barrier()
say("met")
import threading
while not os.path.exists("CUT"):
    threading.Event().wait(0.02)
ctx.allgather(b"x" * (1 << 20), timeout=2)
"""
    nodes = cluster(2)
    flag = nodes.directory / "cut"
    ranks = start(nodes, 1, script.replace("CUT", str(flag)))
    for running in ranks:
        running.wait_for_line("met")
    nodes.partition([nodes[1]], [nodes[2]])
    flag.touch()
    for rank, running in enumerate(ranks):
        said = running.wait().stdout
        assert f"CollectiveTimeout ({1 - rank},) allgather #2" in said
        assert f"rank {1 - rank} (host node{2 - rank}, " in said


@pytest.mark.trial
def test_a_machine_that_loses_power_in_a_large_call(
    cluster: Callable[[int], Cluster], start: Callable[..., list[Running]]
) -> None:
    """The deadline holds for what is under way too, and all name the same machine."""
    script = """
ctx.barrier()
say("met")
while True:
    ctx.allgather(b"x" * (4 << 20), timeout=5)
"""
    nodes = cluster(3)
    ranks = start(nodes, 1, script)
    for running in ranks:
        running.wait_for_line("met")
    nodes.power_off(nodes[3])
    for running in ranks[:2]:
        said = running.wait().stdout
        assert "rank 2 (host node3, " in said and "(2,)" in said, said
