"""Real etcd for tests: one member or several, with TLS, client certificates, users; to be hurt.

Each cluster listens on a loopback address of its own (127.x.y.z), where no other test and no
outgoing connection can take a port while a member is down. Members keep production's timings
(heartbeat 100 ms, election 1 s); a single member is given short ones, it has nobody to wait for.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elaunch.store.etcd.cluster import EtcdCluster
from tests import programs
from tests.launching import free_port, freeze, thaw

START_DEADLINE = 60.0
"""Seconds for a cluster to elect its leader; it takes about one on a machine that is not busy."""


@dataclass(frozen=True)
class Identity:
    """Files of a certificate authority, and of what it has signed."""

    cacert: Path
    cert: Path
    key: Path


def make_identity(directory: Path, *hosts: str) -> Identity:
    """Write a new authority and one certificate for server and client use."""
    import trustme

    directory.mkdir(parents=True)
    authority = trustme.CA()
    leaf = authority.issue_cert(*hosts)
    made = Identity(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    authority.cert_pem.write_to_path(str(made.cacert))
    leaf.private_key_pem.write_to_path(str(made.key))
    for blob in leaf.cert_chain_pems:
        blob.write_to_path(str(made.cert), append=True)
    return made


def own_address() -> str:
    """Return a loopback address that nothing else uses."""
    return f"127.{random.randint(16, 250)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


@dataclass
class Member:
    """One etcd process; ``command`` is what etcd is started with, less its path."""

    name: str
    host: str
    port: int
    peer: str
    directory: Path
    command: list[str] = field(default_factory=list)
    wrap: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where clients reach it."""
        return self.host, self.port

    @property
    def data(self) -> Path:
        """Where its data is."""
        return self.directory / self.name

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    def start(self) -> None:
        """Start the process, again on the same ports and data if it ran before."""
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrap, "etcd", *self.command], stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def freeze(self) -> None:
        """Stop it with SIGSTOP: its connections stay, and nothing answers."""
        freeze(self.pid)

    def thaw(self) -> None:
        """Let a frozen member go on."""
        thaw(self.pid)


