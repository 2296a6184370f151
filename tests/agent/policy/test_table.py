"""The policy's table, cell by cell: every event in every phase of a node of a job of several.

What is decided for which reason is in the tables beside this one: of a round (test_rounds), the
plan (test_nodes), requests (test_preempt, test_restart) and hangs (test_hang).
"""

from __future__ import annotations

import inspect
import signal

from msgspec import structs

from elaunch.agent.policy import events, table
from elaunch.agent.policy.actions import NOTHING, Nothing
from elaunch.agent.policy.state import Limits, Phase, State
from elaunch.agent.policy.turn import make_turn
from elaunch.rendezvous.plan import HeldShards, Node, Plan
from elaunch.wire.worker import Notice
from tests.agent.histories import (
    DEADLINE,
    READY,
    TERM,
    USR1,
    chosen,
    exited,
    gone,
    lost,
    play,
    started,
)
from tests.tables import each

LONGEST = 15
"""Lines of a cell's function: 12, with its first ones and what is left of its docstring."""
LIMITS = Limits(
    2,
    meets=True,
    forwarded=frozenset({signal.SIGUSR1}),
    max_restarts=1,
)
HERE = Node("aa", "node1", "10.0.0.1", 2, "x")
FIRST = Plan("job", 0, "running", "first start", nodes=(HERE,))
OVER = structs.replace(FIRST, phase="over", exit_code=3, reason="rank 0 exited with code 3")
GROWS = structs.replace(FIRST, joining=("cc",))
HELD = HeldShards("/ck/step-00000010.r0", 10, 0, "u", 2, (0, 1), writing=True)


def seen(plan: Plan) -> events.PlanSeen:
    """Return the news of a plan."""
    return events.PlanSeen(plan, "aa")


RUNS = (READY, seen(FIRST), started(0), started(1))
FAILS = (*RUNS, exited(1, 7))
SWEPT = (*FAILS, exited(0, -15, stopped=True))
SAVES = (*RUNS, events.SaverUsed(0), *SWEPT[-2:])
HANG = events.HangSeen((1,), "rank 1 has made no progress", "script", round=0, at=61.0)

WAYS: dict[Phase, tuple[events.Event, ...]] = {
    Phase.STARTING: (),
    Phase.MEETING: (READY,),
    Phase.RUNNING: RUNS,
    Phase.STOPPING: FAILS,
    Phase.SWEEPING: SWEPT,
    Phase.FLUSHING: (*SAVES, gone()),
}
"""The events that bring this node into each phase."""

EVENTS: dict[str, events.Event] = {
    "ServerReady": READY,
    "ServerWarmed": events.ServerWarmed(None, 1.0),
    "DevicesCounted": events.DevicesCounted(None, "no CUDA GPU found"),
    "DirectoryProbed": events.DirectoryProbed("--checkpoint-dir /ck: it is full"),
    "ServerLost": lost(-9),
    "WorkerStarted": started(0),
    "WorkerNotStarted": events.WorkerNotStarted(0, 1, "no processes left"),
    "Exit": exited(0, 7),
    "TreeGone": gone(),
    "StoreLost": events.StoreLost("its host was killed"),
    "SaverUsed": events.SaverUsed(0),
    "SavesSettled": events.SavesSettled(0, held=(HELD,)),
    "DeadlinePassed": DEADLINE,
    "SignalReceived": TERM,
    "FORWARDED": USR1,
    "PreemptAsked": events.PreemptAsked("drain", print),
    "RestartAsked": events.RestartAsked("new data", print),
    "NoticeKnown": events.NoticeKnown(0, Notice("drain")),
    "WorkerStands": events.WorkerStands(0, 0, True),
    "WorkerEnters": events.WorkerEnters(0, 0, True),
    "WorkerListens": events.WorkerListens(0, 0),
    "PreemptAcked": events.PreemptAcked(0, 0, Notice("drain")),
    "FenceAsked": events.FenceAsked(0, print),
    "Ping": events.Ping(print),
    "HangSeen": HANG,
    "StacksTaken": events.StacksTaken(0),
    "RanksAsked": events.RanksAsked(),
    "CheckpointChosen": chosen(None),
    "PlanSeen": seen(OVER),
    "StillWaiting": events.StillWaiting("waiting for 30 s"),
    "CutOff": events.CutOff("no answer from etcd for 2.5 s"),
    "Rejoined": events.Rejoined("cc"),
    "Fenced": events.Fenced(0.1),
    "StoreSilent": events.StoreSilent("etcd does not answer"),
    "StoreBack": events.StoreBack(),
    "MeetingFailed": events.MeetingFailed(69, "the store was lost"),
}
RUNNING: dict[str, events.Event] = {
    "DeadlinePassed": HANG,
    "StacksTaken": HANG,
    "WorkerListens": seen(GROWS),
}
"""What makes these decide something in a round that runs."""

