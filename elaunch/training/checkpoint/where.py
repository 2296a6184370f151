"""Where this run's checkpoints are, whose directory it is, and whether all nodes see the same.

================================  ==============================================================
``ctx.checkpoint`` uses           under
================================  ==============================================================
``--checkpoint-dir``              ``elaunch run`` with that flag
``ELAUNCH_CHECKPOINT_DIR``        every other launcher, and alone, where it is set
``$XDG_STATE_HOME/elaunch/        all of them, else
<run id>/checkpoints``
================================  ==============================================================

Rank 0 makes the directory. Where no agent does, it also holds its lock, finishes or clears the
stages that an earlier job left behind, and counts the round: one more than the largest there. (An
agent locks it, and then looks after the stages.) With ``--checkpoint-local`` the first rank of each
node does it for its own.

Whether nodes share a directory is not asked of the device and inode numbers, which are equal by
accident: rank 0 leaves a mark with a random name, and every rank looks for it
(elaunch.checkpoint.probe).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elaunch import env
from elaunch.checkpoint import layout, probe, retention
from elaunch.checkpoint.records import Keep
from elaunch.checkpoint.search.locations import default_location, parse_location
from elaunch.checkpoint.storage.files import text_in
from elaunch.checkpoint.storage.storage import Committed, Location, Storage, StorageLock
from elaunch.errors import CheckpointError, SaveError, UsageError
from elaunch.training.checkpoint.callcontext import KnownCheckpoints
from elaunch.training.checkpoint.together import together
from elaunch.training.distributed import DistributedContext
from elaunch.training.launch import Info

SEEN_S: Final = 15.0
"""Seconds after which what another node has made counts as not there: attribute caches are slow."""
LOCK_S: Final = 5.0
"""Seconds for a job that was killed a moment ago to give the lock back."""
LOCK_AGAIN_S: Final = 0.1

log = logging.getLogger("elaunch")


@dataclass(frozen=True)
class DirectoryOwner:
    """The run that writes here, and the round in the names of its checkpoints."""

    run_id: str
    round: int


def location_of(info: Info, run_id: str, environ: Mapping[str, str]) -> tuple[Location, bool]:
    """Return the directory or URL, and whether a person has chosen it.

    Raises UsageError where there is none: no variable and no home, or a variable that names none.
    """
    given = environ.get(env.CHECKPOINT_DIR, "")
    if given:
        try:
            return parse_location(given), True
        except ValueError as error:
            raise UsageError(f"{env.CHECKPOINT_DIR}={given!r} {error}") from None
    found = default_location(run_id or info.run_id or "", environ)
    if found is None:
        raise UsageError(
            "there is no directory for checkpoints: this user has no home; give --checkpoint-dir "
            f"or set {env.CHECKPOINT_DIR}"
        )
    return found, False


def keep_of(environ: Mapping[str, str]) -> Keep:
    """Return the rule of the flags; raises UsageError for a variable that holds none."""
    text = environ.get(env.CHECKPOINT_KEEP, "")
    try:
        return Keep.from_json(text)
    except (ValueError, TypeError) as error:
        why = "it is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(
            f"{env.CHECKPOINT_KEEP}={text!r} is no rule of what is kept: {why}; write a JSON "
            """object such as '{"last": 3}', or unset it"""
        ) from None


def is_local(info: Info, environ: Mapping[str, str]) -> bool:
    """Return whether each of several nodes has a directory of its own.

    Raises UsageError for a variable that says neither yes nor no.
    """
    text = environ.get(env.CHECKPOINT_LOCAL, "")
    if text in ("", "1"):
        return text == "1" and info.nodes > 1
    from elaunch.config.values import switch

    try:
        return switch(text) and info.nodes > 1
    except ValueError as error:
        raise UsageError(f"{env.CHECKPOINT_LOCAL}={text!r} {error}; write 1 or 0") from None


def take(storage: Storage, info: Info, run_id: str, given: bool) -> DirectoryOwner:
    """Make the directory ready and return whose it is; the rank that acts for it calls it.

    Args:
        storage: the directory, locked by the caller where no agent has it.
        info: what the launcher set.
        run_id: the run's.
        given: a person chose the run id, or the launcher did, so that a later start has the same.

    Raises SaveError for another run's directory; OSError if it cannot be made.
    """
    has_agent = info.launcher == "elaunch"
    if not given and not has_agent:
        run_id = text_in(storage.place, layout.RUN, "run_id") or run_id
    storage.prepare(run_id, given)
    if has_agent:
        return DirectoryOwner(run_id, info.round)
    _finish_stages(storage, run_id, given)
    storage.clear_trash()
    rounds = [found.round for found in storage.listed()]
    return DirectoryOwner(run_id, max(rounds, default=-1) + 1)


def lock(storage: Storage) -> StorageLock:
    """Lock the directory for this job; the rank that acts for it calls it, where no agent has it.

    Raises SaveError if another job has it still after LOCK_S, OSError if it cannot be locked.
    """
    until, never = time.monotonic() + LOCK_S, threading.Event()
    while True:
        try:
            return storage.lock()
        except SaveError:
            if time.monotonic() >= until:
                raise
        never.wait(LOCK_AGAIN_S)


def finish(storage: Storage, run_id: str, given: bool) -> None:
    """Bring to an end what an earlier job left in stages, unless the directory is in use.

    Of another run's directory nothing is touched, nor of one that cannot be written to.
    """
    if given and text_in(storage.place, layout.RUN, "run_id") not in ("", run_id):
        return
    try:
        with contextlib.closing(storage.lock()):
            _finish_stages(storage, run_id, given)
    except (SaveError, OSError) as error:
        log.debug("stages in %s stay as they are: %s", storage.place, error)


def _finish_stages(storage: Storage, run_id: str, given: bool) -> None:
    done = storage.finish_stages(run_id if given else None)
    for found in done:
        log.info("%s was complete, but its writer had died: committed now", found.name)
    # Where that is not the newest one, it is not known yet what is resumed from.
    if done and next(storage.newest_first(), None) == done[-1]:
        retention.Retiring(storage, keep_of(os.environ)).follow(done[-1])


def check(storage: Storage, found: Committed, known: KnownCheckpoints) -> None:
    """Raise CheckpointError or OSError if a checkpoint cannot be read; put a damaged one aside.

    Of what was whole before, and of what is at a URL, only documents and sizes are looked at. One
    that cannot be read just now stays, and so does another job's.
    """
    if found.uuid in known.damaged:
        raise CheckpointError("it is damaged")
    try:
        with retention.reading(found.place):
            verify(storage, found, known)
    except CheckpointError as error:
        if known.read_only is None:
            put_aside(storage, found, str(error))
        raise CheckpointError(f"it is damaged: {error}") from error
    except FileNotFoundError:
        raise CheckpointError("it is gone: it was removed meanwhile") from None
    known.whole.add(found.uuid)


def verify(storage: Storage, found: Committed, known: KnownCheckpoints) -> None:
    """Raise CheckpointError for one that is damaged; of a URL what is read is compared as it is."""
    at_path = isinstance(found.place, Path)
    storage.verify(found, content=at_path and found.uuid not in known.whole)


def put_aside(storage: Storage, found: Committed, reason: str) -> None:
    """Take a damaged checkpoint away from all readers, where the storage can be written to."""
    try:
        storage.quarantine(found, reason)
    except (OSError, CheckpointError) as error:
        log.warning("%s cannot be put into quarantine: %s", found.name, error)


def check_shared(
    distributed: DistributedContext, storage: Storage, local: bool, timeout: float | None
) -> None:
    """Raise CheckpointError, on all ranks, unless the nodes share what they should share.

    Ranks of one node see the same. ALL ranks call it together, when rank 0 has made the directory.
    """
    if isinstance(storage.place, str) or distributed.cross_size == 1:
        return
    what = "looking for the checkpoint directory"
    place, mark = storage.place, uuid.uuid4().hex
    try:
        with together(distributed, what, timeout, CheckpointError) as step:
            if distributed.rank == 0:
                probe.leave_mark(place, mark)
            step.sent = mark
        with together(distributed, what, timeout, CheckpointError):
            _look(distributed, place, step.received[0], local)
    finally:
        if distributed.rank == 0:
            probe.remove_mark(place, mark)


def print_default(place: Location, given: bool) -> None:
    """Print on stderr where checkpoints are kept, unless a person chose it; rank 0 does, once."""
    if not given:
        print(
            f"elaunch: checkpoints are kept in {place} (--checkpoint-dir or {env.CHECKPOINT_DIR} "
            "choose another place)",
            file=sys.stderr,
            flush=True,
        )


def _look(distributed: DistributedContext, place: Path, mark: str, local: bool) -> None:
    """Look for rank 0's mark; raise CheckpointError where it is wrong to see it, or not to."""
    node = distributed.cross_rank
    if local and node != 0:
        if not probe.unseen(place, {mark}, 0.0):
            raise CheckpointError(
                f"--checkpoint-local is given, but nodes 0 and {node} share {place}: leave the "
                "flag out"
            )
    elif probe.unseen(place, {mark}, SEEN_S):
        raise CheckpointError(
            f"{place} of host {socket.gethostname()} (node {node}) is not the directory that rank "
            "0 writes to: use storage that all nodes share, or give --checkpoint-local (or set "
            f"{env.CHECKPOINT_LOCAL}=1) if each node has its own"
        )
