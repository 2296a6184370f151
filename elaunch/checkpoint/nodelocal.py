"""Checkpoints of nodes that have a directory each: which they have, and which files are whole.

Where every node has its own directory (``--checkpoint-local``), a node may have some shards only.
``list_local`` reads names and small documents; ``find_whole`` reads every byte of one checkpoint.
``unite`` finds, without reading, what several nodes have together.

===========================  ===============================  =====================================
checkpoint                   what it needs (``wanted``)       a file is whole if
===========================  ===============================  =====================================
elaunch's own layout         what the manifests, COMMIT and   its checksum is the manifest's
                             metadata.json say
DCP directory                what ``.metadata`` names         it reaches to its last piece
Hugging Face, Lightning,     what is there, if it is          the checkpoint is complete
torch.save, safetensors      complete by itself               complete; CRCs of archives are right
===========================  ===============================  =====================================

A checkpoint is complete if each file that it needs is whole on one node at least. Where two nodes
have different files of one name, both whole by all that is known, the first node's is taken, on
every node, so that all ranks start from the same.

A node commits a stage when it has the manifests of all ranks. Where the round ended before they
came, the shards may be on the disks all the same, and another node may have committed already. So
every node receives the manifests of the others (``StageManifests``) before stages are finished or
cleared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import dcp, filetree, huggingface, lightning, own
from elaunch.checkpoint.formats.archives import check_sums
from elaunch.checkpoint.manifests import FileEntry, entries, schema_checked
from elaunch.checkpoint.records import PassedOver, Stage
from elaunch.checkpoint.search import latest
from elaunch.checkpoint.search.latest import (
    TORCH_SAVE,
    Candidate,
    classify,
    distinct,
    entries_below,
    verify_candidate,
)
from elaunch.checkpoint.storage.checksums import checksum_of, differs
from elaunch.checkpoint.storage.commit import read_stage
from elaunch.checkpoint.storage.files import (
    JSON_LIMIT,
    explain,
    inside,
    is_temporary,
    parse_json,
    read_json,
    read_limited,
    regular_size,
)
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import CheckpointError, RankFileMissing

StageManifests = Mapping[str, Mapping[int, bytes]]
"""The name of a stage → rank → the bytes of its manifest."""

NEWEST: Final = 10
"""Committed checkpoints that a node lists by name."""


def staged_manifests(root: Path) -> dict[str, dict[int, bytes]]:
    """Return the manifests in the stages that are here; raises OSError."""
    found = {}
    for stage in _stages(root):
        with contextlib.suppress(FileNotFoundError):  # it is discarded just now
            found[stage.name] = read_stage(root / layout.STAGE / stage.name)
    return found


def committed_paths(root: Path) -> dict[str, Path]:
    """Return where the newest committed checkpoints are, by the names that their stages had."""
    if not (root / layout.RUN).exists():
        return {}
    newest = islice(open_storage(root, local=True).newest_first(), NEWEST)
    return {Stage(one.step, one.round, one.uuid).name: Path(one.place) for one in newest}


def merged_manifests(of_nodes: Iterable[StageManifests]) -> dict[str, dict[int, bytes]]:
    """Return the manifests of all nodes; of one rank's manifests the first counts."""
    merged: dict[str, dict[int, bytes]] = {}
    for of_node in of_nodes:
        for name, manifests in of_node.items():
            known = merged.setdefault(name, {})
            for rank, content in manifests.items():
                known.setdefault(rank, content)
    return merged


def adopt_manifests(root: Path, manifests: StageManifests) -> None:
    """Put other nodes' manifests into the stages that are here; raises OSError."""
    for stage in _stages(root):
        with contextlib.suppress(FileNotFoundError):  # as above
            own = read_stage(root / layout.STAGE / stage.name)
            theirs = manifests.get(stage.name, {})
            lacking = {rank: one for rank, one in theirs.items() if rank not in own}
            if own and lacking:
                open_storage(root, local=True).adopt(stage, lacking)


def _stages(root: Path) -> list[Stage]:
    stages = root / layout.STAGE
    parsed = [layout.parse_stage_name(path.name) for path in sorted(stages.glob("step-*"))]
    return [Stage(*one) for one in parsed if one is not None]


