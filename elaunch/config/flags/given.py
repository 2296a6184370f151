"""A value together with where it came from, and the one error text for a wrong one.

``--max-restarts: 'abc' is not a whole number (from PET_MAX_RESTARTS; allowed: 0 or more)``: the
flag, the value, the reason, the source unless it is the command line, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elaunch.config.flags import values
from elaunch.config.flags.flag import Flag
from elaunch.errors import UsageError

Source = Literal["command line", "variable", "file", "default"]


@dataclass(frozen=True)
class Given:
    """The text of one value; ``where`` is a variable's name or ``file:line``."""

    text: str
    source: Source
    where: str = ""


@dataclass(frozen=True)
class Entrypoint:
    """The entry point of a job file; ``words`` is empty where it has none."""

    words: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class JobFile:
    """A job file as it was read: texts with their lines, nothing converted yet."""

    flags: Mapping[str, Given] = field(default_factory=dict)
    entrypoint: Entrypoint = Entrypoint()
    environment: Mapping[str, Given] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    hparams: Given | None = None


def fault(flag: Flag, given: Given, why: str, fix: str = "") -> UsageError:
    """Return the error for one value of one flag.

    Args:
        flag: the flag, whatever source the value came from.
        given: the value and its source.
        why: the end of a sentence that begins with the value: "is not a whole number".
        fix: what to do about it; default: what the flag allows.
    """
    value = "" if flag.is_switch and given.text in values.TRUE else f"{flag.show(given.text)!r} "
    details = [f"from {given.where}"] if given.where else []
    if flag.allowed and not fix:
        details.append(f"allowed: {flag.allowed}")
    behind = f" ({'; '.join(details)})" if details else ""
    return UsageError(f"--{flag.name}: {value}{why}{'; ' if fix else ''}{fix}{behind}")


def convert(flag: Flag, given: Given) -> object:
    """Return the value that ``given`` stands for.

    Raises:
        UsageError: the text is not a value of this flag.
    """
    if why := values.unfit(given.text):
        raise fault(flag, given, why)
    try:
        return flag.read(given.text)
    except (ValueError, OverflowError) as exc:
        raise fault(flag, given, str(exc)) from None
