"""The decision table: a plan, members and a time; the step and its reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elaunch.errors import JoinTimeoutError, SymmetryError
from elaunch.rendezvous import records
from elaunch.rendezvous.decide.decide import decide
from elaunch.rendezvous.decide.view import (
    Absent,
    LastKnown,
    Present,
    Publish,
    Rules,
    Search,
    SearchResult,
    Step,
    View,
    Wait,
)
from elaunch.rendezvous.plan import (
    Node,
    NodeStatus,
    Plan,
    PlanCheckpoint,
    RestartRequest,
    SameFailure,
    WorkerFailure,
)
from elaunch.rendezvous.text import UNACCUSED
from tests.tables import each

TWO = Rules(2, 2, max_restarts=3, remind=1e6, end_timeout=60.0)
ELASTIC = Rules(1, 3, max_restarts=3, remind=1e6)
HOSTS = Rules(1, 2, max_restarts=3, heartbeat_timeout=12.0, hosted_by_me=True, remind=1e6)
OPEN = replace(TWO, remind=30.0)
SAVING = replace(TWO, has_checkpoint_dir=True)
LOCAL = replace(SAVING, checkpoint_local=True)
CKPT = PlanCheckpoint("step-00000040.r0", 40, "elaunch")
STATIC = replace(TWO, static=True)
NOW = 100.0


def member(number: int, state: str = "ready", round: int = -1, **said: Any) -> Present:
    """Return agent ``number``, which came 50 s ago unless ``since`` says otherwise."""
    since, failed_at = said.pop("since", 50.0), said.pop("failed_at", None)
    record = NodeStatus(f"node{number}", f"10.0.0.{number}", 4000 + number, 8)
    record = replace(record, state=state, round=round, **said)
    return Present(record, since, number, since, failed_at)


def failed(number: int, state: str = "ended", at: float = 99.0, code: int = 7) -> Present:
    """Return an agent whose worker has failed in round 0 at that time."""
    found = WorkerFailure(rank=8 * (number - 1), exitcode=code, text="boom")
    return member(number, state, 0, failure=found, failed_at=at)


def victim(number: int, at: float) -> Present:
    """Return an agent whose worker has lost another one, of which nothing is known."""
    one = failed(number, "failed", at)
    assert one.record.failure is not None
    found = replace(one.record.failure, summary=UNACCUSED)
    return replace(one, record=replace(one.record, failure=found))


def saved(number: int, why: str) -> Present:
    """Return an agent whose workers have saved and ended in round 0, because they were asked."""
    return member(number, "finished", 0, preempted=why, reason="a node joins")


def again(number: int, round: int, state: str = "running", of: int = 0) -> Present:
    """Return an agent on which a command asks that ``round`` end and another begin."""
    return member(number, state, of, restart=RestartRequest(round, "new data"))


def node(number: int) -> Node:
    """Return a node of a plan."""
    return Node(f"a{number}", f"node{number}", f"10.0.0.{number}", 8, "default")


EMPTY = Plan("job")
RUNNING = Plan("job", 0, "running", "first start", nodes=(node(1), node(2)))
FAILURE = WorkerFailure(rank=0, exitcode=7, text="boom", host="node1", node="a1")
ENDING = replace(RUNNING, phase="ending", cause="failure", reason="?", failure=FAILURE)
LOST = replace(RUNNING, phase="ending", cause="lost", reason="node2 was lost")
ALONE = replace(RUNNING, nodes=(node(1),))
RUN1, RUN2 = member(1, "running", 0), member(2, "running", 0)
END1, END2 = member(1, "ended", 0), member(2, "ended", 0)
LISTENS1, LISTENS2 = member(1, "running", 0, listens=True), member(2, "running", 0, listens=True)
GROWS = replace(RUNNING, joining=("a3",))
ASKED = replace(RUNNING, phase="ending", cause="asked", reason="new data")
SECOND = replace(RUNNING, round=1)
GOES_ON = ("wait 600", "waiting for node1 (10.0.0.1), node2 (10.0.0.2) to start round 1")
P3 = frozenset({"p3"})


def gone2(at: float) -> dict[str, Absent]:
    """Return that node 2 was lost then."""
    return {"a2": Absent("expired", at, RUN2.record)}


GONE2 = gone2(99.0)


def flapping(rounds: int, plan: Plan = LOST, host: str = "node2") -> Plan:
    """Return a plan whose last ``rounds`` rounds have lost one node."""
    return replace(plan, losses=SameFailure(host, tuple(range(rounds))))


FLAPS = {"absent": GONE2, "leads_since": 40.0}
BACK2 = member(4)
BACK2 = replace(BACK2, record=replace(BACK2.record, host="node2", addr="10.0.0.2"))

Row = tuple[Rules, Plan, list[Present], dict[str, Any], str, str]
# rules, plan, who is there, what else the view says, "phase/cause/round/code" or step, reason
TABLE: dict[str, Row] = {
    "all are there": (
        TWO,
        EMPTY,
        [member(2, "joining"), member(1)],
        {"last_newcomer_at": 100.0},
        "running//0/None a1 a2",
        "first start: 2 nodes, 16 workers",
    ),
    "a round is to be restarted": (
        *(TWO, RUNNING, [RUN1, again(2, 0)], {}),
        *("ending/asked/0/None a1 a2", "new data"),
    ),
    "a request for the round before": (TWO, SECOND, [again(1, 0), again(2, 0)], {}, *GOES_ON),
    "a spare may ask, too": (
        *(TWO, RUNNING, [RUN1, RUN2, again(3, 0, state="ready", of=-1)], {}),
        *("ending/asked/0/None a1 a2", "new data"),
    ),
    "a job that is asked to end is not restarted": (
        *(TWO, replace(RUNNING, asked="drain"), [RUN1, again(2, 0)], {}),
        *("wait None", ""),
    ),
    "a restart waits for all": (
        *(TWO, ASKED, [END1, RUN2], {"phase_since": 95.0}),
        *("wait 155", "waiting for node2 (10.0.0.2) to end round 0"),
    ),
    "a restart is not counted": (
        *(SAVING, replace(ASKED, restarts=2), [END1, END2], {"search_result": SearchResult(CKPT)}),
        *("running//1/None a1 a2 r2", "new data; going on with 2 nodes, 16 workers, from step 40"),
    ),
    "all were done before they could be stopped": (
        *(TWO, ASKED, [member(1, "finished", 0), member(2, "finished", 0)], {}),
        *("over/asked/0/0 a1 a2", "all workers ended with 0"),
    ),
    "all have saved for it": (
        *(TWO, ASKED, [saved(1, "resize"), saved(2, "resize")], {}),
        *("running//1/None a1 a2", "new data; going on with 2 nodes, 16 workers"),
    ),
    "a failure while it ends counts for nothing": (
        *(replace(TWO, max_restarts=0), ASKED, [failed(1), END2], {}),
        *("running//1/None a1 a2", "new data; going on with 2 nodes, 16 workers"),
    ),
    "enough, and one may come": (
        *(ELASTIC, EMPTY, [member(1)], {"last_newcomer_at": 99.0}),
        *("wait 101", "waiting for more nodes"),
    ),
    "enough, and none came": (
        *(ELASTIC, EMPTY, [member(1)], {"last_newcomer_at": 98.0}),
        *("running//0/None a1", "first start: 1 node, 8 workers"),
    ),
    "a new host waits out the fences of those it cannot know": (
        *(HOSTS, EMPTY, [member(1)], {"store_opened": 97.0, "last_newcomer_at": 97.0}),
        *("wait 107", "waiting for more nodes"),
    ),
    "unless all are there, and nobody knows of a round": (
        *(HOSTS, EMPTY, [member(1), member(2)], {"store_opened": 96.0, "last_newcomer_at": 99.9}),
        *("running//0/None a1 a2", "first start: 2 nodes, 16 workers"),
    ),
    "a host that was killed here had agents": (
        *(replace(HOSTS, killed_in=4), EMPTY, [member(1), member(2)], {"store_opened": 96.0}),
        *("wait 108", "waiting for more nodes"),
    ),
    "and none of them has come back": (
        *(replace(HOSTS, killed_in=4), EMPTY, [member(1), member(2)], {"store_opened": 88.0}),
        "running//5/None a1 a2; the last run with this run id was killed here in round 4: this one "
        "goes on with round 5, and restarts are counted from 0 again",
        "first start: 2 nodes, 16 workers",
    ),
    "the host knows of a later round than those that have come back": (
        *(replace(HOSTS, killed_in=6), EMPTY, [member(1), member(2)]),
        {"store_opened": 80.0, "known": LastKnown(4, 2, 1, 40, 12.0)},
        "running//7/None a1 a2 r2",
        "the store lost its memory; going on with 2 nodes, 16 workers",
    ),
    "the longest fence of those that have": (
        *(
            HOSTS,
            EMPTY,
            [member(1), member(2)],
            {"store_opened": 80.0, "known": LastKnown(4, heartbeat=30.0)},
        ),
        *("wait 110", "waiting for more nodes"),
    ),
    "the job goes on in the next round, with its budget": (
        *(HOSTS, EMPTY, [member(1)], {"store_opened": 88.0, "known": LastKnown(4, 2, 1, 40, 12.0)}),
        *("running//5/None a1 r2", "the store lost its memory; going on with 1 node, 8 workers"),
    ),
    "too few, told on the plan": (
        *(TWO, EMPTY, [member(1)], {"phase_since": 90.0, "published_at": 90.0}),
        *("forming//-1/None", "1 of 2 nodes: node1 (10.0.0.1); 1 more is needed"),
    ),
    "too few for too long": (
        *(
            replace(TWO, min_nodes=3, max_nodes=4),
            EMPTY,
            [member(1), member(2)],
            {"phase_since": -500.0},
        ),
        f"over//-1/{JoinTimeoutError.exit_code}",
        "2 of at least 3 nodes after 600 s: node1 (10.0.0.1), node2 (10.0.0.2); 1 more is needed",
    ),
    "checkpoints are looked for first": (
        *(SAVING, EMPTY, [member(1), member(2)], {}, "search", "looking for the newest checkpoint"),
    ),
    "and cannot be": (
        *(
            SAVING,
            EMPTY,
            [member(1), member(2)],
            {"search_result": SearchResult(problem="/ck: no")},
        ),
        *("over//-1/74", "cannot look for checkpoints: /ck: no"),
    ),
    "and the files of those who come": (
        *(
            SAVING,
            EMPTY,
            [member(1, probe="p1"), member(2, probe="p2")],
            {"search_result": SearchResult()},
        ),
        *("search", "looking for the newest checkpoint"),
    ),
    "which are all seen": (
        *(SAVING, EMPTY, [member(1, probe="p1"), member(2, probe="p2")]),
        {"search_result": SearchResult(probes=frozenset({"p1", "p2"}))},
        *("running//0/None a1 a2", "first start: 2 nodes, 16 workers, from the start"),
    ),
    "one is not seen": (
        *(SAVING, EMPTY),
        [
            member(1, probe="p1", facts={"checkpoint_dir": "/ck"}),
            member(2, probe="p2", facts={"checkpoint_dir": "/ck"}),
        ],
        {"search_result": SearchResult(probes=frozenset({"p1", "p2"}), unseen=frozenset({"p2"}))},
        "over//-1/2",
        "--checkpoint-dir is not one directory on all nodes: what node2 (10.0.0.2) in /ck has "
        "written there is not seen on node1 (10.0.0.1) in /ck; mount one file system on all of "
        "them, or give --checkpoint-local if each node is to keep its own checkpoints",
    ),
    "who was in the round before is not looked for again": (
        *(SAVING, LOST, [member(1, "ended", 0, probe="p1"), member(2, "ended", 0, probe="p2")]),
        {"search_result": SearchResult()},
        *(
            "running//1/None a1 a2",
            "node2 was lost; going on with 2 nodes, 16 workers, from the start",
        ),
    ),
    "a newcomer is looked for": (
        *(SAVING, LOST, [member(1, "ended", 0, probe="p1"), member(3, probe="p3")]),
        {"absent": GONE2, "search_result": SearchResult()},
        *("search", "looking for the newest checkpoint"),
    ),
    "a newcomer with another directory is left out": (
        *(replace(ELASTIC, has_checkpoint_dir=True), LOST),
        [member(1, "ended", 0, probe="p1"), member(3, probe="p3")],
        {
            "absent": GONE2,
            "search_result": SearchResult(probes=frozenset({"p3"}), unseen=frozenset({"p3"})),
        },
        "running//1/None a1 !a3",
        "node2 was lost; going on with 1 node, 8 workers, from the start",
    ),
    "and waited for no more": (
        *(ELASTIC, replace(RUNNING, not_sharing=("a3",)), [RUN1, RUN2, member(3)], {}),
        *("wait None", ""),
    ),
    "the nodes differ": (
        *(replace(TWO, strict_symmetry=True), EMPTY),
        *([member(1, facts={"torch": "2.1"}), member(2, facts={"torch": "2.2"})], {}),
        f"over//-1/{SymmetryError.exit_code}",
        "the nodes differ: torch is 2.1 on node1 and 2.2 on node2 (--strict-symmetry)",
    ),
    "static: by rank": (
        *(STATIC, EMPTY, [member(1, hint=1), member(2, hint=0)], {}),
        *("running//0/None a2 a1", "first start: 2 nodes, 16 workers"),
    ),
    "static: a rank twice": (
        *(STATIC, EMPTY, [member(1, hint=1), member(2, hint=1)], {}),
        "over//-1/2",
        "--node-rank 1 is given twice: to node1 (10.0.0.1) and to node2 (10.0.0.2)",
    ),
    # ── running ──
    "nothing happens": (TWO, RUNNING, [RUN1, RUN2], {}, "wait None", ""),
    "a worker fails": (
        *(TWO, RUNNING, [RUN1, failed(2, "failed", code=-9)], {}),
        *("ending/failure/0/None a1 a2", "rank 8 on node2 was killed by SIGKILL"),
    ),
    "two fail: the earlier": (
        *(TWO, RUNNING, [failed(1, "failed", 99.5), failed(2, "failed", 99.4)], {}),
        *("ending/failure/0/None a1 a2", "rank 8 on node2 exited with code 7"),
    ),
    "two fail: a likely victim comes after one with a cause of its own": (
        *(TWO, RUNNING, [victim(1, 99.4), failed(2, "failed", 99.5)], {}),
        *("ending/failure/0/None a1 a2", "rank 8 on node2 exited with code 7"),
    ),
    "a node is lost": (
        *(TWO, RUNNING, [RUN1], {"absent": GONE2}, "ending/lost/0/None a1 a2"),
        "node node2 (10.0.0.2) was lost: no heartbeat for 3 s",
    ),
    "workers that can save are not stopped for a newcomer": (
        *(ELASTIC, RUNNING, [LISTENS1, LISTENS2, member(3)], {"last_newcomer_at": 50.0}),
        *("running//0/None a1 a2 +a3", "first start"),
    ),
    "nor before it is ready": (
        *(ELASTIC, RUNNING, [LISTENS1, LISTENS2, member(3, "joining", since=99.0)], {}),
        *("wait 109", ""),
    ),
    "they have their time": (
        *(ELASTIC, GROWS, [LISTENS1, LISTENS2, member(3)], {"published_at": 80.0}),
        *("wait 110", ""),
    ),
    "and no more than that": (
        *(ELASTIC, GROWS, [LISTENS1, LISTENS2, member(3)], {"published_at": 70.0}),
        *("ending/joined/0/None a1 a2 +a3", "node node3 (10.0.0.3) joins"),
    ),
    "one has saved": (
        *(ELASTIC, GROWS, [saved(1, "resize"), LISTENS2, member(3)], {"published_at": 80.0}),
        *("wait 110", ""),
    ),
    "all have saved for a newcomer": (
        *(ELASTIC, GROWS, [saved(1, "resize"), saved(2, "resize"), member(3)], {}),
        *("ending/joined/0/None a1 a2 +a3", "a node joins; the workers have saved"),
    ),
    "all have saved, and are to stop": (
        *(ELASTIC, RUNNING, [saved(1, "stop"), saved(2, "")], {}),
        *("over//0/75 a1 a2", "preempted: a node joins; to be continued"),
    ),
    "the job is asked to end where no worker runs": (
        *(ELASTIC, RUNNING, [RUN1, member(2, "finished", 0, asks="drain")], {}),
        *("running//0/None a1 a2", "the job is asked to end: drain"),
    ),
    "a spare is asked": (
        *(TWO, RUNNING, [RUN1, RUN2, member(3, asks="drain")], {}),
        *("running//0/None a1 a2", "the job is asked to end: drain"),
    ),
    "nobody joins a job that is asked to end": (
        *(ELASTIC, replace(RUNNING, asked="drain"), [RUN1, RUN2, member(3)], {}),
        *("wait None", ""),
    ),
    "all nodes are done before they are told": (
        *(
            TWO,
            replace(RUNNING, asked="drain"),
            [member(1, "finished", 0), member(2, "finished", 0)],
        ),
        *({}, "over//0/0 a1 a2", "all workers ended with 0"),
    ),
    "a node is lost when the job is asked to end": (
        *(ELASTIC, replace(LOST, asked="drain"), [END1], {"absent": GONE2}),
        *("over/lost/0/75 a1 a2", "preempted: drain; to be continued"),
    ),
    "workers that do not save": (
        *(TWO, replace(RUNNING, asked="drain"), [END1, RUN2, member(3)], {}),
        "ending/left/0/None a1 a2",
        "the workers of node node1 (10.0.0.1) had not saved and ended before",
    ),
    "one end, also where an agent stands by": (
        *(ELASTIC, replace(LOST, cause="left", asked="drain"), [END1, END2, member(3)], {}),
        "over/left/0/137 a1 a2",
        "killed: drain; the workers had not saved and ended before",
    ),
    "a node was lost meanwhile, and nobody could save": (
        *(ELASTIC, replace(LOST, cause="left", asked="drain"), [END1], {"absent": GONE2}),
        *("over/lost/0/75 a1 a2", "preempted: drain; to be continued"),
    ),
    "a worker failed because of it": (
        *(ELASTIC, replace(ENDING, asked="drain"), [failed(1)], {"absent": GONE2}),
        *("over/lost/0/75 a1 a2", "preempted: drain; to be continued"),
    ),
    "a failure after it": (
        *(TWO, replace(ENDING, asked="drain"), [failed(1), END2], {}),
        *("over/failure/0/7 a1 a2", "rank 0 on node1 exited with code 7; no restart: drain"),
    ),
    "a failure before it": (
        *(TWO, ENDING, [failed(1), member(2, "ended", 0, asks="drain")], {}),
        "over/failure/0/75 a1 a2",
        "rank 0 on node1 exited with code 7; preempted: drain; to be continued",
    ),
    "a failure before it, with no restart left": (
        *(replace(TWO, max_restarts=0), ENDING, [failed(1), member(2, "ended", 0, asks="drain")]),
        *({}, "over/failure/0/7 a1 a2", "rank 0 on node1 exited with code 7; --max-restarts is 0"),
    ),
    "which is not the end before all have ended": (
        *(TWO, ENDING, [failed(1), member(2, "running", 0, asks="drain")], {"phase_since": 95.0}),
        *("wait 155", "waiting for node2 (10.0.0.2) to end round 0"),
    ),
    "asked before the first round": (
        *(TWO, EMPTY, [member(1, asks="drain")], {}),
        *("over//-1/75", "preempted: drain; to be continued"),
    ),
    "a node is told to leave": (
        *(TWO, RUNNING, [RUN1, member(2, "leaving", 0, reason="stopped by SIGTERM")], {}),
        *("ending/left/0/None a1 a2", "node node2 (10.0.0.2) leaves: stopped by SIGTERM"),
    ),
    "the host of the store is told to": (
        *(replace(TWO, hosted_by_me=True), RUNNING),
        *([member(1, "leaving", 0, reason="stopped by SIGTERM", exit_code=143), RUN2], {}),
        "over//0/143 a1 a2",
        "node node1 (10.0.0.1) leaves (stopped by SIGTERM) and the store, which it hosts, goes "
        "with it; etcd (--rdzv-backend etcd) survives the loss of any node",
    ),
    "all are told to": (
        *(TWO, RUNNING, [member(1, "leaving", 0, reason="SIGINT", exit_code=130)], {}),
        *("over//0/130 a1 a2", "SIGINT"),
    ),
    "workers were fenced": (
        *(TWO, RUNNING, [RUN1, END2], {}, "ending/lost/0/None a1 a2"),
        "node node2 (10.0.0.2) was cut off from the store; the workers there are dead",
    ),
    "a node was lost, and another has come": (
        *(TWO, replace(flapping(1), phase="forming", reason="1 of 2 nodes"), [END1, BACK2], FLAPS),
        "running//1/None a1 a4",
        "node2 was lost in round 0; enough nodes are there again; going on with 2 nodes, 16 "
        "workers",
    ),
    "one node is lost for the fourth time": (
        *(TWO, flapping(4), [replace(END1, changed=99.0), BACK2], FLAPS),
        *("wait 101", "node2 was lost in rounds 0, 1, 2, 3: a backoff"),
    ),
    "a lost node costs no time at first": (
        *(TWO, flapping(1), [replace(END1, changed=99.0), BACK2], FLAPS),
        *("running//1/None a1 a4", "node2 was lost; going on with 2 nodes, 16 workers"),
    ),
    "one node is lost again and again": (
        *(TWO, flapping(10), [END1, BACK2], FLAPS, "over/lost/0/78 a1 a2"),
        "node2 was lost; node2 was lost in rounds 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 without progress",
    ),
    "and the others suffice": (
        *(ELASTIC, flapping(3), [END1, BACK2], FLAPS, "running//1/None a1"),
        "node2 was lost; going on with 1 node, 8 workers (node2 was lost in rounds 0, 1, 2: it "
        "stands by)",
    ),
    "and is back: it stands by": (
        *(ELASTIC, flapping(10, ALONE), [RUN1, BACK2, member(3)], {"round_began": 90.0}),
        *("ending/joined/0/None a1 +a3", "node node3 (10.0.0.3) joins"),
    ),
    "for a while": (
        *(ELASTIC, replace(flapping(10, ALONE), spares=("a2",)), [RUN1, member(2)]),
        *({"round_began": 90.0}, "wait 690", ""),
    ),
    "then it joins again": (
        *(ELASTIC, replace(flapping(10, ALONE), spares=("a2",)), [RUN1, member(2)]),
        *({"round_began": -501.0}, "ending/joined/0/None a1 +a2", "node node2 (10.0.0.2) joins"),
    ),
    "and the job makes progress": (
        *(replace(ELASTIC, has_checkpoint_dir=True), flapping(10), [END1]),
        *({**FLAPS, "search_result": SearchResult(CKPT)}, "running//1/None a1"),
        "node2 was lost; going on with 1 node, 8 workers, from step 40",
    ),
    "and a node joins after it": (
        *(ELASTIC, flapping(10, ASKED), [END1, END2], {}),
        *("running//1/None a1 a2", "new data; going on with 2 nodes, 16 workers"),
    ),
    "all are done": (
        *(TWO, RUNNING, [member(1, "finished", 0), member(2, "finished", 0)], {}),
        *("over//0/0 a1 a2", "all workers ended with 0"),
    ),
    "all are done, and one is gone": (
        *(TWO, RUNNING, [member(1, "finished", 0)]),
        {"absent": {"a2": Absent("expired", 99.0, member(2, "finished", 0).record)}},
        *("over//0/0 a1 a2", "all workers ended with 0"),
    ),
    "a newcomer is not ready": (
        *(
            ELASTIC,
            RUNNING,
            [RUN1, RUN2, member(3, "joining", since=99.9)],
            {"last_newcomer_at": 99.9},
        ),
        *("wait 100.4", ""),
    ),
    "a newcomer is": (
        *(ELASTIC, RUNNING, [RUN1, RUN2, member(3, since=99.0)], {"last_newcomer_at": 99.0}),
        *("ending/joined/0/None a1 a2 +a3", "node node3 (10.0.0.3) joins"),
    ),
    "one who never gets ready": (
        *(ELASTIC, RUNNING, [RUN1, RUN2, member(3, "joining")], {}),
        *("running//0/None a1 a2 +a3", "first start"),
    ),
    "no room: a spare": (
        *(TWO, RUNNING, [RUN1, RUN2, member(3)], {}, "running//0/None a1 a2", "first start"),
    ),
    "never: announced": (
        *(replace(ELASTIC, on_join="never"), RUNNING, [RUN1, RUN2, member(3)], {}),
        *("running//0/None a1 a2 +a3", "first start"),
    ),
    # ── each node has a checkpoint directory of its own ──
    "first, the agents hear by which word they know each other": (
        *(LOCAL, EMPTY, [member(1), member(2)], {}, "forming//-1/None"),
        "looking for the newest checkpoint on 2 nodes",
    ),
    "then they are asked": (
        *(LOCAL, replace(EMPTY, reason="looking"), [member(1), member(2)], {}),
        *("search", "looking for the newest checkpoint"),
    ),
    "again, if one was not reached": (
        *(LOCAL, replace(EMPTY, reason="looking"), [member(1), member(2)]),
        *(
            {"search_result": SearchResult(again=True)},
            "search",
            "looking for the newest checkpoint",
        ),
    ),
    "also where the restarts are counted by what is found": (
        *(LOCAL, ENDING, [failed(1), END2], {"search_result": SearchResult(again=True)}),
        *("search", "looking for the newest checkpoint"),
    ),
    "and where one has come since": (
        *(LOCAL, LOST, [END1, member(3)]),
        {"absent": GONE2, "search_result": SearchResult(CKPT, ready=frozenset({"a1"}))},
        *("search", "looking for the newest checkpoint"),
    ),
    "the checkpoint is on all nodes": (
        *(LOCAL, LOST, [END1, member(3)]),
        {"absent": GONE2, "search_result": SearchResult(CKPT, ready=frozenset({"a1", "a2", "a3"}))},
        "running//1/None a1 a3",
        "node2 was lost; going on with 2 nodes, 16 workers, from step 40",
    ),
    "it cannot be had": (
        *(
            LOCAL,
            LOST,
            [END1, member(3)],
            {"absent": GONE2, "search_result": SearchResult(problem="node2: full")},
        ),
        *("over/lost/0/74 a1 a2", "cannot look for checkpoints: node2: full"),
    ),
    # ── ending ──
    "one has not ended": (
        *(TWO, ENDING, [failed(1), RUN2], {"phase_since": 90.0}, "wait 150"),
        "waiting for node2 (10.0.0.2) to end round 0",
    ),
    "and never does": (
        *(TWO, ENDING, [failed(1), RUN2], {"phase_since": -500.0}),
        *("over/failure/0/69 a1 a2", "node2 (10.0.0.2) did not end round 0 in 600 s"),
    ),
    "and owes it for longer than it can take": (
        *(TWO, ENDING, [failed(1), RUN2], {"phase_since": 40.0}, "evict a2"),
        "node2 (10.0.0.2) did not end round 0 in 60 s: evicted",
    ),
    "which is tried again where the entry stays": (
        *(TWO, ENDING, [failed(1), RUN2], {"phase_since": 30.0, "evict_tried_at": 98.0}),
        *("wait 101", "waiting for node2 (10.0.0.2) to end round 0"),
    ),
    "a coordinator that owes it is alive": (
        *(TWO, ENDING, [RUN1, END2], {"phase_since": 30.0}, "wait 630"),
        "waiting for node1 (10.0.0.1) to end round 0",
    ),
    "one that was evicted may have workers": (
        *(ELASTIC, LOST, [END1], {"absent": GONE2, "evicted": True}, "wait 102"),
        "",
    ),
    "then the store has to take a plan": (
        *(ELASTIC, LOST, [END1], {"absent": gone2(96.0), "evicted": True, "published_at": 98.0}),
        *("ending/lost/0/None a1 a2", "node2 was lost"),
    ),
    "after which there is one more fence": (
        *(ELASTIC, LOST, [END1], {"absent": gone2(96.0), "evicted": True, "published_at": 99.0}),
        *("wait 102", ""),
    ),
    "which is the last": (
        *(ELASTIC, LOST, [END1], {"absent": gone2(94.0), "evicted": True, "published_at": 97.0}),
        *("running//1/None a1", "node2 was lost; going on with 1 node, 8 workers"),
    ),
    "one has not heard of the round": (
        *(TWO, ENDING, [failed(1), member(2)], {"phase_since": 90.0}, "wait 150"),
        "waiting for node2 (10.0.0.2) to end round 0",
    ),
    "restart": (
        *(TWO, ENDING, [failed(1), END2], {}),
        *("running//1/None a1 a2", "rank 0 on node1 exited with code 7; restart 1 of 3"),
    ),
    "no restart": (
        *(replace(TWO, max_restarts=0), ENDING, [failed(1), END2], {}),
        *("over/failure/0/7 a1 a2", "rank 0 on node1 exited with code 7; --max-restarts is 0"),
    ),
    "the victim of a lost node is not counted": (
        *(ELASTIC, ENDING, [failed(1)], {"absent": GONE2}, "running//1/None a1"),
        "node node2 (10.0.0.2) was lost: no heartbeat for 3 s; going on with 1 node, 8 workers",
    ),
    "a node that is lost later is no excuse": (
        *(ELASTIC, ENDING, [failed(1)]),
        {"absent": {"a2": Absent("expired", 99.0, END2.record)}},
        *("running//1/None a1", "rank 0 on node1 exited with code 7; restart 1 of 3"),
    ),
    "the spare that has waited longest, whoever came to this coordinator first": (
        *(TWO, replace(LOST, spares=("a4", "a3")), [END1, member(3), member(4)], {"absent": GONE2}),
        "running//1/None a1 a4",
        "node2 was lost; going on with 2 nodes, 16 workers",
    ),
    "spares keep their order": (
        *(TWO, replace(RUNNING, spares=("a4", "a3")), [RUN1, RUN2, member(3), member(4)], {}),
        *("wait None", ""),
    ),
    "a spare takes over": (
        *(TWO, replace(LOST, spares=("a3",)), [END1, member(3), member(4)], {"absent": GONE2}),
        *("running//1/None a1 a3", "node2 was lost; going on with 2 nodes, 16 workers"),
    ),
    "too few are left": (
        *(TWO, LOST, [END1], {"absent": GONE2}, "forming/lost/0/None a1 a2"),
        "1 of 2 nodes: node1 (10.0.0.1); 1 more is needed; "
        "node node2 (10.0.0.2) was lost: no heartbeat for 3 s",
    ),
    "a long wait is not published yet": (
        *(OPEN, LOST, [END1, RUN2], {"phase_since": 80.0, "published_at": 80.0}),
        *("wait 110", "waiting for node2 (10.0.0.2) to end round 0"),
    ),
    "and now it is": (
        *(OPEN, LOST, [END1, RUN2]),
        {"phase_since": 10.0, "published_at": 70.0, "evict_tried_at": 99.0},
        "ending/lost/0/None a1 a2 waiting for node2 (10.0.0.2) to end round 0, for 60 s",
        "waiting for node2 (10.0.0.2) to end round 0",
    ),
    "a search that takes long": (
        *(replace(OPEN, has_checkpoint_dir=True), EMPTY, [member(1), member(2)]),
        {"phase_since": 60.0, "published_at": 60.0, "searching": True},
        "forming//-1/None looking for the newest checkpoint, for 30 s",
        "looking for the newest checkpoint",
    ),
    "what was waited for is over": (
        *(OPEN, replace(LOST, waits="node2, for 60 s"), [END1, END2], {"published_at": 99.0}),
        *("running//1/None a1 a2", "node2 was lost; going on with 2 nodes, 16 workers"),
    ),
    "a node has not started its part": (
        *(OPEN, RUNNING, [RUN1, member(2, "joining")], {"phase_since": 95.0, "published_at": 95.0}),
        *("wait 125", "waiting for node2 (10.0.0.2) to start round 0"),
    ),
    "which is published": (
        *(OPEN, RUNNING, [RUN1, member(2, "joining")], {"phase_since": 50.0, "published_at": 50.0}),
        "running//0/None a1 a2 waiting for node2 (10.0.0.2) to start round 0, for 30 s",
        "waiting for node2 (10.0.0.2) to start round 0",
    ),
    "and has not for too long": (
        *(
            OPEN,
            RUNNING,
            [RUN1, member(2, "joining")],
            {"phase_since": -500.0, "published_at": 95.0},
        ),
        *("over//0/69 a1 a2", "node2 (10.0.0.2) did not start round 0 in 600 s"),
    ),
    "over": (TWO, replace(RUNNING, phase="over", reason="done"), [RUN1], {}, "wait None", "done"),
}


@each("row", TABLE.values())
def test_decision(row: Row) -> None:
    """One row per rule."""
    rules, plan, there, more, expected, reason = row
    present = {f"a{one.number}": one for one in there}
    view = View("a1", plan, present, **{"absent": {}, **more})
    step, said = decide(view, NOW, rules)
    assert (told(step), said) == (expected, reason)


def told(step: Step) -> str:
    """Return a step as the table has it."""
    if isinstance(step, Publish):
        plan = step.plan
        head = f"{plan.phase}/{plan.cause}/{plan.round}/{plan.exit_code}"
        names = [*(one.name for one in plan.nodes), *(f"+{n}" for n in plan.joining)]
        left_out = [f"!{name}" for name in plan.not_sharing]
        restarts = [f"r{plan.restarts}"] if plan.restarts > 1 else []
        waits = [plan.waits] if plan.waits else []
        notice = f"; {plan.notice}" if plan.notice else ""
        return " ".join([head, *names, *left_out, *restarts, *waits]) + notice
    if isinstance(step, Wait):
        return f"wait {step.until if step.until is None else format(step.until, 'g')}"
    return "search" if isinstance(step, Search) else f"evict {' '.join(step.names)}"


def test_a_search_knows_whom_the_round_will_have() -> None:
    """By node rank, and what all members say of themselves."""
    there = {"a2": member(2), "a1": member(1), "a3": member(3)}
    plan = replace(EMPTY, reason="looking")
    step, _ = decide(View("a1", plan, there, {}), NOW, LOCAL)
    assert isinstance(step, Search)
    assert step.nodes == ("a1", "a2")
    assert step.present == {name: one.record for name, one in there.items()}


def decided(plan: Plan, now: float, **more: Any) -> Plan:
    """Return the plan that follows when node2's agent is lost; its next agent is there."""
    lost = {
        one.name: Absent("expired", now, RUN2.record) for one in plan.nodes if one.host != "node1"
    }
    me = member(1, "running" if plan.phase == "running" else "ended", plan.round)
    back = replace(BACK2, since=now, changed=now)
    there = {"a1": me, f"b{plan.round}": back}
    view = View("a1", plan, there, lost, phase_since=now, last_newcomer_at=now, **more)
    step, _ = decide(view, now + 60.0 if plan.phase == "ending" else now, TWO)
    assert isinstance(step, Publish), step
    return step.plan


