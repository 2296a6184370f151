"""Whether the agents of a job meet somewhere, where that is, and which of them hosts.

==========================================  =================================================
flags                                       the agents meet
==========================================  =================================================
--nnodes 1, --standalone                    not at all: one node by itself (``alone``)
--nnodes 1:MAX --rdzv-backend c10d          not at all: no other node finds that port
--rdzv-endpoint H:0, where H is this one
--nnodes 1 --rdzv-backend c10d and an       there, as several would
endpoint on another machine; or etcd
--nnodes N --master-addr A                  at A (port 29500), where node 0 hosts; each node has
[--node-rank R], or --rdzv-endpoint A:P     its rank from --node-rank, 0 if it has none
--nnodes N or MIN:MAX, --rdzv-backend c10d  at H (port 29400): the node whose address it is hosts
--rdzv-endpoint H
--nnodes N or MIN:MAX, --rdzv-backend etcd  through etcd (port 2379); nobody hosts
--rdzv-endpoint H1,H2,H3
==========================================  =================================================

One node by itself has its workers' store at:

=============================================  ==============================================
flags (one node)                               MASTER_ADDR and MASTER_PORT
=============================================  ==============================================
none, --standalone, c10d with a local          127.0.0.1 (or --master-addr, --local-addr), a
endpoint                                       port that is free in each round
--master-port P                                --master-addr or 127.0.0.1, exactly P
--rdzv-endpoint H:P without a backend          exactly H and P
=============================================  ==============================================

Nothing is connected to here. A host that does not resolve is no error: it may come up later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from elaunch import hosts
from elaunch.config import endpoints, values
from elaunch.config.flags.flag import Answers
from elaunch.errors import UsageError
from elaunch.text import host_port

Backend = Literal["c10d", "etcd", "static"]
Endpoint = tuple[str, int]

C10D_PORT = 29400
ETCD_PORT = 2379
MASTER_PORT = 29500
# Schedulers number the processes of a job by these: the order of newcomers without --node-rank.
HINT_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX")
_HOW_TO_BE_SEVERAL = "the only node is 0; for several nodes add --nnodes N"


class MeetingPlace(Struct, frozen=True):
    """Where the agents meet; ``node_hint`` is the rank of the node with the static backend."""

    backend: Backend
    endpoints: tuple[Endpoint, ...]
    is_host: bool | None = False
    node_hint: int | None = None
    notices: tuple[str, ...] = ()


class Topology(Struct, frozen=True):
    """Where the workers' store is; ``infos`` are notices that lose the user nothing."""

    backend: str
    endpoint: str
    master_addr: str | None
    master_port: int | None
    notices: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()


def place(answers: Answers, environ: Mapping[str, str]) -> MeetingPlace | None:
    """Return where the agents of this job meet, or None for one node by itself.

    Raises:
        UsageError: the flags do not say where, or contradict each other.
    """
    if not _meet(answers):
        return None
    if answers["rdzv-backend"] == "static":
        return _static(answers)
    hint, notices = _hint(answers, environ)
    notices += [
        f"--{name} has no effect with --rdzv-backend {answers['rdzv-backend']}: "
        "MASTER_ADDR is the address of node 0, with a free port in each round"
        for name in ("master-addr", "master-port")
        if answers.said(name)
    ]
    if answers["rdzv-backend"] == "etcd":
        return MeetingPlace("etcd", etcd_endpoints(answers), False, hint, tuple(notices))
    where = c10d_endpoint(answers)
    is_host, remarks = _c10d_host(answers, where[0])
    return MeetingPlace("c10d", (where,), is_host, hint, (*notices, *remarks))


def refuse_etcd_v2(answers: Answers) -> None:
    """Refuse torchrun's backend for an etcd that is gone, with the way out."""
    if answers["rdzv-backend"] == "etcd-v2":
        raise answers.fault(
            "rdzv-backend",
            "speaks etcd's API v2, which etcd 3.6 has removed",
            "write --rdzv-backend etcd (API v3) with the same endpoint",
        )


def c10d_endpoint(answers: Answers) -> Endpoint:
    """Return the one endpoint of the c10d backend.

    Raises:
        UsageError: there is none, there are several, or its port is 0.
    """
    raw = answers["rdzv-endpoint"]
    if not raw:
        raise _nowhere(
            answers, f"--rdzv-endpoint HOST[:{C10D_PORT}], where HOST is one of the nodes"
        )
    found = endpoints.split_all(raw)
    if len(found) > 1:
        raise answers.fault(
            "rdzv-endpoint",
            "names several endpoints, and the c10d backend has one",
            "name the node that hosts, or use --rdzv-backend etcd",
        )
    return _with_port(answers, found[0], C10D_PORT)


