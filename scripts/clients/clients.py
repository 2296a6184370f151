"""Run other people's libraries under elaunch, and kill a rank of each: ``make clients``.

The libraries are installed into an environment of their own, ``.clients/venv``; one that wants
versions of torch or others that do not suit the rest gets an environment for itself. Each script of
``jobs`` is written as its library's documentation writes it, and knows nothing of elaunch. It runs
three times with two workers: under torchrun, undisturbed; under ``elaunch run`` on one node, and on
two (two agents that meet on the loopback interface), where a worker gets a SIGKILL as soon as there
are checkpoints. Recovered means that the job ended with 0 after one restart that went on from a
checkpoint, and with the same weights as the undisturbed run.

``make clients ONLY="accelerate composer"`` runs the libraries whose script's name contains one of
the words; without it, all those of ``.clients/venv``. A table in Markdown is printed at the end,
for docs/clients.md; the output of what failed stays in .clients/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libraries import LIBRARIES, SHARED, Library

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = Path(__file__).resolve().parent / "jobs"
PLACE = ROOT / ".clients"
INSTALLING = 1800
"""Seconds for the installation of one library."""
DEADLINE = 600
"""Seconds for one run of a script, far more than it takes."""
BEGIN = re.compile(r"begin: step (\d+)")
END = re.compile(r"end: step (\d+) weights (-?[\d.]+)")
RESTARTS = ("--max-restarts", "3")


class Failed(Exception):
    """A library cannot be tried, or a run went wrong; the text is for the table."""


@dataclass(frozen=True)
class Story:
    """One run of a script: where its rounds began, where it ended, with which weights."""

    begins: Sequence[int]
    end: int
    weights: str


def python(library: Library) -> Path:
    """Return the interpreter of a library's environment."""
    return PLACE / library.venv / "bin" / "python"


def pip(library: Library, *words: str) -> None:
    """Install into a library's environment; Failed, with pip's reason, where that does not work."""
    argv = [str(python(library)), "-m", "pip", "install", "--quiet", "--no-compile"]
    argv += ["-c", str(ROOT / "constraints.txt")] if library.venv == SHARED else []
    done = subprocess.run([*argv, *words], capture_output=True, text=True, timeout=INSTALLING)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Failed(f"cannot be installed: {errors[-1] if errors else done.stderr[-200:]}")


