"""The meaning of a text that names where checkpoints are: in a flag, a variable, a command.

==============================  ====================================================================
text                            is
==============================  ====================================================================
``s3://bucket/run``             a URL of fsspec, as it stands
``file:///d``, ``local:///d``   the directory ``/d``
anything else                   a directory; ``~`` is the home, a relative one starts from ``start``
==============================  ====================================================================

A URL that ends with its ``://`` is refused: it is what is left of ``s3://$BUCKET/run`` where the
variable is not set, and it names no bucket.

``default_place`` is where a run's checkpoints are without any: beside its record.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from elaunch.checkpoint.records import Location
from elaunch.runs.statedir import file_name, state_root


def default_place(run_id: str, environ: Mapping[str, str]) -> Path | None:
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


def parse_place(text: str, start: Path | None = None) -> Location:
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
    """Return whether a place is below ``root``, wherever links on the way lead.

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
