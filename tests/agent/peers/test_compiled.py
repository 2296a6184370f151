"""elaunch.agent.peers.compiled: a newcomer gets what the others have compiled, and nobody else."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from elaunch.agent.peers import compiled
from elaunch.agent.peers.compiled import CompilerCache
from elaunch.agent.peers.messages import Undelivered
from elaunch.agent.peers.peers import Peers
from tests.agent.peersrig import agents, tell
from tests.launching import wait_until

KERNEL = "ab/cabc.main.so"
HEADER = "chdr.h.gch"


def cache(peers: Peers, top: Path, trusted: bool = True) -> CompilerCache:
    """Return the cache of a node below ``top``."""
    roots = {"cache": top / "c", "headers": top / "c" / "precompiled_headers"}
    top.mkdir(exist_ok=True)
    ahead, prepare = (top / "ahead").exists, (top / "prepared").touch
    return CompilerCache(peers, roots, lambda: trusted, ahead=ahead, prepare=prepare)


def compile_there(top: Path) -> None:
    """Leave what TorchInductor leaves."""
    for name, size in {KERNEL: 5000, "fxgraph/aa/fkey/entry": 10, "locks/cabc.lock": 0}.items():
        path = top / "c" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    headers = top / "c" / "precompiled_headers"
    headers.mkdir()
    (headers / HEADER).write_bytes(os.urandom(9_000_000))
    (headers / "locks").mkdir()


def names(top: Path) -> list[str]:
    """Return the files below ``top``."""
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file())


EVERYTHING = [f"c/{KERNEL}", "c/fxgraph/aa/fkey/entry", f"c/precompiled_headers/{HEADER}"]


def test_a_newcomer_fetches_what_it_lacks(tmp_path: Path) -> None:
    """Byte for byte, for itself alone; what it has stays."""
    one, two = tmp_path / "1", tmp_path / "2"
    compile_there(one)
    with agents(2) as made:
        cache(made[0], one)
        own = cache(made[1], two)
        assert own.fetch([0]) == 3
        assert names(two) == EVERYTHING
        assert all((one / name).read_bytes() == (two / name).read_bytes() for name in EVERYTHING)
        assert all((two / name).parent.stat().st_mode & 0o777 == 0o700 for name in EVERYTHING[:2])
        (two / EVERYTHING[0]).write_text("my own")
        (one / "ahead").touch()
        assert own.fetch([0]) == 0 and (two / "prepared").exists()
        (two / "prepared").unlink()
        assert (two / EVERYTHING[0]).read_text() == "my own"


def test_only_a_node_that_is_not_in_the_round_asks(tmp_path: Path) -> None:
    """Once, with its first plan; a job that begins has nobody to ask."""
    compile_there(tmp_path / "1")
    with agents(2) as made:
        caches = [cache(peers, tmp_path / str(at)) for at, peers in enumerate(made, 1)]
        both = tell(made)
        asked: list[Sequence[int]] = []
        for one, name in zip(caches, ("a0", "a1"), strict=True):
            one.fetch = lambda ranks: asked.append(ranks) or 0  # type: ignore[method-assign,func-returns-value]
            one.on_plan(type(both)(both.job), name)  # forming: no nodes yet
            one.on_plan(both, name)
        assert asked == []
        newcomer = cache(made[1], tmp_path / "3")
        newcomer.on_plan(both, "a7")
        wait_until(lambda: len(names(tmp_path / "3")) == 3, what="all files have come")


def test_what_is_being_written_is_not_given(tmp_path: Path) -> None:
    """A kernel under the compiler's lock, a header, too."""
    one, two = tmp_path / "1", tmp_path / "2"
    compile_there(one)
    with agents(2) as made:
        cache(made[0], one)
        locks = [one / "c/locks/cabc.lock", one / "c/precompiled_headers/locks/chdr.lock"]
        held = [open(lock, "w") for lock in locks]  # noqa: SIM115  closed below
        for lock in held:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache(made[1], two).fetch([0]) == 1
        assert names(two) == ["c/fxgraph/aa/fkey/entry"]
        for lock in held:
            lock.close()
        assert cache(made[1], two).fetch([0]) == 2


