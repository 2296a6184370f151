"""``elaunch run --dry-run``: what would be started, and nothing is.

It is a page as ``elaunch status`` prints one. Values that look like secrets are never shown,
neither in the environment nor in the table. Of several nodes only this one is known: ranks are
shown where ``--node-rank`` decides them, as if all nodes had as many workers.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

from elaunch import env
from elaunch.config import Settings
from elaunch.config.checks import NO_FILES
from elaunch.errors import UsageError
from elaunch.hosts import LOOPBACK
from elaunch.text import HIDDEN, arguments, count, is_secret, one_line
from elaunch.views import layout as page
from elaunch.views.layout import Cell, Column, Fields, Paragraph, Table

_PER_RANK = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK"),
    *(env.VISIBLE_DEVICES, env.HIP_DEVICES, env.ERROR_FILE),
)
LATER = "(chosen at the start)"
MEET = "decided when the nodes meet"
# What a node cannot know of itself before it has met the others.
_OF_THE_JOB = (
    *("RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "ELAUNCH_NODE_ADDRS"),
)


def show(settings: Settings, environ: Mapping[str, str]) -> None:
    """Print the command, the environment that elaunch adds, and one line for each worker.

    Raises:
        UsageError: the number of workers is not known on this machine, or cannot be bound there.
    """
    from elaunch.server import devices, numa

    nproc = devices.resolve(settings.nproc_per_node, settings.interpreter)
    if settings.numa_binding is not None:
        _, problem = numa.bindings(settings.numa_binding, nproc, settings.interpreter)
        if problem is not None:
            raise UsageError(problem)
    launcher = {**environ, **settings.env}
    workers = [worker(settings, rank, nproc, launcher) for rank in range(nproc)]
    shared = {**settings.env, **env.default_omp_threads(launcher, nproc), **workers[0]}
    made = (
        Fields(tuple((name, one_line(text)) for name, text in facts(settings, nproc))),
        Paragraph(("environment:", *(f"  {line}" for line in _variables(shared)))),
        Table(
            tuple(Column(name) for name in ("rank", "local_rank", "devices", "logs")),
            tuple(_row(rank, variables) for rank, variables in enumerate(workers)),
        ),
    )
    (page.echo_plain if environ.get("NO_COLOR") else page.show)(made)


def command(settings: Settings) -> str:
    """Return the command line of one worker, quoted for a shell."""
    words = {
        "script": [settings.interpreter, "-u", settings.entrypoint],
        "module": [settings.interpreter, "-u", "-m", settings.entrypoint],
        "command": [settings.entrypoint],
        "run-path": [settings.interpreter, "-u", settings.entrypoint],
    }[settings.mode]
    return shlex.join([*words, *arguments(settings.args)])


def facts(settings: Settings, nproc: int) -> list[tuple[str, str]]:
    """Return the facts of the job as (name, value)."""
    forked = settings.start_method == "forkserver" and settings.mode != "command"
    preload = (
        f", which has imported {', '.join(name for name in settings.preload if name[0] != '+')}"
        if settings.preload
        else ""
    )
    start = f"forked from a process{preload}" if forked else "one plain process each"
    budget = "without progress" if settings.restart_budget == "progress" else "in all"
    found = [
        ("name", settings.name),
        ("run id", settings.run_id),
        ("command", command(settings)),
        ("directory", str(settings.workdir or os.getcwd())),
        ("workers", f"{nproc} on this node, {start}"),
        ("restarts", f"{settings.max_restarts} {budget}"),
        ("logs", _logs(settings)),
        *_meeting(settings, nproc),
    ]
    if settings.checkpoint_dir:
        glob = f" ({settings.checkpoint_glob})" if settings.checkpoint_glob else ""
        local = ", each node's own" if settings.checkpoint_local else ""
        found.append(("checkpoints", f"{settings.checkpoint_dir}{glob}{local}"))
    if settings.init_from:
        found.append(("begins from", str(settings.init_from.path)))
    if settings.checkpoint_keep:
        found.append(("kept", settings.checkpoint_keep.describe()))
    return found


def worker(
    settings: Settings, local_rank: int, nproc: int, launcher: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that elaunch would set for one worker of the first round."""
    place, master = _place(settings, nproc)
    facts = settings.worker_facts()
    round_facts = facts._replace(
        local_world_size=nproc,
        place=place,
        master_addr=master,
        master_port=settings.master_port or 0,
        agent_socket=LATER,
        resume_from=LATER if settings.checkpoint_dir else facts.init_from,
        resume_step=LATER if settings.checkpoint_dir else "0" if facts.init_from else "",
        use_agent_store=LATER,
    )
    variables = env.worker_environment(round_facts, local_rank, LATER, launcher)
    if settings.master_port is None:
        variables["MASTER_PORT"] = "(a free port in each round)"
    if settings.rendezvous and settings.rendezvous.backend != "static":
        variables |= dict.fromkeys(_OF_THE_JOB, f"({MEET})")
    elif settings.rendezvous:
        variables["ELAUNCH_NODE_ADDRS"] = f"({MEET})"
    return variables


def _place(settings: Settings, nproc: int) -> tuple[env.NodePlace, str]:
    """Return this node's place in the job and MASTER_ADDR, as far as they are known."""
    meet = settings.rendezvous
    if meet is None or meet.backend != "static":
        master = settings.master_addr or LOOPBACK
        return env.only_node(master, nproc), master
    rank, nodes = meet.node_hint or 0, settings.max_nodes
    first, world = rank * nproc, nodes * nproc
    addrs = (meet.endpoints[0][0],) * nodes
    return env.NodePlace(rank, addrs, first, world, first, world), addrs[0]


def _meeting(settings: Settings, nproc: int) -> list[tuple[str, str]]:
    """Return how the nodes meet, as far as this one knows before it has met them."""
    meet = settings.rendezvous
    if meet is None:
        return []
    low, high = settings.min_nodes, settings.max_nodes
    host = {
        True: ", which this node hosts",
        None: ", which this node hosts unless another agent on it does",
        False: "" if meet.backend == "etcd" else ", which another node hosts",
    }[meet.is_host]
    found = [
        ("nodes", str(low) if low == high else f"{low} to {high}"),
        ("rendezvous", f"{meet.backend} at {meet.endpoint}{host}"),
    ]
    if meet.backend == "static":
        had = f"ranks as if each had {count(nproc, 'worker')}"
        found.append(("this node", f"node {meet.node_hint}; {had}"))
    else:
        hint = "" if meet.node_hint is None else f"; it asks for place {meet.node_hint}"
        found.append(("this node", f"its rank and those of its workers are {MEET}{hint}"))
    return found


def _variables(shared: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that all workers have, without what looks like a secret."""
    for name, text in shared.items():
        if name not in _PER_RANK:
            yield f"{name}={HIDDEN if is_secret(name) else one_line(text)}"


def _logs(settings: Settings) -> str:
    if settings.log_dir == NO_FILES:
        return "no files"
    return settings.log_dir or "in the run directory"


def _row(local_rank: int, variables: Mapping[str, str]) -> tuple[Cell, ...]:
    devices = variables.get(env.VISIBLE_DEVICES, "all")
    rank = variables["RANK"] if variables["RANK"].isdigit() else page.NOTHING
    return tuple(map(Cell, (rank, str(local_rank), devices, f"attempt_0/{local_rank}/")))
