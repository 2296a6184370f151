"""Records that the checkpoint modules pass to each other: plain frozen data.

=================  ====================================================================
record             holds
=================  ====================================================================
``Checkpoint``     a complete checkpoint of any format that a search found
``PassedOver``     something that looked like one and was not taken
``SearchOutcome``  what a search returns
``Stage``          a checkpoint that is being written, by all ranks together
``ShardHeader``    what a manifest says of one rank's shard beside its files
``Image``          a file to be written: its name and its bytes, wherever they lie
``Committed``      a committed checkpoint in elaunch's own layout
``Keep``           the rule of what is kept: ``--checkpoint-keep-last``, ``-every``, ``-best``
=================  ====================================================================
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elaunch.atonce import Writing
from elaunch.checkpoint import layout
from elaunch.errors import CheckpointError

Location = Path | str  # a directory, or an fsspec URL such as "s3://bucket/run"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    ``format`` is ``elaunch``, ``dcp``, ``huggingface``, ``accelerate``, ``deepspeed``,
    ``lightning``, ``torch.save``, ``safetensors``, ``json``, or ``directory`` for one of which
    only the files are known; ``round`` is known for elaunch's own layout only. ``uuid`` is that of
    one that agents have in memory and still write: ``path`` is where it will be.
    """

    path: Location
    step: int
    format: str
    round: int | None = None
    uuid: str = ""

    @property
    def name(self) -> str:
        """Its name, in elaunch's own layout that of ``Committed``, also at a URL."""
        name = os.path.basename(str(self.path))
        parsed = layout.parse_stage_name(name)
        return name if parsed is None else layout.step_name(*parsed[:2])

    @property
    def stage(self) -> str:
        """The name of its stage, if it is one that agents still write; else ""."""
        return f"{self.name}.{self.uuid}" if self.uuid else ""


@dataclass(frozen=True)
class PassedOver:
    """Something that looks like a checkpoint and was not taken, with the reason as text.

    ``damaged``: by its content, not because it cannot be read now.
    """

    path: Path
    reason: str
    damaged: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class SearchOutcome:
    """The newest complete checkpoint, if any, and what was passed over on the way to it.

    ``found`` is the directory that was verified, where the round is given one above it.
    """

    checkpoint: Checkpoint | None
    passed_over: tuple[PassedOver, ...] = ()
    found: Path | None = None


@dataclass(frozen=True)
class Stage:
    """A checkpoint that is being written: the same on all ranks, ``uuid`` from the chief."""

    step: int
    round: int
    uuid: str

    def __post_init__(self) -> None:
        """Refuse what would not come back from the name: CheckpointError."""
        if layout.parse_stage_name(self.name) != (self.step, self.round, self.uuid):
            raise CheckpointError(
                f"no checkpoint can be called {self.name!r}: step and round are whole numbers"
                " >= 0, the uuid letters, digits, - and _"
            )

    @property
    def name(self) -> str:
        """The directory's name while it is written: ``step-00000120.r3.<uuid>``."""
        return layout.stage_name(self.step, self.round, self.uuid)

    @property
    def final(self) -> str:
        """The directory's name once it is committed: ``step-00000120.r3``."""
        return layout.step_name(self.step, self.round)


