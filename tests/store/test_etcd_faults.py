"""What an agent's store does when etcd does it late, forgets, or writes no more; with real etcd."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from elaunch.errors import StoreClosed, StoreFull, StoreReplaced, StoreUnreachable
from elaunch.store.etcd import client, connection
from elaunch.store.etcd.client import EtcdStore
from elaunch.store.etcd.cluster import EtcdCluster, RevisionHistory
from elaunch.store.protocol import Post
from tests.etcdserver import Cluster, Member
from tests.etcdserver import etcd as serve

pytestmark = pytest.mark.slow

LONG = 30.0
"""Seconds that something may take on a busy machine before the test gives it up."""


@pytest.fixture
def opened() -> Iterator[Callable[..., EtcdStore]]:
    """Open stores that are closed at the end: ``opened(place)``."""
    with ExitStack() as stack:

        def connect(place: EtcdCluster, history: RevisionHistory | None = None) -> EtcdStore:
            store = client.connect(place, "job", deadline=LONG, history=history)
            assert isinstance(store, EtcdStore)
            stack.callback(store.close)
            return store

        yield connect


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Cluster]:
    """One member."""
    with serve(tmp_path / "etcd") as cluster:
        yield cluster


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; etcd may be out of reach meanwhile."""
    end = time.monotonic() + LONG
    while True:
        try:
            if condition():
                return
        except StoreUnreachable:
            pass
        assert time.monotonic() < end, what
        time.sleep(0.02)


def until_handled(member: Member) -> None:
    """Wait until a member has done all that it was sent, also for who has given up on it."""
    host, port = member.endpoint

    def look() -> bool:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=LONG) as page:
            text = page.read().decode()
        counts = {
            what: sum(
                map(float, re.findall(rf"^grpc_server_{what}_total{{.*Txn.*}} (\d+)", text, re.M))
            )
            for what in ("started", "handled")
        }
        return counts["started"] == counts["handled"] > 0

    until(look, "all is handled")


# ── what is applied late ─────────────────────────────────────────────────────────────────────────

AGENTS = 8
"""A member that wakes does about half of what was given up meanwhile."""


def test_a_write_that_is_applied_late_replaces_nothing_newer(
    tmp_path: Path, opened: Callable[..., EtcdStore]
) -> None:
    """A follower is frozen; agents that hang on it update elsewhere, twice; then it wakes."""
    with serve(tmp_path / "etcd", 3) as cluster:
        leader = cluster.leader()
        frozen = next(member for member in cluster.members if member is not leader)
        stores: list[EtcdStore] = []
        while len(stores) < AGENTS:
            store = opened(cluster.place())
            if cluster.member_at(store.member) is frozen:
                store.enrol(f"n{len(stores)}", b"ready", 60.0)
                stores.append(store)
        frozen.freeze()

        def update_twice(store: EtcdStore) -> None:
            for value in (b"running, 7", b"finished, 8"):
                while True:  # as an agent does: a busy machine's etcd may not answer in time
                    with contextlib.suppress(StoreUnreachable):
                        store.update(value)
                        break
                    assert time.monotonic() < until

        until = time.monotonic() + LONG
        with ThreadPoolExecutor(AGENTS) as pool:
            list(pool.map(update_twice, stores))
        frozen.thaw()
        until_handled(frozen)
        reader = opened(cluster.place())
        assert [lease.value for lease in reader.members().values()] == [b"finished, 8"] * AGENTS
        for store in stores:
            store.update(b"again")
        assert [lease.value for lease in reader.members().values()] == [b"again"] * AGENTS


