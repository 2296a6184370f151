"""One flag, which of its sources counts, the one conversion of its text; what flags share.

Sources, the strongest first: command line, variables, job file, default. Of the variables
``ELAUNCH_<FLAG>`` wins over torchrun's ``PET_<FLAG>``. An empty variable counts as not set. In a
worker of another elaunch job the variables that the outer agent set for its worker are not taken
for flags of the inner job.

``--max-restarts: 'abc' is not a whole number (from PET_MAX_RESTARTS; allowed: 0 or more)``: an
error has the flag, the value, the reason, the source unless it is the command line, and what is
allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal

from msgspec import Struct

from elaunch.config import endpoints, values
from elaunch.env import AGENT_SOCKET, FACTS
from elaunch.errors import UsageError

# What explains more than that a value does not fit.
_CODES: Final = {
    "checkpoint-dir": "E-CHECKPOINT-DIR",
    "log-dir": "E-LOG-DIR",
    "node-rank": "E-NODE-RANK",
}
Source = Literal["command line", "variable", "file", "default"]


class Kind(Struct, frozen=True):
    """The kind of a flag's value: how its text is read and named.

    Attributes:
        read: returns the value of a text; see ``values``.
        metavar: how help names it.
        allowed: the sentence that an error shows.
        comma: how a comma inside an item is written, where a job file may give a list of items.
        pairs: what stands between key and value, where a job file may give a mapping.
        show: what an error may print of a text: a password is not.
        choices: the values, where there are a few.
    """

    read: Callable[[str], object]
    metavar: str = ""
    allowed: str = ""
    comma: str = ""
    pairs: str = ""
    show: Callable[[str], str] = str
    choices: tuple[str, ...] = ()


def one_of(*names: str) -> Kind:
    """Return the kind of a value that is one of these names."""
    shown = "|".join(names) if len(names) < 4 else "NAME"
    return Kind(values.choice(names), shown, ", ".join(names), choices=names)


class Flag(Struct, frozen=True):
    """One row of the table.

    Attributes:
        name: ``max-restarts``; also a key of the job file, and of the variables
            ``ELAUNCH_MAX_RESTARTS`` and ``PET_MAX_RESTARTS``.
        kind: what its text is.
        default: a text, or None for "not given".
        help: a sentence.
        short: ``-f``.
        aliases: more names.
        keys: more keys of the job file.
        variables: more variables.
        torchrun: it has torchrun's name, default and meaning.
        idle: when it has no effect (see ``checks``), and why.
    """

    name: str
    kind: Kind
    default: str | None
    help: str
    short: str = ""
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    torchrun: bool = True
    idle: Mapping[str, str] = {}

    @property
    def dest(self) -> str:
        """Name of the value in Python: ``max_restarts``."""
        return self.name.replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone on the command line."""
        return self.kind.read in (values.switch, endpoints.pages)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling on the command line."""
        names = (self.name, *self.aliases)
        both = (f"--{each}" for name in names for each in (name, name.replace("-", "_")))
        return (*dict.fromkeys(both), *filter(None, [self.short]))

    @property
    def environment(self) -> tuple[str, ...]:
        """The variables that set the flag, the strongest first."""
        names = [name.replace("-", "_").upper() for name in (self.name, *self.aliases)]
        return (*(f"ELAUNCH_{name}" for name in names), f"PET_{names[0]}", *self.variables)


class VariableFlag(Flag, frozen=True):
    """A row for a variable of torchrun's that no flag stands for."""

    @property
    def environment(self) -> tuple[str, ...]:
        """The variables by their own names."""
        return self.variables


class Given(Struct, frozen=True):
    """The text of one value; ``where`` is a variable's name or ``file:line``."""

    text: str
    source: Source
    where: str = ""


class Entrypoint(Struct, frozen=True):
    """The entry point of a job file; ``words`` is empty where it has none."""

    words: tuple[str, ...] = ()
    where: str = ""


class JobFile(Struct, frozen=True):
    """A job file as it was read: texts with their lines, nothing converted yet."""

    flags: Mapping[str, Given] = {}
    entrypoint: Entrypoint = Entrypoint()
    environment: Mapping[str, Given] = {}
    notices: tuple[str, ...] = ()
    hparams: Given | None = None


class Answers(Struct, frozen=True):
    """Every flag's converted value and the source that decided it, by the flag's name."""

    flags: Mapping[str, Flag]
    values: Mapping[str, Any]
    given: Mapping[str, Given]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def said(self, name: str) -> bool:
        """Whether the command line or the job file gives the flag: worth a notice if unused."""
        return self.given[name].source in ("command line", "file")

    def is_set(self, name: str) -> bool:
        """Whether any source but the default gives the flag."""
        return self.given[name].source != "default"

    def fault(self, name: str, why: str, fix: str = "", code: str = "") -> UsageError:
        """Return the error for this flag's value; see ``fault``."""
        return fault(self.flags[name], self.given[name], why, fix, code=code)


