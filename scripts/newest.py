"""Run the tests of what calls torch with the newest torch, too: a part of ``make test``.

The environment has the packages of the one that runs this, but for torch. Only builds for CUDA are
there from 2.14 on: they run with stubs in the place of CUDA's libraries (cudastubs.py), so a wheel
of half a gigabyte is all that is fetched. It stays in the user's cache, for other checkouts, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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


def torch_in_cache() -> Path:
    """Return the directory in the user's cache that has it whole; make it if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elaunch-tests"
    kind = f"{NEWEST} {sysconfig.get_platform()} {sys.version}"
    place = cache / f"torch-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"
    if place.exists():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words = ["--no-cache-dir", "--no-compile", "--no-deps", "--only-binary=torch"]
    try:
        subprocess.run([*pip, *words, "--target", made, NEWEST], check=True)
        cudastubs.make(made / "torch" / "lib")
        made.rename(place)
    except OSError:
        if not place.exists():  # no other checkout has made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def environment() -> Path:
    """Return the interpreter of the environment, made anew unless it is there and complete."""
    torch = torch_in_cache()
    python = PLACE / "bin" / "python"
    stamp = PLACE / "complete"
    made_for = f"{torch} {sys.prefix} {sys.version}"
    if stamp.exists() and stamp.read_text() == made_for:
        return python
    shutil.rmtree(PLACE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", PLACE], check=True)
    (packages,) = PLACE.glob("lib/python*/site-packages")
    theirs = sysconfig.get_path("purelib")
    lines = (str(torch), f"import site; site.addsitedir({theirs!r})")
    (packages / "rest.pth").write_text("\n".join(lines) + "\n")
    stamp.write_text(made_for)
    return python


def main() -> NoReturn:
    """Become pytest, unless ``--install`` asks for the environment alone."""
    rooms = [str(path) for room in ROOMS for path in sorted(ROOT.glob(f"tests/{room}"))]
    chosen = ["-m", "not slow and not trial", "-p", "no:cacheprovider", "-p", "no:anyio", "-n", "2"]
    python = environment()
    if sys.argv[1:] == ["--install"]:
        sys.exit()
    # pip has compiled nothing: with no bytecode kept, each import of torch compiles all of it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", "pytest", *sys.argv[1:], *chosen, *rooms])


if __name__ == "__main__":
    main()
