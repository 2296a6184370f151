"""The environment of a job, and what of it another job must not take for its own."""

from __future__ import annotations

import subprocess

import pytest

from elaunch import env
from elaunch.config import settings

SHARED = {"ELAUNCH_MAX_RESTARTS": "3", "PET_ROLE": "r", "RANK": "1", "HOME": "/h"}


def test_every_variable_of_elaunchs_own_is_known_as_a_fact() -> None:
    """A new one that is set for workers belongs there, too."""
    own = {name for name in settings._reserved() if name.startswith("ELAUNCH_")}
    assert own - env.FACTS == set()


def test_a_job_inside_of_a_worker_has_no_facts_of_the_outer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a person has exported stays."""
    monkeypatch.setattr("os.environ", {**dict.fromkeys(env.FACTS, "outer"), **SHARED})
    assert env.launcher_environment() == SHARED


def test_outside_of_a_worker_they_are_a_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script reads ELAUNCH_CHECKPOINT_KEEP under every launcher; torch's client its pipe."""
    given = {env.CHECKPOINT_KEEP: "{}", env.TIMER_FILE: "/pipe", **SHARED}
    monkeypatch.setattr("os.environ", {**given, env.RUN_ID_GIVEN: "1", env.STACKS_FILE: "/s"})
    assert env.launcher_environment() == given


@pytest.mark.parametrize(("nodes", "listed"), [(7_000, 7_000), (16_384, 0)])
def test_a_worker_of_a_very_large_job_starts_programs(nodes: int, listed: int) -> None:
    """Linux takes no variable of more than 128 KiB."""
    place = env.NodePlace(0, ("10.20.30.40X",) * nodes, 0, nodes, 0, nodes)
    facts = env.RoundFacts("job", place=place)
    variables = env.worker_environment(facts, 0, "/e", {})
    subprocess.run(["/bin/true"], env=variables, check=True)
    found = variables["ELAUNCH_NODE_ADDRS"]
    assert (len(found.split(",")) if found else 0) == listed
    assert variables["GROUP_WORLD_SIZE"] == str(nodes)
