"""The newest complete checkpoint below a directory.

``find_latest`` lists the candidates, orders them by (step, round) from new to old, and verifies
one after the other until one is complete. Each newer one is passed over with a reason that names
the file. The modification time plays no part: copies and clocks change it. Nothing is written,
and what vanishes or cannot be read in the middle is a reason, not an exception.

Candidates are found by their names only, but for Lightning's files without ``step=`` in the name:

=============================  =======================  ===========================================
name                           step                     taken for
=============================  =======================  ===========================================
``step-00000120.r3/``          the number               elaunch's own layout
``*.ckpt``, ``*.ckpt/``        ``step=120``, else       Lightning
                               ``global_step`` inside
``step-00000120.r3.<uuid>/``   none                     nothing: copied from a URL, and to be
                                                        renamed first
any other directory            number behind "step",    what its content is
                               else the last one, else
                               Accelerate's, DeepSpeed's inside
any other file, by glob only   the same                 torch.save, safetensors, JSON
=============================  =======================  ===========================================

The format of a directory is recognised by its content, in this order:

===============  ===============================================  =============================
format           a directory of it has                            a round is given
===============  ===============================================  =============================
``accelerate``   ``random_states_0.pkl``, no trainer_state.json   it
``huggingface``  ``trainer_state.json``, or is ``checkpoint-120``  it
``dcp``          ``.metadata`` or ``.distcp`` files               it
``deepspeed``    ``…_model_states.pt``, or ``latest`` names one   what has ``latest`` in it
``directory``    any files, where ``--checkpoint-glob`` picks it  it
===============  ===============================================  =============================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import (
    accelerate,
    dcp,
    deepspeed,
    filetree,
    huggingface,
    lightning,
    own,
)
from elaunch.checkpoint.formats.archives import check_safetensors, check_zip
from elaunch.checkpoint.records import Checkpoint, Committed, PassedOver, SearchOutcome
from elaunch.checkpoint.search import locations
from elaunch.checkpoint.search.locations import Match
from elaunch.checkpoint.storage.files import (
    explain,
    is_temporary,
    read_json,
    sounds_like_checkpoint,
    step_in_name,
)
from elaunch.errors import CheckpointError

One = TypeVar("One")
Whole = TypeVar("Whole")

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
        return locations.find(root, glob)
    entries, unreadable = locations.find(root, "*")
    automatic, _ = locations.find(root, accelerate.AUTOMATIC)
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
            fix = "; save each step into a new directory, as step-100" if entry.is_dir else ""
            return PassedOver(path, f"no number in its name, so its step is not known{fix}")
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


def format_of(path: Path, picked: bool) -> str | None:
    """Return the format of a directory, None if it has none; ``picked``: a pattern names it."""
    names = frozenset(os.listdir(path))
    if huggingface.STATE not in names and accelerate.looks_like(names):
        return accelerate.FORMAT
    if huggingface.looks_like(path, names):
        return huggingface.FORMAT
    if dcp.looks_like(names):
        return dcp.FORMAT
    if deepspeed.looks_like(path, names):
        return deepspeed.FORMAT
    return filetree.FORMAT if picked and names else None


def known_format(candidate: Candidate) -> str | None:
    """Return a directory's format; CheckpointError where its name promises one."""
    format_ = format_of(candidate.path, candidate.picked)
    if format_ is None and candidate.reported:
        there = os.listdir(candidate.path)
        raise CheckpointError(
            "no checkpoint of a known format is in it" if there else "it is empty"
        )
    return format_


def verify_format(path: Path, step: int, format_: str) -> None:
    """Raise CheckpointError unless a directory of this format is a complete checkpoint."""
    if format_ == accelerate.FORMAT:
        accelerate.verify(path)
    elif format_ == huggingface.FORMAT:
        huggingface.verify(path, step)
    elif format_ == dcp.FORMAT:
        dcp.verify(path)
    elif format_ == deepspeed.FORMAT:
        deepspeed.verify(path)
    else:
        filetree.verify(path)


