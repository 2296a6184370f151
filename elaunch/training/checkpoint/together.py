"""An error of one rank is an error of all: every step of a save or a load ends with a call of all.

Each rank does its share of a step in a block of ``with together(…) as step``. At the end it reports
its problem, if it has one; all get the problems and what rank 0 has for them (``step.sent``), or
what everyone has. If any rank has a problem, all of them raise, with the same text, and the ranks
are still in step: the next call works. The call itself reports a rank that does not come
(CollectiveTimeout, PeerLost); then the ranks are connected no more.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from elaunch import text
from elaunch.errors import (
    CheckpointError,
    CollectiveError,
    ContextError,
    DamageError,
    ElaunchError,
    PeerLost,
    SaveError,
)
from elaunch.training.distributed import agree_on

if TYPE_CHECKING:
    from elaunch.training.distributed import DistributedContext

Result = TypeVar("Result")

CHECKPOINT: Final = "ctx.checkpoint"
"""Names these allgathers, so that none of the script's own is taken for one of them."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
NAMED: Final = 8
"""Different problems that an error lists."""


@dataclass(frozen=True)
class StepProblem:
    """One rank's problem in a step, as all others get it.

    ``kind`` is the name of its problem's class, where that is a DamageError or a ContextError.
    """

    problem: str
    full: bool
    lost: bool
    kind: str
    host: str


@dataclass
class Joint:
    """One step of this rank: what it has for the others at the end, and what it has received.

    ``received`` is rank 0's ``sent`` alone, or everyone's in the order of the ranks.
    """

    sent: Any = None
    received: list[Any] = field(default_factory=list)


@contextmanager
def together(
    distributed: DistributedContext,
    what: str,
    timeout: float | None = None,
    error: type[CheckpointError] = SaveError,
    *,
    everyone: bool = False,
) -> Iterator[Joint]:
    """Make whatever is raised in the block on one rank an error of all, at the end of the block.

    ALL ranks enter it together; the end of the block is one call of all. Then ``received`` has rank
    0's ``sent``, or ``everyone``'s, in the order of the ranks. Raises what :func:`agree` raises; a
    CollectiveError in the block goes on as it is, since nothing can be agreed on after it, and so
    does what ends the process.
    """
    step, problem = Joint(), None
    try:
        yield step
    except CollectiveError:
        raise
    except BaseException as raised:
        problem = _of_the_step(raised)
    step.received = agree(distributed, what, problem, step.sent, timeout, error, everyone=everyone)


def guarded(work: Callable[[], Result], what: str) -> tuple[Result, None] | tuple[None, Exception]:
    """Return (what ``work`` returned, None), or (None, the error).

    torch and a script's own objects raise what they like: what is no error of elaunch's or of the
    system's gets ``what`` in front of it. CollectiveErrors are raised.
    """
    try:
        return work(), None
    except CollectiveError:
        raise
    except BaseException as raised:
        problem = _of_the_step(raised)
    if isinstance(problem, ElaunchError | OSError):
        return None, problem
    named = CheckpointError(f"{what}: {type(problem).__name__}: {problem}")
    named.__cause__ = problem
    return None, named


def os_error_behind(error: BaseException, path: Path) -> OSError | None:
    """Return an OSError of ``path`` if one is behind ``error``, or is it; else None.

    ``torch.save`` to an open file raises a RuntimeError about its archive ("unexpected pos 704 vs
    598") while it handles what the file itself raised: the disk was full, the file was closed.
    """
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    if behind is None or behind.errno is None:
        return None
    return OSError(behind.errno, behind.strerror, str(path))


def _of_the_step(raised: BaseException) -> BaseException:
    """Return the problem to be sent; raise what ends the process, as KeyboardInterrupt does."""
    if isinstance(raised, Exception):
        return raised
    torchs = sys.modules.get("torch.distributed.checkpoint.api")
    if torchs is not None and isinstance(raised, torchs.CheckpointException):
        # A BaseException of torch's about a failed checkpoint: its first failure has the cause.
        first: BaseException = next(iter(raised.failures.values()), (raised,))[0]
        return first
    raise raised


