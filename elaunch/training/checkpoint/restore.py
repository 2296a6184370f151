"""``restore_path``: which checkpoint all ranks read, and where each finds it.

Rank 0 chooses; the others follow. It first verifies a checkpoint that this job has neither written
nor verified. If the latest is gone or damaged, the newest that is whole takes its place, on all
ranks. While the block lasts nobody deletes it: retention and ``delete`` see the readers' lock. From
a URL the first rank of each node fetches it for the others; ``load`` has each rank read ranges of
it. Both compare what they read with the manifests, so nothing else reads it before. With a
directory per node, each node first gets what it lacks (nodecopies).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elaunch.checkpoint import layout, retention
from elaunch.checkpoint.records import Begun
from elaunch.checkpoint.search import elsewhere
from elaunch.checkpoint.search.locations import parse_location, without_slash
from elaunch.checkpoint.storage.storage import Committed, Location, Storage, open_storage
from elaunch.errors import (
    CheckpointError,
    CollectiveError,
    ContextError,
    DamageError,
    SaveError,
)
from elaunch.training.checkpoint import where
from elaunch.training.checkpoint.callcontext import CallContext, KnownCheckpoints, newer
from elaunch.training.checkpoint.handle import LONGER_S, SaveHandle
from elaunch.training.checkpoint.latest import newest
from elaunch.training.checkpoint.together import together
from elaunch.training.distributed import for_purpose

if TYPE_CHECKING:
    from elaunch.checkpoint.storage.objects import Ranges
    from elaunch.training.checkpoint.session import CheckpointSession
    from elaunch.training.distributed import DistributedContext

LOOKING: Final = "looking for the latest checkpoint"
LOOK_S: Final = 0.1
"""Seconds between two looks for what another node's agent writes."""

log = logging.getLogger("elaunch")


Which = str | os.PathLike[str] | Committed | SaveHandle
"""How a script names a checkpoint: name, uuid, path, URL, or what a call returned."""


def named(storage: Storage, which: Which) -> str:
    """Return the name or uuid of a checkpoint in ``storage``; the path or URL of any other.

    Raises ContextError for what names nothing.
    """
    made = which.committed if isinstance(which, SaveHandle) else which
    given: Any = made.place if isinstance(made, Committed) else made
    try:
        text = os.fspath(given)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise ContextError(
            f"{which!r} names no checkpoint: give a name, a uuid, a path, a URL, or what latest() "
            "or save() returned, once it is committed"
        )
    if os.sep not in text and (isinstance(which, str) or not os.path.lexists(text)):
        return text
    try:
        place = parse_location(text)
    except ValueError as error:
        raise ContextError(f"{text!r} {error}") from None
    above, name = elsewhere.parent_of(place)
    if not _is_same(above, storage.place):
        return str(place)
    if isinstance(place, str):
        parsed = layout.parse_stage_name(name)
        return parsed[2] if parsed else place
    return name if layout.parse_step_name(name) else str(place)


def _is_same(one: Location, other: Location) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return without_slash(str(one)) == without_slash(str(other))
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def find(storage: Storage, which: Which, anywhere: bool = False) -> Committed:
    """Return a checkpoint of ``storage``, or any other; one rank, alone.

    Raises CheckpointError if it is not there.
    """
    name = named(storage, which)
    if os.sep not in name:
        return storage.find(name)
    if not anywhere:
        raise CheckpointError(f"{name} is no checkpoint of {storage.place}: give one that is there")
    return elsewhere.committed_at(elsewhere.find_at(parse_location(name), content=False))[1]


@dataclass(frozen=True)
class Wanted:
    """A request of all ranks to read a checkpoint.

    Attributes:
        which: one checkpoint; None: the latest.
        source: what to begin from where there is no latest.
        timeout: seconds that each wait for the other ranks may take.
        what: the call, for errors.
    """

    which: Which | None
    source: str | os.PathLike[str] | None
    timeout: float | None
    what: str


