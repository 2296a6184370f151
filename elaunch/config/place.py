"""Where the agents of a job meet, which of them hosts, and where one node has its workers' store.

==========================================  ================================  ==================
flags                                       the agents meet                   who hosts
==========================================  ================================  ==================
--standalone; --nnodes 1; c10d at a port    not at all: each round has a      this node, at
of this machine, or at H:0 with MIN 1       port that is free                 --master-addr,
                                                                              --local-addr or
                                                                              127.0.0.1
--nnodes 1 and --master-port P or           not at all: exactly that port     this node, at H or
--rdzv-endpoint H:P                                                           the same
--nnodes N --master-addr A [--node-rank R]  at A (port 29500) or A:P          node 0
or --rdzv-endpoint A:P
--rdzv-backend c10d --rdzv-endpoint H, for  at H (port 29400)                 the node whose
several nodes or of another machine                                           address it is
--rdzv-backend etcd                         at H1, H2, H3 (port 2379)         nobody
--rdzv-endpoint H1,H2,H3
==========================================  ================================  ==================

Nothing is connected to here. A host that does not resolve is no error: it may come up later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from elaunch import hosts
from elaunch.config import endpoints, values
from elaunch.config.flags.flag import Answers
from elaunch.errors import UsageError
from elaunch.text import host_port

Backend = Literal["c10d", "etcd", "static"]
Endpoint = tuple[str, int]

PORTS: Final[Mapping[Backend, int]] = {"c10d": 29400, "etcd": 2379, "static": 29500}
# Schedulers number the processes of a job by these: the order of newcomers without --node-rank.
HINT_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX")


class MeetingPlace(Struct, frozen=True):
    """Where the agents meet; one node by itself has no ``endpoints``.

    Attributes:
        is_host: whether this agent hosts; None: whoever of this machine's agents gets the port.
        node_hint: the rank of this node (static), or its order among newcomers.
        master_addr, master_port: where one node by itself was told to have its workers' store.
        notices: remarks for the user.
    """

    backend: Backend
    endpoints: tuple[Endpoint, ...] = ()
    is_host: bool | None = False
    node_hint: int | None = None
    notices: tuple[str, ...] = ()
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def endpoint(self) -> str:
        """The endpoints as text: ``h1:2379,[::1]:2379``."""
        one = (self.master_addr or "localhost", self.master_port or 0)
        alone = (one,) if self.backend == "static" else (("localhost", 0),)
        return ",".join(host_port(host, port) for host, port in self.endpoints or alone)


def place(answers: Answers, environ: Mapping[str, str]) -> MeetingPlace:
    """Return where the agents of this job meet.

    Raises:
        UsageError: the flags do not say where, or contradict each other.
    """
    if not _meet(answers):
        return _alone(answers)
    backend = answers["rdzv-backend"]
    if backend == "static":
        return _static(answers)
    where = meeting(answers, backend)
    hint, notices = _hint(answers, environ)
    is_host, remarks = (False, []) if backend == "etcd" else _c10d_host(answers, where[0][0])
    return MeetingPlace(backend, where, is_host, hint, (*notices, *remarks))


def refuse_etcd_v2(answers: Answers) -> None:
    """Refuse torchrun's backend for an etcd that is gone, with the way out."""
    if answers["rdzv-backend"] == "etcd-v2":
        raise answers.fault(
            "rdzv-backend",
            "speaks etcd's API v2, which etcd 3.6 has removed",
            "write --rdzv-backend etcd (API v3) with the same endpoint",
        )


def meeting(answers: Answers, backend: Backend) -> tuple[Endpoint, ...]:
    """Return where the agents meet by that backend: one endpoint, or those of etcd.

    Raises:
        UsageError: there is none, there are several but for etcd, or a port is 0 or missing.
    """
    raw = answers["rdzv-endpoint"]
    if not raw and backend == "static":
        return (_master(answers),)
    if not raw:
        members = backend == "etcd"
        which = ",HOST,… with etcd's members" if members else ", where HOST is one of the nodes"
        raise _nowhere(answers, f"--rdzv-endpoint HOST[:{PORTS[backend]}]{which}")
    found = _with_its_port(answers) if backend == "static" else endpoints.split_all(raw)
    if backend != "etcd" and len(found) > 1:
        raise answers.fault(
            "rdzv-endpoint",
            f"names several endpoints, and the {backend} backend has one",
            "name the node that hosts, or use --rdzv-backend etcd",
        )
    return tuple(dict.fromkeys(_with_port(answers, each, PORTS[backend]) for each in found))


def _with_its_port(answers: Answers) -> list[tuple[str, int | None]]:
    found = endpoints.split_all(answers["rdzv-endpoint"])
    if found[0][1] is None:
        raise answers.fault(
            "rdzv-endpoint", "has no port, which the static backend needs", "write HOST:PORT"
        )
    return found


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
    where = meeting(answers, "static")
    rank = _static_rank(answers, high)
    notices: tuple[str, ...] = ()
    host = where[0][0]
    if rank == 0 and not endpoints.is_this_machine(host) and endpoints.addresses(host):
        notices = (_foreign_host(answers, host, high),)
    return MeetingPlace("static", where, rank == 0, rank, notices)


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
            f"with --rdzv-endpoint HOST[:{PORTS['c10d']}]",
        )
    try:
        host = endpoints.host(answers["master-addr"])
    except ValueError as exc:
        port = "; the port goes to --master-port" if "port" in str(exc) else ""
        raise answers.fault("master-addr", f"{exc}{port}") from None
    port = answers["master-port"]
    if port == 0:
        why = "asks for a free port, which the other nodes cannot find"
        raise answers.fault(
            "master-port", why, f"give a port, or leave it out for {PORTS['static']}"
        )
    return host, port or PORTS["static"]


def _with_port(answers: Answers, found: tuple[str, int | None], default: int) -> Endpoint:
    host, port = found
    if port == 0:
        raise answers.fault(
            "rdzv-endpoint",
            "has port 0, a free one, which the other nodes cannot find",
            f"give the port, such as {host_port(host, default)}",
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


def _alone(answers: Answers) -> MeetingPlace:
    """Return where a job of one node by itself has its workers' store."""
    addr, port = _master_addr(answers), answers["master-port"]
    if answers["standalone"] or answers["rdzv-backend"] == "c10d":
        port = None
    elif answers["node-rank"] != 0:
        fix = "the only node is 0; for several nodes add --nnodes N"
        raise answers.fault("node-rank", "is not a rank of one node", fix)
    elif answers["rdzv-endpoint"]:
        addr, port = _with_its_port(answers)[0]
        return MeetingPlace("static", master_addr=addr, master_port=port or None)
    if port:
        return MeetingPlace("static", master_addr=addr or hosts.LOOPBACK, master_port=port)
    return MeetingPlace("c10d", master_addr=addr or _unbracketed(answers["local-addr"]))


def _master_addr(answers: Answers) -> str | None:
    """Return where one node was told to be; not a cluster's name for it that is not known yet."""
    addr = _unbracketed(answers["master-addr"])
    by_person = not addr or answers.said("master-addr")
    return addr if by_person or endpoints.addresses(str(addr)) else None


def _unbracketed(host: str | None) -> str | None:
    """Return an IPv6 address without the brackets that torchrun's help asks for."""
    return host[1:-1] if host and host.startswith("[") and host.endswith("]") else host
