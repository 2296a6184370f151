"""The first compiled step of two workers: of a cold start, and after a worker has exited 7.

The cache of TorchInductor is empty at the start and lies where the launcher has it. The worker that
exits does so SETTLE seconds after its first step: a failure right behind it is no usual one.
"""

from __future__ import annotations

from collections.abc import Mapping

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

WORKERS = 2
SETTLE = 20.0
TIMEOUT = 240.0
SAMPLES = 2
COLD, AGAIN = "compiled-cold", "compiled-again"


def cases(options: Options) -> list[Case]:
    """Return the one case; a sample takes one to three minutes."""
    figures = (
        Figure(COLD, "script begins → first compiled step, empty cache", "s"),
        Figure(AGAIN, "exit 7 → next first compiled step", "s", Target("at_most", 1.0)),
    )
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), min(SAMPLES, options.repeats))
    return [Case("compiled", "compiled step", figures, _measure, repeats)]


def _measure(trial: Trial) -> Mapping[str, Sample]:
    flags = ("--max-restarts", "3")
    command = trial.launcher.command("compiled_step", WORKERS, flags, (str(SETTLE),))
    with Job(trial.root, command, trial.launcher.for_restarts) as job:
        job.expect_exit(TIMEOUT)
        started, stepped = job.read_stamps("started"), job.read_stamps("stepped")
        exited = job.read_stamps("exit")[0, 1]["mono"]
    cold, again = (
        max(stamp["mono"] for (number, _), stamp in stepped.items() if number == round_number)
        for round_number in (0, 1)
    )
    began = min(stamp["mono"] for (number, _), stamp in started.items() if number == 0)
    return {COLD: Sample(cold - began), AGAIN: Sample(again - exited)}
