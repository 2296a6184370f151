"""TorchInductor's cache of this node for the job's other agents, and theirs for this one.

A node that comes into a running job has an empty cache, and would compile for minutes what the
others have on their disks. Its agent asks one of them, when it reads its first plan of a round that
it is not in, for the files that it lacks: while it stands by or the next round forms. Where that
node's server has imported what compiling takes (elaunch.server.compiling), this one does so, too.

What lies in the cache is executed. So it is asked for, and given, only where agents know each other
by what nobody else can read (a secret, or a password of etcd), signed with a key that is made of
that, and put only where no other user may write; a file that is there stays. Kernels are compiled
for one kind of processor: agents of another get nothing.

TorchInductor names a file by a digest of what it is made of, and writes the larger ones in place,
under a lock of that name: what is locked is not given. Which files are the job's is unknown: those
are given that were read or written since a day before its start, as far as MOST bytes go.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import platform
import random
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from elaunch.agent.peers.messages import CHUNK, PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peers
from elaunch.agent.workers.tempdir import LOCKS, is_own, is_written
from elaunch.checkpoint.storage.files import open_regular
from elaunch.errors import CheckpointError
from elaunch.rendezvous.plan import Plan

HEADERS: Final = "precompiled_headers"
MOST: Final = 1 << 30
"""Bytes to give; a precompiled header has 150 MB."""
DAY: Final = 86_400.0
"""The kernel notes a reading of a file at least once a day (relatime)."""
TRIES: Final = 3
REACH_S: Final = 15.0
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}")
_DEEPEST: Final = 6

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class CacheFile:
    """A file of the cache: ``root`` is ``cache`` or ``headers``, ``path`` is relative to it."""

    root: str
    path: str
    size: int


class CompilerCache:
    """Serves the files below ``roots`` to the agents of the job, and fetches theirs, once.

    Args:
        peers: reaches the others; is given the handlers.
        roots: ``cache`` and ``headers``, where TorchInductor has its files on this node.
        trusted: whether agents know each other by what nobody else can read.
        ahead: whether this node's server has imported what compiling takes.
        prepare: has it do so.
    """

    def __init__(
        self,
        peers: Peers,
        roots: Mapping[str, Path],
        trusted: Callable[[], bool],
        *,
        ahead: Callable[[], bool],
        prepare: Callable[[], object],
    ) -> None:
        self._peers = peers
        self._roots = roots
        self._trusted = trusted
        self._ahead = ahead
        self._prepare = prepare
        self._since = time.time() - DAY
        self._asked = False
        peers.handle("compiled", self._on_compiled)
        peers.handle("compiled file", self._on_file)

    def on_plan(self, plan: Plan, name: str) -> None:
        """Fetch what the nodes of a round have that this one is not in, in a thread of its own."""
        if self._asked or not plan.nodes:
            return
        self._asked = True
        if plan.node_rank(name) is None and self._trusted():
            ranks = random.sample(range(len(plan.nodes)), min(TRIES, len(plan.nodes)))
            threading.Thread(
                target=self.fetch, args=(ranks,), name="compiler-cache", daemon=True
            ).start()

    # ── what is here ─────────────────────────────────────────────────────────────────────────────

    def _on_compiled(self, _: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._trusted() or request["machine"] != machine():
            return {"ok": True, "files": [], "ahead": False}
        rows = [[one.root, one.path, one.size] for one in self.files()]
        return {"ok": True, "files": rows, "ahead": self._ahead()}

    def files(self) -> list[CacheFile]:
        """Return what may be given, the smallest first."""
        found: list[tuple[float, CacheFile]] = []
        for root, top in self._roots.items():
            if is_own(top):
                found += _recent(root, top, self._since)
        chosen, left = [], MOST
        for _, file in sorted(found, key=lambda one: -one[0]):
            left -= file.size
            if left >= 0:
                chosen.append(file)
        return sorted(chosen, key=lambda one: one.size)

    def _on_file(self, line: PeerConnection, request: Mapping[str, Any]) -> None:
        if not self._trusted():
            raise CheckpointError("no secret is shared")
        path = self._place(CacheFile(request["root"], request["file"], 0))
        with open_regular(path) as file:
            if not is_own(path) or is_written(path):
                raise CheckpointError(f"{path.name} is being written, or another user's")
            line.send({"ok": True, "size": os.fstat(file.fileno()).st_size})
            signature = self._signature(request["root"], request["file"])
            line.send_bytes(_signed(iter(partial(file.read, CHUNK), b""), signature))
            line.send({"ok": True, "signature": signature.hexdigest()})

    def _signature(self, root: str, path: str) -> hmac.HMAC:
        """Return what signs a file's name, and its bytes as they are added."""
        return hmac.new(self._peers.key(), f"{root}\0{path}\0".encode(), "sha256")

    # ── what others have ─────────────────────────────────────────────────────────────────────────

    def fetch(self, ranks: Sequence[int]) -> int:
        """Fetch what this node lacks from the first of these nodes that has any; return how many.

        Without it the workers compile, which takes longer and changes nothing.
        """
        for rank in ranks:
            try:
                began, fetched = time.monotonic(), self._fetch(rank)
            except (
                CheckpointError,
                Undelivered,
                OSError,
                LookupError,
                TypeError,
                ValueError,
            ) as error:
                log.info("no compiled code comes from node %d: %s", rank, error)
                continue
            if fetched:
                seconds = time.monotonic() - began
                text = "%d files of compiled code have come from node %d in %.2f s"
                log.info(text, fetched, rank, seconds)
                return fetched
        return 0

    def _fetch(self, rank: int) -> int:
        fetched = 0
        with self._peers.call(self._peers.node(rank), time.monotonic() + REACH_S) as line:
            offered = line.ask({"do": "compiled", "machine": machine()})
            if offered["ahead"]:
                self._prepare()
            for row in offered["files"]:
                file = CacheFile(str(row[0]), str(row[1]), int(row[2]))
                target = self._place(file)
                if not target.exists():
                    _make(self._roots[file.root], target.parent)
                    fetched += self._fetch_file(line, file, target)
        return fetched

    def _fetch_file(self, line: PeerConnection, file: CacheFile, target: Path) -> bool:
        """Put the file in its place, whole; False where it is not given any more."""
        try:
            wanted = {"root": file.root, "file": file.path}
            size = int(line.ask({"do": "compiled file", **wanted})["size"])
        except Undelivered as error:
            if error.gone:
                raise
            return False
        if not 0 <= size <= MOST:
            raise ValueError(f"{file.path} has {size} bytes")
        half = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                signature = self._signature(file.root, file.path)

                def take(piece: memoryview) -> None:
                    signature.update(piece)
                    out.write(piece)

                line.receive_to(take, size, lambda _: None)
            given = str(line.answer().get("signature"))
            if not hmac.compare_digest(given, signature.hexdigest()):
                raise ValueError(f"the signature of {file.path} is wrong")
            os.rename(half, target)
        finally:
            half.unlink(missing_ok=True)
        return True

    def _place(self, file: CacheFile) -> Path:
        """Return where a file is; raises CheckpointError for what cannot be in a cache."""
        parts = file.path.split("/")
        known = file.root in self._roots and len(parts) <= _DEEPEST
        if not known or not all(map(_NAME.fullmatch, parts)) or LOCKS in parts:
            raise CheckpointError(f"{file.path!r} is no file of TorchInductor's cache")
        place = self._roots[file.root].joinpath(*parts)
        top = os.path.realpath(self._roots[file.root])
        if not os.path.realpath(place).startswith(top + os.sep):
            raise CheckpointError(f"{file.path!r} is a link that leads out of the cache")
        return place