def version(library: Library, package: str) -> str:
    """Return the version of a package in a library's environment, or nothing."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    # Isolated: else it finds what lies in the current directory, such as this checkout's metadata.
    done = subprocess.run([python(library), "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def prepare(library: Library) -> None:
    """Make the environment with the library and elaunch, and with what DeepSpeed is built with."""
    if not python(library).exists():
        argv = [sys.executable, "-m", "venv", str(PLACE / library.venv)]
        subprocess.run(argv, check=True, timeout=INSTALLING)
        pip(library, "setuptools", "wheel", *(["torch"] if library.venv == SHARED else []))
    if not version(library, library.package):
        pip(library, library.package, *library.install)
    if not version(library, "elaunch"):  # behind the library, which may choose torch
        pip(library, "-e", str(ROOT))


def environment(library: Library, state: Path) -> dict[str, str]:
    """Return this environment without another launcher's settings, with a state directory."""
    foreign = ("PET_", "ELAUNCH_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    own = {"PATH": f"{python(library).parent}:{kept['PATH']}", "XDG_STATE_HOME": str(state)}
    own |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    own["TORCH_EXTENSIONS_DIR"] = str(PLACE / "extensions")  # DeepSpeed compiles one
    return {**kept, **own, **dict(word.split("=", 1) for word in library.env)}


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def victim(library: Library, env: Mapping[str, str]) -> int:
    """Return the pid of the last worker of a node, or 0 while it has none."""
    argv = [str(python(library)), "-m", "elaunch", "status", "--json", "client"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    workers = json.loads(done.stdout or "{}").get("workers") or [{}]
    return int(workers[-1].get("pid") or 0)


def saved(library: Library, checkpoints: Path) -> int:
    """Return how many checkpoints there are that count before a kill."""
    found = checkpoints.glob(library.saved)
    return sum(not library.age or time.time() - one.stat().st_mtime > library.age for one in found)


def kill_when_saved(library: Library, checkpoints: Path, env: Mapping[str, str]) -> None:
    """Kill a worker of the node whose environment is ``env``, once there are checkpoints."""
    until, pid = time.monotonic() + DEADLINE, 0
    while not pid or saved(library, checkpoints) < library.enough:
        if time.monotonic() > until:
            raise Failed("saved nothing")
        pid = pid or victim(library, env)
        time.sleep(0.02)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise Failed("ended before a worker could be killed") from None


def story(outputs: Sequence[str], codes: Sequence[int | None]) -> Story:
    """Return what a run's outputs tell; Failed where it did not end as it should.

    Some libraries print once for each node, others once for the job: the first output that tells
    the end counts.
    """
    for output in outputs if not any(codes) else ():
        if end := END.search(output):
            return Story([int(step) for step in BEGIN.findall(output)], int(end[1]), end[2])
    raise Failed(f"ended with {', '.join(map(str, codes))}")


def run(library: Library, commands: Sequence[Sequence[str]], place: Path, *, kill: bool) -> Story:
    """Run the command of each node at the same time; return what became of the job."""
    outputs = [place / f"node{number}.txt" for number in range(len(commands))]
    envs = [environment(library, place / f"state{number}") for number in range(len(commands))]
    running = []
    try:
        for argv, output, env in zip(commands, outputs, envs, strict=True):
            with output.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        argv, cwd=place, env=env, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        if kill:
            kill_when_saved(library, place / "ckpts", envs[-1])
        for process in running:
            process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        raise Failed(f"not within {DEADLINE} s") from None
    finally:
        for process in running:
            process.terminate()
            process.wait(DEADLINE)
    codes = [process.returncode for process in running]
    return story([output.read_text(errors="replace") for output in outputs], codes)


@contextlib.contextmanager
def meeting(library: Library, place: Path) -> Iterator[list[str]]:
    """Give the words that say where two nodes meet; runs an etcd meanwhile if it is there."""
    at = f"127.0.0.1:{free_port()}"
    words = ["--rdzv-backend", library.meeting, "--rdzv-endpoint", at]
    if library.meeting != "etcd":
        yield words
        return
    argv = ["etcd", "--data-dir", str(place / "etcd"), "--listen-client-urls", f"http://{at}"]
    argv += ["--advertise-client-urls", f"http://{at}", "--log-level", "error"]
    argv += ["--listen-peer-urls", f"http://127.0.0.1:{free_port()}"]
    try:
        with (place / "etcd.txt").open("wb") as file:
            etcd = subprocess.Popen(argv, stdout=file, stderr=file)
    except FileNotFoundError:
        raise Failed("no etcd on the PATH") from None
    try:
        yield words
    finally:
        etcd.terminate()
        etcd.wait(DEADLINE)


def command(library: Library, place: Path, words: Sequence[str]) -> list[str]:
    """Return the command of a node under elaunch; ``words``: its part in the job."""
    start = [str(python(library)), "-m", "elaunch", "run", *RESTARTS, "--rdzv-id", "client"]
    return [*start, *words, *library.supervised(str(JOBS / library.script), str(place / "ckpts"))]


def undisturbed(library: Library, place: Path) -> Story:
    """Run the script under torchrun, without a kill."""
    start = [str(python(library)), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = library.plain(str(JOBS / library.script), str(place / "ckpts"))
    return run(library, [[*start, *words]], place, kill=False)


def recovered(library: Library, place: Path, nodes: int, reference: Story) -> str:
    """Run the script under elaunch with a kill; return the cell of the table."""
    if nodes == 1:
        one = command(library, place, ["--nproc-per-node", "2"])
        found = run(library, [one], place, kill=True)
    else:
        with meeting(library, place) as words:
            each = command(library, place, ["--nnodes", str(nodes), *words])
            found = run(library, [each] * nodes, place, kill=True)
    begins = ", ".join(map(str, found.begins))
    if len(found.begins) != 2 or found.begins[0] != 0 or found.begins[1] == 0:
        raise Failed(f"began at steps {begins}")
    if (found.end, found.weights) != (reference.end, reference.weights):
        raise Failed(f"other weights: {found.weights} and {reference.weights}")
    return f"from step {found.begins[1]} of {found.end}"


def attempt(library: Library, name: str, nodes: int, reference: Story | None) -> tuple[str, Story]:
    """Make one run in a directory of its own, which stays where it failed."""
    place = Path(tempfile.mkdtemp(prefix="clients-"))
    (place / "ckpts").mkdir()
    try:
        if reference is None:
            return "", undisturbed(library, place)
        return recovered(library, place, nodes, reference), reference
    except Failed:
        kept = PLACE / "results" / f"{Path(library.script).stem} {name}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept, ignore=shutil.ignore_patterns("ckpts", "state*"))
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def row(library: Library) -> tuple[list[str], bool]:
    """Try a library; return its row of the table, and whether all of it worked."""
    cells, worked = ["", ""], False
    try:
        prepare(library)
        _, reference = attempt(library, "torchrun", 1, None)
        worked = True
    except Failed as failure:
        return [
            library.name,
            version(library, library.package),
            f"torchrun: {failure}",
            "",
            "",
        ], False
    for nodes in (1, 2):
        try:
            cells[nodes - 1], _ = attempt(library, f"nodes {nodes}", nodes, reference)
        except Failed as failure:
            cells[nodes - 1], worked = f"**{failure}**", False
    print(f"{library.name}: {', '.join(cells)}", flush=True)
    return [library.name, version(library, library.package), *cells, f"`{library.line()}`"], worked


def main() -> int:
    """Try all libraries that are asked for; return 1 where one of them was not recovered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="WORD")
    only = parser.parse_args().only
    asked = [
        library
        for library in LIBRARIES
        if (
            library.venv == SHARED if only is None else any(word in library.script for word in only)
        )
    ]
    rows = [row(library) for library in asked]
    header = ["library", "version", "one node", "two nodes", "the line to type"]
    for cells in (header, ["---"] * len(header), *(cells for cells, _ in rows)):
        print(f"| {' | '.join(cells)} |")
    return int(not all(worked for _, worked in rows))


if __name__ == "__main__":
    sys.exit(main())
