"""One flag: its names, its default, how its text is read, how help and errors show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from elaunch.config.flags import values

SIZE = "Size of the job"
CODE = "What is started"
RESTART = "Restarts"
CHECKPOINT = "Checkpoints"
STOP = "Signals and stopping"
OUTPUT = "Output and logs"
MEETING = "Rendezvous"
OTHER = "Other"
GROUPS = (SIZE, CODE, RESTART, CHECKPOINT, STOP, OUTPUT, MEETING, OTHER)


@dataclass(frozen=True)
class Flag:
    """One flag; ``default`` is text that ``read`` accepts, or None for "not given".

    ``show`` makes of a text what an error may print of it: a password is not.
    """

    name: str
    read: Callable[[str], object]
    default: str | None
    group: str
    help: str
    metavar: str = ""
    allowed: str = ""
    short: str = ""
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    torchrun: bool = True
    show: Callable[[str], str] = str

    @property
    def dest(self) -> str:
        """Name of the value in Python: ``max_restarts``."""
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone on the command line."""
        return self.read is values.switch

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every long spelling, ``--``-first, dashes before underscores."""
        names = (self.name, *self.aliases)
        both = ((f"--{name}", f"--{name.replace('-', '_')}") for name in names)
        return tuple(dict.fromkeys(each for pair in both for each in pair))

    @property
    def environment(self) -> tuple[str, ...]:
        """The variables that set the flag, the strongest first."""
        names = [name.replace("-", "_").upper() for name in (self.name, *self.aliases)]
        return (*(f"ELAUNCH_{name}" for name in names), f"PET_{names[0]}", *self.variables)


def switch(name: str, group: str, text: str, short: str = "") -> Flag:
    """Return a flag that stands alone on the command line."""
    allowed = "nothing, or =yes / =no"
    return Flag(name, values.switch, "no", group, text, allowed=allowed, short=short)


def one_of(name: str, names: tuple[str, ...], default: str | None, group: str, text: str) -> Flag:
    """Return a flag whose value is one of a few names."""
    shown = "|".join(names) if len(names) < 4 else "NAME"
    return Flag(name, values.choice(names), default, group, text, shown, ", ".join(names))


def by_spelling(flags: Iterable[Flag]) -> dict[str, Flag]:
    """Return every long and short spelling with its flag."""
    table: dict[str, Flag] = {}
    for flag in flags:
        for spelling in (*flag.spellings, *((flag.short,) if flag.short else ())):
            table[spelling] = flag
    return table


def by_key(flags: Iterable[Flag]) -> dict[str, Flag]:
    """Return every key of a job file, with ``-`` for ``_``, with its flag."""
    return {key: flag for flag in flags for key in (flag.name, *flag.aliases, *flag.keys)}