_LAST = (lightning.META, dcp.METADATA, huggingface.STATE, layout.METADATA, layout.COMMIT)
"""The files that make a checkpoint one for readers: put in place last, in this order."""
_PAIR = (layout.METADATA, layout.COMMIT)


@dataclass(frozen=True)
class WholeFile:
    """A file of the checkpoint, and the nodes that have it whole, numbered in the order given.

    ``substitutes`` are the nodes that have another file of that name which does as well.
    """

    entry: FileEntry
    holders: tuple[int, ...]
    substitutes: tuple[int, ...] = ()

    def is_lacking(self, node: int) -> bool:
        """Whether a node has to get it."""
        return node not in self.holders and node not in self.substitutes


@dataclass(frozen=True)
class UnitedFiles:
    """All files of a checkpoint in the order in which they are to be put in place.

    ``missing`` names what no node has whole; where it is empty, the checkpoint is complete.
    """

    files: tuple[WholeFile, ...]
    missing: tuple[str, ...] = ()
    format: str = ""

    def lacking(self, node: int) -> tuple[WholeFile, ...]:
        """Return the files that a node has not."""
        return tuple(whole for whole in self.files if whole.is_lacking(node))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(whole.entry.size for whole in self.files)


def unite(nodes: Sequence[NodeFiles]) -> UnitedFiles:
    """Return what the nodes have together; ``nodes`` are in the order of preference."""
    best: UnitedFiles | None = None
    for one in nodes:
        if one.wanted is not None:
            union = _united(one, nodes)
            if not union.missing:
                return union
            best = best or union
    if best is not None:
        return best
    problems = dict.fromkeys(one.problem for one in nodes if one.problem)
    return UnitedFiles((), tuple(problems) or ("nothing of it is on any node",))


def _united(base: NodeFiles, nodes: Sequence[NodeFiles]) -> UnitedFiles:
    assert base.wanted is not None  # that is why it was taken
    copies: dict[str, list[tuple[int, FileEntry]]] = {}
    for node, one in enumerate(nodes):
        for entry in one.files:
            copies.setdefault(entry.path, []).append((node, entry))
    wanted = {entry.path: entry for entry in base.wanted}
    if any(not entry.checksum for entry in base.wanted):  # it lists what is needed, not all
        for path, found in copies.items():
            wanted.setdefault(path, found[0][1])
    with_pair = tuple(node for node, one in enumerate(nodes) if _has_pair(one))
    whole, missing = [], []
    for entry in wanted.values():
        fitting = [copy for copy in copies.get(entry.path, ()) if _fits(copy[1], entry)]
        if fitting:
            first = fitting[0][1]
            holders = tuple(node for node, one in fitting if one == first)
            substitutes = with_pair if entry.path in _PAIR else ()
            whole.append(WholeFile(first, holders, substitutes))
        else:
            missing.append(entry.path)
    whole.sort(key=lambda one: (_order(one.entry.path), one.entry.path))
    return UnitedFiles(tuple(whole), tuple(missing), base.format)


def _has_pair(one: NodeFiles) -> bool:
    """Tell whether a node has documents of its own that agree with all others'.

    Each agent may have committed by itself, at another time: the two fit each other, and the
    manifests have the digest by which all are one checkpoint. Taking another node's would put it at
    risk for nothing.
    """
    if one.format != own.FORMAT or one.wanted is None:
        return False
    return set(_PAIR) <= {entry.path for entry in one.files}


def _fits(entry: FileEntry, wanted: FileEntry) -> bool:
    if not wanted.checksum:
        return entry.size >= wanted.size
    return (entry.size, entry.checksum) == (wanted.size, wanted.checksum)


def _order(path: str) -> int:
    name = path.rpartition("/")[2]
    return _LAST.index(name) if name in _LAST else -1


MOST_LISTED: Final = 50
"""Checkpoints that a node lists: its newest ones."""

