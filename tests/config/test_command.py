"""Finding a module by name without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elaunch.config.command import why_not_found, why_not_runnable, worker_path


@pytest.fixture
def path(tmp_path: Path) -> list[str]:
    """Return a worker's path with packages whose import would leave a trace."""
    trace = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\n"
    for name in ("pkg", "pkg/inner", "runnable"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(trace)
    (tmp_path / "pkg/train.py").write_text(trace)
    (tmp_path / "pkg/inner/deep.py").write_text(trace)
    (tmp_path / "runnable/__main__.py").write_text(trace)
    (tmp_path / "space/below").mkdir(parents=True)
    (tmp_path / "space/below/mod.py").write_text(trace)
    (tmp_path / "my-pkg").mkdir()
    (tmp_path / "my-pkg/a-b.py").write_text(trace)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/__init__.py").write_text("__path__.append('/elsewhere')\n")
    (tmp_path / "extra/lib").mkdir(parents=True)
    (tmp_path / "extra/lib/other.py").write_text(trace)
    return worker_path(tmp_path, {"PYTHONPATH": "extra/lib"})


@pytest.mark.parametrize(
    "name",
    "pkg.train pkg.inner.deep runnable space.below.mod other timeit json.tool odd.unknown "
    "elaunch my-pkg.a-b".split(),
)
def test_modules_that_can_be_run(path: list[str], name: str, tmp_path: Path) -> None:
    """Packages, namespaces, PYTHONPATH, the library, an editable install."""
    assert why_not_runnable(name, path) is None
    assert not list(tmp_path.rglob("*.ran"))
    assert name.partition(".")[0] not in sys.modules or name in ("timeit", "json.tool", "elaunch")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pgk.train", "was not found; did you mean 'pkg'?"),
        ("pkg.trian", "was not found in the package pkg; did you mean 'pkg.train'?"),
        ("pkg.inner.dep", "did you mean 'pkg.inner.deep'?"),
        ("pkg.train.x", "pkg.train is a module, not a package"),
        ("pkg/train.py", "did you mean 'pkg.train'?"),
        ("qqtrain.train", "was not found in /"),
        ("qqtrain.train", "go to the directory that contains 'qqtrain', or set PYTHONPATH to it"),
        ("pkg.inner", "is a package without a __main__.py"),
        ("space.below", "is a package without a __main__.py"),
        ("a..b", "is not the name of a module"),
    ],
)
def test_modules_that_cannot_be_run(path: list[str], name: str, reason: str) -> None:
    """With what is missing, and the nearest name."""
    assert reason in (why_not_runnable(name, path) or "")


def test_a_package_without_main_can_be_imported(path: list[str]) -> None:
    """For --preload."""
    assert why_not_found("pkg.inner", path) is None