def machine() -> str:
    """Return a digest of what compiled code depends on: the processor and what it can do."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    with open("/proc/cpuinfo") as file:
        processor = file.read().partition("\n\n")[0].splitlines()
    facts = [line for line in processor if line.partition(":")[0].strip() in wanted]
    return hashlib.sha256("\n".join([platform.machine(), *facts]).encode()).hexdigest()


def _recent(root: str, top: Path, since: float) -> Iterator[tuple[float, CacheFile]]:
    """Yield the files below ``top`` that were used since then, and when."""
    for directory, directories, names in os.walk(top):
        left_out = {LOCKS, HEADERS} if root == "cache" else {LOCKS}
        directories[:] = [one for one in directories if one not in left_out]
        for path in (Path(directory, name) for name in names if _NAME.fullmatch(name)):
            found = _lstat(path)
            used = 0.0 if found is None else max(found.st_mtime, found.st_atime)
            if found is not None and used >= since and is_own(path):
                yield used, CacheFile(root, str(path.relative_to(top)), found.st_size)


def _lstat(path: Path) -> os.stat_result | None:
    """Return what is known of a regular file that is no link; None for anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # it has been removed meanwhile
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _signed(data: Iterable[bytes], signature: hmac.HMAC) -> Iterator[bytes]:
    for piece in data:
        signature.update(piece)
        yield piece


def _make(root: Path, directory: Path) -> None:
    """Make a directory in a cache of this user's own; raises CheckpointError for another's."""
    root.mkdir(mode=0o700, exist_ok=True, parents=True)
    inside = [place for place in (directory, *directory.parents) if root in place.parents]
    for place in (root, *reversed(inside)):
        place.mkdir(mode=0o700, exist_ok=True)
        if not is_own(place):
            raise CheckpointError(f"{place} is another user's, or others may write to it")
