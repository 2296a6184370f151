"""A job as its store has it, its pages and its document: plan and members become a view."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from elaunch.rendezvous.plan import Node, NodeStatus, Plan, PlanCheckpoint, WorkerFailure
from elaunch.views.json import store_job
from elaunch.views.layout import Table, plain, styled
from elaunch.views.page import store_page, stores_page
from elaunch.views.store import Member, StoreJob

NOW = 1_795_000_000.0
PLACE = "etcd at 10.0.0.1:2379"
NODES = (
    Node("aaaaaa", "node1", "10.0.0.1", 8, "default"),
    Node("bbbbbb", "node2", "10.0.0.2", 4, "default"),
)
PLAN = Plan("maple", 3, "running", "node3 (10.0.0.3) was lost", nodes=NODES, coordinator="aaaaaa")
FAILURE = WorkerFailure(
    rank=9,
    local_rank=1,
    host="node2",
    pid=4711,
    exitcode=7,
    text="RuntimeError: boom\nsecond line \x1b[31m",
    age=0.1,
    node="bbbbbb",
)


def agent(number: int, **changes: Any) -> Member:
    """Return a member, renewed 0.4 s ago, in round 3 unless said otherwise."""
    age = changes.pop("age", 0.4)
    changes = {"slots": 8, "state": "running", "round": 3} | changes
    return NodeStatus(f"node{number}", f"10.0.0.{number}", 40000, **changes), age


def viewed(plan: Plan | None = PLAN, **members: Member) -> StoreJob:
    """Return the view of a plan and members; without any, both nodes of the plan run."""
    there = members or {"aaaaaa": agent(1), "bbbbbb": agent(2, slots=4)}
    return StoreJob("train-3fa2c1", PLACE, NOW, plan, 7, there)


def drawn(page: Any, width: int) -> str:
    """Return what a terminal of ``width`` columns without colours shows."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(styled(page, width))
    return file.getvalue()


@pytest.mark.parametrize(
    ("record", "phase", "state"),
    [
        ({"state": "running"}, "running", "alive"),
        ({"state": "ready"}, "running", "alive"),
        ({"state": "failed"}, "running", "failed"),
        ({"state": "failed"}, "ending", "failed"),
        ({"state": "finished"}, "running", "finished"),
        ({"state": "ended"}, "ending", "ended"),
        ({"state": "ended", "round": 2}, "running", "alive"),
        ({"state": "finished", "round": 2}, "running", "alive"),
        ({"state": "leaving"}, "running", "leaving"),
        ({"state": "leaving", "round": 2}, "ending", "leaving"),
        (None, "running", "gone"),
        (None, "ending", "gone"),
        (None, "over", "left"),
    ],
)
def test_the_state_of_a_node(record: dict[str, Any] | None, phase: Any, state: str) -> None:
    members = {"aaaaaa": agent(1)} | ({"bbbbbb": agent(2, **record)} if record else {})
    assert viewed(structs.replace(PLAN, phase=phase), **members).nodes[1].state == state


@pytest.mark.parametrize(
    ("plan", "state", "live"),
    [
        (None, "FORMING", True),
        (structs.replace(PLAN, phase="forming", round=-1, nodes=()), "FORMING", True),
        (PLAN, "RUNNING", True),
        (structs.replace(PLAN, phase="ending", cause="failure"), "ENDING", True),
        (structs.replace(PLAN, phase="over", exit_code=0), "COMPLETED", False),
        (
            structs.replace(PLAN, phase="over", exit_code=7, failure=FAILURE),
            "FAILED",
            False,
        ),
        (
            structs.replace(PLAN, phase="over", exit_code=137, failure=FAILURE),
            "FAILED",
            False,
        ),
        (structs.replace(PLAN, phase="over", exit_code=75), "PREEMPTED", False),
        (structs.replace(PLAN, phase="over", exit_code=69), "FAILED", False),
        (structs.replace(PLAN, phase="over", exit_code=143), "STOPPED", False),
    ],
)
def test_the_state_of_the_job(plan: Plan | None, state: str, live: bool) -> None:
    view = viewed(plan)
    assert (view.state, view.live) == (state, live)


