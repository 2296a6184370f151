"""The server of a hosted store: clients that do harm, and too many of them."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import msgspec
import pytest

from elaunch.store.tcp import messages, server, wire
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.messages import (
    EnrolEntry,
    PutEntry,
    ReadMembers,
    ReadPlan,
    ReadShared,
    RenewEntry,
    SentPost,
    WithdrawEntry,
    packed,
    unpacked,
)
from elaunch.store.tcp.server import TcpServer
from tests.launching import wait_until
from tests.store.tcp.rig import Client
from tests.store.test_contract import LONG

OWNER = b"an owner"
NONE = SentPost(0, 0, b"", b"")


@contextmanager
def serving(job: HostedJob) -> Iterator[int]:
    """Serve a job; return the port."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    port = listening.getsockname()[1]
    with closing(TcpServer(listening, job, {})):
        yield port


@pytest.fixture
def job() -> HostedJob:
    """Return what a store holds, of which the agent "host" leads."""
    made = HostedJob()
    made.ask(EnrolEntry("host", OWNER, 60.0, b"host"))
    made.lead("host")
    return made


@pytest.fixture
def port(job: HostedJob) -> Iterator[int]:
    """Serve ``job``."""
    with serving(job) as port:
        yield port


def test_requests_are_answered_in_order(job: HostedJob, port: int) -> None:
    """Also where many come in one go, and in parts."""
    asked = [
        EnrolEntry("a", OWNER, 60.0, b"1"),
        RenewEntry("a"),
        PutEntry("a", b"2"),
        EnrolEntry("a", b"another", 60.0, b"3"),
        WithdrawEntry("a"),
        RenewEntry("a"),
        PutEntry("a", b"4"),
        WithdrawEntry("a"),
        EnrolEntry("a", OWNER, 60.0, b"5"),
        ReadShared(b"mine"),
        ReadShared(b"yours"),
    ]
    answers = [True, True, True, False, True, False, False, False, False, b"mine", b"mine"]
    with closing(Client(port)) as client:
        sent = b"".join(map(messages.frame, asked))
        for part in (sent[:7], sent[7:100], sent[100:]):
            client.send(part)
        found = [messages.read_answer(client.frame()[1], type(one)) for one in asked]
        assert found == answers
        assert list(client.ask(ReadMembers())) == ["host"]


def test_a_new_plan_is_sent_unasked(job: HostedJob, port: int) -> None:
    """To those that have read it once; with the nodes if they have others."""
    with closing(Client(port)) as client, closing(Client(port)) as other:
        assert client.ask(ReadPlan(0, 0)) == NONE
        assert other.ask(ReadShared(b"")) == b""
        for version, (nodes, sent) in enumerate(
            [(b"ab", SentPost(1, 1, b"p", packed(b"ab"))), (b"ab", SentPost(2, 1, b"p", b"")),
             (b"", SentPost(3, 0, b"p", b"")), (b"cd", SentPost(4, 4, b"p", packed(b"cd")))], 1
        ):  # fmt: skip
            assert job.publish(version, b"p", nodes)
            first, body = client.frame()
            assert first == messages.NEW_POST
            assert msgspec.msgpack.decode(body, type=SentPost) == sent
        assert client.ask(ReadPlan(4, 0)) == NONE
        assert client.ask(ReadPlan(0, 0)) == SentPost(4, 4, b"p", b"")
        assert other.ask(ReadPlan(3, 4)) == SentPost(4, 4, b"p", b"")
        assert job.publish(5, b"p", b"ef") and not job.publish(7, b"p", b"")
        for one in (client, other):
            sent = SentPost(5, 5, b"p", packed(b"ef"))
            assert msgspec.msgpack.decode(one.frame()[1], type=SentPost) == sent


def test_of_plans_that_come_while_a_client_reads_nothing_it_gets_the_newest(
    job: HostedJob, port: int
) -> None:
    """However many there are; they are not kept for it."""
    large = random.Random(1).randbytes(1 << 20)
    with closing(Client(port)) as client, closing(Client(port)) as reader:
        assert client.ask(ReadPlan(0, 0)) == reader.ask(ReadPlan(0, 0)) == NONE
        for version in range(1, 41):
            assert job.publish(version, large, b"%d" % version)
            found = msgspec.msgpack.decode(reader.frame()[1], type=SentPost)
            assert found.version <= version
        seen = [0]
        while seen[-1] < 40:
            seen.append(msgspec.msgpack.decode(client.frame()[1], type=SentPost).version)
        assert seen == sorted(set(seen)) and len(seen) < 30


def test_a_plan_for_many_lets_others_be_served_meanwhile(job: HostedJob, port: int) -> None:
    """All get it, and the nodes are what they were."""
    nodes = random.Random(2).randbytes(100_000)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(port))) for _ in range(200)]
        for client in clients:
            assert client.ask(ReadPlan(0, 0)) == NONE
        assert job.publish(1, b"p", nodes)
        for client in clients:
            found = msgspec.msgpack.decode(client.frame()[1], type=SentPost)
            assert unpacked(found.nodes) == nodes
            assert client.ask(RenewEntry("host"))