@pytest.mark.parametrize(("seconds", "rounds"), [(5.0, 10), (700.0, 25)])
def test_a_node_that_is_lost_in_each_round(seconds: float, rounds: int) -> None:
    """The job ends after ten such rounds; not where they lasted long enough for progress."""
    plan, now = RUNNING, NOW
    for number in range(25):
        assert plan.round == number
        ending = decided(plan, now + seconds, round_began=now)
        plan, now = decided(ending, now + seconds, round_began=now), now + seconds + 60.0
        if plan.phase == "over":
            break
    assert plan.round == rounds - (plan.phase == "over")
    assert plan.exit_code == (None if seconds > 600.0 else 78)


def test_many_long_names_that_are_lost_at_once_fit_a_plan() -> None:
    """A name is a line of a record, as an agent sends it: several together are longer."""
    nodes = tuple(replace(node(number), host=str(number) * 900) for number in (1, 2, 3))
    lost = {one.name: Absent("expired", 99.0) for one in nodes[1:]}
    view = View("a1", replace(RUNNING, nodes=nodes), {"a1": RUN1}, lost)
    step, _ = decide(view, NOW, ELASTIC)
    assert isinstance(step, Publish) and step.plan.losses is not None
    records.encode_plan(step.plan, None, 1, b"")


