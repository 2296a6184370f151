"""The renewal of a lease over a stream that stays open.

A renewal over a stream that is there already is about 80 bytes both ways: a call of its own for
each would be twice that.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from elaunch.store.etcd.calls import Calls
from elaunch.store.etcd.errors import Refusal
from elaunch.store.etcd.member import EtcdStream, Member, Metadata


class Renewal:
    """Keeps a lease alive over a stream to any member that answers; one call at a time."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._stream: EtcdStream | None = None

    def renew(self, lease: int, seconds: float, budget: float) -> tuple[int, int]:
        """Renew the lease; return for how many seconds it holds, and the member's revision.

        It is gone where that is 0 seconds.

        Args:
            lease: its id.
            seconds: what one member has for its answer.
            budget: seconds after which no other member is tried.

        Raises:
            as Calls.ask.
        """
        request = self._calls.loaded.rpc.LeaseKeepAliveRequest(ID=lease)

        def one(member: Member, seconds: float, metadata: Metadata) -> tuple[int, int]:
            return self._at(member, request, seconds, metadata)

        with self._lock:
            return self._calls.attempt(one, seconds, budget)

    def close(self) -> None:
        """End the stream; a renewal that waits ends with it."""
        stream = self._stream
        if stream is not None:
            stream.end()

    def _at(
        self, member: Member, request: Any, seconds: float, metadata: Metadata
    ) -> tuple[int, int]:
        stream = self._stream
        if stream is None or stream.member is not member or not stream.idle:
            stream = self._open(member, metadata)  # an answer without a request: it broke
        stream.send(request)
        answer = None
        try:
            answer = stream.receive(seconds)
        except queue.Empty:
            raise Refusal("silent", f"no answer within {seconds:.2g} s") from None
        finally:
            if answer is None:
                self._drop()
        if answer is None:
            self._calls.check_open()
            raise Refusal("failing", "the stream was ended")
        return int(answer.TTL), int(answer.header.revision)

    def _open(self, member: Member, metadata: Metadata) -> EtcdStream:
        self._drop()
        self._stream = EtcdStream(member, "Lease", "LeaseKeepAlive", metadata)
        return self._stream

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.end()
            self._stream = None
