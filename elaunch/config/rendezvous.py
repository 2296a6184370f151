"""How the agents of a job meet, if they do: ``RendezvousSettings``.

``place`` finds where they meet and which one hosts, ``rdzvconf`` reads ``--rdzv-conf``. Here it
comes together, with how to get into etcd and the times:

==================  =========================================  =====================================
time                from                                       default
==================  =========================================  =====================================
join_timeout        join_timeout; static, etcd: or timeout     600 s; static: 900 s
connect_timeout     as join_timeout: the host may come last
settle              settle, last_call_timeout                  2 s
debounce            debounce                                   0.5 s
heartbeat_timeout   heartbeat_timeout, heartbeat; or           3 s; 6 s for more than 128
                    keep_alive_interval (5 s) times            nodes (MAX of --nnodes)
                    keep_alive_max_attempt (3)
store_timeout       store_timeout                              30 s
==================  =========================================  =====================================

The password for etcd comes from ``ELAUNCH_ETCD_PASSWORD``, from ``password_file``, or from
``password`` in a variable or a job file; on the command line it is refused, where every user of the
machine sees it. TLS is used with ``protocol=https``, and whenever a certificate is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from elaunch import env, hosts
from elaunch.config import endpoints, files, rdzvconf
from elaunch.config import place as meetingplace
from elaunch.config.flags.flag import Answers, JobFile, collect
from elaunch.config.flags.table import ETCD_PASSWORD, ETCD_USER, TABLE
from elaunch.config.place import Backend, MeetingPlace
from elaunch.config.rdzvconf import PASSWORD
from elaunch.store.etcd.cluster import EtcdCluster
from elaunch.text import host_port

OnJoin = Literal["graceful", "now", "never"]
_T = TypeVar("_T")
_CONF = "rdzv-conf"
_SAFER = f"set the variable {ETCD_PASSWORD}, or give password_file=PATH"
_ETCD_SHORTEST_LEASE = 2.0
MANY_NODES = 128
"""With more nodes than that a silent one is given twice as long: of so many one is the likelier to
pause only, and the store has a third of the heartbeats to bear."""
_PLACE_FLAGS = (
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
        local_addr: the address to give to other nodes, if the user gave one; see ``own_address``.
        join_timeout: how long too few nodes are waited for.
        settle: how long after the last arrival MIN nodes begin without MAX.
        debounce: how long after the last arrival a round ends for newcomers.
        heartbeat_timeout: after how long a silent node is dead.
        store_timeout: how long an agent goes on without its store.
        connect_timeout: how long the store is tried to be reached at the start.
        secret: what signs the records: of --rdzv-secret-file, or of mpirun; or None, and agents
            of srun may share a key by MUNGE (elaunch.rendezvous.munge).
        etcd: how to get into etcd, without the endpoints; of no meaning for other backends.
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
    on_join: OnJoin = "graceful"
    strict_symmetry: bool = False
    secret: bytes | None = field(default=None, repr=False)
    etcd: EtcdCluster = field(default_factory=EtcdCluster)

    @property
    def endpoint(self) -> str:
        """The endpoints as text: ``h1:2379,[::1]:2379``."""
        return ",".join(host_port(host, port) for host, port in self.endpoints)


def resolve_meeting(
    answers: Answers, environ: Mapping[str, str], start: Path
) -> tuple[MeetingPlace, RendezvousSettings | None]:
    """Return where the agents meet, and how; None: one node by itself.

    Args:
        answers: every flag.
        environ: the launcher's environment.
        start: where relative paths start.

    Raises:
        UsageError: the flags do not say where, contradict each other, or a file is not right.
    """
    _refuse_shown_password(answers)
    place = meetingplace.place(answers, environ)
    if not place.endpoints:
        return place, None
    found = _settings(answers, place, environ, start)
    secret = found.secret or _secret_of_mpirun(environ)
    return place, replace(found, local_addr=_local_addr(answers), secret=secret)


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
    answers = collect([TABLE[name] for name in _PLACE_FLAGS], line, environ, JobFile())
    _refuse_shown_password(answers)
    meetingplace.refuse_etcd_v2(answers)
    backend: Backend = answers["rdzv-backend"]
    unsaid = backend == "static" and not answers.is_set("rdzv-backend")
    if unsaid and (answers["rdzv-endpoint"] or not answers["master-addr"]):
        backend = "c10d"
    place = MeetingPlace(backend, meetingplace.meeting(answers, backend))
    return _settings(answers, place, environ, cwd)


def resolve_run_id(line: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return ``--rdzv-id`` of the line or of a variable, or None if neither gives one."""
    found: str | None = collect([TABLE["rdzv-id"]], line, environ, JobFile())["rdzv-id"]
    return found or None