@pytest.mark.parametrize("what", ["no secret", "another processor", "others may write", "old"])
def test_nothing_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Where it would be another's code, or of no use."""
    one, two = tmp_path / "1", tmp_path / "2"
    compile_there(one)
    (one / "ahead").touch()
    if what == "others may write":
        for path in (one / "c").rglob("*"):
            path.chmod(0o777)
    if what == "old":
        for path in (one / "c").rglob("*"):
            os.utime(path, (time.time() - 3 * 86_400,) * 2)
    with agents(2) as made:
        cache(made[0], one, trusted=what != "no secret")
        own = cache(made[1], two)
        if what == "another processor":
            answers = iter(["a Zen", "an Ice Lake"])
            monkeypatch.setattr(compiled, "machine", lambda: next(answers))
        assert own.fetch([0]) == 0
        assert names(two) == (["prepared"] if what in ("others may write", "old") else [])
        if what == "no secret":
            with (
                made[1].call(made[1].node(0), time.monotonic() + 30) as line,
                pytest.raises(Undelivered, match="no secret"),
            ):
                line.ask({"do": "compiled file", "root": "cache", "file": KERNEL})


def test_nothing_is_put_where_others_may_write(tmp_path: Path) -> None:
    """They could put something else there, which is executed."""
    one, two = tmp_path / "1", tmp_path / "2"
    compile_there(one)
    (two / "c").mkdir(parents=True)
    (two / "c").chmod(0o777)
    with agents(2) as made:
        cache(made[0], one)
        assert cache(made[1], two).fetch([0]) == 0
        assert names(two) == []


def test_a_file_that_was_changed_on_the_way_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksum can be made anew by who changes it; its signature cannot."""
    compile_there(tmp_path / "1")
    with agents(2) as made:
        cache(made[0], tmp_path / "1")
        own = cache(made[1], tmp_path / "2")
        monkeypatch.setattr(
            compiled, "_signed", lambda data, signature: signature.update(b"x") or data
        )
        assert own.fetch([0]) == 0
        assert names(tmp_path / "2") == []


@pytest.mark.parametrize(
    "path", ["../up.so", "/etc/passwd", "ab/../../up", "ab//x", "", "ab/.hidden", "locks/x.lock"]
)
def test_no_other_file_is_given_or_taken(tmp_path: Path, path: str) -> None:
    """Whatever an agent asks for, or offers."""
    compile_there(tmp_path / "1")
    (tmp_path / "up.so").touch()
    with agents(2) as made:
        cache(made[0], tmp_path / "1")
        own = cache(made[1], tmp_path / "2")
        with (
            made[1].call(made[1].node(0), time.monotonic() + 30) as line,
            pytest.raises(Undelivered, match="no file of TorchInductor"),
        ):
            line.ask({"do": "compiled file", "root": "cache", "file": path})
        made[0].handle("compiled", lambda *_: {"ok": True, "files": [["cache", path, 3]]})
        assert own.fetch([0]) == 0
        assert names(tmp_path / "2") == []


def test_a_link_that_leads_out_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    """Neither the file's own nor its directory's."""
    compile_there(tmp_path / "1")
    (tmp_path / "secret.so").write_text("key")
    (tmp_path / "1/c/ab/link.so").symlink_to(tmp_path / "secret.so")
    (tmp_path / "1/c/out").symlink_to(tmp_path)
    with agents(2) as made:
        listed = {file.path for file in cache(made[0], tmp_path / "1").files()}
        assert listed == {KERNEL, "fxgraph/aa/fkey/entry", HEADER}
        for path in ("ab/link.so", "out/secret.so"):
            with (
                made[1].call(made[1].node(0), time.monotonic() + 30) as line,
                pytest.raises(Undelivered, match="leads out"),
            ):
                line.ask({"do": "compiled file", "root": "cache", "file": path})


def test_a_node_that_has_gone_is_passed_over(tmp_path: Path) -> None:
    """Another one is asked; without any the workers compile."""
    compile_there(tmp_path / "1")
    with agents(3) as made:
        cache(made[0], tmp_path / "1")
        own = cache(made[1], tmp_path / "2")
        made[2].close()
        assert own.fetch([2, 0]) == 3
        assert own.fetch([2]) == 0