def find_latest(
    root: Path,
    *,
    glob: str | None = None,
    run_id: str | None = None,
    content: bool = True,
    doubted: Collection[str] | None = None,
) -> SearchOutcome:
    """Return the newest complete checkpoint below ``root``, and what was passed over.

    ``glob``, relative to ``root``: only its matches count. ``run_id``: checkpoints in elaunch's
    own layout that another run wrote are passed over. Without ``content`` the files of that layout
    are not read, only their sizes compared. ``doubted`` are the names of those that are read as a
    whole (None: all); of others only what was written to since its manifest. A ``root`` that does
    not exist has none. Raises UsageError for a pattern that leaves ``root``.
    """
    entries, passed_over = entries_below(root, glob)
    candidates = []
    for entry in distinct(entries, root):
        found = classify(entry, globbed=glob is not None)
        if isinstance(found, Candidate):
            candidates.append(found)
        elif found is not None:
            passed_over.append(found)
    candidates.sort(key=lambda candidate: candidate.age, reverse=True)

    def verified(candidate: Candidate) -> tuple[Checkpoint, Path | None] | None:
        path = candidate.path
        read = doubted is None or path.name in doubted
        format_ = verify_candidate(candidate, run_id, content, read)
        if format_ is None:
            return None
        load = deepspeed.to_load(path) if format_ == deepspeed.FORMAT else path
        checkpoint = Checkpoint(load, candidate.step, format_, candidate.round)
        return checkpoint, None if load == path else path

    first, reasons = first_whole(candidates, lambda candidate: candidate.path, verified)
    checkpoint, picked = first or (None, None)
    return SearchOutcome(checkpoint, (*passed_over, *reasons), picked)


def first_whole(
    candidates: Iterable[One],
    path_of: Callable[[One], Path],
    verify: Callable[[One], Whole | None],
) -> tuple[Whole | None, list[PassedOver]]:
    """Return what ``verify`` makes of the first whole candidate, and what was passed over.

    Every choice of the newest checkpoint is made here, by candidates from new to old. ``verify``
    raises CheckpointError or OSError, and returns None for what is no checkpoint.
    """
    passed_over: list[PassedOver] = []
    for candidate in candidates:
        path = path_of(candidate)
        try:
            found = verify(candidate)
        except CheckpointError as error:
            passed_over.append(PassedOver(path, str(error), damaged=True))
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            passed_over.append(PassedOver(path, explain(error, path), damaged=gone))
        else:
            if found is not None:
                return found, passed_over
    return None, passed_over


def newest_in(
    committed: Iterable[Committed], verify: Callable[[Committed], object]
) -> tuple[Committed | None, list[PassedOver]]:
    """Return the first of some checkpoints of elaunch's own for which ``verify`` raises nothing."""

    def verified(found: Committed) -> Committed:
        verify(found)
        return found

    return first_whole(committed, lambda found: Path(found.name), verified)


def verify_candidate(
    candidate: Candidate, run_id: str | None, content: bool = True, doubted: bool = True
) -> str | None:
    """Return the format of a complete candidate, None for a directory that is no checkpoint.

    ``content`` and ``doubted`` are for elaunch's own layout: see
    elaunch.checkpoint.formats.own.verify. Raises CheckpointError for one that is not complete, and
    OSError.
    """
    path = candidate.path
    if candidate.format is None:
        return _verify_directory(candidate)
    if candidate.format == own.FORMAT:
        own.verify(path, run_id, content, doubted)
    elif candidate.format == SAFETENSORS:
        check_safetensors(path)
    elif candidate.format == JSON:
        read_json(path)
    elif path.is_dir():
        lightning.verify_directory(path)
    else:
        check_zip(path)
    return candidate.format


def _verify_directory(candidate: Candidate) -> str | None:
    format_ = known_format(candidate)
    if format_ is not None:
        verify_format(candidate.path, candidate.step, format_)
    return format_