Progress = Callable[[int], object]
"""Is called with the number of bytes read since the last call."""


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint of which a node has a part or all.

    ``path`` is relative to the checkpoint directory and the same on all nodes. ``round`` is -1 and
    ``digest`` "" but in elaunch's own layout, whose COMMIT has it: copies with one digest are one
    checkpoint. ``format`` is "" for a directory whose content decides.
    """

    path: str
    step: int
    round: int = -1
    format: str = ""
    digest: str = ""

    @property
    def age(self) -> tuple[int, int, str, str]:
        """Order from old to new; the name makes the order of equals a fixed one."""
        return (self.step, self.round, self.path, self.digest)


@dataclass(frozen=True)
class NodeFiles:
    """The files of one checkpoint that are whole on a node, and those that it needs.

    A path is relative to the checkpoint; "" is the checkpoint itself, where it is one file. For a
    wanted file without a checksum any file of that size or larger will do. ``wanted`` is None where
    this node cannot tell; ``problem`` is why the checkpoint is not complete here.
    """

    files: tuple[FileEntry, ...] = ()
    wanted: tuple[FileEntry, ...] | None = None
    problem: str = ""
    format: str = ""


def list_local(
    root: Path, glob: str | None, run_id: str | None
) -> tuple[list[LocalCheckpoint], list[PassedOver]]:
    """Return what may be a checkpoint below ``root``, newest first, and what was passed over.

    ``glob`` and ``run_id`` are those of elaunch.checkpoint.search.latest.find_latest. Raises
    OSError where ``root`` is there and cannot be read.
    """
    found, passed_over = entries_below(root, glob)
    unreadable = [passed for passed in passed_over if passed.path == root]
    if unreadable:
        raise OSError(f"{root}: {unreadable[0].reason}")
    listed = []
    for entry in distinct(found, root):
        candidate = classify(entry, globbed=glob is not None)
        try:
            if isinstance(candidate, Candidate):
                one = _local(candidate, root, run_id)
                listed += [] if one is None else [one]
            elif candidate is not None:
                passed_over.append(candidate)
        except CheckpointError as error:
            passed_over.append(PassedOver(entry.path, str(error)))
        except OSError as error:
            passed_over.append(PassedOver(entry.path, explain(error, entry.path)))
    listed.sort(key=lambda one: one.age, reverse=True)
    return listed[:MOST_LISTED], passed_over


def _local(candidate: Candidate, root: Path, run_id: str | None) -> LocalCheckpoint | None:
    path = candidate.path
    if not path.is_relative_to(root):
        raise CheckpointError("it is a link that leads out of the checkpoint directory")
    relative, step = str(path.relative_to(root)), candidate.step
    if candidate.format is None:
        format_ = latest.known_format(candidate)
        if format_ is None:
            return None
        return LocalCheckpoint(relative, step, format=format_ if format_ == filetree.FORMAT else "")
    if candidate.format != own.FORMAT:
        return LocalCheckpoint(relative, step, format=candidate.format)
    assert candidate.round is not None  # its name was parsed
    return LocalCheckpoint(relative, step, candidate.round, own.FORMAT, _digest(path, run_id))


def _digest(path: Path, run_id: str | None) -> str:
    """Return COMMIT's digest of a checkpoint of this run; CheckpointError for any other."""
    try:
        commit = own.commit_document(read_limited(path / layout.COMMIT, JSON_LIMIT))
    except FileNotFoundError:
        raise CheckpointError(f"not committed: {layout.COMMIT} is missing") from None
    metadata = schema_checked(read_json(path / layout.METADATA), layout.METADATA)
    owner = metadata.get("run_id")
    if run_id is not None and owner != run_id:
        raise own.foreign(owner)
    digest = commit.get("digest")
    if not isinstance(digest, str):
        raise CheckpointError(f"{layout.COMMIT} has no digest")
    return digest


# ── what is whole ────────────────────────────────────────────────────────────────────────────────


def find_whole(root: Path, checkpoint: LocalCheckpoint, progress: Progress) -> NodeFiles:
    """Read all that this node has of a checkpoint; ``progress`` is called while it is read.

    Damaged files are left out. Raises OSError where the storage fails.
    """
    path = inside(root, checkpoint.path, "another node")
    if not os.path.lexists(path):
        return NodeFiles(problem="it is not here")
    try:
        if checkpoint.format == own.FORMAT:
            return _find_whole_own(path, checkpoint, progress)
        if path.is_dir():
            return _find_whole_in_directory(path, checkpoint, progress)
        verify_candidate(Candidate(path, checkpoint.step, checkpoint.format), None)
        if checkpoint.format in (TORCH_SAVE, lightning.FORMAT):
            check_sums(path, progress)
        files = (_hashed(path, "", progress),)
        return NodeFiles(files, files, format=checkpoint.format)
    except CheckpointError as error:
        return NodeFiles(problem=str(error))
    except FileNotFoundError as error:
        return NodeFiles(problem=explain(error, path))


