"""Torchrun's rendezvous flags on one node, and which hosts are this machine.

=============================================  ==============================================
flags (one node)                               MASTER_ADDR and MASTER_PORT
=============================================  ==============================================
none, --standalone, c10d with a local          127.0.0.1 (or --master-addr, --local-addr), a
endpoint                                       port that is free in each round
--master-port P                                --master-addr or 127.0.0.1, exactly P
--rdzv-endpoint H:P without a backend          exactly H and P
=============================================  ==============================================

``elaunch.config.meeting.place`` handles several nodes, and one that asks for a store.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from elaunch import hosts
from elaunch.config.flags.answers import Answers
from elaunch.config.meeting import endpoints

LOOPBACK = "127.0.0.1"
_HOW_TO_BE_SEVERAL = "the only node is 0; for several nodes add --nnodes N"
_SEVERAL_ONLY = ("rdzv-secret-file", "on-join", "strict-symmetry")


@dataclass(frozen=True)
class Topology:
    """Where the workers' store is; ``infos`` are notices that lose the user nothing."""

    backend: str
    endpoint: str
    master_addr: str | None
    master_port: int | None
    notices: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()


def meeting(answers: Answers) -> Topology:
    """Decide where a job of one node by itself has its workers' store.

    Raises:
        UsageError: the flags contradict each other.
    """
    if answers["standalone"]:
        return _local(answers, "with --standalone")
    if answers["rdzv-backend"] == "c10d":
        return _local(answers, "with --rdzv-backend c10d")
    if answers["node-rank"] != 0:
        raise answers.fault("node-rank", "is not a rank of one node", _HOW_TO_BE_SEVERAL)
    if answers["rdzv-endpoint"] or answers["master-port"]:
        return _static(answers)
    return _local(answers, "")


def _unused_with_standalone(answers: Answers) -> list[str]:
    """Remark on a rendezvous other than the one that --standalone stands for."""
    host, _ = endpoints.split_all(answers["rdzv-endpoint"] or "localhost")[0]
    other = {
        "rdzv-backend": answers["rdzv-backend"] != "c10d",
        "rdzv-endpoint": not is_this_machine(host),
    }
    return [
        f"--{name} has no effect with --standalone"
        for name, differs in other.items()
        if differs and answers.said(name)
    ]


def _local(answers: Answers, why: str) -> Topology:
    """Return the meeting of one node by itself: a fresh port in each round."""
    notices = _unused(answers)
    if why:
        if answers["master-port"] and answers.said("master-port"):
            notices.append(f"--master-port has no effect {why}: each round has a free port")
        if answers["node-rank"] and answers.said("node-rank"):
            notices.append(f"--node-rank has no effect {why}")
    master, local = answers["master-addr"], answers["local-addr"]
    if master and local and answers.said("local-addr"):
        notices.append("--local-addr has no effect with --master-addr on one node")
    infos: tuple[str, ...] = ()
    if answers["standalone"]:
        notices += _unused_with_standalone(answers)
    elif answers["rdzv-endpoint"] and answers.said("rdzv-endpoint"):
        infos = ("--rdzv-endpoint is not needed on one node: nobody else has to find it",)
    addr = _unbracketed(master or local)
    return Topology("c10d", "localhost:0", addr, None, tuple(notices), infos)


def _static(answers: Answers) -> Topology:
    """Return the meeting at an address and a port that were given."""
    notices = _unused(answers)
    if answers.said("local-addr"):
        notices.append("--local-addr has no effect where MASTER_ADDR is given")
    raw = answers["rdzv-endpoint"]
    if not raw:
        addr, port = _unbracketed(answers["master-addr"]) or LOOPBACK, answers["master-port"]
        return Topology("static", f"{addr}:{port}", addr, port, tuple(notices))
    host, endpoint_port = endpoints.split_all(raw)[0]
    if endpoint_port is None:
        raise answers.fault(
            "rdzv-endpoint", "has no port, which the static backend needs", "write HOST:PORT"
        )
    for name in ("master-addr", "master-port"):
        if answers.said(name):
            notices.append(f"--{name} has no effect with --rdzv-endpoint")
    return Topology("static", raw, host, endpoint_port or None, tuple(notices))


def _unbracketed(host: str | None) -> str | None:
    """Return an IPv6 address without the brackets that torchrun's help asks for."""
    return host[1:-1] if host and host.startswith("[") and host.endswith("]") else host


def _unused(answers: Answers) -> list[str]:
    """Remark on what only several nodes use."""
    found = [f"--{name} has no effect on one node" for name in _SEVERAL_ONLY if answers.said(name)]
    conf = [key for key in answers["rdzv-conf"] if key != "is_host"]
    if conf and answers.said("rdzv-conf"):
        found.append(
            f"--rdzv-conf: {', '.join(conf)} has no effect on one node: it waits for nobody"
        )
    return found


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address belongs to this machine; unknown names do not."""
    if host == socket.gethostname() or hosts.is_loopback(host):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return any(_is_bindable(address) for address in addresses(host))
    return _is_bindable(hosts.plain(host))


def addresses(host: str) -> list[str]:
    """Return the addresses of a host's name; an empty list if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(hosts.plain(str(each[4][0])) for each in found))


def _is_bindable(address: str) -> bool:
    """Whether the kernel lets a socket have the address, which is so for this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
