"""What an agent's save queue sends to the agents of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.policy.turn import Round
from elaunch.agent.saver import surroundings
from elaunch.agent.saver.surroundings import RoundSurroundings
from elaunch.checkpoint.records import Part, Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import SaveError
from elaunch.rendezvous.plan import Node, Plan
from elaunch.wire.saver import Handed

NODES = tuple(Node(f"n{k}", f"host{k}", f"10.0.0.{k}", 1, "x") for k in range(4))
PLAN = Plan("job", 0, "running", nodes=NODES)
HANDED = Handed(Stage(10, 0, "u"), Part(0, 4, "digits", {"steps_completed": 10}), (), local=True)


def sent_by(
    directory: Path, send: Callable[[RoundSurroundings], None]
) -> tuple[list[int], SaveError]:
    """Return which of nodes 1 to 3 node 0 reaches, where node 1 is gone, and what it raises."""
    reached: list[int] = []

    def reach(node_rank: int, *_: Any) -> None:
        if node_rank == 1:
            raise SaveError("the agent of node host1 is gone")
        reached.append(node_rank)

    peers = SimpleNamespace(send_sealed=reach, send_writing=reach)
    plan: Any = SimpleNamespace(peers=peers, settings=SimpleNamespace(checkpoint_keep=None))
    world = RoundSurroundings(plan, open_storage(directory), lambda _: None, lambda _: False)
    world.round = Round(0, 1, plan=PLAN, name="n0")
    with pytest.raises(SaveError, match="host1 is gone") as raised:
        send(world)
    return reached, raised.value


def test_an_agent_that_is_gone_keeps_no_message_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each node has its own directory, each waits for every manifest."""
    monkeypatch.setattr(surroundings, "PEER_S", 0.0)
    assert sent_by(tmp_path, lambda world: world.sealed(HANDED, b"{}"))[0] == [2, 3]
    assert sent_by(tmp_path, lambda world: world.writing(HANDED))[0] == [2, 3]
