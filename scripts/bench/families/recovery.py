"""One worker exits 7 while the others are in a collective → the next round's first all-reduce.

From just before ``os._exit(7)`` to the stamp of the latest rank of the next round that is complete.
A trial counts as recovered when the command ends with 0 after exactly two rounds. With RAISING
workers the same from an exception that leaves the script: the interpreter's end comes before the
process's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

LIMITS = {2: 0.08, 4: 0.10, 8: 0.16}
RAISING = 4
TIMEOUT = 60.0


def cases(options: Options) -> list[Case]:
    """Return one case for each number of workers, and that of the exception."""
    exception = [_raising_case(options)] if RAISING in options.sizes else []
    return [*(_case(options, workers) for workers in options.sizes), *exception]


def _raising_case(options: Options) -> Case:
    figures = (
        Figure("raise", f"exception to next first all-reduce, {RAISING} workers", "s"),
        Figure("raise-noticed", "… of it, exit noticed", "ms"),
        Figure("raise-recovered", "… with exactly one restart", "trials"),
    )
    keys = ("raise", "raise-recovered", "raise-noticed")
    measure = partial(_measure, RAISING, keys, ("raise",))
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return Case("recovery", f"exception, {RAISING} workers", figures, measure, repeats)


def _case(options: Options, workers: int) -> Case:
    figures = (
        Figure(
            f"recovery-{workers}",
            f"exit 7 to next first all-reduce, {workers} workers",
            "s",
            Target("at_most", LIMITS[workers]),
        ),
        Figure(
            f"recovered-{workers}",
            f"recovered with exactly one restart, {workers} workers",
            "trials",
            Target("all", 20),
        ),
        Figure(f"recovery-noticed-{workers}", f"… of it, exit noticed, {workers} workers", "ms"),
    )
    repeats = {TORCHRUN: options.repeats, ELAUNCH: max(options.repeats, options.trials)}
    keys = (f"recovery-{workers}", f"recovered-{workers}", f"recovery-noticed-{workers}")
    measure = partial(_measure, workers, keys, ())
    return Case("recovery", f"recovery, {workers} workers", figures, measure, repeats)


def _measure(
    workers: int, keys: tuple[str, str, str], args: tuple[str, ...], trial: Trial
) -> Mapping[str, Sample]:
    """Take a sample; ``keys`` are of its three figures: seconds, whether it recovered, noticed."""
    flags = ("--max-restarts", "3")
    command = trial.launcher.command("exit_in_collective", workers, flags, args)
    with Job(trial.root, command, trial.launcher.for_restarts) as job:
        code, _ = job.wait(TIMEOUT)
        stamps = job.read_stamps("joined")
        started = job.read_stamps("started")
        failed_at = job.read_stamps("exit").get((0, 1), {}).get("mono")
        if failed_at is None:
            raise job.error("rank 1 never reached its exit")
        rounds = max(round_number for round_number, _ in stamps) + 1
        detail = {
            "rounds": rounds,
            "exit_code": code,
            "script_started": [
                round(stamp["mono"] - failed_at, 4)
                for (round_number, _), stamp in sorted(started.items())
                if round_number > 0
            ],
        }
        good = code == 0 and rounds == 2
        recovered = Sample(float(good), "" if good else str(job.error(str(detail))), detail)
        report = job.failure_record(0)
    results = {
        keys[0]: _recovery(stamps, workers, failed_at, detail),
        keys[1]: recovered,
    }
    if "noticed_monotonic" in report:
        noticed = (report["noticed_monotonic"] - failed_at) * 1000
        results[keys[2]] = Sample(noticed)
    return results


def _recovery(
    stamps: Mapping[tuple[int, int], Mapping[str, Any]],
    workers: int,
    failed_at: float,
    detail: Mapping[str, Any],
) -> Sample:
    for round_number in range(1, detail["rounds"]):
        joined = [stamp["mono"] for (number, _), stamp in stamps.items() if number == round_number]
        if len(joined) == workers:
            return Sample(max(joined) - failed_at, detail=detail)
    return Sample(None, "no later round was complete", detail)
