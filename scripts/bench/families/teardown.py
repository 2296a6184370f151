"""Agent SIGKILLed → last process of the job gone.

2 workers in a gloo group; each has a child, and a daemon in a session of its own that ignores
SIGTERM. The ends of all processes are awaited by descriptors opened before the kill; afterwards
/proc is searched again for anything that was started meanwhile.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping

import procfs
from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

KEY = "teardown"
WORKERS = 2
EXPECTED = 1 + 3 * WORKERS  # the agent; worker, child and daemon for each rank
TIMEOUT = 60.0
PATIENCE = 3.0


def cases(options: Options) -> list[Case]:
    """Return the one case."""
    figure = Figure(KEY, "agent SIGKILLed to last process gone", "s", Target("at_most", 0.5))
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return [Case("teardown", "agent SIGKILLed", (figure,), _measure, repeats)]


def _measure(trial: Trial) -> Mapping[str, Sample]:
    with Job(trial.root, trial.launcher.command("offspring", WORKERS)) as job:
        job.wait_stamps("ready", WORKERS, TIMEOUT)
        time.sleep(trial.options.settle)
        pids = job.pids()
        if len(pids) < EXPECTED:
            raise job.error(f"only {len(pids)} processes, {EXPECTED} expected")
        with procfs.watched(pids) as descriptors:
            killed = time.monotonic()
            job.process.send_signal(signal.SIGKILL)
            gone = _wait_gone(job, descriptors, killed + PATIENCE)
        left = job.pids() - {job.process.pid}
    detail = {"processes": len(pids)}
    if gone is None or left:
        return {KEY: Sample(math.inf, f"{len(left)} left after {PATIENCE:g} s", detail)}
    return {KEY: Sample(gone - killed, detail=detail)}


def _wait_gone(job: Job, descriptors: Mapping[int, int], deadline: float) -> float | None:
    """Return when the last process of the job ended; None when some are left at ``deadline``."""
    if procfs.wait_ended(descriptors, deadline):
        return None
    ended = time.monotonic()
    while late := job.pids():
        with procfs.watched(late) as more:
            if procfs.wait_ended(more, deadline):
                return None
        ended = time.monotonic()
    return ended
