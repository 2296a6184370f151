"""Manifests there and back, and every damaged one refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.manifests import FileEntry, decode, encode_checked
from elaunch.checkpoint.records import ShardHeader, Stage
from elaunch.errors import CheckpointError

STAGE = Stage(120, 3, "9c-1_x")
FILES = (FileEntry("a", 0, "sha256:00", 5), FileEntry("sub/ü", 7, "sha256:11"))
HEADER = ShardHeader(1, 2, "digits", {"steps_completed": 120, "x": {"y": [1, None]}}, "here", 7)


@pytest.mark.parametrize("keep", [None, {"last": 2}])
def test_there_and_back(keep: dict[str, Any] | None) -> None:
    header = replace(HEADER, keep=keep)
    read = decode(encode_checked(STAGE, header, FILES), 1)
    assert (read.stage, read.header, read.files) == (STAGE, header, FILES)


def test_a_part_says_which_process_writes_it() -> None:
    import os
    import socket

    part = ShardHeader(0, 1, "digits", {})
    assert (part.host, part.pid) == (socket.gethostname(), os.getpid())


def test_a_rank_outside_its_world() -> None:
    with pytest.raises(CheckpointError, match="rank 2 is not below the world size 2"):
        encode_checked(STAGE, ShardHeader(2, 2, "digits", {}), [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "has schema 2, this elaunch reads 1"),
        ({"rank": 0}, "says it is of rank 0"),
        ({"rank": True}, "rank is True, not a whole number"),
        ({"world_size": -1}, "world_size is -1"),
        ({"step": None}, "step is None"),
        ({"run_id": 5}, "run_id is 5, not a string"),
        ({"uuid": "../x"}, "letters, digits"),
        ({"metadata": []}, "metadata is"),
        ({"keep": 2}, "keep is 2, no object"),
        ({"files": {}}, "has no list of files"),
        ({"files": [{"path": "/x"}]}, "outside the checkpoint"),
        ({"files": [{"path": "x", "checksum": "md5:0"}]}, "unknown checksum 'md5:0'"),
        ({"files": [{"path": "x", "checksum": "sha256:0", "size": 0.5}]}, "size is"),
    ],
)
def test_damaged(change: dict[str, Any], reason: str) -> None:
    document = {**json.loads(encode_checked(STAGE, HEADER, FILES)), **change}
    with pytest.raises(CheckpointError, match=reason):
        decode(json.dumps(document).encode(), 1)


@pytest.mark.slow
@given(st.data())
def test_no_damage_raises_anything_else(data: st.DataObject) -> None:
    content = bytearray(encode_checked(STAGE, HEADER, FILES))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(content), 1)
    except CheckpointError as error:
        assert str(error)
