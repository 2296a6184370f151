"""What ranks that stay are made of: connections that can be cut, states that are sent, worlds."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import CheckpointError, CollectiveTimeout, PeerLost
from elaunch.training.agentlink import AgentLink
from elaunch.training.checkpoint.dcp import transfer
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import Placement
from elaunch.training.steps.gradients import Gradients
from elaunch.training.steps.group import Group, Sockets, connect
from elaunch.training.steps.world import Standing, StepsWorld
from elaunch.wire.progress import ProgressPage
from tests.launching import wait_until
from tests.training.agentend import Agent
from tests.training.rankrig import PATIENCE, StoreHost, in_threads

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """One store for all tests of this module."""
    yield StoreHost()


def groups(host: StoreHost, size: int, names: Sequence[int] = range(9)) -> list[Group]:
    """Return a group of each rank, in threads."""
    job = uuid.uuid4().hex

    def work(rank: int) -> Group:
        ranks = DistributedContext.of(host.place(rank, size, job=job))
        ranks.open(timeout=PATIENCE)
        made = connect(ranks, names[:size])
        assert made is not None
        return made

    found: list[Group] = in_threads(range(size), work).all()
    return found


def test_a_rank_that_waits_is_woken(host: StoreHost) -> None:
    """By its own connections, which another thread cuts; not those that were there before."""
    before = torch.distributed.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=60))
    sockets = Sockets()
    first, _ = groups(host, 2)
    sockets.finish()
    late = torch.distributed.TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=60))
    message = first.receive(torch.empty(5), 1, 7)
    threading.Timer(0.1, sockets.cut).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 is lost"):
        message.wait()
    assert time.monotonic() - started < PATIENCE / 2
    for other in (before, late):
        other.set("k", "v")
        assert other.get("k") == b"v"


def test_a_wait_that_gloo_never_ends_is_left(host: StoreHost) -> None:
    """Its connection broke while a part of the message was written, or read: gloo forgets it."""
    first, _second = groups(host, 2)
    threading.Timer(0.1, first.cut).start()
    for _ in range(2):
        with pytest.raises(PeerLost, match=r"^steps\(\): a rank has died$"):
            first.wait([first.receive(torch.empty(5), 1, 7)])


def test_a_cut_leaves_no_descriptors(host: StoreHost) -> None:
    """Of connections that were closed since: files have theirs."""
    sockets, made = Sockets(), groups(host, 2)
    sockets.finish()
    before = descriptors()
    made.clear()
    wait_until(lambda: descriptors() < before, what="the connections are closed")
    with ExitStack() as stack:
        for _ in range(before):
            stack.enter_context(open(os.devnull))
        before = descriptors()
        sockets.cut()
        assert descriptors() <= before  # more may have been closed since


def descriptors() -> int:
    """Return how many this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_some_of_a_group_are_one_of_their_own(host: StoreHost) -> None:
    """One alone needs none."""
    made = groups(host, 3)
    assert made[1].among([1]) is None

    def work(number: int) -> list[bytes]:
        part = made[2 * number].among([0, 2])
        assert part is not None and part.rank == number
        return part.allgather(bytes([number]))

    assert in_threads(range(2), work).all() == [[b"\0", b"\1"]] * 2


def test_a_rank_is_named_by_its_number_in_the_job(host: StoreHost) -> None:
    """Also in a group of some: the log has no other number of it."""
    made = groups(host, 3, (1, 4, 7))
    part = in_threads(range(2), lambda number: made[1 + number].among([1, 2])).all()
    lost, others = [made.pop(), part.pop()], [made[1], part[0]]
    messages = [other.receive(torch.empty(5), len(other.names) - 1, 7) for other in others]
    del lost
    for message in messages:
        with pytest.raises(PeerLost, match="rank 7 is lost") as raised:
            message.wait()
        assert raised.value.missing == (7,)


def test_a_store_that_does_not_answer_is_named(host: StoreHost) -> None:
    """The ranks have met in it just before: it is not waited for as a slow rank is."""
    code = (
        "import time; from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        where = ("127.0.0.1", int(process.stdout.readline()))

        def work(rank: int) -> DistributedContext:
            place = host.place(rank, 2, job="silent")._replace(store=where)
            ranks = DistributedContext.of(place)
            ranks.open(timeout=10 * PATIENCE)
            return ranks

        first, _ = in_threads(range(2), work).all()
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "T")
        where_it_is = f"cannot reach the round's TCPStore at 127.0.0.1:{where[1]}: it accepts"
        with pytest.raises(CollectiveTimeout, match=where_it_is):
            connect(first, range(2))
    finally:
        process.kill()
        process.wait()


def test_an_agent_that_begins_no_other_round_is_named(host: StoreHost, tmp_path: Path) -> None:
    """Beside the rank that was lost: it may be frozen, or have ended."""
    agent, page = Agent(tmp_path / "agent.sock"), ProgressPage()
    place = host.place(0, 2)._replace(launcher="elaunch")
    link = AgentLink(agent.path, page, place)
    world = StepsWorld(DistributedContext.of(place), link, lambda *_: pytest.fail("it moves"))
    link.start()
    agent.accept()
    world.stand(True)
    assert agent.hear() == {"op": "stands", "stands": True}
    lost = PeerLost("steps(): rank 1 is lost: closed", (1,))
    begun_no = "rank 1 is lost: closed; this node's agent has begun no other round: it has"
    with pytest.raises(PeerLost, match=f"{begun_no} said nothing for 0.1 s") as raised:
        world.reform(lost, 1, Standing(1), 0.1)
    assert raised.value.missing == (1,)
    agent.end()
    with pytest.raises(PeerLost, match=f"{begun_no} closed the connection"):
        world.reform(lost, 1, Standing(1))
    link.close()
    page.close()


