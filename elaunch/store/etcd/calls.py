"""Calls to an etcd of several members: one connection at a time, failover, tokens, deadlines.

All calls go to one member until it fails one. Then every member is asked how it is, in parallel:

=============================================  ===================================================
they report                                    what happens
=============================================  ===================================================
one or more know a leader                      these are tried, the same member first
most are down or know no leader                StoreUnreachable, ``nobody_decides``: an election
nobody answers usefully                        StoreUnreachable
=============================================  ===================================================

Connections are kept when a call on them times out: one that is slow to come about is there for the
next call. Calls must be safe to send twice, because an answer may be lost.

An etcd that was wiped, or restored from a snapshot, does not report it: its revision has gone back,
or its cluster is another one (``RevisionHistory``). Then every call of this connection raises
StoreReplaced.

A transaction that was sent twice, because its first answer was lost, fails its own conditions the
second time. So a writer reads in the same transaction what is there now, and compares that with
what it has wanted to write (``Transactions``).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any, TypeVar

from elaunch.errors import (
    LeaseLost,
    StoreClosed,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreReplaced,
    StoreUnreachable,
)
from elaunch.store.etcd import errors
from elaunch.store.etcd.cluster import EtcdCluster, RevisionHistory, end_of
from elaunch.store.etcd.connection import Member, Metadata
from elaunch.store.etcd.errors import Outcome, Refusal

Result = TypeVar("Result")

PROBE_SECONDS = 0.3
"""How long all members together have to report how they are."""
PASSES = 3
"""How often the members that know a leader are tried for one call."""
DENIED_FIRST, DENIED_MOST = 2.0, 8.0
"""Seconds for which a refused password is not tried again; twice as long after each further one.