def etcd_endpoints(answers: Answers) -> tuple[Endpoint, ...]:
    """Return the endpoints of etcd.

    Raises:
        UsageError: there is none, or a port is 0.
    """
    raw = answers["rdzv-endpoint"]
    if not raw:
        raise _nowhere(answers, f"--rdzv-endpoint HOST[:{ETCD_PORT}],HOST,… with etcd's members")
    found = (_with_port(answers, each, ETCD_PORT) for each in endpoints.split_all(raw))
    return tuple(dict.fromkeys(found))


def static_endpoint(answers: Answers) -> Endpoint:
    """Return where node 0 of the static backend hosts.

    Raises:
        UsageError: there is none, or it has no port.
    """
    raw = answers["rdzv-endpoint"]
    if not raw:
        return _master(answers)
    host, port = _with_its_port(answers, raw)
    if "," in raw:
        raise answers.fault("rdzv-endpoint", "names several endpoints, and node 0 has one")
    return _with_port(answers, (host, port), port)


def _with_its_port(answers: Answers, raw: str) -> tuple[str, int]:
    host, port = endpoints.split_all(raw)[0]
    if port is None:
        raise answers.fault(
            "rdzv-endpoint", "has no port, which the static backend needs", "write HOST:PORT"
        )
    return host, port


def _meet(answers: Answers) -> bool:
    """Whether this job has a store, which several nodes need and one node may ask for."""
    low, high = answers["nnodes"]
    if answers["standalone"]:
        if low > 1:
            raise answers.fault(
                "nnodes",
                "needs other nodes, and --standalone means one node by itself",
                "leave one of the two out",
            )
        return False
    refuse_etcd_v2(answers)
    if answers["rdzv-backend"] != "c10d":
        return bool(high > 1 or answers["rdzv-backend"] == "etcd")
    if _host_by_conf_or_address(answers) is False:
        return True
    port = endpoints.split_all(answers["rdzv-endpoint"] or "localhost")[0][1]
    return bool(high > 1 and not (low == 1 and port == 0))


def _host_by_conf_or_address(answers: Answers) -> bool | None:
    said = answers["rdzv-conf"].get("is_host")
    if said is not None:
        return values.switch(said)
    raw = answers["rdzv-endpoint"]
    here = not raw or endpoints.is_this_machine(endpoints.split_all(raw)[0][0])
    return None if here else False


def _c10d_host(answers: Answers, host: str) -> tuple[bool | None, list[str]]:
    """Return whether this node hosts, and a remark on a name that several machines may have."""
    found = _host_by_conf_or_address(answers)
    if found is not None:
        return found, []
    known = endpoints.addresses(host)
    if all(endpoints.is_this_machine(each) for each in known):
        return found, []
    return found, [
        f"--rdzv-endpoint: {host} stands for {', '.join(known)}, and only some of them are this "
        "machine's; if it names several machines, name one (or is_host=1 on one of them and "
        "is_host=0 on the others), since each would host a store of its own"
    ]


def _static(answers: Answers) -> MeetingPlace:
    low, high = answers["nnodes"]
    if low != high:
        raise answers.fault(
            "nnodes",
            "is a range, and the static backend takes exactly as many nodes as it is told",
            f"write --nnodes {high}, or use --rdzv-backend c10d or etcd",
        )
    where = static_endpoint(answers)
    rank = _static_rank(answers, high)
    notices = _idle_master(answers) if answers["rdzv-endpoint"] else []
    if rank == 0 and not _leads_here(where[0]):
        notices.append(_foreign_host(answers, where[0], high))
    return MeetingPlace("static", (where,), rank == 0, rank, tuple(notices))


def _static_rank(answers: Answers, nodes: int) -> int:
    """Return the node's rank; the scheduler's numbers do not count here, as under torchrun."""
    rank: int = answers["node-rank"]
    flag = "node-rank"
    if not answers.is_set("node-rank") and "rank" in answers["rdzv-conf"]:
        rank, flag = int(answers["rdzv-conf"]["rank"]), "rdzv-conf"
    if rank >= nodes:
        why = f"is not one of the {nodes} nodes"
        why = why if flag == "node-rank" else f"has rank={rank}, which {why}"
        raise answers.fault(flag, why, f"their ranks go from 0 to {nodes - 1}")
    return rank


def _leads_here(host: str) -> bool:
    return endpoints.is_this_machine(host) or not endpoints.addresses(host)


def _foreign_host(answers: Answers, host: str, nodes: int) -> str:
    """Return the remark on node 0 at an address that is not this machine's.

    Raises:
        UsageError: no flag makes this node 0: it is another node without its rank.
    """
    if not answers.is_set("node-rank") and "rank" not in answers["rdzv-conf"]:
        ranks = "1" if nodes == 2 else f"from 1 to {nodes - 1}"
        raise UsageError(
            f"--node-rank is missing: {host} is another machine, where node 0 is; give this node "
            f"its own rank, {ranks} (under SLURM --node-rank $SLURM_NODEID)",
            code="E-NODE-RANK",
        )
    return (
        f"--node-rank 0: {host} is not an address of this machine; the other nodes reach it only "
        "if it leads back here"
    )


