"""Known causes: one row per way to end."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from elaunch.agent.failure import explain as causes
from elaunch.agent.failure.explain import Explanation
from tests.agent.histories import changed, left

GIB = 1 << 30


def explain(exitcode: int, text: str = "", **known: Any) -> Explanation:
    """Return the cause of the end of a worker with ``exitcode``."""
    facts = {name: known.pop(name) for name in ("rank", "local_rank", "timer") if name in known}
    return causes.explain(changed(left(0, exitcode), **facts).exit, text, **known)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "GPU's memory"),
        ("RuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory", "refused more"),
        ("MemoryError", "refused more memory"),
        ("RuntimeError: CUDA error: invalid device ordinal", "LOCAL_RANK"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/step_10.pt'", "df -h"),
        ("RuntimeError: unable to write to file </torch_123_4>", "/dev/shm"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", "/dev/shm"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", "memory limit"),
        ("OSError: [Errno 122] Disk quota exceeded", "quota"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("DistNetworkError: listen failed. EADDRINUSE, address already in use", "port"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("OSError: [Errno 97] Address family not supported by protocol", "--master-addr"),
        ("ModuleNotFoundError: No module named 'einops'", "'einops' is not installed"),
        ("train.py: error: unrecognized arguments: --local-rank=0", "LOCAL_RANK"),
        ("train.py: error: unrecognized arguments: --epoch 3", "refused its own arguments"),
        ("terminate called without an active exception", "a thread of gloo"),
        ("CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError: CUDA error: an illegal memory access", "CUDA_LAUNCH_BLOCKING"),
        ("CUDA error: uncorrectable ECC error encountered", "take the node out"),
        ("RuntimeError: No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp, ncclSystemError", "NCCL_DEBUG"),
        ("ValueError: Default process group has not been initialized", "init_process_group"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    """After exit code 1 what was printed tells the cause."""
    found = explain(1, text=f"Traceback …\n{text}")
    assert expected in found.text
    assert not found.victim


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",
        "RuntimeError: Connection reset by peer",
        "torch.distributed.DistNetworkError: The client socket has failed to connect",
        "RuntimeError: Gloo connectFullMesh failed with … Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "DistBackendError: NCCL error: ncclRemoteError: remote process exited",
        "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_victims(text: str) -> None:
    """These errors come from the end of somebody else."""
    assert explain(1, text=text).victim


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SIGKILL", "killed from outside elaunch"),
        ("SIGTERM", "asked it to end"),
        ("SIGINT", "interrupted"),
        ("SIGHUP", "hung it up"),
        ("SIGBUS", "/dev/shm"),
        ("SIGSEGV", "Native code crashed"),
        ("SIGABRT", "Native code gave up"),
        ("SIGILL", "another CPU"),
        ("SIGFPE", "by zero"),
        ("SIGXCPU", "ulimit -t"),
        ("SIGUSR1", "--forward-signals"),
    ],
)
def test_signals(name: str, expected: str) -> None:
    """By signal, and by the exit code 128+n that a shell makes of it."""
    number = signal.Signals[name]
    assert expected in explain(-number).text
    shell = explain(128 + number).text
    assert shell.startswith(f"{128 + number} is 128 + {int(number)}: ")
    assert name in shell and expected in shell


def test_oom_kill_is_told_from_other_kills() -> None:
    """Only the cgroup's count makes it a fact."""
    assert explain(-9, oom_kill=True).text.startswith("Out of memory: the kernel killed it")
    assert "Out of memory" in explain(137, oom_kill=True).text
    assert "Out of memory" not in explain(-9, text="CUDA out of memory").text
    assert "Out of memory" not in explain(-11, oom_kill=True).text


def test_bus_error_tells_the_state_of_shared_memory() -> None:
    """Full, or not full any more now that the process is gone."""
    assert "2 MiB left. Give it more (docker run --shm-size" in explain(-7, shm_free=2 << 20).text
    assert "1024 MiB free now" in explain(-7, shm_free=GIB).text


def test_aborts() -> None:
    """The NCCL watchdog is not any C++ abort."""
    watchdog = "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
    assert explain(-6, text=watchdog).victim
    assert "NCCL watchdog" in explain(-6, text="terminate … ProcessGroupNCCL").text
    assert "PYTHONFAULTHANDLER" in explain(-6, text="terminate called").text
    assert "PYTHONFAULTHANDLER" not in explain(-6, text="Fatal Python error: Aborted").text


@pytest.mark.parametrize(
    ("rank", "size", "hint"),
    [(5, 4, True), (4, 4, True), (3, 4, False), (5, None, False)],
)
def test_device_chosen_by_global_rank(rank: int, size: int | None, hint: bool) -> None:
    """torch.cuda.set_device(dist.get_rank()) works on the first node only."""
    text = "torch.AcceleratorError: CUDA error: invalid device ordinal"
    found = explain(1, text=text, rank=rank, local_rank=1, local_world_size=size).text
    assert 'int(os.environ["LOCAL_RANK"])' in found
    expected = (
        f"RANK is {rank} here, but this node's workers are 0 to 3; this one's LOCAL_RANK is 1"
    )
    assert (expected in found) is hint


@pytest.mark.parametrize(
    ("exitcode", "text", "expected"),
    [
        (1, "ValueError: boom", ""),
        (7, "Connection refused", ""),
        (-11, "Connection refused", "Native code crashed"),
        (-15, "No space left on device", "asked it to end"),
        (0, "", ""),
        (126, "", "not executable"),
        (127, "", "not found"),
        (120, "", "flush"),
        (255, "", ""),
        (128, "", ""),
        (-64, "", ""),
        (-70, "", ""),
    ],
)
def test_other_ends(exitcode: int, text: str, expected: str) -> None:
    """A text only counts where it can be the cause; nothing known gives no text."""
    found = explain(exitcode, text=text).text
    assert re.search(expected, found) and bool(found) is bool(expected)
