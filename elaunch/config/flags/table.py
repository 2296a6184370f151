"""The one table of flags: the command line, the variables and the job file are read by it.

A flag ``--max-restarts`` is also ``--max_restarts``, the variables ``ELAUNCH_MAX_RESTARTS`` and
``PET_MAX_RESTARTS`` (the first wins), and the key ``max_restarts`` or ``max-restarts`` of a job
file. ``read`` turns the text from any of them into the value (see ``values.py``); ``allowed`` is
the sentence that an error and the help show. A flag with ``torchrun=True`` has torchrun's name,
default and meaning; only such flags decide whether an abbreviation is ambiguous.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.config import moments
from elaunch.config.flags import checkpoint, meeting, values
from elaunch.config.flags.flag import CODE, OTHER, OUTPUT, RESTART, SIZE, STOP, Flag, one_of, switch

_STREAMS = "0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,RANK:STREAMS"
_LIST = "comma-separated strings; ',,' for a comma inside one"

_TORCHRUN: tuple[Flag, ...] = (
    Flag(
        "nnodes",
        values.nnodes,
        "1:1",
        SIZE,
        "Number of nodes, or the range of it.",
        "N|MIN:MAX",
        "N or MIN:MAX, 1 or more",
        keys=("nodes",),
    ),
    Flag(
        "nproc-per-node",
        values.nproc,
        "1",
        SIZE,
        "Workers on this node: a number, or one for each device of a kind.",
        "N|cpu|gpu|auto|xpu",
        "a number of workers (1 or more), cpu, gpu, auto, xpu or another accelerator's name",
        keys=("slots",),
    ),
    switch("module", CODE, "Start the script as 'python -m SCRIPT' would.", short="-m"),
    switch("no-python", CODE, "Start the script as a program of its own, without Python."),
    switch("run-path", CODE, "Run the script by runpy.run_path in a forked process."),
    one_of(
        "start-method",
        ("forkserver", "spawn", "fork"),
        "forkserver",
        CODE,
        "Fork workers from a process that has imported torch (fork means the same), or start "
        "plain processes.",
    ),
    Flag(
        "role",
        values.label_or_empty,
        "default",
        CODE,
        "Role of the workers: ROLE_NAME and the prefix of their lines.",
        "NAME",
        "a name of one line",
    ),
    switch("virtual-local-rank", CODE, "Give each worker one GPU and LOCAL_RANK=0."),
    one_of(
        "numa-binding",
        ("node", "socket", "exclusive", "core-complex"),
        None,
        CODE,
        "Bind each worker to the CPUs near its GPU.",
    ),
    Flag(
        "max-restarts",
        values.whole(0),
        "0",
        RESTART,
        "Restarts without progress after which the job fails.",
        "N",
        "0 or more",
        keys=("restarts",),
    ),
    Flag(
        "monitor-interval",
        values.positive_seconds,
        "0.1",
        RESTART,
        "Accepted for torchrun's sake: elaunch is woken by an exit and does not poll.",
        "SECONDS",
        "more than 0 seconds",
    ),
    Flag(
        "signals-to-handle",
        values.signals,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        STOP,
        "Signals that are passed to the workers and end the job.",
        "SIGNAL,...",
        "comma-separated names of signals",
    ),
    Flag(
        "shutdown-timeout",
        values.seconds,
        "30",
        STOP,
        "Time from SIGTERM to SIGKILL when a signal ends the job.",
        "SECONDS",
        "0 or more seconds",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Flag(
        "log-dir",
        values.text,
        None,
        OUTPUT,
        "Where the workers' log files go (default: the run directory; /dev/null: nowhere).",
        "DIR",
        "a directory that can be written, or /dev/null",
    ),
    Flag(
        "redirects",
        values.streams,
        "0",
        OUTPUT,
        "Streams that go to the log files only.",
        "STREAMS",
        _STREAMS,
        short="-r",
    ),
    Flag(
        "tee",
        values.streams,
        "0",
        OUTPUT,
        "Streams that go to the log files, and to the console with a prefix.",
        "STREAMS",
        _STREAMS,
        short="-t",
    ),
    Flag(
        "local-ranks-filter",
        values.ranks,
        "",
        OUTPUT,
        "Workers whose lines reach the console; the files have all.",
        "RANK,...",
        "comma-separated local ranks",
        aliases=("log-ranks",),
    ),
    Flag(
        "duplicate-stdout-filters",
        values.words,
        "",
        OUTPUT,
        "Copy lines of stdout that contain one of these to filtered_stdout.log.",
        "TEXT,...",
        _LIST,
    ),
    Flag(
        "duplicate-stderr-filters",
        values.words,
        "",
        OUTPUT,
        "Copy lines of stderr that contain one of these to filtered_stderr.log.",
        "TEXT,...",
        _LIST,
    ),
    Flag(
        "logs-specs", values.label, None, OUTPUT, "default, or refused: a class of torch's.", "NAME"
    ),
    one_of(
        "event-log-handler",
        ("null", "console", "dynamic_rendezvous"),
        "null",
        OUTPUT,
        "Where the job's events go: nowhere, or to stderr as lines of JSON.",
    ),
)

_OWN: tuple[Flag, ...] = (
    Flag(
        "preload",
        values.modules,
        "torch,+torch._dynamo",
        CODE,
        "Modules that the fork server imports once for all; with a +: later, for the next rounds.",
        "[+]MODULE,...",
        "names of modules, or none",
    ),
    Flag(
        "workdir",
        values.text,
        None,
        CODE,
        "Directory that the workers start in; relative paths start there.",
        "DIR",
        "a directory",
        short="-C",
    ),
    one_of(
        "tmp",
        ("private", "shared"),
        "private",
        CODE,
        "Give the workers a TMPDIR of this run's own, unless TMPDIR is set, or the machine's.",
    ),
    one_of(
        "restart-budget",
        ("progress", "lifetime"),
        "progress",
        RESTART,
        "Whether a newer checkpoint refills the restarts, or the job has them once.",
    ),
    Flag(
        "forward-signals",
        values.signals,
        "",
        STOP,
        "Signals that are passed to the workers and end nothing.",
        "SIGNAL,...",
        "comma-separated names of signals",
    ),
    Flag(
        "sibling-grace",
        values.seconds,
        "5",
        STOP,
        "Time from SIGTERM to SIGKILL for the other workers when one fails; by default not more "
        "than --shutdown-timeout.",
        "SECONDS",
        "0 or more seconds",
    ),
    Flag(
        "preempt-signals",
        values.signals,
        "SIGUSR1,SIGUSR2",
        STOP,
        "Signals at which the workers are asked to save and to end (docs/preemption.md).",
        "SIGNAL,...",
        "comma-separated names of signals, or none",
    ),
    Flag(
        "preempt-at",
        moments.moment,
        None,
        STOP,
        "When to do the same: after so long, at a time, or before the end of the Slurm job.",
        "+3h|TIME|slurm[-2m]",
        "+30m, +3h, a local time as 2026-11-21T18:00, or slurm, slurm-5m",
    ),
    Flag(
        "hang-timeout",
        values.hang_timeout,
        "off",
        RESTART,
        "How long a worker may make no progress before the round counts as hung (docs/hangs.md).",
        "SECONDS|auto|off",
        "more than 0 seconds, auto (learned from the run) or off",
    ),
    Flag(
        "progress-regex",
        values.pattern,
        None,
        RESTART,
        "Lines of the workers that show progress; a group in it is the step, as in 'step (\\d+)'.",
        "PATTERN",
        "a regular expression with at most one group",
    ),
    one_of(
        "exit-codes",
        ("elaunch", "torchrun"),
        "elaunch",
        STOP,
        "End with the first failed worker's code, or with 1 for every failure as torchrun does.",
    ),
    Flag(
        "file",
        values.text,
        None,
        OTHER,
        "Read a job file (docs/job-file.md); flags on the command line win over it.",
        "JOB.YAML",
        "a YAML file",
        short="-f",
    ),
    Flag("name", values.label, None, OTHER, "Name of the job in reports.", "NAME", "a name"),
    switch(
        "detach",
        OTHER,
        "Go on in the background: print the run id, and leave the rest to status, logs, stop.",
        short="-d",
    ),
    switch("dry-run", OTHER, "Print what would be started, and start nothing."),
)

FLAGS = (
    *_TORCHRUN,
    *meeting.TORCHRUN,
    *(replace(flag, torchrun=False) for flag in (*_OWN, *checkpoint.OWN, *meeting.OWN)),
)

USUAL = (
    "nnodes",
    "nproc-per-node",
    "module",
    "max-restarts",
    "hang-timeout",
    "checkpoint-dir",
    "log-dir",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "file",
    "detach",
    "dry-run",
)
"""The flags that most jobs need no more than: ``elaunch run --help`` shows these."""