def _master(answers: Answers) -> Endpoint:
    if not answers["master-addr"]:
        raise _nowhere(
            answers,
            "--master-addr HOST (node 0) and --node-rank on each node, or --rdzv-backend c10d "
            f"with --rdzv-endpoint HOST[:{C10D_PORT}]",
        )
    try:
        host = endpoints.host(answers["master-addr"])
    except ValueError as exc:
        port = "; the port goes to --master-port" if "port" in str(exc) else ""
        raise answers.fault("master-addr", f"{exc}{port}") from None
    port = answers["master-port"]
    if port == 0:
        why = "asks for a free port, which the other nodes cannot find"
        raise answers.fault("master-port", why, f"give a port, or leave it out for {MASTER_PORT}")
    return host, port or MASTER_PORT


def _with_port(answers: Answers, found: tuple[str, int | None], default: int) -> Endpoint:
    host, port = found
    if port == 0:
        raise answers.fault(
            "rdzv-endpoint",
            "has port 0, a free one, which the other nodes cannot find",
            f"give the port, such as {host_port(host, default or C10D_PORT)}",
        )
    return host, default if port is None else port


def _nowhere(answers: Answers, fix: str) -> UsageError:
    said = []
    if answers.is_set("nnodes"):
        said.append(f"--nnodes {answers.given['nnodes'].text}")
    if answers.is_set("rdzv-backend"):
        said.append(f"--rdzv-backend {answers['rdzv-backend']}")
    shown = f"{' '.join(said)}: " if said else ""
    return UsageError(
        f"{shown}nothing says where the nodes meet; add, the same on all nodes, {fix}",
        code="E-NO-ENDPOINT",
    )


def _hint(answers: Answers, environ: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """Return this node's place among newcomers, and remarks on numbers that are none."""
    if answers.is_set("node-rank"):
        return answers["node-rank"], []
    notices: list[str] = []
    for name in HINT_VARIABLES:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text), notices
        if text:
            notices.append(f"{name}={text!r} is no number, so it does not order the nodes")
    return None, notices


def alone(answers: Answers) -> Topology:
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
        return _exactly(answers)
    return _local(answers, "")


def _unused_with_standalone(answers: Answers) -> list[str]:
    """Remark on a rendezvous other than the one that --standalone stands for."""
    host, _ = endpoints.split_all(answers["rdzv-endpoint"] or "localhost")[0]
    other = {
        "rdzv-backend": answers["rdzv-backend"] != "c10d",
        "rdzv-endpoint": not endpoints.is_this_machine(host),
    }
    return [
        f"--{name} has no effect with --standalone"
        for name, differs in other.items()
        if differs and answers.said(name)
    ]


def _local(answers: Answers, why: str) -> Topology:
    """Return the meeting of one node by itself: a fresh port in each round."""
    notices = _unused(answers)
    if answers["nnodes"][1] > 1:
        port = "where the endpoint's port is a free one, since none finds it"
        how = "with --standalone" if answers["standalone"] else port
        notices.append(f"--nnodes: no other node can join {how}; this one is by itself")
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
    addr = _master_addr(answers) or _unbracketed(local)
    return Topology("c10d", "localhost:0", addr, None, tuple(notices), infos)


def _exactly(answers: Answers) -> Topology:
    """Return the meeting at an address and a port that were given."""
    notices = _unused(answers)
    if answers.said("local-addr"):
        notices.append("--local-addr has no effect where MASTER_ADDR is given")
    raw = answers["rdzv-endpoint"]
    if not raw:
        addr, port = (
            _master_addr(answers) or hosts.LOOPBACK,
            answers["master-port"],
        )
        return Topology("static", f"{addr}:{port}", addr, port, tuple(notices))
    host, given_port = _with_its_port(answers, raw)
    notices += _idle_master(answers)
    return Topology("static", raw, host, given_port or None, tuple(notices))


def _idle_master(answers: Answers) -> list[str]:
    names = (name for name in ("master-addr", "master-port") if answers.said(name))
    return [f"--{name} has no effect with --rdzv-endpoint" for name in names]


def _master_addr(answers: Answers) -> str | None:
    """Return where one node was told to be; not a cluster's name for it that is not known yet."""
    addr = _unbracketed(answers["master-addr"])
    by_person = not addr or answers.said("master-addr")
    return addr if by_person or endpoints.addresses(str(addr)) else None


def _unbracketed(host: str | None) -> str | None:
    """Return an IPv6 address without the brackets that torchrun's help asks for."""
    return host[1:-1] if host and host.startswith("[") and host.endswith("]") else host


def _unused(answers: Answers) -> list[str]:
    """Remark on what only several nodes use."""
    conf = [key for key in answers["rdzv-conf"] if key != "is_host"]
    if conf and answers.said("rdzv-conf"):
        return [f"--rdzv-conf: {', '.join(conf)} has no effect on one node: it waits for nobody"]
    return []
