"""Checkpoints where every node has a directory of its own: what the nodes have together.

With ``--checkpoint-local`` a node has the files of its own ranks. Before a checkpoint is read, each
node's first rank lists which files it has whole, by their checksums; what all nodes have together
must be complete; then each node's first rank gets what the node lacks from one that has it, in
pieces, checked at the end. No other rank receives any of it.
(At the start of a round elaunch's agents do the same: elaunch.agent.peers.search.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.nodelocal import (
    LocalCheckpoint,
    UnitedFiles,
    find_whole,
    list_local,
    unite,
)
from elaunch.checkpoint.records import Committed
from elaunch.checkpoint.storage.durable import (
    make_parents,
    sync_directory,
    sync_parents,
    temporary_name,
    write_file,
)
from elaunch.checkpoint.storage.files import inside, open_regular, regular_size
from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.callcontext import CallContext
from elaunch.training.checkpoint.together import CHECKPOINT, Joint, guarded, together
from elaunch.training.distributed import deliver, for_purpose

PIECE: Final = 4 << 20
"""Bytes of a file that travel at once."""
_PAIR: Final = (layout.METADATA, layout.COMMIT)
WHAT: Final = "looking for what the nodes have of a checkpoint"


def newest_together(call: CallContext, run_id: str | None, timeout: float | None) -> str:
    """Return the name of the newest checkpoint that the nodes have together, "" if there is none.

    ALL ranks call it together; each node has all of it then. ``run_id`` None: of any run.
    """
    lists = _from_chiefs(call, lambda root: list_local(root, None, run_id)[0], timeout)
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
    if not any(_from_chiefs(call, lambda root: _lacks(root / found.name), timeout)):
        return
    lists = _from_chiefs(call, lambda root: list_local(root, None, None)[0], timeout)
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
    of_ranks = _from_chiefs(call, lambda root: find_whole(root, checkpoint, _ignore), timeout)
    chiefs = [rank for rank, one in enumerate(of_ranks) if one is not None]
    union = unite([one for one in of_ranks if one is not None])
    if union.missing:
        return union
    root, written = _root(call) / checkpoint.path, []
    node = chiefs.index(call.rank) if call.rank in chiefs else -1
    for whole in union.files:
        if not any(map(whole.is_lacking, range(len(chiefs)))):
            continue
        takes = node >= 0 and whole.is_lacking(node)
        _send(call, (chiefs[whole.holders[0]], takes), root, whole.entry, timeout)
        written += [whole.entry.path] if takes else []
    with _step(call, timeout):
        if written:
            _sync(root, written)
    return union


def _send(
    call: CallContext,
    ends: tuple[int, bool],
    checkpoint: Path,
    entry: FileEntry,
    timeout: float | None,
) -> None:
    """Bring a file to the nodes that lack it. ALL ranks call it together.

    ``ends``: the rank that has it; whether this rank writes it.
    """
    source, takes = ends
    path = inside(checkpoint, entry.path, "a manifest")
    with _step(call, timeout):
        content = _read(path) if call.rank == source else None
        pieces = _pieces(call, content, takes, entry, timeout)
        try:
            if takes:
                _put(checkpoint, entry, pieces)
        finally:
            for _ in pieces:  # every rank takes part until the last
                pass


def _pieces(
    call: CallContext,
    content: Iterator[bytes] | None,
    takes: bool,
    entry: FileEntry,
    timeout: float | None,
) -> Iterator[bytes]:
    """Yield the pieces of a file that come to this rank; ``content``: where it reads them.

    What goes wrong in reading is raised there at the end, when all ranks are through.
    """
    ranks, problem = for_purpose(call.distributed, CHECKPOINT), None
    for _ in range(-(-entry.size // PIECE)):
        piece = None
        if content is not None and problem is None:
            piece, problem = guarded(partial(next, content, b""), f"reading {entry.path}")
        yield deliver(ranks, piece, takes, timeout) or b""
    if problem is not None:
        raise problem


def _read(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while piece := file.read(PIECE):
            yield piece


def _put(checkpoint: Path, entry: FileEntry, pieces: Iterator[bytes]) -> None:
    """Write a file that comes in pieces; it gets its name, or that of ``_aside``, when it is whole.

    Raises CheckpointError if it is not what it should be.
    """
    checkpoint.mkdir(exist_ok=True)
    make_parents(checkpoint, entry.path)
    path = checkpoint / entry.path
    temporary = path.with_name(temporary_name())
    try:
        made = write_file(temporary.parent, temporary.name, pieces, like=entry.checksum)
        if made.checksum != entry.checksum:
            raise CheckpointError(f"{entry.path} did not arrive as it was sent")
        os.replace(temporary, checkpoint / _aside(path.name) if entry.path in _PAIR else path)
    finally:
        temporary.unlink(missing_ok=True)


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


def _lacks(checkpoint: Path) -> bool:
    """Tell whether some file of a checkpoint is not here, by the manifests; none is read."""
    try:
        files = chain(*own.read_documents(checkpoint, None).values())
        return any(regular_size(checkpoint / file.path) != file.size for file in files)
    except (CheckpointError, FileNotFoundError):
        return True


def _from_chiefs(
    call: CallContext, work: Callable[[Path], Any], timeout: float | None
) -> list[Any]:
    """Return what ``work`` returns on each node's first rank, by rank; None for the others."""
    with together(call.distributed, WHAT, timeout, CheckpointError, everyone=True) as step:
        step.sent = work(_root(call)) if call.is_node_chief else None
    return step.received


def _step(call: CallContext, timeout: float | None) -> contextlib.AbstractContextManager[Joint]:
    return together(call.distributed, WHAT, timeout, CheckpointError)


def _root(call: CallContext) -> Path:
    return Path(call.storage.place)


def _ignore(count: int) -> None:
    """Take no notice of progress: the wait for this rank has its timeout."""
    del count
