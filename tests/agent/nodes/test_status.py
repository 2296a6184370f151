"""What an agent says of itself, and tells of other nodes; a recorder stands in for threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from msgspec import structs

from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.policy import events
from elaunch.agent.policy.actions import Nothing
from elaunch.agent.policy.state import Limits, State
from elaunch.agent.policy.turn import Turn
from elaunch.rendezvous import text
from elaunch.rendezvous.plan import NodeStatus, Plan, SameFailure, WorkerFailure
from tests.agent.histories import READY, TERM, exited, gone, play
from tests.agent.policy.test_nodes import ENDED, ENDING, FIRST, RUNS, SECOND, seen

DRAIN = events.PreemptAsked("drain", lambda _: None)
THEIRS = WorkerFailure(
    rank=0,
    host="node2",
    pid=77,
    exitcode=-9,
    text="rank 0 was killed\n",
    age=0.1,
    node="bb",
)


class Recorder:
    """Takes what a Meeting would send; the threads behind it are tested with real stores."""

    def __init__(self) -> None:
        self.records: list[NodeStatus] = []

    def start(self, record: NodeStatus) -> None:
        """Join."""
        self.records.append(record)

    def publish(self, record: NodeStatus) -> None:
        """Replace the record."""
        self.records.append(record)


@pytest.fixture
def meeting() -> Recorder:
    """Return where the records go."""
    return Recorder()


@pytest.fixture
def said() -> list[str]:
    """Return what is printed."""
    return []


@pytest.fixture
def posted() -> list[events.Event]:
    """Return what the loop is told."""
    return []


@pytest.fixture
def ports() -> list[int]:
    """Return the ports of the round's store, the newest last."""
    return [4000]


@pytest.fixture
def publisher(
    meeting: Recorder, said: list[str], posted: list[events.Event], ports: list[int]
) -> StatusPublisher:
    """Return one that has joined with two slots."""
    made = StatusPublisher(
        meeting,  # type: ignore[arg-type]
        NodeStatus("node1", "10.0.0.1", 0, 0, "x", 3, {"torch": "2.13"}),
        show=said.append,
        post=posted.append,
        port=lambda: ports[-1],
    )
    made.publish(turn_to())
    return made


def state(*history: events.Event) -> State:
    """Return the state after a history."""
    return play(Limits(2, meets=True), history)[0]


def turn_to(*history: events.Event) -> Turn:
    """Return a turn that leaves the agent in the state after a history."""
    after = state(*history)
    return Turn(after, events.DeadlinePassed(), Nothing(), "", after)


def plan_seen(plan: Plan, name: str) -> Turn:
    """Return the turn in which a plan comes."""
    after = state(*RUNS)
    return Turn(after, events.PlanSeen(plan, name), Nothing(), "", after)


def test_it_joins_with_what_it_is(publisher: StatusPublisher, meeting: Recorder) -> None:
    """Host, address, port, slots, role, order, facts."""
    (record,) = meeting.records
    assert record == NodeStatus(
        "node1", "10.0.0.1", 4000, 2, "x", 3, {"torch": "2.13"}, "joining", -1
    )


def test_it_speaks_when_something_has_changed_and_not_else(
    publisher: StatusPublisher, meeting: Recorder, ports: list[int]
) -> None:
    """A worker that was started changes nothing; a new port does."""
    for each in ((), (READY,), RUNS[:-1], RUNS):
        publisher.publish(turn_to(*each))
    ports.append(4001)
    publisher.publish(turn_to(*RUNS))
    words = [(record.state, record.round, record.port) for record in meeting.records]
    assert words == [
        ("joining", -1, 4000),
        ("ready", -1, 4000),
        ("running", 0, 4000),
        ("running", 0, 4001),
    ]


def test_a_failure_is_sent_with_its_age_and_once(
    publisher: StatusPublisher, meeting: Recorder
) -> None:
    """Nobody's clock is compared with another's; time alone is no news."""
    failed = turn_to(*RUNS, exited(1, 7, at=0.0))
    publisher.publish(failed)
    publisher.publish(failed)
    assert len(meeting.records) == 2
    found = meeting.records[-1].failure
    assert found is not None
    assert (found.rank, found.local_rank, found.exitcode) == (4, 1, 7)
    assert (found.host, found.text) == ("node1", "")
    assert found.age > 0


@pytest.mark.parametrize(
    ("history", "reason", "code"),
    [
        ((*RUNS, TERM), "stopped by SIGTERM", 143),
        ((events.ServerReady("--preload x: it fails"),), "--preload x: it fails", 2),
    ],
    ids=["told to go", "cannot start"],
)
def test_who_leaves_says_why_and_with_which_code(
    publisher: StatusPublisher,
    meeting: Recorder,
    history: tuple[events.Event, ...],
    reason: str,
    code: int,
) -> None:
    """The others wait for nobody who leaves, and end as the one that hosts their store does."""
    publisher.publish(turn_to(*history))
    record = meeting.records[-1]
    assert (record.state, record.reason, record.exit_code) == ("leaving", reason, code)


