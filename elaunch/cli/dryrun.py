"""``elaunch run --dry-run``: what would be started, and nothing is.

On a terminal with colours (rich); elsewhere the same content as plain text. Values that look like
secrets are never shown, neither in the environment nor in the table.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence

import click

from elaunch import env
from elaunch.config import Settings
from elaunch.config.topology import LOOPBACK

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.I)
_PER_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK", env.VISIBLE_DEVICES, env.ERROR_FILE)
HIDDEN = "(hidden)"
LATER = "(chosen at the start)"


def show(settings: Settings, environ: Mapping[str, str]) -> None:
    """Print the command, the environment that elaunch adds, and one line for each worker.

    Raises:
        UsageError: the number of workers cannot be told on this machine.
    """
    from elaunch.agent.main import resolve_nproc

    nproc = resolve_nproc(settings)
    launcher = {**environ, **settings.env}
    workers = [worker(settings, rank, nproc, launcher) for rank in range(nproc)]
    shared = {**settings.env, **env.default_omp_threads(launcher, nproc), **workers[0]}
    rows = [(name, text) for name, text in shared.items() if name not in _PER_RANK]
    table = [_columns(rank, variables) for rank, variables in enumerate(workers)]
    header = ("rank", "local_rank", "devices", "logs")
    if sys.stdout.isatty() and not environ.get("NO_COLOR"):
        _show_rich(facts(settings, nproc), rows, (header, table))
    else:
        _show_plain(facts(settings, nproc), rows, (header, table))


def command(settings: Settings) -> str:
    """Return the command line of one worker, quoted for a shell."""
    words = {
        "script": [settings.interpreter, "-u", settings.entrypoint],
        "module": [settings.interpreter, "-u", "-m", settings.entrypoint],
        "command": [settings.entrypoint],
        "run-path": [settings.interpreter, "-u", settings.entrypoint],
    }[settings.mode]
    return shlex.join([*words, *settings.args])


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
    ]
    if settings.checkpoint_dir:
        glob = f" ({settings.checkpoint_glob})" if settings.checkpoint_glob else ""
        found.append(("checkpoints", f"{settings.checkpoint_dir}{glob}"))
    return found


def worker(
    settings: Settings, local_rank: int, nproc: int, launcher: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that elaunch would set for one worker of the first round."""
    master = settings.master_addr or LOOPBACK
    round_facts = env.RoundFacts(
        run_id=settings.run_id,
        round=0,
        restarts=0,
        max_restarts=settings.max_restarts,
        reason="",
        local_world_size=nproc,
        node_rank=0,
        nodes=1,
        role=settings.role,
        master_addr=master,
        master_port=settings.master_port or 0,
        node_addrs=(master,),
        agent_socket=LATER,
        checkpoint_dir=str(settings.checkpoint_dir) if settings.checkpoint_dir else None,
        resume_from=LATER if settings.checkpoint_dir else "",
        resume_step=LATER if settings.checkpoint_dir else "",
        signals_to_handle=",".join(each.name for each in settings.signals_to_handle),
        use_agent_store=LATER,
        virtual_local_rank=settings.virtual_local_rank,
    )
    variables = env.worker_environment(round_facts, local_rank, LATER, launcher)
    if settings.master_port is None:
        variables["MASTER_PORT"] = "(a free port in each round)"
    return variables


def shown(name: str, text: str) -> str:
    """Return a variable's value, or that it is hidden."""
    return HIDDEN if _SECRET.search(name) else text


def _logs(settings: Settings) -> str:
    if settings.log_dir == "/dev/null":
        return "no files"
    return settings.log_dir or "in the run directory"


def _columns(local_rank: int, variables: Mapping[str, str]) -> tuple[str, ...]:
    devices = variables.get(env.VISIBLE_DEVICES, "all")
    return (variables["RANK"], str(local_rank), devices, f"attempt_0/{local_rank}/")


Rows = Iterable[tuple[str, str]]
Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]


def _show_plain(known: Rows, variables: Rows, table: Table) -> None:
    for name, text in known:
        click.echo(f"{name + ':':<13}{text}")
    click.echo("environment:")
    for name, text in variables:
        click.echo(f"  {name}={shown(name, text)}")
    header, rows = table
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        click.echo(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _show_rich(known: Rows, variables: Rows, table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    grid = RichTable.grid(padding=(0, 2))
    for name, text in known:
        grid.add_row(Text(name, style="bold"), Text(text))
    console.print(grid)
    settings = RichTable(title="environment", title_justify="left", show_header=False)
    for name, text in variables:
        settings.add_row(Text(name, style="cyan"), Text(shown(name, text)))
    console.print(settings)
    header, rows = table
    ranks = RichTable(*header, title="workers", title_justify="left")
    for row in rows:
        ranks.add_row(*map(Text, row))
    console.print(ranks)
