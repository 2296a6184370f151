"""A stranger among the ranks: it reaches the round's store, and so knows what stands there.

Under torchrun it needs no such trouble: ``torch.distributed.all_gather_object`` unpickles what any
process has sent that has joined the group through the store, which asks for no password.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaunch.errors import CollectiveError
from elaunch.training.members import key_of
from elaunch.training.ranks import RankCalls
from tests.attacks.gadgets import runs_shell
from tests.training.rankrig import PATIENCE, Ranks, StoreHost, in_threads


@dataclass
class Own:
    """A class of the script's own."""

    number: int


@pytest.fixture(scope="module")
def host() -> Iterator[StoreHost]:
    """Return a store that all tests of this module share."""
    yield StoreHost()


def together(ranks: Ranks, objects: list[Any], **changes: Any) -> Any:
    """Have each rank give its object; return the outcome."""

    def work(rank: int) -> Any:
        with ranks.calls(rank, **changes) as calls:
            return calls.call("all", "allgather", objects[rank], PATIENCE)

    return in_threads(range(len(objects)), work)


def test_ranks_of_several_nodes_without_a_key_run_nothing(host: StoreHost, tmp_path: Path) -> None:
    """Rank 1 is a stranger that read the key in the store. torchrun: rank 0 runs what it sends."""
    mark = tmp_path / "ran"
    outcome = together(Ranks(host, 2, 1, True), ["harmless", runs_shell(mark)], secret=None)
    assert not mark.exists() and outcome.values[1][0] == "harmless"
    error = outcome.errors[0]
    assert isinstance(error, CollectiveError)
    assert "names posix.system" in str(error) and "--rdzv-secret-file" in str(error)


def test_a_large_object_runs_nothing_either(host: StoreHost, tmp_path: Path) -> None:
    """torchrun: as above."""
    mark = tmp_path / "ran"
    objects = [b"x", [runs_shell(mark), b"x" * 500_000]]
    outcome = together(Ranks(host, 2, 1, True), objects, secret=None)
    assert not mark.exists() and "names posix.system" in str(outcome.errors[0])


@pytest.mark.parametrize("several", [False, True], ids=["one machine", "several"])
def test_what_ranks_send_without_a_key(host: StoreHost, several: bool) -> None:
    """Plain data, arrays, tensors, and classes of which the receiver has one itself, arrive."""
    objects = [
        {"a": [1, 2.5, None, ("x", {3})], "b": np.arange(3), "own": Own(1), "t": torch.ones(2)},
        {"a": Path("/x"), "b": np.float32(2), "own": Own(2), "t": torch.zeros(9999)},
    ]
    found = together(Ranks(host, 2, 1, several), objects, secret=None).all()
    for one in found:
        assert one[0]["own"] == Own(1) and one[1]["own"] == Own(2) and one[1]["a"] == Path("/x")
        assert one[0]["b"].tolist() == [0, 1, 2] and one[1]["t"].shape == (9999,)


@pytest.mark.parametrize("secret", [None, b"a secret of the job's"])
def test_any_object_among_processes_that_are_known(host: StoreHost, secret: bytes | None) -> None:
    """On one machine the kernel says whose a process is, elsewhere a key: classes arrive."""
    ranks = Ranks(host, 2, 1, machines=secret is not None)
    found = together(ranks, ["x", Own(3)], secret=secret).all()
    assert found == [["x", Own(3)]] * 2


def test_a_key_is_read_from_a_process_of_the_same_user_only(host: StoreHost) -> None:
    """It is in a memfd of rank 0; a stranger could name any file of any process in its record."""

    def work(rank: int) -> None:
        with ranks.calls(rank, secret=None) as calls:
            calls.call("all", "barrier", None, PATIENCE)
            if rank == 0:
                me = calls._me
                assert me is not None and key_of(me, me) is not None
                for other in (replace(me, pid=1), replace(me, key=0), replace(me, machine="x")):
                    assert key_of(other, me) is None
            calls.call("all", "barrier", None, PATIENCE)

    ranks = Ranks(host, 2, 2, False)
    in_threads(range(2), work).all()


@pytest.mark.parametrize("key", ["kind", "given", "done", "count"])
def test_what_a_stranger_writes_is_no_ranks_word(host: StoreHost, key: str, tmp_path: Path) -> None:
    """All ranks get an error, and nothing runs. torchrun: it is unpickled."""
    mark = tmp_path / "ran"
    bad = pickle.dumps(runs_shell(mark))

    def work(calls: RankCalls, rank: int) -> Any:
        calls.call("all", "barrier", None, PATIENCE)
        if rank == 0:
            with contextlib.closing(calls._store.connect(time.monotonic() + PATIENCE)) as line:
                value = b"5" if key == "count" else bytes(16) + bad
                line.put(f"all/2/{key}", value, time.monotonic() + PATIENCE)
                line.get("all/2/kind", time.monotonic() + PATIENCE)
            written.set()
        assert written.wait(PATIENCE)
        return calls.call("all", "allgather", rank, 5.0)

    written = threading.Event()
    outcome = Ranks(host, 2, 2, False).run(work)
    assert set(outcome.errors) == {0, 1} and not mark.exists()
    assert all(isinstance(error, CollectiveError) for error in outcome.errors.values())
