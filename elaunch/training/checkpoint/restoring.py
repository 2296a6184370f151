"""``restore_path``: which checkpoint all ranks read, and where each finds it.

Rank 0 chooses; the others take its word. What this job has not written itself, and nobody has
verified for it, rank 0 verifies first. If the latest is gone or damaged, the newest that is whole
takes its place, on all ranks. While the block lasts nobody deletes it: retention and ``delete`` see
the lock of whoever reads. From a URL the first rank of each node fetches it for the others. With a
directory per node, each node first gets what it lacks (nodecopies).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from elaunch.checkpoint import readers
from elaunch.checkpoint.depot import Committed
from elaunch.errors import CheckpointError, CollectiveError
from elaunch.training.checkpoint import where
from elaunch.training.checkpoint.agreeing import agree, attempt
from elaunch.training.checkpoint.parts import Parts, newer

LOOKING: Final = "looking for the latest checkpoint"

log = logging.getLogger("elaunch")


def choose(parts: Parts, uuid: str | None, timeout: float | None, what: str) -> Committed | None:
    """Return the checkpoint to read; None if none was asked for and there is none.

    ALL ranks call it together. Raises CheckpointError, on all of them, if they ask for different
    ones, or for one that is not there or damaged.
    """
    found, problem = None, None
    if parts.rank == 0:
        choice = _latest if uuid is None else _named
        found, problem = attempt(lambda: choice(parts, uuid or ""))
    said = agree(parts.distributed, what, problem, (uuid, found), timeout, CheckpointError)
    asked = {wanted: rank for rank, (wanted, _) in reversed(list(enumerate(said)))}
    if len(asked) > 1:
        told = ", ".join(f"rank {rank} for {wanted!r}" for wanted, rank in asked.items())
        raise CheckpointError(f"{what}: the ranks ask for different checkpoints: {told}")
    chosen: Committed | None
    chosen, reason = said[0][1]
    chosen = None if chosen is None else here(parts, chosen)
    if parts.local and chosen is not None and not is_foreign(chosen):
        from elaunch.training.checkpoint import nodecopies  # a third of what all of this imports

        try:
            nodecopies.bring(parts, chosen, timeout)
        except CheckpointError as error:
            if uuid is not None:
                raise
            reason = str(error)
    if reason:
        chosen = _in_its_place(parts, reason, timeout)
    if uuid is None:
        parts.known.choose(chosen)
    return chosen


def look(parts: Parts, timeout: float | None) -> Committed | None:
    """Return the newest checkpoint that is whole; rank 0 chooses. ALL ranks call it together."""
    found, problem, name = None, None, ""
    if parts.local:
        from elaunch.training.checkpoint import nodecopies

        name = nodecopies.newest_together(parts, parts.reads, timeout)
    if parts.rank == 0 and (name or not parts.local):
        found, problem = attempt(lambda: _newest(parts, name))
    chosen: Committed | None
    chosen = agree(parts.distributed, LOOKING, problem, found, timeout, CheckpointError)[0]
    return None if chosen is None else here(parts, chosen)


def here(parts: Parts, found: Committed) -> Committed:
    """Return a checkpoint that another rank found as this node calls it."""
    place = parts.depot.place
    if isinstance(place, str) or is_foreign(found):
        return found
    return replace(found, place=place / found.name)


def is_foreign(found: Committed) -> bool:
    """Whether somebody else's code has written it, in its own format."""
    return not found.uuid


def not_there(what: str) -> CheckpointError:
    """Return the error of who wants the latest checkpoint where there is none."""
    return CheckpointError(
        f"{what}: there is no checkpoint yet; ask ctx.checkpoint.latest(), which is None then"
    )


@contextlib.contextmanager
def opened(parts: Parts, found: Committed, timeout: float | None, what: str) -> Iterator[Path]:
    """Give every rank a local path to read the checkpoint from. ALL ranks enter it together.

    Raises CheckpointError, on all ranks, if one of them cannot reach it.
    """
    with contextlib.ExitStack() as stack:
        at_url = isinstance(parts.depot.place, str) and not is_foreign(found)
        fetches = not at_url or parts.is_node_chief
        path, problem = attempt(lambda: stack.enter_context(_at(parts, found)) if fetches else None)
        agree(parts.distributed, what, problem, None, timeout, CheckpointError)
        if at_url:
            path = parts.distributed.broadcast_local(path, timeout)
            stack.push(_leave_together(parts, timeout))
        yield Path(path)


Choice = tuple[Committed | None, str]
"""What rank 0 chooses, or why it cannot be what was the latest."""


def _named(parts: Parts, uuid: str) -> Choice:
    found = parts.depot.find(uuid)
    if not parts.local and found.uuid not in parts.known.whole:
        with _kept(found):
            parts.depot.verify(found)
        parts.known.whole.add(found.uuid)
    return found, ""


def _latest(parts: Parts, _: str) -> Choice:
    known = parts.known
    found = newer(known.latest(), known.own)
    if found is None:
        return None, str(known.problem or "")
    if is_foreign(found):
        return found, ""
    if not any(found.uuid == other.uuid for other in parts.depot.listed()):
        return None, f"{found.name} is gone"
    if parts.local:
        return found, ""
    reason = where.check(parts.depot, found, known)
    return (None, reason) if reason else (found, "")


def _in_its_place(parts: Parts, reason: str, timeout: float | None) -> Committed | None:
    """Return what is read in place of the latest. ALL ranks call it together."""
    found = look(parts, timeout)
    if parts.rank == 0:
        name = "there is no other" if found is None else f"{found.name} is taken"
        log.warning("the latest checkpoint cannot be read, %s: %s", name, reason)
    return found


def _newest(parts: Parts, name: str) -> Committed | None:
    """Return the checkpoint called ``name``; without one the newest that is whole."""
    if name:
        return parts.depot.find(name)
    return where.newest(parts.depot, parts.reads, parts.known)


@contextlib.contextmanager
def _at(parts: Parts, found: Committed) -> Iterator[Path]:
    if is_foreign(found):
        path = Path(found.place)
        if not path.exists():
            raise CheckpointError(f"{path} is gone: it was removed meanwhile")
        yield path
        return
    with _kept(found), parts.depot.fetch(found) as path:
        yield path


@contextlib.contextmanager
def _kept(found: Committed) -> Iterator[None]:
    """Keep a checkpoint from being removed; CheckpointError if it was already."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(readers.reading(found.place))
        except FileNotFoundError:
            raise CheckpointError(f"{found.name} is gone: it was removed meanwhile") from None
        yield


def _leave_together(parts: Parts, timeout: float | None) -> Any:
    """Return what keeps the node's copy until all its ranks have left the block."""

    def leave(kind: Any, error: BaseException | None, traceback: Any) -> bool:
        del kind, traceback
        try:
            parts.distributed.barrier_local(timeout)
        except CollectiveError:
            if error is None:
                raise
        return False

    return leave
