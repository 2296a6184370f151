"""What elaunch's recorder of collectives costs an ``all_reduce`` of 4 floats on gloo.

Compared are blocks of calls that follow each other in one job: with the recorder, with what torch
records by itself, and without any. A sample is the median over the blocks of a job of how much
longer the call takes; which workers have the recorder changes from job to job. Beside other work a
sample is up to 7 % off, hence many jobs. **One rank** has nobody to wait for: its figure is what
recording takes of the processor.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH

TIMEOUT = 200.0
GROUPS = 3
CALLS, BLOCKS = 20, 500
US = 1e6
OVER_NONE, OVER_TORCH, ALONE = "recorder-none", "recorder-torch", "recorder-alone"


def cases(options: Options) -> list[Case]:
    """Return the case of two ranks and that of one."""
    limit = Target("at_most", 2.0)
    two = (
        Figure(OVER_TORCH, "all_reduce with the recorder, over torch's own record", "%", limit),
        Figure(OVER_NONE, "… over no record at all", "%", limit),
    )
    one = (Figure(ALONE, "… of one rank: recording a collective", "us"),)
    repeats = {ELAUNCH: options.trials}
    return [
        Case("recorder", "recorder, 2 ranks", two, partial(_two, 2), repeats),
        Case("recorder", "recorder, 1 rank", one, partial(_one, 1), repeats),
    ]


def _two(size: int, trial: Trial) -> Mapping[str, Sample]:
    found = _run(size, trial)
    told = {mode: statistics.median(medians) * US for mode, medians in found.items()}

    def over(mode: str) -> Sample:
        ratios = [ours / other for ours, other in zip(found["with"], found[mode], strict=True)]
        return Sample(100 * (statistics.median(ratios) - 1), detail=told)

    return {OVER_TORCH: over("torch"), OVER_NONE: over("without")}


def _one(size: int, trial: Trial) -> Mapping[str, Sample]:
    found = _run(size, trial)
    longer = [ours - other for ours, other in zip(found["with"], found["without"], strict=True)]
    return {ALONE: Sample(statistics.median(longer) * US)}


def _run(size: int, trial: Trial) -> dict[str, list[float]]:
    """Return by mode the seconds of a call, block by block; of a group's ranks the mean."""
    args = (size, CALLS, BLOCKS, trial.number % GROUPS)
    command = trial.launcher.command("recorder", GROUPS * size, (), tuple(map(str, args)))
    with Job(trial.root, command) as job:
        job.expect_exit(TIMEOUT)
        stamps = job.read_stamps("recorder").values()
    by_mode: dict[str, list[list[float]]] = {}
    for stamp in stamps:
        by_mode.setdefault(stamp["mode"], []).append(stamp["medians"])
    return {
        mode: [statistics.fmean(block) for block in zip(*ranks, strict=True)]
        for mode, ranks in by_mode.items()
    }
