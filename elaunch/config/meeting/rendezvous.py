"""How the agents of a job meet, if they do: ``RendezvousSettings``.

``place`` finds where they meet and which one hosts, ``etcd`` how to get into etcd,
``elaunch.config.flags.rdzvconf`` reads ``--rdzv-conf``. Here it comes together, with the times:

==================  =========================================  =====================================
time                from                                       default
==================  =========================================  =====================================
join_timeout        join_timeout; static, etcd: or timeout     600 s; static: 900 s
connect_timeout     as join_timeout: the host may come last
settle              settle, last_call_timeout                  2 s
debounce            debounce                                   0.5 s
heartbeat_timeout   heartbeat_timeout, heartbeat; or           3 s
                    keep_alive_interval (5 s) times
                    keep_alive_max_attempt (3)
store_timeout       store_timeout                              30 s
read_timeout        read_timeout                               60 s, at most store_timeout
==================  =========================================  =====================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from elaunch import env
from elaunch.config import paths
from elaunch.config.flags import rdzvconf
from elaunch.config.flags.answers import Answers, collect
from elaunch.config.flags.given import JobFile
from elaunch.config.flags.table import FLAGS
from elaunch.config.flags.variables import SECRET_VARIABLES
from elaunch.config.meeting import endpoints, secretfiles, topology
from elaunch.config.meeting import place as meetingplace
from elaunch.config.meeting.etcd import EtcdAccess, etcd_access, file_of, refuse_shown_password
from elaunch.config.meeting.place import C10D_PORT, ETCD_PORT, MASTER_PORT, Backend, MeetingPlace

__all__ = [
    "C10D_PORT",
    "ETCD_PORT",
    "MASTER_PORT",
    "SECRET_VARIABLES",
    "Backend",
    "EtcdAccess",
    "OnJoin",
    "RendezvousSettings",
    "resolve_place",
    "resolve_run_id",
    "several_nodes",
]

OnJoin = Literal["graceful", "now", "never"]
_CONF = "rdzv-conf"
_ETCD_SHORTEST_LEASE = 2.0
_COMMON_KEYS = frozenset(
    "join_timeout settle debounce heartbeat_timeout keep_alive_interval keep_alive_max_attempt "
    "store_timeout read_timeout secret_file".split()
)
_KEYS: Mapping[str, frozenset[str]] = {
    "c10d": _COMMON_KEYS | {"is_host", "store_type"},
    "static": _COMMON_KEYS | {"timeout", "rank"},
    "etcd": _COMMON_KEYS | rdzvconf.ETCD_KEYS | {"timeout"},
}
_PLACE_FLAGS = frozenset(
    "rdzv-backend rdzv-endpoint rdzv-id rdzv-conf rdzv-secret-file master-addr master-port nnodes "
    "on-join strict-symmetry".split()
)


@dataclass(frozen=True)
class RendezvousSettings:
    """Where the agents meet, which one hosts, and how long they wait; seconds as float.

    Attributes:
        endpoints: one (host, port) for c10d and static, one or more for etcd.
        is_host: True: this agent hosts the store. False: it does not. None (c10d): the endpoint is
            an address of this machine; the agent here that gets the port hosts, others are clients.
        node_hint: the rank of this node (static), or its place among newcomers, or None.
        local_addr: the address to give to other nodes, if the user gave one; see address.py.
        join_timeout: how long too few nodes are waited for.
        settle: how long after the last arrival MIN nodes begin without MAX.
        debounce: how long after the last arrival a round ends for newcomers.
        heartbeat_timeout: after how long a silent node is dead.
        store_timeout: how long an agent goes on without its store.
        connect_timeout: how long the store is tried to be reached at the start.
        read_timeout: how long one answer of the store is waited for.
        secret: what signs the records: of --rdzv-secret-file, or of mpirun; or None, and agents
            of srun may share a key by MUNGE (elaunch.agent.nodes.mungekey).
        etcd: how to get into etcd; of no meaning for other backends.
    """

    backend: Backend
    endpoints: tuple[tuple[str, int], ...]
    is_host: bool | None = None
    node_hint: int | None = None
    local_addr: str | None = None
    join_timeout: float = 600.0
    settle: float = 2.0
    debounce: float = 0.5
    heartbeat_timeout: float = 3.0
    store_timeout: float = 30.0
    connect_timeout: float = 600.0
    read_timeout: float = 30.0
    on_join: OnJoin = "graceful"
    strict_symmetry: bool = False
    secret: bytes | None = field(default=None, repr=False)
    etcd: EtcdAccess = field(default_factory=EtcdAccess)

    @property
    def endpoint(self) -> str:
        """The endpoints as text: ``h1:2379,[::1]:2379``."""
        return ",".join(endpoints.join(host, port) for host, port in self.endpoints)


def several_nodes(
    answers: Answers, environ: Mapping[str, str], start: Path
) -> tuple[RendezvousSettings | None, list[str]]:
    """Return how the agents meet (None: one node by itself), and notices.

    Args:
        answers: every flag.
        environ: the launcher's environment.
        start: where relative paths start.

    Raises:
        UsageError: the flags do not say where, contradict each other, or a file is not right.
    """
    refuse_shown_password(answers)
    place = meetingplace.place(answers, environ)
    if place is None:
        return None, []
    found = _settings(answers, place, environ, start)
    settings = replace(
        found,
        is_host=place.is_host,
        node_hint=place.node_hint,
        local_addr=_local_addr(answers),
        secret=found.secret or _secret_of_mpirun(environ),
    )
    return settings, [*place.notices, *_unused_conf(answers, place.backend)]


def resolve_place(
    line: Mapping[str, str], environ: Mapping[str, str], cwd: Path
) -> RendezvousSettings:
    """Return where the agents of a job meet, for a reader that takes no part in it.

    Args:
        line: texts of ``rdzv-backend``, ``rdzv-endpoint``, ``rdzv-conf``, ``rdzv-secret-file``.
            Without a backend: c10d, which finds a static job too, given the endpoint.
        environ: the environment, whose variables stand in for flags that are not on the line.
        cwd: where relative paths start.

    Raises:
        UsageError: the flags do not say where, or a file is not right.
    """
    flags = [flag for flag in FLAGS if flag.name in _PLACE_FLAGS]
    answers = collect(line, environ, JobFile(), flags)
    refuse_shown_password(answers)
    meetingplace.refuse_etcd_v2(answers)
    if answers["rdzv-backend"] == "etcd":
        place = MeetingPlace("etcd", meetingplace.etcd_endpoints(answers))
    elif answers.is_set("rdzv-backend") and answers["rdzv-backend"] == "static":
        place = MeetingPlace("static", (meetingplace.static_endpoint(answers),))
    elif answers["rdzv-endpoint"] or not answers["master-addr"]:
        place = MeetingPlace("c10d", (meetingplace.c10d_endpoint(answers),))
    else:
        place = MeetingPlace("static", (meetingplace.static_endpoint(answers),))
    return replace(_settings(answers, place, environ, cwd), is_host=False)


def resolve_run_id(line: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return ``--rdzv-id`` of the line or of a variable, or None if neither gives one."""
    flags = [flag for flag in FLAGS if flag.name == "rdzv-id"]
    found: str | None = collect(line, environ, JobFile(), flags)["rdzv-id"]
    return found or None


