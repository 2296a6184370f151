"""A worker with a process group answers which collectives it has entered, and its forks do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaunch import env, proc
from elaunch.agent.hangs.recorders import STACKS, TRACE, Question, ask, place
from elaunch.wire.recorder import RECORDED, groups_path, socket_path
from tests import warm
from tests.launching import wait_until

pytestmark = pytest.mark.slow

WORKER = """
import os, sys, time
import torch, torch.distributed as dist
from elaunch.wire import recorder
from torch._C._distributed_c10d import _WorkerServer
own = _WorkerServer(sys.argv[1])
recorder.watch(os.environ)
recorder.watch(os.environ)
for again in range(2):
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for _ in range(70):
        dist.all_reduce(torch.ones(4))
    if again == 0:
        dist.destroy_process_group()


def sockets():
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    found = {os.readlink(link) for link in links if os.path.lexists(link)}
    return {link for link in found if link.startswith("socket:")}


before = sockets()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str(len(before - sockets())).encode())
    if os.fork() == 0:
        os.write(write, b",forked")
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
print(os.read(read, 100).decode(), os.environ.get("TORCH_FR_BUFFER_SIZE"), flush=True)
sys.stdin.readline()
"""


LATER = """
import os, sys
from elaunch.wire import recorder
assert "torch" not in sys.modules
before = list(sys.meta_path)
recorder.watch(os.environ)
recorder.watch(os.environ)
import torch, torch.distributed as dist
assert sys.meta_path == before, sys.meta_path
import torch.distributed.distributed_c10d as module
assert module.__spec__.loader is not None and dist.is_gloo_available()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
sys.stdin.readline()
"""


def test_torch_may_be_imported_later(tmp_path: Path) -> None:
    """As with ``--preload none``: then it is watched, and nothing is left among the finders."""
    variables = {env.AGENT_SOCKET: str(tmp_path / "agent.sock")}
    variables |= {"ELAUNCH_ROUND": "0", "LOCAL_RANK": "0"}
    worker = subprocess.Popen(
        [sys.executable, "-c", LATER],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        asked = {Question(0, TRACE): socket_path(tmp_path, 0, 0)}
        answers = ask(asked, time.monotonic() + 20.0)
        assert "all_reduce" in str(answers)
    finally:
        worker.kill()
        worker.communicate()


def test_a_worker_with_a_process_group_answers(tmp_path: Path) -> None:
    """At a path that is too long for an address, beside a server of the script's own."""
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    variables = {env.AGENT_SOCKET: str(directory / "agent.sock")}
    variables |= {"ELAUNCH_ROUND": "3", "LOCAL_RANK": "2"}
    worker = warm.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path / "own.sock")],
        {**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        # One socket is closed in the fork; a fork of that closes nothing in its place.
        assert worker.stdout.readline() == f"1,forked {RECORDED}\n"
        path, question = socket_path(directory, 3, 2), Question(0, TRACE)
        assert path.stat().st_mode & 0o777 == 0o600
        answer = ask({question: path}, time.monotonic() + 10)[question]
        assert isinstance(answer, bytes)
        assert len(json.loads(answer)["entries"]) == RECORDED
        found = place(0, 1, answer, groups_path(path).read_text())
        assert (found.groups["0"].members, found.waits) == ((0,), False)
        os.kill(worker.pid, signal.SIGSTOP)
        wait_until(lambda: proc.status(worker.pid)["State"][0] == "T")
        silent = ask({question: path}, time.monotonic() + 0.2)[question]
        assert isinstance(silent, TimeoutError)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        _, said = worker.communicate("\n", timeout=100)
    assert worker.returncode == 0
    assert str(directory) not in said  # torch does not announce it
    gone = ask({question: path}, time.monotonic() + 10)[question]
    assert isinstance(gone, FileNotFoundError)


MAKES = """
import os, sys
import torch.distributed as dist
from elaunch.wire import recorder
recorder.watch(os.environ)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
"""


def test_a_worker_that_waits_in_init_process_group_answers(tmp_path: Path) -> None:
    """Its other rank never comes; since when it waits is known from the first answer on."""
    variables = {env.AGENT_SOCKET: str(tmp_path / "agent.sock")}
    variables |= {"ELAUNCH_ROUND": "0", "LOCAL_RANK": "0"}
    path, question = socket_path(tmp_path, 0, 0), Question(0, TRACE)
    began = time.time()
    worker = warm.Popen(
        [sys.executable, "-c", MAKES, str(tmp_path / "store")], {**os.environ, **variables}
    )
    try:
        wait_until(lambda: groups_path(path).exists() and bool(groups_path(path).read_text()), 60)
        answer = ask({question: path}, time.monotonic() + 10)[question]
        assert isinstance(answer, bytes)
        (found,) = place(0, 2, answer, groups_path(path).read_text()).receives
        assert (found.name, found.waits) == ("init_process_group", True)
        assert began <= found.at <= time.time()
    finally:
        worker.kill()
        worker.communicate()


ENDING = """
import os
import torch, torch.distributed as dist
from elaunch.wire import recorder
recorder.watch(os.environ)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# torch splits groups on machines with a GPU only.
cpu, everyone = torch.device("cpu", 0), dist.group.WORLD
torch.accelerator.is_available = lambda: True
torch.accelerator.current_accelerator = lambda: cpu
everyone.bound_device_id = cpu
half = dist.split_group(everyone, [[0]], pg_options=everyone._get_backend(cpu).options)
dist.all_reduce(torch.ones(4), group=half)
print(flush=True)
sum(range(20_000_000))  # it is asked meanwhile
"""


def test_a_worker_that_is_asked_as_it_ends_ends_well(tmp_path: Path) -> None:
    """A question for its stack takes Python's lock: at that time it ended the process."""
    variables = {env.AGENT_SOCKET: str(tmp_path / "agent.sock")}
    variables |= {"ELAUNCH_ROUND": "0", "LOCAL_RANK": "0"}
    worker = warm.Popen(
        [sys.executable, "-c", ENDING], {**os.environ, **variables}, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    answers = 0
    path = socket_path(tmp_path, 0, 0)
    trace = ask({Question(0, TRACE): path}, time.monotonic() + 10)[Question(0, TRACE)]
    assert isinstance(trace, bytes)
    found = place(0, 1, trace, groups_path(path).read_text())
    (half,) = (group for name, group in found.groups.items() if name != "0")
    assert (half.members, half.times, half.entered) == ((0,), 1, 1)  # of split_group
    while worker.poll() is None:
        question = Question(0, STACKS)
        answers += isinstance(ask({question: path}, time.monotonic() + 10)[question], bytes)
    worker.stdout.close()
    assert worker.returncode == 0
    assert answers
