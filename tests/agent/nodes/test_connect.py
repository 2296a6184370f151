"""What an agent takes of the coordinator's plans."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.nodes.connect import CheckpointCheck


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
