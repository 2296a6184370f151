"""The texts by which a user says where checkpoints are: locations, patterns, placeholders.

==============================  ====================================================================
text of a location              is
==============================  ====================================================================
``s3://bucket/run``             a URL of fsspec, as it stands
``file:///d``, ``local:///d``   the directory ``/d``
anything else                   a directory; ``~`` is the home, a relative one starts from ``start``
==============================  ====================================================================

A URL that ends with its ``://`` is refused: it is what is left of ``s3://$BUCKET/run`` where the
variable is not set, and it names no bucket. Without any text a run's checkpoints are beside its
record (``default_location``).

``--checkpoint-glob`` is a pattern of pathlib's: ``*``, ``?`` and ``[…]`` match within one name, and
``**`` any number of directories; it follows no symbolic link. Temporary and hidden names match
only where a directory of the pattern spells them out; what is in ``.stage`` and ``.quarantine``
never does.

``{checkpoint}`` and ``{checkpoint_step}`` in a script's arguments are placeholders:

====================================  ==========================  =========================
argument                              with a checkpoint           without one
====================================  ==========================  =========================
``--resume={checkpoint}``             ``--resume=/ck/step_120``   dropped
``--resume {checkpoint}``             ``--resume /ck/step_120``   both dropped
``--resume {checkpoint}/model.pt``    the path put in             both dropped
``ckpt={checkpoint}``                 ``ckpt=/ck/step_120``       dropped
``{{checkpoint}}``                    ``{checkpoint}``            ``{checkpoint}``
``{lr}``, ``{}``, ``{"a": 1}``        unchanged                   unchanged
====================================  ==========================  =========================

An argument that begins with a placeholder is taken for the value of the option before it: an
argument that starts with ``-`` and has no ``=`` (and is not ``-``, ``--`` or a negative number).
After a flag that takes no value, write the argument as ``--resume={checkpoint}``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from elaunch.checkpoint import layout
from elaunch.checkpoint.records import Checkpoint, Location, PassedOver
from elaunch.checkpoint.storage.files import explain, is_temporary
from elaunch.errors import UsageError
from elaunch.runs.statedir import file_name, state_root


def default_location(run_id: str, environ: Mapping[str, str]) -> Path | None:
    """Return ``$XDG_STATE_HOME/elaunch/<run id>/checkpoints``; None for a user without a home."""
    runs = state_root(environ)
    if runs is None:
        return None
    name = file_name(run_id or "run")
    return runs.parent / (name if name != runs.name else f"{name}.run") / "checkpoints"


BUCKETS: Final = frozenset(
    "s3 s3a gs gcs az abfs abfss adl oci ocilake oss obs swift b2 r2".split()
)
"""Protocols whose URLs begin with the name of a bucket, which nobody makes by the way."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://(.*)", re.DOTALL)
_FILES = ("file", "local")


def parse_location(text: str, start: Path | None = None) -> Location:
    """Return an absolute directory, or the text of a URL.

    Args:
        text: what the user has written; not empty.
        start: where a relative directory begins; None for the current one.

    Raises:
        ValueError: a URL without a bucket or a path; the message leaves out the text.
    """
    url = _URL.fullmatch(text)
    if url is None:
        return _directory(text, start)
    scheme, rest = url[1].lower(), url[2]
    if scheme in _FILES:
        if not rest:
            raise ValueError(f"is a URL without a path; write {url[1]}:///DIRECTORY")
        return _directory(unquote(rest), start)
    has_bucket = bool(rest) and not rest.startswith("/")
    if scheme.rpartition(":")[2] in BUCKETS and not has_bucket:
        raise ValueError(f"is a URL without a bucket; write {url[1]}://BUCKET/PATH")
    if scheme != "memory" and not rest.strip("/"):
        raise ValueError(f"is a URL without a path; write {url[1]}://PLACE/PATH")
    return text


def _directory(text: str, start: Path | None) -> Path:
    return Path(os.path.abspath(os.path.join(start or "", os.path.expanduser(text))))


