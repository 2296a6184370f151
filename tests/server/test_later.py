"""Modules that are imported later: never with other settings than the first round's workers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch.server import preload as preloading
from elaunch.server import processes
from elaunch.server.preload import SETTLE, Later, Warmed


@contextmanager
def fork_that(action: Callable[[], object]) -> Iterator[int]:
    """Run ``action`` in a fork that lives on until the block is left; yield its pid."""
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end_write)
        action()
        os.write(ready_write, b"x")
        os.read(end_read, 1)
        os._exit(0)
    os.close(ready_write)
    try:
        assert os.read(ready_read, 1) == b"x"
        yield pid
    finally:
        for end in (ready_read, end_read, end_write):
            os.close(end)
        os.waitpid(pid, 0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make a module that reads variables at its import, as torch's configurations do."""
    name = "module_of_test_later"
    (tmp_path / f"{name}.py").write_text(
        "import os\nFIRST = os.environ.get('LATER_FIRST')\nSECOND = 'LATER_SECOND' in os.environ\n"
        "os.environ['LATER_OWN'] = os.environ.get('LATER_OWN', 'own')\nos.write(1, b'never seen')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    os.environ.pop("LATER_OWN", None)


def later_of(module: str, workers: Mapping[int, Mapping[str, str]]) -> Later:
    """Return what is to import ``module``, with running workers and what they were given."""
    later = Later()
    later.plan([module], None, 0.0)
    for pid, given in workers.items():
        later.note_start(pid, given)
    return later


def set_variables(**variables: str) -> Callable[[], None]:
    """Return what sets them, as a script does."""
    return lambda: os.environ.update(variables)


def test_the_variables_of_a_fork_as_they_are_now() -> None:
    """Set, changed, emptied, deleted, and longer than a page."""
    os.environ.update({"LATER_GONE": "x", "LATER_SAME": "same", "LATER_CHANGED": "before"})
    try:

        def act() -> None:
            del os.environ["LATER_GONE"]
            os.environ.update(LATER_CHANGED="é", LATER_EMPTY="", LATER_LONG="y" * 10_000)

        with fork_that(act) as pid:
            found = processes.environment_of_fork(pid)
        assert found is not None
        here = processes.environment_of_fork(os.getpid())
        assert here is not None
        assert set(os.environ.items()) <= set(here.items())  # libraries set some behind Python
        del here["LATER_GONE"]
        here |= {"LATER_CHANGED": "é", "LATER_EMPTY": "", "LATER_LONG": "y" * 10_000}
        assert found == here
    finally:
        for name in ("LATER_GONE", "LATER_SAME", "LATER_CHANGED"):
            del os.environ[name]


def test_the_variables_of_another_program_are_unknown() -> None:
    """A worker may execute something else; a process may be gone."""
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "60"])
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/comm").read_text() != "sleep\n" and time.monotonic() < until:
        time.sleep(0.01)
    assert processes.environment_of_fork(pid) is None
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert processes.environment_of_fork(pid) is None