@pytest.mark.parametrize("sent", [b"", b"x", packed(b"x" * 100)[:-1], bytes(50)])
def test_nodes_that_are_none_are_refused(sent: bytes) -> None:
    """By who reads them."""
    with pytest.raises(ValueError, match=r"decompressing|cut off"):
        unpacked(sent)


def test_what_an_earlier_connection_has_left_behind_replaces_nothing(
    job: HostedJob, port: int
) -> None:
    """An agent connects again and writes; then what it sent before is read."""
    with closing(Client(port)) as early, closing(Client(port)) as late:
        assert early.ask(EnrolEntry("a", OWNER, 60.0, b"1"))
        assert early.ask(PutEntry("a", b"2"))
        assert late.ask(EnrolEntry("a", OWNER, 60.0, b"3"))  # an answer was lost
        assert not early.ask(PutEntry("a", b"4"))
        assert late.ask(ReadMembers())["a"][1] == b"3"
        assert late.ask(PutEntry("a", b"5"))
        assert not late.ask(PutEntry("host", b"x")) and job.ask(PutEntry("host", b"y"))


@pytest.mark.parametrize(
    "sent",
    [
        messages.frame([3]),
        messages.frame([3, "a b"]),
        messages.frame([3, "a\n"]),
        messages.frame([3, "a" * 65]),
        messages.frame([99, "a"]),
        messages.frame([1, "a", OWNER, float("nan"), b""]),
        messages.frame([1, "a", OWNER, 1e9, b""]),
        messages.frame([1, "a", bytes(17), 3.0, b""]),
        messages.frame([2, "a", bytes(messages.LONGEST_ENTRY + 1)]),
        messages.frame([7, "x", 0]),
        messages.frame("x"),
        messages.frame(None),
        bytes([messages.MESSAGE]) + b"\x05\0\0\0" + b"\xdd\xff\xff\xff\xff",
        bytes([messages.MESSAGE]) + b"\x06\0\0\0" + b"\x91" * 6,
        bytes([messages.MESSAGE]) + b"\xff\xff\xff\xff",
        bytes([messages.NEW_POST]) + b"\x01\0\0\0" + b"\xc3",
        b"GET / HTTP/1.1\r\n\r\n",
        wire.put("job/b/1", b"x"),
    ],
)
def test_what_is_malformed_ends_its_connection(port: int, sent: bytes) -> None:
    """And no other."""
    with closing(Client(port)) as good, closing(Client(port)) as client:
        client.send(sent)
        assert client.is_ended()
        assert good.ask(RenewEntry("host"))


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 40]
)
def test_what_is_no_tcpstore_client_is_ended(
    port: int, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said of it: anybody may scan a port."""
    with socket.create_connection(("127.0.0.1", port), LONG) as sock:
        sock.sendall(sent)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    with closing(Client(port)) as good:
        assert good.ask(RenewEntry("host"))
    assert caplog.messages == []


def test_a_client_of_a_tcpstore_is_refused_and_named_once(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """torchrun, or the elaunch of another version on another node."""
    with caplog.at_level(logging.WARNING):
        for request in (
            wire.add("init/", 1),
            wire.get("/elsewhere"),
            wire.compare_set("a", b"", b""),
        ):
            line = wire.Connection(socket.socket())
            until = time.monotonic() + LONG
            with closing(line):
                line.open(("127.0.0.1", port), until)
                line.send([request], until)
                with pytest.raises(ConnectionError):
                    line.read(1, until)
        with closing(Client(port)) as old:
            old.send(wire.put("job/b/1", b"x"))
            assert old.is_ended()
    assert caplog.messages == [
        "the agents' store refuses a client at 127.0.0.1 that is none of this elaunch: "
        "torchrun, or another version of elaunch"
    ]


@pytest.mark.slow
def test_torchs_own_client_is_refused(port: int) -> None:
    """At once, with an error of its own."""
    from torch.distributed import DistError, TCPStore

    began = time.monotonic()
    with pytest.raises((DistError, RuntimeError)):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).get("a")
    assert time.monotonic() - began < LONG


def test_a_client_that_reads_nothing_is_ended(
    job: HostedJob, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no second answer before it has read the first; the others go on."""
    monkeypatch.setattr(server, "SILENT", 1.0)
    job.ask(PutEntry("host", bytes(1 << 18)))
    with closing(Client(port)) as greedy:
        greedy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.sock.settimeout(LONG)
        with pytest.raises(ConnectionError):
            while True:  # the server takes no more of it once it has ended the connection
                greedy.sock.sendall(messages.frame(ReadMembers()) * 64)
    with closing(Client(port)) as client:
        assert len(client.ask(ReadMembers())["host"][1]) == 1 << 18


@pytest.mark.slow
def test_silent_clients_are_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that never said anything, and those that said something once; not those that follow.

    Nor those that talk.
    """
    monkeypatch.setattr(server, "SILENT", 1.0)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), LONG))
            for _ in range(40)
        ]
        silent[0].sendall(b"\x00")
        one, follows, talks = (stack.enter_context(closing(Client(port))) for _ in range(3))
        assert one.ask(RenewEntry("host"))
        follows.ask(ReadPlan(0, 0))
        began = time.monotonic()
        while time.monotonic() - began < 3.5:
            assert talks.ask(RenewEntry("host"))
            time.sleep(0.05)
        assert [sock.recv(1) for sock in silent] == [b""] * 40
        assert one.is_ended()
        assert follows.ask(RenewEntry("host"))


def test_an_agent_whose_machine_is_gone_is_noticed_by_the_kernel(job: HostedJob) -> None:
    """It follows the plan and would keep its descriptor; accepted sockets have these options."""
    listening = socket.create_server(("127.0.0.1", 0))
    made = TcpServer(listening, job, {})
    with closing(made), closing(Client(listening.getsockname()[1])) as client:
        client.ask(RenewEntry("host"))
        (there,) = made._clients.values()
        get = there.sock.getsockopt
        assert get(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert get(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert get(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
        assert get(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


OUT_OF_FILES = """
import os, resource, socket, sys, time
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.server import TcpServer
listening = socket.create_server(("127.0.0.1", 0), backlog=64)
server = TcpServer(listening, HostedJob(), {})
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20,) * 2)
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
print(time.process_time(), flush=True)
sys.stdin.readline()
print(time.process_time(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_who_connects_waits_while_no_descriptor_is_left() -> None:
    """The thread does not spin, and takes the next one when another has gone."""
    argv, pipe = [sys.executable, "-c", OUT_OF_FILES], subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdin is not None

        def used() -> float:
            assert process.stdout is not None and process.stdin is not None
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        port = int(process.stdout.readline())
        clients = [stack.enter_context(closing(Client(port))) for _ in range(10)]
        more = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)
        ]
        files = f"/proc/{process.pid}/fd"
        wait_until(lambda: _is_full(files, 20), LONG, "no descriptor is left")
        before = used()
        time.sleep(1.0)
        assert used() - before < 0.5
        for sock in more:
            sock.close()
        with closing(Client(port)) as late:
            assert late.ask(ReadMembers()) == clients[0].ask(ReadMembers()) == {}


