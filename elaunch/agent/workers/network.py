"""The network of a round's workers: the socket of their store, and the interface to other nodes.

A round's TCPStore listens on a socket that the agent binds and sends to the store host: a port that
is bound cannot be taken by another process between its choice and its use. Without
``--master-port`` each round gets a new one; with it, one socket is kept for all rounds, since
workers of every round get that port. In a job of several nodes every agent keeps a socket at hand
and publishes its port: the next round's first node may be any of them.

Left to itself, gloo takes the interface that has the address of the host's name, which is loopback
on many machines, and NCCL every one but lo and docker's, bridges of virtual machines among them.
The agent knows better: the address that it gives to the others is on the interface with the route
to them. NCCL may use several network cards at once; where the machine has another one that has an
address, it is left to choose.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from elaunch import env, hosts
from elaunch.config import endpoints
from elaunch.errors import UsageError
from elaunch.hosts import LOOPBACK, is_loopback


class StoreEndpoint:
    """Owns the listening socket; ``host`` and ``port`` are what the workers get.

    ``fixed`` says that the port is the user's and stays the same in all rounds. ``for_nodes``: the
    workers of other nodes connect, too.
    """

    def __init__(self, host: str | None, port: int | None, for_nodes: bool = False) -> None:
        self.host = host or LOOPBACK
        self.port = port or 0
        self.fixed = bool(port)
        self._sock: socket.socket | None = None
        self._used = False
        self._listen = listen_for_nodes if for_nodes else listen

    def open(self) -> int:
        """Return the listening socket's file descriptor for the next round.

        The descriptor stays this object's. Raises UsageError when the address cannot be bound.
        """
        if self._sock is not None and (self.fixed or not self._used):
            return self._sock.fileno()
        self.close()
        self._used = False
        self._sock = self._listen_or_refuse(self.port if self.fixed else 0)
        self.port = self._sock.getsockname()[1]
        return self._sock.fileno()

    def _listen_or_refuse(self, port: int) -> socket.socket:
        try:
            return self._listen(self.host, port)
        except socket.gaierror as error:
            raise UsageError(
                f"--master-addr {self.host}: the name cannot be resolved ({error.strerror}); give "
                "an address of this machine",
                code="E-HOST-NAME",
            ) from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            where = f"cannot listen on {self.host} port {port}"
            if error.errno == errno.EADDRINUSE:
                reason = f"it {endpoints.why_not_free(self.host, port) or reason}"
            also = " (only one agent has --node-rank 0)" if self._listen is listen_for_nodes else ""
            raise UsageError(
                f"{where}: {reason}{also}; choose another --master-port", code="E-PORT-IN-USE"
            ) from error

    def note_use(self) -> None:
        """Note that a round's workers have got this port: the next ``open`` binds another."""
        self._used = True

    def close(self) -> None:
        """Close the agent's copy of the socket; the store host has its own."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def listen_for_nodes(host: str, port: int) -> socket.socket:
    """Return a socket that other machines reach at ``host``.

    It listens on all addresses: on many machines their own name leads to a loopback address, which
    the other machines resolve to another one. Only an endpoint that says loopback itself is meant
    so. Raises OSError.
    """
    return listen(host, port) if is_loopback(host) else hosts.listen_everywhere(port)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host``, or on all addresses where it is no address here.

    The latter is so for a service name or a NAT address of this machine. Raises OSError, as
    socket.gaierror where the name cannot be resolved.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    problem = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, *_, address in addresses:
        try:
            return hosts.listen_at(family, str(address[0]), port)
        except OSError as error:
            problem = error
            if error.errno == errno.EADDRNOTAVAIL:
                return hosts.listen_everywhere(port)
    raise problem


ROUTES = 8
"""How many of the other nodes' addresses are looked at; all are mostly behind one interface."""
SYSFS = Path("/sys")


def interface_variables(
    own: str, others: Iterable[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that name the interface to gloo and NCCL, as far as none are set.

    ``own`` and ``others`` are the nodes' addresses in the plan. Names are not resolved, so that
    nothing here waits.
    """
    unset = {env.GLOO_INTERFACE, env.NCCL_INTERFACE} - environ.keys()
    return choose(own, others, interfaces(), SYSFS, unset) if unset else {}


def choose(
    own: str, others: Iterable[str], names: Mapping[str, str], sysfs: Path, unset: Iterable[str]
) -> dict[str, str]:
    """Return :func:`variables` of a machine with ``names``, the interface of each address."""
    routes = (hosts.source(other) for other in islice(filter(_is_address, others), ROUTES))
    name = next(filter(None, (names.get(address) for address in (own, *routes) if address)), None)
    if name is None:
        return {}
    cards = {each for each in names.values() if (sysfs / "class/net" / each / "device").exists()}
    found = {env.GLOO_INTERFACE: name}
    if cards <= {name}:
        found[env.NCCL_INTERFACE] = f"={name}"  # exactly this: eth1 would be eth10, too
    return {variable: text for variable, text in found.items() if variable in unset}


def interfaces() -> dict[str, str]:
    """Return the interface of each address that other machines may reach."""
    import psutil

    return {
        address: name.partition(":")[0]  # eth0:1 is another address of eth0
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if _is_address(address := hosts.plain(each.address.partition("%")[0]))
    }


def _is_address(text: str) -> bool:
    """Return whether a text is an address, and not one that every machine has."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # a name; or the address of a card
        return False
    return not (address.is_loopback or address.is_link_local)
