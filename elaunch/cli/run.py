"""``elaunch run``: the command line of a job, made from the table of flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from elaunch.cli import commandline
from elaunch.config.flags.flag import GROUPS, Flag
from elaunch.config.flags.table import FLAGS
from elaunch.errors import UsageError


class _RunCommand(click.Command):
    """A command whose words are cut by torchrun's rules, and whose help is in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            words = commandline.cut(args)
        except click.UsageError as exc:
            exc.ctx = ctx
            raise
        plain = [f"--{flag.name}={value}" for flag, value in words.flags]
        if words.help:
            plain.append("--help")
        return super().parse_args(ctx, [*plain, "--", *words.command])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in GROUPS:
            with formatter.section(group):
                formatter.write_dl([_help(flag) for flag in FLAGS if flag.group == group])
        with formatter.section("Help"):
            formatter.write_dl([("-h, --help", "Show this text.")])


def _help(flag: Flag) -> tuple[str, str]:
    names = [flag.short] if flag.short else []
    names += [f"--{name}" for name in (flag.name, *flag.aliases)]
    default = f"  [{flag.default}]" if flag.default and not flag.is_switch else ""
    return f"{', '.join(names)} {flag.metavar}".rstrip(), f"{flag.help}{default}"


def _parameters() -> Iterator[click.Parameter]:
    for flag in FLAGS:
        yield click.Option([f"--{flag.name}", flag.dest], type=click.UNPROCESSED)
    yield click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")


def _start(words: tuple[str, ...], **given: str | None) -> int:
    """Resolve the settings, print the notices, and call the agent or the dry run."""
    from elaunch.config import resolve

    line = {flag.name: text for flag in FLAGS if (text := given[flag.dest]) is not None}
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted; go to one that is there") from None
    settings = resolve(line, words, os.environ, cwd)
    for notice in settings.notices:
        click.echo(f"elaunch: note: {notice}", err=True)
    if settings.dry_run and not settings.detach:
        from elaunch.cli import dryrun

        dryrun.show(settings, os.environ)
        return 0
    from elaunch.agent.main import resolve_nproc
    from elaunch.agent.main import run as run_agent

    if settings.detach:
        from elaunch.agent import detach

        detach.check(settings)
        resolve_nproc(settings)  # that torch knows no such device is an error in the foreground
        return detach.run(settings, run_agent)
    return run_agent(settings)


run = _RunCommand(
    "run",
    params=list(_parameters()),
    callback=_start,
    help="Start SCRIPT once for each worker, supervise the workers, and restart them from the "
    "newest checkpoint when one fails.\n\nEvery flag is also a variable (ELAUNCH_MAX_RESTARTS, "
    "PET_MAX_RESTARTS) and a key of a job file (max_restarts); '_' may stand for '-', and a "
    "flag may be cut short.",
    options_metavar="[OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
)