def test_what_is_waited_for_is_said_once() -> None:
    """It is mostly the plan's reason, and for how long."""
    waits = f"{PLAN.reason}, for 30 s"
    assert viewed(structs.replace(PLAN, waits=waits)).reason == waits
    told = viewed(structs.replace(PLAN, waits="node2 does not answer, for 30 s")).reason
    assert told == f"{PLAN.reason}; node2 does not answer, for 30 s"


def test_a_job_without_agents_is_lost_unless_it_is_over() -> None:
    lost = StoreJob("train", PLACE, NOW, PLAN, 7)
    assert (lost.state, lost.live) == ("LOST", False)
    assert "had not ended" in lost.reason and PLAN.reason in lost.reason
    assert [node.state for node in lost.nodes] == ["gone", "gone"]
    over = StoreJob("train", PLACE, NOW, structs.replace(PLAN, phase="over", exit_code=0), 7)
    assert (over.state, over.reason) == ("COMPLETED", PLAN.reason)


def test_the_rank_for_which_the_others_wait() -> None:
    """Each node whose ranks wait says so; it is shown once, above all else."""
    note = "rank 11 has not entered all_reduce #7; ranks 0-10 have been waiting there for 42 s"
    members = {"aaaaaa": agent(1, note=note), "bbbbbb": agent(2, slots=4, note=note)}
    lines = plain(store_page(viewed(**members))).splitlines()
    assert lines.count(f"  attention: {note}") == 1 and lines.index(f"  attention: {note}") == 2
    over = structs.replace(PLAN, phase="over", exit_code=0)
    assert "attention" not in plain(store_page(viewed(over, **members)))


def test_an_agent_whose_record_is_refused_is_still_there() -> None:
    view = StoreJob("train", PLACE, NOW, refused={"aaaaaa": "its signature is wrong"})
    assert (view.state, view.live) == ("FORMING", True)
    assert "refused the record of aaaaaa: its signature is wrong" in plain(store_page(view))


def test_a_node_whose_record_is_refused_is_not_gone() -> None:
    refused = {"bbbbbb": "its signature is wrong"}
    view = StoreJob("train", PLACE, NOW, PLAN, 7, {"aaaaaa": agent(1)}, refused)
    assert [node.state for node in view.nodes] == ["alive", "refused"]


def test_ranks_follow_the_nodes_with_unequal_slots() -> None:
    view = viewed()
    assert [(n.rank, n.ranks, n.slots) for n in view.nodes] == [(0, (0, 7), 8), (1, (8, 11), 4)]


def test_who_is_not_in_the_round_stands_by_or_joins_in_order() -> None:
    plan = structs.replace(PLAN, spares=("s2", "s1", "away"), joining=("j9",))
    view = viewed(
        plan,
        aaaaaa=agent(1),
        s1=agent(3),
        s2=agent(4),
        n10=agent(10, state="ready", round=-1),
        n5=agent(5, state="joining", round=-1),
        j9=agent(9, state="ready", round=-1),
        off=agent(6, state="leaving", reason="SIGTERM"),
    )
    assert [node.name for node in view.spares] == ["s2", "s1"]
    assert [node.name for node in view.joining] == ["j9", "n5", "off", "n10"]
    assert [node.state for node in view.joining] == ["joining", "joining", "leaving", "joining"]
    assert view.joining[2].note == "SIGTERM"
    assert view.nodes[1].state == "gone"


def test_an_agent_that_came_back_is_joining_while_its_old_seat_is_gone() -> None:
    view = viewed(PLAN, aaaaaa=agent(1), cccccc=agent(2, state="ready", round=-1))
    assert [(n.host, n.state) for n in view.nodes] == [("node1", "alive"), ("node2", "gone")]
    assert [(n.host, n.name) for n in view.joining] == [("node2", "cccccc")]


