"""Nodes with directories of their own: the newest that they have together ends up on all of them.

The agents are threads of this process with real sockets and real files.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.peers import directory
from elaunch.agent.peers.messages import PeerConnection
from elaunch.agent.peers.peers import Peers
from elaunch.agent.peers.search import LocalSearch
from elaunch.agent.policy import events
from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.records import Image, ShardHeader, Stage
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import CheckpointError
from elaunch.rendezvous.decide.view import Search, SearchResult
from elaunch.rendezvous.plan import PlanCheckpoint
from tests.agent.peersrig import content, local_nodes, members
from tests.checkpoint import makers
from tests.checkpoint.test_nodelocal import flip

REACH = 0.5


def search(made: list[Peers], posted: list[events.Event] | None = None) -> SearchResult:
    """Return what a coordinator among them finds."""
    post = (posted if posted is not None else []).append
    return LocalSearch(made[0], REACH, post)(Search(members(made)))


def reasons(posted: list[events.Event]) -> str:
    """Return why checkpoints were skipped, in one text."""
    (event,) = posted
    assert isinstance(event, events.CheckpointChosen)
    return "\n".join(passed.reason for passed in event.search.passed_over)


def part(path: Path, *kept: str) -> None:
    """Leave only the documents and these files of a checkpoint."""
    for file in path.rglob("*"):
        name = str(file.relative_to(path))
        document = name in (layout.COMMIT, layout.METADATA) or "manifest" in name
        if file.is_file() and not document and name not in kept:
            file.unlink()


def test_the_newest_comes_to_all(tmp_path: Path) -> None:
    """Steps 40 and 50 on two disks, nothing on a third: 50 on all, to the byte."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        makers.own(roots[0], 40)
        path = makers.own(roots[1], 50)
        found = search(made)
        assert found.checkpoint == PlanCheckpoint(path.name, 50, "elaunch")
        assert found.ready == {"a0", "a1", "a2"}
        wanted = content(path)
        for root in roots:
            assert content(root / path.name) == wanted
            own.verify(root / path.name, "digits")
            assert not list((root / layout.STAGE).glob("*"))


def test_parts_on_different_nodes_are_put_together(tmp_path: Path) -> None:
    """Each node has what its rank wrote."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        path = makers.own(roots[0], 50)
        whole = content(path)
        shutil.copytree(path, roots[1] / path.name)
        part(roots[0] / path.name, "model.pt")
        part(roots[1] / path.name, "rank1/rng.bin")
        assert search(made).checkpoint is not None
        assert [content(root / path.name) for root in roots] == [whole] * 3


def test_a_part_that_nobody_has_makes_it_the_next_older(tmp_path: Path) -> None:
    """And the reason names the part."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        makers.own(roots[0], 40)
        part(makers.own(roots[1], 50), "model.pt")
        posted: list[events.Event] = []
        found = search(made, posted)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 40
        assert "no node has all of it: rank1/rng.bin (on node1)" in reasons(posted)
        assert (roots[1] / "step-00000040.r0" / layout.COMMIT).exists()


@pytest.mark.parametrize("how", ["foreign", "flipped", "no commit"])
def test_what_is_newer_and_not_good_is_never_chosen(tmp_path: Path, how: str) -> None:
    """A copy of another run, one with a bit flipped, one that was not committed."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        makers.own(roots[0], 50)
        bad = makers.own(roots[1], 60, run_id="another" if how == "foreign" else "digits")
        if how == "flipped":
            flip(bad / "model.pt")
        if how == "no commit":
            (bad / layout.COMMIT).unlink()
        posted: list[events.Event] = []
        found = search(made, posted)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 50
        said = {"foreign": "belongs to run another", "flipped": "model.pt", "no commit": "COMMIT"}
        assert said[how] in reasons(posted)


def test_a_flipped_bit_is_mended_from_another_node(tmp_path: Path) -> None:
    """Only that file is fetched; the bad one is kept in the quarantine."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        path = makers.own(roots[0], 50)
        shutil.copytree(path, roots[1] / path.name)
        flip(path / "model.pt")
        untouched = (path / "rank1/rng.bin").stat().st_ino
        assert search(made).checkpoint is not None
        assert content(path) == content(roots[1] / path.name)
        assert (path / "rank1/rng.bin").stat().st_ino == untouched
        assert len(list((roots[0] / layout.QUARANTINE).iterdir())) == 1


