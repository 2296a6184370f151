"""What a script pays for what it imports: calls of every step, allgather, the import itself.

**Calls**: one worker makes loops of many calls; a sample is the best loop's time per call. Both
launchers run the same script. **Allgather**: under elaunch ``ctx.distributed.allgather``, under
torchrun ``torch.distributed.all_gather_object`` on gloo; a call takes as long as its slowest rank,
and a sample is the median of the calls of one job. **Import**: no launcher, plain interpreters; a
sample is the quickest of three.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, JOBS, TORCHRUN

TIMEOUT = 60.0
SLOW_TIMEOUT = 300.0
PAIRS = 3
MS = 1e3
# By ranks. With 8 on two cores one call of torch takes 15 to 30 s: hence one in a sample, and
# two samples of torchrun at most.
LARGE_CALLS = {2: 5, 8: 1}
TORCHRUN_SAMPLES = {8: 2}
SMALL, LARGE_BYTES, LARGE_ARRAY = "small", "bytes", "array"
AS_FAST = Target("ratio", 1.0)

CALLS = (
    Figure("should-preempt", "should_preempt(), nothing pending", "us", Target("at_most", 2.0)),
    Figure("heartbeat", "heartbeat()", "us"),
    Figure("report", "report_training_metrics()", "us", Target("at_most", 20.0)),
    Figure("report-paced", "… one each ms: median", "us"),
    Figure("report-p99", "… one each ms: 99th percentile", "us"),
)
IMPORT = (
    Figure("import", "import elaunch; elaunch.init, after torch", "ms", Target("at_most", 30.0)),
    Figure("import-pair", "… CPU time of such a process beyond one with torch", "ms"),
    Figure("import-alone", "… without torch", "ms"),
)


def cases(options: Options) -> list[Case]:
    """Return the case of the calls, one for each number of ranks, and that of the import."""
    both = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    ours = {ELAUNCH: options.repeats}
    sizes = [size for size in LARGE_CALLS if size in options.sizes]
    return [
        Case("api", "calls of every step", CALLS, _calls, both),
        Case("api", "import", IMPORT, _import, ours),
        *(_gather_case(size, options.repeats) for size in sizes),
    ]


def _calls(trial: Trial) -> Mapping[str, Sample]:
    with Job(trial.root, trial.launcher.command("api_calls", 1)) as job:
        job.expect_exit(TIMEOUT)
        found = job.read_stamps("calls")[0, 0]
    paced = statistics.quantiles(found["report_paced"], n=100)
    return {
        "should-preempt": _best(found["should_preempt"]),
        "heartbeat": _best(found["heartbeat"]),
        "report": _best(found["report"]),
        "report-paced": Sample(paced[49]),
        "report-p99": Sample(paced[98]),
    }


def _best(loops: Sequence[float]) -> Sample:
    """Return the best loop; what is above it is other programs' share of the machine."""
    return Sample(min(loops), detail={"loops": loops})


def _gather_case(size: int, repeats: int) -> Case:
    by_launcher = {
        TORCHRUN: min(repeats, TORCHRUN_SAMPLES.get(size, repeats)),
        ELAUNCH: repeats,
    }
    title = f"allgather, {size} ranks"
    return Case("api", title, _gathers(size), partial(_gather, size), by_launcher)


def _gathers(size: int) -> tuple[Figure, ...]:
    title = f"allgather, {size} ranks:"
    return (
        Figure(f"gather-{SMALL}-{size}", f"{title} 100 B", "ms", AS_FAST),
        Figure(f"gather-{LARGE_BYTES}-{size}", f"{title} 7 MB of bytes", "s", AS_FAST),
        Figure(f"gather-{LARGE_ARRAY}-{size}", f"{title} 7 MB in an array", "s", AS_FAST),
        Figure(f"gather-read-{size}", "… and all of it read once", "s"),
    )


def _gather(size: int, trial: Trial) -> Mapping[str, Sample]:
    how = "elaunch" if trial.is_elaunch else "torch"
    calls = 1 if trial.options.repeats == 1 else LARGE_CALLS[size]
    args = (how, str(calls))
    with Job(trial.root, trial.launcher.command("api_allgather", size, (), args)) as job:
        job.expect_exit(SLOW_TIMEOUT)
        found = job.read_stamps("allgather")
    ranks = [found[0, rank] for rank in range(size)]
    return {
        f"gather-{SMALL}-{size}": _slowest([rank[SMALL]["called"] for rank in ranks], MS),
        f"gather-{LARGE_BYTES}-{size}": _slowest([rank[LARGE_BYTES]["called"] for rank in ranks]),
        f"gather-{LARGE_ARRAY}-{size}": _slowest([rank[LARGE_ARRAY]["called"] for rank in ranks]),
        f"gather-read-{size}": _slowest([rank[LARGE_ARRAY]["read"] for rank in ranks]),
    }


def _slowest(by_rank: Sequence[Sequence[float]], scale: float = 1.0) -> Sample:
    """Return the median call, each as long as it took the rank that it took longest."""
    calls = [max(call) * scale for call in zip(*by_rank, strict=True)]
    return Sample(statistics.median(calls), detail={"best": min(calls), "worst": max(calls)})


def _import(trial: Trial) -> Mapping[str, Sample]:
    """Run interpreters in turns: with torch, with torch and elaunch, with elaunch."""
    inside, with_it, without, alone = [], [], [], []
    for _ in range(PAIRS):
        without.append(_interpreter(trial, "torch")[1])
        took, spent = _interpreter(trial, "torch", "elaunch")
        inside.append(took)
        with_it.append(spent)
        alone.append(_interpreter(trial, "elaunch")[0])
    pairs = {"with": with_it, "without": without}
    return {
        "import": Sample(min(inside), detail={"ms": inside}),
        "import-pair": Sample(min(with_it) - min(without), detail=pairs),
        "import-alone": Sample(min(alone), detail={"ms": alone}),
    }


def _interpreter(trial: Trial, *modules: str) -> tuple[float, float]:
    """Return the milliseconds that the import of elaunch took, and all CPU time until then."""
    with Job(trial.root, [sys.executable, str(JOBS / "api_import.py"), *modules]) as job:
        job.expect_exit(TIMEOUT)
        took, spent = job.output.read_text().split()
    return float(took) * MS, float(spent) * MS
