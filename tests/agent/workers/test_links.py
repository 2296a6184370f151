"""The agent's end of its workers' links: real sockets, real pages, good and bad workers."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.workers import links
from elaunch.agent.workers.links import WorkerLinks, event_of
from elaunch.wire.local import LONGEST, Message, Requests
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import WIRE, Notice
from tests.launching import wait_until

SECONDS = 30.0


class Agent:
    """The control socket and the links, as the agent has them."""

    def __init__(self, path: Path) -> None:
        self.posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self.asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.answering = threading.Event()
        self.links = WorkerLinks(self.posted.put, self.serve)
        self.links.start()
        self.path = path
        self.control = ControlSocket(path, dict, str.upper, self.links.adopt)
        self.control.start()
        self.links.begin(Round(0, 2))

    def serve(self, requests: Requests) -> None:
        """Answer what a worker asks, when the test has it so."""
        while (request := requests.next()) is not None:
            assert self.answering.wait(SECONDS)
            requests.answer(request, {"op": request["op"]})
            self.asked.put(request)
        self.asked.put(None)

    def event(self) -> events.Event:
        """Return the next event."""
        return self.posted.get(timeout=SECONDS)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """Return an agent in round 0."""
    made = Agent(tmp_path / "agent.sock")
    yield made
    made.control.close()
    made.links.close()


class Worker:
    """A worker's end, by hand."""

    def __init__(self, agent: Agent, local_rank: int = 0, round: int = 0, wire: int = WIRE) -> None:
        self.page = ProgressPage()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(str(agent.path))
        said = {"op": "worker", "wire": wire, "round": round, "local_rank": local_rank, "fds": 1}
        socket.send_fds(self.sock, [json.dumps(said).encode() + b"\n"], [self.page.fd])
        self._lines = self.sock.makefile("rb")

    def hear(self) -> dict[str, object]:
        """Return the next message; {} at the end."""
        line = self._lines.readline()
        return json.loads(line) if line else {}

    def say(self, line: bytes) -> None:
        """Send a line."""
        self.sock.sendall(line + b"\n")


def test_a_worker_attaches_and_is_read(agent: Agent) -> None:
    """Its page is the one that it writes."""
    worker = Worker(agent, 1)
    assert worker.hear() == {"op": "attached"}
    worker.page.step(41)
    (reading,) = agent.links.readings().values()
    assert (list(agent.links.readings()), reading.step) == ([1], 41)


def test_what_it_says_is_posted(agent: Agent) -> None:
    """In the order in which it says it, with its round and its rank."""
    worker = Worker(agent, 3)
    worker.say(b'{"op": "listens"}\n{"op": "ack", "reason": "drain", "kind": "stop"}')
    worker.say(b'{"op": "knows", "reason": "a node joins", "kind": "resize"}\n{"op": "detach"}')
    worker.say(b'{"op": "knows", "reason": "spot", "kind": "stop", "grace": 9}')
    worker.say(b'{"op": "knows", "reason": "odd", "kind": "stop", "grace": -1e99}')
    assert agent.event() == events.WorkerListens(0, 3)
    assert agent.event() == events.PreemptAcked(0, 3, Notice("drain"))
    assert agent.event() == events.NoticeKnown(0, Notice("a node joins", "resize"))
    assert agent.event() == events.NoticeKnown(0, Notice("spot", "stop", 9.0))
    assert agent.event() == events.NoticeKnown(0, Notice("odd"))