def own_address(rendezvous: RendezvousSettings) -> str:
    """Return the name or address at which the other nodes reach this machine.

    It is --local-addr, or the endpoint's host as it was given where static is hosted here (as under
    torchrun), or this machine's address on the route to an endpoint. Where that is the loopback's
    (Debian gives a host's own name 127.0.1.1), the agents of c10d and static at localhost are all
    on this machine; the others know it by its name's address, or by that on the route to
    everywhere, or else by the endpoint's own name.

    Names of endpoints are resolved, so call it when the store was reached, not before.
    """
    if rendezvous.local_addr:
        return rendezvous.local_addr
    if rendezvous.backend == "static" and rendezvous.is_host:
        return rendezvous.endpoints[0][0]
    sources = [source for host, _ in rendezvous.endpoints for source in endpoints.sources(host)]
    for source in sources:
        if not hosts.is_loopback(source):
            return source
    host = rendezvous.endpoints[0][0]
    local = hosts.is_loopback(host)
    if local and rendezvous.backend != "etcd":
        return sources[0] if sources else hosts.LOOPBACK
    for source in endpoints.own_addresses():
        return source
    return hosts.LOOPBACK if local or rendezvous.backend == "etcd" else host


def _settings(
    answers: Answers, place: MeetingPlace, environ: Mapping[str, str], start: Path
) -> RendezvousSettings:
    conf = answers[_CONF]
    default = 900.0 if place.backend == "static" else 600.0  # torchrun's, both
    if place.backend != "c10d":
        default = rdzvconf.seconds(conf, "timeout", default)
    join_timeout = rdzvconf.seconds(conf, "join_timeout", default)
    etcd = place.backend == "etcd"
    return RendezvousSettings(
        backend=place.backend,
        endpoints=place.endpoints,
        is_host=place.is_host,
        node_hint=place.node_hint,
        join_timeout=join_timeout,
        settle=rdzvconf.seconds(conf, "settle", RendezvousSettings.settle),
        debounce=rdzvconf.seconds(conf, "debounce", RendezvousSettings.debounce),
        heartbeat_timeout=_heartbeat_timeout(answers, _ETCD_SHORTEST_LEASE if etcd else 0.0),
        store_timeout=rdzvconf.seconds(conf, "store_timeout", RendezvousSettings.store_timeout),
        connect_timeout=join_timeout,
        on_join=answers["on-join"],
        strict_symmetry=answers["strict-symmetry"],
        secret=_secret(answers, start),
        etcd=_etcd_access(answers, environ, start) if etcd else EtcdCluster(),
    )


def default_heartbeat(most: int) -> float:
    """Return the ``heartbeat_timeout`` of a job of at most so many nodes."""
    return RendezvousSettings.heartbeat_timeout * (2 if most > MANY_NODES else 1)


def _heartbeat_timeout(answers: Answers, shortest: float) -> float:
    conf, key = answers[_CONF], "heartbeat_timeout"
    found = rdzvconf.seconds(conf, key, default_heartbeat(answers["nnodes"][1]))
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
        path = files.absolute(flag, start)
        return _file_of(answers, "rdzv-secret-file", path, "", files.secret)
    if conf:
        path = files.absolute(conf, start)
        return _file_of(answers, _CONF, path, "names a secret_file that ", files.secret)
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
    if endpoints.is_this_machine(host):
        return host
    why, code = "is not an address of this machine", ""
    if not endpoints.addresses(host):
        why, code = "does not resolve to an address", "E-HOST-NAME"
    fix = "give one that this machine has (see 'ip address')"
    raise answers.fault("local-addr", why, fix, code)