def test_the_rank_for_which_its_ranks_wait_is_sent(
    publisher: StatusPublisher, meeting: Recorder
) -> None:
    """When they were asked, while they run."""
    publisher.follow(lambda: None, lambda: {"ranks": [1], "text": "rank 1 has not come"})
    publisher.publish(turn_to(*RUNS))
    asked = structs.replace(turn_to(*RUNS), event=events.RanksAsked())
    publisher.publish(asked)
    assert meeting.records[-1].note == "rank 1 has not come"
    publisher.publish(turn_to(*RUNS, exited(1, 7)))
    assert meeting.records[-1].note == ""


@pytest.mark.parametrize(
    ("culprit", "line"),
    [
        ("", "rank 4 on node1 exited with code 7"),
        ("first to fail", "first to fail: rank 4 on node1 exited with code 7"),
        ("rank 3 has ended", "rank 3 has ended (rank 4 on node1 exited with code 7)"),
    ],
)
def test_a_failure_is_sent_with_its_culprit(
    publisher: StatusPublisher, meeting: Recorder, culprit: str, line: str
) -> None:
    """That is the reason of the restart then, on all nodes."""
    turn = turn_to(*RUNS, exited(1, 7))
    after = structs.replace(turn.after, culprit=culprit)
    publisher.publish(structs.replace(turn, after=after))
    found = meeting.records[-1].failure
    assert found is not None and text.failure(found) == line and not found.is_hang


def test_the_loss_of_the_server_is_a_failure(publisher: StatusPublisher, meeting: Recorder) -> None:
    """It has no worker to name."""
    publisher.publish(turn_to(*RUNS, events.ServerLost(-9)))
    found = meeting.records[-1].failure
    assert found is not None and found.exitcode == 71
    assert found.text == "the server that starts the workers was killed by SIGKILL"


def test_another_nodes_failure_is_printed_once(publisher: StatusPublisher, said: list[str]) -> None:
    """With its cause as that node has it."""
    there = structs.replace(SECOND, failure=THEIRS)
    at_rest = state(*ENDED, seen(structs.replace(ENDING, failure=THEIRS)), gone(), seen(there))
    found = [publisher.print_failure(at_rest) for _ in range(2)]
    assert (found[0], found[1]) == (THEIRS, None)
    assert said == ["the first failure of the job was on another node:\nrank 0 was killed\n"]


def test_the_own_failure_is_not_another_nodes(publisher: StatusPublisher) -> None:
    """The report of this node tells it."""
    mine = structs.replace(THEIRS, node="aa")
    assert (
        publisher.failed_elsewhere(state(*RUNS, seen(structs.replace(ENDING, failure=mine))))
        is None
    )


def test_notices_are_logged_once(
    publisher: StatusPublisher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that stands by, nodes that differ."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    plan = structs.replace(FIRST, notice="node2 has another torch", spares=("cc",))
    for name in ("cc", "cc", "aa"):
        publisher.see(plan_seen(plan, name))
    lines: Sequence[str] = [record.getMessage() for record in caplog.records]
    assert lines == [
        "node2 has another torch",
        "standing by: the job has its 2 nodes; this one replaces the next that is lost",
    ]


def test_a_node_that_the_others_do_without_is_told(
    publisher: StatusPublisher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost in some rounds in a row."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    losses = SameFailure("node1", (0, 2, 4))
    publisher.see(plan_seen(structs.replace(FIRST, spares=("aa2",), losses=losses), "aa2"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == ("standing by: node1 was lost in rounds 0, 2, 4; the others go on without it")


@pytest.mark.parametrize("strict", [False, True])
def test_a_newcomer_that_differs_is_told_or_refused(
    publisher: StatusPublisher,
    posted: list[events.Event],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    strict: bool,
) -> None:
    """The job goes on; with --strict-symmetry the newcomer alone ends."""
    monkeypatch.setattr(logging.getLogger("elaunch"), "propagate", True)
    plan = structs.replace(FIRST, facts={"torch": "2.12"}, strict=strict, spares=())
    publisher.see(plan_seen(plan, "aa"))  # in the round: the coordinator has compared
    publisher.see(plan_seen(plan, "cc"))
    told = "torch is 2.12 on the job (node2) and 2.13 on here"
    if strict:
        (event,) = posted
        assert isinstance(event, events.MeetingFailed)
        assert (event.exit_code, told in event.problem) == (76, True)
    else:
        assert [told in record.getMessage() for record in caplog.records] == [True]
        assert posted == []
