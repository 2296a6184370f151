"""Flags of what is around the workers: signals, output, the other nodes."""

from __future__ import annotations

from msgspec.structs import replace

from elaunch.config import endpoints, rdzvconf, values
from elaunch.config.flags.flag import (
    ALONE,
    COUNT,
    SECONDS,
    SIGNALS,
    STREAMS,
    TEXTS,
    Flag,
    Kind,
    one_of,
    own,
    switch,
)
from elaunch.env import HANDLED_SIGNALS

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
        "Time from SIGTERM to SIGKILL when a signal ends the job.",
        variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    own("forward-signals", SIGNALS, "", "Signals that are passed to the workers and end nothing."),
    own(
        "sibling-grace",
        SECONDS,
        "5",
        "Time from SIGTERM to SIGKILL for the other workers when one fails; by default not "
        "more than --shutdown-timeout.",
    ),
    own(
        "preempt-signals",
        Kind(values.signals, "SIGNAL,...", "comma-separated names of signals, or none", comma=","),
        "SIGUSR1,SIGUSR2",
        "Signals at which the workers are asked to save and to end (docs/preemption.md).",
    ),
    own(
        "preempt-at",
        Kind(
            values.moment,
            "+3h|TIME|slurm[-2m]",
            "+30m, +3h, a local time as 2026-11-21T18:00, or slurm, slurm-5m",
        ),
        None,
        "When to do the same: after so long, at a time, or before the end of the Slurm job.",
    ),
    own(
        *("notice-command", Kind(values.text, "COMMAND", "a command of the shell"), None),
        "Program that prints 'preempt [+120s] TEXT' when this machine will be taken.",
    ),
    own(
        *("on-event", Kind(values.hook, "CMD|URL", "a command of the shell, or a URL"), None),
        "Command or URL that gets what happens to the job, as JSON (docs/status.md).",
    ),
    own(
        "exit-codes",
        one_of("elaunch", "torchrun"),
        "elaunch",
        "End with the first failed worker's code, or with 1 for every failure as torchrun does.",
    ),
)

OUTPUT = (
    Flag(
        "log-dir",
        Kind(values.text, "DIR", "a directory that can be written, or /dev/null"),
        None,
        "Where the workers' log files go (default: the run directory; /dev/null: nowhere).",
    ),
    Flag("redirects", STREAMS, "0", "Streams that go to the log files only.", short="-r"),
    Flag(
        "tee",
        STREAMS,
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
            TEXTS,
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
    switch(
        name="progress",
        help="Keep a line below the workers' with step, rate, ETA and goodput; without a terminal "
        "print one each 30 s.",
        torchrun=False,
    ),
    Flag(
        "event-log-handler",
        one_of("null", "console", "dynamic_rendezvous"),
        "null",
        "Where the job's events go: nowhere, or to stderr as lines of JSON.",
    ),
)

MEETING = (
    switch(name="standalone", help="One node by itself; the rendezvous flags are not needed."),
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
        COUNT,
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
    own(
        "rdzv-secret-file",
        Kind(values.text, "PATH", "a file that only its owner may read and write"),
        None,
        "File with a secret that all nodes have: who does not know it cannot take part.",
        idle={ALONE: ""},
    ),
    own(
        "on-join",
        one_of("graceful", "now", "never"),
        "graceful",
        "When a new node starts to take part: after a moment for others to come and for the "
        "workers to save, at once, or in the next round that begins for another reason.",
        idle={ALONE: ""},
    ),
    switch(
        name="strict-symmetry",
        help="End the job if its nodes do not run the same thing.",
        torchrun=False,
        idle={ALONE: ""},
    ),
)

OTHER = (
    own(
        "file",
        Kind(values.text, "JOB.YAML", "a YAML file"),
        None,
        "Read a job file (docs/job-file.md); flags on the command line win over it.",
        short="-f",
    ),
    own("name", Kind(values.label, "NAME", "a name"), None, "Name of the job in reports."),
    own(
        *("metrics-port", Kind(endpoints.listening, "[HOST:]PORT", "PORT or HOST:PORT"), None),
        "Where the agent answers Prometheus, at /metrics; on loopback unless HOST is given.",
    ),
    own(
        *("dashboard", Kind(endpoints.pages, "[=HOST:PORT]", "yes, no or HOST:PORT"), "no"),
        "Serve the run's pages for the browser as long as it lasts, and print their address.",
    ),
    switch(
        name="detach",
        help="Go on in the background: print the run id, and leave the rest to status, logs, stop.",
        torchrun=False,
        short="-d",
    ),
    switch(name="dry-run", help="Print what would be started, and start nothing.", torchrun=False),
)
