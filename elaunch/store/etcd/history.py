"""How far an etcd has come, by the headers of its answers: one that lost its memory goes back.

A linearizable read and a write are answered with a revision that is no older than any that was
known when they were asked for. An etcd that was wiped begins at 1 again, one that was restored from
a snapshot at what it had then; either may have the cluster id of before, or another.
"""

from __future__ import annotations

import threading
from typing import Any


class RevisionHistory:
    """How far the etcd has come whose answers one agent has read, over all of its connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cluster = 0
        self._revision = 0

    @property
    def revision(self) -> int:
        """The newest revision that is known; no answer to a later question may be older."""
        return self._revision

    def reached(self, revision: int) -> None:
        """Note that a revision exists."""
        with self._lock:
            self._revision = max(self._revision, revision)

    def continues(self, header: Any, known: int) -> str:
        """Note an answer, and return in which way it does not continue what was read before.

        Args:
            header: of the answer to a linearizable read or a write.
            known: ``revision`` when it was asked for.
        """
        cluster, revision = int(header.cluster_id), int(header.revision)
        with self._lock:
            problem = ""
            if self._cluster not in (0, cluster):
                problem = f"its cluster is {cluster:x} and was {self._cluster:x}"
            elif revision < known:
                problem = f"its revision is {revision} and was {known}"
            self._cluster = cluster
            self._revision = revision if problem else max(self._revision, revision)
        return problem
