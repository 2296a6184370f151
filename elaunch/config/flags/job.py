"""Flags of what is run: its size, its code, its restarts, its checkpoints."""

from __future__ import annotations

from elaunch.config import values
from elaunch.config.flags.flag import (
    ALWAYS,
    COUNT,
    ON_ONE_NODE,
    WITH_PROGRAM,
    WITH_RUN_PATH,
    WITH_SPAWN,
    WITHOUT_RESTARTS,
    Flag,
    Kind,
    one_of,
    own,
    switch,
)

SIZE = (
    Flag(
        "nnodes",
        Kind(values.nnodes, "N|MIN:MAX", "N or MIN:MAX, 1 or more"),
        "1:1",
        "Number of nodes, or the range of it.",
        keys=("nodes",),
    ),
    Flag(
        "nproc-per-node",
        Kind(
            values.nproc,
            "N|cpu|gpu|auto|xpu",
            "a number of workers (1 or more), cpu, gpu, auto, xpu or another accelerator's name",
        ),
        "1",
        "Workers on this node: a number, or one for each device of a kind.",
        keys=("slots",),
    ),
)

CODE = (
    switch(name="module", help="Start the script as 'python -m SCRIPT' would.", short="-m"),
    switch(
        name="no-python",
        help="Start the script as a program of its own, without Python.",
        idle={WITH_RUN_PATH: ""},
    ),
    switch(name="run-path", help="Run the script by runpy.run_path in a forked process."),
    Flag(
        "start-method",
        one_of("forkserver", "spawn", "fork"),
        "forkserver",
        "Fork workers from a process that has imported torch (fork means the same), or start "
        "plain processes.",
        idle={WITH_PROGRAM: "the program is executed"},
    ),
    Flag(
        "role",
        Kind(values.label_or_empty, "NAME", "a name of one line"),
        "default",
        "Role of the workers: ROLE_NAME and the prefix of their lines.",
    ),
    switch(name="virtual-local-rank", help="Give each worker one GPU and LOCAL_RANK=0."),
    Flag(
        "numa-binding",
        one_of("node", "socket", "exclusive", "core-complex"),
        None,
        "Bind each worker to the CPUs near its GPU.",
    ),
    own(
        "preload",
        Kind(values.modules, "[+]MODULE,...", "names of modules, or none", comma=","),
        "torch,+torch._dynamo",
        "Modules that the fork server imports once for all; with a +: later, for the next rounds.",
        idle=dict.fromkeys((WITH_PROGRAM, WITH_SPAWN), "nothing is forked from a warm process"),
    ),
    own(
        "workdir",
        Kind(values.text, "DIR", "a directory"),
        None,
        "Directory that the workers start in; relative paths start there.",
        short="-C",
    ),
    own(
        *("tmp", one_of("private", "shared"), "private"),
        "Give the workers a TMPDIR of this run's own, unless TMPDIR is set, or the machine's.",
    ),
)

RESTART = (
    Flag(
        "max-restarts",
        COUNT,
        "0",
        "Restarts without progress after which the job fails.",
        keys=("restarts",),
    ),
    Flag(
        "monitor-interval",
        Kind(values.positive_seconds, "SECONDS", "more than 0 seconds"),
        "0.1",
        "Accepted for torchrun's sake: elaunch is woken by an exit and does not poll.",
        idle={ALWAYS: "an exit wakes the agent, it does not poll"},
    ),
    own(
        *("restart-budget", one_of("progress", "lifetime"), "progress"),
        "Whether a newer checkpoint refills the restarts, or the job has them once.",
        idle={WITHOUT_RESTARTS: ""},
    ),
    own(
        *("max-same-failures", Kind(values.whole(0, 100), "N", "0 (off) to 100"), "0"),
        "End the job, with 78, after N rounds in a row that fail for one cause without progress.",
        idle={WITHOUT_RESTARTS: ""},
    ),
    own(
        "hang-timeout",
        Kind(
            values.hang_timeout,
            "SECONDS|auto|off",
            "more than 0 seconds, auto (learned from the run) or off",
        ),
        "off",
        "How long a worker may make no progress before the round counts as hung (docs/hangs.md).",
    ),
    own(
        "progress-regex",
        Kind(values.pattern, "PATTERN", "a regular expression with at most one group"),
        None,
        "Lines of the workers that show progress; a group in it is the step, as in 'step (\\d+)'.",
    ),
    switch(name="no-stacks", help="Ask no worker where it is when another fails.", torchrun=False),
)

CHECKPOINT = (
    own(
        "checkpoint-dir",
        Kind(
            values.text,
            "DIR|URL",
            "a directory, which is made if it is not there, or a URL that fsspec knows",
        ),
        None,
        "Where the script saves; each round resumes from the newest complete checkpoint there.",
    ),
    own(
        "init-from",
        Kind(
            values.text,
            "PATH|URL",
            "a checkpoint, or a directory or URL with some, of which the newest is taken",
        ),
        None,
        "Begin at step 0 from another run's checkpoint, while this run has none of its own.",
    ),
    own(
        "checkpoint-glob",
        Kind(values.text, "PATTERN", "a pattern of file names"),
        None,
        "Which names in the checkpoint directory are checkpoints, as in 'step_*.pt'.",
    ),
    switch(
        name="require-resume",
        help="Start nothing afresh where the checkpoint directory has files and none can be "
        "resumed.",
        torchrun=False,
    ),
    switch(
        name="checkpoint-local",
        help="Each node has a checkpoint directory of its own; what a node lacks, the others give "
        "it.",
        torchrun=False,
        idle={ON_ONE_NODE: "its directory is the only one"},
    ),
    own(
        "checkpoint-replicas",
        Kind(values.whole(0, 1), "0|1", "0 or 1"),
        "0",
        "Copies of each node's part of a save in the next node's memory, so a node may be lost.",
        idle={ON_ONE_NODE: "no other could hold the copy"},
    ),
    own(
        "checkpoint-memory",
        Kind(values.size, "SIZE", "a number of bytes, or one with a unit: 512MiB, 8GiB"),
        None,
        "Memory of the agent for saves with block=False (default: half of what is available).",
    ),
    own(
        "checkpoint-keep-last",
        Kind(values.whole(1), "N", "1 or more"),
        None,
        "Keep so many of the newest checkpoints; older ones go unless another rule keeps them.",
    ),
    own(
        "checkpoint-keep-every",
        Kind(values.whole(1), "STEPS", "1 or more"),
        None,
        "Keep each checkpoint whose step is a multiple of this.",
    ),
    own(
        "checkpoint-keep-best",
        Kind(values.best, "METRIC[:min|max]", "a metric's name, with :max where more is better"),
        None,
        "Keep the checkpoint with the best value of a metric that the script reports.",
    ),
)