def test_a_worker_that_was_kept_goes_on(agent: Agent) -> None:
    """Its connection stays, what it says is of the new round, and the others are dropped."""
    worker, other = Worker(agent, 0), Worker(agent, 1)
    assert worker.hear() == other.hear() == {"op": "attached"}
    worker.say(
        b'{"op": "listens"}\n{"op": "stands", "stands": true}\n{"op": "stands", "stands": 1}'
    )
    worker.say(b'{"op": "stands", "stands": true}')
    told = [agent.event() for _ in range(4)]
    stands = [events.WorkerStands(0, 0, yes) for yes in (True, False, True)]
    assert told == [events.WorkerListens(0, 0), *stands]
    begun = Round(1, 2, kept={0: 0}, slots=[2, 1], present=[0, 2])
    agent.links.begin(begun)
    assert other.hear() == {}
    agent.links.enter(0, {"ELAUNCH_ROUND": "1"}, begun)
    asked = {"op": "enter", "environ": {"ELAUNCH_ROUND": "1"}}
    assert worker.hear() == {**asked, "present": [0, 2], "slots": [2, 1]}
    worker.say(b'{"op": "enters", "round": 1}\n{"op": "entered", "round": 1}\n{"op": "listens"}')
    worker.say(b'{"op": "detach"}\n{"op": "entered", "round": "x"}')
    told = [agent.event() for _ in range(5)]
    entered = [events.WorkerEnters(1, 0, False), events.WorkerEnters(1, 0, True)]
    later = [events.WorkerListens(1, 0), events.WorkerStands(1, 0, False)]
    assert told == [*entered, *later, events.WorkerEnters(-1, 0, True)]


def test_a_flood_of_reports_is_a_few_events(agent: Agent) -> None:
    """The loop has no more to do than the worker has news, and others are heard meanwhile."""
    flood, other = Worker(agent, 0), Worker(agent, 1)
    for number in range(1000):
        flood.say(b'{"op": "listens"}')
        flood.say(b'{"op": "knows", "reason": "%d", "kind": "stop"}' % number)
    other.say(b'{"op": "listens"}')
    heard = [agent.event()]
    while heard[-1] != events.WorkerListens(0, 1):
        heard.append(agent.event())
    flood.say(b'{"op": "detach"}')
    assert len(heard) <= 1 + links.MOST_POSTED
    assert heard.count(events.WorkerListens(0, 0)) == 1


def test_a_notice_reaches_all_of_the_round(agent: Agent) -> None:
    """Those who attach after it included."""
    early = Worker(agent, 0)
    assert early.hear() == {"op": "attached"}
    agent.links.notify(Notice("drain"))
    told = {"op": "preempt", "reason": "drain", "kind": "stop"}
    assert early.hear() == told
    late = Worker(agent, 1)
    assert [late.hear(), late.hear()] == [{"op": "attached"}, told]


def test_a_notice_says_how_long_there_is(agent: Agent) -> None:
    """Workers that attach later have what is left of it."""
    early = Worker(agent, 0)
    assert early.hear() == {"op": "attached"}
    agent.links.notify(Notice("drain"), 30.0)
    assert 29.0 < float(early.hear()["grace"]) <= 30.0
    time.sleep(0.01)
    late = Worker(agent, 1)
    assert late.hear() == {"op": "attached"}
    told = late.hear()
    assert float(told["grace"]) <= 29.99 and "stated" not in told
    agent.links.notify(Notice("drain", "stop", 9.0), 9.0)
    assert late.hear()["stated"] is True


def test_a_new_round_knows_nobody(agent: Agent) -> None:
    """Neither the workers of the old one, nor its notice; who comes late is refused."""
    old = Worker(agent, 0)
    assert old.hear() == {"op": "attached"}
    agent.links.notify(Notice("drain"))
    old.hear()
    agent.links.begin(Round(1, 2))
    assert old.hear() == {}
    assert agent.links.readings() == {}
    assert Worker(agent, 0).hear() == {"error": "round 0 does not run here; it is round 1"}
    new = Worker(agent, 0, round=1)
    assert new.hear() == {"op": "attached"}
    agent.links.notify(Notice("again"))
    assert new.hear()["reason"] == "again"


def test_a_worker_that_ends_is_forgotten(agent: Agent) -> None:
    """Also without a word."""
    worker = Worker(agent)
    assert worker.hear() == {"op": "attached"}
    worker.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: agent.links.readings() == {})


def test_one_that_attaches_again_replaces_the_first(agent: Agent) -> None:
    """A script that closes its context and opens another."""
    first, second = Worker(agent), Worker(agent)
    assert second.hear() == {"op": "attached"}
    first.hear()
    assert first.hear() == {}
    second.page.step(7)
    assert agent.links.readings()[0].step == 7


