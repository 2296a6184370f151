"""Goodput: the steps reached under SIGKILLs over the steps of an undisturbed run in the same time.

2 workers, steps of about 50 ms, a save every 20 steps. In the middle of every interval of 15 s a
random rank is SIGKILLed, 6 times in 90 s, each at a moment that is shifted at random by up to a
save period, so that any number of steps may have to be redone. Repeat *n* uses the same moments and
ranks for both launchers. Time counts from the first step; the score is the highest step reached at
its end. The undisturbed run is measured once for each launcher, before its first repeat.

elaunch runs three times: with ``--checkpoint-dir``; as torchrun does, with a script that saves and
searches by itself and a launcher that knows nothing of it; and with ``save(every="auto")`` in place
of a save every 20 steps.

The same again with a script that takes SETUP seconds to set up, as a large model does: restarted by
either launcher, and in ``ctx.train.steps``, where the other rank continues meanwhile. The share is
of an undisturbed run of the same script by the same launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

KEY = "goodput"
OWN = "goodput-own-saves"
AUTO = "goodput-auto"
REFERENCE = "goodput-undisturbed"
RESTARTED, STAYED = "goodput-setup", "goodput-steps"
SETUP = 3.0
WORKERS = 2
SAVE_PERIOD = 1.1
FIRST_STEP_TIMEOUT = 60.0
POLL = 0.05
MARGIN = 0.2
FLAGS = ("--max-restarts", "20")
IMPORTS = "torch,torch.distributed.checkpoint,+torch._dynamo"
"""What a worker that saves by ``ctx.checkpoint`` imports, most of a second each time without it."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL of ``rank`` at ``at`` seconds after the first step."""

    at: float
    rank: int


@dataclass(frozen=True)
class Progress:
    """The steps of one run: (time, step, round) in the order of time."""

    steps: tuple[tuple[float, int, int], ...]

    def reached(self, until: float) -> int:
        """Return the highest step done at ``until``."""
        return max((step for at, step, _ in self.steps if at <= until), default=0)

    def redone(self) -> int:
        """Return how many steps were done more than once."""
        return len(self.steps) - len({step for _, step, _ in self.steps})

    def gaps(self) -> list[float]:
        """Return, for each restart, the seconds from the last step to the next round's first."""
        pairs = itertools.pairwise(self.steps)
        return [round(after[0] - before[0], 3) for before, after in pairs if before[2] != after[2]]


def cases(options: Options) -> list[Case]:
    """Return the undisturbed case and the disturbed one, in this order."""
    reference = Figure(REFERENCE, "goodput: steps of the undisturbed run", "steps")
    target = Target("at_least", 0.955)
    disturbed = Figure(KEY, "goodput under SIGKILLs", "share", target)
    own = Figure(OWN, "the same, the script saves by itself", "share", target)
    auto = Figure(AUTO, 'the same, save(every="auto")', "share", Target("at_least", 0.985))
    restarted = Figure(RESTARTED, "goodput under SIGKILLs, 3 s of setup", "share")
    stayed = Figure(STAYED, "the same, ctx.train.steps", "share", Target("at_least", 0.985))
    once = dict.fromkeys((TORCHRUN, ELAUNCH), 1)
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return [
        Case("goodput", "undisturbed", (reference,), _undisturbed, once),
        Case("goodput", "goodput", (disturbed,), _disturbed, repeats),
        Case("goodput", "goodput, own saves", (own,), _own_saves, {ELAUNCH: options.repeats}),
        Case("goodput", "goodput, auto", (auto,), _auto, {ELAUNCH: options.repeats}),
        Case("goodput", "goodput, setup", (restarted,), _restarted, repeats),
        Case("goodput", "goodput, steps", (stayed,), _stayed, {ELAUNCH: options.repeats}),
    ]


