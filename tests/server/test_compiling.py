"""Workers that compile: what they spare the workers of the next round."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from elaunch.server import preload, processes
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
    codecache, isa = types.ModuleType(preload._KEY[0]), types.ModuleType(preload._ISA[0])

    def key() -> bytes:
        return b"hash"

    def valid() -> list[str]:
        found = [str(one) for one in map(VecISA, ("amx", "avx2")) if one.check_build("code")]
        returned["isa"] = found
        return found

    key.set = lambda value: returned["key"].append(value.decode())  # type: ignore[attr-defined]
    vars(codecache)["torch_key"] = key
    vars(isa).update(valid_vec_isa_list=valid, VecISA=VecISA)
    for module in (codecache, isa, types.ModuleType("torch.version")):  # one for no device
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(VecISA, "asked", [])
    yield returned


def test_what_a_fork_finds_out_is_known_here(torchs: dict[str, list[str]]) -> None:
    """The compiler is asked in the fork alone, and torch's own functions are as they were."""
    before = VecISA.check_build
    found = processes.call_in_fork(preload.find_out)
    assert torchs == {"key": [], "isa": []}
    preload.enter(found)
    assert torchs == {"key": ["hash"], "isa": ["avx2"]}
    assert VecISA.asked == [] and VecISA.check_build is before


@pytest.mark.parametrize("found", [{}, {"builds": {}}, {"builds": {"x": False}}])
def test_nothing_is_concluded_from_a_compiler_that_builds_nothing(
    torchs: dict[str, list[str]], found: dict[str, dict[str, bool]]
) -> None:
    """The script may name another one."""
    preload.enter(found)
    assert torchs == {"key": [], "isa": []}


def test_a_torch_with_other_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its internals are not ours."""
    for name in (preload._KEY[0], preload._ISA[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert preload.find_out() == {}
    preload.enter({"key": "00", "builds": {"x": True}})


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
    assert later.due <= time.monotonic() and later._modules == list(preload.COMPILING)
    later.note_import(signal.SIGURG)
    assert later._modules == list(preload.COMPILING)


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


@pytest.mark.parametrize("kind", ["", "cuda", "hip"])
def test_a_torch_for_devices_is_tried_in_a_fork(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """An import that opened a device here would take it from all workers."""
    version = types.ModuleType("torch.version")
    vars(version).update({"cuda": None, "hip": None} | ({kind: "12.8"} if kind else {}))
    monkeypatch.setitem(sys.modules, "torch.version", version)
    assert preload.may_open_devices() is bool(kind)


def test_the_header_that_a_fork_has_asked_for_is_not_asked_for_again(
    torchs: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless it is missing, or another one is meant; and the fork makes none."""
    codecache, torch = sys.modules[preload._KEY[0]], types.ModuleType("torch")
    asked, made = tmp_path / "asked", tmp_path / "x.h"

    def ask(header: str, command: str, **options: object) -> str:
        vars(codecache)["_worker_compile_cpp"]("lock", (options["isa"],))
        with asked.open("a") as file:
            file.write(f"{header} {command}\n")
        return str(made)

    def compile_there(_: object) -> object:
        def call(*_: object) -> None:
            sys.modules["torch.imported"] = types.ModuleType("torch.imported")
            sys.modules["torch.imported"].__spec__ = ModuleSpec("torch.imported", None)
            sys.modules["torch.made_up"] = types.ModuleType("torch.made_up")
            vars(codecache)["_precompile_header"]("prefix.h", "g++ -O3", isa=object())

        return call

    vars(codecache).update(
        _precompile_header=ask, _worker_compile_cpp=lambda *_: made.with_suffix(".h.gch").touch()
    )
    config = types.ModuleType(preload._CONFIG)
    monkeypatch.setitem(sys.modules, config.__name__, config)
    vars(torch).update(compile=compile_there, zeros=abs)
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = processes.call_in_fork(preload.find_out)
    assert found["modules"] == ["torch.imported"]
    assert asked.read_text() == "prefix.h g++ -O3\n" and not made.with_suffix(".h.gch").exists()
    preload.enter(found)
    again = vars(codecache)["_precompile_header"]
    for header, command in (("prefix.h", "g++ -O3"), ("prefix.h", "g++ -O3"), ("prefix.h", "g++")):
        assert again(header, command, isa=object()) == str(made)
    assert asked.read_text().splitlines()[1:] == ["prefix.h g++ -O3", "prefix.h g++"]