@pytest.mark.parametrize("line", [b"{}", b'{"op": "ack"}', b'{"op": "dance"}', b'{"op": [1]}'])
def test_nonsense_is_no_event(agent: Agent, line: bytes) -> None:
    """And what is said after it counts."""
    worker = Worker(agent)
    worker.say(line)
    worker.say(b'{"op": "listens"}')
    assert agent.event() == events.WorkerListens(0, 0)


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"\xff" * 100, b'{"fds": 1}'])
def test_what_is_no_message_ends_the_connection(agent: Agent, line: bytes) -> None:
    """Nothing that follows it is taken for a message."""
    worker = Worker(agent)
    assert worker.hear() == {"op": "attached"}
    worker.say(line + b'\n{"op": "listens"}')
    assert worker.hear() == {}
    assert agent.links.readings() == {}
    assert agent.posted.empty()


def test_a_worker_of_another_version_is_refused(agent: Agent) -> None:
    """With a sentence, and so is one from before there were versions."""
    assert str(Worker(agent, wire=7).hear()["error"]).endswith("run one version of elaunch")
    for old in (b'{"op": "attach", "round": 0}\n', b'{"op": "checkpoint", "round": 0}\n'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(SECONDS)
            sock.connect(str(agent.path))
            sock.sendall(old)
            assert "unknown op" in json.loads(sock.recv(4096))["error"]


def test_a_request_that_takes_long_holds_up_no_report(agent: Agent) -> None:
    """Its requests are done in order, also those that were sent before its end."""
    worker = Worker(agent, 0)
    assert worker.hear() == {"op": "attached"}
    worker.say(b'{"op": "wait", "n": 1}\n{"op": "begin", "n": 2}\n{"op": "listens"}')
    assert agent.event() == events.WorkerListens(0, 0)
    worker.sock.shutdown(socket.SHUT_WR)
    agent.answering.set()
    asked = [agent.asked.get(timeout=SECONDS) for _ in range(3)]
    assert [request and request["op"] for request in asked] == ["wait", "begin", None]


def test_answers_have_their_numbers(agent: Agent) -> None:
    """A notice may come between them."""
    worker = Worker(agent, 0)
    assert worker.hear() == {"op": "attached"}
    agent.answering.set()
    worker.say(b'{"op": "wait", "n": 7}')
    assert worker.hear() == {"n": 7, "ok": True, "op": "wait"}


def test_one_that_asks_without_end_is_dropped(agent: Agent) -> None:
    """No memory is kept for it."""
    worker = Worker(agent)
    assert worker.hear() == {"op": "attached"}
    worker.say(b"\n".join(b'{"op": "wait", "n": 1}' for _ in range(100)))
    assert worker.hear() == {}
    assert agent.links.readings() == {}
    agent.answering.set()


def test_one_that_talks_without_end_is_dropped(agent: Agent) -> None:
    """No memory is kept for it."""
    worker = Worker(agent)
    assert worker.hear() == {"op": "attached"}
    with pytest.raises(OSError):
        for _ in range(LONGEST // 65536 + 100):
            worker.sock.sendall(bytes(65536))
    wait_until(lambda: agent.links.readings() == {})


@pytest.mark.slow
def test_one_that_does_not_listen_is_dropped(agent: Agent) -> None:
    """The agent waits for nobody."""
    worker = Worker(agent)
    wait_until(lambda: 0 in agent.links.readings())
    for _ in range(20_000):
        agent.links.notify(Notice("x" * 900))
        if not agent.links.readings():
            break
    assert agent.links.readings() == {}
    worker.sock.close()


def test_a_page_is_needed(agent: Agent) -> None:
    """Any other file is refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, open(os.devnull) as other:
        sock.settimeout(SECONDS)
        sock.connect(str(agent.path))
        said = {"op": "worker", "wire": WIRE, "round": 0, "local_rank": 0, "fds": 1}
        socket.send_fds(sock, [json.dumps(said).encode() + b"\n"], [other.fileno()])
        assert b"no progress page" in sock.recv(4096)


def test_a_message_that_is_no_event() -> None:
    """What is wrong with a message is said."""
    assert event_of({"op": "x"}, 0, 0) == "unknown op 'x'"
    assert event_of({"op": "ack", "reason": 1, "kind": "stop"}, 0, 0) == (
        "ack without reason and kind"
    )
