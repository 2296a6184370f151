"""``save_ddp`` and ``load_ddp``: one ``torch.save`` file for all ranks, written by rank 0.

The file, ``state.pt``, is what ``torch.load`` reads anywhere: a dict with the keys of the state.

==============================  ====================================================================
value in the state              in the file
==============================  ====================================================================
module                          its ``state_dict()``; without ``module.`` where DDP wraps it
other with ``state_dict`` and   its ``state_dict()``: optimizers, schedulers, samplers
``load_state_dict``
``elaunch.PerRank``             every rank's, in a list; each rank gets its own back
dict                            the same, value by value
list with objects in it         the same, member by member
anything else                   itself
==============================  ====================================================================

``optimizer.state_dict()`` in the state is refused: what is loaded goes into that dict, and not into
the optimizer. elaunch.training.checkpoint.ddp.plainstate makes the content, and ``fill`` beside it
puts it back.

==============  ==================================================================================
mode of a load  who opens the file
==============  ==================================================================================
all             every rank
broadcast       rank 0, which sends the content to the others
sequential      every rank, one after the other in the order of the ranks
==============  ==================================================================================
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from elaunch.checkpoint.storage.storage import Committed, Stage
from elaunch.errors import CheckpointError, ContextError, DamageError
from elaunch.training.checkpoint import restore
from elaunch.training.checkpoint.callcontext import CallContext, Mode, SaveRequest
from elaunch.training.checkpoint.collective import header_of, save_together
from elaunch.training.checkpoint.dcp.sources import Source, SourceFile
from elaunch.training.checkpoint.ddp import fill, plainstate
from elaunch.training.checkpoint.together import agree, guarded, os_error_behind

FILE: Final = "state.pt"
MODES: Final = ("all", "broadcast", "sequential")


def save(call: CallContext, state: Mapping[str, Any], request: SaveRequest) -> Committed:
    """Save ``state`` as one file; ALL ranks call it together, rank 0 writes.

    Raises SaveError on all ranks: also for a model that is sharded over them, for values that
    differ between them, and for what could not be loaded again.
    """

    def work() -> tuple[plainstate.Plain, plainstate.StateSummary]:
        made = plainstate.make(state, writes=call.rank == 0)
        return made, made.summary()

    done, problem = guarded(work, request.what)
    sent = None if done is None else (done[1].digest, done[0].own)
    everyone = agree(call.distributed, f"{request.what}, its state", problem, sent, request.timeout)
    assert done is not None
    made, summary = done
    if len({one for one, _ in everyone}) > 1:
        plainstate.check_same(call.distributed, made, summary, request.what, request.timeout)
    request = replace(request, size=made.size)

    def write(stage: Stage) -> bytes | None:
        if call.rank != 0:
            return None
        path = call.storage.open_stage(stage) / FILE
        problem = guarded(
            lambda: _write(made.complete([own for _, own in everyone]), path), "torch.save"
        )[1]
        if problem is not None:
            raise problem
        return call.storage.write_manifest(stage, header_of(call, request, writers=1), [FILE])

    return save_together(call, request, write)


def load_chosen(
    call: CallContext, wanted: restore.Wanted, state: Mapping[str, Any], how: tuple[Mode, bool]
) -> Committed | None:
    """Choose a checkpoint and :func:`load` it. ALL ranks call it together."""

    def use(there: CallContext, found: Committed) -> None:
        load(there, state, found, how, wanted.timeout)

    return restore.read(call, wanted, how[1], use)


def load(
    call: CallContext,
    state: Mapping[str, Any],
    found: Committed,
    how: tuple[Mode, bool],
    timeout: float | None,
) -> None:
    """Put what is saved into the objects of ``state``; ALL ranks call it together.

    ``how``: the mode, and whether keys must be the same on both sides. Raises CheckpointError, on
    all ranks, that names missing and unexpected keys and their ranks; nothing has changed then,
    unless an object of the state did not take what it was given.
    """
    what = f"load_ddp of {found.name}"
    mode, strict = how

    def together(step: str, work: Callable[[], Any]) -> Any:
        done, problem = guarded(work, "load_ddp")
        agree(call.distributed, step, problem, None, timeout, CheckpointError)
        return done

    together(f"{what}, its state", lambda: _check_state(state))
    content = _read(call, found, mode, timeout, what)
    rank, ranks = call.rank, call.distributed.size
    put = together(what, lambda: fill.fitting(state, content, strict, rank=rank, ranks=ranks))
    together(f"{what}, filling", put)


def check_mode(mode: str) -> None:
    """Raise ContextError for a mode that there is not."""
    if mode not in MODES:
        raise ContextError(f"mode={mode!r}: one of {', '.join(MODES)}")


def _check_state(state: Mapping[str, Any]) -> None:
    plainstate.refuse_no_dict(state)
    plainstate.refuse_raw(state)


def _write(content: Mapping[Any, Any], path: Path) -> None:
    """Write the file; a disk that is full is an OSError, which torch hides behind its own."""
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        raise os_error_behind(error, path) or error from None


def _read(call: CallContext, found: Committed, mode: Mode, timeout: float | None, what: str) -> Any:
    """Return the file's content on every rank, read by those whom ``mode`` lets."""
    with restore.opened(call, found, timeout, what) as place:
        path = place if place.is_file() else place / FILE
        loaded: Any = None
        problem: Exception | None = None
        for turn in range(call.distributed.size if mode == "sequential" else 1):
            reads = mode == "all" or turn == call.rank
            if reads:
                loaded, problem = guarded(
                    lambda: _load(path, _manifests(found, path)), "torch.load"
                )
            if mode == "sequential":
                call.distributed.barrier(timeout)
        damage = str(problem) if isinstance(problem, DamageError) else ""
        damages = agree(call.distributed, what, None, damage, timeout, CheckpointError)
        if bad := next(filter(None, damages), ""):
            raise DamageError(bad) from problem
        agree(call.distributed, what, problem, None, timeout, CheckpointError)
    return call.distributed.broadcast(loaded, timeout) if mode == "broadcast" else loaded


def _manifests(found: Committed, path: Path) -> Path | None:
    """Return where the manifests are that the file has to fit; None: it has none to fit."""
    # A copy of what is at a URL was compared when it was fetched.
    listed = isinstance(found.place, Path) and path.name == FILE and not restore.is_foreign(found)
    return path.parent if listed else None


def _load(path: Path, manifests: Path | None) -> Any:
    """Return the file's content; raises DamageError where it is not what its manifest says."""
    source = Source(path.parent, manifests)
    source.path = path.parent
    try:
        loaded, problem = guarded(lambda: _unpickle(source, path), "torch.load")
        source.finish()
    finally:
        source.close()
    if problem is not None:
        raise problem
    return loaded


def _unpickle(source: Source, path: Path) -> Any:
    try:
        file = SourceFile(source, path.name)
    except CheckpointError:
        raise CheckpointError(
            f"{path} is not there: save_ddp() did not write this checkpoint; load() and "
            "restore_path() read others"
        ) from None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects that are not loaded without being trusted: "
            f"{plainstate.reason(error)}; if you trust the file, name their classes to "
            "torch.serialization.add_safe_globals"
        ) from None
