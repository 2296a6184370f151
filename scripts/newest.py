"""Run the tests of what calls torch with the newest torch, too: a part of ``make test``.

The environment has the packages of the one that runs this, but for torch. Only builds for CUDA are
there from 2.14 on: they run with stubs in the place of CUDA's libraries (cudastubs.py), so a wheel
of half a gigabyte is all that is fetched. It stays in .venv-newest until another version is named.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import cudastubs

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv-newest"
NEWEST = "torch>=2.14,<2.16"
"""The newest that was tried, and the newest with a wheel for Python 3.10."""
ROOMS = (
    *("store/tcp/test_client.py", "store/tcp/test_server.py", "torchrun", "wire/test_recorder.py"),
    *(f"server/test_{name}.py" for name in ("compiling", "processes", "stores", "timers")),
    "server/test_torchfix.py",
    "training/stores",
    *(f"training/checkpoint/{room}" for room in ("dcp", "ddp", "state", "test_save*.py")),
    *(f"training/checkpoint/test_{name}.py" for name in ("faults", "load_url", "odd_values")),
    *(f"training/checkpoint/test_{name}.py" for name in ("recipes", "replicas")),
)
"""Where elaunch calls torch, or talks to what is torch's; not all that also runs beside torch."""


def environment() -> Path:
    """Return the interpreter of the environment, made anew unless it is there and complete."""
    python = PLACE / "bin" / "python"
    stamp = PLACE / "complete"
    made_for = f"{NEWEST} {sys.prefix} {sys.version}"
    if stamp.exists() and stamp.read_text() == made_for:
        return python
    shutil.rmtree(PLACE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", PLACE], check=True)
    (packages,) = PLACE.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words = ["--no-cache-dir", "--no-compile", "--no-deps", "--only-binary=torch"]
    subprocess.run([*pip, *words, "--target", packages, NEWEST], check=True)
    cudastubs.make(packages / "torch" / "lib")
    theirs = sysconfig.get_path("purelib")
    (packages / "rest.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
    stamp.write_text(made_for)
    return python


def main() -> NoReturn:
    """Become pytest."""
    rooms = [str(path) for room in ROOMS for path in sorted(ROOT.glob(f"tests/{room}"))]
    chosen = ["-m", "not slow and not trial", "-p", "no:cacheprovider", "-p", "no:anyio", "-n", "2"]
    python = environment()
    # pip has compiled nothing: with no bytecode kept, each import of torch compiles all of it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", "pytest", *sys.argv[1:], *chosen, *rooms])


if __name__ == "__main__":
    main()
