"""The records that the parts of one run's agent are made with: its run, and its saver's setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from elaunch.agent.policy import events
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.status.record import StatusRecord
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.search.locations import has_placeholder
from elaunch.config import Settings
from elaunch.rendezvous.plan import Plan
from elaunch.runs.directory import RunDir

if TYPE_CHECKING:
    from elaunch.agent.peers.peers import Peers


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


class SaverSetup(Struct, frozen=True):
    """Settings and connections that an agent gives its saver.

    Attributes:
        settings: of the run.
        post: sends events to the loop; any thread may call.
        finisher: has the directory's lock.
        read_plan: reads the plan from the store, now, and never waits for ever; raises StoreError
            or RecordError. None in a job of one node.
        peers: sends reports and shards to the other nodes' agents. None in a job of one node.
    """

    settings: Settings
    post: Callable[[events.Event], None]
    finisher: DirectoryFinisher
    read_plan: Callable[[], Plan] | None = None
    peers: Peers | None = None

    def loads_by_call(self, place: Location) -> bool:
        """Whether the script itself loads what the round resumes from, and that is at ``place``."""
        chosen = self.settings.checkpoint_dir
        return str(chosen) == str(place) and not has_placeholder(self.settings.args)
