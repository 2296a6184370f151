"""Flags of what is run: its size, its code, its restarts, its checkpoints."""

from __future__ import annotations

from elaunch.config import values
from elaunch.config.flags.flag import (
    ALWAYS,
    COUNT,
    NOBODY_JOINS,
    ON_ONE_NODE,
    WITH_PROGRAM,
    WITH_RUN_PATH,
    WITH_SPAWN,
    WITHOUT_DIR,
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
        "Number of nodes, or the least and the greatest.",
        idle={NOBODY_JOINS: "this one is by itself"},
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
        "Workers on this node: a number, or one per device of a kind.",
        keys=("slots",),
    ),
)

CODE = (
    switch(name="module", help="Run SCRIPT as a module, as 'python -m SCRIPT' does.", short="-m"),
    switch(
        name="no-python",
        help="Run SCRIPT as a program, without Python.",
        idle={WITH_RUN_PATH: ""},
    ),
    switch(name="run-path", help="Run SCRIPT by runpy.run_path in a forked process."),
    Flag(
        "start-method",
        one_of("forkserver", "spawn", "fork"),
        "forkserver",
        "How workers start: forked from a process that has imported torch (fork means the same), "
        "or as plain processes.",
        idle={WITH_PROGRAM: "the program is executed"},
    ),
    Flag(
        "role",
        Kind(values.label_or_empty, "NAME", "a name of one line"),
        "default",
        "Name of the workers' role, for ROLE_NAME and the prefix of their lines.",
    ),
    switch(name="virtual-local-rank", help="Give each worker one GPU and LOCAL_RANK=0."),
    Flag(
        "numa-binding",
        one_of("node", "socket", "exclusive", "core-complex"),
        None,
        "CPUs near its device to bind each worker to: node, socket, exclusive or core-complex.",
    ),
    own(
        "preload",
        Kind(values.modules, "[+]MODULE,...", "names of modules, or none", comma=","),
        "torch,+torch._dynamo",
        "Modules that are imported once for all forked workers; with a +, a minute into the job.",
        idle=dict.fromkeys((WITH_PROGRAM, WITH_SPAWN), "nothing is forked from a warm process"),
    ),
    own(
        "workdir",
        Kind(values.text, "DIR", "a directory"),
        None,
        "Working directory of the workers; relative paths start there.",
        short="-C",
    ),
    own(
        *("tmp", one_of("private", "shared"), "private"),
        "TMPDIR of the workers: one of this run's own, unless TMPDIR is set, or the machine's.",
    ),
)

RESTART = (
    Flag(
        "max-restarts",
        COUNT,
        "0",
        "Number of restarts without a newer checkpoint before the job fails.",
        keys=("restarts",),
    ),
    Flag(
        "monitor-interval",
        Kind(values.positive_seconds, "SECONDS", "more than 0 seconds"),
        "0.1",
        "No effect, accepted as torchrun's: elaunch does not poll.",
        idle={ALWAYS: "an exit wakes the agent, it does not poll"},
    ),
    own(
        *("restart-budget", one_of("progress", "lifetime"), "progress"),
        "Whether a newer checkpoint refills --max-restarts, or nothing does.",
        idle={WITHOUT_RESTARTS: ""},
    ),
    own(
        *("max-same-failures", Kind(values.whole(0, 100), "N", "0 (off) to 100"), "0"),
        "Number of rounds in a row with the same failure and no newer checkpoint that end the job, "
        "with exit code 78; 0: off.",
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
        "Seconds without progress after which a round counts as hung; auto: learned from the run "
        "(docs/hangs.md).",
    ),
    own(
        "progress-regex",
        Kind(values.pattern, "PATTERN", "a regular expression with at most one group"),
        None,
        "Regular expression for output lines that show progress; a group is the step, as in "
        "'step (\\d+)'.",
    ),
    switch(
        name="no-stacks",
        help="Do not read the stacks of the other workers when one fails.",
        torchrun=False,
    ),
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
        "Directory or URL where the script saves; each round resumes from the newest complete "
        "checkpoint there.",
    ),
    own(
        "init-from",
        Kind(
            values.text,
            "PATH|URL",
            "a checkpoint, or a directory or URL with some, of which the newest is taken",
        ),
        None,
        "Checkpoint of another run, from which this run begins at step 0 while it has none.",
    ),
    own(
        "checkpoint-glob",
        Kind(values.text, "PATTERN", "a pattern of file names"),
        None,
        "Pattern of the names in --checkpoint-dir that are checkpoints, as in 'step_*.pt'.",
    ),
    switch(
        name="require-resume",
        help="Fail where --checkpoint-dir has files and none can be resumed from.",
        torchrun=False,
    ),
    switch(
        name="checkpoint-local",
        help="Let each node have its own --checkpoint-dir; nodes send each other what one lacks.",
        torchrun=False,
        idle={ON_ONE_NODE: "its directory is the only one"},
    ),
    own(
        "checkpoint-replicas",
        Kind(values.whole(0, 1), "0|1", "0 or 1"),
        "0",
        "Copies of each node's part of a save(block=False) in the memory of the next node.",
        idle={ON_ONE_NODE: "no other could hold the copy"},
    ),
    own(
        "checkpoint-memory",
        Kind(values.size, "SIZE", "a number of bytes, or one with a unit: 512MiB, 8GiB"),
        None,
        "Memory of the agent for save(block=False) (default: half of what is available).",
    ),
    own(
        "checkpoint-keep-last",
        Kind(values.whole(1), "N", "1 or more"),
        None,
        "Number of newest checkpoints to keep; others go unless another rule keeps them.",
        idle={WITHOUT_DIR: ""},
    ),
    own(
        "checkpoint-keep-every",
        Kind(values.whole(1), "STEPS", "1 or more"),
        None,
        "Steps whose multiples are kept.",
        idle={WITHOUT_DIR: ""},
    ),
    own(
        "checkpoint-keep-best",
        Kind(values.best, "METRIC[:min|max]", "a metric's name, with :max where more is better"),
        None,
        "Metric whose best checkpoint is kept; the script reports it.",
        idle={WITHOUT_DIR: ""},
    ),
)
