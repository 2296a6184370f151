"""Hosts by name and address, which mean the machine that asks, and what listens or connects there.

A system with IPv6 shows an IPv4 peer as ``::ffff:a.b.c.d``, and /etc/hosts may give a name such an
address. It is the IPv4 address in another form (RFC 4291, 2.5.5.2), and is taken for that one.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
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


def listen_at(family: int, address: str, port: int) -> socket.socket:
    """Return a socket that listens there, for IPv4 as well at ``::``; raises OSError."""
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:  # whose text has the address, too
        raise OSError(error.errno, os.strerror(error.errno or errno.EIO)) from None


def listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens at all addresses of this machine; raises OSError."""
    try:
        return listen_at(socket.AF_INET6, "::", port)
    except OSError:  # a machine without IPv6
        return listen_at(socket.AF_INET, "0.0.0.0", port)


def keep_alive(sock: socket.socket, idle: int = 20, every: int = 5, probes: int = 6) -> None:
    """Have the kernel notice that the other machine is gone; without more, within a minute.

    It looks after ``idle`` seconds, and ``every`` so many then; ``probes`` without an answer do.
    Where something is under way to it the deadline of the call has to do: TCP_USER_TIMEOUT would
    also end the connection to a rank that computes for long and so does not read.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
