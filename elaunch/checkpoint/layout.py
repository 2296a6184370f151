"""elaunch's own checkpoint layout: every file name and every document of it.

::

    CHECKPOINT_DIR/
      run.json                             whose directory this is
      .lock                                flock()ed by the job that writes here
      .stage/step-00000120.r3.<uuid>/      being written in round 3; nobody reads it
      .stage/….commit-<random>/            the same while one process, and it alone, commits it
      .quarantine/step-00000120.r3/        failed verification; nobody reads it
      .quarantine/step-….reason.json       why
      .pins/step-00000120.r3               an empty file: retention leaves the checkpoint alone
      .trash/step-….<random>/              renamed before it is deleted
      .probe/<nonce>                       an agent's mark, by which others see that they share it
      step-00000120.r3/                    step 120, written in round 3, committed
        …                                  what the script wrote
        manifest.rank-00000.json           one per rank
        metadata.json
        COMMIT                             written last

    run.json   {"schema": 1, "run_id": "digits", "given": true, "created": 1767225600.0}
    manifest   {"schema": 1, "rank": 0, "world_size": 2, "step": 120, "round": 3,
                "run_id": "digits", "uuid": "…", "host": "a", "pid": 4711,
                "metadata": {"steps_completed": 120, …},
                "files": [{"path": "model.pt", "size": 4096, "checksum": "crc32c:<hex>"}]}
    metadata   {"schema": 1, "step": 120, "round": 3, "run_id": "digits", "uuid": "…",
                "world_size": 2, "metadata": {…merged…}, "metrics": {"loss": 0.5},
                "versions": {"elaunch": "0.1.0", "python": "3.11.7"}, "started": …,
                "committed": …, "durations": {…}, "hosts": ["a"], "size": 4096, "files": 1}
    COMMIT     {"schema": 1, "digest": "sha256:<hex>", "metadata": "sha256:<hex>"}
    reason     {"schema": 1, "name": "step-00000120.r3", "reason": "…", "at": 1767225600.0}

A path in a manifest is relative to the checkpoint's directory and stays inside it. The digest is
the SHA-256 of the manifests' bytes, one after the other in the order of their names: what
``cat manifest.rank-*.json | sha256sum`` prints in the C locale; COMMIT's ``metadata`` is that of
``metadata.json``. Times are seconds since 1970, durations seconds, sizes bytes. A manifest has all
that a commit needs, so that any process can commit a complete stage from its content alone, also
``keep``, the fields of elaunch.Keep, where the save brings a rule of its own; ``metadata.json`` has
it, too. Readers ignore keys that they do not know and refuse another ``schema``.

On storage that cannot rename (fsspec URLs) the files are in ``step-00000120.r3.<uuid>/`` for good,
and COMMIT is put last: a directory without it does not exist for readers. A checkpoint that is to
go gets the marker ``REMOVED``, a damaged one ``QUARANTINED`` (the reason); both lose COMMIT.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

SCHEMA = 1
RUN = "run.json"
LOCK = ".lock"
STAGE = ".stage"
QUARANTINE = ".quarantine"
REASON = ".reason.json"
PINS = ".pins"
TRASH = ".trash"
PROBE = ".probe"
COMMIT = "COMMIT"
METADATA_SUM = "metadata"  # the key of COMMIT that has the checksum of metadata.json
METADATA = "metadata.json"
QUARANTINED = "QUARANTINED"
REMOVED = "REMOVED"
CHECKSUM = "sha256"  # of documents; of files: see elaunch.checkpoint.storage.checksums
TEMPORARY = ".tmp-elaunch-"  # what a file is called until it is whole; never a user's name
PRIVATE = ".rank-"  # directory of one rank inside a stage
STEPS_COMPLETED = "steps_completed"  # the key that every checkpoint's user metadata has

_STEP = re.compile(r"step-([0-9]+)\.r([0-9]+)")
_STAGE = re.compile(r"step-([0-9]+)\.r([0-9]+)\.([0-9A-Za-z_-]+)")
_AT_URL = re.compile(r"step-[0-9]+\.r[0-9]+\.[0-9a-f-]{32,36}")
_CLAIM = re.compile(r"(.+)\.commit-[0-9a-f]+")
_MANIFEST = re.compile(r"manifest\.rank-([0-9]+)\.json")


def step_name(step: int, round_: int) -> str:
    """Return the directory name of the checkpoint of ``step`` that ``round_`` wrote."""
    return f"step-{step:08d}.r{round_}"


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return (step, round) of a directory name of this layout, or None for any other name."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def stage_name(step: int, round_: int, uuid: str) -> str:
    """Return the directory name, below ``STAGE``, of a checkpoint that is being written."""
    return f"{step_name(step, round_)}.{uuid}"


def parse_stage_name(name: str) -> tuple[int, int, str] | None:
    """Return (step, round, uuid) of a stage's directory name, or None for any other name."""
    match = _STAGE.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def is_name_at_url(name: str) -> bool:
    """Tell whether a name is that of a checkpoint on storage that cannot rename."""
    return _AT_URL.fullmatch(name) is not None


def claim_name(stage: str) -> str:
    """Return a new name for the stage of this name while one process commits it."""
    return f"{stage}.commit-{secrets.token_hex(4)}"


def unclaimed(name: str) -> str:
    """Return the stage's name of a directory below ``STAGE`` that may be claimed."""
    match = _CLAIM.fullmatch(name)
    return match[1] if match else name


def manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest.rank-{rank:05d}.json"


def parse_manifest_name(name: str) -> int | None:
    """Return the rank whose manifest has this name, or None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def private_name(rank: int) -> str:
    """Return the name of a rank's own directory inside a stage."""
    return f"{PRIVATE}{rank:05d}"


def is_reserved(name: str) -> bool:
    """Tell whether a name in a checkpoint's top directory is one that only elaunch may write."""
    return (
        name in (COMMIT, METADATA, QUARANTINED, REMOVED)
        or name.startswith((TEMPORARY, PRIVATE))
        or parse_manifest_name(name) is not None
    )


def checksum(content: bytes) -> str:
    """Return the SHA-256 of a document as the layout writes it."""
    return f"{CHECKSUM}:{hashlib.sha256(content).hexdigest()}"


def digest(manifests: Mapping[str, bytes]) -> str:
    """Return COMMIT's digest of the manifests, given as name → bytes."""
    total = hashlib.sha256()
    for name in sorted(manifests):
        total.update(manifests[name])
    return f"{CHECKSUM}:{total.hexdigest()}"
