"""Measure saving and resuming: ``python scripts/bench/checkpoint.py [options]``; see docs/bench.md.

One job after the other, each of two ranks under ``elaunch run``, the ways of saving in turns. Exit
code: 0 when every sample could be taken, 1 when some failed, 2 for a usage error. A target that is
missed does not change it.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hosts
import machine
import procfs
import table
from job import CLEAN_UP_SECONDS, Job, JobError
from launchers import ELAUNCH, JOBS, find

RANKS = 2
SHARDS, SHARDED_MB = 4, 400
MANY, MANY_RANKS = 2000, 8
STEPS_MB = 512
SLOW_MB, SLOW_RATE = 2000, 50_000_000
TIMEOUT = 560.0
FLOOR, DCP, DCP_THREAD, OURS, ASIDE = "copy", "dcp", "dcp-thread", "elaunch", "elaunch-aside"
WAYS = {
    FLOOR: "one copy of a rank's share",
    "torch": "torch.save by rank 0, fsync",
    DCP: "dcp.save",
    DCP_THREAD: "dcp.async_save, thread",
    "dcp-process": "dcp.async_save, process",
    OURS: "save()",
    ASIDE: "save(block=False)",
}
COLUMNS = ("way", "size", "stands still", "committed after", "peak memory of a rank", "grown by")
RESULTS = Path(__file__).resolve().parents[2] / "bench-results"


@dataclass
class Found:
    """The samples of one way and size: seconds, and bytes."""

    stalls: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Saves = dict[tuple[str, int], Found]
Loads = dict[int, list[dict[str, Any]]]
Others = dict[str, list[float]]
"""What is not of a way and a size: name → samples."""


def main() -> int:
    """Run the bench and return its exit code."""
    args = _arguments()
    hosts_line = hosts.answer_loopback()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    facts = machine.facts() | {"hosts_line": hosts_line, "load": machine.load()}
    saves: Saves = {(way, size): Found() for size in args.sizes for way in args.ways}
    loads: Loads = {size: [] for size in args.sizes}
    others: Others = {}
    problems: list[str] = []
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=args.directory))
    try:
        for size in args.sizes:
            for _ in range(args.rounds):
                for way in args.ways:
                    _save(root, way, size, args.saves, saves[way, size])
                _resume(root, size, loads[size], problems)
        for _ in range(0 if args.saves_only else args.rounds):
            _others(root, others, problems)
            _many(root, others, problems)
        for _ in range(0 if args.saves_only else args.rounds):
            _slow(root, others, problems)
    finally:
        procfs.kill_job(root, CLEAN_UP_SECONDS)
        shutil.rmtree(root, ignore_errors=True)
        _print(saves, loads, others, facts)
        path = args.json or RESULTS / f"checkpoint-{facts['time'].replace(':', '')}.json"
        _write(path, facts, saves, loads, others)
    problems += [problem for found in saves.values() for problem in found.problems]
    for problem in problems:
        print(f"failed: {problem}")
    return int(bool(problems))


def _save(root: Path, way: str, size: int, saves: int, found: Found) -> None:
    """Run one job that saves, and add what it found."""
    place = Path(tempfile.mkdtemp(dir=root))
    command = _command("checkpoint_save", place, (way, str(size), str(saves), str(place)))
    try:
        with Job(root, command) as job:
            job.expect_exit(TIMEOUT)
            ranks = list(job.read_stamps("saves").values())
    except JobError as error:
        found.problems.append(f"{WAYS[way]}, {size} MB: {error}")
        return
    finally:
        shutil.rmtree(place, ignore_errors=True)
    # A save has taken as long as on the rank where it took longest.
    stalls = [max(each) for each in zip(*(rank["stalls"] for rank in ranks), strict=True)]
    commits = [max(each) for each in zip(*(rank["commits"] for rank in ranks), strict=True)]
    found.stalls += stalls
    found.commits += commits
    found.peaks.append(max(rank["peak"] for rank in ranks))
    found.grown.append(max(rank["grown"] for rank in ranks))
    told = f"{statistics.median(stalls):.3f} s, committed {statistics.median(commits):.3f} s"
    print(f"{WAYS[way]:28} {size:5} MB  {told}", file=sys.stderr, flush=True)


def _resume(root: Path, size: int, loads: list[dict[str, Any]], problems: list[str]) -> None:
    """Run one job that dies right after it has saved, and add what its next round found."""
    place = Path(tempfile.mkdtemp(dir=root))
    command = _command("checkpoint_resume", place, (str(size),), ("--max-restarts", "1"))
    try:
        with Job(root, command) as job:
            job.expect_exit(TIMEOUT)
            ranks = [found for (round_, _), found in job.read_stamps("loads").items() if round_]
    except JobError as error:
        problems.append(f"resume, {size} MB: {error}")
        return
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not all(rank["equal"] and rank["disk"] is not None for rank in ranks):
        problems.append(f"resume, {size} MB: what was loaded is not what was saved: {ranks}")
        return
    loads.append(
        {
            "memory": max(rank["memory"] for rank in ranks),
            "disk": max(rank["disk"] for rank in ranks),
            "step": min(rank["step"] for rank in ranks),
        }
    )
    told = f"memory {loads[-1]['memory']:.3f} s, dcp.load {loads[-1]['disk']:.3f} s"
    print(f"{'resume':28} {size:5} MB  {told}", file=sys.stderr, flush=True)


def _others(root: Path, others: Others, problems: list[str]) -> None:
    """Run the jobs of a sharded model and of steps during a save, and add what they found."""
    for way in ("sharded", "full"):
        job = ("checkpoint_sharded", way, SHARDED_MB, SHARDS)
        for found in _ranks(root, job, "sharded", problems)[:1]:  # rank 0
            others.setdefault(f"{way} seconds", []).append(found["seconds"])
            others.setdefault(f"{way} rose", []).append(found["rose"])
    for way in ("elaunch", "dcp"):
        for found in _ranks(root, ("checkpoint_steps", way, STEPS_MB, RANKS), "steps", problems):
            alone, during = (statistics.median(found[name]) for name in ("alone", "during"))
            others.setdefault(f"{way} slower", []).append(during / alone)


def _slow(root: Path, others: Others, problems: list[str]) -> None:
    """Run a job that dies right after it has saved on slow storage; add how soon it steps again."""
    place = Path(tempfile.mkdtemp(dir=root))
    command = _command("checkpoint_slow", place, (str(SLOW_MB),), ("--max-restarts", "1"))
    throttled = [sys.executable, str(JOBS / "slow_storage.py"), str(SLOW_RATE), *command[1:]]
    preload = "--preload=torch,torch._dynamo,torch.distributed.checkpoint.state_dict"
    try:
        with Job(root, [*throttled[:4], preload, *throttled[4:]]) as job:
            job.expect_exit(TIMEOUT)
            killed, ranks = job.read_stamps("killed"), job.read_stamps("steps")
    except JobError as error:
        problems.append(f"slow storage, {SLOW_MB} MB: {error}")
        return
    finally:
        shutil.rmtree(place, ignore_errors=True)
    at, steps = killed[0, 1]["at"], [found for (round_, _), found in ranks.items() if round_]
    if [found["step"] for found in steps] != [7] * RANKS:
        problems.append(f"slow storage, {SLOW_MB} MB: not the step that was saved: {steps}")
        return
    for name in ("began", "made", "loaded", "done"):
        others.setdefault(f"slow {name}", []).append(max(found[name] for found in steps) - at)
    own = [found["done"] - found["began"] for (round_, _), found in ranks.items() if not round_]
    others.setdefault("slow first", []).append(max(own))
    told = ", ".join(f"{name} {others[f'slow {name}'][-1]:.2f} s" for name in ("began", "done"))
    print(f"slow storage, {SLOW_MB} MB: {told}", file=sys.stderr, flush=True)


def _many(root: Path, others: Others, problems: list[str]) -> None:
    """Look into a directory of many checkpoints, and list it; add the processor time of each."""
    place = Path(tempfile.mkdtemp(dir=root)) / "checkpoints"
    try:
        job = [sys.executable, str(JOBS / "checkpoint_many.py"), str(place)]
        looks = subprocess.run(
            [*job, str(MANY), str(MANY_RANKS)], check=True, capture_output=True, timeout=TIMEOUT
        )
        for name, seconds in json.loads(looks.stdout).items():
            others.setdefault(f"many {name}", []).append(seconds)
        command = [find(ELAUNCH).program, "checkpoints", "ls", str(place)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        listed = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert listed.stdout.count(b"step-") == MANY, listed.stdout[-200:]
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        others.setdefault("many ls", []).append(spent)
    except (subprocess.SubprocessError, ValueError) as error:
        problems.append(f"{MANY} checkpoints: {error} {getattr(error, 'stderr', b'')!r}")
    finally:
        shutil.rmtree(place.parent, ignore_errors=True)


def _ranks(
    root: Path, job: tuple[str, str, int, int], name: str, problems: list[str]
) -> list[dict[str, Any]]:
    """Run a job and return what its ranks left under ``name``, in their order."""
    program, way, size, ranks = job
    place = Path(tempfile.mkdtemp(dir=root))
    command = _command(program, place, (way, str(size), str(place)), (), ranks)
    try:
        with Job(root, command) as running:
            running.expect_exit(TIMEOUT)
            found = running.read_stamps(name)
    except JobError as error:
        problems.append(f"{program} {way}, {size} MB: {error}")
        return []
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{program} {way}, {size} MB: done", file=sys.stderr, flush=True)
    return [found[each] for each in sorted(found)]


def _command(
    job: str, place: Path, args: Sequence[str], flags: Sequence[str] = (), ranks: int = RANKS
) -> Sequence[str]:
    given = ("--checkpoint-dir", str(place / "checkpoints"))
    return find(ELAUNCH).command(job, ranks, (*given, *flags), args)


# ── telling ──────────────────────────────────────────────────────────────────────────────────────


def _print(saves: Saves, loads: Loads, others: Others, facts: Mapping[str, Any]) -> None:
    """Print what was measured, then how it stands to what is to be reached."""
    print()
    table.show_rows(COLUMNS, [_row(way, size, found) for (way, size), found in saves.items()])
    print()
    lines = [line for size in loads for line in _verdicts(size, saves, loads[size])]
    table.show_rows(("figure", "found", "to reach", "met"), [*lines, *_other_verdicts(others)])
    print(f"\n{facts['cpus']} CPUs ({facts['cpu']}), torch {facts['versions']['torch']}", end="; ")
    print(f"{RANKS} ranks, medians, in brackets the range; load {facts['load']['loadavg'][0]:.1f}")


def _row(way: str, size: int, found: Found) -> tuple[str, ...]:
    memory = [_megabytes(values) for values in (found.peaks, found.grown)]
    return (WAYS[way], f"{size} MB", _range(found.stalls), _range(found.commits), *memory)


def _verdicts(size: int, saves: Saves, loads: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    def middle(way: str, what: str) -> float | None:
        samples = getattr(saves.get((way, size), Found()), what)
        return statistics.median(samples) if samples else None

    stall = middle(ASIDE, "stalls")
    rows = [
        _ratio(f"{size} MB: stall of save(block=False) over dcp.async_save",
               stall, middle(DCP_THREAD, "stalls"), 0.22),
        _ratio("… over one copy", stall, middle(FLOOR, "stalls"), 2.0),
        _ratio("save() over dcp.save, until committed",
               middle(OURS, "commits"), middle(DCP, "commits"), 1.1),
    ]  # fmt: skip
    if loads:
        memory = statistics.median(one["memory"] for one in loads)
        disk = statistics.median(one["disk"] for one in loads)
        lost = max(7 - one["step"] for one in loads)
        rows.append(_ratio("load() from memory over dcp.load, warm disk", memory, disk, 0.5))
        reached = "yes" if lost == 0 else "NO"
        rows.append(("steps lost by a death right after the save", str(lost), "0", reached))
    return rows


def _other_verdicts(others: Others) -> list[tuple[str, ...]]:
    middle = {name: statistics.median(samples) for name, samples in others.items()}
    rows: list[tuple[str, ...]] = []
    title = f"FSDP, {SHARDS} ranks, {SHARDED_MB} MB: sharded save over gathering on rank 0"
    if {"sharded rose", "full rose"} <= middle.keys():
        ours, theirs = middle["sharded rose"], middle["full rose"]
        found = f"{ours / theirs:.2f} ({ours / 1e6:,.0f} MB over {theirs / 1e6:,.0f} MB)"
        rows.append((f"{title}: memory of rank 0", found, "< 1", "yes" if ours < theirs else "NO"))
        ours, theirs = middle["sharded seconds"], middle["full seconds"]
        found = f"{ours / theirs:.2f} ({ours:.3f} s over {theirs:.3f} s)"
        rows.append(("… time, on one disk", found, "", ""))
    for way, name in (("elaunch", "save(block=False)"), ("dcp", "dcp.async_save")):
        if slower := middle.get(f"{way} slower"):
            wanted = ("≤ 1.5", "yes" if slower <= 1.5 else "NO") if way == "elaunch" else ("", "")
            rows.append((f"step during {name} over a step alone", f"{slower:.2f}", *wanted))
    if (done := middle.get("slow done")) is not None:
        parts = [f"{name} {middle[f'slow {name}']:.2f}" for name in ("began", "made", "loaded")]
        title = f"{SLOW_MB} MB, storage of 50 MB/s: a death right after the save, next step"
        parts.append(f"without a checkpoint from began to done {middle['slow first']:.2f}")
        found = f"{done:.2f} s (script {', '.join(parts)})"
        rows.append((title, found, "≤ 1.5 s", "yes" if done <= 1.5 else "NO"))
    return [*rows, *_many_verdicts(middle)]


def _many_verdicts(middle: Mapping[str, float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    title = f"{MANY:,} checkpoints of {MANY_RANKS} ranks, processor time: the newest"
    for name, called, limit in (
        ("search", title, 0.3),
        ("name", "… one by its name", 0.01),
        ("ls", "… elaunch checkpoints ls", 0.5),
    ):
        if (found := middle.get(f"many {name}")) is not None:
            met = "yes" if found <= limit else "NO"
            rows.append((called, f"{found:.4f} s", f"≤ {limit:g} s", met))
    return rows


def _ratio(title: str, ours: float | None, theirs: float | None, limit: float) -> tuple[str, ...]:
    if ours is None or not theirs:
        return (title, "-", f"≤ {limit:g}", "-")
    ratio = ours / theirs
    found = f"{ratio:.2f} ({ours:.3f} s over {theirs:.3f} s)"
    return (title, found, f"≤ {limit:g}", "yes" if ratio <= limit else "NO")


def _range(samples: Sequence[float]) -> str:
    if not samples:
        return "-"
    return f"{statistics.median(samples):.3f} s [{min(samples):.3f}-{max(samples):.3f}]"


def _megabytes(samples: Sequence[int]) -> str:
    return f"{statistics.median(samples) / 1e6:,.0f} MB" if samples else "-"


def _write(
    path: Path, facts: Mapping[str, Any], saves: Saves, loads: Loads, others: Others
) -> None:
    found = [{"way": way, "size_mb": size, **vars(one)} for (way, size), one in saves.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "saves": found, "loads": loads, "others": others}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"all samples: {path}")


def _leave(number: int, frame: FrameType | None) -> None:
    """End through the contexts that clean up."""
    raise SystemExit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure saving and resuming.")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[512, 4096],
        metavar="MB,…",
        help="megabytes of state (default: 512,4096)",
    )
    parser.add_argument(
        "--ways",
        type=lambda text: text.split(","),
        default=list(WAYS),
        metavar="NAME,…",
        help=f"ways of saving: {', '.join(WAYS)} (default: all)",
    )
    parser.add_argument("--saves", type=int, default=3, help="saves of each job (default 3)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each way (default 3)")
    parser.add_argument(
        "--directory", type=Path, help="where to save (default: below the temporary directory)"
    )
    parser.add_argument(
        "--saves-only", action="store_true", help="leave out what is no save of two ranks"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all samples")
    args = parser.parse_args()
    if unknown := [way for way in args.ways if way not in WAYS]:
        parser.error(f"--ways: unknown {', '.join(unknown)}; one of {', '.join(WAYS)}")
    if min(args.saves, args.rounds, *args.sizes) < 1:
        parser.error("--saves, --rounds and --sizes: at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
