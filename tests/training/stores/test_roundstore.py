"""elaunch.training.stores.roundstore: the round's TCPStore, against torch's own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from elaunch.errors import CollectiveTimeout, ContextError, PeerLost
from elaunch.store.tcp.wire import Connection
from elaunch.training.stores.roundstore import RoundStore, StoreConnection
from tests.launching import free_port
from tests.training.rankrig import PATIENCE, StoreHost


@pytest.fixture(scope="module", params=[True, False], ids=["libuv", "plain"])
def host(request: pytest.FixtureRequest) -> Iterator[StoreHost]:
    """One store for all tests of this module; one without libuv, as with torch before 2.8."""
    yield StoreHost(request.param)


def soon() -> float:
    """Return a deadline that is met unless something is wrong."""
    return time.monotonic() + PATIENCE


@pytest.fixture
def line(host: StoreHost, request: pytest.FixtureRequest) -> Iterator[StoreConnection]:
    """A connection to it."""
    store = RoundStore(host.place(0, 2, job=request.node.name))
    yield store.connect(soon())
    store.close()


def test_every_operation_does_what_it_says(line: StoreConnection) -> None:
    """On a real TCPStore."""
    assert line.get("k", soon()) == b""
    line.put("k", b"v", soon())
    assert line.get("k", soon()) == b"v"
    assert line.multi_get(["none", "k", "none"], soon()) == [b"", b"v", b""]
    assert [line.add("n", 2, soon()), line.add("n", 3, soon())] == [2, 5]
    assert line.put_first("c", b"first", soon()) == b"first"
    assert line.put_first("c", b"second", soon()) == b"first"
    assert line.wait("k", soon())
    assert not line.wait("never", time.monotonic() + 0.05)
    assert not line.wait("never", time.monotonic() - 1)
    assert line.get("k", soon()) == b"v"
    assert line.local_addr == "127.0.0.1"


def test_values_are_read_in_one_exchange(
    line: StoreConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are there or not, and reading leaves nothing in the store."""
    sent: list[bytes] = []
    send = Connection.send

    def counted(connection: Connection, requests: Iterable[bytes], until: float) -> None:
        sent.append(b"".join(requests))
        send(connection, [sent[-1]], until)

    line.put("there", b"v", soon())
    monkeypatch.setattr(Connection, "send", counted)
    assert line.multi_get(["there", "never set"], soon()) == [b"v", b""]
    assert line.get("never set", soon()) == b""
    assert len(sent) == 2
    assert not line.wait("never set", time.monotonic() + 0.05)


def test_a_first_value_is_waited_for(host: StoreHost) -> None:
    """Without libuv TCPStore wakes nobody for what it compares."""
    stores = [RoundStore(host.place(rank, 2, job="first")) for rank in range(2)]
    waiting, other = (store.connect(soon()) for store in stores)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(waiting.wait, "c", time.monotonic() + 5.0)
        for _ in range(100):
            other.add("n", 1, soon())  # meanwhile the other one has begun to wait
        other.put_first("c", b"v", soon())
        assert found.result(PATIENCE)
    for store in stores:
        store.close()


def test_keys_have_a_room_of_their_own(host: StoreHost) -> None:
    """Of the job, the round, and the context: in whichever process of a rank it is."""
    place = host.place(1, 2, job="rooms")
    stores = [RoundStore(place), RoundStore(place), RoundStore(place._replace(scope="rooms/1"))]
    for store in stores:
        first, second = store.connect(soon()), store.connect(soon())
        first.put("k", store.prefix.encode(), soon())
        assert first.get("k", soon()) == second.get("k", soon()) == store.prefix.encode()
    assert [s.prefix for s in stores] == [
        "elaunch/rooms/0/0/", "elaunch/rooms/0/1/", "elaunch/rooms/1/0/"
    ]  # fmt: skip
    assert host.store.get("elaunch/rooms/0/1/k") == b"elaunch/rooms/0/1/"
    other = RoundStore(host.place(0, 2, job="rooms"))
    other.connect(soon())
    assert other.prefix == "elaunch/rooms/0/0/"
    for store in (*stores, other):
        store.close()


