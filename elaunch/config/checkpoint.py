"""The values of the checkpoint flags: the directory or URL, the rule of what is kept.

==========================  ========================================================================
``--checkpoint-dir``        is
==========================  ========================================================================
a path                      an absolute ``Path``; the first writer makes it
``file://``, ``local://``   the same: a path
any other ``scheme://``     text, for fsspec; no patterns, no ``--checkpoint-local``
==========================  ========================================================================

How a text is read: elaunch.checkpoint.search.locations.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

from elaunch.checkpoint.records import Checkpoint, Keep
from elaunch.checkpoint.search.locations import broken_link, has_placeholder, parse_location
from elaunch.config import files
from elaunch.config.flags.flag import Answers
from elaunch.errors import CheckpointError, UsageError


def place(answers: Answers, start: Path, args: tuple[str, ...]) -> Path | str | None:
    """Return where checkpoints are: an absolute path, a URL, or None without the flag.

    Args:
        answers: what was given.
        start: the directory that a relative path starts from.
        args: the script's arguments, which may ask for the newest checkpoint.

    Raises:
        UsageError: it can be no such place, or another flag needs one and there is none.
    """
    raw, glob = answers["checkpoint-dir"], answers["checkpoint-glob"]
    if glob:
        _pattern(answers, glob)
    if not raw:
        _needless(answers, args)
        return None
    try:
        found = parse_location(raw, start)
    except ValueError as error:
        why, _, fix = str(error).partition("; ")
        raise answers.fault("checkpoint-dir", why, fix) from None
    if isinstance(found, Path):
        return _directory(answers, found)
    _only_paths(answers, glob)
    if importlib.util.find_spec("fsspec") is None:
        raise answers.fault(
            "checkpoint-dir", "is a URL, which needs fsspec", "pip install 'elaunch[storage]'"
        )
    return found


def init_from(answers: Answers, start: Path) -> Checkpoint | None:
    """Return the checkpoint of --init-from, with step 0; None without the flag.

    Raises:
        UsageError: there is no complete checkpoint.
    """
    raw = answers["init-from"]
    if not raw:
        return None
    from elaunch.checkpoint.search.elsewhere import find_at  # 28 modules

    try:
        found = find_at(parse_location(raw, start), content=False)
    except (ValueError, CheckpointError) as error:
        raise answers.fault("init-from", f"cannot be begun from: {error}") from None
    return dataclasses.replace(found, step=0)


def keep(answers: Answers) -> Keep:
    """Return the rule of what is kept; an empty one, which keeps everything, without flags."""
    last, every = answers["checkpoint-keep-last"], answers["checkpoint-keep-every"]
    if answers["checkpoint-keep-best"] is None:
        return Keep(last, every)
    return Keep(last, every, *answers["checkpoint-keep-best"])


def writable_directory(answers: Answers, flag: str, path: Path) -> None:
    """Check that the directory of a flag can be written, or made."""
    existing = path
    while (why := files.problem(existing)) == files.NOTHING_THERE and existing != existing.parent:
        existing = existing.parent
    if why:
        raise answers.fault(flag, why)
    if not existing.is_dir():
        what = "is a file" if existing == path else f"is below {str(existing)!r}, which is a file"
        raise answers.fault(flag, f"{what}, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        fixed = os.statvfs(existing).f_flag & os.ST_RDONLY
        why = f"{str(existing)!r} is mounted read-only" if fixed else ""
        why = why or f"no right to write in {str(existing)!r}"
        raise answers.fault(flag, f"cannot be written: {why}")


def _directory(answers: Answers, path: Path) -> Path:
    if broken := broken_link(path):
        raise answers.fault("checkpoint-dir", f"cannot be made: {broken}", "mend the link")
    why = files.problem(path)
    if why and why != files.NOTHING_THERE:
        raise answers.fault("checkpoint-dir", why, "give another directory")
    if not why and not path.is_dir():
        raise answers.fault("checkpoint-dir", "is a file, not a directory")
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise answers.fault("checkpoint-dir", "may not be read by this user")
        return path
    writable_directory(answers, "checkpoint-dir", path)
    return path


def _only_paths(answers: Answers, glob: str | None) -> None:
    """Refuse, with a URL, flags that work on directories only."""
    if glob:
        raise answers.fault(
            "checkpoint-glob",
            f"cannot be looked for at {answers['checkpoint-dir']}",
            "leave it out, or mount the storage and give a directory",
        )
    if answers["checkpoint-local"]:
        raise answers.fault(
            "checkpoint-local",
            f"contradicts --checkpoint-dir {answers['checkpoint-dir']}, which all nodes share",
            "leave it out, or give a directory of each node",
        )


def _needless(answers: Answers, args: tuple[str, ...]) -> None:
    """Refuse flags that have no meaning without a checkpoint directory."""
    for flag in ("checkpoint-glob", "require-resume", "checkpoint-local"):
        if answers[flag]:
            local = flag == "checkpoint-local"
            what = "that could be each node's own" if local else "to look in"
            raise answers.fault(flag, f"has no directory {what}", "add --checkpoint-dir")
    asking = [arg for arg in args if has_placeholder([arg])]
    if asking and not answers["init-from"]:
        raise UsageError(
            f"script argument {asking[0]!r} asks for the newest checkpoint, which needs "
            "--checkpoint-dir; write {{checkpoint}} for the word itself"
        )


def _pattern(answers: Answers, glob: str) -> None:
    from elaunch.checkpoint.search.locations import check_glob

    try:
        check_glob(glob)
    except UsageError as exc:
        where = answers.given["checkpoint-glob"].where
        raise UsageError(f"{exc}{f' (from {where})' if where else ''}") from None
