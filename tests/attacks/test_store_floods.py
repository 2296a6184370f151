"""A stranger who fills what the hosting agent keeps, and one who has not the agents' secret.

Under torchrun the store takes what it is sent, 8 MiB for each key, from whoever reaches its port.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import psutil
import pytest

from elaunch.errors import StoreDenied
from elaunch.rendezvous import records
from elaunch.store.protocol import Store
from elaunch.store.tcp import client, host, messages
from elaunch.store.tcp.messages import (
    LONGEST_ENTRY,
    EnrolEntry,
    PutEntry,
    ReadMembers,
    ReadPlan,
    RenewEntry,
    WithdrawEntry,
)
from tests.store.tcp.rig import Client
from tests.store.test_contract import LONG

MIB = 1024 * 1024
KEY = records.key_of(b"a secret of the agents", "job")
OTHER = records.key_of(b"another secret", "job")


def hosting(port: int, key: bytes | None) -> Store:
    """Return a store that is hosted here, of whose job the agent "host" leads."""
    store = client.host(socket.create_server(("127.0.0.1", port)), "job", key=key)
    store.enrol("host", b"", 60.0)
    assert store.await_leadership("host", LONG)
    assert store.publish(1, b"a plan")
    return store


@pytest.fixture
def hosted(port: int) -> Iterator[Store]:
    """Return an open store."""
    with closing(hosting(port, None)) as store:
        yield store


@pytest.fixture
def secret(port: int) -> Iterator[Store]:
    """Return a store whose agents have a secret."""
    with closing(hosting(port, KEY)) as store:
        yield store


def test_entries_are_as_long_as_an_honest_one_may_be(hosted: Store, port: int) -> None:
    """The longest record of an agent fits, nothing longer does. torchrun: 8 MiB."""
    assert LONGEST_ENTRY == records.MAX_AGENT_BYTES
    with closing(Client(port)) as one, closing(Client(port)) as other:
        assert one.ask(EnrolEntry("aa", b"one", 60.0, bytes(LONGEST_ENTRY)))
        with suppress(ConnectionError):  # it does not read it all
            other.send(messages.frame(EnrolEntry("bb", b"other", 60.0, bytes(MIB))))
        assert other.is_ended()
    assert sorted(hosted.members()) == ["aa", "host"]


def test_a_connection_has_one_entry(hosted: Store, port: int) -> None:
    """As an agent has; another one only when that is withdrawn."""
    with closing(Client(port)) as one:
        assert one.ask(EnrolEntry("aa", b"one", 60.0, b""))
        assert not one.ask(EnrolEntry("bb", b"one", 60.0, b""))
        assert not one.ask(PutEntry("host", b"x")) and one.ask(WithdrawEntry("aa"))
        assert one.ask(EnrolEntry("bb", b"one", 60.0, b""))
    assert sorted(hosted.members()) == ["bb", "host"]


def test_entries_are_bounded_altogether(
    hosted: Store, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is much, only short ones are taken, which an agent's is; and all can be read."""
    monkeypatch.setattr(host, "MOST_BYTES", 10 * LONGEST_ENTRY)
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(port))) for _ in range(20)]
        for number, one in enumerate(clients):
            one.ask(EnrolEntry(f"a{number}", b"one", 60.0, bytes(LONGEST_ENTRY)))
        assert len(hosted.members()) == 12
        assert clients[-1].ask(EnrolEntry("honest", b"one", 60.0, bytes(host.SHORT_ENTRY)))
    with closing(client.connect("127.0.0.1", port, "job", deadline=LONG)) as late:
        late.enrol("late", bytes(host.SHORT_ENTRY), 60.0)
        assert len(late.members()) == 14
    assert host.MOST_BYTES + host.MOST_ENTRIES * host.SHORT_ENTRY < messages.LONGEST_ANSWER


def test_a_stranger_that_asks_much_and_reads_nothing(hosted: Store, port: int) -> None:
    """Neither memory nor the leases of others suffer. torchrun: it answers as long as it can."""
    hosted.update(bytes(LONGEST_ENTRY))
    process = psutil.Process()
    with ExitStack() as stack:
        for number in range(100):
            one = stack.enter_context(closing(Client(port)))
            one.ask(EnrolEntry(f"a{number}", b"one", 60.0, bytes(LONGEST_ENTRY)))
        agent = stack.enter_context(
            closing(client.connect("127.0.0.1", port, "job", deadline=LONG))
        )
        agent.enrol("agent", b"", 10.0)
        before = process.memory_info().rss
        greedy = [stack.enter_context(closing(Client(port))) for _ in range(60)]
        for one in greedy:
            one.sock.setblocking(False)
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            for one in greedy:
                try:
                    one.sock.send(messages.frame(ReadMembers()) * 1000)
                except BlockingIOError:
                    continue
                except OSError:  # ended
                    continue
            agent.renew()
            hosted.renew()
        assert process.memory_info().rss - before < 400 * MIB
        assert {"agent", "host"} <= set(hosted.members())


