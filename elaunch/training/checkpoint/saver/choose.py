"""Chooses the writer of this rank's background saves: its agent, else threads of its own process.

Under ``elaunch run`` the shards are copied into memory of the agent's, which writes them out,
whatever becomes of the worker (elaunch.training.checkpoint.saver.agent). Elsewhere, and where some
rank cannot reach its agent, the same is done by threads of this process
(elaunch.training.checkpoint.saver.local).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elaunch.env import AGENT_SOCKET
from elaunch.wire.saver import Saver

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.storage import Storage
    from elaunch.run.saves import SavesRecord
    from elaunch.training.agentlink import AgentLink
    from elaunch.training.distributed import DistributedContext


def open_saver(
    distributed: DistributedContext,
    storage: Storage,
    round_number: int,
    *,
    link: AgentLink | None,
    noted: Callable[[SavesRecord], None] | None = None,
) -> Saver:
    """Return this rank's saver; any rank may call it alone. ``link`` is that to its agent.

    ``round_number`` is that of the names of the checkpoints that are written now. An agent that
    cannot be reached at all is no reason for a script to fail: what is returned ``lacks`` it then,
    and lets every round commit. Raises SaveError where the agent refuses this
    worker: the round is over, or the directory is another job's. ``noted`` gets what was saved so
    far after each commit, where no agent counts.
    """
    placement = distributed.placement
    if placement.launcher != "elaunch":
        return without_agent(distributed, storage, noted=noted)
    if link is None:
        return without_agent(distributed, storage, f"{AGENT_SOCKET} is not set")
    from elaunch.training.checkpoint.saver.agent import AgentSaverClient

    saver = AgentSaverClient(link, placement, str(storage.place))
    try:
        saver.connect(round_number)
    except OSError as error:
        return without_agent(distributed, storage, link.problem or str(error))
    return saver


def without_agent(
    distributed: DistributedContext,
    storage: Storage,
    lacks: str = "",
    fence: Callable[[int], None] | None = None,
    noted: Callable[[SavesRecord], None] | None = None,
) -> Saver:
    """Return a saver that is this process itself; ``lacks``: why its agent is not, if it has one.

    All ranks have one of this kind, or none has: the shards of a save have to meet. ``fence`` is
    that of an agent which can be reached all the same.
    """
    from elaunch.training.checkpoint.saver.local import LocalSaver  # not for agents' workers

    return LocalSaver(distributed, storage, lacks, fence, noted)
