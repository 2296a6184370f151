"""Whatever torch or a script's own object raises on one rank becomes an error of all ranks.

torch raises what it likes: AssertionError, KeyError, pickle's errors, and CheckpointException,
which is no Exception, so that ``except Exception`` of a script would not see it.

``os_error_behind`` finds the OSError of a disk that was full, of a file that was closed:
``torch.save`` to an open file raises a RuntimeError about its archive ("unexpected pos 704 vs 598")
while it handles what the file itself raised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from elaunch.errors import CheckpointError, CollectiveError, ElaunchError


def os_error_behind(error: BaseException, path: Path) -> OSError | None:
    """Return an OSError of ``path`` if one is behind ``error``, or is it; else None."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    if behind is None or behind.errno is None:
        return None
    return OSError(behind.errno, behind.strerror, str(path))


Result = TypeVar("Result")


def guarded(work: Callable[[], Result], what: str) -> tuple[Result, None] | tuple[None, Exception]:
    """Return (what ``work`` returned, None), or (None, the error), to be given to agree().

    CollectiveErrors are raised: after them nothing can be agreed on.
    """
    try:
        return work(), None
    except CollectiveError:
        raise
    except CheckpointException as error:
        return None, _named(what, next(iter(error.failures.values()), (error,))[0])
    except (ElaunchError, OSError) as error:
        return None, error
    except Exception as error:
        return None, _named(what, error)


def _named(what: str, error: BaseException) -> CheckpointError:
    told = CheckpointError(f"{what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
