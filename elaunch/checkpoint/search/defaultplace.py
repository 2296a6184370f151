"""The default place of a run's checkpoints: beside its record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elaunch.run.statedir import file_name, state_root


def default_place(run_id: str, environ: Mapping[str, str]) -> Path | None:
    """Return ``$XDG_STATE_HOME/elaunch/<run id>/checkpoints``; None for a user without a home."""
    runs = state_root(environ)
    if runs is None:
        return None
    name = file_name(run_id or "run")
    return runs.parent / (name if name != runs.name else f"{name}.run") / "checkpoints"
