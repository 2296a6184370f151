"""The two drivers of a CoordinatorState: of one node in the agent's loop, of several in a thread.

One node (`Standalone`)::

    the agent's status, the end of a search ──► CoordinatorState ──► PlanSeen, posted to the agent

There is no other agent to agree with, so there is no store, no record as bytes and no thread.

Several (`Coordinator`), on the one agent that leads, for as long as it leads::

    store.changes ──thread──┐
    world.search ──thread───┼──► one queue ──► CoordinatorState ──► store.publish
    stop ───────────────────┘
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence

from msgspec import Struct

from elaunch.errors import StoreDenied, StoreError, StoreReplaced, StoreUnreachable
from elaunch.rendezvous.coordinatorstate import RETRY, CoordinatorState, Reread, draw_job_and_jitter
from elaunch.rendezvous.decide.view import Evict, Publish, Rules, Search, SearchResult, Wait
from elaunch.rendezvous.events import News, PlanSeen
from elaunch.rendezvous.plan import NodeStatus, Plan
from elaunch.store.protocol import Change, Store

log = logging.getLogger("elaunch")

STANDALONE = "standalone"


def rules_of_one(
    max_restarts: int,
    lifetime_budget: bool = False,
    has_checkpoint_dir: bool = False,
    *,
    max_same_failures: int = 0,
) -> Rules:
    """Return the rules for one node, which waits for no other."""
    return Rules(
        min_nodes=1,
        max_nodes=1,
        standalone=True,
        settle=0.0,
        heartbeat_timeout=0.0,
        join_timeout=math.inf,
        remind=math.inf,
        max_restarts=max_restarts,
        lifetime_budget=lifetime_budget,
        max_same_failures=max_same_failures,
        has_checkpoint_dir=has_checkpoint_dir,
    )


class Standalone:
    """The one agent of a job and its coordinator; the agent's loop is the only caller.

    ``post`` takes plans; ``search`` begins to look for a checkpoint, for :meth:`found`; ``draw`` as
    in CoordinatorState.
    """

    def __init__(
        self,
        rules: Rules,
        post: Callable[[News], None],
        search: Callable[[Search], None],
        *,
        clock: Callable[[], float],
        draw: Callable[[], tuple[str, float]] = draw_job_and_jitter,
    ) -> None:
        self._state = CoordinatorState(STANDALONE, rules, None, None, draw)
        self._post = post
        self._search = search
        self._clock = clock

    def start(self, record: NodeStatus) -> None:
        """Begin the job with this agent's first status."""
        self._state.begin(None, self._clock())
        self.publish(record)

    def publish(self, record: NodeStatus) -> None:
        """Note this agent's status; :meth:`decide` follows."""
        self._state.on_status(record, self._clock())

    def found(self, result: SearchResult) -> None:
        """Note what the search has found; :meth:`decide` follows."""
        self._state.on_found(result)

    def decide(self) -> float | None:
        """Post the plans that follow; return when to decide again even if nothing happens."""
        while True:
            step, _ = self._state.step(self._clock())
            if isinstance(step, Publish):
                self._state.on_published(step, True, self._clock())
                self._post(PlanSeen(step.plan, STANDALONE))
            elif isinstance(step, Search):
                self._search(step)
            elif isinstance(step, Wait):
                return None if step.until == math.inf else step.until


CHANGES_SLICE = 2.0
"""Seconds of one wait for changes; bounds how long a coordinator goes on without leadership."""


class _Stop(Struct, frozen=True):
    """Coordinate no more, for ``reason``."""

    reason: str


