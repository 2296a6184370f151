"""Opens the store in which the agents of a job meet, by the backend that the user has named.

=======  ===========================================================================================
backend  how an agent gets to the store
=======  ===========================================================================================
etcd     a client of the endpoints
c10d     the agent that can listen on the endpoint hosts a TCPStore, the others are its clients
static   node 0 hosts one on a free port; the port is read from the store at the master's port,
         the one address that all agents know, where node 0 keeps it beside the workers' keys
=======  ===========================================================================================
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from elaunch.agent.workers.network import listen_for_nodes
from elaunch.agent.workers.server import SWEEP_OVERDUE
from elaunch.config import Settings, endpoints
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreClosed, StoreDenied, StoreError, StoreUnreachable, UsageError
from elaunch.hosts import is_loopback
from elaunch.rendezvous import records
from elaunch.rendezvous.decide.view import Rules
from elaunch.store.etcd.cluster import RevisionHistory
from elaunch.store.protocol import Store

if TYPE_CHECKING:
    from elaunch.rendezvous.munge import MungeKey

FOREIGN_PATIENCE = 2.5
"""Seconds for what has the endpoint's port to show that it is this job's store after all."""
LOG_AFTER = 3.0
"""Seconds of waiting for a store after which that is logged."""
END_MARGIN = 10.0
"""Seconds beyond all graces for a node to report that its round has ended."""
ATTEMPT = 6.0
"""Seconds of one attempt to get to the store; longer than FOREIGN_PATIENCE."""
SHORTEST_PROBE, PROBE_DEADLINE = 1.0, 2.0
LOOK_AGAIN = 0.2

log = logging.getLogger("elaunch")


def rules(
    settings: Settings, rendezvous: RendezvousSettings, hosts: bool, killed_in: int | None = None
) -> Rules:
    """Return what the coordinator decides by; ``hosts``: the store ends with this agent.

    ``killed_in``: as in Rules.
    """
    return Rules(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        settle=rendezvous.settle,
        debounce=rendezvous.debounce,
        join_timeout=rendezvous.join_timeout,
        heartbeat_timeout=rendezvous.heartbeat_timeout,
        store_timeout=rendezvous.store_timeout,
        preempt_grace=settings.shutdown_timeout,
        # The workers have one grace to end, what they left in memory another to be written out.
        end_timeout=2 * settings.shutdown_timeout + SWEEP_OVERDUE + END_MARGIN,
        max_restarts=settings.max_restarts,
        lifetime_budget=settings.restart_budget == "lifetime",
        max_same_failures=settings.max_same_failures,
        on_join=rendezvous.on_join,
        static=rendezvous.backend == "static",
        strict_symmetry=rendezvous.strict_symmetry,
        has_checkpoint_dir=settings.checkpoint_dir is not None,
        checkpoint_local=settings.checkpoint_local,
        hosted_by_me=hosts,
        killed_in=killed_in,
    )


class StoreOpener:
    """Opens this agent's store; owns the socket that a TCPStore of the agents is hosted on.

    Args:
        rendezvous: where to meet.
        run_id: of the job.
        publish: has a text hosted at the master's port (static, node 0).
        key: what settles a key by MUNGE, where that is to be and none was given.
        agents: of the job, at most; the more, the less often each asks etcd whether it is let in.
    """

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        run_id: str,
        publish: Callable[[str], None],
        key: MungeKey | None = None,
        agents: int = 1,
    ) -> None:
        self._agents = agents
        self._rendezvous = rendezvous
        self._run_id = run_id
        self._publish = publish
        self._key = key
        self._attempt = min(ATTEMPT, rendezvous.connect_timeout, rendezvous.store_timeout)
        self._listening: socket.socket | None = None
        self._port_in_use = False
        self._closed = threading.Event()
        self._waits_since: float | None = None
        self._logged = False
        self._history = RevisionHistory()

    @property
    def hosts(self) -> bool:
        """Whether the agents' TCPStore is hosted here."""
        return self._listening is not None

    @property
    def secret(self) -> bytes | None:
        """The secret of this job's agents, since the store was opened; None if they have none."""
        return self._rendezvous.secret if self._key is None else self._key.secret

    def prepare(self) -> None:
        """Bind what is to be hosted here, and make the key that its clients are to share.

        Raises UsageError when the port is another process's, naming that where it is visible.
        """
        settings = self._rendezvous
        if settings.backend == "static" and settings.is_host:
            self._listening = listen_for_nodes(settings.endpoints[0][0], 0)
        elif settings.backend == "c10d" and settings.is_host is not False:
            self._listening = self._bind(*settings.endpoints[0])
        if self._listening is not None:
            problem = self._key.host() if self._key is not None else ""
            if self.secret is None:
                why = f"; Slurm's MUNGE would, but {problem}" if problem else ""
                log.warning("%s%s", _open_to(self._listening), why)

    def _bind(self, host: str, port: int) -> socket.socket | None:
        try:
            return listen_for_nodes(host, port)
        except socket.gaierror as error:
            raise UsageError(
                f"--rdzv-endpoint {host}: {error.strerror}", code="E-HOST-NAME"
            ) from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"--rdzv-endpoint: cannot listen on {host} port {port}: {error.strerror}",
                    code="E-PORT-IN-USE",
                ) from error
        self._refuse_foreign(host, port)
        self._port_in_use = True
        return None

    def _refuse_foreign(self, host: str, port: int) -> None:
        """Refuse a port that something else has; an agent may host this job's store on it."""
        from elaunch.store.tcp import client

        if endpoints.may_be_agent(port):
            return  # it may serve in a moment; the store is waited for
        try:
            client.connect(host, port, self._run_id, deadline=FOREIGN_PATIENCE).close()
        except StoreUnreachable as error:
            raise UsageError(self._not_ours(host, port, str(error)), code="E-PORT-IN-USE") from None

    def _not_ours(self, host: str, port: int, what: str) -> str:
        holder = endpoints.why_not_free(host, port) or "was in use a moment ago"
        return (
            f"--rdzv-endpoint: port {port} of {host} {holder}, and not by the store of this job "
            f"({self._run_id!r}): {what}; give another port, or use etcd, where jobs share one "
            "endpoint"
        )

    def open(self, seconds: float = ATTEMPT) -> Store:
        """Return a store of this job, after ``seconds`` or ATTEMPT at most, and those of MUNGE.

        Raises StoreUnreachable, StoreDenied, StoreClosed. How often to try is the caller's.
        """
        try:
            etcd, seconds = self._rendezvous.backend == "etcd", min(seconds, self._attempt)
            store: Store = self._open_etcd(seconds) if etcd else self._open_tcp(seconds)
        except StoreUnreachable as error:
            self._log_waiting(error)
            if self._port_in_use:
                self._refuse_other_job(error)
            raise
        self._waits_since = None
        return store

    def _settle_key(self, settle: Callable[[MungeKey], None], store: Store) -> None:
        """Share the key of ``store``, if MUNGE is to; closes it where that cannot be."""
        if self._key is None:
            return
        try:
            settle(self._key)
        except StoreError:
            store.close()
            raise

    @property
    def _signs(self) -> bytes | None:
        return records.key_of(self.secret, self._run_id)

    def _refuse_other_job(self, problem: StoreUnreachable) -> None:
        """Give up where another job's store keeps the port of this machine."""
        from elaunch.store.tcp import client

        host, port = self._rendezvous.endpoints[0]
        try:
            identity = client.identify(host, port, PROBE_DEADLINE)
        except StoreUnreachable:
            return
        if identity is not None and identity["run_id"] != self._run_id:
            raise StoreDenied(self._not_ours(host, port, str(problem))) from None

    def _log_waiting(self, problem: StoreUnreachable) -> None:
        """Log once what is waited for: on a terminal nothing else happens."""
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        if not self._logged and now - self._waits_since >= LOG_AFTER:
            self._logged = True
            log.warning("waiting for the store: %s", problem)

    def _open_tcp(self, seconds: float) -> Store:
        settings, until = self._rendezvous, time.monotonic() + seconds
        from elaunch.store.tcp import client

        if self._listening is not None:
            listening, shared = self._listening.dup(), self._key.credential if self._key else b""
            store = client.host(listening, self._run_id, shared=shared, key=self._signs)
            if settings.backend == "static":
                self._publish_address()
            return store
        host, port = settings.endpoints[0]
        moved: Callable[[], bool] | None = None
        if settings.backend == "static":
            host, port = self._read_address(host, port, seconds)
            moved = functools.partial(self._has_moved, (host, port))
        store = client.connect(
            host,
            port,
            self._run_id,
            deadline=until - time.monotonic(),
            stop=self._closed,
            moved=moved,
            key=self._signs if self._key is None else None,
        )

        def read(key: MungeKey) -> None:
            key.read(store)
            store.prove(self._signs)

        self._settle_key(read, store)
        return store

    def _open_etcd(self, seconds: float) -> Store:
        from elaunch.store.etcd import client as etcd

        settings = self._rendezvous
        cluster = replace(settings.etcd, endpoints=settings.endpoints, agents=self._agents)
        store = etcd.connect(cluster, self._run_id, deadline=seconds, history=self._history)
        self._settle_key(lambda key: key.agree(store), store)
        return store

    def _publish_address(self) -> None:
        assert self._listening is not None  # hosts
        port = self._listening.getsockname()[1]
        identity = {
            "elaunch": 1,
            "run_id": self._run_id,
            "boot": "",
            "store": port,
        }
        self._publish(json.dumps(identity))

    def _has_moved(self, address: tuple[str, int]) -> bool:
        """Return whether the agents' store is at another address now; False where none is found."""
        try:
            return self._read_address(*self._rendezvous.endpoints[0], LOOK_AGAIN) != address
        except (StoreUnreachable, StoreClosed):
            return False

    def _read_address(self, host: str, port: int, deadline: float) -> tuple[str, int]:
        """Read where the agents' store is; between two rounds nobody answers for a moment."""
        from elaunch.store.tcp import client

        until, problem = time.monotonic() + deadline, "nobody answers"
        while time.monotonic() < until:
            try:
                left = max(SHORTEST_PROBE, until - time.monotonic())
                identity = client.identify(host, port, min(PROBE_DEADLINE, left))
            except StoreUnreachable as error:
                identity, problem = None, str(error)
            if identity is not None and identity.get("run_id") != self._run_id:
                problem = (
                    f"it belongs to the job {identity.get('run_id')!r}, not to {self._run_id!r}"
                )
            elif identity is not None and identity.get("store"):
                return host, identity["store"]
            if self._closed.wait(LOOK_AGAIN):
                raise StoreClosed("this agent ends")
        raise StoreUnreachable(
            f"no agent of node 0 was found at {host} port {port} (--master-addr, --master-port) "
            f"within {deadline:g} s: {problem}; is it started with --node-rank 0?"
        )

    def close(self) -> None:
        """Let the port go; a thread that still looks for the store stops."""
        self._closed.set()
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def _open_to(listening: socket.socket) -> str:
    """Return the warning that a store without a secret is open, to whom, and what closes it."""
    host, port = listening.getsockname()[:2]
    here = is_loopback(host)
    who = "any local user" if here else f"whoever reaches port {port} of this machine"
    return (
        f"the store of this job's agents is open: {who} can stop or hijack this job; "
        "--rdzv-secret-file FILE, the same on all nodes, closes it"
    )
