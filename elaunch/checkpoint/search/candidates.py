"""Which names below a checkpoint directory can be checkpoints, and of which step.

This looks at names only, but for Lightning's files without ``step=`` in the name. Whether a
candidate is complete is asked later, and only until one is.

=============================  =======================  ===========================================
name                           step                     taken for
=============================  =======================  ===========================================
``step-00000120.r3/``          the number               elaunch's own layout
``*.ckpt``, ``*.ckpt/``        ``step=120``, else       Lightning
                               ``global_step`` inside
``step-00000120.r3.<uuid>/``   none                     nothing: copied from a URL, and to be
                                                        renamed first
any other directory            number behind "step",    what its content is, by ``directories``
                               else the last one, else
                               Accelerate's, DeepSpeed's inside
any other file, by glob only   the same                 torch.save, safetensors, JSON
=============================  =======================  ===========================================
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import accelerate, dcp, deepspeed, lightning, own
from elaunch.checkpoint.names import is_temporary, sounds_like_checkpoint, step_in_name
from elaunch.checkpoint.records import PassedOver
from elaunch.checkpoint.search import globs
from elaunch.checkpoint.search.globs import Match
from elaunch.checkpoint.storage.files import explain
from elaunch.errors import CheckpointError

TORCH_SAVE = "torch.save"
SAFETENSORS = "safetensors"
JSON = "json"
_CLOSED = (layout.STAGE, layout.QUARANTINE, layout.TRASH)
_FORMATS = {".safetensors": SAFETENSORS, ".json": JSON}


@dataclass(frozen=True)
class Candidate:
    """Something that is named as the checkpoint of a step.

    ``format`` is None for a directory whose content decides. ``reported`` is false for a
    directory that nobody would expect to be a checkpoint: if it is none, nothing is reported.
    ``picked``: the user's pattern names it, so any content will do.
    """

    path: Path
    step: int
    format: str | None
    round: int | None = None
    reported: bool = True
    picked: bool = False

    @property
    def age(self) -> tuple[int, int, str]:
        """Order candidates from old to new; the name makes the order of equals a fixed one."""
        return (self.step, -1 if self.round is None else self.round, self.path.name)


def entries_below(root: Path, glob: str | None) -> tuple[list[Match], list[PassedOver]]:
    """Return what is named as a checkpoint can be, and the directories that cannot be listed.

    Without a pattern that is all directly below ``root``, and what Accelerate names by itself.
    """
    if glob is not None:
        return globs.find(root, glob)
    entries, unreadable = globs.find(root, "*")
    automatic, _ = globs.find(root, accelerate.AUTOMATIC)
    return [*entries, *automatic], unreadable


def classify(entry: Match, globbed: bool) -> Candidate | PassedOver | None:
    """Return the candidate that an entry is, why it cannot be one, or None for other things.

    ``globbed``: the user's pattern picked the entry, so it has to be a checkpoint.
    """
    path = entry.path
    parsed = layout.parse_step_name(path.name) if entry.is_dir else None
    if parsed:
        step, round_ = parsed
        return Candidate(path, step, own.FORMAT, round_)
    if entry.is_dir and layout.is_name_at_url(path.name):
        name = path.name.rpartition(".")[0]
        return PassedOver(path, f"it has the name of a checkpoint at a URL; rename it to {name}")
    if path.name.endswith(lightning.SUFFIX):
        return _lightning(entry, globbed)
    if not entry.is_dir and not globbed:
        return None
    step_found = step_in_name(path.name, is_file=not entry.is_dir)
    try:
        if step_found is None and entry.is_dir:
            step_found = _step_inside(path)
    except CheckpointError as error:
        return PassedOver(path, str(error))
    except OSError as error:
        return PassedOver(path, explain(error, path))
    if step_found is None:
        if globbed or os.path.lexists(path / dcp.METADATA):
            return PassedOver(path, "no number in its name, so its step is not known")
        return None
    reported = globbed or sounds_like_checkpoint(path.name)
    return Candidate(path, step_found, _file_format(entry), reported=reported, picked=globbed)


def _step_inside(path: Path) -> int | None:
    """Return the step in the content of a directory, None where it has none."""
    try:
        names = os.listdir(path)
    except OSError:
        return None  # it is not named as a checkpoint
    if accelerate.looks_like(names):
        return accelerate.step_inside(path)
    return deepspeed.step_inside(path) if deepspeed.looks_like_tag(names) else None


def _file_format(entry: Match) -> str | None:
    if entry.is_dir:
        return None
    return _FORMATS.get(entry.path.suffix, TORCH_SAVE)


def _lightning(entry: Match, globbed: bool) -> Candidate | PassedOver:
    path = entry.path
    step = lightning.step_in_name(path.name)
    if step is not None:
        return Candidate(path, step, lightning.FORMAT)
    try:
        step = lightning.step_inside(path)
    except CheckpointError as error:
        return PassedOver(path, str(error))
    except OSError as error:
        return PassedOver(path, explain(error, path))
    if step is not None:
        return Candidate(path, step, lightning.FORMAT)
    step = step_in_name(path.name, is_file=not entry.is_dir) if globbed else None
    if step is not None:
        return Candidate(path, step, _file_format(entry))
    return PassedOver(path, "no step= in its name and no global_step in it: its step is not known")


def distinct(entries: Iterable[Match], root: Path) -> Iterator[Match]:
    """Yield every file and directory once: links to something that matches itself are left out.

    A link with a number of its own (``step_120`` to another disk) stands for its target; one
    without (``latest``) is replaced by the target.
    """
    top = os.path.realpath(root)
    direct = []
    links: dict[str, Match] = {}
    for entry in sorted(entries, key=lambda entry: str(entry.path)):
        if entry.linked:
            links.setdefault(os.path.realpath(entry.path), entry)
        else:
            direct.append(entry)
    yield from direct
    if not links:
        return
    targets = {os.path.join(top, entry.path.relative_to(root)) for entry in direct}
    for target, entry in links.items():
        if target in targets or _is_closed(target, top):
            continue
        numbered = step_in_name(entry.path.name, is_file=not entry.is_dir) is not None
        yield entry if numbered else replace(entry, path=Path(target))


def _is_closed(target: str, top: str) -> bool:
    """Tell whether a link leads to a temporary name, or into the stage, below the same root."""
    if os.path.commonpath((target, top)) != top:
        return False
    parts = Path(target).relative_to(top).parts
    return not parts or is_temporary(parts[-1]) or parts[0] in _CLOSED
