"""The worker's end of the link, against a real Unix socket on whose other side an agent speaks."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.training.agentlink import AgentLink
from elaunch.training.launch import Placement
from elaunch.wire.local import LONGEST, Received, close_files
from elaunch.wire.progress import PageReader, ProgressPage
from elaunch.wire.worker import WIRE, Notice
from tests.launching import wait_until
from tests.training.agentend import Agent

SECONDS = 60.0
PLACE = Placement("elaunch", 5, 8, 1, 4, 1, 2, None, False, "job/3", "job", 3, "", None)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent that listens."""
    listening = Agent(tmp_path / "agent.sock")
    yield listening
    listening.end()


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    """A worker's page."""
    opened = ProgressPage()
    yield opened
    opened.close()


Notices = list[tuple[str, str, float | None, bool]]


@pytest.fixture
def notices() -> Notices:
    """What on_notice was called with."""
    return []


@pytest.fixture
def link(agent: Agent, page: ProgressPage, notices: Notices) -> Iterator[AgentLink]:
    """A worker's link, not yet started."""
    made = AgentLink(agent.path, page, PLACE)
    made.on_notice = lambda *said: notices.append(said)
    yield made
    made.close()


def threads() -> list[str]:
    """Return the names of the link's threads that run."""
    return [t.name for t in threading.enumerate() if t.name == "elaunch-agent"]


def test_it_attaches_with_its_page(agent: Agent, link: AgentLink, page: ProgressPage) -> None:
    """The agent reads there what the worker writes from then on."""
    link.start()
    assert agent.accept() == {"op": "worker", "wire": WIRE, "round": 3, "local_rank": 1}
    reader = PageReader(os.dup(agent.fds[0]))
    page.note("allgather #3")
    assert reader.read().doing == "allgather #3"
    reader.close()


def test_what_the_script_does_is_told(agent: Agent, link: AgentLink) -> None:
    """In the order in which it did it, to the end."""
    link.start()
    agent.accept()
    link.report_listening(shielded=True)
    link.report_notice(Notice("node b leaves", "resize"))
    link.ack("node b leaves", "resize")
    link.close()
    link.ack("after the end", "stop")
    told = []
    while line := agent.hear():
        told.append(line)
    notice = {"reason": "node b leaves", "kind": "resize"}
    assert told == [
        {"op": "listens", "shielded": True},
        {"op": "knows", **notice},
        {"op": "ack", **notice},
        {"op": "detach"},
    ]
    assert threads() == []


def test_notices_are_handed_on(agent: Agent, link: AgentLink, notices: Notices) -> None:
    """However the lines are cut on their way, and whatever else is said in between."""
    link.start()
    agent.accept()
    agent.say(
        {"op": "attached"},
        {"op": "preempt", "reason": "Slurm's time limit", "kind": "stop", "grace": 30.0},
        {"op": "preempt", "reason": "a spot notice", "kind": "stop", "grace": 9, "stated": True},
        {"op": "of a later version"},
        {"ok": True, "n": 77},
        {"ok": True, "n": "x"},
    )
    assert agent.worker is not None
    agent.worker.setblocking(True)
    agent.worker.sendall(b'{"op": "preempt", "rea')
    wait_until(lambda: len(notices) == 2, SECONDS)
    agent.worker.sendall('son": "größer", "kind": "resize"}\n'.encode())
    agent.say({"op": "preempt", "reason": "odd", "kind": "of a later version", "grace": "long"})
    wait_until(lambda: len(notices) == 4, SECONDS)
    assert notices == [
        ("Slurm's time limit", "stop", 30.0, False),
        ("a spot notice", "stop", 9.0, True),
        ("größer", "resize", None, False),
        ("odd", "stop", None, False),
    ]


ACK_AND_DIE = """
import os, sys
from pathlib import Path
from elaunch.wire.local import LONGEST, Received, close_files
from elaunch.wire.progress import ProgressPage
from elaunch.training.agentlink import AgentLink
from elaunch.training.launch import Placement
place = Placement("elaunch", 0, 1, 0, 1, 0, 1, None, False, "job/0", "job", 0, "", None)
link = AgentLink(Path(sys.argv[1]), ProgressPage(), place)
link.start()
link.ack("why", "stop")
os._exit(0)
"""


