"""Runs as Prometheus' text format 0.0.4: how each stands, from its record alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from elaunch.monitor.standing import Standing
from elaunch.runs.record import Record

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FAMILIES: Final = {
    "elaunch_run_state": "1 for the state that the run is in",
    "elaunch_run_live": "whether the run goes on",
    "elaunch_run_duration_seconds": "how long the run has lasted",
    "elaunch_run_round": "number of the current round",
    "elaunch_run_restarts": "restarts so far",
    "elaunch_run_world_size": "ranks of the round",
    "elaunch_run_workers": "workers of this node by their state",
    "elaunch_run_step_min": "step of the rank that is furthest behind",
    "elaunch_run_step_max": "step of the rank that is furthest",
    "elaunch_run_checkpoint_step": "step of the newest commit",
    "elaunch_run_checkpoint_commits": "checkpoints that were committed",
    "elaunch_run_exit_code": "exit code of a run that has ended",
}
Sample = tuple[str, Mapping[str, str], float]


def render(standings: Iterable[Standing]) -> str:
    """Return the page that is scraped."""
    found: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for standing in standings:
        for name, more, value in _samples(standing):
            labels = {"run": standing.run.path.name, **more}
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            found[name].append(f"{name}{{{text}}} {value:.17g}")
    lines = []
    for name, samples in found.items():
        if samples:
            lines += [f"# HELP {name} {_FAMILIES[name]}", f"# TYPE {name} gauge", *samples]
    return "\n".join([*lines, ""])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(standing: Standing) -> Iterator[Sample]:
    record = standing.record
    run_id = {"run_id": record["run_id"], "name": record["name"]} if record else {}
    yield "elaunch_run_state", {**run_id, "state": standing.state}, 1
    yield "elaunch_run_live", {}, standing.live
    if standing.duration_s is not None:
        yield "elaunch_run_duration_seconds", {}, standing.duration_s
    if record is not None:
        yield from _recorded(record)


def _recorded(record: Record) -> Iterator[Sample]:
    yield "elaunch_run_round", {}, record["round"]
    yield "elaunch_run_restarts", {}, record["restarts"]["used"]
    if record["world_size"] is not None:
        yield "elaunch_run_world_size", {}, record["world_size"]
    for state, number in Counter(worker["state"] for worker in record["workers"]).items():
        yield "elaunch_run_workers", {"state": state}, number
    progress = record.get("progress")
    steps = [w["step"] for w in progress["workers"] if w["step"] is not None] if progress else []
    if steps:
        yield "elaunch_run_step_min", {}, min(steps)
        yield "elaunch_run_step_max", {}, max(steps)
    saves = record.get("saves")
    if saves is not None and saves["step"] is not None:
        yield "elaunch_run_checkpoint_step", {}, saves["step"]
    if saves is not None and "commits" in saves:
        yield "elaunch_run_checkpoint_commits", {}, saves["commits"]
    if record["exit_code"] is not None:
        yield "elaunch_run_exit_code", {}, record["exit_code"]
