"""What travels between worker and saver comes back as it was; anything else is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from elaunch.checkpoint.records import Committed, ShardHeader, Stage
from elaunch.wire import worker
from elaunch.wire.worker import StagedShard

SHARD = StagedShard(
    stage=Stage(10, 3, "f00"),
    header=ShardHeader(
        1,
        2,
        "digits",
        {"steps_completed": 10, "deep": {"a": [1, None]}},
        "host",
        7,
        keep={"last": 2, "every": None, "best": None, "mode": "min"},
    ),
    images=(("__1_0.distcp", ((0, 100), (200, 24))), ("empty", ())),
    extra={"metrics": {"loss": 0.5}},
    protected=("step-00000005.r0",),
)


def test_a_part_comes_back_as_it_was() -> None:
    """Through JSON; its size and its end are those of its pieces."""
    sent = json.loads(json.dumps(asdict(SHARD)))
    assert worker.shard_from_json(sent) == SHARD
    assert (SHARD.size, SHARD.end) == (124, 224)
    assert StagedShard(SHARD.stage, SHARD.header, ()).end == 0


@pytest.mark.parametrize(
    "change",
    [
        {"stage": None},
        {"stage": {"step": -1, "round": 0, "uuid": "u"}},
        {"stage": {"step": 1, "round": 0, "uuid": "../x"}},
        {"header": {"rank": 1}},
        {"images": [["a"]]},
        {"images": [["a", [["x", 1]]]]},
        {"images": 3},
        {"extra": 3},
    ],
)
def test_what_is_no_shard_is_refused(change: dict[str, Any]) -> None:
    """With ValueError, whatever is wrong."""
    sent = json.loads(json.dumps(asdict(SHARD)))
    with pytest.raises(ValueError):
        worker.shard_from_json({**sent, **change})
    with pytest.raises(ValueError, match="no shard of a checkpoint"):
        worker.shard_from_json({})


@pytest.mark.parametrize("place", [Path("/ck/step-00000010.r0"), "memory://x/step-00000010.r0"])
def test_a_checkpoint_comes_back_as_it_was(place: Path | str) -> None:
    """A directory is a path again, a URL a text."""
    done = Committed("step-00000010.r0", place, 10, 0, "u", {"steps_completed": 10}, 9, "digits")
    sent = json.loads(json.dumps(worker.committed_to_json(done)))
    assert worker.committed_from_json(sent) == done
    assert worker.committed_from_json(worker.committed_to_json(None)) is None
