"""What a quiet job of 4 workers costs: memory of all its processes, and CPU time of the launcher's.

Memory is the sum of the proportional set sizes, so that shared pages count once; other programs
that use the same libraries at the time would take a share off. The launcher's processes are all
that are not workers: for torchrun one, which also hosts the store; for elaunch the agent, the
server and the host of the store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import procfs
from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

WORKERS = 4
TIMEOUT = 90.0
FIGURES = (
    Figure("memory", "memory of an idle job of 4 workers (PSS)", "MB", Target("ratio", 0.35)),
    Figure("agent-rss", "agent RSS", "MB", Target("at_most", 40.0)),
    Figure("cpu-agent", "agent CPU while workers run", "%", Target("at_most", 0.02)),
    Figure("cpu-all", "… with server and store host", "%", Target("at_most", 0.02)),
)


def cases(options: Options) -> list[Case]:
    """Return the one case."""
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return [Case("idle", "idle job", FIGURES, _measure, repeats)]


def _measure(trial: Trial) -> Mapping[str, Sample]:
    with Job(trial.root, trial.launcher.command("idle", WORKERS)) as job:
        ready = job.wait_stamps("ready", WORKERS, TIMEOUT)
        workers = {stamp["pid"] for stamp in ready.values()}
        time.sleep(trial.options.settle)
        pids = job.pids()
        if not workers <= pids:
            raise job.error(f"workers {sorted(workers - pids)} are gone")
        pss = {pid: procfs.pss_mb(pid) for pid in pids}
        agent = job.process.pid
        names = {pid: procfs.title(pid) for pid in pids}
        sizes = {f"{pid} {names[pid]}": round(size, 1) for pid, size in pss.items()}
        rss = procfs.rss_mb(agent)
        shares = _cpu_shares(pids - workers, trial.options.cpu_window)
        if job.process.poll() is not None:
            raise job.error("the launcher ended while the workers slept")
    by_name = {f"{pid} {names[pid]}": share for pid, share in shares.items()}
    return {
        "memory": Sample(sum(pss.values()), detail={"mb": sizes}),
        "agent-rss": Sample(rss, detail={"pss": pss[agent]}),
        "cpu-agent": Sample(shares[agent]),
        "cpu-all": Sample(sum(shares.values()), detail={"percent": by_name}),
    }


def _cpu_shares(pids: set[int], window: float) -> dict[int, float]:
    """Return the percentage of one CPU that each process used over ``window`` seconds."""
    begin = time.monotonic()
    before = {pid: procfs.cpu_seconds(pid) for pid in pids}
    time.sleep(window)
    after = {pid: procfs.cpu_seconds(pid) for pid in pids}
    elapsed = time.monotonic() - begin
    return {pid: (after[pid] - before[pid]) / elapsed * 100 for pid in pids}
