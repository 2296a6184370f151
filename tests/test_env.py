"""The environment of a job, and what of it another job must not take for its own."""

from __future__ import annotations

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
