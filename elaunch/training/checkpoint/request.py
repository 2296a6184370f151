"""One save, as a script asks for it: its step, its metadata, what may go after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.retention.delete import Keep
from elaunch.errors import ContextError
from elaunch.training.checkpoint.parts import Saving


def as_given(metadata: Any, keep: Keep | int | None, timeout: float | None, what: str) -> Saving:
    """Return what the script asks for; what is wrong with the metadata is raised on all ranks."""
    step = metadata.get(layout.STEPS_COMPLETED) if isinstance(metadata, Mapping) else None
    number = step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else 0
    return Saving(number, metadata, _rule(keep), timeout, what)


def at_step(
    step: int,
    metadata: Mapping[str, Any] | None,
    keep: Keep | int | None,
    timeout: float | None,
    what: str,
) -> Saving:
    """Return what the script asks for in a call that gets the step apart from the metadata."""
    return Saving(step, metadata_of(step, metadata), _rule(keep), timeout, what)


def _rule(keep: Keep | int | None) -> Keep | None:
    if keep is None or isinstance(keep, Keep):
        return keep
    try:
        return Keep(last=keep)
    except ValueError:
        raise ContextError(
            f"keep={keep!r}: give an elaunch.Keep, how many of the newest stay, or None"
        ) from None


def metadata_of(step: int, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return user metadata with its step, for calls that get the step apart.

    A ``steps_completed`` of the user's own stays, so that it is compared.
    """
    return {layout.STEPS_COMPLETED: step, **dict(metadata or {})}