def test_parts_of_requests_are_bounded(
    hosted: Store, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many that begin a request and do not end it, some are ended; an agent goes on."""
    from elaunch.store.tcp import server

    monkeypatch.setattr(server, "MOST_HELD", MIB)
    part = messages.frame(PutEntry("host", bytes(LONGEST_ENTRY)))[:-1]
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(port))) for _ in range(40)]
        agent = stack.enter_context(
            closing(client.connect("127.0.0.1", port, "job", deadline=LONG))
        )
        agent.enrol("agent", b"", 60.0)
        ended = 0
        for one in clients:
            one.send(part)
        for one in clients:
            one.sock.settimeout(LONG if not ended else 0.2)
            try:
                ended += one.sock.recv(1) == b""
            except OSError as error:
                ended += isinstance(error, ConnectionError)
        assert ended >= 20
        agent.renew()


def test_names_of_those_that_have_gone_are_bounded(
    hosted: Store, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are remembered."""
    monkeypatch.setattr(host, "MOST_GONE", 10)
    with closing(Client(port)) as one:
        for number in range(30):
            assert one.ask(EnrolEntry(f"a{number}", b"one", 60.0, b""))
            assert one.ask(WithdrawEntry(f"a{number}"))
        assert not one.ask(EnrolEntry("a29", b"one", 60.0, b""))
        assert one.ask(EnrolEntry("a0", b"one", 60.0, b""))


@pytest.mark.parametrize(
    "request_",
    [
        EnrolEntry("aa", b"one", 60.0, b""),
        PutEntry("host", b"x"),
        RenewEntry("host"),
        WithdrawEntry("host"),
        ReadMembers(),
        ReadPlan(0, 0),
        messages.Prove(bytes(32), bytes(32)),
    ],
    ids=lambda request: type(request).__name__,
)
def test_without_the_secret_nothing_is_served(
    secret: Store, port: int, request_: messages.Request
) -> None:
    """Neither reads nor changes anything. torchrun: whoever reaches the port may do all."""
    with closing(Client(port)) as one:
        if isinstance(request_, messages.Prove):
            assert one.ask(request_) == b""
            request_ = WithdrawEntry("host")
        one.send(messages.frame(request_))
        assert one.is_ended()
    assert set(secret.members()) == {"host"}


def test_a_key_is_asked_for_by_name(secret: Store, port: int) -> None:
    """Of an agent without it, or with another one: what to do is in the message."""
    with closing(client.connect("127.0.0.1", port, "job", deadline=LONG)) as none:
        assert none.shared(b"an offer") == b""
        with pytest.raises(StoreDenied, match="have a secret: give the same --rdzv-secret-file"):
            none.enrol("aa", b"", 60.0)
    with pytest.raises(StoreDenied, match="has another secret"):
        client.connect("127.0.0.1", port, "job", deadline=LONG, key=OTHER)
    assert secret.shared() == b""


def test_a_host_without_the_secret_is_no_host(hosted: Store, port: int) -> None:
    """A stranger that took the port first: the agents do not take its plans."""
    with pytest.raises(StoreDenied, match="has no secret, this one has"):
        client.connect("127.0.0.1", port, "job", deadline=LONG, key=KEY)


def test_who_knows_the_secret_is_served(secret: Store, port: int) -> None:
    """Also over the connection that follows one that broke."""
    with closing(client.connect("127.0.0.1", port, "job", deadline=LONG, key=KEY)) as agent:
        agent.enrol("agent", b"A", 60.0)
        agent._job._line.cut()  # type: ignore[union-attr]
        agent.update(b"B")
        assert agent.latest() is not None
        assert secret.members()["agent"].value == b"B"
    with closing(client.connect("127.0.0.1", port, "job", deadline=LONG)) as late:
        late.prove(KEY)
        assert set(late.members()) == {"host", "agent"}


def test_a_proof_is_of_one_connection(secret: Store, port: int) -> None:
    """What one has sent does not open another."""
    import json

    with closing(Client(port)) as one, closing(Client(port)) as other:
        challenge = json.loads(one.identity)["challenge"]
        nonce = bytes(32)
        request = messages.Prove(nonce, messages.proof(KEY or b"", "client", challenge, nonce))
        assert other.ask(request) == b""
        assert one.ask(request) == messages.proof(KEY or b"", "host", challenge, nonce)
        assert one.ask(RenewEntry("host"))
