"""Checkpoints where every node has a directory of its own: what the nodes have together.

With ``--checkpoint-local`` a node has the files of its own ranks. Before a checkpoint is read, each
node's first rank lists which files it has whole, by their checksums; what all nodes have together
must be complete; then each gets what it lacks from one that has it, in pieces, checked at the end.
(At the start of a round elaunch's agents do the same: elaunch.agent.peers.search.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.nodelocal import (
    LocalCheckpoint,
    NodeFiles,
    UnitedFiles,
    WholeFile,
    find_whole,
    list_local,
    unite,
)
from elaunch.checkpoint.storage.checksums import begin
from elaunch.checkpoint.storage.durable import (
    make_parents,
    sync_directory,
    sync_parents,
    temporary_name,
)
from elaunch.checkpoint.storage.files import inside, regular_size
from elaunch.checkpoint.storage.storage import Committed
from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.callcontext import CallContext
from elaunch.training.checkpoint.together import agree, attempt

PIECE: Final = 16 << 20
"""Bytes of a file that travel at once."""
_PAIR: Final = (layout.METADATA, layout.COMMIT)
WHAT: Final = "looking for what the nodes have of a checkpoint"


def newest_together(call: CallContext, run_id: str | None, timeout: float | None) -> str:
    """Return the name of the newest checkpoint that the nodes have together, "" if there is none.

    ALL ranks call it together; each node has all of it then. ``run_id`` None: of any run.
    """
    found, problem = _on_chiefs(call, lambda root: list_local(root, None, run_id)[0])
    lists = agree(call.distributed, WHAT, problem, found, timeout, CheckpointError)
    checkpoints: set[LocalCheckpoint] = {
        one for each in lists if each for one in each if one.format == own.FORMAT
    }
    for one in sorted(checkpoints, key=lambda one: one.age, reverse=True):
        if not _bring(call, one, timeout).missing:
            return one.path
    return ""


def bring(call: CallContext, found: Committed, timeout: float | None) -> None:
    """Have all of a checkpoint on every node; ALL ranks call it together.

    Raises CheckpointError, on all ranks, that names a file that no node has whole.
    """
    lacks, problem = _on_chiefs(call, lambda root: _lacks(root / found.name))
    if not any(agree(call.distributed, WHAT, problem, lacks, timeout, CheckpointError)):
        return
    listed, problem = _on_chiefs(call, lambda root: list_local(root, None, None)[0])
    lists = agree(call.distributed, WHAT, problem, listed, timeout, CheckpointError)
    listed_there = [one for each in lists if each for one in each if one.path == found.name]
    if not listed_there:
        raise CheckpointError(f"{found.name} is on no node any more")
    union = _bring(call, listed_there[0], timeout)
    if union.missing:
        raise CheckpointError(
            f"{found.name} is incomplete on the nodes that are here: {', '.join(union.missing)}"
        )


def _bring(call: CallContext, checkpoint: LocalCheckpoint, timeout: float | None) -> UnitedFiles:
    """Return what the nodes have of a checkpoint; if that is all of it, each has it then."""
    here, problem = _on_chiefs(call, lambda root: find_whole(root, checkpoint, _ignore))
    of_ranks: list[NodeFiles | None]
    of_ranks = agree(call.distributed, WHAT, problem, here, timeout, CheckpointError)
    chiefs = [rank for rank, one in enumerate(of_ranks) if one is not None]
    union = unite([one for one in of_ranks if one is not None])
    if union.missing:
        return union
    node = chiefs.index(call.rank) if call.rank in chiefs else -1
    written, problem = [], None
    for whole in union.files:
        if not any(map(whole.is_lacking, range(len(chiefs)))):
            continue
        problem = (
            _send(call, checkpoint, whole, (chiefs[whole.holders[0]], node), timeout) or problem
        )
        written += [whole.entry.path] if whole.is_lacking(node) else []
    if written and node >= 0 and problem is None:
        root = _root(call) / checkpoint.path
        problem = attempt(lambda: _sync(root, written))[1]
    agree(call.distributed, WHAT, problem, None, timeout, CheckpointError)
    return union


def _send(
    call: CallContext,
    checkpoint: LocalCheckpoint,
    whole: WholeFile,
    ends: tuple[int, int],
    timeout: float | None,
) -> Exception | None:
    """Bring a file to the nodes that lack it; return what went wrong on this rank.

    ``ends``: the rank that has it; the number of this rank's node, -1 where another acts for that.
    """
    source, node = ends
    directory = _root(call) / checkpoint.path
    takes = node >= 0 and whole.is_lacking(node)
    with ExitStack() as stack:
        pieces: Iterator[bytes] = iter(())
        writer, problem = None, None
        if call.rank == source:
            path = inside(directory, whole.entry.path, "a manifest")
            file, problem = attempt(lambda: stack.enter_context(path.open("rb")))
            pieces = _pieces(file) if file is not None else pieces
        if takes:
            writer, problem = attempt(lambda: stack.enter_context(_Writer(directory, whole)))
        for _ in range(-(-whole.entry.size // PIECE)):
            piece, failed = attempt(lambda: next(pieces, b""))
            problem = problem or failed
            data = call.distributed.allgather(piece, timeout)[source]
            if writer is not None and problem is None:
                problem = _written(writer, data)
        if writer is not None and problem is None:
            problem = attempt(writer.finish)[1]
    return problem


def _aside(name: str) -> str:
    """Return what a document of ``_PAIR`` is called until both are here: each needs the other."""
    return f"{layout.TEMPORARY}{name}"


def _sync(root: Path, written: list[str]) -> None:
    """Have it on the disk, and put the documents in place now that all of them are here."""
    sync_parents(root, written)
    for name in written:
        if name in _PAIR:
            os.replace(root / _aside(name), root / name)
    sync_directory(root)


def _written(writer: _Writer, data: bytes) -> Exception | None:
    return attempt(lambda: writer.write(data))[1]


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


class _Writer:
    """A file that comes in pieces: it has its name when it is whole, or the one of ``_aside``."""

    def __init__(self, checkpoint: Path, whole: WholeFile) -> None:
        path = inside(checkpoint, whole.entry.path, "a manifest")
        self._path = checkpoint / _aside(path.name) if whole.entry.path in _PAIR else path
        self._entry = whole.entry
        self._total = begin(whole.entry.checksum)
        checkpoint.mkdir(exist_ok=True)
        make_parents(checkpoint, whole.entry.path)
        self._temporary = self._path.with_name(temporary_name())
        self._file = self._temporary.open("xb")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, data: Any) -> None:
        """Take the next piece."""
        self._total.update(data)
        self._file.write(data)

    def finish(self) -> None:
        """Put the file in its place; CheckpointError if it is not what it should be."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._total.text() != self._entry.checksum:
            raise CheckpointError(f"{self._entry.path} did not arrive as it was sent")
        os.replace(self._temporary, self._path)


def _lacks(checkpoint: Path) -> bool:
    """Tell whether some file of a checkpoint is not here, by the manifests; none is read."""
    try:
        files = chain(*own.read_documents(checkpoint, None).values())
        return any(regular_size(checkpoint / file.path) != file.size for file in files)
    except (CheckpointError, FileNotFoundError):
        return True


def _on_chiefs(call: CallContext, work: Any) -> tuple[Any, Exception | None]:
    return attempt(lambda: work(_root(call))) if call.is_node_chief else (None, None)


def _root(call: CallContext) -> Path:
    return Path(call.storage.place)


def _ignore(count: int) -> None:
    """Take no notice of progress: the wait for this rank has its timeout."""
    del count