def kills(options: Options, seed: int) -> list[Kill]:
    """Return the kills of repeat ``seed``, the same for every launcher."""
    chance = random.Random(seed)
    count = int(options.goodput_window // options.kill_interval)
    shifts = [chance.uniform(-SAVE_PERIOD, SAVE_PERIOD) / 2 for _ in range(count)]
    return [
        Kill(options.kill_interval * (number + 0.5) + shift, chance.randrange(WORKERS))
        for number, shift in enumerate(shifts)
    ]


def _undisturbed(trial: Trial) -> Mapping[str, Sample]:
    steps, detail = _run(trial, ())
    return {REFERENCE: Sample(steps, detail=detail)}


def _disturbed(trial: Trial) -> Mapping[str, Sample]:
    return {KEY: _share(trial, told=trial.is_elaunch)}


def _own_saves(trial: Trial) -> Mapping[str, Sample]:
    return {OWN: _share(trial, told=False)}


def _auto(trial: Trial) -> Mapping[str, Sample]:
    return {AUTO: _share(trial, told=True, program="steps_auto")}


def _restarted(trial: Trial) -> Mapping[str, Sample]:
    return {RESTARTED: _share_of_own(trial, "steps")}


def _stayed(trial: Trial) -> Mapping[str, Sample]:
    return {STAYED: _share_of_own(trial, "steps_loop")}


def _share_of_own(trial: Trial, program: str) -> Sample:
    """Return the steps under kills over those of an undisturbed run before it."""
    told = trial.is_elaunch and program == "steps"
    full, _ = _run(trial, (), told, program=program, setup=SETUP)
    planned = kills(trial.options, trial.number)
    steps, detail = _run(trial, planned, told, program=program, setup=SETUP)
    return Sample(steps / full, str(detail["ended"] or ""), {**detail, "undisturbed": full})


def _share(trial: Trial, told: bool, program: str = "steps") -> Sample:
    """Return the steps under kills over those of the undisturbed run."""
    reference = trial.earlier(REFERENCE)
    full = reference[0].value if reference else None
    if not full:
        return Sample(None, "the undisturbed run failed")
    steps, detail = _run(trial, kills(trial.options, trial.number), told, program=program)
    return Sample(steps / full, str(detail["ended"] or ""), detail)


def _run(
    trial: Trial,
    planned: Sequence[Kill],
    told: bool = False,
    *,
    program: str = "steps",
    setup: float = 0.0,
) -> tuple[int, dict[str, Any]]:
    """Run the job for one window; return the step reached and what happened.

    ``told`` gives the launcher the directory of the checkpoints.
    """
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(_job(trial, told, program, setup))
        begin = _first_step(job)
        missed = [kill.at for kill in planned if not _kill(job, begin, kill)]
        end = begin + trial.options.goodput_window
        time.sleep(max(0.0, end + MARGIN - time.monotonic()))
        progress, saves = _progress(job.stamps), _saves(job.stamps)
        code = job.process.poll()
    steps = progress.reached(end)
    detail = {
        "steps": steps,
        "redone_steps": progress.redone(),
        "gaps_s": progress.gaps(),
        "saves": len(saves),
        "saving_s": round(sum(saves), 3),
        "kills": [vars(kill) for kill in planned],
        "missed_kills": missed,
        "ended": None if code is None else f"gave up with exit code {code}",
    }
    return steps, detail


def _job(trial: Trial, told: bool, program: str, setup: float) -> Job:
    """Return the job, not started, with checkpoints beside its other files."""
    root = trial.root / f"checkpoints-{trial.launcher.name}-{time.monotonic_ns()}"
    root.mkdir()
    flags = list(FLAGS)
    if told:
        flags += ["--checkpoint-dir", str(root)]
    if told and program == "steps":
        flags += ["--checkpoint-glob", "step_*.pt"]
    elif told:
        flags += ["--preload", IMPORTS]
    words = (str(setup),) if program == "steps_loop" else (str(root), str(setup))
    command = trial.launcher.command(program, WORKERS, flags, words)
    return Job(trial.root, command, trial.launcher.for_restarts)


def _progress(stamps: Path) -> Progress:
    steps = []
    for path in stamps.glob("progress.*"):
        number = int(path.suffix[1:])
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        steps += [(float(line.split()[0]), int(line.split()[1]), number) for line in whole]
    return Progress(tuple(sorted(steps)))


def _saves(stamps: Path) -> list[float]:
    """Return the seconds for which each save of rank 0 stopped it, as far as the script tells."""
    lines = [line for path in stamps.glob("saves.*.0") for line in path.read_text().splitlines()]
    return [float(line.split()[1]) for line in lines if line.count(" ") == 1]


def _first_step(job: Job) -> float:
    """Wait for the first step of the job and return its time."""
    deadline = time.monotonic() + FIRST_STEP_TIMEOUT
    while not (steps := _progress(job.stamps).steps):
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise job.error("no first step")
        time.sleep(POLL)
    return steps[0][0]


def _kill(job: Job, begin: float, kill: Kill) -> bool:
    """SIGKILL the rank's newest worker at its moment; return whether there was one alive."""
    time.sleep(max(0.0, begin + kill.at - time.monotonic()))
    lives = {
        number: stamp["pid"]
        for (number, rank), stamp in job.read_stamps("worker").items()
        if rank == kill.rank
    }
    pid = lives[max(lives)]
    if pid not in job.pids():
        return False
    os.kill(pid, signal.SIGKILL)
    return True
