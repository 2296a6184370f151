"""Where the nodes of a job meet, read from torchrun's rendezvous flags as torchrun reads them.

=============================================  ==============================================
flags (one node)                               MASTER_ADDR and MASTER_PORT
=============================================  ==============================================
none, --standalone, c10d with a local          127.0.0.1 (or --master-addr, --local-addr), a
endpoint                                       port that is free in each round
--master-port P                                --master-addr or 127.0.0.1, exactly P
--rdzv-endpoint H:P without a backend          exactly H and P
=============================================  ==============================================

Everything that needs several nodes is read and checked, and then refused by name.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from elaunch.config import values
from elaunch.config.answers import Answers
from elaunch.errors import UsageError

LOOPBACK = "127.0.0.1"
_NOT_YET = "needs several nodes, which this version of elaunch does not do yet"
_ONE_NODE = "on one machine use --nnodes 1 (the default) with --nproc-per-node"


@dataclass(frozen=True)
class Meeting:
    """What the rendezvous flags come to; ``infos`` are notices that lose the user nothing."""

    backend: str
    endpoint: str
    master_addr: str | None
    master_port: int | None
    notices: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()


def meeting(answers: Answers) -> Meeting:
    """Decide where a job of one node has its store.

    Raises:
        UsageError: the flags need several nodes, contradict each other or name a foreign host.
    """
    _refuse_several_nodes(answers)
    if answers["standalone"]:
        return _local(answers, "with --standalone")
    if answers["rdzv-backend"] == "c10d":
        return _c10d(answers)
    if answers["rdzv-backend"] in ("etcd", "etcd-v2"):
        raise _refuse_etcd(answers)
    if answers["node-rank"] != 0:
        raise answers.fault("node-rank", _NOT_YET, f"the only node is 0; {_ONE_NODE}")
    if answers["rdzv-endpoint"] or answers["master-port"]:
        return _static(answers)
    return _local(answers, "")


def _refuse_several_nodes(answers: Answers) -> None:
    if answers["nnodes"][1] > 1:
        raise answers.fault("nnodes", _NOT_YET, _ONE_NODE)


def _refuse_etcd(answers: Answers) -> UsageError:
    if answers["rdzv-backend"] == "etcd-v2":
        return answers.fault(
            "rdzv-backend",
            "speaks etcd's API v2, which etcd 3.6 has removed",
            "elaunch will meet through etcd v3 (--rdzv-backend etcd) once it does several nodes; "
            "one node needs no rendezvous flag at all",
        )
    return answers.fault("rdzv-backend", _NOT_YET, "one node needs no rendezvous flag at all")


def _c10d(answers: Answers) -> Meeting:
    raw = answers["rdzv-endpoint"]
    host, _ = values.split_endpoint(raw) if raw else ("localhost", None)
    is_host = answers["rdzv-conf"].get("is_host")
    local = values.switch(is_host) if is_host else is_this_machine(host)
    if not local:
        named = "is_host=0" if is_host else repr(host)
        raise answers.fault(
            "rdzv-endpoint",
            f"is on another machine ({named}); that {_NOT_YET}",
            "one node needs no endpoint: leave --rdzv-backend and --rdzv-endpoint out",
        )
    return _local(answers, "with --rdzv-backend c10d")


def _unused_with_standalone(answers: Answers) -> list[str]:
    """Remark on a rendezvous other than the one that --standalone stands for."""
    host, _ = values.split_endpoint(answers["rdzv-endpoint"] or "localhost")
    other = {
        "rdzv-backend": answers["rdzv-backend"] != "c10d",
        "rdzv-endpoint": not is_this_machine(host),
    }
    return [
        f"--{name} has no effect with --standalone"
        for name, differs in other.items()
        if differs and answers.said(name)
    ]


def _local(answers: Answers, why: str) -> Meeting:
    """Return the meeting of one node by itself: a fresh port in each round."""
    notices = _unused_conf(answers)
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
    return Meeting("c10d", "localhost:0", addr, None, tuple(notices), infos)


def _static(answers: Answers) -> Meeting:
    """Return the meeting at an address and a port that were given."""
    notices = _unused_conf(answers)
    if answers.said("local-addr"):
        notices.append("--local-addr has no effect where MASTER_ADDR is given")
    raw = answers["rdzv-endpoint"]
    if not raw:
        addr, port = _unbracketed(answers["master-addr"]) or LOOPBACK, answers["master-port"]
        return Meeting("static", f"{addr}:{port}", addr, port, tuple(notices))
    host, endpoint_port = values.split_endpoint(raw)
    if endpoint_port is None:
        raise answers.fault(
            "rdzv-endpoint", "has no port, which the static backend needs", "write HOST:PORT"
        )
    for name in ("master-addr", "master-port"):
        if answers.said(name):
            notices.append(f"--{name} has no effect with --rdzv-endpoint")
    return Meeting("static", raw, host, endpoint_port or None, tuple(notices))


def _unbracketed(host: str | None) -> str | None:
    """Return an IPv6 address without the brackets that torchrun's help asks for."""
    return host[1:-1] if host and host.startswith("[") and host.endswith("]") else host


def _unused_conf(answers: Answers) -> list[str]:
    conf = [key for key in answers["rdzv-conf"] if key != "is_host"]
    if not conf or not answers.said("rdzv-conf"):
        return []
    return [f"--rdzv-conf: {', '.join(conf)} has no effect on one node: it waits for nobody"]


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address belongs to this machine; unknown names do not."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback or _is_bindable(host)
    except ValueError:
        return any(_is_bindable(address) for address in addresses(host))


def addresses(host: str) -> list[str]:
    """Return the addresses of a host's name; an empty list if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _is_bindable(address: str) -> bool:
    """Whether the kernel lets a socket have the address, which is so for this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