etcd compares a password for a tenth of a second of processor time. On a busy machine that takes a
second, in which it renews no lease. Who may be let in again has several tries in ``store_timeout``.
Nor is it asked again within DENIED_MOST before it has answered: it compares to the end even where
nobody waits any more, and would never be done if asked each second.
"""

CLOSE_SECONDS = 1.0

_NEEDS_LEADER: Metadata = (("hasleader", "true"),)


class Calls:
    """The connections to the members of one etcd.

    Args:
        cluster: where it is.
        loaded: what elaunch.store.etcd.imports.load returned.
        history: of this etcd, if the agent was connected to it before.

    Raises:
        StoreDenied: a certificate cannot be read.
    """

    def __init__(
        self, cluster: EtcdCluster, loaded: Any, history: RevisionHistory | None = None
    ) -> None:
        self.cluster = cluster
        self.loaded = loaded
        self.history = history or RevisionHistory()
        self.closed = False
        self._replaced = ""
        self.untrusted = False  # the last StoreDenied was about certificates, not about a user
        self.moved: Callable[[], None] = lambda: None
        credentials = _credentials(cluster, loaded)
        self.members = [Member(loaded, address, credentials) for address in cluster.addresses]
        self._current = random.randrange(len(self.members))  # agents spread over the members
        self._let_in = False
        self._token: str | None = None
        self._token_lock = threading.Lock()
        self._comparing: dict[str, Future[Any]] = {}  # by member: our password
        self._refused = ""  # why the password was refused
        self._refused_until = 0.0
        self._pause = DENIED_FIRST

    @property
    def lost(self) -> bool:
        """Whether this etcd has lost its memory."""
        return bool(self._replaced)

    @property
    def current(self) -> Member:
        """The member that calls go to."""
        return self.members[self._current]

    def ask(self, service: str, method: str, request: Any) -> Any:
        """Call an RPC of etcd's KV or Lease service at a member that can answer.

        Raises:
            StoreUnreachable, StoreDenied, StoreClosed: as the Store's methods.
            StoreError: etcd will not do this, ever.
        """
        timeout, known = self.cluster.call_timeout, self.history.revision

        def one(member: Member, seconds: float, metadata: Metadata) -> Any:
            return member.call(service, method, request, seconds, metadata)

        answer = self.attempt(one, timeout, 2.5 * timeout)
        if service == "KV":  # the headers of other services show how far that member is
            problem = self.history.continues(answer.header, known)
            if problem:
                self._replaced = (
                    f"{self.cluster} has lost its memory: {problem}; was it wiped, or restored "
                    "from a snapshot?"
                )
                self.moved()
                self.check_open()
        return answer

    def attempt(
        self,
        one: Callable[[Member, float, Metadata], Result],
        seconds: float,
        budget: float,
        *,
        anonymous: bool = False,
    ) -> Result:
        """Do ``one(member, seconds, metadata)`` at the current member, or at others that can.

        Args:
            one: raises grpc.RpcError or Refusal; may be called more than once.
            seconds: what one member has for it.
            budget: seconds after which nothing more is tried.
            anonymous: a member gets our token only if it asks for it.

        Raises:
            as ``ask``.
        """
        self.check_open()
        until = time.monotonic() + budget
        candidates = [self.current]
        refusals: dict[str, Refusal] = {}
        for _ in range(PASSES):
            for member in candidates:
                try:
                    result = self._at(member, one, seconds, anonymous)
                except Refusal as refusal:
                    refusals[member.address] = refusal
                else:
                    self._use(member)
                    return result
            candidates = self._probe(refusals)
            if not candidates or time.monotonic() > until:
                break
        raise self._unreachable(refusals)

    def check_open(self) -> None:
        """Raise StoreClosed after ``close``, StoreReplaced where etcd is not what it was."""
        if self.closed:
            raise StoreClosed(f"the connection to {self.cluster} was closed")
        if self._replaced:
            raise StoreReplaced(self._replaced)

    def here(self) -> tuple[Member, Metadata]:
        """Return the member that calls go to, and what goes with a call; raises as ``ask``."""
        timeout = self.cluster.call_timeout
        return self.attempt(lambda member, _, metadata: (member, metadata), timeout, timeout)

    def find(self) -> None:
        """Make a member current that knows a leader; raises as ``ask``."""
        refusals: dict[str, Refusal] = {}
        candidates = self._probe(refusals)
        if not candidates:
            raise self._unreachable(refusals)
        self._use(candidates[0])

    def metadata(self, member: Member, seconds: float) -> Metadata:
        """Return what goes with each call: that a leader is needed, and our token."""
        if self.cluster.user is None:
            return _NEEDS_LEADER
        with self._token_lock:
            if self._token is None:
                self._token = self._authenticate(member, seconds)
                self._refused, self._pause = "", DENIED_FIRST
            return (*_NEEDS_LEADER, ("token", self._token)) if self._token else _NEEDS_LEADER

    def forget_token(self, metadata: Metadata) -> None:
        """Have a new token fetched for the next call, if ``metadata`` has the present one."""
        with self._token_lock:
            if not self._token or ("token", self._token) in metadata:
                self._token = None

    def refusal(self, error: Any, waited: float) -> Refusal:
        """Return what a grpc.RpcError means; raises StoreClosed if it is our own doing."""
        self.check_open()
        return errors.refusal(error.code().name, error.details() or "", waited)

    def close(self) -> None:
        """Close all connections; calls end with StoreClosed.

        What is not done after CLOSE_SECONDS is done by the thread that the connections belong to.
        """
        self.closed = True
        wait([member.close() for member in self.members], CLOSE_SECONDS)

    def _use(self, member: Member) -> None:
        self._let_in = True
        if member is not self.current:
            self._current = self.members.index(member)
            self.moved()

    def _at(
        self,
        member: Member,
        one: Callable[[Member, float, Metadata], Result],
        seconds: float,
        anonymous: bool,
    ) -> Result:
        """Do it at one member, twice if it did not know our token; raises Refusal."""
        for may_renew in (True, False):
            metadata: Metadata = _NEEDS_LEADER
            try:
                if not (anonymous and may_renew):
                    metadata = self.metadata(member, seconds)
                return one(member, seconds, metadata)
            except self.loaded.grpc.RpcError as error:
                refusal = self.refusal(error, seconds)
            except Refusal as raised:
                refusal = raised
            if refusal.kind == "denied":
                raise StoreDenied(errors.denied(self.cluster, refusal.text))
            if refusal.kind == "gone":
                raise LeaseLost(f"{self.cluster} has given up our entry: the lease has expired")
            if refusal.kind == "full":
                raise StoreFull(errors.full(self.cluster, refusal.text))
            if refusal.kind == "wrong":
                raise StoreError(f"{self.cluster} cannot do what it was asked: {refusal.text}")
            if refusal.kind != "token":
                raise refusal
            if self.cluster.user is None:
                raise StoreDenied(errors.denied(self.cluster, refusal.text))
            self.forget_token(metadata)
            if not may_renew:
                raise refusal
        raise AssertionError("both turns of the loop return or raise")

    def _authenticate(self, member: Member, seconds: float) -> str:
        """Return a token for our user; empty if this etcd has no users."""
        if time.monotonic() < self._refused_until:
            raise Refusal("denied", self._refused)
        comparing = self._comparing.pop(member.address, None)
        if comparing is None:
            request = self.loaded.rpc.AuthenticateRequest(
                name=self.cluster.user, password=self.cluster.password or ""
            )
            comparing = member.begin("Auth", "Authenticate", request, DENIED_MOST, _NEEDS_LEADER)
        try:
            return str(comparing.result(seconds).token)
        except NotYet:
            self._comparing[member.address] = comparing
            refusal = errors.refusal("DEADLINE_EXCEEDED", "", seconds)
        except self.loaded.grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            refusal = self.refusal(error, DENIED_MOST)
            if refusal.kind == "denied":
                self._refused = refusal.text
        if self._refused:  # no answer in time is no better
            self._refused_until = time.monotonic() + self._pause
            self._pause = min(DENIED_MOST, 2 * self._pause)
        raise refusal

    def _probe(self, refusals: dict[str, Refusal]) -> list[Member]:
        """Return the members that know a leader, the current one first; ``refusals`` is updated."""
        request = self.loaded.rpc.StatusRequest()
        metadata = (("token", self._token),) if self._token else ()
        asked = [
            (member, member.begin("Maintenance", "Status", request, PROBE_SECONDS, metadata))
            for member in self.members
        ]
        can = []
        for member, future in asked:
            found = self._status_of(future)
            if found is None:
                can.append(member)
                if member.address in refusals:
                    text = f"it knows a leader, but: {refusals[member.address].text}"
                    refusals[member.address] = Refusal("failing", text)
            else:
                refusals[member.address] = found
        return sorted(can, key=lambda member: member is not self.current)

    def _status_of(self, future: Any) -> Refusal | None:
        """Return why a member cannot be used by its answer to a probe; None: it can."""
        try:
            leader = future.result().leader  # ends by its own deadline
        except self.loaded.grpc.RpcError as error:
            refusal = self.refusal(error, PROBE_SECONDS)
            return None if refusal.kind in ("token", "denied") else refusal
        return None if leader else Refusal("leaderless", "it has no leader")

    def _unreachable(self, refusals: dict[str, Refusal]) -> StoreError:
        ordered = {a: refusals[a] for a in self.cluster.addresses if a in refusals}
        outcome = Outcome(ordered, len(self.members))
        self.untrusted = not self._let_in and _only_tls(refusals.values())
        if self.untrusted:
            return StoreDenied(errors.not_trusted(self.cluster, outcome.text))
        text = f"no etcd answers: {outcome.text}"
        return StoreUnreachable(text, outcome.nobody_decides)


def _only_tls(refusals: Iterable[Refusal]) -> bool:
    kinds = {refusal.kind for refusal in refusals}
    return "tls" in kinds and kinds <= {"tls", "refused", "silent"}


def _credentials(cluster: EtcdCluster, loaded: Any) -> Any:
    if cluster.cacert is None:
        return None
    try:
        cacert, key, cert = (
            None if path is None else path.read_bytes()
            for path in (cluster.cacert, cluster.key, cluster.cert)
        )
    except OSError as error:
        raise StoreDenied(
            f"{cluster} needs the file {error.filename}, which cannot be read: {error.strerror}"
        ) from error
    return loaded.grpc.ssl_channel_credentials(cacert, key, cert)


@dataclass(frozen=True)
class Txn:
    """The result of a transaction: ``found`` has the keys and values of each read, in order."""

    done: bool
    revision: int
    found: tuple[Sequence[Any], ...]


class Transactions:
    """Builds the parts of a transaction from etcd3's generated code, and sends it."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._rpc = calls.loaded.rpc

    def read(self, key: bytes) -> tuple[Any | None, int]:
        """Return what is at ``key`` (None: nothing), and the revision of the read."""
        answer = self.calls.ask("KV", "Range", self._rpc.RangeRequest(key=key))
        return (answer.kvs[0] if answer.kvs else None), int(answer.header.revision)

    def read_all(self, start: bytes, keys_only: bool = False) -> tuple[Sequence[Any], int]:
        """Return all that begins with ``start``, and the revision of the read."""
        request = self._rpc.RangeRequest(key=start, range_end=end_of(start), keys_only=keys_only)
        answer = self.calls.ask("KV", "Range", request)
        return answer.kvs, int(answer.header.revision)

    def created(self, key: bytes, revision: int) -> Any:
        """Return the condition that ``key`` was created at ``revision``; 0: it is not there."""
        return self._rpc.Compare(key=key, target=self._rpc.Compare.CREATE, create_revision=revision)

    def modified(self, key: bytes, revision: int) -> Any:
        """Return the condition that ``key`` was last written at ``revision``; 0: not there."""
        return self._rpc.Compare(key=key, target=self._rpc.Compare.MOD, mod_revision=revision)

    def put(self, key: bytes, value: bytes, lease: int = 0) -> Any:
        """Return the operation that writes ``value``."""
        request = self._rpc.PutRequest(key=key, value=value, lease=lease)
        return self._rpc.RequestOp(request_put=request)

    def get(self, key: bytes) -> Any:
        """Return the operation that reads ``key``."""
        return self._rpc.RequestOp(request_range=self._rpc.RangeRequest(key=key))

    def get_before(self, start: bytes, revision: int = 1) -> Any:
        """Return the operation that reads the last key created before ``revision``; 1: of all."""
        return self._get_one(start, self._rpc.RangeRequest.DESCEND, revision - 1)

    def get_first(self, start: bytes) -> Any:
        """Return the operation that reads the key that was created first."""
        return self._get_one(start, self._rpc.RangeRequest.ASCEND, 0)

    def _get_one(self, start: bytes, order: Any, newest: int) -> Any:
        request = self._rpc.RangeRequest(
            key=start,
            range_end=end_of(start),
            limit=1,
            sort_order=order,
            sort_target=self._rpc.RangeRequest.CREATE,
            max_create_revision=newest,
        )
        return self._rpc.RequestOp(request_range=request)

    def delete(self, key: bytes) -> Any:
        """Return the operation that removes ``key``."""
        request = self._rpc.DeleteRangeRequest(key=key)
        return self._rpc.RequestOp(request_delete_range=request)

    def send(self, conditions: list[Any], then: list[Any], otherwise: list[Any]) -> Txn:
        """Do ``then`` if all conditions hold, or else ``otherwise``; raises as Calls.ask."""
        request = self._rpc.TxnRequest(compare=conditions, success=then, failure=otherwise)
        answer = self.calls.ask("KV", "Txn", request)
        found = tuple(
            one.response_range.kvs
            for one in answer.responses
            if one.WhichOneof("response") == "response_range"
        )
        return Txn(bool(answer.succeeded), int(answer.header.revision), found)

    def expire(self, keys: Sequence[bytes], seconds: int) -> None:
        """Have what is at ``keys`` removed together in some seconds, if it is not written again."""
        kvs = [self.read(key)[0] for key in keys]
        found = [kv for kv in kvs if kv is not None and not kv.lease]
        if not found:
            return
        lease, _ = self.grant(seconds)
        for kv in found:
            unchanged = self.modified(kv.key, kv.mod_revision)
            self.send([unchanged], [self.put(kv.key, kv.value, lease)], [])

    def grant(self, seconds: int) -> tuple[int, int]:
        """Return a new lease and for how many seconds it holds, which may be more than asked."""
        answer = self.calls.ask("Lease", "LeaseGrant", self._rpc.LeaseGrantRequest(TTL=seconds))
        return int(answer.ID), int(answer.TTL)

    def revoke(self, lease: int) -> None:
        """Give up a lease and all that was written under it; raises LeaseLost if it is gone."""
        self.calls.ask("Lease", "LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=lease))