# ── workers that stay ────────────────────────────────────────────────────────────────────────────

DEAD1 = member(1, "ended", 0, failure=FAILURE, failed_at=99.0, kept=(1, 2), survivors="wait")
STAYS2 = member(2, "ended", 0, kept=(0, 1, 2, 3, 4, 5, 6, 7), survivors="work")


def step_of(plan: Plan, *them: Present, **more: Any) -> tuple[Step, str]:
    """Return the decision about a plan with these members, all of them in its round."""
    present = {f"a{one.number}": one for one in them}
    rules, absent = more.pop("rules", TWO), more.pop("absent", {})
    return decide(View("a1", plan, present, absent, round_began=80.0, **more), NOW, rules)


def test_workers_that_stay_are_in_the_next_round() -> None:
    """The plan names those that are started anew."""
    step, reason = step_of(ENDING, DEAD1, STAYS2)
    assert isinstance(step, Publish) and step.plan.phase == "running"
    assert step.plan.anew == {"a1": (0, 3, 4, 5, 6, 7)}
    assert step.plan.present == [1, 2, *range(8, 16)]
    assert step.plan.restarts == 1 and reason.endswith("restart 1 of 3, the other workers go on")
    only = member(1, "ended", 0, failure=FAILURE, failed_at=99.0, survivors="work")
    step, _ = step_of(ENDING, only, STAYS2)
    assert isinstance(step, Publish) and step.plan.anew == {"a1": tuple(range(8))}


