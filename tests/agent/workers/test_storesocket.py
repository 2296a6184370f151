"""The listening socket of the workers' store, with real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from elaunch.agent.workers.storesocket import StoreEndpoint
from elaunch.errors import UsageError
from tests.launching import free_port


def connect(host: str, port: int) -> None:
    """Connect as a worker would, and hang up."""
    socket.create_connection((host, port), timeout=60).close()


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """Return a socket of a stranger that listens on a port."""
    sock = socket.create_server(("127.0.0.1", 0))
    yield sock
    sock.close()


def test_without_a_port_each_round_has_its_own() -> None:
    """Workers can connect at once, before anybody accepts."""
    endpoint = StoreEndpoint(None, None)
    try:
        ports = []
        for _ in range(3):
            kept = endpoint.open()
            assert endpoint.open() == kept, "nobody was told this port yet"
            ports.append(endpoint.port)
            connect(endpoint.host, endpoint.port)
            endpoint.note_use()
    finally:
        endpoint.close()
    assert endpoint.host == "127.0.0.1"
    assert len(set(ports)) > 1
    assert not endpoint.fixed


def test_a_port_that_was_given_stays_and_its_socket_too() -> None:
    """Nobody can take it between two rounds."""
    port = free_port()
    endpoint = StoreEndpoint("127.0.0.1", port)
    try:
        first = endpoint.open()
        assert endpoint.open() == first
        assert (endpoint.fixed, endpoint.port) == (True, port)
        connect("127.0.0.1", port)
        with pytest.raises(OSError), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", port))
    finally:
        endpoint.close()


def test_the_copy_of_another_process_outlives_it() -> None:
    """The store host has one; the agent may close its own."""
    endpoint = StoreEndpoint(None, None)
    copy = os.dup(endpoint.open())
    endpoint.close()
    endpoint.close()
    connect(endpoint.host, endpoint.port)
    os.close(copy)
    with pytest.raises(ConnectionRefusedError):
        connect(endpoint.host, endpoint.port)


def test_the_socket_is_not_inherited() -> None:
    """A program that a worker starts must not hold the port."""
    endpoint = StoreEndpoint(None, None)
    assert not os.get_inheritable(endpoint.open())
    endpoint.close()


def test_a_port_in_use_is_a_usage_error(taken: socket.socket) -> None:
    """It names the address, the reason and the fix."""
    port = taken.getsockname()[1]
    with pytest.raises(
        UsageError, match=rf"127\.0\.0\.1 port {port}: .*in use by process.*--master-port"
    ):
        StoreEndpoint("127.0.0.1", port).open()


def test_a_name_that_cannot_be_resolved_is_a_usage_error() -> None:
    """Names below .invalid never can be."""
    with pytest.raises(UsageError, match=r"--master-addr nowhere\.invalid"):
        StoreEndpoint("nowhere.invalid", None).open()


def test_a_name_of_this_machine() -> None:
    """Workers are told the name, not the address that it has."""
    endpoint = StoreEndpoint("localhost", None)
    endpoint.open()
    assert endpoint.host == "localhost"
    connect("localhost", endpoint.port)
    endpoint.close()


def test_an_address_that_no_interface_has() -> None:
    """A service's or a translated one: listen on all, in the hope that it leads here."""
    endpoint = StoreEndpoint("192.0.2.1", None)  # reserved for documentation
    endpoint.open()
    connect("127.0.0.1", endpoint.port)
    endpoint.close()
