"""Verification of what DeepSpeed's ``engine.save_checkpoint(DIR, tag)`` leaves.

::

    DIR/latest                      the newest tag, written when every rank is done
    DIR/zero_to_fp32.py             a script of DeepSpeed's own
    DIR/global_step120/             the tag; any name, this one without an argument
      mp_rank_00_model_states.pt    or zero_pp_rank_<data>_mp_rank_<model>_model_states.pt (ZeRO-3)
      zero_pp_rank_<data>_mp_rank_<model>_optim_states.pt, also with bf16_ before it

``engine.load_checkpoint(DIR)`` loads the tag that ``latest`` names, so DIR is what a script is
given. Where no ``latest`` is (``save_latest=False``) it is the tag's directory, and the script has
to give the two parts of that path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from elaunch.checkpoint.formats import filetree
from elaunch.checkpoint.formats.archives import number_inside
from elaunch.checkpoint.storage.durable import write_document
from elaunch.checkpoint.storage.files import read_limited, step_in_name
from elaunch.errors import CheckpointError

FORMAT = "deepspeed"
LATEST = "latest"

_STATES = re.compile(r".*_(model|optim)_states\.pt")
_PARTITION = re.compile(r"((?:bf16_)?zero_pp_rank_)([0-9]+)(_mp_rank_[0-9]+_(?:model|optim).*)")
_LIMIT = 4096  # bytes of a name


def looks_like_tag(names: Iterable[str]) -> bool:
    """Tell from the names in a directory whether it is that of one tag."""
    return any(_STATES.fullmatch(name) for name in names)


def tag_in(directory: Path) -> Path | None:
    """Return the directory of the tag that ``latest`` names in a directory, None without one.

    Raises CheckpointError for a ``latest`` that names none.
    """
    try:
        content = read_limited(directory / LATEST, _LIMIT)
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
    name = content.decode(errors="replace").strip()
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        return None
    return directory / name


def looks_like(directory: Path, names: Collection[str]) -> bool:
    """Tell whether a directory is that of one tag, or one whose ``latest`` names one."""
    if looks_like_tag(names):
        return True
    tag = tag_in(directory) if LATEST in names else None
    return tag is not None and tag.is_dir() and looks_like_tag(os.listdir(tag))


def verify(directory: Path) -> None:
    """Raise CheckpointError unless the tag of a directory is whole, by the table above."""
    names = os.listdir(directory)
    if looks_like_tag(names):
        _check_finished(directory)
        _verify_tag(directory, names)
        return
    tag = tag_in(directory)
    if tag is None or not tag.is_dir():
        raise CheckpointError(f"{LATEST} names no directory")
    _verify_tag(tag, os.listdir(tag))


def step_inside(directory: Path) -> int | None:
    """Return the number of steps that a tag's first file has, None if it has none."""
    names = sorted(name for name in os.listdir(directory) if name.endswith("_model_states.pt"))
    return number_inside(directory / names[0], "global_steps") if names else None


def to_load(tag: Path) -> Path:
    """Return the path that ``load_checkpoint`` takes for the tag of this directory."""
    return tag.parent if os.path.lexists(tag.parent / LATEST) else tag


def point_to(tag: Path) -> str:
    """Have ``latest`` name this tag, where another one is there; return the name it had, or "".

    ``load_checkpoint`` would else load what was passed over. Raises OSError.
    """
    named = tag_in(tag.parent)
    if not os.path.lexists(tag.parent / LATEST) or named == tag:
        return ""
    write_document(tag.parent / LATEST, tag.name.encode())
    return "" if named is None else named.name


def _check_finished(tag: Path) -> None:
    """Refuse a tag that is newer than the one that ``latest`` names: that is written last."""
    named = tag_in(tag.parent)
    if named is None or named == tag:
        return
    steps = [step_in_name(path.name, is_file=False) for path in (named, tag)]
    if steps[0] is not None and steps[1] is not None and steps[0] < steps[1]:
        raise CheckpointError(f"the save did not finish: {LATEST} still names {named.name}")


def _verify_tag(tag: Path, names: Collection[str]) -> None:
    parts: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := _PARTITION.fullmatch(name):
            parts.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (before, behind), ranks in parts.items():
        missing = set(range(len(ranks))) - ranks
        if missing:
            raise CheckpointError(f"missing: {before}{min(missing)}{behind}")
    worlds = {len(ranks) for (before, _), ranks in parts.items() if before.endswith("pp_rank_")}
    if len(worlds) > 1:
        raise CheckpointError(f"files are missing: not each kind is there of {max(worlds)} ranks")
    filetree.check(tag, filetree.TORCH)
