"""In round N one rank fails as the N-th word says, ``fault:rank``; after the last all ends well.

Each round begins with a checkpoint, so that none counts as a crash loop, and shows two steps more.
The faults are real but for those of :data:`TEXTS`, which raise what other machines say.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

FAULTS: dict[str, Callable[[Path], Any]] = {}
TOGETHER: set[str] = set()
"""Faults that need all ranks in a process group of gloo."""
TEXTS = {
    "text-cuda-oom": "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity",
    "text-ordinal": "CUDA error: invalid device ordinal\nCUDA kernel errors might be "
    "asynchronously",
    "text-assert": "CUDA error: device-side assert triggered",
    "text-ecc": "CUDA error: uncorrectable ECC error encountered",
    "text-kind": "CUDA error: no kernel image is available for execution on the device",
    "text-fork": "Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
    " "
    "multiprocessing",
    "text-nccl": "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version "
    "2.27.5",
    "text-duplicate": "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device "
    "101c0",
    "text-quota": "[Errno 122] Disk quota exceeded: '/home/me/ckpt'",
    "text-stale": "[Errno 116] Stale file handle: '/nfs/data'",
    "text-download": "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded "
    "with url: /x (Caused by NewConnectionError('Connection refused'))",
}


def fault(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Add a fault under the function's name."""
    FAULTS[run.__name__.replace("_", "-")] = run
    return run


