"""The store in a TCPStore: what its host, its port and its network can do to an agent.

What every store can do is in tests/store/test_contract.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import cast

import psutil
import pytest

from elaunch.errors import LeaseLost, StoreClosed, StoreReplaced, StoreUnreachable
from elaunch.store.protocol import Change, Post, Store
from elaunch.store.tcp import client as tcp
from elaunch.store.tcp import wire
from elaunch.store.tcp.connection import TcpConnection
from elaunch.store.tcp.host import AgentNotice, MembersThread, put_notice, read_notice
from elaunch.store.tcp.store import SLICE
from elaunch.wire.local import is_readable
from tests import warm
from tests.launching import free_port, freeze
from tests.store.test_contract import LONG, beside, collect, read_until, until

pytestmark = pytest.mark.slow

HOST = """
import socket, sys
from elaunch.store.tcp import client as tcp
listening = socket.create_server(("127.0.0.1", 0))
store = tcp.host(listening, "job", timeout=20.0)
store.enrol("host", b"", 60.0)
assert store.await_leadership("host", 10.0)
assert store.publish(1, b"one")
print(store.name.rpartition(":")[2], flush=True)
sys.stdin.read()
store.close()
"""


class HostProcess:
    """An agent in a process of its own that hosts the store of ``job`` and leads."""

    def __init__(self) -> None:
        self.process = warm.Popen(
            [sys.executable, "-c", HOST],
            os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def signal(self, signum: int) -> None:
        """Send it a signal."""
        self.process.send_signal(signum)

    def freeze(self) -> None:
        """Stop it and wait until each of its threads stands still."""
        freeze(self.process.pid)

    def close(self) -> str:
        """Have it end if it has not; return what it wrote on stderr."""
        self.process.send_signal(signal.SIGCONT)
        _, stderr = self.process.communicate("", timeout=LONG)
        return stderr


@pytest.fixture
def process() -> Iterator[HostProcess]:
    """Give an agent that hosts, in a process of its own."""
    host = HostProcess()
    yield host
    host.close()


@pytest.fixture
def hosted() -> Iterator[tuple[Store, int]]:
    """Give the store of an agent here that hosts and leads, and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    with closing(tcp.host(listening, "job", timeout=20.0)) as store:
        store.enrol("host", b"", 60.0)
        assert store.await_leadership("host", LONG)
        yield store, port


def connect(port: int, deadline: float = LONG, run_id: str = "job") -> Store:
    """Connect to a store here."""
    return tcp.connect("127.0.0.1", port, run_id, deadline=deadline)


# ── the host ends, freezes, starts anew ──────────────────────────────────────────────────────────


def test_a_host_that_is_killed_is_noticed_at_once(process: HostProcess) -> None:
    """By who waits and by who asks; it is proof that nobody decides."""
    with closing(connect(process.port)) as store:
        store.enrol("a", b"", 60.0)
        assert store.follow(0, LONG) == Post(1, b"one")
        wait = beside(lambda: store.follow(1, LONG))
        process.signal(signal.SIGKILL)
        for call in (wait, store.renew, lambda: store.update(b""), store.latest, store.members):
            with pytest.raises(StoreUnreachable, match="host has ended") as caught:
                call()
            assert caught.value.nobody_decides
            assert f"127.0.0.1:{process.port}" in str(caught.value)


@pytest.mark.trial
def test_a_host_that_is_frozen_is_no_proof(process: HostProcess) -> None:
    """Calls end at their deadline; when it goes on, so do they, and everybody is still there."""
    store = tcp.connect("127.0.0.1", process.port, "job", deadline=LONG, timeout=2.0)
    with closing(store):
        store.enrol("a", b"A", 6.0)
        until(lambda: "a" in store.members(), "it is there")
        process.freeze()
        frozen = time.monotonic()
        for call in (store.renew, store.latest, lambda: store.follow(1, 0.2)):
            with pytest.raises(StoreUnreachable, match=r"no answer for|none was had") as caught:
                call()
            assert not caught.value.nobody_decides
        while time.monotonic() < frozen + 7.0:  # longer than the ttl
            threading.Event().wait(0.1)
        process.signal(signal.SIGCONT)
        answered = False
        while not answered:
            assert time.monotonic() < frozen + LONG
            try:
                store.renew()
                answered = True
            except StoreUnreachable:
                continue
        assert "a" in store.members()