def _settings(
    answers: Answers, place: MeetingPlace, environ: Mapping[str, str], start: Path
) -> RendezvousSettings:
    conf = answers[_CONF]
    default = 900.0 if place.backend == "static" else 600.0  # torchrun's, both
    if place.backend != "c10d":
        default = rdzvconf.seconds(conf, "timeout", default)
    join_timeout = rdzvconf.seconds(conf, "join_timeout", default)
    store_timeout = rdzvconf.seconds(conf, "store_timeout", RendezvousSettings.store_timeout)
    etcd = place.backend == "etcd"
    return RendezvousSettings(
        backend=place.backend,
        endpoints=place.endpoints,
        join_timeout=join_timeout,
        settle=rdzvconf.seconds(conf, "settle", RendezvousSettings.settle),
        debounce=rdzvconf.seconds(conf, "debounce", RendezvousSettings.debounce),
        heartbeat_timeout=_heartbeat_timeout(answers, _ETCD_SHORTEST_LEASE if etcd else 0.0),
        store_timeout=store_timeout,
        connect_timeout=join_timeout,
        read_timeout=min(rdzvconf.seconds(conf, "read_timeout", 60.0), store_timeout),
        on_join=answers["on-join"],
        strict_symmetry=answers["strict-symmetry"],
        secret=_secret(answers, start),
        etcd=etcd_access(answers, environ, start) if etcd else EtcdAccess(),
    )


