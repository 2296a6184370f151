"""``elaunch run``: the command line of a job, made from the table of flags.

argparse reads it, as it reads torchrun's, so a command line moves over unchanged (docs/torchrun.md:
flags come before the script, and from the script on every word belongs to the script).
What is elaunch's own:

* a flag may be cut short as long as one flag is meant: torchrun's flags are looked at first, so
  that an abbreviation which torchrun takes means the same here; ``_`` may stand for ``-``;
* a switch may also be set off: ``--standalone=no`` (against a variable or a job file).

argparse has neither, so it gets no flag by its name, but each word of the line that is or begins
one; those behind the script it does not look at.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
from msgspec import Struct

from elaunch.cli.place import working_directory
from elaunch.config.flags.flag import Flag, Given, convert
from elaunch.config.flags.table import FLAGS, GROUPS, TABLE, USUAL
from elaunch.errors import ElaunchError
from elaunch.extras import completion

LINE_FLAGS = (*FLAGS, completion.FLAG)
SPELLINGS = {spelling: flag for flag in LINE_FLAGS for spelling in flag.spellings}
HELP, HELP_ALL = "--help", "--help-all"


class Line(Struct, frozen=True):
    """A command line in parts.

    Attributes:
        flags: the texts of the flags, by their names.
        command: the script and its arguments; empty for none.
        help: the flag that asks for help, without which this is empty; then there is nothing else.
    """

    flags: Mapping[str, str] = {}
    command: tuple[str, ...] = ()
    help: str = ""


def parse(argv: Sequence[str]) -> Line:
    """Return a command line in parts.

    Raises:
        click.UsageError: an unknown or ambiguous flag, or a flag without its value.
    """
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        conflict_handler="resolve",  # --role a --role=b
    )
    shorts = [flag.short for flag in FLAGS if flag.short]
    for word in ["-h", *shorts, *(word for word in argv if word[:1] == "-")]:
        _add(parser, word)
    parser.add_argument("SCRIPT", nargs="?")
    parser.add_argument("ARGS", nargs=argparse.REMAINDER)
    try:
        known, unknown = parser.parse_known_args(argv)
    except _HelpAsked as asked:
        return Line(help=str(asked))
    except argparse.ArgumentError as error:
        raise _without_value(error.argument_name or "", argv) from None
    if unknown:
        raise _no_such(unknown[0])
    flags = vars(known)
    args = flags.pop("ARGS", ())
    command = (flags.pop("SCRIPT"), *args) if "SCRIPT" in flags else ()
    # Of --role=-- some versions of argparse make an empty list.
    return Line({name: "--" if text == [] else text for name, text in flags.items()}, command)


class _HelpAsked(Exception):
    """The line asks for a help text, by the flag in the message."""


class _Raise(argparse.Action):
    """Ends the reading with the exception that is its ``const``."""

    def __call__(self, *_: Any) -> None:
        raise self.const


def _add(parser: argparse.ArgumentParser, word: str) -> None:
    """Let the parser know a word that is a flag or the beginning of one, perhaps with ``=``."""
    name, equals, value = word.partition("=")
    meant = _meant(name)
    if meant in ([HELP], [HELP_ALL]):
        parser.add_argument(name, action=_Raise, nargs="?", const=_HelpAsked(meant[0]))
    elif len(meant) > 1:
        why = click.UsageError(f"{name} is ambiguous: {', '.join(meant)}")
        parser.add_argument(name, action=_Raise, nargs="?", const=why)
    elif meant:
        flag = SPELLINGS[meant[0]]
        if not flag.is_switch:
            parser.add_argument(name, dest=flag.name)
        else:  # the whole word, since to argparse no switch has a value
            const = value if equals else "yes"
            parser.add_argument(word, dest=flag.name, action="store_const", const=const)


def _meant(name: str) -> list[str]:
    """Return the flags that a word or a beginning may stand for; torchrun's, or else our own."""
    if name in SPELLINGS or name in (HELP, HELP_ALL):
        return [name]
    if name == "-h":
        return [HELP]
    start = name.replace("_", "-")
    if len(start) < 3 or start[:2] != "--":
        return []
    for torchrun in (True, False):
        flags = [flag for flag in LINE_FLAGS if flag.torchrun is torchrun]
        found = [f"--{flag.name}" for flag in flags if f"--{flag.name}".startswith(start)]
        found += [text for text in ([HELP] if torchrun else [HELP_ALL]) if text.startswith(start)]
        if not torchrun:
            pairs = [(flag, alias) for flag in FLAGS for alias in flag.aliases]
            found += [f"--{flag.name}" for flag, alias in pairs if f"--{alias}".startswith(start)]
        if found:
            return list(dict.fromkeys(found))
    return []


