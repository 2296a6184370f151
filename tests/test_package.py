"""What is published: built from the sources, installed without them, and run."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.launching import Launcher

ROOT = Path(__file__).parent.parent
SOURCES = ("elaunch", "examples", "setup.cfg", "pyproject.toml", "MANIFEST.in")
PAGES = ("README.md", "LICENSE", "CHANGELOG.md")
SCRIPT = """
import elaunch
with elaunch.init() as ctx:
    print(ctx.distributed.allgather(ctx.distributed.rank), elaunch.__file__)
"""

pytestmark = pytest.mark.slow


def call(*words: str | Path, cwd: Path) -> None:
    """Run a command of the build; it may write nothing into this checkout."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the wheel and the sdist; the wheel is made from that."""
    copy = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, *PAGES):
        if (ROOT / name).is_dir():
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=left_out)
        else:
            shutil.copyfile(ROOT / name, copy / name)
    call(sys.executable, "-m", "build", "--no-isolation", ".", cwd=copy)
    return copy / "dist"


def test_the_package_is_whole(built: Path) -> None:
    """Every file of the package is in both, nothing of the tests is; README is the description."""
    walked = os.walk(ROOT / "elaunch", followlinks=True)  # one is to the examples
    paths = [Path(where, name) for where, _, names in walked for name in names]
    ours = {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(opened.read(about).decode())
    assert {name for name in names if ".dist-info/" not in name} == ours
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | set(PAGES) <= inside
    assert [name for name in inside if name.startswith("tests")] == []


def test_it_runs_without_the_sources(built: Path, elaunch: Launcher, tmp_path: Path) -> None:
    """In an environment of its own, which has torch and the rest by a path."""
    place = tmp_path / "env"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    call(*pip, "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)
    (packages,) = (place / "lib").glob("python*/site-packages")
    # The path's own .pth files are not read: those of an editable installation would find elaunch.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    command = place / "bin" / "elaunch"
    words = ["run", "--nproc-per-node=2", "--preload=none", "train.py"]
    done = elaunch.start_command([command, *words], env=environ, cwd=tmp_path).wait()
    assert done.returncode == 0, done.stderr
    line = f"[0, 1] {packages}/elaunch/__init__.py\n"
    assert done.stdout == 2 * line
    shown = elaunch.start_command([python, "-m", "elaunch", "examples"], env=environ, cwd=tmp_path)
    assert "digits_ddp" in shown.wait().stdout


def test_every_extra_is_in_the_table() -> None:
    """README.md says what each is for."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line[:1] == "|"]
    rows = re.findall(r"`elaunch\[(\w+)\]`", "\n".join(table))
    assert sorted(rows) == sorted(setup["options.extras_require"])
