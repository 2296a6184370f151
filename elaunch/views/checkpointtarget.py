"""RUN_OR_DIR and the NAME of a checkpoint, as a person means them.

====================  ==============================================================================
RUN_OR_DIR            is
====================  ==============================================================================
``s3://bucket/run``   a URL of fsspec; ``file:///d`` is the directory ``/d``
a directory           the checkpoint directory; or a checkpoint itself, then no NAME is needed.
                      ``--checkpoint-glob`` is that of the newest run here that has used it
anything else         a run of this machine, or the beginning of its id: its record knows the place
====================  ==============================================================================

====================  ==============================================================================
NAME                  is
====================  ==============================================================================
``latest``            the newest that a round could resume from
``120``               the one of that step; of several rounds the latest; one in quarantine only
                      if there is no other
a name                as ``elaunch checkpoints ls`` shows it
8 digits of a uuid    or more, or fewer if only one begins with them
====================  ==============================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import dcp
from elaunch.checkpoint.records import Location
from elaunch.checkpoint.search.locations import default_location, parse_location, without_slash
from elaunch.config import files
from elaunch.config.values import did_you_mean
from elaunch.errors import RunDirError, UsageError
from elaunch.runs import directory as rundir
from elaunch.views.checkpoints import ListedCheckpoint, Listing, look

LATEST = "latest"


@dataclass(frozen=True)
class Target:
    """A checkpoint directory; ``name`` is the checkpoint in it that was pointed at, or ""."""

    place: Location
    glob: str | None = None
    name: str = ""


def resolve(words: str, environ: Mapping[str, str]) -> Target:
    """Return what RUN_OR_DIR means; UsageError if it is neither."""
    if "://" in words:
        return _with_glob(_of_url(words), environ)
    path = Path(os.path.expanduser(words))
    if os.path.isdir(path) and not os.path.isfile(path / rundir.STATE_FILE):
        return _with_glob(_directory(Path(os.path.abspath(path))), environ)
    if os.sep in words and (why := files.problem(path)):
        missing = why == "does not exist"
        raise UsageError(f"there is no directory {words!r}" if missing else f"{words!r} {why}")
    if os.path.isfile(path) and os.sep in words:
        raise UsageError(f"{words!r} is a file; give the directory that it is in")
    try:
        return _run(words, environ)
    except UsageError as error:
        raise UsageError(f"no directory {words!r}, and {error}", code=error.code) from None


def listing(target: Target, environ: Mapping[str, str]) -> Listing:
    """Return what is there, and which of it living runs have resumed from.

    Raises:
        CheckpointError, OSError: it cannot be read.
    """
    found = look(target.place, target.glob)
    return replace(found, resumed=_resumed(target.place, environ))


def choose(there: Listing, names: Sequence[str]) -> list[ListedCheckpoint]:
    """Return the entries that these names mean, each once; UsageError names what is not there."""
    return list({entry.name: entry for entry in (pick(there, name) for name in names)}.values())


def pick(there: Listing, name: str) -> ListedCheckpoint:
    """Return the entry that ``name`` means; UsageError if there is none, or more than one."""
    if name == LATEST:
        if there.newest is None:
            raise UsageError(f"{there.place} has no checkpoint to resume from")
        return there.newest
    everything = (*there.entries, *there.quarantined)
    for entry in reversed(everything):
        if name in (entry.name, f"{entry.name}/"):
            return entry
    if name.isascii() and name.isdigit() and len(name) < 19:
        for entries in (there.entries, there.quarantined):
            of_step = [entry for entry in entries if entry.step == int(name)]
            if of_step:
                return of_step[-1]
    fitting = [
        entry
        for entry in there.entries
        if name and entry.found is not None and entry.found.uuid.startswith(name)
    ]
    if len(fitting) > 1:
        names = ", ".join(entry.name for entry in fitting[:5])
        raise UsageError(f"{name!r} begins {len(fitting)} uuids: of {names}; give more of it")
    if fitting:
        return fitting[0]
    raise UsageError(_no_such(there, name))


def _no_such(there: Listing, name: str) -> str:
    names = [entry.name for entry in there.entries]
    text = f"{there.place} has no checkpoint {name!r}"
    hint = did_you_mean(name, names)
    if hint:
        return text + hint
    if not names:
        aside = ", ".join(entry.name for entry in there.quarantined[-5:])
        return f"{text}; there is none {f'but in quarantine: {aside}' if aside else 'at all'}"
    return f"{text}; there are {len(names)}, the newest: {', '.join(names[:-6:-1])}"


def _of_url(words: str) -> Target:
    try:
        place = parse_location(words)
    except ValueError as error:
        raise UsageError(f"{words!r} {error}") from None
    if isinstance(place, str):
        return Target(without_slash(place))
    if not os.path.isdir(place):
        raise UsageError(f"there is no directory {str(place)!r}")
    return _directory(place)


def _with_glob(target: Target, environ: Mapping[str, str]) -> Target:
    """Return the target with ``--checkpoint-glob`` of the newest run that has used the place."""
    for _, record in rundir.records(environ):
        used = None if record is None else record["checkpoint_dir"]
        if record and used and without_slash(used) == without_slash(str(target.place)):
            return replace(target, glob=record["checkpoint_glob"])
    return target


def _directory(path: Path) -> Target:
    """Return the directory, or the one that it is a checkpoint of."""
    is_own = layout.parse_step_name(path.name) is not None
    if is_own or os.path.isfile(path / dcp.METADATA):
        return Target(path.parent, name=path.name)
    return Target(path)


def _run(words: str, environ: Mapping[str, str]) -> Target:
    found = rundir.find(words, environ)
    try:
        record = found.read_state()
    except RunDirError as error:
        raise UsageError(f"RUN {words!r}: {error}; give the checkpoint directory") from None
    directory = record["checkpoint_dir"]
    if directory is not None:
        place: Location = directory if "://" in directory else Path(directory)
        return Target(place, record["checkpoint_glob"])
    default = default_location(record["run_id"], environ)
    if default is not None and default.is_dir():
        return Target(default)
    raise UsageError(
        f"RUN {record['run_id']!r} had no --checkpoint-dir, and its script has saved nothing by "
        "elaunch; give a directory"
    )


def _resumed(place: Location, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the names of checkpoints here that living runs have resumed from, with their runs."""
    found: dict[str, str] = {}
    for run, record in rundir.records(environ):
        checkpoint = record["checkpoint"] if record else None
        if record is None or checkpoint is None or not rundir.is_live(run):
            continue
        parent, _, name = without_slash(str(checkpoint["path"])).rpartition("/")
        if parent == without_slash(str(place)):
            found[name] = record["run_id"]
    return found