def test_an_entry_that_is_written_late_is_taken_back(
    one: Cluster, opened: Callable[..., EtcdStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to enrol is lost: who withdraws then leaves no ghost that others wait for."""
    stores = [opened(one.place()) for _ in range(AGENTS)]
    member = one.members[0]
    granted = threading.Barrier(AGENTS, action=member.freeze)

    def enrol(number: int) -> None:
        store, txns = stores[number], stores[number]._own._txns
        grant = txns.grant

        def grant_and_wait(seconds: int) -> tuple[int, int]:
            lease = grant(seconds)
            granted.wait(LONG)
            return lease

        monkeypatch.setattr(txns, "grant", grant_and_wait)
        with pytest.raises(StoreUnreachable):
            store.enrol(f"ghost{number}", b"ready", 60.0)

    with ThreadPoolExecutor(AGENTS) as pool:
        list(pool.map(enrol, range(AGENTS)))
    member.thaw()
    for store in stores:
        until(lambda store=store: store.withdraw() is None, "it is out of reach")  # type: ignore[misc]
    until_handled(member)
    assert dict(stores[0].members()) == {}


# ── what it forgets ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["wiped", "restored"])
def test_an_etcd_that_has_lost_its_memory_is_another_store(
    tmp_path: Path, one: Cluster, opened: Callable[..., EtcdStore], how: str
) -> None:
    """Whoever renews, waits or reads hears so; who was not connected meanwhile does, once."""
    first, second = opened(one.place()), opened(one.place())
    first.enrol("first", b"", 60.0)
    second.enrol("second", b"", 60.0)
    assert first.await_leadership("first", LONG)
    assert first.publish(1, b"one")
    assert second.follow(0, LONG) == Post(1, b"one")
    one.save(tmp_path / "snapshot")
    assert first.publish(2, b"two") and first.publish(3, b"three")
    assert second.follow(2, LONG) == Post(3, b"three")
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(until_replaced, lambda: first.changes("first", 60.0)),
            pool.submit(until_replaced, lambda: second.follow(3, 60.0)),
            pool.submit(until_replaced, lambda: second.await_leadership("second", 60.0)),
        ]
        history = RevisionHistory()
        opened(one.place(), history).close()
        one.wipe() if how == "wiped" else one.restore(tmp_path / "snapshot")
        for call in (first.renew, second.renew, first.latest, lambda: second.update(b"")):
            assert "has lost its memory" in until_replaced(call)
        for wait in waits:
            assert "its revision is" in wait.result(LONG)
    with pytest.raises(StoreReplaced):
        opened(one.place(), history)
    again = opened(one.place(), history)
    again.enrol("again", b"", 60.0)
    assert again.latest() == (None if how == "wiped" else Post(1, b"one"))


def until_replaced(call: Callable[[], object]) -> str:
    """Call until the store is another one; return what is said of it."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        try:
            call()
        except StoreReplaced as error:
            return str(error)
        except StoreUnreachable:
            pass
    raise AssertionError("the store was not found to be another one")


def test_a_member_that_is_behind_has_lost_nothing(
    tmp_path: Path, opened: Callable[..., EtcdStore]
) -> None:
    """Neither who renews there nor who begins to wait there takes it for another etcd."""
    with serve(tmp_path / "etcd", 3) as cluster:
        leader = cluster.leader()
        behind = next(member for member in cluster.members if member is not leader)
        store = opened(cluster.place())
        store.enrol("first", b"", 60.0)
        assert store.await_leadership("first", LONG)
        assert store.follow(0, 0.0) is None
        for number in range(4):
            other = next(member for member in cluster.members if member is not behind)
            behind.freeze()
            for _ in range(5):
                until(lambda: store.update(b"%d" % number) is None, "it can be reached")  # noqa: B023
            behind.thaw()
            other.freeze()
            until(lambda: store.renew() is None, "it is renewed")
            other.thaw()
            behind = other
        assert store.publish(1, b"one")
        assert store.follow(0, LONG) == Post(1, b"one")


# ── what it does not take ────────────────────────────────────────────────────────────────────────


def test_an_etcd_that_is_full_says_so(tmp_path: Path, opened: Callable[..., EtcdStore]) -> None:
    """Entries live on, no write is done, an agent that leaves is gone; then all works again."""
    quota = ["--quota-backend-bytes", "200000"]
    with serve(tmp_path / "etcd", options=quota) as cluster:
        first, second = opened(cluster.place()), opened(cluster.place())
        first.enrol("first", b"ready", 60.0)
        second.enrol("second", b"ready", 60.0)
        assert first.await_leadership("first", LONG)
        cluster.fill()
        for call in (
            lambda: first.update(b"failed"),
            lambda: first.publish(1, b"plan"),
            lambda: second.await_leadership("second", LONG),
            lambda: opened(cluster.place()).enrol("third", b"", 60.0),
        ):
            with pytest.raises(StoreFull, match=r"takes no more writes \(.*NOSPACE\): free space"):
                call()
        first.renew()
        second.withdraw()
        assert {name: lease.value for name, lease in first.members().items()} == {"first": b"ready"}
        cluster.drain()
        first.update(b"failed")
        assert first.publish(1, b"plan")


# ── connections that are closed ──────────────────────────────────────────────────────────────────

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first frame of an HTTP/2 server: with it, a connection has come about."""


def test_closing_waits_for_nobody(one: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """The thread of the connections may be held up, by a machine that swaps for example."""
    store = opened(one.place())
    store.enrol("n0", b"", 60.0)
    connection._the_loop().soon(time.sleep, 3.0)
    store.close()
    with pytest.raises(StoreClosed):
        store.renew()


def test_a_connection_that_comes_about_too_late_is_closed() -> None:
    """Packets are lost while agents connect, time and again: no descriptor stays behind."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        address = server.getsockname()
        stack.enter_context(socket.create_connection(address))  # as many as may wait to be accepted
        place = EtcdCluster((address,), call_timeout=0.2)
        for _ in range(3):
            with pytest.raises(StoreUnreachable):
                client.connect(place, "job", deadline=0.2)
        server.listen(16)
        server.settimeout(4.0)  # longer than it takes until a lost packet is sent again
        accepted = []
        with contextlib.suppress(TimeoutError):
            while True:
                accepted.append(stack.enter_context(server.accept()[0]))
                if len(accepted) > 1:  # the first is our own
                    accepted[-1].sendall(SETTINGS)
        assert len(accepted) > 1
        for connection in accepted[1:]:
            connection.settimeout(LONG)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass
