"""elaunch.views.failures: failure reports of a directory that somebody else may have written."""

from __future__ import annotations

import json
from pathlib import Path

from elaunch.runs.directory import RunDir
from elaunch.views.failures import read_card


def test_a_report_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """It would show any file of whoever asks why."""
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"headline": "a secret"}))
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for suffix in ("json", "txt"):
        run.report(0, suffix).symlink_to(secret)
    card = read_card(run, 0)
    assert card.document is None and "secret" not in card.text
    assert "not a regular file: failure-0.json" in card.problem
