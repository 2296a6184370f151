"""The flags about checkpoints; ``table`` takes them in."""

from __future__ import annotations

from elaunch.config.flags import amounts, values
from elaunch.config.flags.flag import CHECKPOINT, Flag, switch

OWN: tuple[Flag, ...] = (
    Flag(
        "checkpoint-dir",
        values.text,
        None,
        CHECKPOINT,
        "Where the script saves; each round resumes from the newest complete checkpoint there.",
        "DIR|URL",
        "a directory, which is made if it is not there, or a URL that fsspec knows",
    ),
    Flag(
        "init-from",
        values.text,
        None,
        CHECKPOINT,
        "Begin at step 0 from another run's checkpoint, while this run has none of its own.",
        "PATH|URL",
        "a checkpoint, or a directory or URL with some, of which the newest is taken",
    ),
    Flag(
        "checkpoint-glob",
        values.text,
        None,
        CHECKPOINT,
        "Which names in the checkpoint directory are checkpoints, as in 'step_*.pt'.",
        "PATTERN",
        "a pattern of file names",
    ),
    switch(
        "require-resume",
        CHECKPOINT,
        "Start nothing afresh where the checkpoint directory has files and none can be resumed.",
    ),
    switch(
        "checkpoint-local",
        CHECKPOINT,
        "Each node has a checkpoint directory of its own; what a node lacks, the others give it.",
    ),
    Flag(
        "checkpoint-replicas",
        values.whole(0, 1),
        "0",
        CHECKPOINT,
        "Copies of each node's part of a save in the next node's memory, so a node may be lost.",
        "0|1",
        "0 or 1",
    ),
    Flag(
        "checkpoint-memory",
        amounts.size,
        None,
        CHECKPOINT,
        "Memory of the agent for saves with block=False (default: half of what is available).",
        "SIZE",
        "a number of bytes, or one with a unit: 512MiB, 8GiB",
    ),
    Flag(
        "checkpoint-keep-last",
        values.whole(1),
        None,
        CHECKPOINT,
        "Keep so many of the newest checkpoints; older ones go unless another rule keeps them.",
        "N",
        "1 or more",
    ),
    Flag(
        "checkpoint-keep-every",
        values.whole(1),
        None,
        CHECKPOINT,
        "Keep each checkpoint whose step is a multiple of this.",
        "STEPS",
        "1 or more",
    ),
    Flag(
        "checkpoint-keep-best",
        amounts.best,
        None,
        CHECKPOINT,
        "Keep the checkpoint with the best value of a metric that the script reports.",
        "METRIC[:min|max]",
        "a metric's name, with :max where more is better",
    ),
)
