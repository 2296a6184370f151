"""Which interface gloo and NCCL get, on made-up machines; real ones are in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch import hosts
from elaunch.agent.workers import interface

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NAMES = {"10.0.0.5": "eth0", "fd00::5": "eth0", "192.168.122.1": "virbr0"}


def chosen(
    sysfs: Path, own: str, *others: str, names: dict[str, str] = NAMES, cards: str = "eth0"
) -> dict[str, str]:
    """Return the variables on a machine with these interfaces, of which some are ``cards``."""
    for card in cards.split():
        (sysfs / "class/net" / card / "device").mkdir(parents=True)
    return interface.choose(own, others, names, sysfs, (GLOO, NCCL))


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
    assert interface.variables("10.0.0.5", [], {GLOO: "ib0", NCCL: ""}) == {}


def test_the_interfaces_of_this_machine() -> None:
    """None of them is loopback."""
    found = interface.interfaces()
    assert "127.0.0.1" not in found and "lo" not in found.values()
    assert all(name in Path("/proc/net/dev").read_text() for name in found.values())
