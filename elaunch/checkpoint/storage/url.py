"""A storage behind an fsspec URL: storage that puts whole objects and cannot rename.

::

    URL/run.json
    URL/step-00000120.r3.<uuid>/      a checkpoint, or one that is being written
      …, manifest.rank-00000.json, metadata.json
      COMMIT                          put last: without it this is no checkpoint
      QUARANTINED                     failed verification: {"reason": …}; COMMIT is deleted then
      REMOVED                         is to go; COMMIT is deleted then, the rest follows

The uuid is part of the name, so no save ever overwrites what another one has put. Two processes may
commit one stage at once: both put the same COMMIT, and each a ``metadata.json`` that fits it. Of
two saves of one step and round at most one is committed: who has put COMMIT looks for another, and
takes it back if there is one. There
is no lock: ``run.json`` keeps other runs away. Scripts write into a local temporary directory, and
what they read is copied into one, and verified as it comes. A load of a state reads the ranges that
it needs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from elaunch.atonce import at_once
from elaunch.checkpoint import layout, shelves
from elaunch.checkpoint.assemble import (
    Documents,
    assemble,
    check_sizes,
    choose,
    describe,
    in_the_way,
    is_complete,
    is_foreign,
)
from elaunch.checkpoint.formats import own
from elaunch.checkpoint.manifests import (
    FileEntry,
    check_metadata,
    check_path,
    dump,
    encode_checked,
)
from elaunch.checkpoint.ownership import NoLock, claim
from elaunch.checkpoint.records import Committed, Image, Location, ReadBefore, ShardHeader, Stage
from elaunch.checkpoint.storage import commit as committing
from elaunch.checkpoint.storage.durable import list_files, sync_files
from elaunch.checkpoint.storage.files import JSON_LIMIT, parse_json
from elaunch.checkpoint.storage.objects import Objects, Ranges, name_in
from elaunch.env import SCRATCH
from elaunch.errors import CheckpointError, SaveError
from elaunch.proc import own_prefix

log = logging.getLogger(__name__)

_READERS = 4
_CLOSED = (layout.REMOVED, layout.QUARANTINED)


class ObjectStorage:
    """The storage at ``url``. UsageError if fsspec, or what it needs for it, is not installed."""

    def __init__(self, url: str) -> None:
        self._objects = Objects(url)
        self._local: dict[str, tempfile.TemporaryDirectory[str]] = {}

    @property
    def place(self) -> str:
        """The URL."""
        return self._objects.url

    def prepare(self, run_id: str, given: bool) -> None:
        """Put ``run.json``; SaveError if another run has the place."""

        def read() -> dict[str, Any]:
            return parse_json(self._objects.read(layout.RUN), layout.RUN)

        document = claim(self.place, read, run_id, given)
        if document is not None:
            self._objects.put(layout.RUN, document)

    def lock(self, jobs: Collection[str] = ()) -> NoLock:
        """Return something to close: there is no lock on such storage."""
        return NoLock()

    def open_stage(self, stage: Stage, rank: int | None = None) -> Path:
        """Return this process's local directory for the stage, or that of a rank in it."""
        self._refuse_other(stage)
        if stage.name not in self._local:
            self._local[stage.name] = tempfile.TemporaryDirectory(prefix=own_prefix(SCRATCH))
        path = Path(self._local[stage.name].name)
        if not path.is_dir():
            raise SaveError(f"{path} was removed while {stage.name} was written into it")
        path = path if rank is None else path / layout.private_name(rank)
        path.mkdir(exist_ok=True)
        return path

    def write_shard(self, stage: Stage, header: ShardHeader, images: Sequence[Image]) -> bytes:
        """Put a rank's files and its manifest."""
        for image in images:
            check_path(image.path)
        check_metadata(header.metadata)
        self._refuse_other(stage)
        files = [self._objects.write(stage.name, image) for image in images]
        content = encode_checked(stage, header, files)
        self._objects.put(f"{stage.name}/{layout.manifest_name(header.rank)}", content)
        return content

    def write_manifest(
        self, stage: Stage, header: ShardHeader, files: Sequence[str], below: Path | None = None
    ) -> bytes:
        """Checksum and put files that lie in the stage's local directory, or in ``below``."""
        for relative in files:
            check_path(relative)
        check_metadata(header.metadata)
        directory = below or self.open_stage(stage)
        entries = sync_files(directory, files, _READERS)
        content = encode_checked(stage, header, entries)
        if files:
            self._objects.upload(stage.name, directory, files)
        self._objects.put(f"{stage.name}/{layout.manifest_name(header.rank)}", content)
        ours = self._local.get(stage.name)
        if ours is not None and directory.is_relative_to(ours.name):
            for relative in files:
                (directory / relative).unlink()
        return content

    def adopt(self, stage: Stage, manifests: Mapping[int, bytes]) -> None:
        """Put the manifests of other ranks."""
        for rank, content in manifests.items():
            self._objects.put(f"{stage.name}/{layout.manifest_name(rank)}", content)

    def own_files(self, stage: Stage, below: Path | None = None) -> list[str]:
        """Return the files in the stage's local directory, or in ``below``."""
        return list_files(below or self.open_stage(stage), staged=below is None)

    def manifests(self, stage: Stage) -> dict[int, bytes]:
        """Return the manifests that have been put."""
        return self._manifests(stage.name, self._objects.names(stage.name))

    def commit(
        self, stage: Stage, fence: Callable[[], None], extra: Mapping[str, Any] | None = None
    ) -> Committed:
        """Commit a stage that has the manifests of all ranks."""
        if found := self._refuse_other(stage):
            return found
        names = self._objects.names(stage.name)
        contents = self._manifests(stage.name, names)
        if layout.REMOVED in names or not contents:
            raise SaveError(
                f"not committed: nothing is in {self.place}/{stage.name}: no rank has written"
                " anything, or the save was given up"
            )
        documents = assemble(stage, contents, extra or {}, time.time())
        check_sizes(documents, self._objects.sizes(stage.name))
        fence()
        self._forget(stage)
        return self._publish(stage, documents)

    def discard(self, stage: Stage) -> None:
        """Delete a stage unless it is committed."""
        self._forget(stage)
        if layout.COMMIT not in self._objects.names(stage.name):
            self._objects.delete(stage.name)

    def finish_stages(
        self,
        run_id: str | None,
        keep: Collection[str] = (),
        after: int = 0,
        alone: bool = False,
        held: Collection[str] = (),
    ) -> list[Committed]:
        """Commit complete stages of the round that is over, verified, and clear the others."""
        done = []
        for name in self._objects.names():
            parsed = layout.parse_stage_name(name)
            if parsed is None or name in keep:
                continue
            try:
                done += self._finish(Stage(*parsed), run_id, after, name in held)
            except OSError as error:
                # Unreadable now is not the same as incomplete: the next round tries again.
                log.warning("%s could not be finished and is left: %s", name, error)
        return sorted(done, key=lambda committed: committed.age)

    def _finish(self, stage: Stage, run_id: str | None, after: int, held: bool) -> list[Committed]:
        names = self._objects.names(stage.name)
        removed = layout.REMOVED in names
        if layout.QUARANTINED in names or (layout.COMMIT in names and not removed):
            return []  # committed, maybe damaged: verification finds out
        try:
            contents = {} if removed else self._manifests(stage.name, names)
            if is_foreign(contents, run_id):
                return []
            if held and not is_complete(contents):
                return []
            return [self._finish_with(stage, contents, stage.round if held else after)]
        except (CheckpointError, FileNotFoundError) as error:
            log.info("clearing the stage %s: %s", stage.name, error)
            self._objects.delete(stage.name)
        return []

    def _finish_with(self, stage: Stage, contents: Mapping[int, bytes], after: int) -> Committed:
        if stage.round < after:
            raise SaveError(committing.too_late(stage, after))
        if not is_complete(contents):
            raise SaveError("parts are missing")
        self._refuse_other(stage)
        documents = assemble(stage, contents, {}, time.time())
        for file in chain(*documents.kept.values()):
            if self._objects.differs(f"{stage.name}/{file.path}", file.checksum):
                raise SaveError(f"bad checksum: {file.path}")
        return self._publish(stage, documents)

    def listed(self, known: ReadBefore | None = None) -> list[Committed]:
        """Return the committed checkpoints from old to new."""
        return list(self.newest_first(known))[::-1]

    def newest_first(self, known: ReadBefore | None = None) -> Iterator[Committed]:
        """Yield the committed checkpoints from new to old; the names are those of the first."""
        yield from self._described("", known)

    def holds(self, name: str, uuid: str) -> bool:
        """Tell whether the checkpoint of this name and uuid is committed."""
        return any(found.name == name for found in self._described(uuid))

    def find(self, name_or_uuid: str) -> Committed:
        """Return the checkpoint of this name or uuid, both of which are in its directory's name."""
        named = next(self._described(name_or_uuid), None)
        return named or choose(self.newest_first(), name_or_uuid, self.place)

    def _described(self, name_or_uuid: str, known: ReadBefore | None = None) -> Iterator[Committed]:
        """Yield the committed checkpoints of a name or uuid, "" for any, from new to old."""
        names = self._objects.names()
        parsed = {name: parts for name in names if (parts := layout.parse_stage_name(name))}
        for name in sorted(parsed, key=parsed.__getitem__, reverse=True):
            if name_or_uuid in ("", layout.step_name(*parsed[name][:2]), parsed[name][2]) and (
                found := self._describe(name, self._objects.names(name), known)
            ):
                yield found

    @contextmanager
    def fetch(self, found: Committed) -> Iterator[Path]:
        """Give a local copy, verified as it is made, and delete it at the end."""
        name = name_in(found.place)
        with tempfile.TemporaryDirectory(prefix=own_prefix(SCRATCH)) as folder:
            path = Path(folder, found.name)
            path.mkdir()
            documents, files = self._checked(found)
            for file, content in documents.items():
                (path / file).write_bytes(content)
            copies = [partial(self._objects.copy, name, file, path) for file in files]
            at_once(copies, _READERS, "fetch")
            yield path

    def ranges(self, found: Committed) -> Ranges:
        """Return what reads parts of its files."""
        ranges = Ranges(self._objects, name_in(found.place))
        if layout.COMMIT not in ranges.sizes:
            raise CheckpointError(f"{found.place} is gone")
        return ranges

    def remove(self, found: Committed) -> None:
        """Delete COMMIT, then the rest."""
        name = name_in(found.place)
        if self._objects.names(name):
            self._objects.put(f"{name}/{layout.REMOVED}", dump({"schema": layout.SCHEMA}))
            self._objects.delete(f"{name}/{layout.COMMIT}")
            self._objects.delete(name)

    def verify(self, found: Committed, run_id: str | None = None, content: bool = True) -> None:
        """Read all of it; without ``content`` the documents only."""
        _, files = self._checked(found, run_id)
        for file in files if content else ():
            if self._objects.differs(f"{name_in(found.place)}/{file.path}", file.checksum):
                raise CheckpointError(f"bad checksum: {file.path}")

    def _checked(
        self, found: Committed, run_id: str | None = None
    ) -> tuple[dict[str, bytes], list[FileEntry]]:
        """Return the documents, which fit each other, and the files, which have their sizes."""
        name = name_in(found.place)
        sizes = self._objects.sizes(name)
        if not sizes:
            raise CheckpointError(f"{found.place} is gone")
        if layout.COMMIT not in sizes:
            raise CheckpointError(f"not committed: {layout.COMMIT} is missing")
        ours = [file for file in sizes if "/" not in file and layout.is_reserved(file)]
        if large := [file for file in ours if sizes[file] > JSON_LIMIT]:
            raise CheckpointError(f"{large[0]} is larger than {JSON_LIMIT} bytes")
        documents = {file: self._objects.read(f"{name}/{file}") for file in ours}
        listed = own.check_documents(found.name, documents, run_id).values()
        files = list(dict.fromkeys(chain(*listed)))
        for file in files:
            size = sizes.get(file.path)
            if size is None:
                raise CheckpointError(f"missing: {file.path}")
            own.check_size(file, size)
        return documents, files

    def quarantine(self, found: Committed | Location, reason: str) -> None:
        """Put the marker with the reason, then delete COMMIT."""
        name = name_in(found.place if isinstance(found, Committed) else found)
        if layout.COMMIT in self._objects.names(name):
            document = {"schema": layout.SCHEMA, "name": name, "reason": reason, "at": time.time()}
            self._objects.put(f"{name}/{layout.QUARANTINED}", dump(document))
            self._objects.delete(f"{name}/{layout.COMMIT}")

    def quarantined(self) -> list[tuple[str, str]]:
        """Return (name, reason) of each."""
        found = []
        for name in self._objects.names():
            path = f"{name}/{layout.QUARANTINED}"
            if layout.parse_stage_name(name) and layout.QUARANTINED in self._objects.names(name):
                try:
                    reason = parse_json(self._objects.read(path), layout.QUARANTINED).get("reason")
                except CheckpointError:
                    reason = shelves.UNKNOWN
                found.append((name, str(reason)))
        return found

    def clear_trash(self) -> None:
        """Delete what was to be removed and is not yet gone."""
        for name in self._objects.names():
            if layout.parse_stage_name(name) and layout.REMOVED in self._objects.names(name):
                self._objects.delete(name)

    def _manifests(self, name: str, names: Sequence[str]) -> dict[int, bytes]:
        ranks = {layout.parse_manifest_name(one): one for one in names}
        return {r: self._objects.read(f"{name}/{one}") for r, one in ranks.items() if r is not None}

    def _forget(self, stage: Stage) -> None:
        if local := self._local.pop(stage.name, None):
            local.cleanup()

    def _publish(self, stage: Stage, documents: Documents) -> Committed:
        for rank in documents.rewritten:
            path = f"{stage.name}/{layout.manifest_name(rank)}"
            self._objects.put(path, documents.manifests[rank])
        self._objects.put(f"{stage.name}/{layout.METADATA}", documents.metadata)
        commit = {k: v for k, v in json.loads(documents.commit).items() if k != "metadata"}
        self._objects.put(f"{stage.name}/{layout.COMMIT}", dump(commit))
        try:
            found = self._refuse_other(stage)
        except SaveError:
            self._objects.delete(f"{stage.name}/{layout.COMMIT}")
            raise
        names = self._objects.names(stage.name)
        there = {layout.parse_manifest_name(name) for name in names}
        if found is None or not there.issuperset(documents.manifests):
            self._objects.delete(f"{stage.name}/{layout.COMMIT}")
            raise SaveError(
                f"not committed: {self.place}/{stage.name} was cleared by another process meanwhile"
            )
        return found

    def _describe(
        self, name: str, names: Sequence[str], known: ReadBefore | None = None
    ) -> Committed | None:
        """Return the checkpoint in a directory that has these names, None if it is none."""
        parsed = layout.parse_stage_name(name)
        if parsed is None or layout.COMMIT not in names or set(names) & set(_CLOSED):
            return None
        if known and name in known:  # with the save's own uuid, it never stands for another
            return known[name][1]
        step, round_, _uuid = parsed
        with contextlib.suppress(FileNotFoundError, CheckpointError):
            parse_json(self._objects.read(f"{name}/{layout.COMMIT}"), layout.COMMIT)
            metadata = self._objects.read(f"{name}/{layout.METADATA}")
            document = parse_json(metadata, layout.METADATA)
            place = f"{self.place}/{name}"
            found = describe(place, layout.step_name(step, round_), document)
            if known is not None:
                known[name] = None, found
            return found
        return None

    def _refuse_other(self, stage: Stage) -> Committed | None:
        """Return the stage if it is committed; SaveError if another save of its name is."""
        ours = None
        for name in self._objects.names():
            if not name.startswith(f"{stage.final}."):
                continue
            found = self._describe(name, self._objects.names(name))
            if found is not None and name != stage.name:
                raise in_the_way(self.place, stage.final)
            ours = ours or found
        return ours