@pytest.mark.parametrize(
    ("facts", "restarts", "text"),
    [
        ({}, (2, 1, None, None), "2\n"),
        (
            {"max_restarts": "3", "restart_budget": "progress"},
            (2, 1, 3, "progress"),
            "1 of 3 used; 2 in all\n",
        ),
        (
            {"max_restarts": "3", "restart_budget": "lifetime"},
            (2, 1, 3, "lifetime"),
            "2 of 3 used\n",
        ),
        ({"max_restarts": "many"}, (2, 1, None, None), "2\n"),
        ({"max_restarts": "0", "restart_budget": "lifetime"}, (2, 1, 0, "lifetime"), "2\n"),
    ],
)
def test_the_budget_is_what_the_agents_say(
    facts: dict[str, str], restarts: tuple[Any, ...], text: str
) -> None:
    view = viewed(
        structs.replace(PLAN, restarts=2, without_progress=1), aaaaaa=agent(1, facts=facts)
    )
    assert view.restarts is not None and tuple(view.restarts.values()) == restarts
    assert f"restarts     {text}" in plain(store_page(view))


def test_the_page_of_a_running_job() -> None:
    plan = structs.replace(
        PLAN,
        master_addr="fd00::1",
        master_port=29500,
        checkpoint=PlanCheckpoint("/c/step_20", 20, "dcp"),
        failure=FAILURE,
        restarts=1,
        spares=("dddddd",),
        notice="the nodes differ in torch: 2.9 on node1, 2.8 on node2",
    )
    view = viewed(
        plan, aaaaaa=agent(1), dddddd=agent(4, role="eval", age=None, note="pid 9 is stuck")
    )
    assert plain(store_page(view)).splitlines() == [
        "train-3fa2c1  RUNNING  round 3",
        "  node3 (10.0.0.3) was lost",
        "  warning: the nodes differ in torch: 2.9 on node1, 2.8 on node2",
        "",
        "  store         etcd at 10.0.0.1:2379",
        "  round         3",
        "  restarts      1",
        "  world size    12",
        "  nodes         2: 1 alive, 1 gone; 1 standing by",
        "  last failure  rank 9 (local_rank 1, pid 4711) on node2 exited with code 7",
        "  resumed       round 3 from step 20: /c/step_20",
        "  master        [fd00::1]:29500",
        "  coordinator   aaaaaa on node1",
        "",
        "node  name    host   address   state  ranks  slots  lease age",
        "   0  aaaaaa  node1  10.0.0.1  alive  0-7        8     0.40 s",
        "   1  bbbbbb  node2  10.0.0.2  gone   8-11       4          -",
        "",
        "name    host   address   state  slots  role  note",
        "dddddd  node4  10.0.0.4  spare      8  eval  pid 9 is stuck",
    ]


def test_the_cause_of_the_end_comes_first() -> None:
    plan = structs.replace(
        PLAN,
        phase="over",
        exit_code=7,
        reason="rank 9 on node2 exited with code 7; no restart is left",
        failure=FAILURE,
    )
    assert plain(store_page(viewed(plan, aaaaaa=agent(1, state="ended")))).splitlines()[:5] == [
        "train-3fa2c1  FAILED  exit code 7",
        "  rank 9 on node2 exited with code 7; no restart is left",
        "  rank 9 (local_rank 1, pid 4711) on node2 exited with code 7",
        "  RuntimeError: boom",
        "  second line \\x1b[31m",
    ]


def test_a_hang_is_no_exit() -> None:
    """The ranks that it names may be another node's than its agent's."""
    hang = WorkerFailure(rank=9, host="node1", exitcode=77, summary="rank 9 does not answer")
    plan = structs.replace(PLAN, failure=hang)
    shown = plain(store_page(viewed(plan, aaaaaa=agent(1)))).splitlines()
    assert "  last failure  rank 9 does not answer (seen on node1)" in shown


def test_agents_that_gather() -> None:
    waiting = agent(1, state="ready", round=-1)
    text = plain(store_page(viewed(None, aaaaaa=waiting, bbbbbb=agent(2, round=-1))))
    assert text.startswith("train-3fa2c1  FORMING\n\n  store  etcd at 10.0.0.1:2379\n")
    assert "  nodes  0; 2 joining\n" in text


def test_a_failure_of_which_little_is_known_is_shown() -> None:
    failure = WorkerFailure(rank=1, exitcode=-9)
    plan = structs.replace(PLAN, phase="ending", cause="failure", failure=failure)
    assert "rank 1 (local_rank 0, pid 0) on ? was killed by SIGKILL" in plain(
        store_page(viewed(plan))
    )