def wanted(
    session: CheckpointSession,
    which: Which | None,
    source: str | os.PathLike[str] | None,
    *,
    timeout: float | None,
    what: str,
) -> tuple[CallContext, Wanted]:
    """Return what a call reads, and the context to read it with. ALL ranks call it together."""
    call = session.together(timeout)
    if which is None:
        session.ask_for_latest()
        source = session.info.init_from if source is None else source
    return call, Wanted(which, source, timeout, what)


def _choose(call: CallContext, wanted: Wanted) -> tuple[CallContext, Committed | None]:
    """Return the checkpoint to read, and the context to read it with; None if there is none.

    ALL ranks call it together. What comes from ``source`` has step 0: a run begins with it. Raises
    CheckpointError, on all of them, if they ask for different ones, or for one that is not there or
    damaged.
    """
    if wanted.which is not None:
        return _chosen(call, wanted)
    found = _latest_of_all(call, wanted)
    if found is not None or wanted.source is None:
        return call, found
    there, found = _chosen(call, wanted)
    if found is not None and call.rank == 0:
        log.info("this run has no checkpoint: it begins at step 0 from %s", found.place)
    return there, None if found is None else Begun.of(found)


def read(
    call: CallContext, wanted: Wanted, strict: bool, use: Callable[[CallContext, Committed], None]
) -> Committed | None:
    """Choose a checkpoint, and have ``use`` read it; return it, None if there is none.

    ALL ranks call it together. Where ``use`` finds the latest damaged it is put aside, and the next
    older one is read: with ``strict`` that leaves nothing of what was read before. Raises what
    ``use`` raises.
    """
    while True:
        there, found = _choose(call, wanted)
        if found is None:
            return None
        try:
            use(there, found)
        except DamageError as damage:
            error = CheckpointError(f"{wanted.what} {found.name}: {found.place}: {damage}")
            if wanted.which is not None or there is not call:
                raise error from damage
            _put_aside(call, found, error, wanted)
            if not strict:
                raise error from damage
        else:
            return found


def _put_aside(
    call: CallContext, found: Committed, damage: CheckpointError, wanted: Wanted
) -> None:
    """Take a damaged checkpoint away from all readers, on each node. ALL ranks call it together."""
    call.known.whole.discard(found.uuid)
    call.known.damaged.add(found.uuid)
    with together(call.distributed, wanted.what, wanted.timeout, CheckpointError):
        if call.acts and call.known.read_only is None:
            log.warning("an older checkpoint is looked for: %s", damage)
            where.put_aside(call.storage, found, str(damage))


def _asked(call: CallContext, wanted: Wanted) -> str:
    """Return the name, path or URL of what is asked for; raise ContextError where it is none."""
    which, source = wanted.which, wanted.source
    if which is not None:
        return named(call.storage, which)
    try:
        return str(parse_location(os.fspath(source or "")))
    except (TypeError, ValueError) as error:
        raise ContextError(f"source={source!r}: {error}") from None


def _chosen(call: CallContext, wanted: Wanted) -> tuple[CallContext, Committed | None]:
    """Return the one that all ranks name. ALL ranks call it together."""

    def find() -> tuple[str, Any]:
        name = _asked(call, wanted)
        return name, _named(call, name) if call.rank == 0 else None

    above, chosen = _agreed(call, wanted, find)
    if above is not None or is_foreign(chosen):
        return _elsewhere(call, above), chosen
    chosen = here(call, chosen)
    if call.local:
        from elaunch.training.checkpoint import nodecopies  # a third of what all of this imports

        nodecopies.bring(call, chosen, wanted.timeout)
    return call, chosen


def _latest_of_all(call: CallContext, wanted: Wanted) -> Committed | None:
    """Return the latest, or what takes its place. ALL ranks call it together."""
    chosen: Committed | None
    chosen, reason = _agreed(
        call, wanted, lambda: (None, _latest(call) if call.rank == 0 else None)
    )
    chosen = None if chosen is None else here(call, chosen)
    if call.local and chosen is not None and not is_foreign(chosen):
        from elaunch.training.checkpoint import nodecopies

        try:
            nodecopies.bring(call, chosen, wanted.timeout)
        except CheckpointError as error:
            reason = str(error)
    if reason:
        chosen = _substitute(call, reason, wanted.timeout)
    call.known.choose(chosen)
    return chosen


