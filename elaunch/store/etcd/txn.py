"""Reads and transactions of etcd's KV service, and its leases.

A transaction that was sent twice, because its first answer was lost, fails its own conditions the
second time. So a writer reads in the same transaction what is there now, and compares that with
what it has wanted to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.store.etcd.calls import Calls
from elaunch.store.etcd.keys import end_of


@dataclass(frozen=True)
class Txn:
    """What a transaction did: ``found`` has the keys and values of each read, in their order."""

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
        request = self._rpc.RangeRequest(
            key=start,
            range_end=end_of(start),
            limit=1,
            sort_order=self._rpc.RangeRequest.DESCEND,
            sort_target=self._rpc.RangeRequest.CREATE,
            max_create_revision=revision - 1,
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