def collect(
    flags: Iterable[Flag], line: Mapping[str, str], environ: Mapping[str, str], job: JobFile
) -> Answers:
    """Decide and convert some flags.

    Args:
        flags: rows of the table.
        line: texts from the command line, by the flag's name.
        environ: the launcher's environment.
        job: the job file; an empty one if there is none.

    Raises:
        UsageError: a text is not a value of its flag.
    """
    table = {flag.name: flag for flag in flags}
    given = {name: _decide(flag, line, environ, job) for name, flag in table.items()}
    found = {name: _value(flag, given[name]) for name, flag in table.items()}
    return Answers(table, found, given)


def from_variables(flag: Flag, environ: Mapping[str, str]) -> Given | None:
    """Return the strongest variable that sets ``flag``, or None."""
    for name in flag.environment:
        if name in FACTS and AGENT_SOCKET in environ:
            continue  # the outer agent has set it for its worker
        if environ.get(name):
            return Given(environ[name], "variable", name)
    return None


def convert(flag: Flag, given: Given) -> object:
    """Return the value that ``given`` stands for.

    Raises:
        UsageError: the text is not a value of this flag.
    """
    if why := values.unfit(given.text):
        raise fault(flag, given, why)
    try:
        return flag.kind.read(given.text)
    except (ValueError, OverflowError) as exc:
        raise fault(flag, given, f"{exc}{_variable_hint(given.text)}") from None


def _variable_hint(text: str) -> str:
    """Return what became of a variable that was to be the text; "" if none was."""
    if not text.strip():
        return "; it is empty: a variable that is not set?"
    if not re.search(r"\$(\w|\{\w|\(\w)", text):
        return ""
    return (
        "; nothing has put the variable's value in its place: a shell does where it is not in "
        "single quotes, Kubernetes for $(NAME)"
    )


def fault(flag: Flag, given: Given, why: str, fix: str = "", *, code: str = "") -> UsageError:
    """Return the error for one value of one flag.

    Args:
        flag: the flag, whatever source the value came from.
        given: the value and its source.
        why: the end of a sentence that begins with the value: "is not a whole number".
        fix: what to do about it; default: what the flag allows.
        code: of docs/errors.md; default: the flag's.
    """
    kind = flag.kind
    value = "" if flag.is_switch and given.text in values.TRUE else f"{kind.show(given.text)!r} "
    details = [f"from {given.where}"] if given.where else []
    if kind.allowed and not fix:
        details.append(f"allowed: {kind.allowed}")
    behind = f" ({'; '.join(details)})" if details else ""
    text = f"--{flag.name}: {value}{why}{'; ' if fix else ''}{fix}{behind}"
    return UsageError(text, code=code or _CODES.get(flag.name, "E-VALUE"))


def _decide(flag: Flag, line: Mapping[str, str], environ: Mapping[str, str], job: JobFile) -> Given:
    if flag.name in line:
        return Given(line[flag.name], "command line")
    variable = from_variables(flag, environ)
    if variable:
        return variable
    return job.flags.get(flag.name) or Given(flag.default or "", "default")


def _value(flag: Flag, given: Given) -> object:
    if given.source == "default" and flag.default is None:
        return None
    return convert(flag, given)


# When a flag has no effect; checks.py knows when that is so.
ALWAYS = ""
ON_ONE_NODE = "on one node"
ALONE = "on one node by itself"
NOBODY_JOINS = "where no other node can join"
FRESH_PORT = "where each round has a free port"
NODE_0 = "where MASTER_ADDR is the address of node 0"
MASTER_KNOWN = "where MASTER_ADDR is given"
WITH_ENDPOINT = "with --rdzv-endpoint"
WITH_PROGRAM = "with --no-python"
WITH_RUN_PATH = "with --run-path"
WITH_SPAWN = "with --start-method spawn"
WITHOUT_RESTARTS = "without --max-restarts"
WITHOUT_DIR = "on the script's own files without --checkpoint-dir"

COUNT = Kind(values.whole(0), "N", "0 or more")
SECONDS = Kind(values.seconds, "SECONDS", "0 or more seconds")
SIGNALS = Kind(values.signals, "SIGNAL,...", "comma-separated names of signals", comma=",")
STREAMS = Kind(
    values.streams,
    "STREAMS",
    "0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,RANK:STREAMS",
    pairs=":",
)
SWITCH = Kind(values.switch, "", "nothing, or =yes / =no")
TEXTS = Kind(
    values.words, "TEXT,...", "comma-separated strings; ',,' for a comma inside one", comma=",,"
)
own = partial(Flag, torchrun=False)
switch = partial(Flag, kind=SWITCH, default="no")
