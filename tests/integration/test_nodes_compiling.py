"""A node that comes into a job that compiles: it compiles nothing that the others have compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Node
from tests.integration.nodes import Build, Job, end
from tests.programs import needed

pytestmark = [pytest.mark.trial, pytest.mark.executed]  # its own directory for temporary files

SCRIPT = """
import os, sys, time
AHEAD = "torch._inductor.compile_fx" in sys.modules
began = time.monotonic()
import torch
from torch._dynamo.utils import counters
compiled = torch.compile(lambda x: (x.sin() + 1).sum(0))
assert compiled(torch.zeros(4, 8)).tolist() == [4.0] * 8
seconds = time.monotonic() - began
found = counters["inductor"]
name = f"{os.environ['ELAUNCH_ROUND']}.{os.environ['RANK']}"
counts = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
print(name, *counts, f"{seconds:.2f} s", "ahead" if AHEAD else "late", flush=True)
while not os.path.exists(os.path.join(os.environ["SHARE"], "stop")):
    time.sleep(0.05)
"""


def compiled_on(node: Node) -> set[str]:
    """Return the names of what a node's compiler has left; without locks, made by each reader."""
    places = Path(node.env["TMPDIR"]).glob("torchinductor_*/**/*")
    return {path.name for path in places if path.is_file() and path.suffix != ".lock"}


def test_a_newcomer_finds_what_the_others_have_compiled(cluster: Build) -> None:
    """With an empty directory for temporary files of its own, and the job's secret."""
    needed("g++", "as", "ld")
    job = Job(cluster, "c10d", 2)
    job.conf |= {"settle": 0.5, "debounce": 0.5}
    script, secret = job.machines.directory / "compiles.py", job.machines.directory / "secret"
    script.write_text(SCRIPT)
    secret.write_text("between us")
    secret.chmod(0o600)
    flags = ["--nnodes=1:2", "--max-restarts=0", f"--rdzv-secret-file={secret}"]
    env = {"SHARE": str(job.share), "LOGLEVEL": "INFO"}
    one = job.start(1, flags, env=env, method=[], script=script)
    assert one.wait_for_line(r"^0\.0 (\d \d) ", 200)[1] == "0 1"
    two = job.start(2, flags, env=env, method=[], script=script)
    two.wait_for_line(r"files of compiled code have come from node 0", 100, "stderr")
    first = one.wait_for_line(r"^1\.0 (\d \d) (.+)", 200)
    newcomer = two.wait_for_line(r"^1\.1 (\d \d) (.+)", 200)
    assert (first[1], newcomer[1]) == ("1 0", "1 0")
    made = [compiled_on(node) for node in job.machines.nodes]
    assert any(name.endswith(".gch") for name in made[1])
    assert made[1] <= made[0]
    print(f"first compiled step: {first[2]}, on the newcomer {newcomer[2]}")
    assert end(job, one, two) == [0, 0]
