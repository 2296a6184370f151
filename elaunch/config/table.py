"""The one table of flags: the command line, the variables and the job file are read by it.

A flag ``--max-restarts`` is also ``--max_restarts``, the variables ``ELAUNCH_MAX_RESTARTS`` and
``PET_MAX_RESTARTS`` (the first wins), and the key ``max_restarts`` or ``max-restarts`` of a job
file. Its kind turns the text from any of them into the value (see ``values.py``), and has the
sentence that errors show. Only torchrun's flags decide whether an abbreviation is ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from elaunch.config import endpoints, rdzvconf, values
from elaunch.config.flag import Flag, Kind, VariableFlag, one_of
from elaunch.env import HANDLED_SIGNALS, TIMER_FILE

# When a flag has no effect; checks.py knows when that is so.
ALWAYS = ""
ON_ONE_NODE = "on one node"
ALONE = "on one node by itself"
WITH_PROGRAM = "with --no-python"
WITH_RUN_PATH = "with --run-path"
WITH_SPAWN = "with --start-method spawn"
WITHOUT_RESTARTS = "without --max-restarts"

_COUNT = Kind(values.whole(0), "N", "0 or more")
_SECONDS = Kind(values.seconds, "SECONDS", "0 or more seconds")
_SIGNALS = Kind(values.signals, "SIGNAL,...", "comma-separated names of signals", comma=",")
_STREAMS = Kind(
    values.streams,
    "STREAMS",
    "0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,RANK:STREAMS",
    pairs=":",
)
_SWITCH = Kind(values.switch, "", "nothing, or =yes / =no")
_TEXTS = Kind(
    values.words, "TEXT,...", "comma-separated strings; ',,' for a comma inside one", comma=",,"
)
_own = partial(Flag, torchrun=False)
_switch = partial(Flag, kind=_SWITCH, default="no")

_SIZE = (
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

_CODE = (
    _switch(name="module", help="Start the script as 'python -m SCRIPT' would.", short="-m"),
    _switch(
        name="no-python",
        help="Start the script as a program of its own, without Python.",
        idle={WITH_RUN_PATH: ""},
    ),
    _switch(name="run-path", help="Run the script by runpy.run_path in a forked process."),
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
    _switch(name="virtual-local-rank", help="Give each worker one GPU and LOCAL_RANK=0."),
    Flag(
        "numa-binding",
        one_of("node", "socket", "exclusive", "core-complex"),
        None,
        "Bind each worker to the CPUs near its GPU.",
    ),
    _own(
        "preload",
        Kind(values.modules, "[+]MODULE,...", "names of modules, or none", comma=","),
        "torch,+torch._dynamo",
        "Modules that the fork server imports once for all; with a +: later, for the next rounds.",
        idle=dict.fromkeys((WITH_PROGRAM, WITH_SPAWN), "nothing is forked from a warm process"),
    ),
    _own(
        "workdir",
        Kind(values.text, "DIR", "a directory"),
        None,
        "Directory that the workers start in; relative paths start there.",
        short="-C",
    ),
    _own(
        *("tmp", one_of("private", "shared"), "private"),
        "Give the workers a TMPDIR of this run's own, unless TMPDIR is set, or the machine's.",
    ),
)

_RESTART = (
    Flag(
        "max-restarts",
        _COUNT,
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
    _own(
        *("restart-budget", one_of("progress", "lifetime"), "progress"),
        "Whether a newer checkpoint refills the restarts, or the job has them once.",
        idle={WITHOUT_RESTARTS: ""},
    ),
    _own(
        *("max-same-failures", Kind(values.whole(0, 100), "N", "0 (off) to 100"), "0"),
        "End the job, with 78, after N rounds in a row that fail for one cause without progress.",
        idle={WITHOUT_RESTARTS: ""},
    ),
    _own(
        "hang-timeout",
        Kind(
            values.hang_timeout,
            "SECONDS|auto|off",
            "more than 0 seconds, auto (learned from the run) or off",
        ),
        "off",
        "How long a worker may make no progress before the round counts as hung (docs/hangs.md).",
    ),
    _own(
        "progress-regex",
        Kind(values.pattern, "PATTERN", "a regular expression with at most one group"),
        None,
        "Lines of the workers that show progress; a group in it is the step, as in 'step (\\d+)'.",
    ),
    _switch(name="no-stacks", help="Ask no worker where it is when another fails.", torchrun=False),
)

_CHECKPOINT = (
    _own(
        "checkpoint-dir",
        Kind(
            values.text,
            "DIR|URL",
            "a directory, which is made if it is not there, or a URL that fsspec knows",
        ),
        None,
        "Where the script saves; each round resumes from the newest complete checkpoint there.",
    ),
    _own(
        "init-from",
        Kind(
            values.text,
            "PATH|URL",
            "a checkpoint, or a directory or URL with some, of which the newest is taken",
        ),
        None,
        "Begin at step 0 from another run's checkpoint, while this run has none of its own.",
    ),
    _own(
        "checkpoint-glob",
        Kind(values.text, "PATTERN", "a pattern of file names"),
        None,
        "Which names in the checkpoint directory are checkpoints, as in 'step_*.pt'.",
    ),
    _switch(
        name="require-resume",
        help="Start nothing afresh where the checkpoint directory has files and none can be "
        "resumed.",
        torchrun=False,
    ),
    _switch(
        name="checkpoint-local",
        help="Each node has a checkpoint directory of its own; what a node lacks, the others give "
        "it.",
        torchrun=False,
        idle={ON_ONE_NODE: "its directory is the only one"},
    ),
    _own(
        "checkpoint-replicas",
        Kind(values.whole(0, 1), "0|1", "0 or 1"),
        "0",
        "Copies of each node's part of a save in the next node's memory, so a node may be lost.",
        idle={ON_ONE_NODE: "no other could hold the copy"},
    ),
    _own(
        "checkpoint-memory",
        Kind(values.size, "SIZE", "a number of bytes, or one with a unit: 512MiB, 8GiB"),
        None,
        "Memory of the agent for saves with block=False (default: half of what is available).",
    ),
    _own(
        "checkpoint-keep-last",
        Kind(values.whole(1), "N", "1 or more"),
        None,
        "Keep so many of the newest checkpoints; older ones go unless another rule keeps them.",
    ),
    _own(
        "checkpoint-keep-every",
        Kind(values.whole(1), "STEPS", "1 or more"),
        None,
        "Keep each checkpoint whose step is a multiple of this.",
    ),
    _own(
        "checkpoint-keep-best",
        Kind(values.best, "METRIC[:min|max]", "a metric's name, with :max where more is better"),
        None,
        "Keep the checkpoint with the best value of a metric that the script reports.",
    ),
)

_STOP = (
    Flag(
        "signals-to-handle",
        _SIGNALS,
        HANDLED_SIGNALS,
        "Signals that are passed to the workers and end the job.",
    ),
    Flag(
        "shutdown-timeout",
        _SECONDS,
        "30",
        "Time from SIGTERM to SIGKILL when a signal ends the job.",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    _own(
        "forward-signals", _SIGNALS, "", "Signals that are passed to the workers and end nothing."
    ),
    _own(
        "sibling-grace",
        _SECONDS,
        "5",
        "Time from SIGTERM to SIGKILL for the other workers when one fails; by default not "
        "more than --shutdown-timeout.",
    ),
    _own(
        "preempt-signals",
        Kind(values.signals, "SIGNAL,...", "comma-separated names of signals, or none", comma=","),
        "SIGUSR1,SIGUSR2",
        "Signals at which the workers are asked to save and to end (docs/preemption.md).",
    ),
    _own(
        "preempt-at",
        Kind(
            values.moment,
            "+3h|TIME|slurm[-2m]",
            "+30m, +3h, a local time as 2026-11-21T18:00, or slurm, slurm-5m",
        ),
        None,
        "When to do the same: after so long, at a time, or before the end of the Slurm job.",
    ),
    _own(
        *("notice-command", Kind(values.text, "COMMAND", "a command of the shell"), None),
        "Program that prints 'preempt [+120s] TEXT' when this machine will be taken.",
    ),
    _own(
        *("on-event", Kind(values.hook, "CMD|URL", "a command of the shell, or a URL"), None),
        "Command or URL that gets what happens to the job, as JSON (docs/status.md).",
    ),
    _own(
        "exit-codes",
        one_of("elaunch", "torchrun"),
        "elaunch",
        "End with the first failed worker's code, or with 1 for every failure as torchrun does.",
    ),
)

_OUTPUT = (
    Flag(
        "log-dir",
        Kind(values.text, "DIR", "a directory that can be written, or /dev/null"),
        None,
        "Where the workers' log files go (default: the run directory; /dev/null: nowhere).",
    ),
    Flag("redirects", _STREAMS, "0", "Streams that go to the log files only.", short="-r"),
    Flag(
        "tee",
        _STREAMS,
        "0",
        "Streams that go to the log files, and to the console with a prefix.",
        short="-t",
    ),
    Flag(
        "local-ranks-filter",
        Kind(values.ranks, "RANK,...", "comma-separated local ranks", comma=","),
        "",
        "Workers whose lines reach the console; the files have all.",
        aliases=("log-ranks",),
    ),
    Flag(
        "log-line-prefix-template",
        Kind(values.text, "TEMPLATE", "a text"),
        "",
        "What a tee'd line begins with; ${role_name}, ${local_rank}, ${rank}, ${hostname} are "
        "filled in.",
    ),
    *(
        Flag(
            f"duplicate-{name}-filters",
            _TEXTS,
            "",
            f"Copy lines of {name} that contain one of these to filtered_{name}.log.",
        )
        for name in ("stdout", "stderr")
    ),
    Flag(
        "logs-specs",
        Kind(values.label, "NAME", ""),
        None,
        "default, or refused: a class of torch's.",
    ),
    Flag(
        "event-log-handler",
        one_of("null", "console", "dynamic_rendezvous"),
        "null",
        "Where the job's events go: nowhere, or to stderr as lines of JSON.",
    ),
)

_MEETING = (
    _switch(name="standalone", help="One node by itself; the rendezvous flags are not needed."),
    Flag(
        "rdzv-backend",
        replace(one_of("static", "c10d", "etcd"), read=values.backend),
        "static",
        "How nodes meet: node 0 hosts a TCPStore, the node at the endpoint does, or through etcd.",
    ),
    Flag(
        "rdzv-endpoint",
        Kind(
            endpoints.endpoint,
            "HOST[:PORT],...",
            "host, host:port or [IPv6]:port; for etcd several of them by comma",
            comma=",",
        ),
        "",
        "Where nodes meet; several by comma for etcd.",
    ),
    Flag(
        "rdzv-id",
        Kind(values.label_or_empty, "ID", "a name of one line"),
        None,
        "The run's id, the same on all nodes (default: the script's name; on one node with "
        "six hex digits).",
        aliases=("run-id",),
    ),
    Flag(
        "rdzv-conf",
        Kind(
            rdzvconf.rdzv_conf,
            "KEY=VALUE,...",
            "key=value,key=value",
            pairs="=",
            show=rdzvconf.masked,
        ),
        "",
        "More settings of the rendezvous.",
    ),
    Flag(
        "node-rank",
        _COUNT,
        "0",
        "Rank of this node (static), or its place among newcomers (c10d, etcd).",
    ),
    Flag(
        "master-addr",
        Kind(values.text, "HOST", "a name or an address"),
        None,
        "Node 0 of the static backend; MASTER_ADDR on one node (default: 127.0.0.1).",
    ),
    Flag(
        "master-port",
        Kind(values.whole(0, 65535), "PORT", "0 to 65535; on one node 0 for a free port"),
        None,
        "Port of the static backend (default: 29500); MASTER_PORT on one node (default: free).",
    ),
    Flag(
        "local-addr",
        Kind(values.text, "HOST", "a name or an address of this machine"),
        None,
        "Address that this node gives to others; MASTER_ADDR on one node.",
    ),
    _own(
        "rdzv-secret-file",
        Kind(values.text, "PATH", "a file that only its owner may read and write"),
        None,
        "File with a secret that all nodes have: who does not know it cannot take part.",
        idle={ALONE: ""},
    ),
    _own(
        "on-join",
        one_of("graceful", "now", "never"),
        "graceful",
        "When a new node starts to take part: after a moment for others to come and for the "
        "workers to save, at once, or in the next round that begins for another reason.",
        idle={ALONE: ""},
    ),
    _switch(
        name="strict-symmetry",
        help="End the job if its nodes do not run the same thing.",
        torchrun=False,
        idle={ALONE: ""},
    ),
)

_OTHER = (
    _own(
        "file",
        Kind(values.text, "JOB.YAML", "a YAML file"),
        None,
        "Read a job file (docs/job-file.md); flags on the command line win over it.",
        short="-f",
    ),
    _own("name", Kind(values.label, "NAME", "a name"), None, "Name of the job in reports."),
    _switch(
        name="detach",
        help="Go on in the background: print the run id, and leave the rest to status, logs, stop.",
        torchrun=False,
        short="-d",
    ),
    _switch(name="dry-run", help="Print what would be started, and start nothing.", torchrun=False),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Size of the job": _SIZE,
    "What is started": _CODE,
    "Restarts": _RESTART,
    "Checkpoints": _CHECKPOINT,
    "Signals and stopping": _STOP,
    "Output and logs": _OUTPUT,
    "Rendezvous": _MEETING,
    "Other": _OTHER,
}
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)

VARIABLES = (
    VariableFlag(
        "log-level",
        Kind(values.log_level, "", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        "WARNING",
        "How much the agent says.",
        variables=("LOGLEVEL",),
    ),
    VariableFlag(
        "health-check-port",
        Kind(values.whole(0, 65535), "", "a port, 0 to 65535"),
        None,
        "Port of the health check.",
        variables=("TORCHELASTIC_HEALTH_CHECK_PORT",),
    ),
    VariableFlag(
        *("file-timer", Kind(values.switch, "", "1 or 0"), "no"),
        "Kill workers whose timers of torch.distributed.elastic.timer expire.",
        variables=("TORCHELASTIC_ENABLE_FILE_TIMER",),
    ),
    VariableFlag(
        "timer-file",
        Kind(values.text, "", "a path where nothing is, or a named pipe that nobody reads"),
        None,
        "Named pipe of these timers.",
        variables=(TIMER_FILE,),
    ),
    VariableFlag(
        *("interpreter", Kind(values.text, "", "a program"), None, "Python of the workers."),
        variables=("PYTHON_EXEC",),
    ),
)

TABLE: Mapping[str, Flag] = {flag.name: flag for flag in (*FLAGS, *VARIABLES)}
USUAL = (
    *("nnodes", "nproc-per-node", "module", "max-restarts", "hang-timeout", "checkpoint-dir"),
    *("log-dir", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "file", "detach", "dry-run"),
)
"""The flags that most jobs need no more than: ``elaunch run --help`` shows these."""

ETCD_USER = "ELAUNCH_ETCD_USER"
ETCD_PASSWORD = "ELAUNCH_ETCD_PASSWORD"
SECRET_VARIABLES = (ETCD_USER, ETCD_PASSWORD, "ELAUNCH_RDZV_CONF", "PET_RDZV_CONF")
"""Taken out of the environment of workers: a password that a worker has is in its core dumps, in
its tracker's list of variables, and in every subprocess. ``--rdzv-conf`` may hold one."""
