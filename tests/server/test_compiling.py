"""elaunch.server.compiling: what a worker that compiles spares the workers of the next round."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import ClassVar

import pytest

from elaunch.server import compiling, processes
from elaunch.server.preload import DYNAMO, SAVING, SETTLE, Later


class VecISA:
    """As torch's: asks a compiler, and is true where it builds."""

    asked: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def build_arch_flags(self) -> str:
        """Return the compiler's flags."""
        return f"-m{self._name}"

    def check_build(self, code: str) -> bool:
        """Ask the compiler, which takes its time."""
        self.asked.append(f"{self} {code}")
        return self._name != "amx"


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[str]]]:
    """Stand in for torch's modules; yields what their functions have returned here."""
    returned: dict[str, list[str]] = {"key": [], "isa": []}
    codecache, isa = types.ModuleType(compiling._KEY[0]), types.ModuleType(compiling._ISA[0])

    def key() -> bytes:
        return b"hash"

    def valid() -> list[str]:
        found = [str(one) for one in map(VecISA, ("amx", "avx2")) if one.check_build("code")]
        returned["isa"] = found
        return found

    key.set = lambda value: returned["key"].append(value.decode())  # type: ignore[attr-defined]
    vars(codecache)["torch_key"] = key
    vars(isa).update(valid_vec_isa_list=valid, VecISA=VecISA)
    for module in (codecache, isa):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(VecISA, "asked", [])
    yield returned


def test_what_a_fork_finds_out_is_known_here(torchs: dict[str, list[str]]) -> None:
    """The compiler is asked in the fork alone, and torch's own functions are as they were."""
    before = VecISA.check_build
    found = processes.call_in_fork(compiling.find_out)
    assert torchs == {"key": [], "isa": []}
    compiling.adopt(found)
    assert torchs == {"key": ["hash"], "isa": ["avx2"]}
    assert VecISA.asked == [] and VecISA.check_build is before


@pytest.mark.parametrize("found", [{}, {"builds": {}}, {"builds": {"x": False}}])
def test_nothing_is_concluded_from_a_compiler_that_builds_nothing(
    torchs: dict[str, list[str]], found: dict[str, dict[str, bool]]
) -> None:
    """The script may name another one."""
    compiling.adopt(found)
    assert torchs == {"key": [], "isa": []}


def test_a_torch_with_other_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its internals are not ours."""
    for name in (compiling._KEY[0], compiling._ISA[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert compiling.find_out() == {}
    compiling.adopt({"key": "00", "builds": {"x": True}})


def test_a_worker_that_begins_to_compile_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has forked does not; other imports are found as ever."""
    awaited = {signal.SIGURG: ("wave", "x"), signal.SIGWINCH: ("os", "cmd")}  # os is imported
    for name in ("wave", "cmd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    later = Later()
    monkeypatch.setattr(later, "_awaited", awaited)
    came: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: came.append(number)) for signum in awaited
    }

    def worker(server: int) -> list[object]:
        finders = list(sys.meta_path)
        later.announce(server)
        import cmd
        import wave

        return [cmd.__name__, wave.__name__, sys.meta_path == finders]

    try:
        here = os.getpid()
        found = ["cmd", "wave", True]
        assert processes.call_in_fork(lambda: processes.call_in_fork(lambda: worker(here))) == found
        assert came == []
        assert processes.call_in_fork(lambda: worker(here)) == found
        assert set(came) == awaited.keys()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_compiling_makes_the_imports_due_at_once() -> None:
    """Where torch._dynamo is among them, and once; also when that has been imported long since."""
    later = Later()
    later.plan(["math"], None, 60.0)
    later.note_start(os.getpid(), {})
    later.note_import(signal.SIGURG)
    assert later.due > time.monotonic()
    assert later.carry_out() is not None
    later.plan([DYNAMO], None, 600.0)
    later._modules.clear()  # a minute later
    later.note_start(os.getpid(), {})
    assert later.due == float("inf")
    later.note_import(signal.SIGURG)
    assert later.due <= time.monotonic() and later._modules == list(compiling.MODULES)
    later.note_import(signal.SIGURG)
    assert later._modules == list(compiling.MODULES)


def test_a_worker_that_saves_makes_the_imports_due_when_it_has_set_its_variables() -> None:
    """Also when torch._dynamo is due much later; but not later than what compiling takes."""
    later = Later()
    later.plan([DYNAMO], None, 600.0)
    later.note_start(os.getpid(), {})
    now = time.monotonic()
    later.note_import(signal.SIGWINCH)
    assert 0 < later.due - now <= 2 * SETTLE
    assert later._modules == [DYNAMO, *SAVING]
    later.note_import(signal.SIGURG)
    assert later.due <= time.monotonic()


def test_another_nodes_workers_compile() -> None:
    """What that takes is imported before any worker runs here, unless nothing is to come later."""
    later = Later()
    later.plan([DYNAMO], None, 600.0)
    later.note_compiled_elsewhere()
    assert later.due < float("inf") and later._modules == [DYNAMO, *compiling.MODULES]
    spawning = Later()
    spawning.plan([], None, 600.0)
    spawning.note_compiled_elsewhere()
    assert spawning.due == float("inf")


@pytest.mark.parametrize("kind", ["", "cuda", "hip"])
def test_a_torch_for_devices_is_tried_in_a_fork(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An import that opened a device here would take it from all workers."""
    version = types.ModuleType("torch.version")
    vars(version).update({"cuda": None, "hip": None} | ({kind: "12.8"} if kind else {}))
    monkeypatch.setitem(sys.modules, "torch.version", version)
    assert compiling.may_open_devices() is bool(kind)
