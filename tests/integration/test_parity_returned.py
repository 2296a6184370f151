"""Objects of a script's own classes come back from the processes that it starts.

The items are in parity/returned.py.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parity.launches import HERE, Start, launch_alike
from tests.launching import without_waits

pytestmark = [pytest.mark.slow, pytest.mark.executed]

SOURCE = (HERE / "returned.py").read_text()


@pytest.mark.trial
def test_objects_come_back_as_under_torchrun(tmp_path: Path) -> None:
    """Pool, exceptions, Queue, Pipe, executor, DataLoader, from all three kinds of children."""
    (tmp_path / "s.py").write_text(SOURCE)
    outcomes = launch_alike(tmp_path, Start(["s.py"]))
    ends = [(outcome.code, without_waits(outcome.stderr)) for outcome in outcomes.values()]
    assert ends == [(0, "")] * 3
    found = {method: outcome.read("returned") for method, outcome in outcomes.items()}
    assert found["spawn"] == found["torchrun"]
    assert found["fork"] == found["torchrun"]
    assert found["fork"]["one module"]
    assert_all_came_back(found["fork"], ["fork", "spawn", "forkserver"])
    points = [[["Point", True, {"x": x}] for x in batch] for batch in ([0, 1], [2, 3])]
    batches = [[["Batch", True, {}], each] for each in points]
    assert found["fork"]["spawn"]["loader"] == found["fork"]["fork"]["loader"] == batches


def a_module(directory: Path) -> list[str]:
    """Be run by ``-m module``."""
    (directory / "returned.py").write_text(SOURCE)
    return ["-m", "returned", "spawn"]


def a_run_path(directory: Path) -> list[str]:
    """Be run by runpy, which makes a ``__main__`` of its own."""
    (directory / "s.py").write_text(SOURCE)
    return ["--run-path", "s.py", "spawn"]


def not_preloaded(directory: Path) -> list[str]:
    """Import multiprocessing before the server does."""
    (directory / "s.py").write_text(SOURCE)
    return ["--preload", "none", "s.py", "spawn"]


def a_package(directory: Path) -> list[str]:
    """Be a ``__main__`` that a spawned child does not import: it knows none of its names."""
    (directory / "returned").mkdir()
    (directory / "returned" / "__init__.py").touch()
    (directory / "returned" / "__main__.py").write_text(SOURCE)
    return ["-m", "returned", "fork"]


def an_archive(directory: Path) -> list[str]:
    """Be another one."""
    with zipfile.ZipFile(directory / "returned.pyz", "w") as archive:
        archive.writestr("__main__.py", SOURCE)
    return ["returned.pyz", "fork"]


@pytest.mark.parametrize(
    "form",
    [
        a_module,
        *(
            pytest.param(form, marks=pytest.mark.trial)
            for form in (a_run_path, not_preloaded, a_package, an_archive)
        ),
    ],
)
def test_objects_come_back_to_every_form_of_a_script(tmp_path: Path, form: Any) -> None:
    """Both names of the script's module are the script's."""
    words = form(tmp_path)
    outcome = launch_alike(tmp_path, Start(words), ["fork"])["fork"]
    assert (outcome.code, without_waits(outcome.stderr)) == (0, "")
    assert_all_came_back(outcome.read("returned"), [words[-1]])


def assert_all_came_back(found: dict[str, Any], methods: list[str]) -> None:
    """Every item is an answer of the script's own class."""
    assert found["classes in"] == [True, True]
    for items in (found[method] for method in methods):
        assert items["pool"] == [["Point", True, {"x": x}] for x in range(3)]
        assert items["raised"] == ["Refused", True, {}, [5]]
        for name, x in (("queue", 2), ("pipe", 4), ("executor", 6)):
            assert items[name] == ["Point", True, {"x": x}]
