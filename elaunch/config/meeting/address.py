"""The address that a node sends to the others: they find its workers' store by it.

=====================================  ======================================================
what is known                          the address
=====================================  ======================================================
--local-addr                           that, as it was given
static, and this node hosts            the endpoint's host, as it was given (as under torchrun)
a route to an endpoint                 the address that this machine has on that route
an endpoint that is this machine by    the address of the host's name, or that of the route to
a loopback address (Debian gives a     everywhere; or the endpoint's own name, which the other
host's own name 127.0.1.1)             nodes know
etcd at localhost                      the same, but for the endpoint's name
c10d or static at localhost            the loopback address: all agents are on this machine
=====================================  ======================================================

No packet is sent: a UDP socket that is connected has the source address that the kernel would use.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

from elaunch import hosts
from elaunch.config.meeting import topology
from elaunch.config.meeting.rendezvous import RendezvousSettings
from elaunch.config.meeting.topology import LOOPBACK

# Addresses for documentation, never anybody's: the route to them is the default route.
_EVERYWHERE = ("192.0.2.1", "2001:db8::1")


def own_address(rendezvous: RendezvousSettings) -> str:
    """Return the name or address at which the other nodes reach this machine.

    Names of endpoints are resolved, so call it when the store was reached, not before.
    """
    if rendezvous.local_addr:
        return rendezvous.local_addr
    if rendezvous.backend == "static" and rendezvous.is_host:
        return rendezvous.endpoints[0][0]
    sources = [source for host, _ in rendezvous.endpoints for source in _sources(host)]
    for source in sources:
        if not hosts.is_loopback(source):
            return source
    host = rendezvous.endpoints[0][0]
    local = hosts.is_loopback(host)
    if local and rendezvous.backend != "etcd":
        return sources[0] if sources else LOOPBACK
    for source in (*_of_own_name(), *_of_default_route()):
        return source
    return LOOPBACK if local or rendezvous.backend == "etcd" else host


def _sources(host: str) -> Iterator[str]:
    """Yield this machine's address on the route to each address of a host."""
    for address in topology.addresses(host):
        source = _source(address)
        if source:
            yield source


def _source(address: str) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = hosts.plain(str(probe.getsockname()[0]))
    except OSError:  # no route, or no IPv6 at all
        return None
    return None if ipaddress.ip_address(source.partition("%")[0]).is_unspecified else source


def _of_own_name() -> Iterator[str]:
    for address in topology.addresses(socket.gethostname()):
        if not hosts.is_loopback(address) and topology.is_this_machine(address):
            yield address


def _of_default_route() -> Iterator[str]:
    for address in _EVERYWHERE:
        source = _source(address)
        if source and not hosts.is_loopback(source):
            yield source
