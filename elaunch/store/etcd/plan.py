"""The plan in etcd: one key, whose value begins with the version of the post.

The version is in the value, not etcd's own count of writes, because ``clear`` writes the key once
more, with a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from elaunch.errors import StoreError
from elaunch.store.etcd.keys import Keys
from elaunch.store.etcd.txn import Transactions
from elaunch.store.etcd.watch import Watch, Watching
from elaunch.store.protocol import Post

CLEARED_SECONDS = 60
"""How long the last post stays after ``clear``, for agents that have not read it yet."""


class EtcdPlan:
    """Reads, waits for, and writes the posts of one job.

    Args:
        txns: the connection.
        keys: of the job.
        watching: where the key is watched, once a call waits.
        news: the condition that ``watching`` notifies.
    """

    def __init__(
        self, txns: Transactions, keys: Keys, watching: Watching, news: threading.Condition
    ) -> None:
        self._txns = txns
        self._key = keys.plan
        self._watching = watching
        self._news = news
        self._begin = threading.Lock()
        self._watch: Watch | None = None
        self._newest: Post | None = None
        self._replaced = False  # the plan was removed: whatever is posted next is news
        self._unsure: Post | None = None  # a post whose answer was lost

    def publish(self, version: int, value: bytes, leadership: tuple[bytes, int]) -> bool:
        """Write a post if it is the next one and we lead; raises as Calls.ask.

        Args:
            version, value: the post.
            leadership: the key that we lead with, and its create revision.
        """
        post = Post(version, value)
        kv, _ = self._txns.read(self._key)
        found = _post(kv)
        if version != (found.version if found else 0) + 1:
            return found == post and self._unsure == post
        txns = self._txns
        self._unsure = post
        modified = kv.mod_revision if kv is not None else 0
        answer = txns.send(
            [txns.modified(self._key, modified), txns.created(*leadership)],
            [txns.put(self._key, b"%d\n%b" % (version, value))],
            [txns.get(self._key), txns.get(leadership[0])],
        )
        self._unsure = None
        if answer.done:
            return True
        # Perhaps it was done, and the answer was lost. If we still lead, nobody else has written.
        plans, leaders = answer.found
        leading = bool(leaders) and leaders[0].create_revision == leadership[1]
        return leading and bool(plans) and _post(plans[0]) == post

    def latest(self) -> Post | None:
        """Return the newest post; raises as Calls.ask."""
        return _post(self._txns.read(self._key)[0])

    def follow(self, after: int, timeout: float) -> Post | None:
        """Wait for a post newer than ``after``; raises as Calls.ask, and StoreClosed."""
        began = time.monotonic()
        self._txns.calls.check_open()
        self._begin_to_watch()
        with self._news:
            while True:
                newest = self._newest
                if newest is not None and (newest.version > after or self._replaced):
                    self._replaced = False
                    return newest
                self._watching.check(began)
                left = began + timeout - time.monotonic()
                if left <= 0:
                    return None
                self._news.wait(left)

    def clear(self) -> None:
        """Have the plan removed in a minute, unless one is posted again; raises as Calls.ask."""
        self._txns.expire(self._key, CLEARED_SECONDS)

    def _begin_to_watch(self) -> None:
        with self._begin:
            if self._watch is not None:
                return
            watch = Watch(self._key, b"", 0, self._take, self._read)
            watch.revision = watch.reread() + 1
            self._watching.add(watch)
            self._watch = watch

    def _read(self) -> int:
        kv, revision = self._txns.read(self._key)
        self._show(_post(kv))
        return revision

    def _take(self, events: Sequence[Any]) -> None:
        for event in events:
            self._show(None if event.type == event.DELETE else _post(event.kv))

    def _show(self, post: Post | None) -> None:
        with self._news:
            if self._newest is not None and (post is None or post.version < self._newest.version):
                self._replaced = True
            self._newest = post


LONGEST_VERSION = 18
"""Digits of a version of the plan."""


def _post(kv: Any | None) -> Post | None:
    """Return the post in a key and value of etcd; raises StoreError if that is none."""
    if kv is None:
        return None
    version, _, value = kv.value.partition(b"\n")
    if not version.isdigit() or len(version) > LONGEST_VERSION:
        raise StoreError(f"what is at {kv.key.decode()} in etcd was not written by elaunch")
    return Post(int(version), value)
