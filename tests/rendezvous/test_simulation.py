"""Hundreds of schedules of faults, each drawn from its seed (tests/rendezvous/simulation.py).

More of them: ``ELAUNCH_SIMULATIONS=20000 pytest tests/rendezvous/test_simulation.py``. A seed that
fails is replayed, with its story, by ``ELAUNCH_SIMULATION_SEED=<seed>`` and the same command.
"""

from __future__ import annotations

import os

import pytest

from tests.rendezvous.simulation import Broken, Simulation, story

NUMBER = int(os.environ.get("ELAUNCH_SIMULATIONS", "400"))
ONE = os.environ.get("ELAUNCH_SIMULATION_SEED")
PARTS = 8
COMMAND = "ELAUNCH_SIMULATION_SEED={} pytest tests/rendezvous/test_simulation.py"


@pytest.mark.slow
@pytest.mark.timeout(60 + NUMBER // 10)
@pytest.mark.parametrize("hurt", [False, True], ids=["whole", "hurt"])
@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.trial) for part in range(1, PARTS))],
)
def test_every_schedule_keeps_the_invariants(part: int, hurt: bool) -> None:
    """Joins, deaths, delays, partitions, lost answers, freezes, failures, growth, spares.

    With a store that is whole, and with one that is hurt itself (tests/rendezvous/simhurts.py).
    """
    seeds = range(part, NUMBER, PARTS) if ONE is None else [int(ONE)] * (part == 0)
    for seed in seeds:
        try:
            Simulation(seed, hurt).run()
        except Broken as exc:
            told = f"seed {seed}: {exc}\nreplay: {COMMAND.format(seed)}"
            pytest.fail(f"{told}\n{story(seed, hurt)}")


def test_a_seed_replays() -> None:
    """The same seed tells the same story, to the last digit."""
    assert story(3) == story(3)
    assert story(3) != story(4)