def test_the_host_of_another_start_is_another_store(hosted: tuple[Store, int]) -> None:
    """Nobody's lease is there; agents must connect anew."""
    first, port = hosted
    with closing(connect(port)) as store:
        store.enrol("a", b"", 60.0)
        first.close()
        listening = socket.create_server(("127.0.0.1", port))
        with closing(tcp.host(listening, "job", timeout=20.0)):
            with pytest.raises(StoreReplaced, match="started anew") as caught:
                store.renew()
            assert not caught.value.nobody_decides
            with closing(connect(port)) as again:
                again.enrol("b", b"", 60.0)


def test_a_host_that_closes_leaves_the_port(hosted: tuple[Store, int]) -> None:
    """Late calls are told so."""
    first, port = hosted
    with closing(connect(port)) as store:
        wait = beside(lambda: store.follow(0, LONG))
        first.close()
        with pytest.raises(StoreUnreachable) as caught:
            wait()
        assert caught.value.nobody_decides
    socket.create_server(("127.0.0.1", port)).close()


class Proxy:
    """Passes connections on to a port; ``cut`` closes those that are there."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._pairs += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return

    def cut(self) -> None:
        """Close the connections that are there."""
        pairs, self._pairs = self._pairs, []
        for end in pairs:
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Close all."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()


def test_a_connection_that_breaks_is_opened_again(hosted: tuple[Store, int]) -> None:
    """A host that is still there is asked again, by who waits too; nobody notices."""
    first, port = hosted
    with closing(Proxy(port)) as proxy, closing(connect(proxy.port)) as store:
        store.enrol("a", b"1", 60.0)
        wait = beside(lambda: store.follow(0, LONG))
        read_until(first, Change("a", b"1", "put"), "host")
        for value in (b"2", b"3"):
            proxy.cut()
            store.update(value)
            read_until(first, Change("a", value, "put"), "host")
        assert first.publish(1, b"one")
        assert wait() == Post(1, b"one")


def test_a_round_costs_an_agent_the_same_however_many_nodes_it_has(
    hosted: tuple[Store, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait and a read for each of two plans, a notice and a heartbeat for each of two records."""
    first, port = hosted
    send, read = wire.Connection.send, wire.Connection._read
    counted: list[int] = []
    me = threading.current_thread()

    def counting_send(line: wire.Connection, requests: Iterable[bytes], until: float) -> None:
        sent = list(requests)
        counted.extend(len(one) for one in sent if threading.current_thread() is me)
        send(line, sent, until)

    def counting_read(line: wire.Connection, count: int, until: float) -> bytes:
        received.extend([count] if threading.current_thread() is me else [])
        return read(line, count, until)

    monkeypatch.setattr(wire.Connection, "send", counting_send)
    monkeypatch.setattr(wire.Connection, "_read", counting_read)
    received: list[int] = []
    costs = []
    with closing(connect(port)) as store:
        store.enrol("a", b"1", 60.0)
        for version, nodes in enumerate((b"opens it", bytes(9), bytes(200_000)), 1):
            before = 3 * version - 3
            assert first.publish(before + 1, b"begins", nodes)
            assert store.follow(before, LONG) == Post(before + 1, b"begins", nodes)
            cost = 0, 0
            for later in (before + 2, before + 3):
                assert first.publish(later, b"a plan", nodes)
                counted.clear(), received.clear()
                assert store.follow(later - 1, LONG) == Post(later, b"a plan", nodes)
                store.update(b"a record")
                cost = cost[0] + len(counted), cost[1] + sum(counted) + sum(received)
            costs.append(cost)
    (number, size), (later_number, later_size) = costs[1:]
    assert number == later_number == 8 and size < 600
    assert abs(later_size - size) < 5  # a version that has one digit more


