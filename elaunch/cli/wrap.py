"""``elaunch wrap``: one rank of a job that mpirun or srun started (docs/wrap.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from elaunch.config import values
from elaunch.config.checks import NO_FILES
from elaunch.config.flags.flag import Flag, Given, Kind, convert
from elaunch.config.flags.table import TABLE
from elaunch.errors import UsageError

_SHARED = (
    replace(
        TABLE["role"], help="Name of the ranks' role, for ROLE_NAME and the prefix of their lines."
    ),
    replace(
        TABLE["shutdown-timeout"],
        help="Seconds from SIGTERM to SIGKILL when a signal ends the command.",
    ),
    replace(
        TABLE["wait-for-children"],
        help="Seconds to wait for processes that a command has left that ended with 0.",
    ),
    replace(
        TABLE["log-dir"],
        help="Directory of the log files, by rank (default: no files).",
    ),
    TABLE["redirects"],
    replace(
        TABLE["tee"],
        default="3",
        help="Streams whose lines are shown with the rank: 0 none, 1 stdout, 2 stderr, 3 both.",
    ),
)
WRAP_FLAGS = (
    Flag(
        "rank-env",
        Kind(values.label, "NAME[,NAME]", "names of variables, by comma, or a number"),
        None,
        "Variables that hold the rank, of which the first that is set counts; or the rank itself.",
    ),
    Flag(
        "master-addr",
        Kind(values.label, "HOST", "a host name or an address"),
        None,
        "Address of rank 0 (default: MASTER_ADDR, 127.0.0.1 on one node, Slurm's first host).",
    ),
    Flag(
        "master-port",
        Kind(values.whole(1, 65535), "PORT", "1 to 65535"),
        None,
        "Port where rank 0 hosts the store (default: MASTER_PORT, or derived from the job's id).",
    ),
    *_SHARED,
)


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for flag in WRAP_FLAGS:
        names = [*filter(None, [flag.short]), f"--{flag.name}", flag.dest]
        text = flag.help + (f"  [{flag.default}]" if flag.default else "")
        metavar = flag.kind.metavar
        options.append(click.Option(names, type=click.UNPROCESSED, metavar=metavar, help=text))
    options.append(click.Argument(["command"], nargs=-1, type=click.UNPROCESSED))
    return options


def _start(command: tuple[str, ...], **given: str | None) -> int:
    """Read the flags, decide what is to be done, and call the wrapper."""
    if not command:
        raise UsageError("nothing to start; give a command: elaunch wrap -- python train.py")
    read: dict[str, Any] = {}
    for flag in WRAP_FLAGS:
        text = given[flag.dest]
        text = flag.default if text is None else text
        read[flag.dest] = None if text is None else convert(flag, Given(text, "command line"))
    from elaunch.agent.wrap.plan import WrapRequest, plan
    from elaunch.agent.wrap.run import run

    no_files = read["log_dir"] in (None, NO_FILES)
    read["log_dir"] = None if no_files else Path(read["log_dir"])
    return run(plan(WrapRequest(command, **read), os.environ))


wrap = click.Command(
    "wrap",
    params=_options(),
    callback=_start,
    help="Run COMMAND as one rank of a job that mpirun, srun or another launcher started.\n\n"
    "The rank comes from the launcher's variables. COMMAND finds torchrun's variables. Its lines "
    "are shown with the rank, and signals are passed on to it. The wrapper ends with its exit "
    "code, and leaves no process behind.",
    options_metavar="[OPTIONS] [--]",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
