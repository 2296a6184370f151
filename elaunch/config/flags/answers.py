"""Which source decides each flag: command line, then variables, then job file, then default.

Of the variables ``ELAUNCH_<FLAG>`` wins over torchrun's ``PET_<FLAG>``. An empty variable counts
as not set. Inside a worker of another elaunch job the variables that the outer agent set for its
worker are not taken for flags of the inner job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.config.flags import values
from elaunch.config.flags.flag import Flag
from elaunch.config.flags.given import Given, JobFile, convert, fault
from elaunch.config.flags.table import FLAGS
from elaunch.config.flags.variables import ETCD_PASSWORD, ETCD_USER, VARIABLES
from elaunch.env import AGENT_SOCKET, CHECKPOINT_KEEP, FACTS
from elaunch.errors import UsageError

_TABLE = {flag.name: flag for flag in (*FLAGS, *VARIABLES)}


@dataclass(frozen=True)
class Answers:
    """Every flag's converted value and the source that decided it, by the flag's name."""

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

    def fault(self, name: str, why: str, fix: str = "") -> UsageError:
        """Return the error for this flag's value; see ``given.fault``."""
        return fault(_TABLE[name], self.given[name], why, fix)


def collect(
    line: Mapping[str, str],
    environ: Mapping[str, str],
    job: JobFile,
    flags: Iterable[Flag] = (*FLAGS, *VARIABLES),
) -> Answers:
    """Decide and convert every flag, or those of ``flags`` only.

    Args:
        line: texts from the command line, by the flag's name.
        environ: the launcher's environment.
        job: the job file; an empty one if there is none.

    Raises:
        UsageError: a text is not a value of its flag.
    """
    given: dict[str, Given] = {}
    found: dict[str, Any] = {}
    for flag in flags:
        given[flag.name] = _decide(flag, line, environ, job)
        found[flag.name] = _value(flag, given[flag.name])
    return Answers(found, given)


def from_variables(flag: Flag, environ: Mapping[str, str]) -> Given | None:
    """Return the strongest variable that sets ``flag``, or None."""
    own = flag.environment if flag not in VARIABLES else flag.variables
    for name in own:
        if name in FACTS and AGENT_SOCKET in environ:
            continue  # the outer agent has set it for its worker
        if environ.get(name):
            return Given(environ[name], "variable", name)
    return None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a notice for each ELAUNCH_ or PET_ variable that is nearly the name of a flag's."""
    known = {name for flag in (*FLAGS, *VARIABLES) for name in flag.environment}
    known |= {ETCD_USER, ETCD_PASSWORD, CHECKPOINT_KEEP}
    notices = []
    for name in sorted(environ):
        if name in known or not name.startswith(("ELAUNCH_", "PET_")):
            continue
        near = values.nearest(name, known, cutoff=0.9)
        if near:
            notices.append(f"the variable {name} has no effect; did you mean {near}?")
    return notices


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
