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
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import psutil
import pytest

from elaunch.errors import LeaseLost, StoreClosed, StoreReplaced, StoreUnreachable
from elaunch.store.protocol import Change, Post, Store
from elaunch.store.tcp import client as tcp
from elaunch.store.tcp import wire
from elaunch.store.tcp.agentconnection import SharedConnection
from elaunch.store.tcp.messages import EnrolEntry, Request
from elaunch.wire.local import is_readable
from tests import warm
from tests.launching import free_port, freeze
from tests.store.test_contract import LONG, beside, collect, read_until, until

pytestmark = pytest.mark.slow

HOST = """
import socket, sys
from elaunch.store.tcp import client as tcp
listening = socket.create_server(("127.0.0.1", 0))
store = tcp.host(listening, "job")
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
    with closing(tcp.host(listening, "job")) as store:
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
        with closing(tcp.host(listening, "job")):
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
    """A request for each of two records; two plans are sent unasked."""
    first, port = hosted
    send, read = wire.Connection.send, wire.Connection.read
    sent: list[int] = []
    received: list[int] = []

    def counting_send(line: wire.Connection, requests: Iterable[bytes], until: float) -> None:
        frames = list(requests)
        sent.extend(map(len, frames))
        send(line, frames, until)

    def counting_read(line: wire.Connection, count: int, until: float) -> bytes:
        received.append(count)
        return read(line, count, until)

    monkeypatch.setattr(wire.Connection, "send", counting_send)
    monkeypatch.setattr(wire.Connection, "read", counting_read)
    costs = []
    with closing(connect(port)) as store:
        store.enrol("a", b"1", 60.0)
        assert store.follow(0, 0.0) is None
        for version, nodes in enumerate((b"opens it", bytes(9), bytes(200_000)), 1):
            before = 3 * version - 3
            assert first.publish(before + 1, b"begins", nodes)
            assert store.follow(before, LONG) == Post(before + 1, b"begins", nodes)
            sent.clear()
            received.clear()
            for later in (before + 2, before + 3):
                assert first.publish(later, b"a plan", nodes)
                assert store.follow(later - 1, LONG) == Post(later, b"a plan", nodes)
                store.update(b"a record")
            costs.append((len(sent), sum(sent) + sum(received)))
    assert costs[0] == costs[1] == costs[2]
    assert costs[0][0] == 2 and costs[0][1] < 150


def test_heartbeats_are_a_few_bytes(
    hosted: tuple[Store, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another thread that waits for the plan, too; it needs no request for that."""
    _, port = hosted
    send = wire.Connection.send
    sent: list[bytes] = []

    def counting_send(line: wire.Connection, requests: Iterable[bytes], until: float) -> None:
        frames = list(requests)
        sent.extend(frames)
        send(line, frames, until)

    with closing(connect(port)) as store:
        store.enrol("abcdef", b"", 60.0)
        assert store.follow(0, 0.0) is None
        wait = beside(lambda: store.follow(0, LONG))
        monkeypatch.setattr(wire.Connection, "send", counting_send)
        for _ in range(20):
            store.renew()
        assert len(sent) == 20 and max(map(len, sent)) < 16
        hosted[0].publish(1, b"one")
        assert wait() == Post(1, b"one")


def test_an_agent_that_has_missed_many_posts_reads_the_newest(hosted: tuple[Store, int]) -> None:
    """At once, and not each of them; it was frozen between two waits, say."""
    first, port = hosted
    with closing(connect(port)) as store, closing(connect(port)) as other:
        assert first.publish(1, b"1")
        assert store.follow(0, LONG) == other.follow(0, LONG) == Post(1, b"1")
        for version in range(2, 101):
            assert first.publish(version, b"%d" % version)
        while (other.follow(1, LONG) or Post(0, b"")).version < 100:
            pass
        seen = [1]
        while seen[-1] < 100:
            post = store.follow(seen[-1], LONG)
            assert post is not None and post.value == b"%d" % post.version
            seen.append(post.version)
        assert len(seen) <= 3


def test_an_enrolment_whose_answer_was_lost_is_known(
    hosted: tuple[Store, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again, over another connection, by the same agent: the entry is its own."""
    first, port = hosted
    collect(first, 1, "host")
    ask = SharedConnection.ask
    lost = [ConnectionResetError("cut off")]

    def losing(line: SharedConnection, request: Request, until: float) -> object:
        answer = ask(line, request, until)
        if lost and isinstance(request, EnrolEntry):
            raise lost.pop()
        return answer

    monkeypatch.setattr(SharedConnection, "ask", losing)
    with closing(connect(port)) as store, closing(connect(port)) as other:
        store.enrol("a", b"A", 60.0)
        assert not lost
        with pytest.raises(LeaseLost):
            other.enrol("a", b"B", 60.0)
        store.update(b"C")
        found = read_until(first, Change("a", b"C", "put"), "host")
        assert {change.value for change in found} <= {b"A", b"C"}


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
    assert (said["elaunch"], said["run_id"]) == (tcp.PROTOCOL, "job")


def test_another_version_of_elaunch_is_named(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agents could not be understood; every node needs the same one."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    with monkeypatch.context() as older:
        older.setattr(tcp, "PROTOCOL", 1)
        store = tcp.host(listening, "job")
    with closing(store), pytest.raises(StoreUnreachable, match="another version of elaunch hosts"):
        connect(port, deadline=0.5)


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
    with closing(tcp.host(socket.create_server(("127.0.0.1", port)), "job")) as host:
        store = early()
        assert isinstance(store, type(host))
        store.close()


# ── connections, torch, limits ───────────────────────────────────────────────────────────────────


def test_an_agent_needs_one_connection(hosted: tuple[Store, int]) -> None:
    """To wait for the plan, and for what is answered at once; none is left after close."""
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
        assert connections() == before + 1
    until(lambda: connections() == before, "the connections are closed")


def test_ipv6() -> None:
    """On ::1, with brackets in messages."""
    listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    port = listening.getsockname()[1]
    with closing(tcp.host(listening, "job")) as host:
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
    with closing(tcp.host(listening, "job")):
        tcp.connect("localhost", port, "job", deadline=LONG).close()


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
store = tcp.host(socket.create_server(("127.0.0.1", 0)), "job")
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
