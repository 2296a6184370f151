"""Measure several nodes beside torchrun: ``python scripts/bench/cluster.py``; see docs/bench.md.

Exit code: 0 when every sample could be taken, 1 when some failed, 2 for a usage error. A target
that is missed does not change it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import cluster_jobs
import cluster_paper
import cluster_rounds
import hosts
import machine
import procfs
import table
from cluster_figures import COLUMNS, Case, Figure, Options, Trial, is_met, show
from figures import Results, Sample, as_json, finite, median
from job import CLEAN_UP_SECONDS, JobError

FAMILIES: dict[str, Callable[[Options], list[Case]]] = {
    "recovery": cluster_jobs.recovery_cases,
    "grow": cluster_jobs.grow_cases,
    "shrink": cluster_jobs.shrink_cases,
    "leader": cluster_jobs.leader_cases,
    "form": cluster_rounds.form_cases,
    "traffic": cluster_rounds.traffic_cases,
    "paper": cluster_paper.cases,
}
SHORT = {"torchrun": COLUMNS[0], "fresh": COLUMNS[1], "c10d": COLUMNS[2], "etcd": COLUMNS[3]}
RESULTS = Path(__file__).resolve().parents[2] / "bench-results"
QUICK = Options(
    repeats=1,
    slow_repeats=1,
    never_recovers=10.0,
    never_joins=10.0,
    never_survives=10.0,
    sizes={32: 1},
    traffic_agents=32,
    traffic_window=3.0,
)


def main() -> int:
    """Run the bench and return its exit code."""
    args = _arguments()
    options = QUICK if args.quick else Options(repeats=args.repeats)
    if args.sizes:
        known = options.sizes
        options = _with_sizes(options, {size: known.get(size, 1) for size in args.sizes})
    columns = [SHORT[name] for name in args.against]
    cases = [case for name in args.only for case in FAMILIES[name](options)]
    reverse = hosts.answer_loopback()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)

    results: Results = {}
    loads: dict[str, Any] = {}
    root = Path(tempfile.mkdtemp(prefix="bench-cluster-"))
    facts = machine.facts() | {
        "hosts_line": reverse,
        "reverse_lookup_s": hosts.reverse_lookup_seconds(),
        "options": asdict(options),
        "quick": args.quick,
    }
    try:
        for case in cases:
            loads.setdefault(f"{case.family}: {case.title}", machine.load())
            _take(case, columns, options, root, results)
    finally:
        procfs.kill_job(root, CLEAN_UP_SECONDS)
        shutil.rmtree(root, ignore_errors=True)
        figures = [figure for case in cases for figure in case.figures if figure.key in results]
        if figures:
            _print(figures, results, columns, facts)
            path = args.json or RESULTS / f"cluster-{facts['time'].replace(':', '')}.json"
            _write(path, {"machine": facts, "load": loads}, figures, results)
    return int(any(True for _ in _failed(results)))


def _with_sizes(options: Options, sizes: Mapping[int, int]) -> Options:
    return replace(options, sizes=sizes, traffic_agents=min(max(sizes), options.traffic_agents))


def _take(
    case: Case, columns: Sequence[str], options: Options, root: Path, results: Results
) -> None:
    """Take all samples of one case, the columns in turns, into ``results``."""
    for number in range(max(case.repeats.values())):
        for column in columns:
            if number >= case.repeats.get(column, 0):
                continue
            samples = _sample(case, Trial(column, number, options, root, results))
            for key, sample in samples.items():
                results.setdefault(key, {}).setdefault(column, []).append(sample)
            _tell(case, column, number, samples)


def _sample(case: Case, trial: Trial) -> Mapping[str, Sample]:
    """Take one sample; one that fails becomes a failed sample of the case's first figure."""
    try:
        return case.measure(trial)
    except (JobError, OSError) as error:
        return {case.figures[0].key: Sample(None, str(error))}


def _tell(case: Case, column: str, number: int, samples: Mapping[str, Sample]) -> None:
    units = {figure.key: figure.unit for figure in case.figures}
    shown = ", ".join(
        f"{key} failed: {sample.note}"
        if sample.value is None
        else f"{key} {table.number(sample.value, units[key])} {sample.note}".rstrip()
        for key, sample in samples.items()
    )
    print(f"{column:21} {number + 1}/{case.repeats[column]}  {shown}", file=sys.stderr, flush=True)


def _print(
    figures: Sequence[Figure],
    results: Results,
    columns: Sequence[str],
    facts: Mapping[str, Any],
) -> None:
    """Print the table, then what a reader must know about it."""
    print()
    show(figures, results, columns)
    print(f"\n{facts['cpus']} CPUs ({facts['cpu']}), torch {facts['versions']['torch']};", end=" ")
    print("medians of a machine that may be shared, in brackets the range")
    if facts["quick"]:
        print("quick: one sample each; a check that the bench works, not figures to quote")
    if facts["reverse_lookup_s"] > 0.1:
        print(
            f"reverse lookup of {hosts.ADDRESS} takes {facts['reverse_lookup_s']:.1f} s (line in"
            f" {hosts.HOSTS}: {facts['hosts_line']}); every figure that starts workers includes it"
        )
    for key, column, sample in _failed(results):
        print(f"failed: {column} {key}: {sample.note}")


def _failed(results: Results) -> Iterable[tuple[str, str, Sample]]:
    """Yield the samples that could not be taken: figure, column, sample."""
    for key, by_column in results.items():
        for column, samples in by_column.items():
            for sample in samples:
                if sample.value is None:
                    yield key, column, sample


def _write(
    path: Path, head: Mapping[str, Any], figures: Sequence[Figure], results: Results
) -> None:
    """Write everything to a JSON file; a value of "never" is null with ``"never": true``."""
    lines = [
        {
            **asdict(figure),
            "columns": {
                column: {
                    "median": finite(median(samples)),
                    "met": is_met(figure, column, samples),
                    "samples": [as_json(sample) for sample in samples],
                }
                for column, samples in results[figure.key].items()
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
    parser = argparse.ArgumentParser(description="Measure several nodes beside torchrun.")
    parser.add_argument(
        "--only",
        type=_names(FAMILIES),
        default=list(FAMILIES),
        metavar="NAME,…",
        help=f"families of figures: {', '.join(FAMILIES)} (default: all)",
    )
    parser.add_argument(
        "--against",
        type=_names(SHORT),
        default=list(SHORT),
        metavar="NAME,…",
        help=f"columns: {', '.join(SHORT)} (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure (default 5)")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(one) for one in text.split(",")],
        metavar="N,…",
        help="agents that form a round (default: 32,256,1024,4096)",
    )
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
    if any(size < 2 for size in args.sizes or ()):
        parser.error("--sizes: at least 2 agents")
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