@pytest.mark.parametrize(
    ("plan", "them", "more"),
    [
        pytest.param(ENDING, (failed(1), STAYS2), {}, id="a node cannot go on"),
        pytest.param(LOST, (STAYS2,), {"absent": {"a1": Absent("expired", 99.0)}}, id="too few"),
        pytest.param(ASKED, (END1, STAYS2), {}, id="asked"),
    ],
)
def test_workers_that_stay_are_stopped_before_all_begin_anew(
    plan: Plan, them: tuple[Present, ...], more: dict[str, Any]
) -> None:
    """No round begins while they are there."""
    step, reason = step_of(plan, *them, **more)
    assert isinstance(step, Publish) and step.plan.phase == "forming" and step.plan.anew is None
    assert reason.endswith("; all workers are started anew")
    step, reason = step_of(step.plan, *them, phase_since=NOW, **more)
    assert isinstance(step, Wait) and reason == "waiting for node2 (10.0.0.2) to end round 0"


def test_workers_that_stay_go_on_without_a_node() -> None:
    """All that are left, with the ranks of a smaller job; not where another node comes."""
    gone = {"a1": Absent("expired", 99.0)}
    step, reason = step_of(LOST, STAYS2, absent=gone, rules=ELASTIC)
    assert isinstance(step, Publish) and step.plan.phase == "running"
    assert step.plan.anew == {} and step.plan.present == [*range(8)]
    assert reason == "node2 was lost; going on with 1 node, 8 workers, in their processes"
    assert step.plan.restarts == 0
    step, _ = step_of(LOST, STAYS2, member(3), absent=gone, rules=ELASTIC)
    assert isinstance(step, Publish) and step.plan.phase == "forming" and step.plan.anew is None