def test_another_commit_of_the_same_name_makes_room(tmp_path: Path) -> None:
    """Two committed things with one name and different digests: all get one of them."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        path = makers.own(roots[0], 50)
        makers.own(roots[1], 50, ranks={0: {"model.pt": b"other"}})
        assert search(made).checkpoint is not None
        first, *others = [content(root / path.name) for root in roots]
        assert others == [first, first]


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_what_others_wrote_is_brought_to_all(tmp_path: Path, kind: str) -> None:
    """Single files of torch.save, and a DCP directory whose parts lie on two nodes."""
    import torch
    import torch.distributed.checkpoint as dcp

    glob = "step_*.pt" if kind == "file" else None
    with local_nodes(tmp_path, 3, glob) as (made, _, roots):
        for number, step in enumerate((40, 50)):
            state = {"w": torch.full((1000,), float(step))}
            if kind == "file":
                torch.save(state, roots[number] / f"step_{step}.pt")
            else:
                dcp.save(state, checkpoint_id=roots[number] / f"step_{step}")
        if kind == "dcp":
            (roots[0] / "step_50").mkdir()
            data = roots[1] / "step_50" / "__0_0.distcp"
            data.rename(roots[0] / "step_50" / data.name)
        found = search(made)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 50
        copies = [content(root) for root in roots]
        newest = [{k: v for k, v in one.items() if k.startswith("step_50")} for one in copies]
        assert len(newest[0]) == (1 if kind == "file" else 2)
        assert newest[1:] == newest[:1] * 2


def test_two_files_of_one_name_become_one(tmp_path: Path) -> None:
    """A rank may not start from something else than the others; what had to go is kept aside."""
    import torch

    with local_nodes(tmp_path, 2, "step_*.pt") as (made, _, roots):
        for number, root in enumerate(roots):
            torch.save({"w": torch.full((10,), float(number))}, root / "step_50.pt")
        before = [(root / "step_50.pt").read_bytes() for root in roots]
        assert search(made).checkpoint is not None
        assert {(root / "step_50.pt").read_bytes() for root in roots} == {before[0]}
        (aside,) = (roots[1] / layout.QUARANTINE).iterdir()
        assert aside.read_bytes() == before[1]


def test_nothing_anywhere_is_a_fresh_start(tmp_path: Path) -> None:
    """On all nodes."""
    with local_nodes(tmp_path, 2) as (made, _, __):
        assert search(made) == SearchResult(None, ready=frozenset({"a0", "a1"}))


def test_a_stage_that_is_complete_is_committed(tmp_path: Path) -> None:
    """Its node was killed before the commit; what is not complete is cleared, as are rests."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        makers.own(roots[0], 40)
        storage = open_storage(roots[1], local=True)
        storage.prepare("digits", True)
        for step, ranks in ((50, 1), (60, 2)):
            storage.write_shard(
                Stage(step, 0, "abc"),
                ShardHeader(0, ranks, "digits", {"steps_completed": step}),
                [Image("model.pt", [b"weights"])],
            )
        (roots[1] / layout.STAGE / "gather.0123").mkdir()
        found = search(made)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 50
        (one, other) = (content(root / "step-00000050.r0") for root in roots)
        assert one == other
        assert one["model.pt"] == b"weights"
        assert list((roots[1] / layout.STAGE).iterdir()) == []


