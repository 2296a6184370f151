"""``elaunch wrap``: one rank of a job that mpirun or srun started (docs/wrap.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from elaunch.config.flags import values
from elaunch.config.flags.flag import OTHER, Flag
from elaunch.config.flags.given import Given, convert
from elaunch.config.flags.table import FLAGS
from elaunch.config.validate import NO_FILES
from elaunch.errors import UsageError

# Those of ``elaunch run`` that mean the same here.
SHARED = ("role", "shutdown-timeout", "log-dir", "redirects", "tee")
# What a flag of ``elaunch run`` is here, where that differs.
DEFAULTS = {"tee": "3"}
HELP = {
    "log-dir": "Where the log files of all ranks go, by rank (default: no files).",
    "tee": "Streams that are shown with the rank before each line.",
    "shutdown-timeout": "Time from SIGTERM to SIGKILL when a signal ends the command.",
    "role": "Role of the ranks: ROLE_NAME and the prefix of their lines.",
}
OWN = (
    Flag(
        "rank-env",
        values.label,
        None,
        OTHER,
        "Variables that hold the rank, the first that is set counts; or the rank itself.",
        "NAME[,NAME]",
        "names of variables, by comma, or a number",
    ),
    Flag(
        "master-addr",
        values.label,
        None,
        OTHER,
        "Where rank 0 is (default: MASTER_ADDR, one node, or Slurm's first host).",
        "HOST",
        "a host name or an address",
    ),
    Flag(
        "master-port",
        values.whole(1, 65535),
        None,
        OTHER,
        "Port on which rank 0 hosts the store (default: MASTER_PORT, or made of the job's id).",
        "PORT",
        "1 to 65535",
    ),
)
WRAP_FLAGS = (*OWN, *(flag for name in SHARED for flag in FLAGS if flag.name == name))


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for flag in WRAP_FLAGS:
        names = [flag.short] if flag.short else []
        default = DEFAULTS.get(flag.name, flag.default)
        text = HELP.get(flag.name, flag.help) + (f"  [{default}]" if default else "")
        names += [f"--{flag.name}", flag.dest]
        options.append(click.Option(names, type=click.UNPROCESSED, metavar=flag.metavar, help=text))
    options.append(click.Argument(["command"], nargs=-1, type=click.UNPROCESSED))
    return options


def _start(command: tuple[str, ...], **given: str | None) -> int:
    """Read the flags, decide what is to be done, and call the wrapper."""
    if not command:
        raise UsageError("nothing to start; give a command: elaunch wrap -- python train.py")
    read: dict[str, Any] = {}
    for flag in WRAP_FLAGS:
        text = given[flag.dest]
        text = DEFAULTS.get(flag.name, flag.default) if text is None else text
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
    "The rank comes from the launcher's variables. COMMAND finds torchrun's variables set, its "
    "lines are shown with the rank, signals are passed on to it, nothing of it outlives the "
    "wrapper, and its exit code is the wrapper's.",
    options_metavar="[OPTIONS] [--]",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
