"""What all parts of one run's agent work with: ``RunContext``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from elaunch.agent.policy import events
from elaunch.agent.status.record import StatusRecord
from elaunch.config import Settings
from elaunch.runs.directory import RunDir


class RunContext(Struct, frozen=True):
    """One run on this node.

    Attributes:
        settings: what the user asked for.
        run_dir: where the run's record and its sockets are.
        log_root: holds ``attempt_<round>/<local_rank>/``; None: no log files are kept.
        environ: the variables of what the agent starts.
        post: puts an event into the loop's queue; any thread may call.
        record: the run's record; any thread may take a snapshot of it.
    """

    settings: Settings
    run_dir: RunDir
    log_root: Path | None
    environ: Mapping[str, str]
    post: Callable[[events.Event], None]
    record: StatusRecord