@dataclass
class Cluster:
    """A started etcd."""

    directory: Path
    members: list[Member]
    identity: Identity | None = None
    client_certs: bool = False
    users: bool = False

    def place(self, **changes: Any) -> EtcdCluster:
        """Return how to reach it, with ``changes`` to the fields."""
        place = EtcdCluster(tuple(member.endpoint for member in self.members))
        if self.identity is not None:
            place = replace(place, cacert=self.identity.cacert)
        if self.identity is not None and self.client_certs:
            place = replace(place, cert=self.identity.cert, key=self.identity.key)
        return replace(place, **changes)

    def start(self) -> None:
        """Start all members and wait until they have a leader."""
        for member in self.members:
            member.start()
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until every member answers and knows the leader."""
        until = time.monotonic() + START_DEADLINE
        while not all(self._leader_id(member) for member in self.members):
            for member in self.members:
                code = member.process and member.process.poll()
                assert code is None, f"{member.name} ended with {code}: {self.log(member)}"
            assert time.monotonic() < until, f"no leader: {self.log(self.members[0])}"
            time.sleep(0.02)

    def leader(self) -> Member:
        """Return the member that leads now."""
        until = time.monotonic() + START_DEADLINE
        while time.monotonic() < until:
            for member in self.members:
                status = self._status(member) if member.process else None
                if status is not None and status.leader == status.header.member_id:
                    return member
            time.sleep(0.02)
        raise AssertionError("no leader")

    def move_leader(self) -> None:
        """Have another member lead."""
        leader = self.leader()
        other = next(member for member in self.members if member is not leader)
        number = self._status(other).header.member_id
        self._etcdctl("move-leader", f"{number:x}", member=leader)
        self.await_ready()

    def member_at(self, address: str) -> Member:
        """Return the member that listens at ``host:port``."""
        return next(m for m in self.members if f"{m.host}:{m.port}" == address)

    def call(
        self,
        service: str,
        method: str,
        request: Any,
        member: Member | None = None,
        timeout: float = 60.0,
    ) -> Any:
        """Ask one member something through gRPC, as root after ``add_user``."""
        from elaunch.store.etcd import imports

        loaded = imports.load()
        target = "{}:{}".format(*(member or self.members[0]).endpoint)
        options = (("grpc.use_local_subchannel_pool", 1),)
        if self.identity is None:
            channel = loaded.grpc.insecure_channel(target, options)
        else:
            files = [self.identity.cacert, self.identity.key, self.identity.cert]
            credentials = loaded.grpc.ssl_channel_credentials(*(f.read_bytes() for f in files))
            channel = loaded.grpc.secure_channel(target, credentials, options)
        until = time.monotonic() + timeout
        with channel:
            call = loaded.method(channel, service, method)
            while self.users:
                root = loaded.rpc.AuthenticateRequest(name="root", password="root")
                token = loaded.method(channel, "Auth", "Authenticate")(root, timeout=timeout).token
                try:
                    return call(request, timeout=timeout, metadata=[("token", token)])
                except loaded.grpc.RpcError as error:  # a token that lives for a second is over
                    expired = error.code() is loaded.grpc.StatusCode.UNAUTHENTICATED
                    if not expired or time.monotonic() >= until:
                        raise
            return call(request, timeout=timeout)

    def fill(self) -> None:
        """Write until it takes no more; give it a small ``--quota-backend-bytes``."""
        from elaunch.store.etcd import imports

        loaded = imports.load()
        with contextlib.suppress(loaded.grpc.RpcError):
            while True:
                self.call("KV", "Put", loaded.rpc.PutRequest(key=b"junk", value=bytes(50_000)))

    def drain(self) -> None:
        """Have it take writes again."""
        self.compact()
        self._etcdctl("defrag")
        self._etcdctl("alarm", "disarm")

    def wipe(self) -> None:
        """End all members and start them with no data, at the same addresses."""
        self.close()
        for member in self.members:
            shutil.rmtree(member.data)
        self.start()

    def save(self, path: Path) -> None:
        """Save a snapshot of the first member."""
        self._etcdctl("snapshot", "save", str(path))

    def restore(self, path: Path) -> None:
        """End all members and start them with what was saved."""
        self.close()
        initial = ",".join(f"{member.name}={member.peer}" for member in self.members)
        for member in self.members:
            shutil.rmtree(member.data)
            words = ["--name", member.name, "--data-dir", str(member.data)]
            words += ["--initial-cluster", initial, "--initial-advertise-peer-urls", member.peer]
            self._etcdctl("snapshot", "restore", str(path), *words)
        self.start()

    def _etcdctl(self, *words: str, member: Member | None = None) -> None:
        programs.needed("etcdctl")
        host, port = (member or self.members[0]).endpoint
        argv = ["etcdctl", f"--endpoints={host}:{port}", *words]
        environ = os.environ | {"ETCDCTL_API": "3"}
        subprocess.run(argv, check=True, capture_output=True, timeout=60, env=environ)

    def compact(self, member: Member | None = None) -> None:
        """Throw away the history of all keys."""
        from elaunch.store.etcd import imports

        rpc = imports.load().rpc
        revision = self.call("KV", "Range", rpc.RangeRequest(key=b"x"), member).header.revision
        request = rpc.CompactionRequest(revision=revision, physical=True)
        self.call("KV", "Compact", request, member)

    def keys(self) -> list[bytes]:
        """Return every key."""
        from elaunch.store.etcd import imports

        request = imports.load().rpc.RangeRequest(key=b"\0", range_end=b"\0", keys_only=True)
        return [kv.key for kv in self.call("KV", "Range", request).kvs]

    def add_user(self, user: str, password: str, prefix: str) -> None:
        """Create the user, who may use keys below ``prefix``, and switch on authentication."""
        from elaunch.store.etcd import imports
        from elaunch.store.etcd.cluster import end_of

        rpc = imports.load().rpc
        self.call("Auth", "UserAdd", rpc.AuthUserAddRequest(name="root", password="root"))
        self.call("Auth", "RoleAdd", rpc.AuthRoleAddRequest(name="root"))
        self.call("Auth", "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        self.call("Auth", "UserAdd", rpc.AuthUserAddRequest(name=user, password=password))
        self.call("Auth", "RoleAdd", rpc.AuthRoleAddRequest(name="jobs"))
        start = f"{prefix}/".encode()
        grant = rpc.AuthRoleGrantPermissionRequest(name="jobs")
        grant.perm.permType = 2  # READWRITE
        grant.perm.key, grant.perm.range_end = start, end_of(start)
        self.call("Auth", "RoleGrantPermission", grant)
        self.call("Auth", "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=user, role="jobs"))
        self.set_auth(True)

    def set_auth(self, on: bool) -> None:
        """Switch authentication on or off."""
        from elaunch.store.etcd import imports

        rpc = imports.load().rpc
        request = rpc.AuthEnableRequest() if on else rpc.AuthDisableRequest()
        self.call("Auth", "AuthEnable" if on else "AuthDisable", request)
        self.users = on

    def set_password(self, user: str, password: str) -> None:
        """Change a user's password."""
        from elaunch.store.etcd import imports

        request = imports.load().rpc.AuthUserChangePasswordRequest(name=user, password=password)
        self.call("Auth", "UserChangePassword", request)

    def log(self, member: Member) -> str:
        """Return the end of what a member has written."""
        return (self.directory / f"{member.name}.log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End all members."""
        for member in self.members:
            member.kill()

    def _status(self, member: Member) -> Any:
        from elaunch.store.etcd import imports

        loaded = imports.load()
        try:
            return self.call("Maintenance", "Status", loaded.rpc.StatusRequest(), member, 5.0)
        except loaded.grpc.RpcError:
            return None

    def _leader_id(self, member: Member) -> int:
        status = self._status(member)
        return 0 if status is None else int(status.leader)


@contextmanager
def etcd(
    directory: Path,
    size: int = 1,
    *,
    tls: bool = False,
    client_certs: bool = False,
    hosts: Sequence[str] = (),
    wraps: Sequence[Sequence[str]] = (),
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Run an etcd of ``size`` members below ``directory``; skips the test where there is none.

    Args:
        directory: for data, logs and certificates.
        size: members.
        tls: clients must use TLS, and trust ``Cluster.identity``.
        client_certs: clients must show a certificate of the same authority.
        hosts: an address per member; without them one loopback address for all.
        wraps: per member what its command begins with, such as ``ip netns exec NAME``.
        options: more flags of etcd.
    """
    programs.needed("etcd")
    directory.mkdir(parents=True, exist_ok=True)
    hosts = list(hosts) or [own_address()] * size
    identity = make_identity(directory / "tls", *set(hosts)) if tls or client_certs else None
    taken = _members(directory, hosts, wraps)
    initial = ",".join(f"{member.name}={member.peer}" for member in taken)
    for member in taken:
        member.command = [*_command(member, initial, identity, client_certs), *options]
    cluster = Cluster(directory, taken, identity, client_certs)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _members(directory: Path, hosts: Sequence[str], wraps: Sequence[Sequence[str]]) -> list[Member]:
    members: list[Member] = []
    used: set[int] = set()
    for index, host in enumerate(hosts):
        ports: list[int] = []
        while len(ports) < 2:
            # In a network namespace of its own every port is free; elsewhere this one is.
            port = 2379 + len(ports) if wraps else free_port(host)
            if wraps or port not in used:
                ports.append(port)
                used.add(port)
        peer = f"http://{host}:{ports[1]}"
        wrap = wraps[index] if wraps else ()
        members.append(Member(f"m{index}", host, ports[0], peer, directory, wrap=wrap))
    return members


def _command(
    member: Member, initial: str, identity: Identity | None, client_certs: bool
) -> list[str]:
    url = f"{'http' if identity is None else 'https'}://{member.host}:{member.port}"
    words = ["--name", member.name, "--data-dir", str(member.data)]
    words += ["--listen-client-urls", url, "--advertise-client-urls", url]
    words += ["--listen-peer-urls", member.peer, "--initial-advertise-peer-urls", member.peer]
    words += ["--initial-cluster", initial, "--unsafe-no-fsync", "--logger", "zap"]
    if "," not in initial:
        words += ["--heartbeat-interval", "20", "--election-timeout", "200"]
    if identity is not None:
        words += ["--cert-file", str(identity.cert), "--key-file", str(identity.key)]
    if identity is not None and client_certs:
        words += ["--trusted-ca-file", str(identity.cacert), "--client-cert-auth"]
    return words