ELSEWHERE: Final = {
    "--nproc-per-node": "n np nprocs num-procs num-processes num-gpus gpus gpus-per-node devices "
    "ntasks-per-node world-size",
    "--nnodes": "N num-nodes num-machines nodes",
    "--node-rank": "machine-rank rank",
    "--master-addr": "main-process-ip",
    "--master-port": "main-process-port",
}
"""The names that mpirun, srun, accelerate, deepspeed and others have for a flag of ours."""


def _no_such(word: str) -> click.UsageError:
    given = word.partition("=")[0]
    for flag, names in ELSEWHERE.items():
        if given.strip("-0123456789").replace("_", "-") in names.split():
            what = f"No such option {given!r}. Did you mean {flag!r}? {SPELLINGS[flag].help}"
            return click.UsageError(what)
    meant = _meant(f"-{given}") if given[1:2] != "-" and len(given) > 2 else []
    if len(meant) == 1:  # -nproc_per_node, with one hyphen
        return click.UsageError(
            f"No such option {given!r}. Did you mean '--{SPELLINGS[meant[0]].name}'?"
        )
    long = [f"--{name}" for flag in LINE_FLAGS for name in (flag.name, *flag.aliases)]
    name = word.partition("=")[0] if word[:2] == "--" else word[:2]
    return click.NoSuchOption(name, possibilities=[*long, HELP, HELP_ALL])


def _without_value(name: str, argv: Sequence[str]) -> click.UsageError:
    flag = SPELLINGS[_meant(name)[0]]
    if flag.is_switch:
        return click.UsageError(f"{name} stands alone, without a value")
    behind = (
        after for word, after in itertools.pairwise(argv) if word == name and after[:1] == "-"
    )
    got = next((f", but {after!r} follows" for after in behind), "")
    return click.UsageError(f"{name} needs a value: {flag.kind.allowed or flag.kind.metavar}{got}")


class _RunCommand(click.Command):
    """A command whose line is read by torchrun's rules, and whose help has two lengths."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            line = parse(args)
        except click.UsageError as exc:
            exc.ctx = ctx
            raise
        if line.help:
            ctx.obj = line.help
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        shell = line.flags.get(completion.FLAG.name)
        if shell is not None:
            given = Given(shell, "command line")
            click.echo(completion.script(str(convert(completion.FLAG, given))), nl=False)
            ctx.exit()
        ctx.params = {"line": line}
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] SCRIPT [ARGS]..."]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags that are used most, or with ``--help-all`` all of them in groups."""
        if ctx.obj != HELP_ALL:
            with formatter.section("Options"):
                formatter.write_dl([*(_help(TABLE[name]) for name in USUAL), *_HELP_FLAGS])
            return
        for group, flags in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(list(map(_help, flags)))
        with formatter.section("Help"):
            formatter.write_dl([*_HELP_FLAGS, _help(completion.FLAG)])


_HELP_FLAGS = (
    ("-h, --help", "Show the flags that most jobs need."),
    (HELP_ALL, f"Show all {len(FLAGS)} flags, in groups."),
)


def _help(flag: Flag) -> tuple[str, str]:
    names = [flag.short] if flag.short else []
    names += [f"--{name}" for name in (flag.name, *flag.aliases)]
    default = f"  [{flag.default}]" if flag.default and not flag.is_switch else ""
    return f"{', '.join(names)} {flag.kind.metavar}".rstrip(), f"{flag.help}{default}"


def _start(line: Line) -> int:
    """Resolve the settings, print the notices, and call the agent or the dry run."""
    from elaunch.config import resolve

    cwd = working_directory()
    try:
        settings = resolve(line.flags, line.command, os.environ, cwd)
    except ElaunchError as error:
        from elaunch.agent.failure.errorfile import write_launcher_error

        write_launcher_error(os.environ, error)
        raise
    for notice in settings.notices:
        click.echo(f"elaunch: note: {notice}", err=True)
    if settings.dry_run and not settings.detach:
        from elaunch.cli import dryrun

        dryrun.show(settings, os.environ)
        return 0
    from elaunch.agent.startup import run as run_agent

    if settings.detach:
        from elaunch.agent import detach
        from elaunch.server import devices

        detach.check(settings)
        # That torch knows no such device is an error in the foreground.
        devices.resolve(settings.nproc_per_node, settings.interpreter)
        return detach.run(settings, run_agent)
    return run_agent(settings)


run = _RunCommand(
    "run",
    callback=_start,
    help="Start SCRIPT once per worker, watch the workers, and restart all of them from the "
    "newest checkpoint when one fails.\n\nEvery flag is also a variable (ELAUNCH_MAX_RESTARTS, "
    "PET_MAX_RESTARTS) and a key of a job file (max_restarts). '_' may stand for '-', and a "
    "flag may be shortened.",
    context_settings={"help_option_names": ["-h", HELP]},
)
