"""elaunch.training.distributed: ranks as processes of their own, and a job of one rank."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elaunch.errors import ContextError, PlacementError
from elaunch.training.distributed import DistributedContext
from tests.launching import free_port
from tests.training.rankrig import PATIENCE, ROOT, Processes, StoreHost, in_threads

Start = Callable[..., Processes]


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """One store for all tests of this module."""
    yield StoreHost()


@pytest.fixture
def start(host: StoreHost) -> Iterator[Start]:
    """Start ranks as processes: ``start(size, script)``; none is left behind."""
    started: list[Processes] = []

    def begin(size: int, script: str, job: str = "", *, executed: bool = False) -> Processes:
        started.append(Processes(host, size, script, job, executed=executed))
        return started[-1]

    yield begin
    for processes in started:
        processes.close()


def ends_well(processes: Processes, said: list[str]) -> None:
    """Every rank ends with 0, has said this, and not a word on stderr."""
    for rank, expected in enumerate(said):
        assert processes.ends(rank) == (0, expected, "")


@pytest.mark.slow
def test_the_four_calls_need_neither_torch_nor_numpy(start: Start) -> None:
    """Nothing of what a script does not use itself is imported."""
    script = """
assert ctx.allgather(ctx.rank) == [0, 1, 2]
assert ctx.gather(b"x" * 500_000) == ([b"x" * 500_000] * 3 if ctx.rank == 0 else None)
assert ctx.broadcast({"from": ctx.rank}) == {"from": 0}
ctx.barrier()
assert ctx.allgather_local(ctx.local_rank) == [0, 1, 2]
assert ctx.node_addrs == ("127.0.0.1",)
ctx.close(); ctx.close()
say(sorted({"torch", "numpy", "asyncio", "multiprocessing"} & set(sys.modules)))
"""
    ends_well(start(3, script, executed=True), ["[]\n"] * 3)


@pytest.mark.slow
def test_a_blob_of_7_mb_arrives(start: Start) -> None:
    """Whole, from every rank to every rank."""
    script = """
blob = os.urandom(1 << 20) * 7
import hashlib
sums = ctx.allgather(hashlib.sha256(blob).digest())
found = ctx.allgather(blob)
assert [hashlib.sha256(each).digest() for each in found] == sums
say("ok")
"""
    ends_well(start(2, script), ["ok\n"] * 2)


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_large_call_is_named_at_once(start: Start) -> None:
    """Not at the deadline, which is minutes away."""
    script = """
blob = b"x" * (4 << 20)
ctx.barrier()
if ctx.rank == 2:
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
say(os.getpid())
try:
    while True:
        ctx.allgather(blob)
except PeerLost as error:
    say(error.missing, error)
"""
    processes = start(4, script)
    pid = processes.line(2)
    begun = time.monotonic()
    for rank in (0, 1, 3):
        code, said, problems = processes.ends(rank)
        assert code == 0 and not problems
        assert "(2,)" in said and "rank 2 (host " in said and f"pid {pid}) has ended" in said
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.slow
def test_a_chief_that_is_killed_is_named_by_its_whole_node(start: Start) -> None:
    """It is the one that all were connected to."""
    script = """
ctx.barrier()
if ctx.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ctx.allgather(1)
except PeerLost as error:
    say(error.missing, error)
"""
    processes = start(3, script)
    for rank in (1, 2):
        assert "(0,) allgather #2: rank 0 (host " in processes.ends(rank)[1]


@pytest.mark.slow
def test_the_rank_that_hosts_the_store_is_named_when_it_is_killed(start: Start) -> None:
    """The store is lost with it, maybe before the others know that all came to the barrier."""
    script = f"""
ctx = DistributedContext(rank=ctx.rank, size=3, local_rank=ctx.rank, local_size=3, cross_rank=0,
    cross_size=1, chief_port={free_port()})
try:
    ctx.barrier()
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.allgather(1)
except PeerLost as error:
    say(error.missing, error)
"""
    processes = start(3, script)
    for rank in (1, 2):
        assert re.match(
            r"\(0,\) (barrier #1|allgather #2): rank 0 \(host ", processes.ends(rank)[1]
        )


@pytest.mark.slow
def test_a_frozen_rank_is_said_to_be_stopped(start: Start) -> None:
    """Its machine knows it."""
    script = """
ctx.barrier()
say("met")
if ctx.rank == 1:
    signal.pause()
try:
    ctx.allgather(1, timeout=3.0)
except CollectiveTimeout as error:
    say(error.missing, error)
"""
    processes = start(3, script)
    assert [processes.line(rank) for rank in range(3)] == ["met"] * 3
    processes.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        code, said, problems = processes.ends(rank)
        assert (code, problems) == (0, "")
        assert "(1,)" in said and "is stopped" in said


@pytest.mark.slow
def test_sigint_in_a_call_ends_that_rank_and_tells_the_others(start: Start) -> None:
    """A call can be interrupted like any other wait."""
    script = """
ctx.barrier()
if ctx.rank == 0:
    signal.pause()
try:
    say("in")
    ctx.allgather(1)
except KeyboardInterrupt:
    say("interrupted")
except CollectiveError as error:
    say(error)
