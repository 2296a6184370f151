"""Debuggers, profilers, test runners, RPC, gRPC, joblib: as in a plain process.

The items are in parity/tools.py; each is seen in two rounds, in a script and in a module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parity.launches import HERE, Outcome, Start, launch_alike
from tests.programs import needed

pytestmark = [pytest.mark.slow, pytest.mark.executed]

METHODS = ("torchrun", "spawn", "fork")
TWICE = ("--max-restarts", "1")
SCRIPT = str(HERE / "tools.py")


def assert_alike(expected: dict[str, Any], outcomes: dict[str, Outcome], workers: int = 1) -> None:
    """All ranks in both rounds of all methods saw what is expected, and no item raised."""
    assert {method: one.code for method, one in outcomes.items()} == dict.fromkeys(outcomes, 0)
    assert {n: v for n, v in expected.items() if "raised" in str(v)[:10]} == {}
    for method, outcome in outcomes.items():
        for number in (f"{number}.{rank}" for number in (0, 1) for rank in range(workers)):
            found = outcome.read(number)
            different = {n: (v, found[n]) for n, v in expected.items() if v != found[n]}
            assert (method, number, different) == (method, number, {})


@pytest.mark.trial
def test_tools_in_a_forked_worker(tmp_path: Path) -> None:
    """Those that do without torch, beside a plain process."""
    outcomes = launch_alike(tmp_path, Start([SCRIPT], options=TWICE), ["fork without preload"])
    env = {**os.environ, "PARITY_OUT": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": "0"}
    subprocess.run([sys.executable, "-u", SCRIPT], env=env, cwd=tmp_path, capture_output=True)
    assert_alike(json.loads((tmp_path / "0.0.json").read_text()), outcomes)


@pytest.mark.trial
@pytest.mark.parametrize(
    "words", [[SCRIPT], ["-m", "tools"], [SCRIPT, "torch"]], ids=["script", "module", "torch"]
)
def test_tools_as_under_torchrun(tmp_path: Path, words: list[str]) -> None:
    """Forked from a server with torch, and spawned."""
    start = Start(words, options=TWICE, env={"PYTHONPATH": str(HERE)})
    outcomes = launch_alike(tmp_path, start)
    assert_alike(outcomes["torchrun"].read("0.0"), outcomes)


@pytest.mark.trial
def test_two_ranks_compile_an_extension(tmp_path: Path) -> None:
    """One builds while the other waits; the second round finds it."""
    needed("g++", "ninja", "as", "ld")
    for method in METHODS:
        place = tmp_path / method
        place.mkdir()
        env = {"TORCH_EXTENSIONS_DIR": str(place / "built"), "CXX": "g++"}
        start = Start([SCRIPT, "together"], workers=2, options=TWICE, env=env)
        outcomes = launch_alike(place, start, [method])
        assert_alike({"cpp_extension": [6, "tripling/tripling.so"]}, outcomes, workers=2)


@pytest.mark.trial
@pytest.mark.parametrize("method", [*METHODS, "fork with jax"])
def test_two_ranks_compute_with_jax(tmp_path: Path, method: str) -> None:
    """Its own group of processes, in both rounds."""
    pytest.importorskip("jax", reason="pip install jax, in an environment of its own")
    start = Start([SCRIPT, "jax"], workers=2, options=TWICE)
    outcomes = launch_alike(tmp_path, start, [method])
    expected = {"jax_of_all_ranks": [64.0, [0.0, 6.0, 12.0], [1, 2], 2]}
    assert_alike(expected, outcomes, workers=2)
