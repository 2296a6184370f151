"""What the copies of one checkpoint on several nodes make together. Pure.

A checkpoint is complete if each file that it needs is whole on one node at least. Where two nodes
have different files of one name, both whole by all that is known, the first node's is taken, on
every node: no rank starts from something else than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import dcp, huggingface, lightning, own
from elaunch.checkpoint.nodelocal.inventory import Looked
from elaunch.checkpoint.writing.manifests import FileEntry

_LAST = (lightning.META, dcp.METADATA, huggingface.STATE, layout.METADATA, layout.COMMIT)
"""The files that make a checkpoint one for readers: put in place last, in this order."""
_PAIR = (layout.METADATA, layout.COMMIT)


@dataclass(frozen=True)
class WholeFile:
    """A file of the checkpoint, and the places, in the order given, that have it whole.

    ``instead`` are the places that have another one of that name which does as well.
    """

    entry: FileEntry
    places: tuple[int, ...]
    instead: tuple[int, ...] = ()

    def is_lacking(self, place: int) -> bool:
        """Whether the node at ``place`` has to get it."""
        return place not in self.places and place not in self.instead


@dataclass(frozen=True)
class Union:
    """All files of a checkpoint in the order in which they are to be put in place.

    ``missing`` names what no node has whole; where it is empty, the checkpoint is complete.
    """

    files: tuple[WholeFile, ...]
    missing: tuple[str, ...] = ()
    format: str = ""

    def lacking(self, place: int) -> tuple[WholeFile, ...]:
        """Return the files that the node at ``place`` has not."""
        return tuple(held for held in self.files if held.is_lacking(place))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(held.entry.size for held in self.files)


def unite(looked: Sequence[Looked]) -> Union:
    """Return what the nodes have together, ``looked`` in the order in which they are preferred."""
    best: Union | None = None
    for one in looked:
        if one.wanted is not None:
            union = _united(one, looked)
            if not union.missing:
                return union
            best = best or union
    if best is not None:
        return best
    problems = dict.fromkeys(one.problem for one in looked if one.problem)
    return Union((), tuple(problems) or ("nothing of it is on any node",))


def _united(base: Looked, looked: Sequence[Looked]) -> Union:
    assert base.wanted is not None  # that is why it was taken
    copies: dict[str, list[tuple[int, FileEntry]]] = {}
    for place, one in enumerate(looked):
        for entry in one.files:
            copies.setdefault(entry.path, []).append((place, entry))
    wanted = {entry.path: entry for entry in base.wanted}
    if any(not entry.checksum for entry in base.wanted):  # it lists what is needed, not all
        for path, found in copies.items():
            wanted.setdefault(path, found[0][1])
    settled = tuple(place for place, one in enumerate(looked) if _has_pair(one))
    held, missing = [], []
    for entry in wanted.values():
        fitting = [copy for copy in copies.get(entry.path, ()) if _fits(copy[1], entry)]
        if fitting:
            first = fitting[0][1]
            places = tuple(place for place, one in fitting if one == first)
            instead = settled if entry.path in _PAIR else ()
            held.append(WholeFile(first, places, instead))
        else:
            missing.append(entry.path)
    held.sort(key=lambda one: (_order(one.entry.path), one.entry.path))
    return Union(tuple(held), tuple(missing), base.format)


def _has_pair(one: Looked) -> bool:
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