class Coordinator:
    """Drives a CoordinatorState with a store that we lead, in the thread that calls ``run``."""

    def __init__(
        self,
        store: Store,
        state: CoordinatorState,
        search: Callable[[Search], SearchResult],
        clock: Callable[[], float],
        settled: Callable[[CoordinatorState], None],
        published: Callable[[StoreError | None], None],
    ) -> None:
        """``settled`` is called whenever all that was received so far has been decided upon.

        ``published`` is called with the result of each try to publish: None, or the store's error.
        """
        self._store = store
        self._state = state
        self._search = search
        self._clock = clock
        self._settled = settled
        self._published = published
        self._queue: queue.SimpleQueue[
            Sequence[Change] | SearchResult | Reread | _Stop | StoreError
        ] = queue.SimpleQueue()
        self._ended = threading.Event()

    def run(self, opened: float, known: Plan | None = None) -> str:
        """Coordinate until leadership is lost, and return why; the store was ``opened`` then.

        ``known`` is the newest plan that this agent has read.

        Raises:
            StoreError: the store cannot be read, or its plan cannot, or it gave up our entry.
        """
        self._state.begin(self._store.latest(), self._clock(), opened, known)
        if self._store.unsteady_leader():  # who led before may have been evicted
            self._state.on_evicted(True, self._clock())
        reader = threading.Thread(target=self._read_changes, name="members", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            log.warning("this agent cannot coordinate for now: %s", error)
            raise StoreUnreachable(str(error)) from error
        try:
            return self._loop()
        finally:
            self._ended.set()
            reader.join(CHANGES_SLICE + 1.0)

    def stop(self) -> None:
        """Have ``run`` return soon; from any thread."""
        self._queue.put(_Stop("this agent leaves"))

    def reread(self) -> None:
        """Have the plan read, which another process seems to have written; from any thread."""
        self._queue.put(Reread())

    def _loop(self) -> str:
        state, clock = self._state, self._clock
        while not state.ended:
            step, why = state.step(clock())
            if isinstance(step, Publish):
                state.on_published(step, self._publish(step), clock())
            elif isinstance(step, Reread):
                self._reread()
            elif isinstance(step, Search):
                self._begin_search(step)
            elif isinstance(step, Evict):
                state.on_evicted(self._evict(step, why), clock())
            else:
                self._settled(state)
                stopped = self._receive(None if step.until is None else step.until - clock())
                if stopped:
                    return stopped
        return state.ended

    def _publish(self, step: Publish) -> bool | None:
        try:
            accepted = self._store.publish(step.version, *self._state.encoded(step))
        except (StoreUnreachable, StoreDenied) as exc:
            self._published(exc)
            return None
        self._published(None)
        return accepted

    def _evict(self, step: Evict, why: str) -> bool:
        """Return whether any of them may have been evicted."""
        try:
            if not [name for name in step.names if self._store.evict(name)]:
                return False
        except StoreError as exc:
            log.debug("perhaps not all are evicted: %s", exc)
        log.warning("%s", why)
        return True

    def _reread(self) -> None:
        try:
            post = self._store.latest()
        except StoreUnreachable:
            self._state.on_no_plan(self._clock())
        else:
            self._state.on_plan(post, self._clock())

    def _receive(self, timeout: float | None) -> str | None:
        """Wait for news and take all that are there; return why to stop, if that is among them.

        Raises the StoreError for which the members cannot be read any more.
        """
        try:
            news = self._queue.get(timeout=None if timeout is None else max(0.0, timeout))
            for _ in range(1 + self._queue.qsize()):  # no more: a deadline may have come
                if isinstance(news, _Stop):
                    return news.reason
                if isinstance(news, StoreError):
                    raise news
                if isinstance(news, SearchResult):
                    self._state.on_found(news)
                elif isinstance(news, Reread):
                    self._state.reread()
                else:
                    self._state.on_changes(news, self._clock())
                news = self._queue.get_nowait()
        except queue.Empty:
            pass
        return None

    def _read_changes(self) -> None:
        while not self._ended.is_set():
            try:
                changes = self._store.changes(self._state.me, CHANGES_SLICE)
            except StoreError as exc:
                if isinstance(exc, StoreUnreachable) and not isinstance(exc, StoreReplaced):
                    self._ended.wait(RETRY)
                    continue
                self._queue.put(exc)
                return
            if changes:
                self._queue.put(changes)

    def _begin_search(self, search: Search) -> None:
        finder = threading.Thread(
            target=self._find, args=(search,), name="checkpoint-search", daemon=True
        )
        try:
            finder.start()
        except RuntimeError:  # late is better than never
            self._find(search)

    def _find(self, search: Search) -> None:
        """Post what the search brings; the coordinator waits for it, whatever it is."""
        try:
            found = self._search(search)
        except Exception as exc:
            found = SearchResult(problem=str(exc) or type(exc).__name__)
        self._queue.put(found)
