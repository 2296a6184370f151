"""An error of one rank is an error of all: every step of a save or a load ends with one allgather.

Each rank sends how it went and what the others need of it. If any rank has a problem, all of them
raise, with the same text, and the ranks are still in step: the next call works. A rank that comes
not at all is reported by the allgather itself (CollectiveTimeout, PeerLost); then the ranks are
connected no more.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elaunch.errors import CheckpointError, CollectiveError, ElaunchError, SaveError

if TYPE_CHECKING:
    from elaunch.training.checkpoint.parts import CallContext
    from elaunch.training.distributed import DistributedContext

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
NAMED: Final = 8
"""Ranks whose problems an error names one by one."""


@dataclass(frozen=True)
class Word:
    """What one rank sends at the end of a step."""

    what: str
    problem: str
    full: str
    host: str
    payload: Any


def agree(
    distributed: DistributedContext,
    what: str,
    problem: BaseException | None = None,
    payload: Any = None,
    timeout: float | None = None,
    error: type[CheckpointError] = SaveError,
) -> list[Any]:
    """Return every rank's ``payload``, in the order of the ranks, if no rank has a problem.

    ALL ranks call it together; it blocks until they have.

    Args:
        distributed: the ranks.
        what: the call and the step of it, as in ``save(step 120)``; the same on all ranks.
        problem: why this rank cannot go on.
        payload: for the others.
        timeout: seconds to wait for them; None: the context's.
        error: class of what is raised.

    Raises:
        CheckpointError: ``error``, on all ranks, with the ranks that have a problem and what it is;
            its cause is this rank's own. A SaveError says where a disk is full (``no_room``).
        CollectiveTimeout, PeerLost: not all ranks came; names them.
    """
    own = Word(what, in_words(problem), _full(problem), socket.gethostname(), payload)
    try:
        words = distributed.allgather(own, timeout)
    except CollectiveError as lost:
        raise type(lost)(f"{what}: {lost}", lost.missing) from None
    _check_calls(words)
    if failed := [rank for rank, word in enumerate(words) if word.problem]:
        text = f"{what}: {_told(words, failed)}"
        told = error(text)
        if isinstance(told, SaveError):
            told.no_room = any(words[rank].full for rank in failed)
        raise told from problem
    return [word.payload for word in words]


def attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return (what ``work`` returned, None), or (None, what it raised), to be given to agree().

    Only what this rank itself ran into: what says that the ranks are connected no more is raised.
    """
    try:
        return work(), None
    except CollectiveError:
        raise
    except (ElaunchError, OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        return None, error


def tell(
    parts: CallContext,
    what: str,
    work: Callable[[], Any],
    timeout: float | None,
    by: Sequence[int] = (0,),
) -> list[Any]:
    """Do ``work`` on the ranks ``by``, and return what it returned there, to all ranks.

    ALL ranks call it together. Raises what agree() raises.
    """
    done, problem = attempt(work) if parts.rank in by else (None, None)
    return agree(parts.distributed, what, problem, done, timeout)


def in_words(problem: BaseException | None) -> str:
    """Return an exception as an error of all ranks words it; empty for None."""
    if problem is None:
        return ""
    if isinstance(problem, ElaunchError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}".rstrip(": ")


def _full(problem: BaseException | None) -> str:
    if isinstance(problem, OSError) and problem.errno in FULL:
        return problem.filename or "the disk"
    return ""


def _check_calls(words: Sequence[Any]) -> None:
    """Raise on all ranks unless all of them make the same call of the checkpoint API."""
    foreign = [rank for rank, word in enumerate(words) if not isinstance(word, Word)]
    if foreign:
        raise CheckpointError(
            f"rank {foreign[0]} makes a call of ctx.distributed, others one of ctx.checkpoint: all "
            "ranks make the same calls in the same order"
        )
    calls = {word.what: rank for rank, word in reversed(list(enumerate(words)))}
    if len(calls) > 1:
        told = "; ".join(
            f"rank {rank}: {call}" for call, rank in sorted(calls.items(), key=_by_rank)
        )
        raise CheckpointError(
            f"the ranks make different calls of ctx.checkpoint ({told}): all ranks make the same "
            "calls in the same order"
        )


def _by_rank(item: tuple[str, int]) -> int:
    return item[1]


def _told(words: Sequence[Word], failed: Sequence[int]) -> str:
    """Return who has which problem, ranks with the same one together."""
    same: dict[str, list[int]] = {}
    for rank in failed:
        same.setdefault(words[rank].problem, []).append(rank)
    told = [
        f"{_ranks(ranks)} on host {words[ranks[0]].host}: {problem}"
        for problem, ranks in list(same.items())[:NAMED]
    ]
    if len(same) > NAMED:
        told.append(f"and {len(same) - NAMED} more")
    return "; ".join(told)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