@pytest.mark.parametrize("committed", [None, 0])
def test_parts_that_were_sealed_everywhere_are_not_lost(
    tmp_path: Path, committed: int | None
) -> None:
    """The round ended before the nodes had told each other; one may have committed already."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        stage = Stage(50, 0, "abc")
        storages = [open_storage(root, local=True) for root in roots]
        seals = {}
        for rank, storage in enumerate(storages[:2]):
            storage.prepare("digits", True)
            part = ShardHeader(rank, 2, "digits", {"steps_completed": 50})
            seals[rank] = storage.write_shard(stage, part, [Image(f"state_{rank}", [b"x" * rank])])
        if committed is not None:
            storages[committed].adopt(stage, seals)
            storages[committed].commit(stage, lambda: None)
        found = search(made)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 50
        every = [content(root / stage.final) for root in roots]
        for each in every:  # two nodes have committed, each by its own clock
            assert {each.pop(name)[:1] for name in (layout.METADATA, layout.COMMIT)} == {b"{"}
        one, *others = every
        assert others == [one, one]
        assert {"state_0", "state_1"} <= set(one)
        for root in roots:
            own.verify(root / stage.final, "digits")


# ── what goes wrong on the way ───────────────────────────────────────────────────────────────────


def dies(root: Path) -> Callable[[PeerConnection, Any], None]:
    """Return a handler of a node that ends in the middle of every file."""

    def served(line: PeerConnection, request: Any) -> None:
        size = (root / request["checkpoint"] / request["file"]).stat().st_size
        line.send({"ok": True, "size": size})
        line.close()

    return served


def test_a_sender_that_dies_is_replaced_by_another(tmp_path: Path) -> None:
    """Two nodes have it; the first one asked breaks off."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        path = makers.own(roots[0], 50)
        shutil.copytree(path, roots[1] / path.name)
        made[0].handle("file", dies(roots[0]))
        assert search(made).checkpoint is not None
        assert content(roots[2] / path.name) == content(path)


def test_where_no_sender_is_left_the_next_older_is_taken(tmp_path: Path) -> None:
    """Once it is no member; it is on all nodes already, and nothing half of the newer one."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        for root in roots:
            makers.own(root, 40)
        makers.own(roots[2], 50)
        made[2].handle("file", dies(roots[2]))
        posted: list[events.Event] = []
        assert search(made, posted) == SearchResult(again=True)
        assert posted == []
        found = search(made[:2], posted)
        assert found.checkpoint is not None
        assert found.checkpoint.step == 40
        assert not (roots[1] / "step-00000050.r0").exists()
        assert list((roots[1] / layout.STAGE).iterdir()) == []


def test_what_cannot_be_had_is_no_fresh_start(tmp_path: Path, monkeypatch: Any) -> None:
    """A full disk on one node: the error names the node, the step and what is lacking."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        makers.own(roots[0], 50)
        usage = shutil.disk_usage(roots[1])._replace(free=10)
        monkeypatch.setattr(directory.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CheckpointError, match=r"step 50.*node1.*no space left.*10 are free"):
            search(made)


def test_a_disk_that_fails_in_the_middle_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    """The error of the write, not a hang."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with local_nodes(tmp_path, 2) as (made, _, roots):
        makers.own(roots[0], 50)
        monkeypatch.setattr(directory.os, "fsync", fail)
        with pytest.raises(CheckpointError, match=r"node1.*Input/output error"):
            search(made)


def test_storage_that_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    """Nobody may begin anew because one node's disk is away."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        roots[1].rmdir()
        roots[1].write_text("a file where the directory was")
        with pytest.raises(CheckpointError, match=r"agent of node node1.*disk1"):
            search(made)