def together(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Add one for which all ranks are in a process group; the others are in a collective."""
    TOGETHER.add(run.__name__.replace("_", "-"))
    return fault(run)


@fault
def missing_module(at: Path) -> None:
    """Import what is not installed."""
    import surely_not_installed  # type: ignore[import-not-found]  # noqa: F401


@fault
def broken_module(at: Path) -> None:
    """Import an extension that is no library."""
    (at / "halfbuilt.abi3.so").write_bytes(b"no ELF")
    sys.path.insert(0, str(at))
    import halfbuilt  # type: ignore[import-not-found]  # noqa: F401


@fault
def bad_syntax(at: Path) -> None:
    """Import a module that does not parse."""
    (at / "unparsable.py").write_text("def f(:\n")
    sys.path.insert(0, str(at))
    import unparsable  # type: ignore[import-not-found]  # noqa: F401


@fault
def missing_file(at: Path) -> None:
    """Open what is not there."""
    (at / "no-such-data.bin").open()


@fault
def forbidden_file(at: Path) -> None:
    """Open what another user owns."""
    at.joinpath("secret").touch(0o600)
    os.setuid(65534)
    (at / "secret").open()


@fault
def missing_in_loader(at: Path) -> None:
    """Open what is not there, in a process of a DataLoader."""
    next(iter(loader(lambda _: (at / "no-such-data.bin").open())))


@fault
def full_device(at: Path) -> None:
    """Write to a device that is always full."""
    Path("/dev/full").write_text("x")


@fault
def full_save(at: Path) -> None:
    """Save a tensor to a device that is always full."""
    import torch

    torch.save(torch.ones(200_000), "/dev/full")


@fault
def full_disk(at: Path) -> None:
    """Write more than a small file system takes."""
    (at / "small" / "x").write_bytes(bytes(8 << 20))


@fault
def read_only_disk(at: Path) -> None:
    """Write to a file system that is mounted read-only."""
    (at / "readonly" / "x").touch()


@fault
def full_shm(at: Path) -> None:
    """Send a batch that is larger than /dev/shm from a process of a DataLoader."""
    import torch

    for _ in loader(lambda _: torch.ones(64 << 20), batch_size=1):
        pass


@fault
def torn_checkpoint(at: Path) -> None:
    """Load a file of torch.save that was cut short."""
    import torch

    torch.save({"w": torch.ones(1000)}, at / "whole.pt")
    (at / "torn.pt").write_bytes((at / "whole.pt").read_bytes()[:2000])
    torch.load(at / "torn.pt")


@fault
def empty_checkpoint(at: Path) -> None:
    """Load an empty file."""
    import torch

    (at / "empty.pt").touch()
    torch.load(at / "empty.pt")


@fault
def garbage_checkpoint(at: Path) -> None:
    """Load a file of zeros."""
    import torch

    (at / "zeros.pt").write_bytes(bytes(4096))
    torch.load(at / "zeros.pt")


@fault
def torn_pickle(at: Path) -> None:
    """Unpickle half a file."""
    pickle.loads(pickle.dumps(list(range(9999)))[:500])


@fault
def other_objects(at: Path) -> None:
    """Load a checkpoint with an object in it."""
    import torch

    torch.save({"args": argparse.Namespace(lr=1)}, at / "objects.pt")
    torch.load(at / "objects.pt")


@fault
def other_model(at: Path) -> None:
    """Load the state of another model."""
    import torch

    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 3).state_dict())


@fault
def loader_killed(at: Path) -> None:
    """A process of a DataLoader is killed."""
    for _ in loader(lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        pass


@fault
def loader_crashed(at: Path) -> None:
    """A process of a DataLoader crashes in native code."""
    for _ in loader(lambda _: ctypes.string_at(0)):
        pass


@fault
def loader_timeout(at: Path) -> None:
    """A process of a DataLoader hangs."""
    for _ in loader(lambda _: time.sleep(60), timeout=1):
        pass


@fault
def python_memory(at: Path) -> None:
    """Ask for more memory than is allowed, in Python."""
    limited(resource.RLIMIT_AS, 1 << 40)
    bytearray(1 << 41)


@fault
def torch_memory(at: Path) -> None:
    """Ask for more memory than is allowed, in torch."""
    import torch

    limited(resource.RLIMIT_AS, 1 << 40)
    torch.empty(1 << 41, dtype=torch.uint8)


@fault
def oom_kill(at: Path) -> None:
    """Take all memory of the cgroup."""
    taken = [bytearray(b"x") * (64 << 20) for _ in range(1000)]
    raise AssertionError(f"{len(taken)} times 64 MiB were to be had")


@fault
def open_files(at: Path) -> None:
    """Open too many files."""
    limited(resource.RLIMIT_NOFILE, 64)
    _kept = [open(os.devnull) for _ in range(100)]  # noqa: SIM115


@fault
def file_size(at: Path) -> None:
    """Write a file that is larger than allowed."""
    limited(resource.RLIMIT_FSIZE, 1 << 16)
    (at / "large").write_bytes(bytes(1 << 17))


@fault
def threads(at: Path) -> None:
    """Start more threads than allowed."""
    os.setuid(64321)
    limited(resource.RLIMIT_NPROC, 4)
    for _ in range(10):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


@fault
def pickling(at: Path) -> None:
    """Send a lambda to another process."""
    pickle.dumps(lambda: 0)


@fault
def local_rank(at: Path) -> None:
    """Refuse the argument of old launchers."""
    argparse.ArgumentParser(prog="train.py").parse_args(["--local-rank=0"])


@fault
def arguments(at: Path) -> None:
    """Refuse an argument."""
    argparse.ArgumentParser(prog="train.py").parse_args(["--epoch", "3"])


@fault
def taken_port(at: Path) -> None:
    """Listen on a port twice."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        socket.create_server(first.getsockname()[:2])


@fault
def taken_store_port(at: Path) -> None:
    """Open a TCPStore on a port that is taken."""
    from torch.distributed import TCPStore

    with socket.create_server(("", 0)) as first:
        TCPStore("127.0.0.1", first.getsockname()[1], is_master=True, wait_for_workers=False)


@fault
def unknown_host(at: Path) -> None:
    """Look a name up that nobody has."""
    socket.getaddrinfo("no-such-host.invalid", 80)


@fault
def no_service(at: Path) -> None:
    """Connect to a service that does not run."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    socket.create_connection(address)


@fault
def no_store(at: Path) -> None:
    """Join a store that does not run."""
    from torch.distributed import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))


@fault
def no_group(at: Path) -> None:
    """Call a collective without a process group."""
    import torch.distributed as dist

    dist.barrier()


@fault
def no_cuda(at: Path) -> None:
    """Use CUDA where torch has none."""
    import torch

    torch.ones(1).cuda()


@fault
def no_interface(at: Path) -> None:
    """Have gloo use an interface that is not there."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@fault
def plain_exception(at: Path) -> None:
    """Raise what no table knows, in a line of source that says something else."""
    raise ValueError("loss is NaN")  # No space left on device


@fault
def handled_before(at: Path) -> None:
    """Print what was handled, then fail for another reason."""
    print("CUDA out of memory, trying half the batch\nConnection refused, again", file=sys.stderr)
    raise ValueError("no such optimizer: adamx")


@fault
def own_code(at: Path) -> None:
    """End with a code of the script's own."""
    print("Connection refused", file=sys.stderr)
    sys.exit(3)


@fault
def refused_and_left(at: Path) -> None:
    """Print that a connection was refused, and end with 1."""
    print("tracker: Connection refused; going on without it", file=sys.stderr)
    sys.exit(1)


@fault
def missing_command(at: Path) -> None:
    """End as a command that was not found."""
    sys.exit(subprocess.run(["sh", "-c", "surely-not-installed"]).returncode)


@fault
def killed_command(at: Path) -> None:
    """End as a shell whose command was killed."""
    sys.exit(subprocess.run(["sh", "-c", "sh -c 'kill -9 $$'; exit $?"]).returncode)


@fault
def segfault(at: Path) -> None:
    """Read address 0."""
    ctypes.string_at(0)


@fault
def bus_error(at: Path) -> None:
    """Read a mapped file that was cut short."""
    (at / "cut").write_bytes(bytes(1 << 16))
    with (at / "cut").open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        file.truncate(0)
        view[1 << 15]


@fault
def cpu_limit(at: Path) -> None:
    """Use up the CPU time."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + 1, used + 9))
    while True:
        pass


for _name in ("ABRT", "KILL", "TERM", "HUP", "ILL", "FPE", "USR1", "SYS"):
    FAULTS[f"signal-{_name.lower()}"] = lambda _, number=signal.Signals[f"SIG{_name}"]: os.kill(
        os.getpid(), number
    )
for _name, _text in TEXTS.items():
    FAULTS[_name] = lambda _, text=_text: _raise(RuntimeError(text))


@together
def dies_in_collective(at: Path) -> None:
    """End with 7 while the others wait in a collective."""
    os._exit(7)


@together
def raises_in_collective(at: Path) -> None:
    """Raise while the others wait in a collective."""
    (at / "no-such-data.bin").open()


@together
def killed_in_collective(at: Path) -> None:
    """Be killed while the others wait in a collective."""
    os.kill(os.getpid(), signal.SIGKILL)


@together
def late_in_collective(at: Path) -> None:
    """Do not come to a collective before its timeout."""
    time.sleep(20)


@together
def other_size(at: Path) -> None:
    """Call the collective with another size."""
    reduce(2)


def _raise(error: Exception) -> None:
    raise error


def limited(what: int, most: int) -> None:
    """Lower a limit of this process."""
    resource.setrlimit(what, (most, most))


def loader(item: Callable[[int], Any], timeout: float = 0, batch_size: int | None = None) -> Any:
    """Return a DataLoader with one process, whose items are what ``item`` returns."""
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return item(index)

    return DataLoader(Items(), num_workers=1, timeout=timeout, batch_size=batch_size)


def reduce(size: int) -> None:
    """Call all_reduce with so many numbers."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(size))


def main() -> None:
    """Do what this round is for."""
    at, words = Path(sys.argv[1]), sys.argv[2:]
    number, rank = int(os.environ["ELAUNCH_ROUND"]), int(os.environ["RANK"])
    if number >= len(words):
        return
    name, _, guilty = words[number].rpartition(":")
    if rank == int(guilty):
        draft = at / "saves" / ".tmp"
        draft.write_text("{}")
        draft.rename(at / "saves" / f"step_{3 * number}.json")
        print(f"step {3 * number + 2}", flush=True)
    if name in TOGETHER:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        reduce(1)
    if rank == int(guilty):
        (at / "own").mkdir(exist_ok=True)
        FAULTS[name](at)
    elif name in TOGETHER:
        reduce(100)
    time.sleep(20)


if __name__ == "__main__":
    main()
