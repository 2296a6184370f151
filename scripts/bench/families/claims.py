"""What README.md claims, each measured by running both launchers: ``make claims``.

The title of a figure is the claim. What other families measure is measured here by them, with fewer
samples and the limit that the claim needs.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import procfs
from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, JOBS, TORCHRUN, find

from families import recovery, steps, teardown

TIMEOUT = 60.0
WORKERS = 2
FEW = 3
RESTART = Target("ratio", 0.25)
GRACE = 2
"""Seconds that elaunch's job has to end after Ctrl-C: a daemon in it takes no notice."""
SOON = 5.0
"""Seconds after which a process that is still there is called left behind."""


def cases(options: Options) -> list[Case]:
    """Return a case for each claim, in README's order."""
    few = min(options.repeats, FEW)
    both, alone = dict.fromkeys((TORCHRUN, ELAUNCH), few), {ELAUNCH: few}
    small = replace(options, repeats=few, trials=few, sizes=(WORKERS,))
    whole = Target("all", few)

    def case(
        measure: Callable[[Trial], Mapping[str, Sample]],
        repeats: Mapping[str, int],
        *figures: Figure,
    ) -> Case:
        def only_these(trial: Trial) -> Mapping[str, Sample]:
            keys = {figure.key for figure in figures}
            return {key: sample for key, sample in measure(trial).items() if key in keys}

        return Case("claims", figures[0].title, figures, only_these, repeats)

    return [
        case(
            _measure_drop_in,
            alone,
            Figure("drop-in", "a script sees what it sees under torchrun", "trials", whole),
        ),
        case(
            _measure_report,
            both,
            Figure("report", "a failure's first line: rank, line, exception", "trials", whole),
        ),
        case(
            _measure_two_jobs,
            both,
            Figure("two-jobs", "two jobs on one machine just work", "trials", whole),
        ),
        case(
            _measure_interrupt,
            both,
            Figure(
                "ctrl-c", "Ctrl-C leaves nothing behind, grace 2 s", "s", Target("at_most", SOON)
            ),
        ),
        case(
            teardown.cases(small)[0].measure,
            both,
            Figure(
                "teardown",
                "nor does a SIGKILL of the launcher, after",
                "s",
                Target("at_most", SOON),
            ),
        ),
        case(
            recovery.cases(small)[0].measure,
            both,
            Figure("recovery-2", "a restart takes a fraction of torchrun's", "s", RESTART),
            Figure("recovered-2", "… and the job ends well", "trials", whole),
        ),
        case(
            steps.cases(small)[0].measure,
            alone,
            Figure("steps-kept", "a rank dies: the others keep their processes", "trials", whole),
            Figure("steps-killed", "… and go on after, in a script that needs 3 s to set up", "s"),
        ),
        case(
            _measure_curve,
            alone,
            Figure("steps-bits", "… and the weights keep their bits", "trials", whole),
        ),
    ]


def _measure_drop_in(trial: Trial) -> Mapping[str, Sample]:
    """Compare what a script leaves; elaunch may add variables of its own, and take none away."""
    seen = []
    for launcher in (trial.launcher, find(TORCHRUN)):
        command = launcher.command("claims_seen", WORKERS, (), ("--lr", "1e-3"))
        with Job(trial.root, command) as job:
            job.expect_exit(TIMEOUT)
            seen.append({rank: job.read_stamps("seen")[0, rank] for rank in range(WORKERS)})
    ours, theirs = seen
    differences: dict[str, Any] = {}
    for rank in range(WORKERS):
        missing = set(theirs[rank].pop("variables")) - set(ours[rank].pop("variables"))
        rest = {name: [ours[rank][name], value] for name, value in theirs[rank].items()}
        other = {name: pair for name, pair in rest.items() if pair[0] != pair[1]}
        if missing or other:
            differences[str(rank)] = {"missing": sorted(missing), **other}
    return {"drop-in": Sample(float(not differences), detail=differences)}


def _measure_report(trial: Trial) -> Mapping[str, Sample]:
    lines = (JOBS / "claims_error.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.strip().startswith("raise"))
    with Job(trial.root, trial.launcher.command("claims_error", WORKERS)) as job:
        job.wait(TIMEOUT)
        said = job.output.read_text(errors="replace").splitlines()
    first = next((line for line in said if "claims_error.py" in line), "")
    good = all(part in first for part in ("rank 1", f"{number}", "ValueError: no label 17"))
    return {"report": Sample(float(good), detail={"first": first})}


def _measure_two_jobs(trial: Trial) -> Mapping[str, Sample]:
    """Start the second job while the first one trains, both as README's first command does."""
    plain = replace(trial.launcher, run=("run",) if trial.is_elaunch else ())
    with ExitStack() as stack:
        first = stack.enter_context(Job(trial.root, plain.command("idle", WORKERS)))
        first.wait_stamps("ready", WORKERS, TIMEOUT)
        second = stack.enter_context(Job(trial.root, plain.command("first_allreduce", WORKERS)))
        code, _ = second.wait(TIMEOUT)
        good = code == 0 and first.process.poll() is None
    return {"two-jobs": Sample(float(good), detail={"code": code})}


def _measure_interrupt(trial: Trial) -> Mapping[str, Sample]:
    """Interrupt the launcher alone, as a notebook or a scheduler does."""
    flags = ("--shutdown-timeout", str(GRACE)) if trial.is_elaunch else ()
    with Job(trial.root, trial.launcher.command("offspring", WORKERS, flags)) as job:
        job.wait_stamps("ready", WORKERS, TIMEOUT)
        time.sleep(trial.options.settle)
        with procfs.watched(job.pids()) as descriptors:
            asked = time.monotonic()
            job.process.send_signal(signal.SIGINT)
            late = procfs.wait_ended(descriptors, asked + SOON)
            seconds = time.monotonic() - asked
        left = job.pids()
    if late or left:
        return {"ctrl-c": Sample(math.inf, f"{len(left)} left after {SOON:g} s")}
    return {"ctrl-c": Sample(seconds)}


def _measure_curve(trial: Trial) -> Mapping[str, Sample]:
    """Compare the weights of four ranks of which one is killed with those of three undisturbed."""
    digests = []
    for ranks, words in ((steps.KILLED, ()), (steps.KILLED - 1, ("undisturbed",))):
        flags = ("--max-restarts", "3")
        command = trial.launcher.command("steps_killed", ranks, flags, words)
        with Job(trial.root, command) as job:
            job.expect_exit(steps.TIMEOUT)
            digests.append({stamp["digest"] for stamp in job.read_stamps("steps").values()})
    good = digests[0] == digests[1] and len(digests[0]) == 1
    return {"steps-bits": Sample(float(good), detail={"digests": list(map(sorted, digests))})}
