"""How far a run's workers are, as ``elaunch status`` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from elaunch.monitor.amounts import duration
from elaunch.run.record import ProgressRecord, Record, WorkerProgressRecord

BY: Final[Mapping[str, str]] = {"script": "by the script"}
NOTHING_YET: Final[Mapping[str, str]] = {
    "script": "none is known: the script has reported nothing yet",
    "log lines": "none is known: no line has matched --progress-regex yet",
}


def facts(record: Record, live: bool) -> Iterator[tuple[str, str]]:
    """Yield names and values: how far, by which source, the script's own status, the limit."""
    progress = record.get("progress")
    if progress is None:
        return
    by = BY.get(progress["source"], f"by {progress['source']}")
    how_far = ", ".join(_how_far(progress))
    text = f"{how_far} ({by})" if how_far else f"no step is known; watched {by}"
    if all(worker["silent_s"] is None for worker in progress["workers"]) and not how_far:
        text = NOTHING_YET.get(progress["source"], text)
    yield "progress", text
    for text in dict.fromkeys(worker["status"] for worker in progress["workers"]):
        if text:
            yield "status", text
    if live and progress["learning"]:
        yield "hang timeout", "auto: the run's own pauses are not known yet"
    elif live and progress["limit_s"] is not None:
        yield "hang timeout", duration(progress["limit_s"])


def _how_far(progress: ProgressRecord) -> Iterator[str]:
    steps = sorted({s for worker in progress["workers"] if (s := worker["step"]) is not None})
    if steps == [1]:
        yield "1 step"
    elif steps:
        yield f"{steps[0]} steps" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"
    shares = [worker["progress"] for worker in progress["workers"]]
    known = [share for share in shares if share is not None]
    if known:
        yield f"{100 * min(known):.0f} %"


def by_rank(record: Record, live: bool) -> dict[int, WorkerProgressRecord]:
    """Return what is known of each worker, by its rank; of an ended run not how long ago it was."""
    progress = record.get("progress")
    if progress is None:
        return {}
    workers: list[WorkerProgressRecord] = progress["workers"]
    if not live:
        workers = [{**worker, "silent_s": None} for worker in workers]
    return {worker["rank"]: worker for worker in workers}


def step_text(worker: WorkerProgressRecord | None) -> str:
    """Return a worker's step, or nothing."""
    return "" if worker is None or worker["step"] is None else str(worker["step"])


def doing_text(worker: WorkerProgressRecord | None) -> str:
    """Return "in section eval, allgather #3, 12 s ago", or nothing where nothing is known."""
    if worker is None or worker["silent_s"] is None:
        return ""
    parts = [f"in section {worker['section']}"] if worker["section"] else []
    parts += [worker["doing"]] if worker["doing"] else []
    return ", ".join([*parts, f"{duration(worker['silent_s'])} ago"])
