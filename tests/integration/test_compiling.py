"""A script that compiles: its kernels are found again, and so is what its server has imported."""

from __future__ import annotations

import re
import time
from pathlib import Path
from shutil import which

import pytest

from elaunch import proc
from tests.launching import Launcher
from tests.programs import needed

# A compilation costs ten seconds of CPU; what the server does is tried in tests/server.
pytestmark = [pytest.mark.slow, pytest.mark.trial]

SCRIPT = """
import os, sys, time
ahead = "torch._inductor.compile_fx" in sys.modules
import torch
from torch._dynamo.utils import counters
finders = len(sys.meta_path)
compiled = torch.compile(lambda x: (x.sin() + 1).sum(0))
assert compiled(torch.zeros(4, 8)).tolist() == [4.0] * 8
went = finders - len(sys.meta_path)
found = counters["inductor"]
hits = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
print(os.environ["ELAUNCH_ROUND"], f"ahead={ahead} {hits=} {went=}", flush=True)
while os.environ["ELAUNCH_ROUND"] == "0" and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(7 if os.environ["ELAUNCH_ROUND"] == "0" else 0)
"""


def test_a_restarted_worker_compiles_nothing_again(elaunch: Launcher, tmp_path: Path) -> None:
    """All kernels of the second round are in the cache, and TorchInductor is in its processes."""
    needed("g++", "as", "ld")
    script, go = tmp_path / "compiles.py", tmp_path / "go"
    script.write_text(SCRIPT)
    variables = {
        "LOGLEVEL": "INFO",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # seconds of work for one kernel
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    flags = ["--max-restarts=1", "--nproc-per-node=2"]
    running = elaunch.start(["run", *flags, script, go], env=variables)
    running.wait_for_line(r"the server has imported the later modules", 100, "stderr")
    for _ in range(2):
        running.wait_for_line(r"^0 ahead", 100)
    go.touch()
    done = running.wait(100)
    assert done.returncode == 0, done.stderr
    shown = sorted(re.findall(r"^\d ahead.*$", done.stdout, re.M))
    first = [line for line in shown if line.startswith("0 ")]
    assert all("ahead=False" in line and "went=1" in line for line in first)
    assert any("hits=(0, 1)" in line for line in first)  # the other one may have come later
    assert shown[2:] == ["1 ahead=True hits=(1, 0) went=0"] * 2


STARTS = """
import os, sys, time
import torch
number, started = os.environ["ELAUNCH_ROUND"], []
def note(event, args):
    if event == "subprocess.Popen" and "--version" not in args[1]:
        started.append(os.path.basename(args[0]))
sys.addaudithook(note)
assert torch.compile(lambda x: (x.sin() + 1).sum(0))(torch.zeros(4, 8)).tolist() == [4.0] * 8
print(number, f"server={os.getppid()}", *started, flush=True)
while number == "0" and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(7 if number == "0" else 0)
"""


def test_a_restarted_worker_starts_no_compiler(elaunch: Launcher, tmp_path: Path) -> None:
    """Not even to ask whether its precompiled header is that of the headers as they are."""
    needed("g++", "as", "ld", "openssl")
    script, go = tmp_path / "compiles.py", tmp_path / "go"
    script.write_text(STARTS)
    variables = {"LOGLEVEL": "INFO", "TMPDIR": str(tmp_path)}  # with an empty cache, and no header
    running = elaunch.start(["run", "--max-restarts=1", script, go], env=variables)
    running.wait_for_line(r"the server has imported the later modules", 100, "stderr")
    first = running.wait_for_line(r"^0 server=(\d+) (.+)", 200)
    others = {"worker", "store host"}
    until = time.monotonic() + 100
    while len(proc.children(int(first[1]))) > len(others) and time.monotonic() < until:
        time.sleep(0.05)
    go.touch()
    done = running.wait(100)
    assert done.returncode == 0, done.stderr
    assert "openssl" in first[2].split()
    assert re.search(r"^1 server=\d+$", done.stdout, re.M), done.stdout


KILLED = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch
cache, number = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), os.environ["ELAUNCH_ROUND"]
def kill_while_it_is_written():
    while not any(path.stat().st_size == 0 for path in cache.rglob("*.main.so")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
if number == "0":
    (cache / "own").mkdir()
    linker = cache / "own" / "ld"  # writes nothing for a while once the file is there
    find = 'for word; do [ "$last" = -o ] && made=$word; last=$word; done'
    choose = 'case "$made" in *.main.so) : > "$made"; sleep 60; esac'
    linker.write_text(f"#!/bin/sh\\n{find}\\n{choose}\\nexec {sys.argv[1]} \\"$@\\"\\n")
    linker.chmod(0o755)
    os.environ["COMPILER_PATH"] = str(linker.parent)
    threading.Thread(target=kill_while_it_is_written, daemon=True).start()
print(number, torch.compile(lambda x: (x.sin() + 1).sum(0))(torch.zeros(4, 8)).tolist(), flush=True)
"""


def test_a_worker_killed_while_its_linker_writes(elaunch: Launcher, tmp_path: Path) -> None:
    """The next round does not load what is left; TorchInductor would, in each later process."""
    needed("g++", "as", "ld")
    script = tmp_path / "compiles.py"
    script.write_text(KILLED)
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    (tmp_path / "cache").mkdir()
    done = elaunch.start(
        ["run", "--max-restarts=1", script, str(which("ld"))], env=variables
    ).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"1 {[4.0] * 8}"]
    assert ".main.so: its compiler was killed before it was whole" in done.stderr
