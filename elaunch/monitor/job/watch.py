"""Readings of whole jobs, from the store in which their agents meet.

A :class:`JobReader` keeps its connection. While it watches, a store that does not answer is not the
end: the last view stays, marked as stale, for ``store_timeout`` seconds, as long as the agents
themselves would go on without the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreDenied, StoreError, StoreUnreachable
from elaunch.monitor.document import job_document, jobs_document
from elaunch.monitor.job.page import job_page, jobs_page
from elaunch.monitor.job.store import look, no_such_job, open_for_reading, run_ids
from elaunch.monitor.job.view import JobView, unreadable, view_job
from elaunch.monitor.watch import Read, WatchReading, pause
from elaunch.rendezvous import munge, records
from elaunch.rendezvous.munge import MungeError
from elaunch.store.protocol import Store

# A blocking wait is cut into slices so that Ctrl-C is quick.
SLICE_S = 0.5


class JobReader:
    """Reads one job again and again; to be closed."""

    def __init__(
        self,
        rendezvous: RendezvousSettings,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rendezvous = rendezvous
        self._run_id = run_id
        self._clock = clock
        self._store: Store | None = None
        self._secret: bytes | None = None
        self._view: JobView | None = None
        self._answered_at = clock()

    def read(self, last: WatchReading | None) -> WatchReading:
        """Read the job now.

        Raises:
            UsageError: the store does not know the job, at the first reading.
            StoreUnreachable: nobody answers; after the first reading only ``store_timeout``
                seconds later.
            StoreError: the store does not let us in, or its plan cannot be read.
        """
        try:
            self._view = self._look()
            self._answered_at = self._clock()
        except StoreUnreachable as exc:
            self.close()
            silent = self._clock() - self._answered_at
            if self._view is None or silent >= self._rendezvous.store_timeout:
                raise
            self._view = replace(self._view, stale=str(exc))
        view = self._view
        return WatchReading(job_page(view), job_document(view), _gist(view), view.live)

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or as soon as the coordinator publishes a new plan."""
        until = self._clock() + seconds
        known = self._view.version if self._view else 0
        while (left := until - self._clock()) > 0:
            step = min(left, SLICE_S)
            if self._store is None:
                pause(step)
                continue
            try:
                if self._store.follow(known, step) is not None:
                    return
            except StoreError:
                # The next reading meets the same and reports it.
                pause(step)

    def close(self) -> None:
        """Let go of the connection; a later reading opens another."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _look(self) -> JobView:
        if self._store is None:
            store = open_for_reading(self._rendezvous, self._run_id)
            try:
                self._secret = _signing(self._rendezvous, self._run_id, store)
            except StoreError:
                store.close()
                raise
            self._store = store
        place = self._store.place
        found = look(self._store, self._secret)
        if self._rendezvous.backend == "etcd" and found.empty:
            # A TCPStore names its job itself; etcd has the keys of a job or has none.
            if self._view is None:
                raise no_such_job(self._run_id, place, run_ids(self._rendezvous))
            problem = "nothing of the job is left in the store"
            return unreadable(self._run_id, place, problem, time.time())
        return view_job(self._run_id, place, found, time.time())


def jobs_reader(rendezvous: RendezvousSettings, ids: Sequence[str]) -> Read:
    """Return what reads all jobs of an etcd; ``ids`` are those that are there to begin with."""

    def read(last: WatchReading | None) -> WatchReading:
        known = ids if last is None else run_ids(rendezvous)
        views = [view for run_id in sorted(known) if (view := _listed(rendezvous, run_id))]
        gist = tuple(_gist(view) for view in views)
        live = any(view.live for view in views)
        return WatchReading(jobs_page(views), jobs_document(views), gist, live)

    return read


def _listed(rendezvous: RendezvousSettings, run_id: str) -> JobView | None:
    """Return a job of a list; None where its last keys expired since the list was read."""
    store = open_for_reading(rendezvous, run_id)
    try:
        found = look(store, _signing(rendezvous, run_id, store))
        return None if found.empty else view_job(run_id, store.place, found, time.time())
    except (StoreUnreachable, StoreDenied):
        raise
    except StoreError as exc:
        return unreadable(run_id, store.place, str(exc), time.time())
    finally:
        store.close()


def _signing(rendezvous: RendezvousSettings, run_id: str, store: Store) -> bytes | None:
    """Return what signs the records of a job: the secret given, or what its agents share by MUNGE.

    Raises:
        StoreDenied: they share a key that this process cannot read.
        StoreError: the store does not answer.
    """
    secret = rendezvous.secret
    if secret is None and munge.is_there() and (found := store.shared()):
        try:
            secret = munge.read(found, run_id)
        except MungeError as exc:
            key = f"the key that the agents of {run_id!r} share by MUNGE"
            raise StoreDenied(f"{key}, in {store.place}, cannot be read: {exc}") from None
    return records.key_of(secret, run_id)


def _gist(view: JobView) -> object:
    nodes = tuple((node.name, node.state, node.note) for node in view.everyone)
    return view.run_id, view.plan, nodes, view.refused, view.problem, view.stale