def _heartbeat_timeout(answers: Answers, shortest: float) -> float:
    conf = answers[_CONF]
    found = rdzvconf.seconds(conf, "heartbeat_timeout", RendezvousSettings.heartbeat_timeout)
    key = "heartbeat_timeout"
    if key not in conf and {"keep_alive_interval", "keep_alive_max_attempt"} & set(conf):
        key = "keep_alive_interval times keep_alive_max_attempt"
        interval = rdzvconf.seconds(conf, "keep_alive_interval", 5.0)
        found = interval * int(conf.get("keep_alive_max_attempt", "3"))
    if found < shortest:
        why = f"has {key} of {found:g} s, and etcd's leases last {shortest:g} s at least"
        raise answers.fault(_CONF, why, f"give {shortest:g} or more")
    return found


def _secret(answers: Answers, start: Path) -> bytes | None:
    flag, conf = answers["rdzv-secret-file"], answers[_CONF].get("secret_file")
    if flag and conf and flag != conf:
        raise answers.fault(
            "rdzv-secret-file", f"and secret_file={conf!r} of --rdzv-conf differ", "give one"
        )
    if flag:
        path = paths.absolute(flag, start)
        return file_of(answers, "rdzv-secret-file", path, "", secretfiles.secret)
    if conf:
        path = paths.absolute(conf, start)
        return file_of(answers, _CONF, path, "names a secret_file that ", secretfiles.secret)
    return None


def _secret_of_mpirun(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret of agents that mpirun of Open MPI started, None for others."""
    shared = environ.get(env.OPEN_MPI_SECRET, "")
    if not (shared and environ.get(env.OPEN_MPI_RANK)):
        return None
    return hashlib.sha256(f"elaunch rendezvous {shared}".encode()).digest()


def _local_addr(answers: Answers) -> str | None:
    raw = answers["local-addr"]
    if not raw:
        return None
    try:
        host = endpoints.host(raw)
    except ValueError as exc:
        raise answers.fault("local-addr", str(exc)) from None
    if topology.is_this_machine(host):
        return host
    why = "is not an address of this machine"
    if not topology.addresses(host):
        why = "does not resolve to an address"
    raise answers.fault("local-addr", why, "give one that this machine has (see 'ip address')")


def _unused_conf(answers: Answers, backend: str) -> list[str]:
    if not answers.said(_CONF):
        return []
    conf = answers[_CONF]
    idle = rdzvconf.unused(conf, _KEYS[backend])
    notices = []
    if idle:
        notices.append(
            f"--rdzv-conf: {', '.join(idle)} has no effect with --rdzv-backend {backend}"
        )
    keep_alive = [key for key in conf if key.startswith("keep_alive")]
    if keep_alive and "heartbeat_timeout" in conf:
        shown = ", ".join(keep_alive)
        notices.append(f"--rdzv-conf: {shown} has no effect with heartbeat_timeout")
    return notices
