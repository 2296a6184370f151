"""What a forked worker is spared of torch's faults; the stores are in tests/integration."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from torch.torch_version import TorchVersion

from elaunch.server import torchfix


def _in_thread_of_gloo(
    named: threading.Event, ended: list[bool], name: str = torchfix.GLOO_THREAD
) -> None:
    _take_name(name)
    named.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)  # without the interpreter's lock
    ended.append(True)


def _take_name(name: str = torchfix.GLOO_THREAD) -> None:
    path = f"/proc/self/task/{threading.get_native_id()}/comm"
    with open(path, "w", encoding="ascii") as file:
        file.write(name)


def test_a_worker_ends_after_the_threads_of_gloo_have_come_to_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that still runs is waited for."""
    monkeypatch.setattr(torchfix, "SETTLE_DEADLINE", 60.0)  # on a busy machine it takes its time
    named = threading.Event()
    ended: list[bool] = []
    thread = threading.Thread(target=_in_thread_of_gloo, args=(named, ended))
    thread.start()
    assert named.wait(60)
    torchfix._settle()
    assert ended
    thread.join()


def test_threads_at_rest_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was never destroyed has threads that wait for work."""
    runs, stop = threading.Event(), threading.Event()

    def rest() -> None:
        _take_name()
        runs.set()
        stop.wait(100)

    thread = threading.Thread(target=rest)
    thread.start()
    assert runs.wait(60)
    monkeypatch.setattr(torchfix, "SETTLE_DEADLINE", 200.0)
    torchfix._settle()
    assert thread.is_alive()  # or it has been waited for
    stop.set()
    thread.join()


@pytest.mark.parametrize(("release", "waits"), [("2.6.0+cu124", True), ("2.8.0", False)])
def test_a_group_is_destroyed_when_the_threads_of_gloo_are_at_rest(
    monkeypatch: pytest.MonkeyPatch, release: str, waits: bool
) -> None:
    """With an old torch, whose destructor keeps the lock that they need; there they are unnamed."""
    named = threading.Event()
    ended: list[bool] = []
    destroyed: list[tuple[object, bool]] = []

    def destroy_process_group(group: object = None) -> None:
        destroyed.append((group, bool(ended)))

    modules = []
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        modules.append(ModuleType(name))
        vars(modules[-1])["destroy_process_group"] = destroy_process_group
        monkeypatch.setitem(sys.modules, name, modules[-1])
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    vars(sys.modules["torch"])["__version__"] = TorchVersion(release)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setattr(torchfix, "SETTLE_DEADLINE", 60.0)
    torchfix.patch_ends()
    own = Path("/proc/self/comm").read_text().strip()
    thread = threading.Thread(target=_in_thread_of_gloo, args=(named, ended, own))
    thread.start()
    assert named.wait(60)
    for module in modules:
        vars(module)["destroy_process_group"](group=module)
        assert vars(module)["destroy_process_group"].__name__ == "destroy_process_group"
    thread.join()
    assert [group for group, _ in destroyed] == modules
    assert not waits or all(at_rest for _, at_rest in destroyed)
    assert waits or vars(modules[0])["destroy_process_group"] is destroy_process_group


@pytest.mark.parametrize(
    ("text", "clients"),
    [
        ("__version__ = '2.6.0+cu124'", True),
        ("x = 1\n__version__ = '2.7.1'", False),
        ('__version__ = "2.15.0"', False),
        ("", False),
    ],
)
def test_ranks_of_an_old_torch_are_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, clients: bool
) -> None:
    """The version is read where torch is, without importing it."""
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert not torchfix.need_clients()
    (tmp_path / "version.py").write_text(text)
    assert torchfix.need_clients() is clients
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not torchfix.need_clients()


ENDING = """
import ctypes, sys
from elaunch.server import torchfix

c = ctypes.CDLL(None)
c.strdup.restype = ctypes.c_void_p

def say_at_exit(text):
    # Called as dprintf(status, text): the status 1 is stdout.
    c.on_exit(c.dprintf, ctypes.c_void_p(c.strdup(text)))

say_at_exit(b"registered before, ")
sys.modules["torch"] = sys
torchfix.leave_out_destructors(eval(sys.argv[1]))
say_at_exit(b"registered since, ")
c.on_exit(c.putchar, None)  # writes the status as a character, into a buffer
sys.exit(1)
"""


def _ended(error: str, environ: dict[str, str]) -> str:
    """Return what exit handlers print in a process that ends by ``error``."""
    argv = [sys.executable, "-c", ENDING, error]
    environ |= {"PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=environ, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.mark.parametrize("error", ["ValueError()", "SystemExit(7)", "SystemExit('text')"])
def test_a_worker_that_fails_leaves_torchs_destructors_out(error: str) -> None:
    """Not what is registered since, nor what is buffered, nor the status."""
    assert _ended(error, {}) == "registered since, \x01"


@pytest.mark.parametrize("error", ["SystemExit()", "SystemExit(0)"])
def test_a_worker_that_succeeds_runs_all(error: str) -> None:
    """A process group may have work to do there."""
    assert _ended(error, {}) == "registered since, registered before, \x01"


@pytest.mark.parametrize("name", torchfix.WATCHERS)
def test_a_tool_that_watches_from_the_start_sees_the_end(name: str) -> None:
    """What it has found is written there."""
    assert "registered before" in _ended("ValueError()", {name: "/dev/null"})


LEFT = """
import sys, types
from elaunch.server import torchfix

def is_initialized():
    print("the group is looked for")
    return False

sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch.distributed"] = group = types.ModuleType("torch.distributed")
group.is_available, group.is_initialized = (lambda: True), is_initialized
torchfix.patch_ends()
torchfix.leave_out_destructors(eval(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("error", "watcher", "waits"),
    [
        ("SystemExit(0)", "", True),
        ("ValueError()", "", False),
        ("ValueError()", "LD_PRELOAD", False),
    ],
)
def test_only_a_worker_that_succeeds_waits_for_its_group(
    error: str, watcher: str, waits: bool
) -> None:
    """One that fails would not be seen to have failed while a collective of its group goes on."""
    environ = {"PATH": os.environ["PATH"]} | ({watcher: "/dev/null"} if watcher else {})
    argv = [sys.executable, "-c", LEFT, error]
    done = subprocess.run(argv, env=environ, text=True, capture_output=True, timeout=60)
    assert done.stdout == ("the group is looked for\n" if waits else ""), done.stderr