def test_a_node_with_newcomers_only_had_nothing_to_save() -> None:
    """The job is to be continued where the workers that go on have saved."""
    them = (member(1, "ended", 0), saved(2, "stop"))
    asked = replace(RUNNING, asked="drain", cause="left", phase="ending")
    for anew, code in ((None, 137), ({"a1": tuple(range(8))}, 75)):
        step, _ = step_of(replace(asked, anew=anew), *them)
        assert isinstance(step, Publish) and step.plan.exit_code == code
        assert step.plan.phase == "over"


def test_nobody_is_left_that_could_stay() -> None:
    """All are started anew at once."""
    only = member(1, "ended", 0, failure=FAILURE, failed_at=99.0, survivors="wait")
    step, _ = step_of(ENDING, only, member(2, "ended", 0, survivors="work"))
    assert isinstance(step, Publish) and step.plan.phase == "running" and step.plan.anew is None


def test_those_that_work_wait_out_a_backoff() -> None:
    """The plan of the backoff says that they may."""
    plan = replace(ENDING, crashes=1)
    new = member(1, "ended", 0, failure=FAILURE, failed_at=99.9, kept=(1,), survivors="work")
    view = View("a1", plan, {"a1": new, "a2": STAYS2}, {}, round_began=99.0, leads_since=99.9)
    step, _ = decide(view, NOW, TWO)
    assert isinstance(step, Publish) and step.plan.phase == "forming"
    assert step.plan.anew == {"a1": (0, *range(2, 8))}
