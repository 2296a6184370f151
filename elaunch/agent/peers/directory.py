"""A node's own checkpoint directory (``--checkpoint-local``), as other agents see it.

=============  ================================================================================
request        what this agent does
=============  ================================================================================
``staged``     sends its ranks' manifests of uncommitted saves, and names what it has committed
``manifests``  sends all ranks' manifests of a checkpoint that it has committed
``kept``       finishes or clears what workers have left, and lists the checkpoints
``look``       reads one checkpoint's bytes, and lists the files that are whole
``gather``     fetches files from the agents that have them, and puts them in place
``file``       sends a file
=============  ================================================================================

The coordinator asks for all but files between two rounds (elaunch.agent.peers.search); they are
done one at a time, and refused while workers run here. Files are sent whenever another agent
gathers. A file is fetched under another name, checked, synced and renamed; a checkpoint that this
node has nothing of appears at once, with all its files. A path in the way goes to the quarantine.
Where one agent dies, or sends what is not the file, the next that has it is asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import convert, to_builtins

from elaunch.agent.peers.messages import CHUNK, PeerConnection, Undelivered
from elaunch.agent.peers.peers import Peer, Peers
from elaunch.checkpoint import layout, nodelocal
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.nodelocal import (
    LocalCheckpoint,
    WholeFile,
    find_whole,
    list_local,
)
from elaunch.checkpoint.storage.checksums import begin
from elaunch.checkpoint.storage.commit import read_stage
from elaunch.checkpoint.storage.durable import put_in_place
from elaunch.checkpoint.storage.files import inside, open_regular, text_in
from elaunch.errors import CheckpointError
from elaunch.files import own_directory

GATHERED: Final = "gather."
"""The begin of the name of a directory, below STAGE, that files are fetched into."""
REACH_S: Final = 10.0
"""Seconds to reach an agent that has a file."""

Manifests = dict[str, dict[int, bytes]]
"""``StageManifests`` as they are received."""

log = logging.getLogger("elaunch")


class LocalCopies:
    """Serves this node's checkpoint directory to the agents of the job.

    Args:
        peers: reaches the others; is given the handlers.
        root: the directory, which need not be there yet.
        glob: --checkpoint-glob, or None.
        run_id: of the job; other runs' checkpoints are not listed.
        finish: brings stages of dead rounds to an end:
            elaunch.agent.resume.directory.DirectoryFinisher.finish.
    """

    def __init__(
        self,
        peers: Peers,
        root: Path,
        glob: str | None,
        *,
        run_id: str,
        finish: Callable[[Path | str, str | None], None],
    ) -> None:
        self._peers = peers
        self._root = root
        self._glob = glob
        self._run_id = run_id
        self._finish = finish
        self._serial = threading.Lock()
        self._done = 0
        self._rests = True
        peers.handle("staged", self._one_by_one(self._on_staged))
        peers.handle("manifests", self._one_by_one(self._on_manifests))
        peers.handle("kept", self._one_by_one(self._on_kept))
        peers.handle("look", self._one_by_one(self._on_look))
        peers.handle("gather", self._one_by_one(self._on_gather))
        peers.handle("file", self._on_file)

    def rests(self, rests: bool) -> None:
        """Note whether nothing of a round is left on this node."""
        self._rests = rests

    def _one_by_one(
        self, serve: Callable[[PeerConnection, Mapping[str, Any]], Mapping[str, Any]]
    ) -> Callable[[PeerConnection, Mapping[str, Any]], Mapping[str, Any]]:
        """Return a handler that runs alone; while it waits the caller is sent ``busy`` lines."""

        def served(connection: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
            seen = self._done
            while not self._serial.acquire(timeout=1.0):
                connection.busy(self._done - seen)
                seen = self._done
            try:
                if not self._rests:
                    raise CheckpointError("workers run here")
                return serve(connection, request)
            finally:
                self._serial.release()

        return served

    def _progress(self, connection: PeerConnection) -> Callable[[int], None]:
        def progress(amount: int) -> None:
            self._done += amount
            connection.busy(amount)

        return progress

    # ── what is here ─────────────────────────────────────────────────────────────────────────────

    def _on_staged(self, _: PeerConnection, __: Mapping[str, Any]) -> Mapping[str, Any]:
        names = list(nodelocal.committed_paths(self._root))
        return {
            "ok": True,
            "manifests": to_builtins(nodelocal.staged_manifests(self._root), str_keys=True),
            "committed": names,
        }

    def _on_manifests(self, _: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        name = request["name"]
        path = nodelocal.committed_paths(self._root)[name]
        return {"ok": True, "manifests": to_builtins({name: read_stage(path)}, str_keys=True)}

    def _on_kept(self, _: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        manifests = convert(request["manifests"], Manifests, str_keys=True)
        nodelocal.adopt_manifests(self._root, manifests)
        self._tidy()
        checkpoints, passed_over = list_local(self._root, self._glob, self._run_id)
        rows = [[str(passed.path), passed.reason] for passed in passed_over]
        return {"ok": True, "kept": to_builtins(checkpoints), "passed_over": rows}

    def _tidy(self) -> None:
        """Finish or clear what workers and earlier searches have left."""
        with (
            contextlib.suppress(FileNotFoundError),
            own_directory(self._root / layout.STAGE) as stages,
        ):
            for left in stages.glob(f"{GATHERED}*"):
                shutil.rmtree(left, ignore_errors=True)
        self._finish(self._root, self._run_id)

    def _on_look(self, connection: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        checkpoint = convert(request["checkpoint"], LocalCheckpoint)
        found = find_whole(self._root, checkpoint, self._progress(connection))
        return {"ok": True, "looked": to_builtins(found)}

    def _on_file(self, connection: PeerConnection, request: Mapping[str, Any]) -> None:
        path = inside(self._root, request["checkpoint"], connection.who)
        if request["file"]:
            path = inside(path, request["file"], connection.who)
        self._check_within(path)
        with open_regular(path) as file:
            connection.send({"ok": True, "size": os.fstat(file.fileno()).st_size})
            connection.send_bytes(iter(partial(file.read, CHUNK), b""))

    def _check_within(self, path: Path) -> None:
        """Raise CheckpointError where a link leads out of the checkpoint directory."""
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._root)):
            raise CheckpointError(f"{path} is a link that leads out of the checkpoint directory")

    # ── what is fetched ──────────────────────────────────────────────────────────────────────────

    def _on_gather(
        self, connection: PeerConnection, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        checkpoint = convert(request["checkpoint"], LocalCheckpoint)
        files = convert(request["files"], list[WholeFile])
        nodes = convert(request["nodes"], list[Peer])
        path = inside(self._root, checkpoint.path, connection.who)
        self._check_within(path)
        self._check_room(sum(one.entry.size for one in files))
        scratch = self._root / layout.STAGE / f"{GATHERED}{secrets.token_hex(8)}"
        with own_directory(self._root / layout.STAGE, make=True):
            scratch.mkdir()
        same = (
            checkpoint.format != own.FORMAT
            or text_in(path, layout.COMMIT, "digest") == checkpoint.digest
        )
        try:
            made = NodeSources(self._peers, checkpoint.path, nodes, self._progress(connection))
            with contextlib.closing(made) as sources:
                if path.is_dir() and same:
                    self._complete(path, files, scratch, sources)
                else:
                    self._make(path, files, scratch, sources)
        except Undelivered as error:
            return {"error": str(error), "gone": error.gone}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return {"ok": True}

    def _check_room(self, needed: int) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._root).free
        if needed > free:
            raise CheckpointError(
                f"no space left on {self._root}: the files to fetch need {needed:,} bytes, "
                f"{free:,} are free"
            )

    def _make(
        self, path: Path, files: Sequence[WholeFile], scratch: Path, sources: NodeSources
    ) -> None:
        """Fetch a checkpoint that is not here, and have it appear at once."""
        made = scratch / "checkpoint"
        for number, one in enumerate(files):
            fetched = scratch / f"{number}"
            sources.fetch(one, fetched)
            if one.entry.path:
                inside(made, one.entry.path, "a file")
                made.mkdir(exist_ok=True)
                put_in_place(fetched, made, one.entry.path)
            else:  # the checkpoint is one file
                os.rename(fetched, made)
        self._set_aside(path)
        put_in_place(made, self._root, str(path.relative_to(self._root)))

    def _complete(
        self, path: Path, files: Sequence[WholeFile], scratch: Path, sources: NodeSources
    ) -> None:
        """Put files that are lacking, or damaged, into a checkpoint that is here in part.

        metadata.json and COMMIT make a pair, which is another one on each node that has committed
        by itself: both are here before either is put in place.
        """
        pair = []
        for number, one in enumerate(files):
            fetched = scratch / f"{number}"
            sources.fetch(one, fetched)
            target = inside(path, one.entry.path, "a file")
            self._check_within(target.parent)
            if one.entry.path in (layout.METADATA, layout.COMMIT):
                pair.append((fetched, one.entry.path))
            else:
                self._set_aside(target)
                put_in_place(fetched, path, one.entry.path)
        for fetched, document in pair:
            put_in_place(fetched, path, document)

    def _set_aside(self, path: Path) -> None:
        """Put what is in the way into the quarantine, under a name of its own."""
        if not os.path.lexists(path):
            return
        name = f"{path.name}.{secrets.token_hex(4)}"
        with own_directory(self._root / layout.QUARANTINE, make=True) as quarantine:
            os.rename(path, quarantine / name)
        aside = self._root / layout.QUARANTINE / name
        log.warning("%s is damaged, or not what the other nodes have: now %s", path, aside)


class NodeSources:
    """The nodes that have the files of one checkpoint; owns the connections to them."""

    def __init__(
        self,
        peers: Peers,
        checkpoint: str,
        nodes: Sequence[Peer],
        progress: Callable[[int], object],
    ) -> None:
        self._peers = peers
        self._checkpoint = checkpoint
        self._nodes = nodes
        self._progress = progress
        self._connections: dict[int, PeerConnection] = {}
        self._gone: dict[int, str] = {}
        self._first = secrets.randbelow(max(1, len(nodes)))
        """Where to begin: nodes that fetch at the same time ask different ones first."""

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections.values():
            connection.close()

    def fetch(self, wanted: WholeFile, target: Path) -> None:
        """Write the file to ``target``, synced, from the first node that gives it whole.

        Raises CheckpointError that names each node that did not, and why; Undelivered, ``gone``, if
        one of them was not reached, and may have it; OSError for the disk.
        """
        holders = sorted(wanted.holders, key=lambda one: (one + self._first) % len(self._nodes))
        problems = []
        for node in holders:
            try:
                if node in self._gone:
                    raise Undelivered(self._gone[node], True)
                self._fetch(node, wanted.entry, target)
            except Undelivered as error:
                self._hang_up(node, error)
                self._progress(1)  # there may be another one to ask
                problems.append(str(error))
            else:
                return
        name = wanted.entry.path or self._checkpoint
        text = f"{name} cannot be had: {'; '.join(problems) or 'no node has it'}"
        if any(node in self._gone for node in holders):
            raise Undelivered(text, True)
        raise CheckpointError(text)

    def _fetch(self, node: int, entry: FileEntry, target: Path) -> None:
        connection = self._connections.get(node)
        if connection is None:
            try:
                connection = self._peers.call(self._nodes[node], time.monotonic() + REACH_S)
            except Undelivered as error:
                raise Undelivered(str(error), True) from error
            self._connections[node] = connection
        asked = {"do": "file", "checkpoint": self._checkpoint, "file": entry.path}
        size = int(connection.ask(asked).get("size", -1))
        if size != entry.size:
            raise Undelivered(f"{connection.who}: {entry.path} has {size:,} bytes now")
        total = begin(entry.checksum)
        with open(target, "wb") as file:

            def take(piece: memoryview) -> None:
                total.update(piece)
                file.write(piece)

            connection.receive_to(take, size, self._progress)
            file.flush()
            os.fsync(file.fileno())
        if total.text() != entry.checksum:
            raise Undelivered(f"{connection.who}: {entry.path} is another file now")

    def _hang_up(self, node: int, error: Undelivered) -> None:
        """Close a connection after an error; a node that is gone is not called again."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()
        if error.gone:
            self._gone[node] = str(error)
