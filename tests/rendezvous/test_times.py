"""Where the time of several nodes went: what each has published, and what a plan that is over has.

Real coordinators decide in tests/integration/test_nodes_hang.py.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elaunch.rendezvous.decide.view import Absent, Present, View
from elaunch.rendezvous.plan import LateRank, Node, NodeStatus, NodeTimes, Plan, RankPace
from elaunch.rendezvous.times import of_round, to_record, total
from elaunch.runs import verdict

LATE = LateRank(
    rank=9, last=46, collectives=60, behind_s=0.021, held=0.21, seconds=252.0, host="node2"
)


def times(slots: int, wall: float, train: float, late: LateRank | None = None) -> NodeTimes:
    """Return the times of a node whose rest is its start."""
    pace = RankPace(8 if late else 0, 0.5 if late else 0.25, 0.25)
    seconds = {"train": train, "start": wall - train}
    return NodeTimes(slots, wall, seconds, late=late, pace=pace, reports="steps")


def test_means_are_over_all_slots() -> None:
    """And their sum is the mean wall time; the slow rank is that for which most is waited."""
    less = LateRank(rank=1, last=9, collectives=10, behind_s=0.5, held=0.1, seconds=9.0)
    found = total([times(6, 100.0, 90.0, less), times(2, 60.0, 50.0, LATE)])
    assert found is not None
    assert (found.nodes, found.slots, found.wall_s, found.late) == (2, 8, 90.0, LATE)
    assert found.seconds == {"train": 80.0, "start": 10.0}
    assert found.pace == RankPace(8, 0.5, 0.25)
    assert total([]) is None


def test_a_node_that_has_finished_waits_for_the_others() -> None:
    """Until the job is over; a node that is gone is counted as it was last known."""
    nodes = tuple(Node(f"a{n}", f"node{n}", "", 2, "default") for n in (1, 2, 3))
    status = NodeStatus("node1", "10.0.0.1", 0, 2, round=0, times=times(2, 50.0, 40.0))
    present = {"a1": Present(status, 0.0, 1, 70.0), "a3": Present(status, 0.0, 2, 70.0)}
    present["a1"] = Present(
        NodeStatus("node1", "10.0.0.1", 0, 2, state="finished", round=0, times=status.times),
        *(0.0, 1, 70.0),
    )
    view = View("a1", Plan("job", 0, nodes=nodes), present, {"a2": Absent("left", 90.0, status)})
    found = of_round(view, 100.0)
    assert found is not None
    assert found.seconds == {"train": 40.0, "start": 10.0, "wait": 10.0}
    assert found.wall_s == pytest.approx(sum(found.seconds.values()))


def test_a_verdict_with_saves_needs_every_class() -> None:
    """Nodes publish those that they have any time of, and the advice on saves asks for others."""
    found = total([times(2, 100.0, 90.0)])
    assert found is not None
    job = to_record(found)
    assert set(job["seconds"]) == set(verdict.CLASSES)
    assert sum(job["seconds"].values()) == pytest.approx(job["wall_s"])


def test_one_node_that_reports_steps_is_enough() -> None:
    """Rank 0 often is the only one that does."""
    one, other = times(4, 9.0, 8.0), replace(times(4, 9.0, 8.0), reports="nothing")
    for parts, reports in (([one, other], "steps"), ([other, other], "nothing")):
        found = total(parts)
        assert found is not None and found.reports == reports


def test_the_verdict_is_on_all_nodes() -> None:
    """It names the rank, its node, and what was measured of it."""
    found = total([times(6, 100.0, 90.0), times(2, 60.0, 50.0, LATE)])
    assert found is not None
    told = dict(verdict.facts_of_job(to_record(found)))
    assert told["goodput"] == "88.9 % of 1m 30s on 8 slots of 2 nodes is train; start 11.1 %"
    assert told["slowest rank"] == (
        "rank 9 on node2 arrived last in 46 of 60 collectives, 21 ms behind; "
        "the others waited 21 % of 4m 12s"
    )
    why = verdict.late_text(
        {**to_record(found)["late"], "why": "30 % of its memory is swapped out"}
    )  # type: ignore[typeddict-item]
    assert why.endswith("4m 12s; 30 % of its memory is swapped out")