def test_an_ack_arrives_even_if_the_script_ends_at_once(agent: Agent) -> None:
    """It decides whether exit code 0 means preempted or completed."""
    subprocess.run([sys.executable, "-c", ACK_AND_DIE, str(agent.path)], check=True, timeout=60)
    assert agent.accept()["op"] == "worker"
    assert agent.hear() == {"op": "ack", "reason": "why", "kind": "stop"}
    assert agent.hear() == {}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of elaunch so far."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def go_on(link: AgentLink) -> None:
    """Do what a script does that goes on."""
    for _ in range(3):
        link.report_listening(shielded=True)
        link.report_notice(Notice("x"))
        link.ack("x", "stop")


def test_an_agent_that_ends_is_no_error(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and the script goes on."""
    link.start()
    agent.accept()
    agent.end()
    wait_until(lambda: threads() == [], SECONDS)
    go_on(link)
    link.close()
    (line,) = warned(caplog)
    assert "agent has closed the connection" in line
    assert "goes on without it" in line


def test_an_agent_that_is_not_there_is_no_error(
    tmp_path: Path, page: ProgressPage, caplog: pytest.LogCaptureFixture
) -> None:
    """One line with the path and the reason."""
    link = AgentLink(tmp_path / "gone.sock", page, PLACE)
    link.start()
    go_on(link)
    link.close()
    (line,) = warned(caplog)
    assert str(tmp_path / "gone.sock") in line
    assert "No such file" in line


def test_a_refusal_is_no_error(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reason is in the log, once."""
    link.start()
    agent.accept()
    agent.say({"error": "round 3 is over"})
    agent.end()
    wait_until(lambda: threads() == [], SECONDS)
    go_on(link)
    (line,) = warned(caplog)
    assert "round 3 is over" in line
    assert link.refusal == "round 3 is over"


@pytest.mark.slow
def test_an_agent_that_reads_nothing_does_not_hold_the_script_for_long(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up when its buffer is full."""
    link.start()
    began = time.monotonic()
    for _ in range(20):
        link.report_notice(Notice("x" * 100_000))
    assert time.monotonic() - began < 30
    assert len(warned(caplog)) == 1
    assert "does not read any more" in warned(caplog)[0]


def test_lines_without_end_are_given_up(agent: Agent, link: AgentLink) -> None:
    """What answers is no agent: its bytes are not kept forever."""
    link.start()
    agent.accept()
    assert agent.worker is not None
    agent.worker.setblocking(True)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(LONGEST // 65536 + 100):
            agent.worker.sendall(b"x" * 65536)
    wait_until(lambda: threads() == [], SECONDS)


@pytest.mark.parametrize("line", [b"no JSON", b'["no", "object"]', b'{"fds": 1}'])
def test_what_is_no_message_is_given_up(
    agent: Agent, link: AgentLink, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    """What answers is no agent of this version."""
    link.start()
    agent.accept()
    assert agent.worker is not None
    agent.worker.sendall(line + b"\n")
    wait_until(lambda: threads() == [], SECONDS)
    (warning,) = warned(caplog)
    assert "agent has gone (the message" in warning


def test_requests_are_answered_whatever_their_order(agent: Agent, link: AgentLink) -> None:
    """Several threads may ask; what nobody waits for any more is skipped, its files closed."""
    link.start()
    agent.accept()
    with pytest.raises(TimeoutError):
        link.ask("begin", 0.05)
    answers: dict[str, Received] = {}

    def ask(op: str) -> None:
        answers[op] = link.ask(op, SECONDS)

    asking = [threading.Thread(target=ask, args=(op,)) for op in ("wait", "memory")]
    for thread in asking:
        thread.start()
    asked = {message["op"]: message["n"] for message in (agent.hear() for _ in range(3))}
    before = len(os.listdir("/proc/self/fd"))
    assert agent.channel is not None
    agent.channel.send({"n": asked["begin"], "ok": True}, [0, 0])
    agent.channel.send({"n": asked["memory"], "ok": True}, [0])
    agent.say({"n": asked["wait"], "ok": False})
    for thread in asking:
        thread.join(SECONDS)
    message, files = answers["memory"]
    assert (message["ok"], len(files), answers["wait"][0]["ok"]) == (True, 1, False)
    close_files(files)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_request_ends_with_the_agent(agent: Agent, link: AgentLink) -> None:
    """It does not wait for its deadline; no later one is sent."""
    link.start()
    agent.accept()
    ended: list[str] = []

    def ask() -> None:
        try:
            link.ask("wait", 100 * SECONDS)
        except ConnectionError as error:
            ended.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    agent.hear()
    agent.end()
    asking.join(SECONDS)
    assert ended == ["it has hung up"]
    wait_until(lambda: link.problem != "", SECONDS)
    with pytest.raises(ConnectionError, match="it has closed the connection"):
        link.ask("wait", SECONDS)


def test_a_path_that_is_too_long_for_an_address(tmp_path: Path, page: ProgressPage) -> None:
    """A run directory may lie deep."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    short = tmp_path / "s"
    agent = Agent(short)
    os.rename(short, deep / "agent.sock")
    link = AgentLink(deep / "agent.sock", page, PLACE)
    link.start()
    assert agent.accept()["op"] == "worker"
    link.close()
    agent.end()


def test_a_fork_says_nothing_in_its_parents_name(agent: Agent, link: AgentLink) -> None:
    """Neither that it ends nor that it was told to."""
    link.start()
    agent.accept()
    pid = os.fork()
    if pid == 0:
        link.ack("x", "stop")
        link.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    link.report_listening(shielded=True)
    assert agent.hear() == {"op": "listens", "shielded": True}


def test_a_worker_that_is_killed_is_seen_at_once(agent: Agent) -> None:
    """Its end of the connection is closed by the kernel."""
    code = ACK_AND_DIE.replace("os._exit(0)", "import signal; signal.pause()")
    worker = subprocess.Popen([sys.executable, "-c", code, str(agent.path)])
    try:
        agent.accept()
        assert agent.hear()["op"] == "ack"
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(60)
    assert agent.hear() == {}


def test_an_entry_is_answered_and_the_newest_counts(agent: Agent, page: ProgressPage) -> None:
    """The link's thread answers; what this rank waits for is cut before it can be taken."""
    link = AgentLink(agent.path, page, PLACE)
    cut: list[bool] = []
    link.on_entry = lambda: cut.append(link.has_entry)
    link.start()
    agent.accept()
    assert link.take_entry(0.0) is None
    for number in (4, 5):
        environ = {"ELAUNCH_ROUND": str(number), "RANK": "5"}
        agent.say({"op": "enter", "environ": environ, "present": [0, 5], "slots": [6]})
        assert agent.hear() == {"op": "enters", "round": number}
    wait_until(lambda: len(cut) == 2)
    entry = link.take_entry(SECONDS)
    while entry is not None and entry.environ["ELAUNCH_ROUND"] == "4":
        entry = link.take_entry(SECONDS)
    assert entry is not None and entry.environ["RANK"] == "5"
    assert (entry.present, entry.slots) == ((0, 5), (6,))
    assert cut == [True, True] and not link.has_entry
    link.report_entered(5)
    link.report_standing(True)
    assert agent.hear() == {"op": "entered", "round": 5}
    assert agent.hear() == {"op": "stands", "stands": True}
    link.close()


def test_nobody_waits_for_an_entry_of_an_agent_that_is_gone(
    agent: Agent, page: ProgressPage
) -> None:
    """It returns at once."""
    link = AgentLink(agent.path, page, PLACE)
    link.start()
    agent.accept()
    threading.Timer(0.1, agent.end).start()
    started = time.monotonic()
    assert link.take_entry(SECONDS) is None
    assert time.monotonic() - started < SECONDS / 2
    link.close()
