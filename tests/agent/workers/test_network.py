"""Which interface gloo and NCCL get, on made-up machines; real ones are in tests/integration."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch import hosts
from elaunch.agent.workers import network
from elaunch.agent.workers.network import StoreEndpoint
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


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NAMES = {"10.0.0.5": "eth0", "fd00::5": "eth0", "192.168.122.1": "virbr0"}


def chosen(
    sysfs: Path, own: str, *others: str, names: dict[str, str] = NAMES, cards: str = "eth0"
) -> dict[str, str]:
    """Return the variables on a machine with these interfaces, of which some are ``cards``."""
    for card in cards.split():
        (sysfs / "class/net" / card / "device").mkdir(parents=True)
    return network.choose(own, others, names, sysfs, (GLOO, NCCL))


@pytest.mark.parametrize("own", ["10.0.0.5", "fd00::5"])
def test_the_interface_of_this_nodes_address(tmp_path: Path, own: str) -> None:
    """A bridge is no other card; NCCL takes a name with = as it is."""
    assert chosen(tmp_path, own, "10.0.0.6") == {GLOO: "eth0", NCCL: "=eth0"}


def test_several_cards_are_left_to_nccl(tmp_path: Path) -> None:
    """Those that have an address: a card of a bond has none."""
    names = {**NAMES, "10.1.0.5": "eth1"}
    assert chosen(tmp_path, "10.0.0.5", names=names, cards="eth0 eth1") == {GLOO: "eth0"}
    assert chosen(tmp_path / "bond", "10.0.0.5", cards="eth0 eth2")[NCCL] == "=eth0"


def test_a_node_that_goes_by_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route to another node's address; names are not resolved, and loopback is no answer."""
    routes = {"10.0.0.6": "10.0.0.5", "10.9.0.1": None}
    monkeypatch.setattr(hosts, "source", lambda address: routes[address])
    assert chosen(tmp_path, "node0", "node1", "10.9.0.1", "10.0.0.6")[GLOO] == "eth0"
    for others in (["node1"], ["10.9.0.1"], ["127.0.0.1"]):
        assert chosen(tmp_path / others[0], "127.0.0.1", *others) == {}


def test_what_is_set_stays() -> None:
    """Also an empty value, which leaves the choice to the library."""
    assert network.interface_variables("10.0.0.5", [], {GLOO: "ib0", NCCL: ""}) == {}


def test_the_interfaces_of_this_machine() -> None:
    """None of them is loopback."""
    found = network.interfaces()
    assert "127.0.0.1" not in found and "lo" not in found.values()
    assert all(name in Path("/proc/net/dev").read_text() for name in found.values())
