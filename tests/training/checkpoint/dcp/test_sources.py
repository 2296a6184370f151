"""Where the bytes of a checkpoint come from."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaunch.checkpoint.records import Committed
from elaunch.errors import SaveError
from elaunch.training.checkpoint.callcontext import CallContext, KnownCheckpoints
from elaunch.training.checkpoint.dcp import sources
from tests.launching import wait_until


def test_what_no_memory_gives_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint is read in several steps, each of which asks; the files have it all."""

    def refuse(*_: Any) -> Any:
        raise SaveError("the agent is gone")

    saver = SimpleNamespace(recall=refuse)
    parts = SimpleNamespace(saver=saver, known=KnownCheckpoints(), seconds=lambda _: 1.0)
    names = ["__0_0.distcp"]
    with caplog.at_level(logging.WARNING, "elaunch"):
        for uuid in ("a", "a", "b"):
            found = Committed(f"step-{uuid}", Path("/ck"), 10, 0, uuid, {}, 1)
            assert sources.recall(cast("CallContext", parts), found, names, None) == {}
    told = "is read from the files, not from memory: the agent is gone"
    assert caplog.messages == [f"step-a {told}", f"step-b {told}"]


def test_memory_goes_when_nobody_reads_it() -> None:
    """A part of it that somebody still has stays readable."""
    mappings = [mmap.mmap(-1, 4 * mmap.PAGESIZE) for _ in range(2)]
    source = sources.Source("step-1")
    source.hold({"a": memoryview(mappings[0]), "b": memoryview(mappings[1])})
    kept = source.read("b", 0, 2)
    source.close()
    wait_until(lambda: mappings[0].closed, 30.0)
    assert bytes(kept) == b"\0\0" and not mappings[1].closed
