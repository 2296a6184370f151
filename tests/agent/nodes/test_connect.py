"""For how long an agent tries to join, and what it takes of the coordinator's plans."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.nodes.connect import CheckpointCheck
from tests.launching import Launcher, free_port

NOBODY = {
    "c10d": "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=is_host=0,{conf}",
    "etcd": "--rdzv-backend=etcd --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf={conf}",
    "static": "--node-rank=1 --master-addr=127.0.0.1 --master-port={port} --rdzv-conf={conf}",
}


@pytest.mark.parametrize(
    ("place", "taken"),
    [("own", True), ("own/step-1", True), ("own/../evil", False), (".", False), ("own-2", False)],
)
def test_a_checkpoint_is_at_or_below_the_nodes_directory(
    tmp_path: Path, place: str, taken: bool
) -> None:
    """DeepSpeed's is the directory itself."""
    plan: Any = SimpleNamespace(checkpoint=SimpleNamespace(path=str(tmp_path / place)))
    assert (CheckpointCheck(tmp_path / "own").problem(plan) == "") == taken


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["c10d", "etcd", pytest.param("static", marks=pytest.mark.trial)]
)
def test_nobody_is_waited_for_as_long_as_was_said(
    elaunch: Launcher, tmp_path: Path, backend: str
) -> None:
    """Although one attempt to reach the store takes nearly as long."""
    script = tmp_path / "script.py"
    script.touch()
    flags = NOBODY[backend].format(port=free_port(), conf="join_timeout=7").split()
    done = elaunch.run(["run", "--nnodes=2", "--rdzv-id=job", *flags, str(script)])
    assert done.returncode == 69
    waited = re.search(r"FAILED after ([\d.]+) s,.* cannot join: ", done.stderr)
    assert waited is not None, done.stderr
    assert 6.9 <= float(waited[1]) < 12.0
