"""What an agent's save queue sends to the agents of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from elaunch.agent.policy.turn import Round
from elaunch.agent.saver import commitrules
from elaunch.agent.saver.commitrules import CommitRules
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import SaveError
from elaunch.rendezvous.plan import Node, Plan
from elaunch.wire.worker import StagedShard

NODES = tuple(Node(f"n{k}", f"host{k}", f"10.0.0.{k}", 1, "x") for k in range(4))
PLAN = Plan("job", 0, "running", nodes=NODES)
SHARD = StagedShard(
    Stage(10, 0, "u"), ShardHeader(0, 4, "digits", {"steps_completed": 10}), (), local=True
)


def sent_by(directory: Path, send: Callable[[CommitRules], None]) -> tuple[list[int], SaveError]:
    """Return which of nodes 1 to 3 node 0 reaches, where node 1 is gone, and what it raises."""
    reached: list[int] = []

    def reach(node_rank: int, *_: Any) -> None:
        if node_rank == 1:
            raise SaveError("the agent of node host1 is gone")
        reached.append(node_rank)

    peers = SimpleNamespace(report=reach)
    plan: Any = SimpleNamespace(peers=peers, settings=SimpleNamespace(checkpoint_keep=None))
    rules = CommitRules(plan, open_storage(directory), lambda _: None, lambda _: False)
    rules.round = Round(0, 1, plan=PLAN, name="n0")
    with pytest.raises(SaveError, match="host1 is gone") as raised:
        send(rules)
    return reached, raised.value


def test_a_round_that_begins_while_the_node_that_committed_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is not given up for that: its manifests are sent to the node that commits now."""
    monkeypatch.setattr(commitrules, "PEER_S", 0.0)

    def gone(*_: Any) -> None:
        rules.ending = True
        rules.begin(Round(1, 1, plan=structs.replace(PLAN, round=1, nodes=NODES[2:]), name="n3"))
        raise SaveError("the agent of node host0 is gone")

    settings = SimpleNamespace(checkpoint_keep=None)
    setup: Any = SimpleNamespace(peers=SimpleNamespace(report=gone), settings=settings)
    rules = CommitRules(setup, open_storage(tmp_path), lambda _: None, lambda _: False)
    rules.round = Round(0, 1, plan=PLAN, name="n3")
    rules.written(SHARD, b"{}")


def test_an_agent_that_is_gone_keeps_no_message_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each node has its own directory, each waits for every manifest."""
    monkeypatch.setattr(commitrules, "PEER_S", 0.0)
    assert sent_by(tmp_path, lambda rules: rules.written(SHARD, b"{}"))[0] == [2, 3]
    assert sent_by(tmp_path, lambda rules: rules.writing(SHARD))[0] == [2, 3]