def test_an_agent_that_has_missed_many_posts_is_not_left_waiting(hosted: tuple[Store, int]) -> None:
    """The one behind its last is removed by then; it was frozen between two waits, say."""
    first, port = hosted
    with closing(connect(port)) as store:
        assert first.publish(1, b"1")
        assert store.follow(0, LONG) == Post(1, b"1")
        for version in range(2, 101):
            assert first.publish(version, b"%d" % version)
        began = time.monotonic()
        assert store.follow(1, LONG) == Post(100, b"100")
        assert time.monotonic() - began < SLICE / 2


def test_an_enrolment_whose_answer_was_lost_is_taken_back(
    hosted: tuple[Store, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may be taken by then, by this very agent: it takes another, and leaves no ghost."""
    first, port = hosted
    collect(first, 1, "host")
    integer, me = wire.Connection.integer, threading.current_thread()
    lost = [ConnectionResetError("cut off")]

    def losing(line: wire.Connection, until: float) -> int:
        number = integer(line, until)
        if lost and threading.current_thread() is me:
            raise lost.pop()
        return number

    monkeypatch.setattr(wire.Connection, "integer", losing)
    with closing(connect(port)) as store:
        with pytest.raises(LeaseLost):
            store.enrol("a", b"A", 60.0)
        store.enrol("b", b"B", 60.0)
        found = read_until(first, Change("b", b"B", "put"), "host")
        assert found == [Change("a", b"A", "put"), Change("a", None, "left"), found[-1]]


def test_an_answer_that_is_there_is_taken_after_its_deadline(hosted: tuple[Store, int]) -> None:
    """By a process that was frozen meanwhile, say."""
    by = time.monotonic() + LONG
    sock = socket.socket()
    with closing(wire.Connection(sock)) as line:
        line.open(("127.0.0.1", hosted[1]), by)
        line.send([wire.get("elaunch")], by)
        assert is_readable(sock.fileno(), LONG)
        assert b"elaunch" in line.value(0.0)
        with pytest.raises(TimeoutError):
            line.value(0.0)


def test_two_threads_may_follow(hosted: tuple[Store, int]) -> None:
    """A post that is there is returned at once, whoever else waits."""
    first, port = hosted
    assert first.publish(1, b"one")
    with closing(connect(port)) as store:
        waits = [beside(lambda: store.follow(1, LONG)) for _ in range(2)]
        assert store.follow(0, LONG) == Post(1, b"one")
        assert first.publish(2, b"two")
        assert [wait() for wait in waits] == [Post(2, b"two")] * 2


# ── who else may be on the port ──────────────────────────────────────────────────────────────────


def serve(answer: bytes | None) -> socket.socket:
    """Listen; read what comes and say ``answer`` to it, or nothing."""
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=speak, args=(client,), daemon=True).start()

    def speak(client: socket.socket) -> None:
        with client:
            while client.recv(4096):
                if answer is not None:
                    client.sendall(answer)
                    return

    threading.Thread(target=accept, daemon=True).start()
    return listening


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give also the last attempt the time that an answer takes on a busy machine."""
    monkeypatch.setattr(tcp, "SHORTEST", tcp.CALL_TIMEOUT)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no TCPStore answers: 'HTTP/1.1 400 Bad Request'"),
        (b"\0" * 4096, "no TCPStore answers"),
        (None, "accepts connections and says nothing"),
        (b"", "connection was closed"),
    ],
)
def test_a_stranger_on_the_port_is_named(
    answer: bytes | None, said: str, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: host, port and what it says, within the deadline."""
    monkeypatch.setattr(tcp, "FOREIGN_PATIENCE", 60.0)
    with serve(answer) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setattr(wire, "ETCD_PORT", port if said.startswith("no") else 0)
        began = time.monotonic()
        with pytest.raises(StoreUnreachable) as caught:
            connect(port, deadline=0.5)
        assert ("--rdzv-backend etcd" in str(caught.value)) == said.startswith("no")
        assert time.monotonic() - began < 30
        assert f"127.0.0.1:{port}" in str(caught.value)
        assert said in str(caught.value)
        with pytest.raises(StoreUnreachable):
            tcp.identify("127.0.0.1", port, 0.2)
        listening.shutdown(socket.SHUT_RDWR)


def test_a_store_that_is_not_elaunchs_is_named(patient: None) -> None:
    """A plain TCPStore, of torchrun or of the job's own workers."""
    from torch.distributed import TCPStore

    plain = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert tcp.identify("127.0.0.1", plain.port, LONG) is None
    with pytest.raises(StoreUnreachable, match=f"127.0.0.1:{plain.port}.*no elaunch agent hosts"):
        connect(plain.port, deadline=0.5)


def test_another_jobs_store_is_named(hosted: tuple[Store, int], patient: None) -> None:
    """Both run ids are in the message."""
    _, port = hosted
    with pytest.raises(StoreUnreachable, match="job 'job', not to 'other'"):
        connect(port, deadline=0.5, run_id="other")
    said = tcp.identify("127.0.0.1", port, LONG)
    assert said is not None
    assert (said["elaunch"], said["run_id"]) == (1, "job")


def test_nobody_on_the_port_is_waited_for() -> None:
    """Until the deadline; then what was tried is said."""
    port = free_port()
    with pytest.raises(
        StoreUnreachable, match=r"connection refused.*attempts in [0-9.]+ s"
    ) as caught:
        connect(port, deadline=2.0)
    assert f"127.0.0.1:{port}" in str(caught.value)
    with pytest.raises(StoreUnreachable, match=r"no-such-host\.invalid cannot be resolved"):
        tcp.connect("no-such-host.invalid", port, "job", deadline=0.2)


def test_an_agent_may_be_there_before_the_host() -> None:
    """Nodes start apart; whoever gives up waiting is let go at once."""
    port = free_port()
    early = beside(lambda: connect(port))
    stop = threading.Event()
    other = beside(lambda: tcp.connect("127.0.0.1", port, "else", deadline=LONG, stop=stop))
    threading.Event().wait(0.3)
    stop.set()
    with pytest.raises(StoreClosed):
        other()
    with closing(tcp.host(socket.create_server(("127.0.0.1", port)), "job", timeout=20.0)) as host:
        store = early()
        assert isinstance(store, type(host))
        store.close()


def test_a_stranger_can_disturb_but_not_stop_the_host(hosted: tuple[Store, int]) -> None:
    """Garbage on the port, in the inbox, in a counter, in what readers read."""
    first, port = hosted
    with socket.create_connection(("127.0.0.1", port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
    stranger = wire.Connection(socket.socket())
    by = time.monotonic() + LONG
    stranger.open(("127.0.0.1", port), by)
    notices = [b"", b"\n", b"x" * 7_000_000, os.urandom(5000), b"put a nan\n", b"put a 1e9\n"]
    notices += [b"put ../x 3\n", b"left nobody\n", b"left host host\n", b"put x 3 " + b"y" * 200]
    garbage = [wire.push("job/in", notice) for notice in notices]
    garbage += [wire.put("job/ages", b"[" * 100_000), wire.put("c/a", b"many")]
    stranger.send([*garbage, wire.get("elaunch")], by)
    stranger.value(by)
    with closing(connect(port)) as store:
        assert isinstance(store.members(), dict)
        with pytest.raises(StoreUnreachable, match=r"every connection|none was had"):
            tcp.connect("127.0.0.1", port, "job", deadline=LONG, timeout=2.0).enrol("a", b"", 3.0)
        store.enrol("b", b"B", 60.0)
        read_until(first, Change("b", b"B", "put"), "host")
        assert first.publish(1, b"one")
        assert store.follow(0, LONG) == Post(1, b"one")
        until(
            lambda: sorted(first.members()) == ["b", "host"], "a, whose heart never beats, is gone"
        )
    stranger.close()


@pytest.mark.parametrize(
    ("raw", "notice"),
    [
        (b"put a 3.0\nvalue\n\0", AgentNotice("a", 3.0, b"value\n\0")),
        (b"put a 3\n", AgentNotice("a", 3.0, b"")),
        (b"new a 3\n", AgentNotice("a", 3.0, b"", new=True)),
        (b"left a\n", AgentNotice("a", None, b"")),
        (b"left a", None),
        (b"put a\n", None),
        (b"put a b c\n", None),
        (b"put a inf\n", None),
        (b"put a -1\n", None),
        (b"take a 3\n", None),
        (b"put %s 3\n" % (b"a" * 65), None),
        (b"put \xff 3\n", None),
    ],
)
def test_notices_are_read_with_care(raw: bytes, notice: AgentNotice | None) -> None:
    """What says nothing sensible is nothing."""
    assert read_notice(raw) == notice


class BreakingLine:
    """A connection of the host's: two notices are in the inbox, and the second cannot be read."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self._replies = [(1, put_notice("a", 60.0, b"A"))]
        self._broken = False

    def exchange(self, talk: Callable[[BreakingLine, float], object]) -> object:
        """Have ``talk`` use it; what breaks on the way breaks the exchange."""
        return talk(self, time.monotonic() + LONG)

    def send(self, requests: Iterable[bytes], until: float) -> None:
        """Keep what is sent."""
        self.sent += requests

    def awaited(self, until: float, grace: float) -> bool:
        """Report the inbox as not empty, once."""
        if self._replies:
            return True
        threading.Event().wait(0.01)
        return False

    def popped(self, until: float) -> tuple[int, bytes]:
        """Give the first notice, then break."""
        if self._replies:
            return self._replies.pop()
        raise StoreUnreachable("no answer")

    def values(self, keys: Sequence[str], until: float) -> list[bytes]:
        """Give the values of counters that move."""
        self.sent.append(b"")
        return [b"%d" % len(self.sent) for _ in keys]


def test_a_notice_whose_exchange_broke_midway_is_still_shown_to_readers() -> None:
    """What was taken from the inbox before the break is written for readers after it."""
    line, closed = BreakingLine(), threading.Event()
    members = MembersThread(cast(TcpConnection, line), "job/", closed, 1)
    try:
        entry = wire.multi_put([("job/s/a", b"+A")])[9:]  # after how many there are
        until(lambda: any(entry in sent for sent in line.sent), "readers see the entry")
        assert members.leases()["a"].value == b"A"
    finally:
        closed.set()


# ── connections, torch, limits ───────────────────────────────────────────────────────────────────


def test_an_agent_needs_two_connections(hosted: tuple[Store, int]) -> None:
    """One to wait on, one for what is answered at once; none is left after close."""
    first, port = hosted

    def connections() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port == port for one in found)

    before = connections()
    with closing(connect(port)) as store:
        store.enrol("a", b"", 60.0)
        wait = beside(lambda: store.follow(0, LONG))
        store.renew()
        store.members()
        assert first.publish(1, b"one")
        wait()
        assert connections() == before + 2
    until(lambda: connections() == before, "the connections are closed")


def test_ipv6() -> None:
    """On ::1, with brackets in messages."""
    listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    port = listening.getsockname()[1]
    with closing(tcp.host(listening, "job", timeout=20.0)) as host:
        assert host.name == f"TCPStore at [::1]:{port}"
        host.enrol("host", b"", 60.0)
        assert host.await_leadership("host", LONG)
        collect(host, 1, "host")
        with closing(tcp.connect("::1", port, "job", deadline=LONG)) as store:
            store.enrol("a", b"", 60.0)
            assert collect(host, 1, "host") == [Change("a", b"", "put")]


def test_every_address_of_a_name_is_tried() -> None:
    """The host may listen on one of them only."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    with closing(tcp.host(listening, "job", timeout=20.0)):
        tcp.connect("localhost", port, "job", deadline=LONG).close()


def test_torchs_own_client_reads_what_is_written(hosted: tuple[Store, int]) -> None:
    """What is spoken on the wire is what torch speaks, in both directions."""
    from torch.distributed import TCPStore

    first, port = hosted
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    assert first.publish(1, b"one")
    assert client.get("job/b/1") == b"one"
    if hasattr(client, "queue_push"):  # from torch 2.8 on
        client.queue_push("job/in", b"put torch 60\nhere")
        read_until(first, Change("torch", b"here", "put"), "host")


def test_only_the_host_leads(hosted: tuple[Store, int]) -> None:
    """Nobody else reads the changes either."""
    _, port = hosted
    with closing(connect(port)) as store:
        store.enrol("a", b"", 60.0)
        assert not store.await_leadership("a", 0.0)
        assert not store.publish(1, b"")
        with pytest.raises(LeaseLost, match="only the agent that hosts"):
            store.changes("x", 0.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.enrol("a b", b"", 3.0),
        lambda store: store.enrol("a", b"", 0.0),
        lambda store: store.enrol("a", b"x" * 2_000_000, 3.0),
    ],
)
def test_what_does_not_fit_is_refused_here(
    hosted: tuple[Store, int], call: Callable[[Store], None]
) -> None:
    """Not by the host, who would have to drop it in silence."""
    with (
        closing(connect(hosted[1])) as store,
        pytest.raises(ValueError, match=r"cannot be enrolled|more than an entry"),
    ):
        call(store)


def test_a_name_that_is_gone_never_comes_back(hosted: tuple[Store, int]) -> None:
    """Neither for who had it nor for another."""
    first, port = hosted
    collect(first, 1, "host")
    with closing(connect(port)) as store, closing(connect(port)) as other:
        store.enrol("a", b"", 60.0)
        store.withdraw()
        read_until(first, Change("a", None, "left"), "host")
        for one in (store, other):
            with pytest.raises(LeaseLost):
                one.enrol("a", b"", 60.0)


QUIET = """
import socket, sys
from elaunch.store.tcp import client as tcp
store = tcp.host(socket.create_server(("127.0.0.1", 0)), "job", timeout=20.0)
port = int(store.name.rpartition(":")[2])
other = tcp.connect("127.0.0.1", port, "job", deadline=5.0)
assert other.follow(0, 0.3) is None
with socket.create_connection(("127.0.0.1", port)) as noise:
    noise.sendall(bytes(range(256)) * 64)
assert other.latest() is None
other.close()
store.close()
assert "torch" not in sys.modules
"""


def test_a_host_writes_nothing_of_strangers_and_imports_no_torch() -> None:
    """torch takes a second or two, for which the first round would wait."""
    done = warm.run([sys.executable, "-c", QUIET])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LARGE = """
import os, socket, sys
from elaunch.store.protocol import Change
from elaunch.store.tcp import client as tcp
before = dict(os.environ)
listening = socket.create_server(("127.0.0.1", 0))
store = tcp.host(listening, "job", timeout=20.0, agents=tcp.OWN_AGENTS + 1)
assert dict(os.environ) == before and "torch" in sys.modules
port = int(store.name.rpartition(":")[2])
other = tcp.connect("127.0.0.1", port, "job", deadline=20.0)
with socket.create_connection(("127.0.0.1", port)) as noise:
    noise.sendall(bytes(range(256)) * 64)
store.enrol("host", b"", 60.0)
other.enrol("other", b"here", 60.0)
assert store.await_leadership("host", 20.0)
found = []
while len(found) < 2:
    found += store.changes("host", 20.0)
assert Change("other", b"here", "put") in found
assert store.publish(1, b"one")
assert other.follow(0, 20.0).value == b"one"
other.close()
store.close()
"""


def test_a_store_for_very_many_agents_is_torchs() -> None:
    """It serves them beside the interpreter's lock, and writes nothing of strangers either."""
    done = warm.run([sys.executable, "-c", LARGE])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_who_connects_imports_no_torch(process: HostProcess) -> None:
    """It takes most of a second."""
    code = (
        "import sys; from elaunch.store.tcp import client as tcp;"
        f"tcp.connect('127.0.0.1', {process.port}, 'job', deadline=9.0).close();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert process.close() == ""
