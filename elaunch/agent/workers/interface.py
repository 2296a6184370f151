"""The network interface that leads to the job's other nodes, for workers' gloo and NCCL.

Left to itself, gloo takes the interface that has the address of the host's name, which is loopback
on many machines, and NCCL every one but lo and docker's, bridges of virtual machines among them.
The agent knows better: the address that it gives to the others is on the interface with the route
to them. NCCL may use several network cards at once; where the machine has another one that has an
address, it is left to choose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from elaunch import env, hosts

ROUTES = 8
"""How many of the other nodes' addresses are looked at; all are mostly behind one interface."""
SYSFS = Path("/sys")


def variables(own: str, others: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
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