def test_a_host_that_starts_later_is_waited_for() -> None:
    """The workers of other nodes may be quicker."""
    from torch.distributed import TCPStore

    port = free_port()
    place = StoreHost.place(_Nobody(port), 0, 2)._replace(hosts_store=False)  # type: ignore[arg-type]
    kept: list[object] = []

    def start() -> None:
        kept.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    timer = threading.Timer(0.3, start)
    timer.start()
    line = RoundStore(place).connect(soon())
    assert line.add("n", 1, soon()) == 1
    timer.join()


class _Nobody:
    def __init__(self, port: int) -> None:
        self.port = port


def test_without_a_host_the_error_names_the_address_and_who_is_to_host() -> None:
    """At the deadline."""
    port = free_port()
    place = StoreHost.place(_Nobody(port), 1, 2)  # type: ignore[arg-type]
    with pytest.raises(CollectiveTimeout, match=rf"127.0.0.1:{port} \(rank 0 .* refused"):
        RoundStore(place._replace(hosts_store=True)).connect(time.monotonic() + 0.2)


def test_what_is_no_store_is_said_to_be_none() -> None:
    """At once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-x\r\n")).start()
        place = StoreHost.place(_Nobody(server.getsockname()[1]), 1, 2)  # type: ignore[arg-type]
        with pytest.raises(PeerLost, match="no TCPStore answers"):
            RoundStore(place).connect(soon())


def test_rank_0_hosts_it_where_nobody_does_and_shares_it_with_torch() -> None:
    """``init_process_group("env://")`` in the same process takes the same port."""
    from torch.distributed import TCPStore

    port = free_port()
    zero, one = (
        RoundStore(StoreHost.place(_Nobody(port), rank, 2)._replace(hosts_store=True))  # type: ignore[arg-type]
        for rank in range(2)
    )
    lines = [zero.connect(soon()), one.connect(soon())]
    lines[0].put("k", b"v", soon())
    assert lines[0].get("k", soon()) == lines[1].get("k", soon()) == b"v"
    theirs = TCPStore(
        "127.0.0.1", port, None, True, timedelta(seconds=60), multi_tenant=True,
        wait_for_workers=False,
    )  # fmt: skip
    assert theirs.get("elaunch/job/0/0/k") == b"v"
    one.close()
    zero.close()
    theirs.set("still", "there")


def test_a_port_that_is_taken_is_named(host: StoreHost) -> None:
    """With what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = StoreHost.place(_Nobody(taken.getsockname()[1]), 0, 2)  # type: ignore[arg-type]
        with pytest.raises(PeerLost, match=r"cannot host .*MASTER_PORT"):
            RoundStore(place._replace(hosts_store=True)).connect(soon())


def test_closing_wakes_whoever_waits(host: StoreHost) -> None:
    """And nothing is opened afterwards."""
    store = RoundStore(host.place(0, 2, job="closing"))
    line = store.connect(soon())
    threading.Timer(0.2, store.close).start()
    with pytest.raises(PeerLost, match=f"127.0.0.1:{host.port} is lost"):
        line.wait("never", soon())
    with pytest.raises(ContextError, match="closed"):
        store.connect(soon())
    with pytest.raises(PeerLost):
        line.get("k", soon())


def test_a_store_that_freezes_is_noticed(host: StoreHost) -> None:
    """At the deadline of the call."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def freeze() -> None:
            sock, _ = server.accept()
            sock.sendall(sock.recv(100)[-4:])  # the ping's answer
            sock.recv(1000)
            done.wait(PATIENCE)

        done = threading.Event()
        threading.Thread(target=freeze, daemon=True).start()
        place = StoreHost.place(_Nobody(server.getsockname()[1]), 1, 2)  # type: ignore[arg-type]
        with pytest.raises(CollectiveTimeout, match="does not answer"):
            RoundStore(place).connect(time.monotonic() + 0.3)
        done.set()


def test_a_fork_has_none_of_the_connections(host: StoreHost) -> None:
    """Nor can it open one."""
    store = RoundStore(host.place(0, 2, job="forked"))
    line = store.connect(soon())
    read, write = os.pipe()
    if os.fork() == 0:
        problems = []
        for use in (lambda: line.get("k", soon()), lambda: store.connect(soon())):
            try:
                use()
            except (PeerLost, ContextError) as error:
                problems.append(type(error).__name__)
        os.write(write, ",".join(problems).encode())
        os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"PeerLost,ContextError"
    os.wait()
    os.close(read)
    line.put("k", b"v", soon())
    assert line.get("k", soon()) == b"v"
    store.close()