def without_slash(url: str) -> str:
    """Return a URL without slashes at its end; those of its ``://`` stay."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rstrip('/')}" if separator else url.rstrip("/")


def is_within(place: str, root: Location) -> bool:
    """Return whether a location is below ``root``, wherever links on the way lead.

    A relative one starts from ``root``; a directory is not below a URL, nor the other way round.
    """
    if isinstance(root, str):
        start = without_slash(root)
        start += "" if start.endswith("://") else "/"
        rest = place[len(start) :]
        return place.startswith(start) and bool(rest) and not {".", ".."} & set(rest.split("/"))
    if _URL.fullmatch(place) or "\0" in place:
        return False
    top = os.path.realpath(root)
    found = os.path.realpath(os.path.join(top, place))
    return found != top and os.path.commonpath((top, found)) == top


def broken_link(path: Path) -> str:
    """Return the text about a link on the way to a directory that leads nowhere; "" if none does.

    Such a link is neither there nor can a directory be made in its place.
    """
    for link in (path, *path.parents):
        if not os.path.islink(link):
            continue
        try:
            link.stat()
        except FileNotFoundError:
            return f"{str(link)!r} is a link to {os.readlink(link)!r}, which is not there"
        except OSError as error:
            if error.errno == errno.ELOOP:
                return f"{str(link)!r} is a link that leads back to itself"
    return ""


_ANY_DEPTH = "**"
_CLOSED = (layout.STAGE, layout.QUARANTINE)


@dataclass(frozen=True)
class Match:
    """A file or directory that matches; ``linked`` if a symbolic link is on the way to it."""

    path: Path
    is_dir: bool
    linked: bool


def check_glob(glob: str) -> None:
    """Raise UsageError unless the pattern is a relative one that stays below its directory."""
    parts = [part for part in glob.split("/") if part not in ("", ".")]
    if not parts:
        reason = "is empty"
    elif glob.startswith("/"):
        reason = "is absolute; give it relative to --checkpoint-dir, such as 'step_*.pt'"
    elif ".." in parts:
        reason = "leaves --checkpoint-dir by '..'"
    elif any(_ANY_DEPTH in part and part != _ANY_DEPTH for part in parts):
        reason = "has '**' within a name; write '*' there"
    else:
        return
    raise UsageError(f"--checkpoint-glob {glob!r} {reason}")


def find(root: Path, pattern: str) -> tuple[list[Match], list[PassedOver]]:
    """Return what matches below ``root``, and why it cannot be listed.

    A root that does not exist has no matches. Raises UsageError for what ``check_glob`` refuses.
    """
    check_glob(pattern)
    found: dict[Path, Match] = {}
    try:
        os.scandir(root).close()  # pathlib passes over what it may not list
        for path in root.glob(f"{pattern}/*" if pattern.endswith(_ANY_DEPTH) else pattern):
            above = path.relative_to(root).parts[:-1]
            if _is_passed(path.name, above, pattern):
                continue
            if os.path.isdir(path) or os.path.isfile(path):
                linked = any(map(os.path.islink, (path, *path.parents[: len(above)])))
                found[path] = Match(path, os.path.isdir(path), linked)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return list(found.values()), [PassedOver(root, explain(error, root))]
    return list(found.values()), []


def _is_passed(name: str, above: Sequence[str], pattern: str) -> bool:
    """Tell whether a name, or one of the directories above it, is temporary or hidden.

    A directory that the pattern spells out may be called tmp or .cache.
    """
    spelt_out = frozenset(pattern.split("/")).difference(_CLOSED)
    return is_temporary(name) or any(map(is_temporary, frozenset(above) - spelt_out))


_PLACEHOLDER = re.compile(
    r"\{\{(?:checkpoint|checkpoint_step)\}\}|\{(checkpoint|checkpoint_step)\}"
)
_NEGATIVE = re.compile(r"-\.?[0-9]")


def has_placeholder(args: Sequence[str]) -> bool:
    """Tell whether any argument asks for the checkpoint."""
    return any(_asks(arg) for arg in args)


def fill_placeholders(args: Sequence[str], checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the arguments with the placeholders filled, or dropped without a checkpoint."""
    filled: list[str] = []
    for position, arg in enumerate(args):
        if checkpoint is None and _asks(arg):
            option = args[position - 1] if position else ""
            if _begins_with_placeholder(arg) and _takes_value(option) and not _asks(option):
                filled.pop()
            continue
        filled.append(_fill(arg, checkpoint))
    return tuple(filled)


def _asks(arg: str) -> bool:
    return any(match[1] for match in _PLACEHOLDER.finditer(arg))


def _begins_with_placeholder(arg: str) -> bool:
    match = _PLACEHOLDER.match(arg)
    return match is not None and match[1] is not None


def _takes_value(option: str) -> bool:
    if not option.startswith("-") or option in ("-", "--") or "=" in option:
        return False
    return _NEGATIVE.match(option) is None


def _fill(arg: str, checkpoint: Checkpoint | None) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] is None or checkpoint is None:
            return match[0][1:-1]
        return str(checkpoint.path if match[1] == "checkpoint" else checkpoint.step)

    return _PLACEHOLDER.sub(value, arg)
