"""Processes, pickles, sources and loaders behave in a worker as they do under torchrun.

The items are in parity/inside.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.parity.launches import HERE, Start, launch_once

pytestmark = [pytest.mark.slow, pytest.mark.executed]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one worker found, by method."""
    start = Start([str(HERE / "inside.py"), "argument"])
    outcomes = launch_once(tmp_path_factory, "inside", lambda _: start)
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0]
    return {method: outcome.read("inside") for method, outcome in outcomes.items()}


@pytest.mark.trial
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_each_item_is_torchruns(inside: dict[str, dict[str, Any]], method: str) -> None:
    """multiprocessing, DataLoader, subprocesses, signals, forks, daemons, pickles, inspect, ps."""
    expected = inside["torchrun"]
    found = inside[method]
    assert {n: (expected[n], found[n]) for n in expected if expected[n] != found[n]} == {}


@pytest.mark.trial
def test_every_item_works(inside: dict[str, dict[str, Any]]) -> None:
    """No item is an exception that all three share."""
    raised = {name: value for name, value in inside["fork"].items() if "raised" in str(value)[:10]}
    assert raised == {}
    assert inside["fork"]["loader_of_forks"] == [[[0, 1], [4, 9], [16, 25]]] * 2
    assert inside["fork"]["pool_of_forkserver"]["main's spec"] == "None"
