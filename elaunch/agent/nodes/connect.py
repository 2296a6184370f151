"""Prepares what a job of several nodes needs: the way to its store, peers, the status publisher.

One node by itself starts a twentieth of a second sooner without importing this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from elaunch.agent.context import RunContext
from elaunch.agent.hangs.elsewhere import OtherNodes
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.nodes.store import StoreOpener, rules
from elaunch.agent.peers.directory import LocalCopies
from elaunch.agent.peers.peers import Peers
from elaunch.agent.peers.search import LocalSearch
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import for_all_nodes
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.status.views import NodeViews
from elaunch.agent.workers.group import WorkerGroup
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.search.locations import is_within
from elaunch.config import Settings
from elaunch.config.facts import facts
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.errors import UsageError
from elaunch.rendezvous import records
from elaunch.rendezvous.decide.view import Search, SearchResult
from elaunch.rendezvous.events import MeetingFailed, News, PlanSeen
from elaunch.rendezvous.meeting import Meeting, World
from elaunch.rendezvous.plan import NodeStatus, Plan
from elaunch.runs import directory
from elaunch.store.protocol import Store

if TYPE_CHECKING:
    from elaunch.rendezvous.munge import MungeKey

LEAVE_DEADLINE = 5.0
"""Seconds to remove this agent's record, and for agents that still wait to read the end."""


def join(
    context: RunContext,
    stack: contextlib.ExitStack,
    group: WorkerGroup,
    *,
    show: Callable[[str], None],
    probe: str,
    saver: AgentSaver,
    sampler: Sampler,
    views: NodeViews,
) -> StatusPublisher:
    """Prepare to join the job, with the first turn after which this node can.

    ``show`` prints lines on stderr, ``probe`` is ``DirectoryProbe.nonce``. Raises ElaunchError
    where an address cannot be listened on.
    """
    settings, own_addr, rendezvous = context.settings, group.own_addr, context.settings.rendezvous
    assert own_addr is not None and rendezvous is not None  # a job of several nodes
    opener = _prepared(settings, rendezvous, group, stack)
    peers = Peers(own_addr, settings.run_id, rendezvous.secret)
    peers.start()
    stack.callback(peers.close)
    search, rests = _search(context, peers, saver.finisher)
    world = World(_post(context, peers, saver.finisher), search, group.fence)
    killed_in = directory.killed_in(settings.run_id, os.environ) if opener.hosts else None
    agreed = rules(settings, rendezvous, opener.hosts, killed_in)
    key = partial(_key_of, opener, settings.run_id)
    meeting = Meeting(_store_opener(opener, peers, group), agreed, key, world)
    saver.meet(meeting.read_plan, peers)
    sampler.others = OtherNodes(peers, sampler.places, sampler.workers.failed)
    views.meet(peers)
    first = NodeStatus(
        *(os.uname().nodename, own_addr, 0, 0, settings.role, rendezvous.node_hint),
        facts=facts(settings, context.environ),
        peer_port=peers.port,
        probe=probe,
    )
    publisher = StatusPublisher(
        meeting,
        first,
        show=show,
        post=context.post,
        strict=rendezvous.strict_symmetry,
        rests=rests,
        port=group.open_endpoint,
    )
    stack.callback(meeting.leave, LEAVE_DEADLINE)
    return publisher


def _key_of(opener: StoreOpener, run_id: str) -> bytes | None:
    return records.key_of(opener.secret, run_id)


def _search(
    context: RunContext, peers: Peers, finisher: DirectoryFinisher
) -> tuple[Callable[[Search], SearchResult], Callable[[bool], object]]:
    """Return the coordinator's search, and what gets whether nothing of a round is left here."""
    settings, rendezvous = context.settings, context.settings.rendezvous
    if not (settings.checkpoint_local and isinstance(settings.checkpoint_dir, Path)):
        return for_all_nodes(settings, context.post, finisher), bool
    assert rendezvous is not None  # a job of several nodes
    search = LocalSearch(
        peers,
        rendezvous.heartbeat_timeout,
        context.post,
        require=settings.require_resume,
        patience=rendezvous.join_timeout,
    )
    copies = LocalCopies(
        peers,
        settings.checkpoint_dir,
        settings.checkpoint_glob,
        run_id=settings.run_id,
        finish=finisher.finish,
    )
    return search, copies.rests


def _prepared(
    settings: Settings,
    rendezvous: RendezvousSettings,
    group: WorkerGroup,
    stack: contextlib.ExitStack,
) -> StoreOpener:
    """Return what opens this agent's store, with its port bound and its key made."""
    opener = StoreOpener(
        rendezvous,
        settings.run_id,
        group.advertise,
        key=_key_by_munge(settings.run_id, rendezvous, os.environ),
        agents=settings.max_nodes,
    )
    opener.prepare()
    stack.callback(opener.close)
    return opener


def _key_by_munge(
    run_id: str, rendezvous: RendezvousSettings, environ: Mapping[str, str]
) -> MungeKey | None:
    """Return what settles the key of agents that srun has started and that share nothing else."""
    if rendezvous.secret or rendezvous.etcd.password or not environ.get("SLURM_STEP_ID"):
        return None
    from elaunch import launchers
    from elaunch.rendezvous.munge import MungeKey

    return MungeKey(run_id) if launchers.find(environ) is launchers.SLURM else None


def _store_opener(
    opener: StoreOpener, peers: Peers, group: WorkerGroup
) -> Callable[[float], Store]:
    """Return what opens the store and gives its secret to peers and workers, before any plan."""

    def open_store(seconds: float) -> Store:
        store = opener.open(seconds)
        peers.secret = group.secret = opener.secret
        return store

    return open_store


def _post(context: RunContext, peers: Peers, finisher: DirectoryFinisher) -> Callable[[News], None]:
    """Return what takes the news of the rendezvous: plans that are not refused, and all else."""
    check = CheckpointCheck(context.settings.checkpoint_dir)

    def post(news: News) -> None:
        if isinstance(news, PlanSeen):  # here, since the coordinator's search needs it at once
            if problem := check.problem(news.plan):
                context.post(MeetingFailed(UsageError.exit_code, problem))
                return
            finisher.enter(news.plan.job)
            peers.on_plan(news.plan, news.name)
        context.post(news)

    return post


class CheckpointCheck:
    """Checks that a plan's checkpoint is in this node's own --checkpoint-dir, or is that itself.

    The latter is so for DeepSpeed's. Otherwise a writer of plans could have all ranks read any file
    of any directory.
    """

    def __init__(self, root: Location | None) -> None:
        self._root = root
        self._passed: object = None

    def problem(self, plan: Plan) -> str:
        """Return why the plan is refused, "" if it is not."""
        found = plan.checkpoint
        if found is None or found.path == self._passed:
            return ""
        path = found.path
        root = self._root
        if root is not None and (path == str(root) or is_within(path, root)):
            self._passed = path
            return ""
        own = "has no --checkpoint-dir" if self._root is None else f"has {str(self._root)!r}"
        return (
            f"the plan of the coordinator is refused: it would have the workers resume from "
            f"{path!r}, and this node {own}; give the same --checkpoint-dir on all nodes, and "
            "--rdzv-secret-file where others than the job's agents reach the store"
        )