def test_a_module_is_imported_ahead_where_nobody_sets_what_it_reads(module: str) -> None:
    """Other variables may change, and those that the module itself sets."""
    given = {"LATER_FIRST": "given", "RANK": "0"}
    changes = set_variables(**given, OTHER="1", LATER_OWN="own")
    with fork_that(changes) as pid, fork_that(set_variables(**given)) as second:
        assert later_of(module, {pid: given, second: given}).carry_out() == Warmed()
    assert module in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"LATER_FIRST": "other", "OTHER": "1"}, ("LATER_FIRST",)),
        ({"LATER_SECOND": "", "LATER_FIRST": "x"}, ("LATER_FIRST", "LATER_SECOND")),
        ({"LATER_OWN": "the script's"}, ("LATER_OWN",)),
    ],
)
def test_a_module_is_left_to_the_workers_where_one_of_them_sets_what_it_reads(
    module: str,
    changes: dict[str, str],
    settings: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The second of two workers does; nothing of the trial is seen."""
    given = {"LATER_FIRST": "given"}
    with (
        fork_that(set_variables(**given)) as first,
        fork_that(set_variables(**{**given, **changes})) as pid,
    ):
        later = later_of(module, {first: given, pid: given})
        assert later.carry_out() == Warmed(settings=settings)
    assert module not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_a_variable_that_is_deleted_counts(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is set."""
    monkeypatch.setenv("LATER_FIRST", "launcher's")
    with fork_that(lambda: os.environ.pop("LATER_FIRST")) as pid:
        assert later_of(module, {pid: {}}).carry_out() == Warmed(settings=("LATER_FIRST",))


def test_a_worker_that_cannot_be_read_leaves_the_modules_to_the_next(module: str) -> None:
    """With the reason; better slow than wrong."""
    later = later_of(module, {os.getpid(): {}})
    later.note_start(1 << 22, {})
    problem = later.carry_out().problem
    assert problem is not None
    assert f"--preload +{module}: what variables the script has set cannot be read" in problem
    assert module not in sys.modules


def test_when_it_is_due() -> None:
    """Never without a worker that has run for a moment; once."""
    later = Later()
    later.plan(["math"], None, 60.0)
    assert later.due == float("inf")
    began = time.monotonic()
    later.note_start(1, {})
    assert 60 <= later.due - began < 62
    later.note_end(1)
    assert later.due == float("inf")
    later.note_start(2, {})
    assert later.due - began < 62
    later.plan(["math"], None, 0.0)
    later.note_start(os.getpid(), {})
    assert later.due - began < 62
    short = Later()
    short.plan(["math"], None, SETTLE + 5)
    short.note_start(os.getpid(), {})
    assert short.due - time.monotonic() > SETTLE
    later.note_end(2)
    assert later.carry_out() == Warmed()
    assert later.due == float("inf")


def test_a_module_that_starts_threads_is_never_imported_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named; forks of this process would hang."""
    name = "module_of_threads"
    (tmp_path / f"{name}.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    problem = later_of(name, {os.getpid(): {}}).carry_out().problem
    assert problem is not None
    assert f"--preload {name}: it has started another thread" in problem
    assert name not in sys.modules


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file that stands for a GPU's, whose driver forks find lost: here is no GPU."""
    file = tmp_path / "nvidia-uvm"
    file.touch()
    monkeypatch.setattr(preloading, "DEVICES", (str(file),))
    monkeypatch.setattr(preloading, "_has_lost_devices", lambda: True)
    return file


def opening(file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that opens a file when it is imported, and keeps it open."""
    name = f"opens_{file.name.replace('-', '_')}"
    text = "import os\nNVML = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n"
    (file.parent / f"{name}.py").write_text(f"{text}FILE = open({str(file)!r})\n")
    monkeypatch.syspath_prepend(file.parent)
    return name


def test_a_module_that_uses_a_gpu_is_an_error(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forked worker could use it; also where another module is to come later."""
    name = opening(device, monkeypatch)
    try:
        found = preloading.preload([name], None)
        assert (
            found.problem is not None
            and f"--preload {name}: a module used the GPU" in found.problem
        )
        assert sys.modules[name].NVML == "1" and preloading.NVML[0] not in os.environ
        # What this process had open before is no fault of the modules.
        assert preloading.preload(["math"], None).problem is None
    finally:
        sys.modules.pop(name).FILE.close()


def test_a_module_that_asks_for_gpus_by_nvml(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML keeps the files open, too, and a fork can use the GPU."""
    name = opening(device, monkeypatch)
    monkeypatch.setattr(preloading, "_has_lost_devices", lambda: False)
    try:
        assert preloading.preload([name], None).problem is None
    finally:
        sys.modules.pop(name).FILE.close()


def test_a_later_module_that_uses_a_gpu_is_left_out(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork finds it, and the server does not import it."""
    name = opening(device, monkeypatch)
    later = Later()
    later.plan([name], None, 0.0)
    warmed = later.carry_out()
    assert warmed is not None and "a module used the GPU" in str(warmed.problem)
    assert name not in sys.modules
