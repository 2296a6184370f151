"""The flags of ``elaunch run`` that set where a job's agents meet, for commands that look at one.

With them a command shows a whole job, from any machine that reaches that store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from elaunch.config.flags.table import TABLE
from elaunch.errors import UsageError

if TYPE_CHECKING:
    from elaunch.config.rendezvous import RendezvousSettings
    from elaunch.views.store import JobStore

HELP: Final = {
    "rdzv-backend": "Show a job on all its nodes, as the store where they meet has it.",
    "rdzv-endpoint": "Address of that store; several for etcd.",
    "rdzv-id": "Run id of the job (default: the only job of that store, or a list).",
    "rdzv-conf": "Access to the store: user, certificates, prefix.",
    "rdzv-secret-file": "File with the secret of the job's agents, where they have one.",
    "master-addr": "Address of node 0, for the static backend in place of an endpoint.",
    "master-port": "Port of node 0 (default: 29500).",
}
FLAGS: Final = tuple(TABLE[name] for name in HELP)


def normal(name: str) -> str:
    """Return a flag's name with the dashes that torchrun spells as underscores."""
    return name.replace("_", "-")


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these flags."""
    for flag in reversed(FLAGS):
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        text = HELP[flag.name]
        command = click.option(*names, flag.dest, metavar=flag.kind.metavar, help=text)(command)
    return command


def given(place: Mapping[str, Any], run: str | None) -> dict[str, str]:
    """Return those that were given, by name; UsageError if a run of this machine is named, too."""
    line = {flag.name: text for flag in FLAGS if (text := place[flag.dest]) is not None}
    if line and run is not None:
        raise UsageError(
            f"RUN {run!r} is a run of this machine, and --{next(iter(line))} asks for a job in a "
            "store: leave one of them out; in a store a job is named by --rdzv-id"
        )
    return line


def jobs(line: Mapping[str, str]) -> tuple[RendezvousSettings, Sequence[str]]:
    """Return the store and the run id that is given, or those that it has; UsageError for none."""
    from elaunch.config.rendezvous import resolve_place, resolve_run_id
    from elaunch.views.store import no_job, run_ids

    rendezvous = resolve_place(line, os.environ, working_directory())
    run_id = resolve_run_id(line, os.environ)
    ids = run_ids(rendezvous) if run_id is None else (run_id,)
    if not ids:
        raise no_job(rendezvous)
    return rendezvous, ids


def working_directory() -> Path:
    """Return where relative paths start; UsageError where it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted; go to one that is there") from None


def agents(line: Mapping[str, str], stack: ExitStack) -> JobStore:
    """Return the agents of the job; UsageError where the store has several and none is named."""
    from elaunch.text import listed
    from elaunch.views.store import JobStore

    rendezvous, ids = jobs(line)
    if len(ids) > 1:
        raise UsageError(f"the store has several jobs: name one by --rdzv-id: {listed(ids)}")
    store = stack.enter_context(closing(JobStore(rendezvous, ids[0])))
    if (job := store.read()).empty:
        raise UsageError(f"nothing of the job {store.name} is left in {job.place}")
    return store
