"""Try elaunch with other versions of torch and Python, one pair after the other: ``make matrix``.

Each pair gets an environment of its own, with the newest of everything else, and runs the fast
tests, those that compare with torchrun, and the demo. Builds of torch for CUDA run on CPUs, with
stubs in the place of CUDA's libraries. An environment takes 2 GB on the disk at most and is removed
before the next one is made.

``make matrix TORCH="2.6 2.15" PYTHONS=3.11 STEPS=parity`` takes some of the pairs and of
the steps. A table in Markdown is printed at the end, for docs/versions.md; the output of what
failed stays in matrix-results/. Interpreters are looked for on the PATH and among pyenv's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import cudastubs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "matrix-results"
TORCH = ("2.6", "2.7", "2.8", "2.10", "2.13", "2.14", "2.15")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CUDAS = re.compile(r"^Requires-Dist: (nvidia|cuda|triton).*\n", re.M)
"""What a build of torch for CUDA asks for, and stubs stand for (cudastubs.py)."""
DEADLINE = 3600
"""Seconds for one step of a pair."""
BESIDE = tuple(f"tests/{room}" for room in ("cli", "config", "integration", "peers", "torchrun"))
"""Where the tests are that start torchrun, or use torch's launcher, beside elaunch's."""
PYTEST = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")
STEPS = {
    "fast": (*PYTEST, "-m", "not slow and not trial"),
    "parity": (*PYTEST, "-m", "not trial", *BESIDE, "-k", "parity or torchrun or peers"),
    "demo": ("scripts/demo.py",),
}


class Failed(Exception):
    """A pair cannot be tried; the text is for the table."""


def interpreter(version: str) -> str:
    """Return the interpreter of a version; Failed where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        shutil.which(f"python{version}"),
        *map(str, pyenv.glob(f"versions/{version}.*/bin/python")),
    ]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, found):
        done = subprocess.run([path, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return path
    raise Failed("no interpreter")


def environment(directory: Path, base: str, torch: str) -> Path:
    """Make an environment with one version of torch and elaunch; return its interpreter.

    Failed where that version has no wheel.
    """
    subprocess.run([base, "-m", "venv", directory], check=True, timeout=DEADLINE)
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    words = ["--no-deps", "--only-binary=torch", f"torch=={torch}.*"]
    done = subprocess.run([*install, *words], capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise Failed("no wheel" if "No matching" in done.stderr else "cannot be installed")
    (metadata,) = directory.glob("lib/*/site-packages/torch-*.dist-info/METADATA")
    metadata.write_text(CUDAS.sub("", metadata.read_text()))
    cudastubs.make(metadata.parent.parent / "torch" / "lib")
    subprocess.run([*install, "-e", f"{ROOT}[test,examples]"], check=True, timeout=DEADLINE)
    return python


def last_line(output: str) -> str:
    """Return what pytest's last line counts, or nothing."""
    found = re.findall(r"\d+ (?:failed|passed|skipped|errors?)", output[-400:])
    return ", ".join(found)


def step(name: str, words: Sequence[str], python: Path, pair: str) -> str:
    """Run one step of a pair; return its cell of the table."""
    # The tests start programs by their names: those of this environment come first.
    environ = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    # pip has compiled nothing: with no bytecode kept, each import of torch compiles all of it.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [python, *words],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
    except subprocess.TimeoutExpired:
        return f"not within {DEADLINE} s"
    seconds = time.monotonic() - began
    if done.returncode != 0:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{pair} {name}.txt").write_text(done.stdout + done.stderr)
    counted = last_line(done.stdout) or ("passed" if done.returncode == 0 else "failed")
    print(f"{pair}: {name}: {counted} in {seconds:.0f} s", flush=True)
    return counted


def try_pair(torch: str, version: str, steps: Sequence[str]) -> list[str]:
    """Return the row of one version of torch and of Python: what came of each of ``steps``."""
    pair = f"torch {torch}, Python {version}"
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        try:
            python = environment(Path(directory) / "venv", interpreter(version), torch)
        except (Failed, subprocess.SubprocessError) as error:
            why = str(error) if isinstance(error, Failed) else "cannot be installed"
            print(f"{pair}: {why}", flush=True)
            return [torch, version, why, *[""] * (len(steps) - 1)]
        code = "import torch; print(torch.__version__)"
        exact = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
        return [exact, version, *(step(name, STEPS[name], python, pair) for name in steps)]


def main() -> int:
    """Try all pairs that are asked for; return 1 where a step of one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="*", default=TORCH)
    parser.add_argument("--python", nargs="*", default=PYTHONS)
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS)
    asked = parser.parse_args()
    pairs = [(torch, version) for torch in asked.torch for version in asked.python]
    rows = [try_pair(torch, version, asked.steps) for torch, version in pairs]
    header = ["torch", "Python", *asked.steps]
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(row)} |")
    return int(any(re.search(r"failed|error|not within", cell) for row in rows for cell in row))


if __name__ == "__main__":
    sys.exit(main())
