"""Start → first all-reduce of all ranks.

From just before the command is started to the stamp of the latest rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

RATIOS = {2: 0.6, 4: 0.4, 8: 0.22}
TIMEOUT = 90.0


def cases(options: Options) -> list[Case]:
    """Return one case for each number of workers."""
    return [_case(options, workers) for workers in options.sizes]


def _case(options: Options, workers: int) -> Case:
    figure = Figure(
        f"start-{workers}",
        f"start to first all-reduce, {workers} workers",
        "s",
        Target("ratio", RATIOS[workers]),
    )
    measure = partial(_measure, figure.key, workers)
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return Case("start", f"start, {workers} workers", (figure,), measure, repeats)


def _measure(key: str, workers: int, trial: Trial) -> Mapping[str, Sample]:
    command = trial.launcher.command("first_allreduce", workers)
    with Job(trial.root, command) as job:
        whole = job.expect_exit(TIMEOUT)
        stamps = job.read_stamps("joined")
        started = max(stamp["mono"] for stamp in job.read_stamps("started").values())
        if set(stamps) != {(0, rank) for rank in range(workers)}:
            raise job.error(f"stamps of {sorted(stamps)} (round, rank)")
        joined = sorted(stamp["mono"] - job.started for stamp in stamps.values())
    detail = {
        "script_started": started - job.started,
        "first_rank_joined": joined[0],
        "whole_command": whole,
    }
    return {key: Sample(joined[-1], detail=detail)}
