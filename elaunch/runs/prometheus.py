"""Runs as Prometheus' text format 0.0.4: how each stands, from its record alone.

The dashboard writes all runs of a user so, and an agent with ``--metrics-port`` its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from elaunch.runs import verdict
from elaunch.runs.job import JobDocument
from elaunch.runs.record import LatenessRecord, Record, TimingRecord, steps

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FAMILIES: Final = {
    "elaunch_run_state": "1 for the state that the run is in",
    "elaunch_run_live": "whether the run is live",
    "elaunch_run_duration_seconds": "how long the run has lasted",
    "elaunch_run_round": "number of the current round",
    "elaunch_run_restarts": "restarts so far",
    "elaunch_run_world_size": "ranks of the round",
    "elaunch_run_workers": "workers of this node by their state",
    "elaunch_run_step_min": "step of the rank that is furthest behind",
    "elaunch_run_step_max": "step of the rank that is furthest",
    "elaunch_run_checkpoint_step": "step of the newest commit",
    "elaunch_run_checkpoint_commits": "checkpoints that were committed",
    "elaunch_run_goodput_ratio": "share of the time so far that is kept as training; "
    "absent until the script has reported a step",
    "elaunch_run_slot_seconds": "seconds of a slot by where they went; their sum is the wall time",
    "elaunch_run_failures": "rounds that failed",
    "elaunch_run_step_seconds": "seconds for a step, without waits and saves",
    "elaunch_run_waiting_ratio": "share of the last minutes in which ranks waited for the last one",
    "elaunch_run_rank_behind_seconds": "how far behind the others a rank arrives at collectives",
    "elaunch_run_exit_code": "exit code of a run that has ended",
}
"""Every name on the page, and its HELP."""
Sample = tuple[str, Mapping[str, str], float]


def render(jobs: Iterable[JobDocument]) -> str:
    """Return the page that is scraped."""
    written: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for job in jobs:
        for name, labels, value in samples(job):
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            written[name].append(f"{name}{{{text}}} {value:.17g}")
    lines = []
    for name, found in written.items():
        if found:
            lines += [f"# HELP {name} {FAMILIES[name]}", f"# TYPE {name} gauge", *found]
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def samples(job: JobDocument) -> Iterator[Sample]:
    """Yield what the page has of a run: names of FAMILIES, labels, values."""
    for name, labels, value in _samples(job):
        yield name, {"run": job.run.path.name, **labels}, value


def _samples(job: JobDocument) -> Iterator[Sample]:
    record = job.record
    run_id = {"run_id": record["run_id"], "name": record["name"]} if record else {}
    yield "elaunch_run_state", {**run_id, "state": job.state}, 1
    yield "elaunch_run_live", {}, job.live
    if job.duration_s is not None:
        yield "elaunch_run_duration_seconds", {}, job.duration_s
    if record is not None:
        yield from _recorded(record)


def _recorded(record: Record) -> Iterator[Sample]:
    yield "elaunch_run_round", {}, record["round"]
    yield "elaunch_run_restarts", {}, record["restarts"]["used"]
    if record["world_size"] is not None:
        yield "elaunch_run_world_size", {}, record["world_size"]
    for state, number in Counter(worker["state"] for worker in record["workers"]).items():
        yield "elaunch_run_workers", {"state": state}, number
    if shown := steps(record.get("progress")):
        yield "elaunch_run_step_min", {}, min(shown)
        yield "elaunch_run_step_max", {}, max(shown)
    saves = record.get("saves")
    if saves is not None and saves["step"] is not None:
        yield "elaunch_run_checkpoint_step", {}, saves["step"]
    if saves is not None:
        yield "elaunch_run_checkpoint_commits", {}, saves["commits"]
    timing = record.get("timing")
    if timing is not None:
        yield from _timed(timing)
    if (share := verdict.goodput(record)) is not None:
        yield "elaunch_run_goodput_ratio", {}, share
    lateness = record.get("lateness")
    if lateness is not None:
        yield from _late(lateness)
    if record["exit_code"] is not None:
        yield "elaunch_run_exit_code", {}, record["exit_code"]


def _timed(timing: TimingRecord) -> Iterator[Sample]:
    for name, seconds in timing["seconds"].items():
        yield "elaunch_run_slot_seconds", {"class": name}, seconds
    yield "elaunch_run_failures", {}, timing["failures"]
    if timing["step_s"] is not None:
        yield "elaunch_run_step_seconds", {}, timing["step_s"]


def _late(lateness: LatenessRecord) -> Iterator[Sample]:
    yield "elaunch_run_waiting_ratio", {}, lateness["held"]
    for one in lateness["ranks"]:
        yield "elaunch_run_rank_behind_seconds", {"rank": str(one["rank"])}, one["behind_s"]
