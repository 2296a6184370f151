"""What happens to a job × what the job is under: each pair ends as the event alone would.

That is: with the same exit code, in a time that is bounded by that of the undisturbed job, with no
process left behind, and with nothing lost that a save has acknowledged. A new seam is a row of
EVENTS or of ``conditions.CONDITIONS``; a pair that may end otherwise is one of EXCEPTIONS.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from tests.launching import wait_until
from tests.seams.conditions import CONDITIONS, Job

pytestmark = pytest.mark.slow

TWICE_S: Final = 0.005
"""Seconds between a signal and the same one, forwarded by a wrapper."""
LEAST_S: Final = 1.0
"""Seconds that an undisturbed job takes from any event on; none is measured for a quicker pair."""


def stop(job: Job) -> None:
    """Let the job end well once another round has saved."""
    next_round = "step.[1-9]*.0"
    wait_until(lambda: any(job.notes.glob(next_round)) or job.ended(), what="the next round")
    (job.notes / "stop").touch()


def terminate(job: Job) -> None:
    """Send SIGTERM to each agent."""
    for agent in job.agents:
        agent.send_signal(signal.SIGTERM)


def terminate_twice(job: Job) -> None:
    """Send SIGTERM to each agent twice, as from a terminal's group and from a wrapper."""
    terminate(job)
    time.sleep(TWICE_S)
    terminate(job)


def kill_worker(job: Job) -> None:
    """Kill a worker: not the one that floods, nor one on a node that stands still."""
    os.kill(job.read("pid.0.1" if job.cluster is None else "pid.0.0"), signal.SIGKILL)


def lose_node(job: Job) -> None:
    """End the second node without a word."""
    assert job.cluster is not None
    job.cluster.power_off(job.cluster[2])


def preempt(job: Job) -> None:
    """Ask the job to save and to end, by the command."""
    argv = ["preempt", "job"]
    if job.cluster is None:
        assert job.launcher is not None
        done = job.launcher.run(argv, env=job.env)
    else:
        done = job.cluster[1].elaunch(argv, job.env).wait()
    assert done.returncode == 0, done


@dataclass(frozen=True)
class Event:
    """What happens.

    Attributes:
        do: makes it happen.
        code: the exit code of each agent that is not lost by it.
        flags: of ``elaunch run``.
        nodes: how many it takes.
        goes_on: another round follows, and the job then ends well.
    """

    do: Callable[[Job], None]
    code: int
    flags: tuple[str, ...] = ("--max-restarts=0",)
    nodes: int = 1
    goes_on: bool = False


EVENTS: Final = {
    "signal": Event(terminate, 75),
    "twice": Event(terminate_twice, 75),
    "failure": Event(kill_worker, 0, ("--max-restarts=3",), goes_on=True),
    "loss": Event(lose_node, 0, nodes=2, goes_on=True),
    "preempt": Event(preempt, 75),
    "used-up": Event(kill_worker, 137),
}


# A node that is lost takes the blame for a failure in the same round: others often fail with it.
EXCEPTIONS: Final = {("used-up", "frozen"): replace(EVENTS["used-up"], code=0, goes_on=True)}

USUAL: Final = {
    "foreign": "signal failure",
    "threads": "failure preempt",
    "logs": "signal used-up",
    "state": "failure preempt",
    "full": "signal failure",
    "flood": "signal failure",
    "held": "twice loss preempt used-up",
    "frozen": "twice loss failure used-up",
    "ports": "signal loss",
}
"""Under each condition what asks for an end and what forces one; the other pairs are trials.

A save that is held and a peer that stands still are where most can go wrong.
"""

PAIRS: Final = [
    pytest.param(
        event,
        condition,
        marks=[] if event in USUAL[condition].split() else [pytest.mark.trial],
    )
    for event in EVENTS
    for condition in CONDITIONS
    if condition != "nothing"
]


def found_again(job: Job) -> int:
    """Return the step from which the same command continues: it commits what is complete."""
    again = Job(job.directory / "again", 1, saves=job.saves)
    (again.notes / "stop").touch()
    with again.ends:
        again.launch()
        assert again.agents[0].wait().returncode == 0, again.agents[0].output("stderr")
    return again.read("began.0.0")


def play(directory: Path, name: str, condition_name: str, nodes: int) -> float:
    """Play one pair and check all but the time; return how long it took from the event on."""
    event = EXCEPTIONS.get((name, condition_name), EVENTS[name])
    condition = CONDITIONS[condition_name]()
    job = Job(directory, nodes, flags=[*event.flags])
    with job.ends:
        condition.prepare(job)
        job.start()
        loses = condition.loses_peer or event.do is lose_node
        if loses and condition_name != "held":
            # Without --checkpoint-replicas a node takes what only its memory has with it.
            wait_until(lambda: open_storage(job.saves).listed(), what="step 2 is committed")
        condition.set_in(job)
        lifts = threading.Timer(condition.holds, condition.lift, (job,))
        lifts.start()
        job.ends.callback(lifts.join)
        promised = 2 if loses else job.acked()
        began = time.monotonic()
        event.do(job)
        if event.goes_on:
            stop(job)
        judged = job.agents[:1] if loses else job.agents
        codes = [agent.wait().returncode for agent in judged]
        took = time.monotonic() - began
        said = "\n".join(agent.output("stderr") for agent in judged)
        assert codes == [event.code] * len(judged), said
        newest = max((one.step for one in open_storage(job.saves).listed()), default=0)
        assert newest >= promised or found_again(job) >= promised, (promised, said)
        resumed = [job.read(path.name) for path in job.notes.glob("began.[1-9]*.*")]
        assert all(step >= promised for step in resumed), (resumed, promised, said)
        own = re.search(r'File "[^"]*/elaunch/(agent|server|cli)/', said)
        assert own is None, said
    return took


def undisturbed(factory: pytest.TempPathFactory, name: str, nodes: int) -> float:
    """Return how long an event takes an undisturbed job; one process of the session measures it."""
    shared = factory.getbasetemp().parent / f"seam-{name}-{nodes}".replace(" ", "-")
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "took").exists():
            place = Path(tempfile.mkdtemp(dir=shared))
            took = play(place, name, "nothing", nodes)
            (shared / "took").write_text(json.dumps(took))
        return float(json.loads((shared / "took").read_text()))


@pytest.mark.parametrize(("event", "condition"), PAIRS)
def test_a_pair_ends_as_the_event_alone(
    event: str, condition: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the same code, within a bounded time, and with nothing left or lost."""
    row = CONDITIONS[condition]()
    nodes = max(EVENTS[event].nodes, row.nodes)
    took = play(tmp_path, event, condition, nodes)
    if took > row.holds + 10 * LEAST_S + 12.0:
        usual = undisturbed(tmp_path_factory, event, nodes)
        assert took <= row.holds + 10 * usual + 12.0, (took, usual)
