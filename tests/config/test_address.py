"""The address that a node gives to the others."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.config import endpoints
from elaunch.config.place import Backend
from elaunch.config.rendezvous import RendezvousSettings, own_address
from tests import netns, programs

ROOT = Path(__file__).parents[3]
ELSEWHERE = "192.0.2.1"

AT_LOCALHOST = """
import socket
from elaunch.config import endpoints
from elaunch.config.rendezvous import own_address
from elaunch.config.rendezvous import RendezvousSettings
for backend in ("c10d", "static"):
    settings = RendezvousSettings(backend, (("localhost", 1),), is_host=False)
    print(backend, own_address(settings) in ("127.0.0.1", "::1"))
print("here", endpoints.is_this_machine("localhost"))
with socket.create_server(("127.0.0.1", 0)) as stranger:
    print((endpoints.why_not_free("localhost", stranger.getsockname()[1]) or "free")[3:9])
"""


def at(host: str, backend: Backend = "c10d", is_host: bool | None = False) -> RendezvousSettings:
    """Return settings with one endpoint."""
    return RendezvousSettings(backend, ((host, 1),), is_host=is_host)


def on_route_to(host: str, port: int) -> str | None:
    """Return the address that a packet to a host would have, as the kernel says."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def own_addresses() -> Iterator[str]:
    """Yield addresses of this machine that others may reach."""
    for target in (ELSEWHERE, "2001:db8::1"):
        found = on_route_to(target, 9)
        if found and not found.startswith("127.") and found != "::1":
            yield found
    for found in endpoints.addresses(socket.gethostname()):
        if not found.startswith("127.") and found != "::1":
            yield found


def test_what_the_user_says_is_taken_as_it_is() -> None:
    """A name stays a name."""
    for local in ("127.0.0.5", "localhost", "::1"):
        assert own_address(replace(at(ELSEWHERE), local_addr=local)) == local


def test_node_0_of_static_has_the_address_that_all_were_told() -> None:
    """MASTER_ADDR is then what --master-addr says, as under torchrun."""
    assert own_address(at("head.invalid", "static", is_host=True)) == "head.invalid"
    assert own_address(at("127.0.0.1", "static", is_host=True)) == "127.0.0.1"


def test_agents_of_one_machine_meet_on_the_loopback_address() -> None:
    """Whichever loopback address the endpoint has."""
    assert own_address(at("localhost", is_host=None)) in ("127.0.0.1", "::1")
    assert own_address(at("127.0.0.1")).startswith("127.")
    assert own_address(at("127.0.0.1", "static")).startswith("127.")


@pytest.mark.skipif(on_route_to("::1", 9) is None, reason="this machine has no IPv6")
def test_ipv6_on_the_loopback_address() -> None:
    """The source address is of the same family."""
    assert own_address(at("::1")) == "::1"


def test_the_route_to_the_endpoint_decides() -> None:
    """A machine with several interfaces has the one that the others see."""
    routed = on_route_to(ELSEWHERE, 1)
    found = own_address(at(ELSEWHERE))
    assert found == (routed or found)
    two = RendezvousSettings("etcd", (("127.0.0.1", 1), (ELSEWHERE, 1)))
    assert own_address(two) == (routed or own_address(two))


def test_etcd_at_localhost_does_not_make_a_node_a_loopback_one() -> None:
    """Each machine may have a member or a proxy of etcd of its own."""
    found = own_address(at("localhost", "etcd"))
    assert found in {*own_addresses(), "127.0.0.1"}
    assert found != "127.0.0.1" or not list(own_addresses())


def test_a_name_that_leads_to_loopback_here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives a host's own name 127.0.1.1; the others know it as an address."""
    known = endpoints.addresses

    def with_debians_line(host: str) -> list[str]:
        return ["127.0.1.1"] if host in ("head", socket.gethostname()) else known(host)

    monkeypatch.setattr(endpoints, "addresses", with_debians_line)
    expected = [each for each in map(on_route_to, (ELSEWHERE, "2001:db8::1"), (9, 9)) if each]
    assert own_address(at("head", is_host=None)) == (expected[0] if expected else "head")
    monkeypatch.setattr(endpoints, "_EVERYWHERE", ())
    assert own_address(at("head", is_host=None)) == "head"
    assert own_address(at("head", "etcd")) == "127.0.0.1"


def test_an_endpoint_that_nobody_knows_yet() -> None:
    """The default route is a good guess; nothing is raised."""
    assert own_address(at("not-up-yet.invalid"))


def test_no_packet_is_sent() -> None:
    """A listener on the endpoint hears nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        own_address(RendezvousSettings("c10d", (("127.0.0.1", listener.getsockname()[1]),)))
        with pytest.raises(BlockingIOError):
            listener.recv(1)


@pytest.mark.slow
@pytest.mark.parametrize("also", ["::ffff:127.0.0.1 localhost", "::1 localhost"])
def test_other_addresses_of_localhost(tmp_path: Path, also: str) -> None:
    """Whatever /etc/hosts says: loopback stays loopback, and a port in use is in use."""
    programs.needed("unshare", "mount")
    netns.needed()
    (tmp_path / "hosts").write_text(f"{also}\n127.0.0.1 localhost\n")
    shell = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", AT_LOCALHOST],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert (done.stdout, done.stderr) == ("c10d True\nstatic True\nhere True\nin use\n", "")
