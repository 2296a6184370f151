"""An error of one rank is an error of all, after which the next call gets its own data.

The errors are real: one rank may map no more memory, or gives what means nothing.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import elaunch
from elaunch.runs.statedir import locked
from elaunch.training.checkpoint.collective import FLUSH_S
from elaunch.training.distributed import for_purpose
from elaunch.training.metrics.files import LOCK
from tests.training.checkpoint.groups import Raised, in_group
from tests.training.checkpoint.rig import Job

LARGE = 1 << 24
"""Elements of a tensor for which there is no memory."""


@contextmanager
def little_memory(rank: int) -> Iterator[None]:
    """Let rank 1 map a quarter of a large tensor, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + LARGE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tried(work: Callable[[], Any]) -> str:
    """Return the error that ``work`` raises; empty if it raises none."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def no_memory_to_save(ctx: Any, block: bool) -> Any:
    """Save a tensor that has to be copied first, without memory for the copy on rank 1."""
    rank, save = ctx.distributed.rank, ctx.checkpoint.save
    save({"x": 1}, 1)
    turned = torch.zeros(LARGE // 16, 16).t()
    with little_memory(rank):
        said = tried(lambda: save({"own": elaunch.PerRank({"x": turned})}, 2, block=block))
    after = ctx.distributed.allgather(rank)
    save({"x": 1}, 3)
    return said, after, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
@pytest.mark.parametrize("agent", [False, True], ids=["block", "memory"])
def test_no_memory_for_a_save(tmp_path: Path, agent: bool) -> None:
    """Both ranks raise and name rank 1; what they gather afterwards is what they give."""
    said = in_group(no_memory_to_save, 2, tmp_path, not agent, agent=agent)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    error, after, steps = said[0]
    assert error.startswith("SaveError: save of step 2") and "rank 1 on host" in error
    assert after == [0, 1] and steps == [1, 3]


def no_memory_to_load(ctx: Any) -> Any:
    """Load into an expanded tensor, in whose place rank 1 cannot make one."""
    rank, checkpoint = ctx.distributed.rank, ctx.checkpoint
    state = {"x": torch.zeros(1).expand(LARGE)}
    checkpoint.save(state, 1)
    with little_memory(rank):
        said = tried(lambda: checkpoint.load(state))
    return said, ctx.distributed.allgather(rank)


@pytest.mark.ranks
def test_no_memory_for_a_load(tmp_path: Path) -> None:
    """Both ranks raise and name rank 1; what they gather afterwards is what they give."""
    said = in_group(no_memory_to_load, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    error, after = said[0]
    assert error.startswith("CheckpointError: load step-00000001.r0: rank 1 on host"), error
    assert after == [0, 1]


def no_memory_to_receive(ctx: Any, name: str) -> Any:
    """Send large bytes of rank 0 for which rank 1 has no memory, and make another call."""
    rank, ranks = ctx.distributed.rank, for_purpose(ctx.distributed, "loading")
    content = bytes(2 * LARGE) if rank == 0 else b""
    ranks.barrier()
    with little_memory(rank):
        said = tried(lambda: getattr(ranks, name)(content))
    return said, tried(ranks.barrier)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["broadcast", "allgather"])
def test_no_memory_to_receive(tmp_path: Path, name: str) -> None:
    """Rank 1 raises what it lacks, and rank 0, which has all that it needs, in its next call."""
    said = in_group(no_memory_to_receive, 2, tmp_path, name)
    assert not any(isinstance(one, Raised) for one in said), said
    error, after = said[1]
    assert error.startswith(f"CollectiveError: {name} of loading #"), error
    assert ": rank 1 (" in error and " has no memory" in error, error
    assert "not connected any more since" in after and "has no memory" in after, after
    error, after = said[0]
    assert not error and after.startswith("CollectiveError: barrier of loading #"), said
    assert ": rank 1 (" in after and " has no memory" in after, after


def wrong_on_one_rank(ctx: Any) -> Any:
    """Give on rank 1 what means nothing, in one call after the other."""
    rank, ck = ctx.distributed.rank, ctx.checkpoint
    state, one, directory = {"x": 1}, ck.save({"x": 1}, 1).committed, ck.stage_path(2)

    def given(right: Any, wrong: Any) -> Any:
        return wrong if rank == 1 else right

    def stored() -> None:
        with ck.store_path({"steps_completed": 2}, shard=True, keep=given(None, "two")):
            pass

    def restored() -> None:
        with ck.restore_path(which=given(one.uuid, 5)):
            pass

    calls: list[Callable[[], Any]] = [
        lambda: ck.save(state, 2, keep=given(None, "two")),
        lambda: ck.save(state, 2, metadata=given({}, 5)),
        lambda: ck.save(state, 2, when_busy=given("wait", "never")),
        stored,
        lambda: ck.commit(given(directory, 5), 2),
        lambda: ck.load(state, which=given(one.uuid, 5)),
        lambda: ck.load(state, which=one, source=given(None, directory)),
        restored,
    ]
    said = [(tried(call), ctx.distributed.allgather(rank)) for call in calls]
    return said, [found.step for found in ck.list()]


@pytest.mark.ranks
def test_what_is_wrong_on_one_rank(tmp_path: Path) -> None:
    """Every call raises the same on both ranks, and names rank 1; the next call works."""
    said = in_group(wrong_on_one_rank, 2, tmp_path)
    assert said[0] == said[1] and not isinstance(said[0], Raised), said
    told, steps = said[0]
    assert steps == [1] and [after for _, after in told] == [[0, 1]] * len(told)
    assert all("rank 1 on host" in error for error, _ in told), told
    kinds = [error.partition(":")[0] for error, _ in told]
    assert kinds == [
        "ContextError", "SaveError", "ContextError", "ContextError", "SaveError",
        "ContextError", "ContextError", "ContextError",
    ]  # fmt: skip


def different_calls(ctx: Any, which: str) -> Any:
    """Call on rank 1 what rank 0 does not."""
    rank, ck = ctx.distributed.rank, ctx.checkpoint
    ck.save({"x": 1}, 1)
    calls: dict[str, Callable[[], Any]] = {
        "wait": ck.wait,
        "load": lambda: ck.load({"x": 2}),
        "save": lambda: ck.save({"x": 2}, 2),
    }
    call = calls[which] if rank == 0 else lambda: ctx.distributed.allgather(1)
    return tried(call)


@pytest.mark.ranks
@pytest.mark.parametrize("which", ["wait", "load", "save"])
def test_no_call_gets_the_data_of_another(tmp_path: Path, which: str) -> None:
    """An allgather of the script's and a call of ctx.checkpoint: both ranks name both."""
    for said in in_group(different_calls, 2, tmp_path, which):
        assert "CollectiveError" in said and "different things" in said, said
        assert "calls allgather #" in said and "calls allgather of ctx.checkpoint #" in said, said


