"""Watches that outlive their connection: all that one store waits for, over one stream.

A thread reads the stream. When it breaks, the thread opens the next one at a member that knows a
leader, and each watch goes on from the revision after the last one that it has seen. If etcd has
compacted that revision away, the watch's owner reads everything again and reports the differences.

All calls that wait for news wait on one condition of the store. An interruption shorter than
``PATIENCE`` (an election takes one or two seconds) is not reported; a longer one ends the wait with
the reason.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from elaunch.errors import StoreClosed, StoreDenied, StoreError, StoreReplaced, StoreUnreachable
from elaunch.store.etcd import errors
from elaunch.store.etcd.calls import Calls
from elaunch.store.etcd.connection import EtcdStream, Metadata

PATIENCE = 3.0
"""Seconds without a stream after which waiting calls raise."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5

Found = TypeVar("Found")


@dataclass
class Watch:
    """One key to watch, or with ``end`` all keys from ``start`` to before ``end``.

    ``revision`` is the next that is wanted. ``take`` is called with etcd's events in the watching
    thread, and must not block; ``reread`` reads all again and returns the revision of that.
    """

    start: bytes
    end: bytes
    revision: int
    take: Callable[[Sequence[Any]], None]
    reread: Callable[[], int]
    stale: bool = False


class Watcher:
    """Owns the stream, the thread that reads it, and the list of watches.

    Args:
        calls: the connections.
        news: notified whenever a watch has taken something, or watching has failed.
    """

    def __init__(self, calls: Calls, news: threading.Condition) -> None:
        self._calls = calls
        self._rpc = calls.loaded.rpc
        self._news = news
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._stream: EtcdStream | None = None
        self._metadata: Metadata = ()
        self._confirmed = False
        self._asked: deque[Watch] = deque()  # in the order in which etcd will confirm them
        self._by_id: dict[int, Watch] = {}
        self._thread: threading.Thread | None = None
        self._failure: StoreError | None = None
        self._failed_at = self._down_since = 0.0
        self._pause = _FIRST_PAUSE

    def add(self, watch: Watch) -> None:
        """Begin with one more watch."""
        with self._lock:
            self._watches.append(watch)
            if self._stream is not None:
                self._create(self._stream, watch)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="etcd watch", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._watches.remove(watch)
                    raise StoreUnreachable(f"etcd cannot be watched: {error}") from error
                self._thread = thread

    def remove(self, watch: Watch) -> None:
        """End a watch."""
        with self._lock:
            self._watches.remove(watch)
            ids = [number for number, known in self._by_id.items() if known is watch]
            for number in ids:
                del self._by_id[number]
                if self._stream is not None:
                    self._cancel(self._stream, number)

    def move(self) -> None:
        """Go on at the member that calls go to now, if it is another one, or end for good."""
        with self._lock:
            stream = self._stream
            if stream is not None and (
                self._calls.lost or stream.member is not self._calls.current
            ):
                stream.end()
        with self._news:
            self._news.notify_all()

    def check(self, since: float) -> None:
        """Raise why there is no stream, if that lasts and was found again after ``since``.

        Call it with the condition held. ``since`` is when the caller began to wait, on the
        monotonic clock: a caller that waits again gets no error before a new try.

        Raises:
            as Calls.ask.
        """
        self._calls.check_open()
        if self._failure is None or self._failed_at < since:
            return
        if self._failed_at - self._down_since >= PATIENCE:
            raise copy(self._failure)

    def wait(self, find: Callable[[], Found | None], began: float, timeout: float) -> Found | None:
        """Return what ``find`` finds; None where that is nothing ``timeout`` seconds later.

        ``find`` is called with the condition held, at first and after all news. ``began`` is as
        ``since`` of :meth:`check`, and all that raises is raised here.
        """
        with self._news:
            while (found := find()) is None:
                self.check(began)
                left = began + timeout - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)
            return found

    def close(self, timeout: float) -> None:
        """End the stream and the thread, after the connections were closed."""
        with self._lock:
            if self._stream is not None:
                self._stream.end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._calls.closed:
            try:
                self._read_stream()
            except (StoreClosed, StoreReplaced):
                return
            except StoreError as error:
                self._fail(error)

    def _fail(self, error: StoreError) -> None:
        """End the waits with ``error``, then pause a moment."""
        now = time.monotonic()
        with self._news:
            if self._failure is None:
                self._down_since = now
            self._failure, self._failed_at = error, now
            self._news.notify_all()
            self._news.wait_for(lambda: self._calls.closed, self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _read_stream(self) -> None:
        """Open a stream for all watches and read until it breaks or is moved."""
        member, metadata = self._calls.here()
        self._reread_stale()
        stream = EtcdStream(member, "Watch", "Watch", metadata)
        try:
            with self._lock:
                self._stream, self._metadata, self._confirmed = stream, metadata, False
                self._asked.clear()
                self._by_id.clear()
                for watch in self._watches:
                    self._create(stream, watch)
            for answer in stream:
                self._take(stream, answer)
        except self._calls.loaded.grpc.RpcError as error:
            refusal = self._calls.refusal(error, 0.0)  # StoreClosed, if that is why
            if not stream.ended:
                self._lost(stream, refusal)
        except errors.Refusal as refusal:
            self._lost(stream, refusal)
        finally:
            stream.end()
            with self._lock:
                self._stream = None

    def _lost(self, stream: EtcdStream, refusal: errors.Refusal) -> None:
        """Find another member; raises StoreError if there is none, or to slow a quick loop down."""
        if refusal.kind == "token":
            self._calls.forget_token(self._metadata)
        self._calls.find()
        if not self._confirmed:
            raise StoreUnreachable(f"no watch at {stream.member.address}: {refusal.text}")

    def _reread_stale(self) -> None:
        with self._lock:
            stale = [watch for watch in self._watches if watch.stale]
        for watch in stale:
            watch.revision = watch.reread() + 1
            watch.stale = False

    def _take(self, stream: EtcdStream, answer: Any) -> None:
        """Act on one answer; raises StoreError if the stream is of no use."""
        with self._lock:
            if answer.created:
                watch = self._asked.popleft()
            elif answer.watch_id in self._by_id:
                watch = self._by_id[answer.watch_id]
            else:
                return
            begins = answer.created and not answer.canceled
            if begins:
                self._confirm(stream, watch, answer.watch_id)
        if begins:
            if answer.header.revision + 1 < watch.revision:
                watch.reread()  # this member is behind, or etcd has lost its memory
            return
        if answer.canceled or answer.compact_revision:
            self._canceled(stream, watch, answer)
        elif answer.events:
            watch.take(answer.events)
            watch.revision = max(event.kv.mod_revision for event in answer.events) + 1
            self._calls.history.reached(watch.revision - 1)
            with self._news:
                self._news.notify_all()
        else:  # nothing has happened up to here: so much less to be compacted away
            watch.revision = answer.header.revision + 1

    def _confirm(self, stream: EtcdStream, watch: Watch, number: int) -> None:
        if watch in self._watches:
            self._by_id[number] = watch
        else:
            self._cancel(stream, number)
        self._failure, self._pause, self._confirmed = None, _FIRST_PAUSE, True

    def _canceled(self, stream: EtcdStream, watch: Watch, answer: Any) -> None:
        if answer.compact_revision:
            watch.stale = True
            self._reread_stale()
            with self._lock:
                self._by_id.pop(answer.watch_id, None)
                if watch in self._watches:
                    self._create(stream, watch)
            with self._news:
                self._news.notify_all()
            return
        stream.end()
        text = answer.cancel_reason
        refusal = errors.refusal("UNKNOWN", text, 0.0)
        if refusal.kind in ("token", "denied"):
            self._calls.forget_token(self._metadata)
        no_user = refusal.kind == "token" and self._calls.cluster.user is None
        if refusal.kind == "denied" or no_user:
            raise StoreDenied(errors.denied(self._calls.cluster, text))
        raise StoreUnreachable(f"{stream.member.address} ended a watch: {text or 'no reason'}")

    def _create(self, stream: EtcdStream, watch: Watch) -> None:
        request = self._rpc.WatchCreateRequest(
            key=watch.start,
            range_end=watch.end,
            start_revision=watch.revision,
            progress_notify=True,
        )
        self._asked.append(watch)
        stream.send(self._rpc.WatchRequest(create_request=request))

    def _cancel(self, stream: EtcdStream, number: int) -> None:
        request = self._rpc.WatchCancelRequest(watch_id=number)
        stream.send(self._rpc.WatchRequest(cancel_request=request))