def _agreed(call: CallContext, wanted: Wanted, find: Callable[[], tuple[str | None, Any]]) -> Any:
    """Return what rank 0 finds, if all ranks ask for the same. ALL ranks call it together."""
    about = call.distributed, wanted.what, wanted.timeout, CheckpointError
    with together(*about, everyone=True) as step:
        if wanted.which is not None and wanted.source is not None:
            raise ContextError("which and source were given: the one says which, always")
        step.sent = find()
    ranks = {asked: rank for rank, (asked, _) in reversed(list(enumerate(step.received)))}
    if len(ranks) > 1:
        first = sorted((rank, asked) for asked, rank in ranks.items())
        asked_for = ", ".join(f"rank {rank} for {asked!r}" for rank, asked in first)
        what = f"{wanted.what}: the ranks ask for different checkpoints"
        raise CheckpointError(f"{what}: {asked_for}")
    return step.received[0][1]


def _elsewhere(call: CallContext, above: Location | None) -> CallContext:
    """Return the context to read what is not this run's with; nothing is written there."""
    known = KnownCheckpoints(read_only=SaveError("another run's checkpoints are only read"))
    storage = call.storage if above is None else open_storage(above)
    return replace(call, storage=storage, local=False, known=known)


def here(call: CallContext, found: Committed) -> Committed:
    """Return a checkpoint that another rank found as this node calls it."""
    place = call.storage.place
    if isinstance(place, str) or is_foreign(found):
        return found
    return replace(found, place=place / found.name)


def is_foreign(found: Committed) -> bool:
    """Whether somebody else's code has written it, in its own format."""
    return not found.uuid


def not_there(what: str) -> CheckpointError:
    """Return the error of a call that wants the latest checkpoint where there is none."""
    return CheckpointError(
        f"{what}: there is no checkpoint yet; ask ctx.checkpoint.latest(), which is None then"
    )


def _was_pending(call: CallContext, found: Committed) -> bool:
    """Whether the agents had it in memory when the round began."""
    pending = call.known.pending
    return pending is not None and pending.uuid == found.uuid


def _is_pending(call: CallContext, found: Committed) -> bool:
    """Whether they still write it."""
    return _was_pending(call, found) and not call.storage.holds(found.name, found.uuid)


def _await_written(call: CallContext, found: Committed, timeout: float | None) -> None:
    """Return when a checkpoint that was in memory is on the disk, as this node sees it."""
    seconds = call.seconds(timeout)
    until, never = time.monotonic() + seconds, threading.Event()
    with call.awaiting(seconds):
        if call.saver is not None:
            call.saver.wait(seconds)
        while _is_pending(call, found):
            if time.monotonic() >= until:
                raise CheckpointError(
                    f"{found.name} is in the agents' memory, and not written after {seconds:g} s"
                )
            never.wait(LOOK_S)


def is_at_url(call: CallContext, found: Committed) -> bool:
    """Whether its files are objects behind a URL."""
    return isinstance(call.storage.place, str) and not is_foreign(found)


def ranges(call: CallContext, found: Committed, timeout: float | None, what: str) -> Ranges:
    """Return what reads parts of a checkpoint at a URL. ALL ranks call it together.

    Raises CheckpointError, on all ranks, if one of them cannot reach it.
    """
    with _written(call, found, timeout, what) as wait:
        wait()
        reader = call.storage.ranges(found)
    assert reader is not None  # it is at a URL
    return reader


@contextlib.contextmanager
def _written(
    call: CallContext, found: Committed, timeout: float | None, what: str
) -> Iterator[Callable[[], None]]:
    """Enter a step of all ranks; give what blocks until the checkpoint is out of memory."""
    waits = _was_pending(call, found)
    limit = call.seconds(timeout) + LONGER_S if waits else timeout
    with together(call.distributed, what, limit, CheckpointError):
        yield lambda: _await_written(call, found, timeout) if waits else None