def test_the_document_is_json_and_has_every_field_for_every_node() -> None:
    plan = structs.replace(PLAN, spares=("dddddd",), failure=FAILURE)
    view = viewed(plan, aaaaaa=agent(1), dddddd=agent(4), eeeeee=agent(5, state="ready"))
    document = json.loads(json.dumps(store_job(view)))
    assert document["state"] == "RUNNING" and document["phase"] == "running"
    assert (document["round"], document["world_size"], document["version"]) == (3, 12, 7)
    assert document["failure"]["text"] == FAILURE.text
    nodes = [*document["nodes"], *document["spares"], *document["joining"]]
    assert [node["state"] for node in nodes] == ["alive", "gone", "spare", "joining"]
    assert len({tuple(node) for node in nodes}) == 1
    assert nodes[0] == {
        "name": "aaaaaa",
        "host": "node1",
        "addr": "10.0.0.1",
        "slots": 8,
        "role": "default",
        "state": "alive",
        "node_rank": 0,
        "first_rank": 0,
        "last_rank": 7,
        "lease_age_s": 0.4,
        "agent_state": "running",
        "agent_round": 3,
        "hint": None,
        "note": None,
    }
    assert (nodes[1]["first_rank"], nodes[1]["lease_age_s"]) == (8, None)


def test_several_jobs() -> None:
    other = StoreJob("eval-1", PLACE, NOW, problem="the plan is signed, and no secret is given")
    facts = {"max_restarts": "3", "restart_budget": "progress"}
    views = [viewed(structs.replace(PLAN, restarts=1), aaaaaa=agent(1, facts=facts)), other]
    assert plain(stores_page(views)).splitlines() == [
        "run           state       round  restarts  world size  nodes  reason",
        "train-3fa2c1  RUNNING         3       1/3          12      2  node3 (10.0.0.3) was lost",
        "eval-1        UNREADABLE      -         -           -      -  "
        "the plan is signed, and no secret is given",
    ]
    document = [store_job(view) for view in views]
    assert [each["state"] for each in document] == ["RUNNING", "UNREADABLE"]
    assert (document[1]["round"], document[1]["nodes"]) == (None, [])
    assert set(document[0]) == set(document[1])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    long = Node("aaaaaa", "gpu-node-0001.cluster.example.org", "fd00:1234:5678::abcd", 8, "trainer")
    view = viewed(
        structs.replace(PLAN, nodes=(long, NODES[1]), reason="because " * 30), aaaaaa=agent(1)
    )
    for page in (store_page(view), stores_page([view])):
        assert max(len(line) for line in drawn(page, width).splitlines()) <= width


def test_eighty_columns_hold_a_node_on_one_line() -> None:
    lines = drawn(store_page(viewed()), 80).splitlines()
    assert lines[-1].split() == [
        *("1", "bbbbbb", "node2", "10.0.0.2", "alive", "8-11", "4", "0.40", "s"),
    ]


def test_plain_text_has_thousands_of_nodes() -> None:
    nodes = tuple(
        Node(f"{i:06x}", f"node{i}", f"10.0.{i // 250}.1", 8, "default") for i in range(4096)
    )
    members = {node.name: agent(1) for node in nodes[1:]}
    view = StoreJob("big", PLACE, NOW, structs.replace(PLAN, nodes=nodes), 1, members)
    page = store_page(view)
    table = next(part for part in page if isinstance(part, Table))
    assert len(table.rows) == 4096
    assert "  nodes        4096: 1 gone, 4095 alive\n" in plain(page)


def test_of_thousands_a_terminal_shows_the_unusual() -> None:
    nodes = tuple(Node(f"{i:06x}", f"node{i}", "10.0.0.1", 8, "default") for i in range(1000))
    members = {node.name: agent(1) for node in nodes if node.host != "node700"}
    view = StoreJob("big", PLACE, NOW, structs.replace(PLAN, nodes=nodes), 1, members)
    lines = [line.split() for line in drawn(store_page(view), 120).splitlines()]
    assert ["700", "0002bc", "node700", "10.0.0.1", "gone", "5600-5607", "8", "-"] in lines
    assert ["and", "979", "more,", "all", "of", "them", "in", "output", "to", "a", "pipe"] in lines
    assert len(lines) < 50
