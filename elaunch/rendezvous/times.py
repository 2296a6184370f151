"""Where the time of a job's slots went, summed over what its nodes publish of themselves. Pure.

Only durations are added up and compared, never moments: the clocks of different machines differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import get_args

from msgspec.structs import asdict, replace

from elaunch.rendezvous.decide.view import View
from elaunch.rendezvous.plan import NodeTimes
from elaunch.runs.record import JobTimingRecord, Reports
from elaunch.runs.verdict import CLASSES


def total(found: Iterable[NodeTimes]) -> NodeTimes | None:
    """Return the means over all slots, the latest rank and the slowest; None of no slot."""
    parts = [one for one in found if one.slots]
    slots = sum(one.slots for one in parts)
    if not slots:
        return None
    kinds = dict.fromkeys(kind for one in parts for kind in one.seconds)
    paces = [one.pace for one in parts if one.pace is not None]
    late = [one.late for one in parts if one.late is not None]
    slowest = max(paces, key=lambda pace: pace.step_s, default=None)
    if slowest is not None:
        slowest = replace(slowest, median_s=median(pace.median_s for pace in paces))
    return NodeTimes(
        slots=slots,
        wall_s=sum(one.slots * one.wall_s for one in parts) / slots,
        seconds={
            kind: sum(one.slots * one.seconds.get(kind, 0.0) for one in parts) / slots
            for kind in kinds
        },
        nodes=sum(one.nodes for one in parts),
        late=max(late, key=lambda one: one.held, default=None),
        pace=slowest,
        reports=max((one.reports for one in parts), key=get_args(Reports).index),
    )


def of_round(view: View, now: float) -> NodeTimes | None:
    """Return the times of the nodes of the plan's round; one that has finished has waited since."""
    return total(_of_round(view, now))


def _of_round(view: View, now: float) -> Iterator[NodeTimes]:
    for node in view.plan.nodes:
        present, absent = view.present.get(node.name), view.absent.get(node.name)
        record = present.record if present else (absent.last if absent else None)
        if record is None or record.times is None:
            continue
        times = record.times
        if present is not None and record.state == "finished":
            waited = max(0.0, now - present.changed)
            seconds = {**times.seconds, "wait": times.seconds.get("wait", 0.0) + waited}
            times = replace(times, wall_s=times.wall_s + waited, seconds=seconds)
        yield times


def to_record(times: NodeTimes) -> JobTimingRecord:
    """Return the sum as a run's record has it, with the classes that no node has any time of."""
    return {
        "nodes": times.nodes,
        "slots": times.slots,
        "wall_s": times.wall_s,
        "seconds": {**dict.fromkeys(CLASSES, 0.0), **times.seconds},
        "reports": times.reports,
        "slowest": None if times.pace is None else asdict(times.pace),  # type: ignore[typeddict-item]
        "late": None if times.late is None else asdict(times.late),  # type: ignore[typeddict-item]
    }
