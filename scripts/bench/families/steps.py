"""``ctx.train.steps`` beside DDP with accumulation: what a step takes, and what memory it needs.

Both train one model of 50 MB with 12 micro-batches in a step, in one job and in turns. A sample is
the median of what a step took by ``steps`` over the median of DDP's, each as long as it took the
slowest rank. The memory is that of jobs which do only one of the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH

TIMEOUT = 300.0
TURNS, FEW = 8, 2
SKIPPED = 2
"""Steps at the beginning that do not count: buffers are made in them."""
GRADIENT = 50.4e6
LIMITS = {2: 1.0, 3: 1.2, 4: 1.0}


def cases(options: Options) -> list[Case]:
    """Return a case for each number of ranks."""
    repeats = {ELAUNCH: options.repeats}
    return [
        Case(
            "steps",
            f"steps, {size} ranks",
            (
                Figure(
                    f"steps-{size}",
                    f"a step of ctx.train.steps over one of DDP, {size} ranks",
                    "share",
                    Target("at_most", limit),
                ),
                Figure(
                    f"steps-memory-{size}",
                    "… its memory beyond DDP's, in gradients",
                    "count",
                    Target("at_most", 2.0),
                ),
            ),
            partial(_measure, size),
            repeats,
        )
        for size, limit in LIMITS.items()
    ]


def _measure(size: int, trial: Trial) -> Mapping[str, Sample]:
    both = _run(size, trial, "both", TURNS)
    medians = {name: _median(both, name) for name in ("steps", "ddp")}
    memory = {
        name: max(stamp["memory"] for stamp in _run(size, trial, name, FEW))
        for name in ("steps", "ddp")
    }
    beyond = (memory["steps"] - memory["ddp"]) / GRADIENT
    return {
        f"steps-{size}": Sample(medians["steps"] / medians["ddp"], detail=medians),
        f"steps-memory-{size}": Sample(beyond, detail=memory),
    }


def _median(ranks: list[dict[str, Any]], name: str) -> float:
    steps = zip(*(rank[name][SKIPPED:] for rank in ranks), strict=True)
    return float(statistics.median(map(max, steps)))


def _run(size: int, trial: Trial, mode: str, turns: int) -> list[dict[str, Any]]:
    command = trial.launcher.command("steps_beside", size, (), (mode, str(turns)))
    with Job(trial.root, command) as job:
        job.expect_exit(TIMEOUT)
        return list(job.read_stamps("steps").values())
