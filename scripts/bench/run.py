"""Measure elaunch beside torchrun: ``python scripts/bench/run.py [options]``; see docs/bench.md.

Exit code: 0 when every sample could be taken, 1 when some failed, 2 for a usage error. A target
that is missed does not change it, unless it is one of README's claims.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import hosts
import machine
import procfs
import table
from families import (
    api,
    claims,
    commands,
    compiled,
    empty,
    goodput,
    idle,
    notice,
    recorder,
    recovery,
    start,
    steps,
    teardown,
)
from figures import (
    Case,
    Figure,
    Options,
    Results,
    Sample,
    Trial,
    as_json,
    finite,
    is_met,
    median,
)
from job import CLEAN_UP_SECONDS, Job, JobError
from launchers import ELAUNCH, TORCHRUN, Launcher, find

CLAIMS = "claims"
FAMILIES: dict[str, Callable[[Options], list[Case]]] = {
    "start": start.cases,
    "recovery": recovery.cases,
    "notice": notice.cases,
    "idle": idle.cases,
    "teardown": teardown.cases,
    "commands": commands.cases,
    "empty": empty.cases,
    "compiled": compiled.cases,
    "goodput": goodput.cases,
    "api": api.cases,
    "recorder": recorder.cases,
    "steps": steps.cases,
    CLAIMS: claims.cases,
}
NAMES = (TORCHRUN, ELAUNCH)
WARM_UP_SECONDS = 60.0
RESULTS = Path(__file__).resolve().parents[2] / "bench-results"
QUICK = Options(
    repeats=1,
    trials=2,
    sizes=(2,),
    settle=0.5,
    cpu_window=3.0,
    goodput_window=16.0,
    kill_interval=8.0,
)


def main() -> int:
    """Run the bench and return its exit code."""
    args = _arguments()
    options = QUICK if args.quick else Options(repeats=args.repeats)
    launchers = [find(name) for name in args.against]
    cases = [case for name in args.only for case in FAMILIES[name](options)]
    reverse = hosts.answer_loopback()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)

    results: Results = {}
    loads: dict[str, Any] = {}
    root = Path(tempfile.mkdtemp(prefix="bench-"))
    facts = machine.facts() | {
        "hosts_line": reverse,
        "reverse_lookup_s": hosts.reverse_lookup_seconds(),
        "options": asdict(options),
        "quick": args.quick,
    }
    try:
        for launcher in launchers:
            _warm_up(launcher, root)
        for case in cases:
            if case.family not in loads:
                loads[case.family] = machine.load()
            _take(case, launchers, options, root, results)
    finally:
        procfs.kill_job(root, CLEAN_UP_SECONDS)
        shutil.rmtree(root, ignore_errors=True)
        figures = [figure for case in cases for figure in case.figures if figure.key in results]
        _print(figures, results, facts)
        if figures:
            path = args.json or RESULTS / f"bench-{facts['time'].replace(':', '')}.json"
            _write(path, {"machine": facts, "load": loads}, figures, results)
    broken = CLAIMS in args.only and any(
        figure.target and not is_met(figure.target, results.get(figure.key, {}))
        for case in cases
        for figure in case.figures
    )
    return int(broken or any(True for _ in _failed(results)))


def _warm_up(launcher: Launcher, root: Path) -> None:
    """Run one job, so that no sample pays for reading files from the disk; its end is ignored."""
    with contextlib.suppress(JobError), Job(root, launcher.command("first_allreduce", 2)) as job:
        job.wait(WARM_UP_SECONDS)


def _take(
    case: Case, launchers: Sequence[Launcher], options: Options, root: Path, results: Results
) -> None:
    """Take all samples of one case, the launchers in turns, into ``results``."""
    for number in range(max(case.repeats.get(launcher.name, 0) for launcher in launchers)):
        for launcher in launchers:
            name = launcher.name
            if number >= case.repeats.get(name, 0):
                continue

            def earlier(key: str, name: str = name) -> Sequence[Sample]:
                return results.get(key, {}).get(name, [])

            samples = _sample(case, Trial(launcher, number, options, root, earlier))
            for key, sample in samples.items():
                results.setdefault(key, {}).setdefault(name, []).append(sample)
            _tell(case, name, number, samples)


def _sample(case: Case, trial: Trial) -> Mapping[str, Sample]:
    """Take one sample; one that fails becomes a failed sample of every figure with a target."""
    try:
        return case.measure(trial)
    except (JobError, OSError) as error:
        failed = Sample(None, str(error))
    figures = [figure for figure in case.figures if figure.target] or case.figures
    return {figure.key: failed for figure in figures}


def _tell(case: Case, name: str, number: int, samples: Mapping[str, Sample]) -> None:
    units = {figure.key: figure.unit for figure in case.figures}
    shown = ", ".join(
        f"{key} failed: {sample.note}"
        if sample.value is None
        else f"{key} {table.number(sample.value, units[key])} {sample.note}".rstrip()
        for key, sample in samples.items()
    )
    print(f"{name:8} {number + 1}/{case.repeats[name]}  {shown}", file=sys.stderr, flush=True)


def _print(figures: Sequence[Figure], results: Results, facts: Mapping[str, Any]) -> None:
    """Print the table, then what a reader must know about it."""
    if not figures:
        return
    print()
    table.show(figures, results)
    print(f"\n{facts['cpus']} CPUs ({facts['cpu']}), torch {facts['versions']['torch']}")
    if facts["quick"]:
        print("quick: one sample each; a check that the bench works, not figures to quote")
    if facts["reverse_lookup_s"] > 0.1:
        print(
            f"reverse lookup of {hosts.ADDRESS} takes {facts['reverse_lookup_s']:.1f} s (line in"
            f" {hosts.HOSTS}: {facts['hosts_line']}); every figure that starts workers includes it"
        )
    for key, name, sample in _failed(results):
        print(f"failed: {name} {key}: {sample.note}")


def _failed(results: Results) -> Iterable[tuple[str, str, Sample]]:
    """Yield the samples that could not be taken: figure, launcher, sample."""
    for key, by_launcher in results.items():
        for name, samples in by_launcher.items():
            for sample in samples:
                if sample.value is None:
                    yield key, name, sample


def _write(
    path: Path, head: Mapping[str, Any], figures: Sequence[Figure], results: Results
) -> None:
    """Write everything to a JSON file; a value of "never" is null with ``"never": true``."""
    lines = [
        {
            **asdict(figure),
            "met": is_met(figure.target, results[figure.key]) if figure.target else None,
            "launchers": {
                name: {
                    "median": finite(median(samples)),
                    "samples": [as_json(sample) for sample in samples],
                }
                for name, samples in results[figure.key].items()
            },
        }
        for figure in figures
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "figures": lines}, indent=1) + "\n", encoding="utf-8")
    print(f"all samples: {path}")


def _leave(number: int, frame: FrameType | None) -> None:
    """End through the contexts that clean up."""
    raise SystemExit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure elaunch beside torchrun.")
    parser.add_argument(
        "--only",
        type=_names(FAMILIES),
        default=[name for name in FAMILIES if name != CLAIMS],
        metavar="NAME,…",
        help=f"families of figures: {', '.join(FAMILIES)} (default: all but {CLAIMS})",
    )
    parser.add_argument(
        "--against",
        type=_names(NAMES),
        default=list(NAMES),
        metavar="NAME,…",
        help="launchers to run (default: torchrun,elaunch)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure (default 5)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"where to write all samples (default: a new file in {RESULTS.name}/)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short sample each, to see that everything works"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: at least 1")
    return args


def _names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argument type: a comma list of ``allowed`` names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"unknown {', '.join(unknown)}; one of {', '.join(allowed)}"
            )
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
