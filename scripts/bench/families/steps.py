"""``ctx.train.steps`` beside DDP with accumulation: what a step takes, and what memory it needs.

Both train one model of 50 MB with 12 micro-batches in a step, in one job and in turns. A sample is
the median of what a step took by ``steps`` over the median of DDP's, each as long as it took the
slowest rank. The memory is that of jobs which do only one of the two.

A rank of four is killed: from just before it until the slowest of the others has applied its next
step, whose micro-batches they have shared. A trial counts where these go on in their processes and
none of them has applied a step twice, or lost one.
"""

from __future__ import annotations

import math
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
KILLED = 4


def cases(options: Options) -> list[Case]:
    """Return a case for each number of ranks."""
    repeats = {ELAUNCH: options.repeats}
    killed = Case(
        "steps",
        f"steps, one of {KILLED} ranks killed",
        (
            Figure("steps-killed", "kill of a rank to the next step of all others", "s"),
            Figure("steps-kept", "… in their processes, no step lost", "trials"),
        ),
        _measure_killed,
        repeats,
    )
    return [
        killed,
        *(_beside(size, limit, repeats) for size, limit in LIMITS.items()),
    ]


def _beside(size: int, limit: float, repeats: Mapping[str, int]) -> Case:
    figures = (
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
    )
    return Case("steps", f"steps, {size} ranks", figures, partial(_measure, size), repeats)


def _measure_killed(trial: Trial) -> Mapping[str, Sample]:
    flags = ("--max-restarts", "3")
    command = trial.launcher.command("steps_killed", KILLED, flags)
    with Job(trial.root, command) as job:
        job.expect_exit(TIMEOUT)
        (killed,) = job.read_stamps("killed").values()
        found = [stamp for _, stamp in sorted(job.read_stamps("steps").items())]
    at = killed["mono"]
    newcomers = [one for one in found if min(one["applied"], default=math.inf) > at]
    others = [one["applied"] for one in found if one not in newcomers]
    good = len(newcomers) == 1 and len({len(applied) for applied in others}) == 1
    seconds = max(min(moment for moment in applied if moment > at) for applied in others) - at
    detail = {"applied": [len(applied) for applied in others]}
    return {"steps-killed": Sample(seconds), "steps-kept": Sample(float(good), detail=detail)}


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