def saves_beside_a_hung_home(ctx: Any, block: bool) -> Any:
    """Save while somebody holds the lock of the metrics; return the seconds that each save took."""
    rank, seconds = ctx.distributed.rank, []
    save = ctx.checkpoint.save
    save({"x": torch.ones(8)}, 1, block=block)
    with locked(ctx.directory / LOCK) if rank == 0 else nullcontext():
        ctx.distributed.barrier()
        for step in (2, 3):
            ctx.train.report_training_metrics(step, {"loss": 0.5})
            begun = time.monotonic()
            save({"x": torch.ones(8)}, step, block=block)
            seconds.append(time.monotonic() - begun)
        ctx.distributed.barrier()
    ctx.checkpoint.wait()
    return seconds, [found.step for found in ctx.checkpoint.list()]


@pytest.mark.ranks
@pytest.mark.parametrize("agent", [False, True], ids=["block", "memory"])
def test_metrics_hold_up_no_save(tmp_path: Path, agent: bool) -> None:
    """Their disk hangs until both saves are done: those wait for FLUSH_S, and not for it."""
    for said in in_group(saves_beside_a_hung_home, 2, tmp_path, not agent, agent=agent):
        assert not isinstance(said, Raised), said.text
        seconds, steps = said
        assert steps == [1, 2, 3] and max(seconds) < FLUSH_S + 60, seconds


@pytest.mark.slow
def test_the_exception_of_a_turn_stays_the_one_raised(start: Callable[..., Job]) -> None:
    """Also where it cannot be reported to the others, since one of them is gone."""
    script = """
def turn():
    with ctx.distributed.in_turn():
        raise ValueError("my own bug")
say(json.dumps(tried(turn) if rank == 0 else ""))
os._exit(0)
"""
    assert start(script, 2).said()[0] == "ValueError: my own bug"
