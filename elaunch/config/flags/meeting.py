"""The flags by which the nodes of a job find each other; ``table`` takes them in."""

from __future__ import annotations

from elaunch.config.flags import rdzvconf, values
from elaunch.config.flags.flag import MEETING, Flag, one_of, switch
from elaunch.config.meeting import endpoints

TORCHRUN: tuple[Flag, ...] = (
    switch("standalone", MEETING, "One node by itself; the rendezvous flags are not needed."),
    Flag(
        "rdzv-backend",
        values.backend,
        "static",
        MEETING,
        "How nodes meet: node 0 hosts a TCPStore, the node at the endpoint does, or through etcd.",
        "static|c10d|etcd",
        "static, c10d, etcd",
    ),
    Flag(
        "rdzv-endpoint",
        endpoints.endpoint,
        "",
        MEETING,
        "Where nodes meet; several by comma for etcd.",
        "HOST[:PORT],...",
        "host, host:port or [IPv6]:port; for etcd several of them by comma",
    ),
    Flag(
        "rdzv-id",
        values.label_or_empty,
        None,
        MEETING,
        "The run's id, the same on all nodes (default: the script's name; on one node with six hex "
        "digits).",
        "ID",
        "a name of one line",
        aliases=("run-id",),
    ),
    Flag(
        "rdzv-conf",
        rdzvconf.rdzv_conf,
        "",
        MEETING,
        "More settings of the rendezvous.",
        "KEY=VALUE,...",
        "key=value,key=value",
        show=rdzvconf.masked,
    ),
    Flag(
        "node-rank",
        values.whole(0),
        "0",
        MEETING,
        "Rank of this node (static), or its place among newcomers (c10d, etcd).",
        "N",
        "0 or more",
    ),
    Flag(
        "master-addr",
        values.text,
        None,
        MEETING,
        "Node 0 of the static backend; MASTER_ADDR on one node (default: 127.0.0.1).",
        "HOST",
        "a name or an address",
    ),
    Flag(
        "master-port",
        values.whole(0, 65535),
        None,
        MEETING,
        "Port of the static backend (default: 29500); MASTER_PORT on one node (default: free).",
        "PORT",
        "0 to 65535; on one node 0 for a free port",
    ),
    Flag(
        "local-addr",
        values.text,
        None,
        MEETING,
        "Address that this node gives to others; MASTER_ADDR on one node.",
        "HOST",
        "a name or an address of this machine",
    ),
)

OWN: tuple[Flag, ...] = (
    Flag(
        "rdzv-secret-file",
        values.text,
        None,
        MEETING,
        "File with a secret that all nodes have: who does not know it cannot take part.",
        "PATH",
        "a file that only its owner may read and write",
    ),
    one_of(
        "on-join",
        ("graceful", "now", "never"),
        "graceful",
        MEETING,
        "When a new node starts to take part: after a moment for others to come and for the "
        "workers to save, at once, or in the next round that begins for another reason.",
    ),
    switch("strict-symmetry", MEETING, "End the job if its nodes do not run the same thing."),
)