@pytest.mark.slow
def test_an_agent_that_is_not_reached_is_waited_for_once(tmp_path: Path) -> None:
    """Nothing is known then; the second time it is an error that names it, or a spare left out."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        makers.own(roots[0], 50)
        made[2].close()
        asked = Search(members(made), nodes=("a0", "a1", "a2"))
        finder = LocalSearch(made[0], 0.1, lambda _: None)
        assert finder(asked) == SearchResult(again=True)
        with pytest.raises(CheckpointError, match=r"agent of node node2.*member all the time"):
            finder(asked)
        spare = Search(members(made), nodes=("a0", "a1"))
        finder = LocalSearch(made[0], 0.1, lambda _: None)
        assert finder(spare) == SearchResult(again=True)
        assert finder(spare).ready == {"a0", "a1"}


def test_while_workers_run_nothing_is_changed(tmp_path: Path) -> None:
    """A coordinator that is none any more asks in vain."""
    with local_nodes(tmp_path, 2) as (made, copies, roots):
        makers.own(roots[0], 50)
        copies[1].rests(False)
        with pytest.raises(CheckpointError, match=r"node1.*workers run here"):
            search(made)
        assert list(roots[1].iterdir()) == []


def test_two_coordinators_take_turns(tmp_path: Path) -> None:
    """The old one's search goes on while the new one begins: both find the same."""
    with local_nodes(tmp_path, 3) as (made, _, roots):
        path = makers.own(roots[0], 50)
        found: list[SearchResult] = []
        threads = [threading.Thread(target=lambda: found.append(search(made))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [one.checkpoint and one.checkpoint.step for one in found] == [50, 50]
        assert [content(root / path.name) for root in roots] == [content(path)] * 3


def test_no_file_outside_the_directory_is_sent(tmp_path: Path) -> None:
    """Not even to an agent of the job."""
    (tmp_path / "private").write_text("key")
    with local_nodes(tmp_path, 2) as (made, _, roots):
        (roots[0] / "link").symlink_to(tmp_path / "private")
        for checkpoint, file in (
            ("..", "private"),
            ("link", ""),
            ("/etc", "passwd"),
            (".", "link"),
        ):
            line = made[1].call(made[1].node(0), time.monotonic() + 20)
            with line, pytest.raises(CheckpointError, match=r"outside|out of the checkpoint"):
                line.ask({"do": "file", "checkpoint": checkpoint, "file": file})


def test_no_file_is_put_outside_the_directory(tmp_path: Path) -> None:
    """A link in the place of the checkpoint leads elsewhere: that node takes nothing."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        path = makers.own(roots[0], 50)
        shutil.copytree(path, tmp_path / "elsewhere")
        part(tmp_path / "elsewhere")
        (roots[1] / path.name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="leads out of the checkpoint directory"):
            search(made)
        assert not (tmp_path / "elsewhere" / "model.pt").exists()


def differ(path: Path, who: str) -> None:
    """Have a copy's documents be those of an agent that has committed by itself."""
    makers.edit_json(path / layout.METADATA, committed=who)
    checksum = layout.checksum((path / layout.METADATA).read_bytes())
    makers.edit_json(path / layout.COMMIT, metadata=checksum)


def test_documents_that_fit_are_never_replaced(tmp_path: Path) -> None:
    """Each node lacks a part, each has committed by itself."""
    with local_nodes(tmp_path, 2) as (made, _, roots):
        paths = [makers.own(roots[0], 50), roots[1] / "step-00000050.r0"]
        shutil.copytree(*paths)
        for path, kept in zip(paths, ("model.pt", "rank1/rng.bin"), strict=True):
            part(path, kept)
            differ(path, kept)
        before = [content(path) for path in paths]
        assert search(made).checkpoint is not None
        for path, documents in zip(paths, before, strict=True):
            own.verify(path, "digits")
            assert content(path) == {**before[0], **before[1], **documents}


def test_documents_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    """Their holder dies in the middle of COMMIT; with a holder that lives, the two fit again."""
    with local_nodes(tmp_path, 2) as (made, copies, roots):
        path = makers.own(roots[0], 50)
        differ(path, "here")
        bad = roots[1] / path.name
        shutil.copytree(path, bad)
        makers.edit_json(bad / layout.METADATA, committed="of nobody")
        before = content(bad)
        broken = dies(roots[0])

        def served(line: PeerConnection, request: Any) -> None:
            (broken if request["file"] == layout.COMMIT else copies[0]._on_file)(line, request)

        made[0].handle("file", served)
        assert search(made).again
        assert content(bad) == before
        made[0].handle("file", copies[0]._on_file)
        assert search(made).checkpoint is not None
        assert content(bad) == content(path)
