"""The names of Prometheus' page, where they are written down for others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from elaunch.runs.prometheus import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_has_every_name() -> None:
    """With what it is; and no other."""
    rows = re.findall(r"^\| `(elaunch_\w+)` \| (.*) \|$", (DOCS / "dashboard.md").read_text(), re.M)
    assert dict(rows) == FAMILIES


def test_grafana_asks_for_these_names_only() -> None:
    """In panels, variables and markers; each panel asks for something."""
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = re.findall(r"elaunch_\w+", json.dumps(board))
    assert set(asked) <= set(FAMILIES)
    assert all("elaunch_" in t["expr"] for panel in board["panels"] for t in panel["targets"])