def _refuse_shown_password(answers: Answers) -> None:
    """Refuse a password on the command line, whatever the backend.

    Raises:
        UsageError: there is one.
    """
    if PASSWORD in answers[_CONF] and answers.given[_CONF].source == "command line":
        why = "puts a password where every user of this machine can read it (ps)"
        raise answers.fault(_CONF, why, _SAFER)


def _etcd_access(answers: Answers, environ: Mapping[str, str], start: Path) -> EtcdCluster:
    """Return how to get into etcd.

    Args:
        answers: every flag, or at least ``--rdzv-conf``.
        environ: the launcher's environment.
        start: where relative paths start.

    Raises:
        UsageError: a file is missing or not what it should be, or settings contradict each other.
    """
    identity = _identity(answers, environ, start)
    return EtcdCluster((), _prefix(answers), *identity, *_tls(answers, start))


def _file_of(answers: Answers, flag: str, path: Path, named: str, read: Callable[[Path], _T]) -> _T:
    """Return what ``read`` makes of a file; its ValueError becomes the error for ``flag``.

    Args:
        answers: every flag.
        flag: the flag that names the file.
        path: the file.
        named: how the message calls it: ``cert='tls/me.pem' ``, or nothing where the flag's value
            is the path.
        read: raises ValueError with the end of a sentence that begins with the path.
    """
    try:
        return read(path)
    except ValueError as exc:
        raise answers.fault(flag, f"{named}{exc}", "") from None


def _conf_file(answers: Answers, key: str, start: Path, read: Callable[[Path], _T]) -> _T | None:
    raw = answers[_CONF].get(key)
    if raw is None:
        return None
    return _file_of(answers, _CONF, files.absolute(raw, start), f"names a {key} that ", read)


def _identity(
    answers: Answers, environ: Mapping[str, str], start: Path
) -> tuple[str | None, str | None]:
    conf = answers[_CONF]
    if PASSWORD in conf and "password_file" in conf:
        raise answers.fault(_CONF, "has both password and password_file", "give one of them")
    user = conf.get("user")
    password = conf.get(PASSWORD) or _conf_file(answers, "password_file", start, files.password)
    from_file = answers.given[_CONF].source == "file"
    if from_file or user is None:
        user = environ.get(ETCD_USER) or user
    if from_file or password is None:
        password = environ.get(ETCD_PASSWORD) or password
    if user and not password:
        raise answers.fault(_CONF, f"has no password for etcd's user {user!r}", _SAFER)
    if password and not user:
        why = "has no user for etcd's password"
        raise answers.fault(_CONF, why, f"give user=NAME, or set the variable {ETCD_USER}")
    return user, password


def _tls(answers: Answers, start: Path) -> tuple[Path | None, Path | None, Path | None]:
    conf = answers[_CONF]
    if ("cert" in conf) != ("key" in conf):
        there, missing = ("cert", "key") if "cert" in conf else ("key", "cert")
        raise answers.fault(_CONF, f"has {there} without {missing}", "give both or none of them")
    named = [name for name in ("cacert", "cert", "key") if name in conf]
    if named and conf.get("protocol") == "http":
        why = f"has {' and '.join(named)}, which protocol=http does not use"
        raise answers.fault(_CONF, why, "write protocol=https")
    if not named and conf.get("protocol") != "https":
        return None, None, None
    cacert = _conf_file(answers, "cacert", start, files.certificate)
    cert = _conf_file(answers, "cert", start, files.certificate)
    key = _conf_file(answers, "key", start, files.private_key)
    return cacert or _system_authorities(answers), cert, key


def _system_authorities(answers: Answers) -> Path:
    """Return the file with the certificate authorities that this machine trusts."""
    import ssl

    found = ssl.get_default_verify_paths().cafile or ""
    if not found:
        why = "asks for TLS, and this machine has no list of certificate authorities"
        raise answers.fault(_CONF, why, "give cacert=PATH")
    return Path(found)


def _prefix(answers: Answers) -> str:
    raw: str = answers[_CONF].get("etcd_prefix", EtcdCluster.prefix)
    word = raw.strip("/")
    if not word or not word.isprintable() or " " in word:
        why = f"has the etcd_prefix {raw!r}, which is no beginning of a key"
        raise answers.fault(_CONF, why, "write etcd_prefix=/NAME")
    return f"/{word}"
