"""A job's store, opened by a reader: it enrols nowhere, leads nothing and writes nothing.

==========  ===================================  =============================================
backend     which jobs are there                 whose store it is
==========  ===================================  =============================================
etcd        the run ids below the prefix         of all of them, side by side
c10d        the one of the TCPStore              what the process that hosts it wrote (hello)
static      the same, at the address of node 0   the same; it may name another port
==========  ===================================  =============================================
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import StoreUnreachable, UsageError
from elaunch.monitor.job.view import PresentAgent, StoredJob
from elaunch.rendezvous import records
from elaunch.rendezvous.plan import Plan
from elaunch.rendezvous.records import RecordError
from elaunch.store.etcd.keys import EtcdPlace
from elaunch.store.protocol import Lease, Post, Store

OPEN_TIMEOUT_S: Final = 5.0
LOOKS: Final = 3
MEMBERS_LAG_S: Final = 0.3


def run_ids(rendezvous: RendezvousSettings) -> tuple[str, ...]:
    """Return the run ids of the jobs that the store has, sorted.

    Raises:
        StoreUnreachable: nobody answers, or what answers is no store of elaunch.
        StoreDenied: etcd does not let us in.
    """
    if rendezvous.backend == "etcd":
        from elaunch.store.etcd import client as etcd

        return tuple(sorted(etcd.run_ids(_etcd_place(rendezvous))))
    return (_hello(rendezvous)[0],)


def open_for_reading(rendezvous: RendezvousSettings, run_id: str) -> Store:
    """Connect to the store of the job ``run_id``; the caller closes it.

    Raises:
        UsageError: the TCPStore is that of another job.
        StoreUnreachable, StoreDenied: as in :func:`run_ids`.
    """
    if rendezvous.backend == "etcd":
        from elaunch.store.etcd import client as etcd

        return etcd.connect(_etcd_place(rendezvous), run_id, deadline=_patience(rendezvous))
    from elaunch.store.tcp import client

    its_run_id, (host, port) = _hello(rendezvous)
    if its_run_id != run_id:
        raise no_such_job(run_id, f"the TCPStore at {_shown(host, port)}", (its_run_id,))
    return client.connect(host, port, run_id, deadline=_patience(rendezvous))


def look(store: Store, secret: bytes | None) -> StoredJob:
    """Read plan and members once; ``secret`` is records.key_of the job's.

    Raises:
        RecordError: the plan cannot be read, or no agent's record where there is no plan: it is
            malformed, of another version, or signed with another secret.
        StoreError: the store does not answer.
    """
    post, leases = _at_one_moment(store)
    plan = _plan(post, secret)
    if plan and plan.phase != "over" and any(node.name not in leases for node in plan.nodes):
        # A TCPStore shows newcomers to its readers a moment later than to its coordinator.
        threading.Event().wait(MEMBERS_LAG_S)
        post, leases = _at_one_moment(store)
        plan = _plan(post, secret)
    members: dict[str, PresentAgent] = {}
    refused: dict[str, RecordError] = {}
    for name, lease in leases.items():
        try:
            members[name] = PresentAgent(records.decode_agent(lease.value, secret, name), lease.age)
        except RecordError as exc:
            refused[name] = exc
    if refused and not members and plan is None:
        raise next(iter(refused.values()))
    problems = {name: str(problem) for name, problem in refused.items()}
    return StoredJob(plan, post.version if post else 0, members, problems)


def _plan(post: Post | None, secret: bytes | None) -> Plan | None:
    return (
        records.decode_plan(post.value, secret, "the coordinator", post.version) if post else None
    )


def _at_one_moment(store: Store) -> tuple[Post | None, Mapping[str, Lease]]:
    """Return plan and members as they were together, or nearly where plans follow each other.

    A node of a plan was a member before; after it, too, unless it went or a newer plan came.
    """
    post = store.latest()
    for _ in range(LOOKS):
        leases = store.members()
        newer = store.latest()
        if newer == post:
            break
        post = newer
    return post, leases


def no_such_job(run_id: str, place: str, ids: Sequence[str]) -> UsageError:
    """Return the error for a run id that the store does not have, with the nearest it has."""
    if not ids:
        return UsageError(f"there is no job {run_id!r} in {place}: it has none")
    nearest = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.4)
    if nearest:
        return UsageError(f"there is no job {run_id!r} in {place}; the nearest: {_list(nearest)}")
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return UsageError(f"there is no job {run_id!r} in {place}; it has {_list(ids[:3])}{more}")


def no_job(rendezvous: RendezvousSettings) -> UsageError:
    """Return the error for an etcd without any job below its prefix."""
    place = _etcd_place(rendezvous)
    return UsageError(
        f"there is no job in {place} below the prefix {place.prefix!r} "
        f"(--rdzv-conf etcd_prefix=PREFIX names another)"
    )


def _list(ids: Sequence[str]) -> str:
    return ", ".join(ids)


def _etcd_place(rendezvous: RendezvousSettings) -> EtcdPlace:
    return EtcdPlace(endpoints=rendezvous.endpoints, **vars(rendezvous.etcd))


def _hello(rendezvous: RendezvousSettings) -> tuple[str, tuple[str, int]]:
    """Return the run id of the store at the endpoint, and where the store itself is."""
    from elaunch.store.tcp import client

    host, port = rendezvous.endpoints[0]
    said = client.hello(host, port, _patience(rendezvous))
    if said is None:
        raise StoreUnreachable(f"what answers at {_shown(host, port)} is no store of elaunch")
    host, port = said.get("store") or (host, port)
    return str(said["run_id"]), (str(host), int(port))


def _patience(rendezvous: RendezvousSettings) -> float:
    """Return for how many seconds to try; an agent may wait for its store, a person does not."""
    return min(OPEN_TIMEOUT_S, rendezvous.connect_timeout)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
