"""A stranger among the ranks: it reaches the round's store, and so knows what stands there.

Under torchrun it needs no such trouble: ``torch.distributed.all_gather_object`` unpickles what any
process has sent that has joined the group through the store, which asks for no password.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaunch.errors import CollectiveError, PeerLost
from elaunch.training.channel import meeting
from elaunch.training.channel.listener import Listener
from elaunch.training.channel.meeting import Layout, RankRecord
from tests.attacks.gadgets import runs_shell
from tests.training.channelrig import PATIENCE, ROOT, Ranks, StoreHost, in_threads


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
        with ranks.channel(rank, **changes) as channel:
            return channel.call("all", "allgather", objects[rank], PATIENCE)

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
    """Large objects come in pieces. torchrun: as above."""
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


def test_nobody_comes_by_tcp_where_all_are_on_one_machine(host: StoreHost) -> None:
    """Of a TCP connection nobody can say whose it is. torchrun: gloo takes whoever comes first."""
    ports: list[int] = []
    ranks = Ranks(host, 2, 1, machines=False)

    def work(rank: int) -> Any:
        with ranks.channel(rank, secret=None) as channel:
            ports.append(channel._listener.port)
            return channel.call("all", "barrier", None, PATIENCE) or _knock(ports[-1])

    assert in_threads(range(2), work).all() == ["refused"] * 2


def _knock(port: int) -> str:
    try:
        socket.create_connection(("127.0.0.1", port), 5.0).close()
    except ConnectionRefusedError:
        return "refused"
    return "taken"


@pytest.mark.slow
def test_a_place_that_only_one_rank_has_lets_nobody_in(
    host: StoreHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was made to see another machine is not let in by one that was not.

    Else it would hand on, by its Unix socket, what a stranger has sent it. torchrun: any rank does.
    """
    read = meeting.read_layout

    def forged(raw: bytes, me: RankRecord) -> Layout | str:
        layout = read(raw, me)
        assert isinstance(layout, Layout) and layout.here
        return replace(layout, here=False) if me.rank == 0 else layout

    monkeypatch.setattr(meeting, "read_layout", forged)
    ranks = Ranks(host, 2, 1, machines=False)

    def work(rank: int) -> Any:
        with ranks.channel(rank, secret=None) as channel:
            return channel.call("all", "allgather", rank, PATIENCE)

    errors = in_threads(range(2), work).errors
    assert isinstance(errors[0], PeerLost) and isinstance(errors[1], PeerLost)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_is_hung_up_on(tmp_path: Path) -> None:
    """On one machine: the kernel says who connects. torchrun: every user may join the group."""
    listener = Listener(0, 2)
    listener.bind(None)
    listener.start(b"known", dict)
    try:
        script = (
            "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect('\\0' + sys.argv[1]);"
            "s.send(b'elnchan1' + bytes(32)); print(len(s.recv(100)))"
        )
        argv = [sys.executable, "-c", script, listener.unix]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.stdout.strip() in ("0", ""), done.stderr
    finally:
        listener.close()