class Connections:
    """What a rank has while it meets others."""


def test_a_second_loss_leaves_no_garbage(
    host: StoreHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of connections: a forked DataLoader worker would end them, and crash."""
    agent, page = Agent(tmp_path / "agent.sock"), ProgressPage()
    place = host.place(0, 2)._replace(launcher="elaunch")
    link, ranks = AgentLink(agent.path, page, place), DistributedContext.of(place)
    numbers = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= {"MASTER_PORT": host.port, "ELAUNCH_ROUND": 1}
    environ = {name: str(number) for name, number in numbers.items()}
    environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    enter = {"op": "enter", "environ": environ, "present": [0], "slots": [2]}
    lost: list[weakref.ref[Connections]] = []

    def move(there: Placement, _: int) -> None:
        if not lost:
            connections = Connections()
            lost.append(weakref.ref(connections))
            agent.say(enter)
            raise PeerLost("another one is lost")
        ranks.move(there)

    world = StepsWorld(ranks, link, move)
    link.start()
    agent.accept()
    world.stand(True)
    agent.say(enter)
    gc.disable()
    try:
        assert world.reform(PeerLost("one is lost"), 1, Standing(1), 60.0) == [Standing(1)]
        assert lost[0]() is None
    finally:
        gc.enable()
    ranks.close()
    link.close()
    agent.end()
    page.close()


def state(seed: int) -> dict[str, Any]:
    """Return what a script gives: of another seed, other values."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 2), nn.Linear(4, 2).bfloat16())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1), amsgrad=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    more = {"text": f"seed {seed}", "many": [seed, math.pi * seed], "t": torch.rand(2, 0, 3)}
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "more": more}


def trained(made: dict[str, Any], steps: int) -> None:
    """Make some steps with gradients of the step's number."""
    for step in range(steps):
        for one in made["model"].parameters():
            one.grad = torch.full_like(one, math.sin(step))
        made["optimizer"].step()
        made["schedule"].step()


def test_a_state_is_sent_with_all_bits(host: StoreHost) -> None:
    """Model, optimizer, schedule, plain values: what follows is the same."""
    made = groups(host, 3)
    states = [state(rank) for rank in range(3)]
    trained(states[1], 3)

    def work(rank: int) -> None:
        if rank == 1:
            metadata, file = transfer.pack(states[1])
            made[1].give(torch.frombuffer(bytearray(metadata), dtype=torch.uint8), [0, 2])
            made[1].give(file, [0, 2])
            return
        metadata, file = made[rank].take(1).numpy().tobytes(), made[rank].take(1)
        transfer.unpack(states[rank], metadata, file, (rank, 3))

    in_threads(range(3), work).all()
    for one in states:
        trained(one, 4)
    for one in (states[0], states[2]):
        for a, b in zip(one["model"].parameters(), states[1]["model"].parameters(), strict=True):
            assert torch.equal(a, b)
        assert one["more"]["text"] == "seed 1" and one["more"]["many"] == [1, math.pi]
        assert one["schedule"].state_dict() == states[1]["schedule"].state_dict()


def test_another_state_is_refused() -> None:
    """By name."""
    with pytest.raises(CheckpointError, match="only one of the two has own"):
        transfer.unpack({**state(1), "own": 7}, *transfer.pack(state(0)), (1, 2))


def test_sums_go_on_with_fewer_ranks(host: StoreHost) -> None:
    """After a loss in mid-step: nothing of what was sent before is in the sums."""
    sockets, whole = Sockets(), groups(host, 2)
    sockets.finish()
    model = nn.Linear(400, 400)
    sums = Gradients(list(model.parameters()), whole[0])

    def leaves(count: int) -> None:
        share = sums.begin(count, float(count))
        for number, what in enumerate(share.sums):
            generator = torch.Generator().manual_seed(what.leaf)
            loss = model(torch.randn(4, 400, generator=generator)).square().mean()
            sums.add(number, loss.backward)

    threading.Timer(0.2, sockets.cut).start()
    leaves(4)  # the other one never comes
    with pytest.raises(PeerLost):
        sums.sum_up()
    sums.regroup(None)
    leaves(4)
    assert sums.sum_up()
    sums.assign(())
    found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    sums.close()
    other = Gradients(list(model.parameters()), None)
    sums = other
    leaves(4)
    assert other.sum_up()
    other.assign(())
    assert all(
        torch.equal(a, one.grad)
        for a, one in zip(found, model.parameters(), strict=True)
        if one.grad is not None
    )


def test_one_rank_alone_goes_on_as_ever() -> None:
    """Without an agent nothing stands, and what is lost is lost."""
    world = StepsWorld(DistributedContext(), None, lambda *_: pytest.fail("it moves"))
    world.stand(True)
    assert not world.joins and not world.missing and world.look() == []
    error = PeerLost(f"rank {random.randrange(9)} is lost")
    with pytest.raises(PeerLost) as raised:
        world.reform(error, 1, Standing(1))
    assert raised.value is error