@pytest.mark.parametrize("variable", ["TORCH_TRACE", "TORCH_LOGS_OUT", "TORCHDYNAMO_VERBOSE"])
def test_nothing_is_compiled_where_a_person_would_see_it(
    torchs: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Nor does the fork end by a compilation that fails."""
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # without a compile
    assert preload.find_out().keys() == {"key", "builds"}
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(preload, "_begin_to_compile", lambda: {"headers": {}})
    assert preload.find_out().keys() == {"key", "builds"}


def test_tables_are_made_by_torchs_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the files of torch's layers, where torch has such a table."""
    torch, names = types.ModuleType("torch"), types.ModuleType(preload._NAMES[0])
    made: list[object] = []
    for part, function in (
        ("compiler", "list_backends"),
        ("overrides", "get_overridable_functions"),
    ):
        entry = partial(made.append, function)
        vars(torch)[part] = types.SimpleNamespace(**{function: entry})
    vars(names)[preload._NAMES[1]] = lambda path, line: made.append((path, line))
    for name in [name for name in sys.modules if name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch.nn.functional", "torch.nn.modules.x", "torch.nn.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name])["__file__"] = f"{name}.py"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, names.__name__, names)
    calls: list[int] = []
    preload.fill_tables(lambda: calls.append(len(made)))
    files = [("torch.nn.functional.py", 1), ("torch.nn.modules.x.py", 1)]
    assert made == ["list_backends", "get_overridable_functions", *files]
    assert calls == [0, 1, 2, 3, 4]
    monkeypatch.delitem(sys.modules, names.__name__)
    preload.fill_tables(lambda: None)
    assert made[4:] == ["list_backends", "get_overridable_functions"]


def test_a_module_that_cannot_be_asked_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of optional packages, which raise when something of them is looked up."""
    preload.fill_tables(lambda: None)  # what torch imports for it looks at every module, too
    lazy, calls = types.ModuleType("lazy"), list[int]()

    def refuse(name: str) -> object:
        raise ImportError(f"{name}: install lazy[all]")

    vars(lazy)["__getattr__"] = refuse
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    preload.fill_tables(lambda: calls.append(1))
    assert calls


def test_python_remembers_in_which_module_each_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that asks for the module of some code looks at none of the server's again."""
    import torch  # noqa: F401  its tables are asked for

    asked: list[str] = []
    preload.fill_tables(lambda: None)
    absolute = inspect.getabsfile

    def note(*of: Any) -> str:
        asked.append(str(of[0]))
        return absolute(*of)

    monkeypatch.setattr(inspect, "getabsfile", note)
    assert inspect.getmodule(compile("", "<elsewhere>", "exec")) is None
    assert len(asked) < 20


@pytest.mark.parametrize("stopped", [True, False])
def test_a_fork_that_ended_with_its_round_is_asked_again(stopped: bool) -> None:
    """By the next round; one that ended by itself is not."""
    later = Later()
    later.plan([DYNAMO], None, 600.0)
    later._modules.clear()  # imported
    later._finding = processes.ForkedCall(lambda: os._exit(1))
    if stopped:
        later.note_stop()
    later.adopt(lambda: None)
    assert later.files == [] and later.due == float("inf")
    later.note_start(os.getpid(), {})
    assert (later.due < float("inf")) is stopped
    assert later._modules == (list(preload.COMPILING) if stopped else [])