@contextlib.contextmanager
def opened(call: CallContext, found: Committed, timeout: float | None, what: str) -> Iterator[Path]:
    """Give every rank a local path to read the checkpoint from. ALL ranks enter it together.

    Raises CheckpointError, on all ranks, if one of them cannot reach it.
    """
    with contextlib.ExitStack() as stack:
        at_url = is_at_url(call, found)
        path: Path | None = None
        with _written(call, found, timeout, what) as wait:
            if not at_url or call.is_node_chief:
                wait()
                path = stack.enter_context(_at(call, found))
        if at_url:
            path = for_purpose(call.distributed, what).broadcast_local(path, timeout)
            stack.enter_context(_left_together(for_purpose(call.distributed, what), timeout))
        assert path is not None  # fetched, or sent by the node's first rank
        yield Path(path)


def _named(call: CallContext, name: str) -> tuple[Location | None, Committed]:
    """Return a checkpoint, verified, and where it is if that is not this run's place."""
    if os.sep in name:
        place = parse_location(name)
        return elsewhere.committed_at(elsewhere.find_at(place, content=isinstance(place, Path)))
    pending = call.known.pending
    if pending is not None and name in (pending.name, pending.uuid):
        return None, pending
    found = call.storage.find(name)
    if not call.local and found.uuid not in call.known.whole:
        with _kept(found):
            where.verify(call.storage, found, call.known)
        call.known.whole.add(found.uuid)
    return None, found


def _latest(call: CallContext) -> tuple[Committed | None, str]:
    """Return the latest, or why it cannot be read any more."""
    known = call.known
    found = newer(known.latest(), known.own)
    if found is None:
        return None, str(known.problem or "")
    if is_foreign(found) or _is_pending(call, found):
        return found, ""
    if not call.storage.holds(found.name, found.uuid):
        return None, f"{found.name} is gone"
    if call.local:
        return found, ""
    try:
        where.check(call.storage, found, known)
    except (CheckpointError, OSError) as error:
        return None, f"{found.name}: {error}"
    return found, ""


def _substitute(call: CallContext, reason: str, timeout: float | None) -> Committed | None:
    """Return what is read in place of the latest: the newest that is whole, as rank 0 finds it.

    ALL ranks call it together.
    """
    name = ""
    if call.local:
        from elaunch.training.checkpoint import nodecopies

        name = nodecopies.newest_together(call, call.reads, timeout)
    with together(call.distributed, LOOKING, timeout, CheckpointError) as step:
        if name and call.rank == 0:
            step.sent = call.storage.find(name)
        elif call.rank == 0 and not call.local:
            check = partial(where.check, call.storage, known=call.known)
            step.sent = newest(call.storage, call.reads, check)
    found: Committed | None = step.received[0]
    if call.rank == 0:
        text = "there is no other" if found is None else f"{found.name} is taken"
        log.warning("the latest checkpoint cannot be read, %s: %s", text, reason)
    return None if found is None else here(call, found)


@contextlib.contextmanager
def _at(call: CallContext, found: Committed) -> Iterator[Path]:
    if is_foreign(found):
        path = Path(found.place)
        if not path.exists():
            raise CheckpointError(f"{path} is gone: it was removed meanwhile")
        yield path
        return
    with _kept(found), call.storage.fetch(found) as path:
        yield path


@contextlib.contextmanager
def _kept(found: Committed) -> Iterator[None]:
    """Keep a checkpoint from being removed; CheckpointError if it was already."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(retention.reading(found.place))
        except FileNotFoundError:
            raise CheckpointError(f"{found.name} is gone: it was removed meanwhile") from None
        yield


@contextlib.contextmanager
def _left_together(ranks: DistributedContext, timeout: float | None) -> Iterator[None]:
    """Keep the node's copy until all its ranks have left the block."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CollectiveError, ContextError):
            ranks.barrier_local(timeout)
        raise
    ranks.barrier_local(timeout)
