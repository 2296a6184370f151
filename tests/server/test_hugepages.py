"""What the server imports lies in huge pages, where the kernel has them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.server import hugepages

IMPORT = """
import sys
from elaunch.server import hugepages

if sys.argv[1] == "reserve":
    hugepages.reserve(["torch"])
import torch
print(torch.ones(2).sum().item())
with open("/proc/self/smaps") as file:
    for kind in ("AnonHugePages", "Anonymous"):
        file.seek(0)
        print(sum(int(line.split()[1]) for line in file if line.startswith(f"{kind}:")))
"""
CALLS = """
import sys
from elaunch.server import hugepages

calls = []
hugepages.SETTINGS = sys.argv[1]
hugepages.reserve(["torch", "os"], lambda: calls.append(1))
print(len(calls))
"""
LIMITED = """
import resource
from elaunch.server import hugepages

with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), resource.RLIM_INFINITY))
hugepages.reserve(["torch"])
print(1)
"""
FORK = """
import os
from elaunch.server import hugepages

hugepages.reserve(["torch"])
import torch

def own():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_"))

if os.fork() == 0:
    before = own()
    for module in list(vars(torch).values()):
        getattr(module, "__name__", None)
    print(own() - before, flush=True)
    os._exit(0)
os.wait()
"""


def run(code: str, *args: str) -> list[float]:
    """Return the numbers that ``code`` prints in a process of its own."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return [float(line) for line in done.stdout.split()]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """A sum, and the kilobytes of huge pages and in all, of a process that has imported torch."""
    return run(IMPORT, "leave")


def is_here() -> bool:
    """Whether this kernel can."""
    return hugepages._is_possible(ctypes.CDLL(None))


def test_it_is_possible_with_a_kernel_that_is_new_enough() -> None:
    release = tuple(map(int, Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2]))
    settings = Path(hugepages.SETTINGS)
    if release >= (6, 1) and settings.exists():
        on = "[never]" not in (settings / "enabled").read_text()
        size = int((settings / "hpage_pmd_size").read_text())
        assert is_here() is (on and size == hugepages.HUGE)


def test_an_import_takes_the_memory_that_was_reserved_for_it(plain: list[float]) -> None:
    total, huge, memory = run(IMPORT, "reserve")
    assert total == 2
    assert huge > 0.4 * memory or not is_here()
    assert memory < plain[2] + 20_000


def test_it_is_as_much_as_the_imports_that_are_left_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two of them have in common counts once."""
    dynamo, saving = "torch._dynamo", "torch.distributed.checkpoint"
    for name in ("torch", dynamo, saving):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert hugepages._takes({"torch", "os"}) == (80, 46)
    assert hugepages._takes({dynamo}) == hugepages._takes({dynamo, saving}) == (28, 45)
    monkeypatch.setitem(sys.modules, saving, sys)
    heap, objects = hugepages._takes({dynamo, saving})
    assert 0 < heap < 28 and 0 < objects < 45
    monkeypatch.setitem(sys.modules, dynamo, sys)
    assert hugepages._takes({dynamo, "numpy"}) == (0, 0)
    monkeypatch.delitem(sys.modules, saving)
    assert hugepages._takes({saving}) == (0, 0)  # a job that saves for the first time


@pytest.mark.parametrize(
    ("enabled", "size"),
    [("always madvise [never]", hugepages.HUGE), ("[always] madvise never", 512 << 20), ("", 0)],
    ids=["turned off", "another size", "none"],
)
def test_nothing_is_done_where_it_must_not_be(tmp_path: Path, enabled: str, size: int) -> None:
    if enabled:
        (tmp_path / "enabled").write_text(f"{enabled}\n")
        (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
    assert run(CALLS, str(tmp_path)) == [0]


def test_a_limit_that_leaves_no_room_is_not_met_here() -> None:
    """The import itself fails then, and says so."""
    assert run(LIMITED) == [1]


def test_what_cannot_wait_is_done_again_and_again() -> None:
    (calls,) = run(CALLS, hugepages.SETTINGS)
    assert calls >= 10 if is_here() else calls == 0


def test_a_fork_that_writes_gets_no_copy_of_a_whole_huge_page() -> None:
    """Reference counts of some thousand objects are written: pages of 4 kB, not of 2 MB."""
    (copied,) = run(FORK)
    assert copied < 20_000
