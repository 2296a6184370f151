"""Hosts by name and by address: which mean the machine that asks, and where it is on the way there.

A system with IPv6 shows an IPv4 peer as ``::ffff:a.b.c.d``, and /etc/hosts may give a name such an
address. It is the IPv4 address in another form (RFC 4291, 2.5.5.2), and is taken for that one.
"""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def plain(address: str) -> str:
    """Return an address as text, an IPv4-mapped IPv6 address as the IPv4 address that it maps.

    A scope (``fe80::1%eth0``) stays; so does what is no address.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped) if mapped else address


def is_loopback(host: str) -> bool:
    """Return whether a host is by its very name or address the machine that asks."""
    if host.rstrip(".") in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(plain(host).partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def source(address: str) -> str | None:
    """Return this machine's address on the route to another one; no packet is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            found = plain(str(probe.getsockname()[0]))
    except OSError:  # no route, or no IPv6 at all
        return None
    return None if ipaddress.ip_address(found.partition("%")[0]).is_unspecified else found
