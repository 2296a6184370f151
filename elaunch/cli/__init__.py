"""The commands of ``elaunch``; each is imported when it is asked for, so that help stays quick."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import sys
from collections.abc import Sequence

import click

from elaunch import __version__
from elaunch.config.values import did_you_mean
from elaunch.endings import INTERRUPTED
from elaunch.errors import ElaunchError, UsageError
from elaunch.text import block

COMMANDS = {
    "run": ("elaunch.cli.run", "Start a script on every worker, and restart it when one fails."),
    "logs": (
        "elaunch.cli.views.logs",
        "Show or follow the output of a run, by rank, node or text.",
    ),
    "stacks": (
        "elaunch.cli.views.stacks",
        "Show the stacks of all ranks of a running job, outliers first.",
    ),
    "profile": ("elaunch.cli.views.stacks", "Write a flame graph of one rank of a running job."),
    "debug": ("elaunch.cli.debug", "Run pdb in one rank of a running job."),
    "stop": ("elaunch.cli.stop", "End a running job."),
    "restart": (
        "elaunch.cli.stop",
        "Restart a running job from its newest checkpoint.",
    ),
    "preempt": ("elaunch.cli.stop", "Ask a running job to save and end, to be continued later."),
    "runs": ("elaunch.cli.views.status", "List the running and recent jobs of this machine."),
    "status": (
        "elaunch.cli.views.status",
        "Show one job, of this machine or on all its nodes, or list all.",
    ),
    "top": ("elaunch.cli.views.top", "Watch a job as a tree of nodes and ranks, the worst first."),
    "why": (
        "elaunch.cli.views.why",
        "Show why a run failed, which rank caused it, and what to do.",
    ),
    "explain": (
        "elaunch.cli.views.why",
        "Explain a code such as E-SHM-FULL, and what to do.",
    ),
    "metrics": ("elaunch.cli.views.metrics", "Show the metrics that a run's script has reported."),
    "dashboard": ("elaunch.cli.views.dashboard", "Show runs in the browser."),
    "otlp": (
        "elaunch.cli.views.dashboard",
        "Send metrics and traces of runs to an OpenTelemetry collector.",
    ),
    "checkpoints": (
        "elaunch.cli.checkpoints",
        "List, verify, pin, remove and convert checkpoints.",
    ),
    "examples": ("elaunch.cli.examples", "List, show and copy the examples."),
    "manifest": (
        "elaunch.extras.manifest",
        "Print a job file for Slurm, Kubernetes, JobSet or Kubeflow.",
    ),
    "wrap": ("elaunch.cli.wrap", "Run a command as one rank of a job of mpirun or srun."),
    "man": ("elaunch.extras.completion", "Print the manual page: elaunch man | man -l -"),
}


class _LazyGroup(click.Group):
    """A group that knows its commands' names and imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.NoSuchOption as error:
            from elaunch.config.flags.table import FLAGS

            spellings = [one for flag in FLAGS for one in flag.spellings]
            if not any(one.startswith(error.option_name) for one in spellings):
                raise
            line = f"elaunch run {shlex.join(args)}"
            why = f"{error.option_name} is a flag of 'elaunch run'; did you mean {line!r}?"
            raise click.UsageError(why, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = did_you_mean(args[0], COMMANDS)
            if not hint and args[0].endswith(".py"):
                hint = f"; did you mean 'elaunch run {args[0]}'?"
            known = f"; the commands are {', '.join(COMMANDS)}" if not hint else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}{known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_versions(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print what a report of a problem has to say; torch's version without importing torch."""
    if not asked or ctx.resilient_parsing:
        return
    from importlib import metadata  # takes 20 ms

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    python = ".".join(map(str, sys.version_info[:3]))
    click.echo(f"elaunch {__version__}, {torch}, Python {python}")
    ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions of elaunch, torch and Python, and exit.",
)
def cli() -> None:
    """Start, supervise and restart distributed PyTorch training."""


def execute(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; messages go to stderr."""
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be text in any encoding: what cannot be written is shown escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(list(argv), prog_name="elaunch", standalone_mode=False)
    except click.ClickException as exc:
        ctx = exc.ctx if isinstance(exc, click.UsageError) else None
        see = "" if ctx is None else f"; see {ctx.command_path} --help"
        text = f"elaunch: error: {bounded(exc.format_message().rstrip('.'))}{see}"
        click.echo(_coded(text, UsageError.code), err=True)
        return exc.exit_code
    except click.Abort:
        return INTERRUPTED
    except ElaunchError as exc:
        click.echo(_coded(f"elaunch: error: {block(bounded(str(exc)))}", exc.code), err=True)
        return exc.exit_code
    return code if isinstance(code, int) else 0


def _coded(message: str, code: str) -> str:
    return f"{message} (elaunch explain {code})"


def bounded(message: str) -> str:
    """Return a message with what it quotes cut short, so that its end can be read.

    A value of 100 kB, given by mistake, would else hide why it was refused.
    """
    short = re.sub(r"\S{400,}", lambda long: _cut(long[0], 160), message)
    return short if len(short) <= 4000 else _cut(short, 1500)


def _cut(text: str, kept: int) -> str:
    return f"{text[:kept]}… ({len(text) - 2 * kept} characters left out) …{text[-kept:]}"