class OutOfFiles(socket.socket):
    """A listening socket that accepts nothing, as the process has no descriptor left."""

    def accept(self) -> tuple[socket.socket, object]:
        """Fail."""
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_server_that_has_no_descriptor_left_leaves_its_port() -> None:
    """It does not wait for connections at that time."""
    listening = OutOfFiles()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    made = TcpServer(listening, HostedJob(), {})
    with socket.create_connection(listening.getsockname()):
        wait_until(lambda: made._pauses, LONG, "it is out of descriptors")
        made.close()
    assert listening.fileno() == -1


def _is_full(files: str, most: int) -> bool:
    sockets = [os.readlink(f"{files}/{name}") for name in os.listdir(files)]
    return sum(link.startswith("socket:") for link in sockets) >= most


FLOODED = """
import logging, os, resource, socket, sys
from elaunch.store.tcp.host import HostedJob
from elaunch.store.tcp.server import TcpServer
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
listening = socket.create_server(("127.0.0.1", 0), backlog=64)
server = TcpServer(listening, HostedJob(), {})
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
os.pipe()
"""


def test_the_most_silent_of_too_many_clients_goes() -> None:
    """The process keeps descriptors for itself, those that talk stay, and one line says so."""
    argv, pipe = [sys.executable, "-c", FLOODED], subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = stack.enter_context(closing(Client(port)))
        more = []
        for _ in range(150):
            more.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            assert client.ask(ReadMembers()) == {}
        more[0].settimeout(LONG)
        assert more[0].recv(1) == b""
        assert client.ask(ReadMembers()) == {}
        with closing(Client(port)) as late:
            assert late.ask(ReadMembers()) == {}
        _, told = process.communicate("\n", LONG)
        assert told.startswith("the agents' store has 50 connections")
        assert told.count("\n") == 1


def test_the_identity_is_read_as_from_any_tcpstore(job: HostedJob) -> None:
    """By what looks whose store it is; torch's client of the round's store does the same."""
    listening = socket.create_server(("127.0.0.1", 0))
    identity = {"elaunch": 2}
    port = listening.getsockname()[1]
    with closing(TcpServer(listening, job, identity)), closing(Client(port)) as client:
        assert json.loads(client.identity) == identity