"""
    processes = start(3, script)
    assert [processes.line(rank) for rank in (1, 2)] == ["in", "in"]
    begun = time.monotonic()
    while processes.processes[1].poll() is None and time.monotonic() < begun + PATIENCE:
        processes.signal(1, signal.SIGINT)
        time.sleep(0.05)
    assert processes.ends(1)[1] == "interrupted\n"


@pytest.mark.slow
def test_a_script_that_ends_without_closing_is_quiet_and_quick(start: Start) -> None:
    """Also with an exception, and while the other still waits, which is told."""
    script = """
ctx.barrier()
if ctx.rank == 1:
    sys.exit(3)
try:
    ctx.barrier()
except PeerLost as error:
    say(error)
"""
    processes = start(2, script, executed=True)
    assert processes.ends(1) == (3, "", "")
    code, said, problems = processes.ends(0)
    assert (code, problems) == (0, "")
    assert "has closed its context; it was last heard of in barrier #1" in said


@pytest.mark.slow
def test_a_fork_can_neither_call_nor_keep_the_dead_alive(start: Start) -> None:
    """As the workers of a DataLoader are."""
    script = """
ctx.barrier()
if ctx.rank == 1:
    pid = os.fork()
    if pid == 0:
        try:
            ctx.barrier()
        except ContextError as error:
            say(error)
        os.close(1)
        os.close(2)
        time.sleep(60)
        os._exit(0)
    assert ctx.allgather(5) == [5, 5]
    say(pid)
    os.kill(os.getpid(), signal.SIGKILL)
assert ctx.allgather(5) == [5, 5]
try:
    ctx.barrier()
except PeerLost as error:
    say(error)
"""
    processes = start(2, script)
    words = [processes.line(1), processes.line(1)]
    child = next(int(word) for word in words if word.isdigit())
    try:
        assert any("forked from rank 1" in word for word in words)
        assert "rank 1 (host " in processes.ends(0)[1]
    finally:
        subprocess.run(["kill", "-9", str(child)], check=False)


@pytest.mark.slow
def test_jobs_in_one_store_never_meet(start: Start) -> None:
    """Nor do scripts that run one after the other in one round."""
    script = """
for step in range(200):
    assert ctx.allgather(os.environ["ELAUNCH_RUN_ID"]) == [os.environ["ELAUNCH_RUN_ID"]] * 2
say(ctx.round_store.context_number)
"""
    jobs = [start(2, script, job) for job in ("a", "b", "c")]
    for job in jobs:
        ends_well(job, ["1\n"] * 2)
    ends_well(start(2, script, "a"), ["2\n"] * 2)


@pytest.mark.slow
def test_contexts_follow_each_other_in_one_process(start: Start) -> None:
    """Each meets anew."""
    script = """
for number in range(5):
    assert ctx.allgather((ctx.rank, number)) == [(0, number), (1, number)]
    ctx.close()
    ctx = DistributedContext.of(current(os.environ))
"""
    ends_well(start(2, script), ["", ""])


def test_rank_0_hosts_the_store_where_nobody_does() -> None:
    """The ranks of a script that is its own launcher."""
    port = free_port()

    def work(rank: int) -> Any:
        ctx = DistributedContext(
            rank=rank, size=2, local_rank=rank, local_size=2, cross_rank=0, cross_size=1,
            chief_port=port,
        )  # fmt: skip
        found = ctx.allgather(rank, timeout=PATIENCE)
        ctx.barrier()
        ctx.close()
        return found

    assert in_threads(range(2), work).all() == [[0, 1], [0, 1]]


def test_one_rank_needs_nothing() -> None:
    """No network, no thread, no torch: the objects come back as they are."""
    code = """
import os, sys, threading
from elaunch import DistributedContext
ctx = DistributedContext()
thing = object()
before = len(os.listdir("/proc/self/fd"))
assert ctx.allgather(thing) == ctx.gather(thing) == [thing] and ctx.broadcast(thing) is thing
assert ctx.allgather_local(thing) == ctx.gather_local(thing) == [thing]
assert ctx.broadcast_local(thing) is thing and ctx.barrier() is None
assert (ctx.rank, ctx.size, ctx.local_rank, ctx.local_size) == (0, 1, 0, 1)
assert (ctx.cross_rank, ctx.cross_size, ctx.node_addrs) == (0, 1, ("127.0.0.1",))
assert threading.active_count() == 1 and len(os.listdir("/proc/self/fd")) == before
assert not {"torch", "socket", "numpy"} & set(sys.modules) - {"socket"}
ctx.close()
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(ROOT)}
    )


def test_a_closed_context_says_so() -> None:
    """Whether it was ever open or not."""
    ctx = DistributedContext()
    ctx.close()
    with pytest.raises(ContextError, match="closed"):
        ctx.barrier()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon", True])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    """Before anybody waits."""
    with pytest.raises(ContextError, match="timeout"):
        DistributedContext().barrier(timeout=timeout)


def test_numbers_are_all_or_none() -> None:
    """What is missing is named."""
    with pytest.raises(PlacementError, match="local_rank, local_size, cross_rank, cross_size"):
        DistributedContext(rank=0, size=2)


def test_a_name_that_has_gone_says_what_to_write() -> None:
    """Determined's getters repeated attributes."""
    with pytest.raises(AttributeError, match=r"^DistributedContext has no get_rank: write \.rank$"):
        DistributedContext().get_rank()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"has no from_mpi: write elaunch\.init\(\)"):
        DistributedContext.from_mpi()  # type: ignore[attr-defined]
