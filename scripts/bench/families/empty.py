"""An empty script with one worker: the whole command, so mostly the launcher itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

TIMEOUT = 60.0


def cases(options: Options) -> list[Case]:
    """Return the case with plain processes, and for information the one with the fork server."""
    spawn = Figure("empty-spawn", "empty script, spawn", "s", Target("at_most", 0.3))
    fork = Figure("empty-forkserver", "empty script, fork server", "s")
    both = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    ours = {ELAUNCH: options.repeats}
    return [
        Case("empty", spawn.title, (spawn,), partial(_measure, spawn.key, "spawn"), both),
        Case("empty", fork.title, (fork,), partial(_measure, fork.key, "forkserver"), ours),
    ]


def _measure(key: str, start_method: str, trial: Trial) -> Mapping[str, Sample]:
    flags = ("--start-method", start_method) if trial.is_elaunch else ()
    with Job(trial.root, trial.launcher.command("empty", 1, flags)) as job:
        return {key: Sample(job.expect_exit(TIMEOUT))}