def agree(
    distributed: DistributedContext,
    what: str,
    problem: BaseException | None = None,
    payload: Any = None,
    timeout: float | None = None,
    error: type[CheckpointError] = SaveError,
    *,
    everyone: bool = True,
) -> list[Any]:
    """Return ``everyone``'s ``payload``, else rank 0's alone, if no rank has a problem.

    ALL ranks call it together; it blocks until they have.

    Args:
        distributed: the ranks.
        what: the call and the step of it, as in ``save(step 120)``; the same on all ranks.
        problem: why this rank cannot go on.
        payload: for the others.
        timeout: seconds to wait for them; None: the context's.
        error: class of what is raised.
        everyone: whether all ranks need the payloads of all.

    Raises:
        CheckpointError: ``error``, on all ranks, with the ranks that have a problem and what it is;
            its cause is this rank's own. A SaveError tells whether a disk is full (``no_room``),
            and whether the save that was in flight came to nothing (``lost``).
        DamageError: on all ranks, if one has found damage: of its class, with its text.
        ContextError: on all ranks: those with a problem were called wrongly.
        CollectiveTimeout, PeerLost: not all ranks came; names them.
    """
    mine = None if problem is None else asdict(_stated(problem))
    try:
        payloads, found = agree_on(
            distributed, payload, mine, what, timeout, everyone=everyone, purpose=CHECKPOINT
        )
    except CollectiveError as lost:
        if type(lost).__name__ == "CallsDiffer":
            raise CheckpointError(
                f"the ranks make different calls of ctx.checkpoint ({lost}): all ranks make the "
                "same calls in the same order"
            ) from None
        raise type(lost)(f"{what}: {lost}", lost.missing) from None
    if not found:
        return payloads
    problems = {rank: _read(rank, fields) for rank, fields in sorted(found.items())}
    _check_damage(problems.values(), problem)
    text = f"{what}: {_problems(problems)}"
    misused = all(one.kind == ContextError.__name__ for one in problems.values())
    raised = ContextError(text) if misused else error(text)
    if isinstance(raised, SaveError):
        raised.no_room = any(one.full for one in problems.values())
        raised.lost = any(one.lost for one in problems.values())
    raise raised from problem


def _stated(problem: BaseException) -> StepProblem:
    kind = type(problem).__name__ if isinstance(problem, DamageError | ContextError) else ""
    lost = isinstance(problem, SaveError) and problem.lost
    return StepProblem(problem_text(problem), _full(problem), lost, kind, socket.gethostname())


def _read(rank: int, fields: dict[str, Any]) -> StepProblem:
    try:
        return StepProblem(**fields)
    except TypeError:
        raise PeerLost(f"what rank {rank} reports cannot be read: {fields!r:.80}") from None


def problem_text(problem: BaseException | None) -> str:
    """Return the text of an exception in an error of all ranks; empty for None."""
    if problem is None:
        return ""
    if isinstance(problem, ElaunchError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}".rstrip(": ")


def _full(problem: BaseException | None) -> bool:
    return isinstance(problem, OSError) and problem.errno in FULL


def _check_damage(problems: Iterable[StepProblem], problem: BaseException | None) -> None:
    """Raise the damage that a rank has found, on all ranks the same."""
    every: tuple[type[DamageError], ...] = (DamageError, *DamageError.__subclasses__())
    kinds = {kind.__name__: kind for kind in every}
    found = [(kinds[one.kind], one.problem) for one in problems if one.kind in kinds]
    if found:  # of files first: there is nothing else that they could be read from
        kind, text = min(found, key=lambda one: (one[0] is not DamageError, one[1]))
        raise kind(text) from problem


def _problems(problems: Mapping[int, StepProblem]) -> str:
    """Return the text about which ranks have which problem."""
    same: dict[str, list[int]] = {}
    for rank, one in problems.items():
        same.setdefault(one.problem, []).append(rank)
    lines = [
        f"{text.ranks(ranks)} on host {problems[ranks[0]].host}: {problem}"
        for problem, ranks in list(same.items())[:NAMED]
    ]
    if len(same) > NAMED:
        lines.append(f"and {len(same) - NAMED} more")
    return "; ".join(lines)
