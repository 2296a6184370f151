"""A connection to the round's store for a thread that lives as long as the context.

The connection is opened again when it breaks: a firewall drops what has been idle for long, and a
wait that is never interrupted would not notice. So waits are cut into slices, and at the end of
each the store has to answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from elaunch.errors import CollectiveError, ContextError, PeerLost
from elaunch.training.stores.roundstore import RoundStore, StoreConnection

ANSWER_S: Final = 10.0
"""Seconds that the store may take for one exchange."""
OPEN_S: Final = 5.0
SLICE_S: Final = 15.0
AGAIN_S: Final = 0.2
"""Seconds between two attempts to open a connection."""

Answer = TypeVar("Answer")


class SteadyConnection:
    """One thread's connection to the round's store; any thread may cut it.

    Every method raises CollectiveError when the store could not be reached for ``patience`` seconds
    after it was lost (0: does not try again; math.inf: never gives up), and soon after :meth:`cut`.
    ``seconds`` are those that one attempt to connect may take, and one exchange; OPEN_S and
    ANSWER_S if None.
    """

    def __init__(self, store: RoundStore, patience: float, seconds: float | None = None) -> None:
        self.lost = False
        """Whether the last attempt to use it failed."""
        self.patience = patience
        self._store = store
        self._opening = OPEN_S if seconds is None else seconds
        self._answer = ANSWER_S if seconds is None else seconds
        self._connection: StoreConnection | None = None
        self._lock = threading.Lock()
        self._cut = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    def run(self, exchange: Callable[[StoreConnection, float], Answer]) -> Answer:
        """Call ``exchange(connection, until)`` and return its answer.

        If the connection breaks meanwhile it is called again with a new one: it must bear to be
        done twice, also in part.
        """
        give_up: float | None = None
        while True:
            try:
                return exchange(self._opened(give_up), time.monotonic() + self._answer)
            except CollectiveError:
                self.close()
                self.lost = True
                now = time.monotonic()
                give_up = now + self.patience if give_up is None else give_up
                if self._cut.is_set() or now >= give_up:
                    raise
                self._cut.wait(AGAIN_S)

    def await_key(self, key: str, until: float) -> bool:
        """Wait until ``key`` is there, or the monotonic clock shows ``until``; whether it is."""
        while True:
            slice_end = min(until, time.monotonic() + SLICE_S)
            if self._wait(key, slice_end):
                return True
            if time.monotonic() >= until:
                return False

    def cut(self) -> None:
        """Wake the thread that uses it, for good; from any thread."""
        with self._lock:
            self._cut.set()
            if self._connection is not None:
                self._connection.cut()

    def close(self) -> None:
        """Free the connection; only the thread that uses it may."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _wait(self, key: str, until: float) -> bool:
        return self.run(lambda connection, _: connection.wait(key, until))

    def _opened(self, give_up: float | None) -> StoreConnection:
        if self._connection is None:
            until = time.monotonic() + self._opening
            try:
                connection = self._store.connect(until if give_up is None else min(until, give_up))
            except ContextError as error:  # this side has closed it
                self._cut.set()
                raise PeerLost(str(error)) from error
            with self._lock:
                self._connection = connection
            self.lost = False
        if self._cut.is_set():
            raise PeerLost("this rank's connection to the round's store was closed meanwhile")
        return self._connection
