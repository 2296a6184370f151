"""The names of Prometheus' page, where they are written down for others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from elaunch.runs.prometheus import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_has_every_name() -> None:
    """With what it is, in the first table; a second one has the labels of some, and no other."""
    rows = re.findall(r"^\| `(elaunch_\w+)` \| (.*) \|$", (DOCS / "exporters.md").read_text(), re.M)
    assert dict(reversed(rows)) == FAMILIES


def test_grafana_asks_for_these_names() -> None:
    """In panels, variables and markers: for no others, and for all but three."""
    board = json.loads((DOCS / "grafana.json").read_text())
    left = {f"elaunch_run_{name}" for name in ("world_size", "checkpoint_commits", "exit_code")}
    assert set(re.findall(r"elaunch_\w+", json.dumps(board))) == set(FAMILIES) - left
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) == len(set(asked)) and all("elaunch_" in one for one in asked)