EXPECTED = """
event             STARTING       MEETING        RUNNING        STOPPING       SWEEPING      FLUSHING
ServerReady       Meet           -              -              -              -              -
ServerWarmed      -              -              -              -              -              -
DevicesCounted    Refuse         -              -              -              -              -
DirectoryProbed   Refuse         -              -              -              -              -
ServerLost        RestartServer  RestartServer  EndTree        EndTree        EndTree        EndTree
WorkerStarted     -              -              -              -              -              -
WorkerNotStarted  -              -              Finish         -              -              -
Exit              -              -              StopWorkers    EndTree        -              -
TreeGone          -              -              -              -              Meet           -
StoreLost         -              -              -              -              -              -
SaverUsed         -              -              -              -              -              -
SavesSettled      -              -              -              -              -              Meet
DeadlinePassed    Finish         -              StopWorkers    EndTree        KillServer     Meet
SignalReceived    Finish         Finish         StopWorkers    Hurry          says           Hurry
FORWARDED         says           says           Forward        Forward        says           says
PreemptAsked      Notify         Notify         Notify         Notify         Notify         Notify
RestartAsked      says           says           AskRestart     says           says           says
NoticeKnown       -              -              Notify         -              -              -
WorkerStands      -              -              -              -              -              -
WorkerEnters      -              -              -              -              -              -
WorkerListens     -              -              Notify         -              -              -
PreemptAcked      -              -              -              -              -              -
FenceAsked        -              -              -              -              -              -
Ping              -              -              -              -              -              -
HangSeen          -              -              TakeStacks     -              -              -
StacksTaken       -              -              StopWorkers    -              -              -
RanksAsked        -              -              -              -              -              -
CheckpointChosen  -              -              -              -              -              -
PlanSeen          Finish         Finish         StopWorkers    -              -              -
StillWaiting      -              says           -              -              -              -
CutOff            says           says           EndTree        EndTree        says           says
Rejoined          says           says           says           says           says           says
Fenced            -              -              EndTree        EndTree        -              -
StoreSilent       says           says           says           says           says           says
StoreBack         says           says           says           says           says           says
MeetingFailed     Finish         Finish         StopWorkers    -              -              -
"""
"""The action in each cell: ``says`` is a reason without one, ``-`` is nothing at all."""

CELLS = [
    (name, phase, action)
    for name, *actions in (line.split() for line in EXPECTED.split("\n")[2:-1])
    for phase, action in zip(WAYS, actions, strict=True)
]


def key_of(name: str) -> object:
    """Return the key of a row of the table."""
    return table.FORWARDED if name == "FORWARDED" else type(EVENTS[name])


def state_in(phase: Phase, name: str = "") -> State:
    """Return the state of a node in a phase, to which the event of a row means something."""
    way = WAYS[phase]
    if phase is Phase.RUNNING and name in RUNNING:
        way = (*way, RUNNING[name])
    state, _ = play(LIMITS, way)
    assert state.phase is phase
    return state


def test_the_table_is_whole() -> None:
    """Every event has its row, here as well; every row has a cell for each phase but the last."""
    assert [key_of(name) for name in EVENTS] == list(table.TABLE)
    assert set(table.TABLE) == {*events.Event.__args__, table.FORWARDED}
    assert {len(cells) for cells in table.TABLE.values()} == {len(table.PHASES)}
    assert (*WAYS, Phase.ENDED) == (*table.PHASES, Phase.ENDED) == tuple(Phase)


@each(("name", "phase", "action"), CELLS)
def test_every_cell(name: str, phase: Phase, action: str) -> None:
    """The action; a cell in which nothing is decided says why, the others are short functions."""
    turn = make_turn(state_in(phase, name), EVENTS[name])
    said = "says" if turn.reason else "-"
    made = said if isinstance(turn.action, Nothing) else type(turn.action).__name__
    assert made == action
    cell = table.TABLE[key_of(name)][table.PHASES.index(phase)]
    if isinstance(cell, table.Ignored):
        assert cell.why and made == "-"
    else:
        source = inspect.getsource(cell).replace(inspect.getdoc(cell) or "", "")
        assert len(source.splitlines()) <= LONGEST, cell


@each("name", EVENTS)
def test_nothing_is_decided_after_the_end(name: str) -> None:
    """Whatever comes: the agent leaves its loop."""
    state, _ = play(LIMITS, [TERM])
    turn = make_turn(state, EVENTS[name])
    assert state.phase is Phase.ENDED and (turn.action, turn.reason) == NOTHING