def _find_whole_own(path: Path, checkpoint: LocalCheckpoint, progress: Progress) -> NodeFiles:
    wanted, problem = _wanted_own(path, checkpoint)
    files = []
    for entry in wanted:
        try:
            file = inside(path, entry.path, "a manifest")
            whole = regular_size(file) == entry.size
            whole = whole and not differs(file, entry.checksum, progress)
        except FileNotFoundError:
            problem = problem or f"missing: {entry.path}"
            continue
        except CheckpointError as error:
            problem = problem or str(error)
            continue
        if whole:
            files.append(entry)
        else:
            problem = problem or f"bad checksum: {entry.path}"
    pair = {layout.METADATA, layout.COMMIT} <= {entry.path for entry in wanted}
    return NodeFiles(tuple(files), wanted if pair else None, problem, own.FORMAT)


def _wanted_own(path: Path, checkpoint: LocalCheckpoint) -> tuple[tuple[FileEntry, ...], str]:
    """Return every file that the checkpoint needs; CheckpointError where it is unknown.

    Where metadata.json is not the one that COMMIT was written with, both are left out, and the
    reason is returned: what the manifests list counts all the same.
    """
    documents = {
        name: read_limited(path / name, JSON_LIMIT) for name in (layout.COMMIT, layout.METADATA)
    }
    commit = own.commit_document(documents[layout.COMMIT])
    metadata = documents[layout.METADATA]
    if commit.get("digest") != checkpoint.digest:
        raise CheckpointError(f"another {layout.COMMIT} is there than the one that was asked for")
    problem = ""
    if commit.get(layout.METADATA_SUM, layout.checksum(metadata)) != layout.checksum(metadata):
        problem = f"{layout.METADATA} does not have the checksum in {layout.COMMIT}"
    manifests = own.read_manifests(path, os.listdir(path))
    if layout.digest(manifests) != checkpoint.digest:
        raise CheckpointError(f"the manifests do not have the digest in {layout.COMMIT}")
    wanted = {}
    for name, content in manifests.items():
        document = schema_checked(parse_json(content, name), name)
        wanted.update({entry.path: entry for entry in entries(document, name)})
    for name, content in (manifests if problem else documents | manifests).items():
        wanted[name] = FileEntry(name, len(content), layout.checksum(content))
    entries_ = tuple(FileEntry(one.path, one.size, one.checksum) for one in wanted.values())
    return entries_, problem


def _find_whole_in_directory(
    path: Path, checkpoint: LocalCheckpoint, progress: Progress
) -> NodeFiles:
    names = os.listdir(path)
    files = tuple(_hashed(path / name, name, progress) for name in _regular(path))
    format_, problem = None, ""
    picked = checkpoint.format == filetree.FORMAT
    try:
        format_ = verify_candidate(Candidate(path, checkpoint.step, None, picked=picked), None)
    except RankFileMissing:  # of another node's rank; it may be lost with that node
        format_ = latest.format_of(path, picked)
    except CheckpointError as error:
        problem = str(error)
    except FileNotFoundError as error:
        problem = explain(error, path)
    if huggingface.looks_like(path, names) or not dcp.looks_like(names):
        return NodeFiles(files, files if format_ else None, problem, format_ or "")
    if dcp.METADATA not in names:
        return NodeFiles(files, None, f"{dcp.METADATA} is missing", dcp.FORMAT)
    wanted = [FileEntry(name, size, "") for name, size in dcp.wanted_sizes(path).items()]
    wanted += [entry for entry in files if entry.path == dcp.METADATA]
    return NodeFiles(files, tuple(wanted), problem, dcp.FORMAT)


def _regular(path: Path) -> Iterator[str]:
    """Yield the files below a checkpoint's directory that are no writer's temporary ones."""
    for directory, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not is_temporary(name))
        for name in sorted(names):
            file = Path(directory, name)
            if (name == dcp.METADATA or not is_temporary(name)) and file.is_file():
                yield str(file.relative_to(path))


def _hashed(file: Path, name: str, progress: Progress) -> FileEntry:
    size = regular_size(file)
    return FileEntry(name, size, checksum_of(file, progress))