@dataclass(frozen=True)
class ShardReport:
    """A node's report on ``rank``'s shard, to a node that commits the save.

    ``written``: it is on the disk, with this ``manifest``, its bytes as latin-1. ``writing``: it is
    being written still. ``failed``: it will not come, for this ``problem``.
    """

    do: Literal["written", "writing", "failed"]
    stage: Stage
    rank: int
    world_size: int
    manifest: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ShardHeader:
    """The header of one rank's manifest: all of it but the files.

    ``metadata`` is the rank's own user metadata: JSON values under string keys, with
    ``steps_completed``. ``copied``: another node than that rank's writes the shard, and that rank's
    may write it, too; the manifest leaves out the files' times. ``keep`` says which checkpoints may
    go when this one is committed, whichever process does that: the fields of ``Keep``, or None for
    the rule of the flags (rank 0's counts).
    """

    rank: int
    world_size: int
    run_id: str
    metadata: Mapping[str, Any]
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    copied: bool = False
    keep: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Image:
    """A file to be written: ``path`` below the stage, and its bytes, piece after piece.

    The pieces may lie in a tensor's or in an agent's memory: nothing copies them. ``beside`` is
    for an image that is written beside a training.
    """

    path: str
    pieces: Sequence[memoryview | bytes]
    beside: Writing | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint: ``place`` is its own directory or URL, ``metadata`` the user's.

    ``committed`` is in seconds since 1970, ``size`` in bytes; ``document`` is all of
    ``metadata.json``, with durations, versions, hosts.
    """

    name: str
    place: Location
    step: int
    round: int
    uuid: str
    metadata: Mapping[str, Any]
    size: int
    run_id: str = ""
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    committed: float = 0.0
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def age(self) -> tuple[int, int]:
        """Order checkpoints from old to new."""
        return (self.step, self.round)

    @property
    def next_step(self) -> int:
        """The step to go on with; 0 where a run begins, with nothing or with another's weights."""
        return self.step + 1


@dataclass(frozen=True)
class Begun(Committed):
    """Step 0 of a run: the other run's checkpoint that it begins with, or none, which is false."""

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def next_step(self) -> int:
        """The first one."""
        return 0

    @classmethod
    def of(cls, found: Committed | None) -> Begun:
        """Return the beginning with a checkpoint of another run, or with none."""
        fields: dict[str, Any] = {"name": "", "place": "", "round": 0, "uuid": "", "metadata": {}}
        return cls(**{**fields, "size": 0, **(vars(found) if found else {}), "step": 0})


ReadBefore = dict[str, tuple[object, Committed]]
"""Checkpoints as a storage has read them before: by its own names, each with a mark that changes
when its directory does."""


MODES = ("min", "max")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: those that any of the parts given names, and always the newest.

    Without any part everything stays.

    Args:
        last: the number of newest checkpoints that stay.
        every: each one whose step is a multiple of this.
        best: the one with the best value of this metric, as the script reported it.
        mode: whether the smallest (``min``) or the largest (``max``) value is the best.

    Raises:
        ValueError: a part that means nothing; names the part and the value.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Keep({name}={value!r}): a whole number, 1 or more, or None")
        if self.best is not None and not (isinstance(self.best, str) and self.best.strip()):
            raise ValueError(f"Keep(best={self.best!r}): the name of a metric, or None")
        if self.mode not in MODES:
            raise ValueError(f"Keep(mode={self.mode!r}): 'min' or 'max'")

    def __bool__(self) -> bool:
        """Whether anything may ever go."""
        return not (self.last is None and self.every is None and self.best is None)

    def to_json(self) -> str:
        """Return the rule as ``from_json`` reads it; only the parts that are given."""
        parts: dict[str, Any] = {"last": self.last, "every": self.every, "best": self.best}
        found = {name: part for name, part in parts.items() if part is not None}
        if self.best is not None:
            found["mode"] = self.mode
        return json.dumps(found)

    def describe(self) -> str:
        """Return the rule as text, as in ``the newest 3, the one with the best loss (min)``."""
        parts = []
        if self.last is not None:
            parts.append(f"the newest {self.last}" if self.last > 1 else "the newest")
        if self.every is not None:
            parts.append(f"those at multiples of {self.every} steps")
        if self.best is not None:
            parts.append(f"the one with the best {self.best} ({self.mode})")
        return ", ".join(parts) or "all"

    @classmethod
    def from_json(cls, text: str) -> Keep:
        """Return the rule of a JSON object; an empty text is no rule.

        Raises:
            ValueError: the text is no such object, or has a key that Keep does not know.
        """
        found = json.loads(text) if text.strip() else {}
        if not isinstance(found, Mapping):
            raise ValueError(f"{text!r} is not a JSON object with last, every, best and mode")
        unknown = sorted(set(found) - {"last", "every", "best", "mode"})
        if unknown:
            raise ValueError(f"{text!r}: unknown key {unknown[0]!r}")
        return cls(**found)
