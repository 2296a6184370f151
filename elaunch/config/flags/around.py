"""Flags of what is around the workers: signals, output, the other nodes."""

from __future__ import annotations

from msgspec.structs import replace

from elaunch.config import endpoints, rdzvconf, values
from elaunch.config.flags.flag import (
    ALONE,
    COUNT,
    FRESH_PORT,
    MASTER_KNOWN,
    NODE_0,
    SECONDS,
    SIGNALS,
    STREAMS,
    TEXTS,
    WITH_ENDPOINT,
    Flag,
    Kind,
    one_of,
    own,
    switch,
)
from elaunch.env import HANDLED_SIGNALS
from elaunch.runs.directory import KEEP_RUNS

STOP = (
    Flag(
        "signals-to-handle",
        SIGNALS,
        HANDLED_SIGNALS,
        "Signals that are passed to the workers and end the job.",
    ),
    Flag(
        "shutdown-timeout",
        SECONDS,
        "30",
        "Seconds from SIGTERM to SIGKILL when a signal ends the job.",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    own(
        "forward-signals",
        SIGNALS,
        "",
        "Signals that are passed to the workers and do not end the job.",
    ),
    own(
        "sibling-grace",
        SECONDS,
        "5",
        "Seconds from SIGTERM to SIGKILL for the other workers when one fails; by default at "
        "most --shutdown-timeout.",
    ),
    own(
        "wait-for-children",
        SECONDS,
        "0",
        "Seconds to wait for processes that the workers have left, when all ended with 0; then "
        "they are ended. Only for a job of one node.",
    ),
    own(
        "preempt-signals",
        Kind(values.signals, "SIGNAL,...", "comma-separated names of signals, or none", comma=","),
        "SIGUSR1,SIGUSR2",
        "Signals that ask the workers to save and end (docs/preemption.md).",
    ),
    own(
        "preempt-at",
        Kind(
            values.moment,
            "+3h|TIME|slurm[-2m]",
            "+30m, +3h, a local time as 2026-11-21T18:00, or slurm, slurm-5m",
        ),
        None,
        "When to ask the workers to save and end: after a time, at a time, or before the Slurm "
        "job ends.",
    ),
    own(
        *("notice-command", Kind(values.text, "COMMAND", "a command of the shell"), None),
        "Shell command that prints 'preempt [+120s] TEXT' when the cloud takes this machine.",
    ),
    own(
        *("on-event", Kind(values.hook, "CMD|URL", "a command of the shell, or a URL"), None),
        "Shell command or URL that receives the job's events as JSON (docs/events.md).",
    ),
    own(
        "exit-codes",
        one_of("elaunch", "torchrun"),
        "elaunch",
        "Exit code of a failed job: that of the first failed worker, or always 1, as torchrun's.",
    ),
    switch(
        name="torchrun-report",
        help="End the failure report of a job with torchrun's table, for tools that read it.",
        torchrun=False,
    ),
)

OUTPUT = (
    Flag(
        "log-dir",
        Kind(values.text, "DIR", "a directory that can be written, or /dev/null"),
        None,
        "Directory of the workers' log files (default: in the run directory; /dev/null: none).",
    ),
    Flag(
        "redirects",
        STREAMS,
        "0",
        "Streams that go to log files only: 0 none, 1 stdout, 2 stderr, 3 both; 0:3,1:2 by local "
        "rank.",
        short="-r",
    ),
    Flag(
        "tee",
        STREAMS,
        "0",
        "Streams that go to log files, and to the console with a prefix; as for --redirects.",
        short="-t",
    ),
    Flag(
        "local-ranks-filter",
        Kind(values.ranks, "RANK,...", "comma-separated local ranks", comma=","),
        "",
        "Local ranks whose output the console shows; log files have all.",
        aliases=("log-ranks",),
    ),
    Flag(
        "log-line-prefix-template",
        Kind(values.text, "TEMPLATE", "a text"),
        "",
        "Prefix of lines with --tee; ${role_name}, ${local_rank}, ${rank} and ${hostname} are "
        "replaced.",
    ),
    *(
        Flag(
            f"duplicate-{name}-filters",
            TEXTS,
            "",
            f"Texts; lines of {name} that contain one are copied to filtered_{name}.log.",
        )
        for name in ("stdout", "stderr")
    ),
    Flag(
        "logs-specs",
        Kind(values.label, "NAME", ""),
        None,
        "Only 'default' is accepted; torch's classes of logs are refused.",
    ),
    switch(
        name="progress",
        help="Show one live line with step, rate, ETA and goodput; without a terminal, print one "
        "every 30 s.",
        torchrun=False,
    ),
    Flag(
        "event-log-handler",
        one_of("null", "console", "dynamic_rendezvous"),
        "null",
        "Where torch's events go: nowhere, or to stderr as lines of JSON (console).",
    ),
)

MEETING = (
    switch(name="standalone", help="Run on one node by itself, whatever the rendezvous flags say."),
    Flag(
        "rdzv-backend",
        replace(
            one_of("static", "c10d", "etcd"),
            read=values.choice(("static", "c10d", "etcd", "etcd-v2")),
        ),
        "static",
        "Where nodes meet: a TCPStore of node 0 (static) or of the node at the endpoint (c10d), or "
        "an etcd.",
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
        "Address where nodes meet; several for etcd.",
    ),
    Flag(
        "rdzv-id",
        Kind(values.label_or_empty, "ID", "a name of one line"),
        None,
        "Id of the run, the same on all nodes (default: the script's name; on one node with six "
        "hex digits).",
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
        "More settings of the rendezvous (docs/flags.md).",
    ),
    Flag(
        "node-rank",
        COUNT,
        "0",
        "Rank of this node (static), or its order among new nodes (c10d, etcd).",
        idle={ALONE: ""},
    ),
    Flag(
        "master-addr",
        Kind(values.text, "HOST", "a name or an address"),
        None,
        "Address of node 0 (static); on one node MASTER_ADDR (default: 127.0.0.1).",
        idle={NODE_0: "", WITH_ENDPOINT: ""},
    ),
    Flag(
        "master-port",
        Kind(values.whole(0, 65535), "PORT", "0 to 65535; on one node 0 for a free port"),
        None,
        "Port of node 0 (static, default: 29500); on one node MASTER_PORT (default: a free one).",
        idle={FRESH_PORT: "", WITH_ENDPOINT: ""},
    ),
    Flag(
        "local-addr",
        Kind(values.text, "HOST", "a name or an address of this machine"),
        None,
        "Address of this node for the others; on one node MASTER_ADDR.",
        idle={MASTER_KNOWN: ""},
    ),
    own(
        "rdzv-secret-file",
        Kind(values.text, "PATH", "a file that only its owner may read and write"),
        None,
        "File with a secret, the same on all nodes; an agent without it cannot take part.",
        idle={ALONE: ""},
    ),
    own(
        "on-join",
        one_of("graceful", "now", "never"),
        "graceful",
        "When a new node is taken in: after the workers have saved (graceful), now, or when a "
        "round ends for another reason (never).",
        idle={ALONE: ""},
    ),
    switch(
        name="strict-symmetry",
        help="End the job with 76 if its nodes run different things; else that is a warning.",
        torchrun=False,
        idle={ALONE: ""},
    ),
)

OTHER = (
    own(
        "file",
        Kind(values.text, "JOB.YAML", "a YAML file"),
        None,
        "Job file to read (docs/job-file.md); the command line wins over it.",
        short="-f",
    ),
    own(
        "name",
        Kind(values.label, "NAME", "a name"),
        None,
        "Name of the job in reports (default: the script's).",
    ),
    own(
        *("metrics-port", Kind(endpoints.listening, "[HOST:]PORT", "PORT or HOST:PORT"), None),
        "Port of /metrics for Prometheus; on loopback unless HOST is given.",
    ),
    own(
        *("dashboard", Kind(endpoints.pages, "[=[HOST:]PORT]", "yes, no, PORT or HOST:PORT"), "no"),
        "Serve the run's pages for the browser while it lasts, and print their address.",
    ),
    switch(
        name="detach",
        help="Run in the background, and print the run id for status, logs and stop.",
        torchrun=False,
        short="-d",
    ),
    own(
        "keep-runs",
        Kind(values.whole(1), "N", "1 or more"),
        str(KEEP_RUNS),
        "Number of completed runs, and of failed ones, whose records and logs stay.",
    ),
    switch(name="dry-run", help="Print what would start, and start nothing.", torchrun=False),
)
