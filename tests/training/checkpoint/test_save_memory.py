"""``save(block=False)`` under ``elaunch run``: what a killed worker saved is loaded from memory."""

from __future__ import annotations

import json

import pytest

from tests.launching import Launcher

SCRIPT = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch import nn
import elaunch
from elaunch.training.checkpoint.dcp.sources import Source

opened, descriptor = [], Source._descriptor
def counting(self, name):
    opened.append(name)
    return descriptor(self, name)
Source._descriptor = counting

def made(seed):
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def trained(steps):
    model, optimizer = made(0)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer

def total(model, optimizer):
    state = [*model.state_dict().values()]
    state += [value for held in optimizer.state.values() for value in held.values()]
    return [value.double().sum().item().hex() for value in state]

dist.init_process_group("gloo")
with elaunch.init(announce=False) as ctx:
    rank = dist.get_rank()
    if ctx.info.round == 0:
        model, optimizer = trained(3)
        state = {"model": model, "optimizer": optimizer, "rank": elaunch.PerRank(rank)}
        ctx.checkpoint.reserve(state)
        ctx.checkpoint.save(state, 3, block=False)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    right = total(*trained(3))
    said = []
    for recalls in (True, False):
        if not recalls:
            ctx.checkpoint._session.together(None).saver.recall = lambda *args: {}
        model, optimizer = made(1)
        state = {"model": model, "optimizer": optimizer, "rank": elaunch.PerRank(-1)}
        found = ctx.checkpoint.load(state)
        assert total(model, optimizer) == right and state["rank"].value == rank and found.step == 3
        said.append(sorted(set(opened)))
        opened.clear()
    said = json.dumps(said)
    os.write(1, (said + chr(10)).encode())
    dist.barrier()
"""


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(elaunch: Launcher) -> None:
    """Killed right after ``save`` returned; the next round reads no file, and has all bits.

    Where files are read, rank 0 alone reads ``.metadata``.
    """
    script = elaunch.directory / "job.py"
    script.write_text(SCRIPT)
    words = ["run", "--nproc-per-node=2", "--max-restarts=1", "--checkpoint-dir=ck", str(script)]
    done = elaunch.start(words, env={"OMP_NUM_THREADS": "1"}).wait(120.0)
    assert done.returncode == 0, done.stderr
    files = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(lines) == [[[], files], [[], files[1:]]], done.stdout + done.stderr
