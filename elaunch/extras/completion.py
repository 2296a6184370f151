"""``elaunch run --print-completion SHELL`` and ``elaunch man``: made from commands and flags.

The completion script needs nothing but the shell. It completes the commands, their flags, and the
values of those of ``run`` that have a few; from the script of the job on, and everywhere else,
files. ``elaunch-torchrun`` is completed as ``elaunch run`` is.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import click

from elaunch import __version__
from elaunch.cli import COMMANDS, cli
from elaunch.config.flags.flag import Flag, one_of
from elaunch.config.flags.table import FLAGS

BASH = """\
# Completion of elaunch for bash: elaunch run --print-completion bash > \
~/.local/share/bash-completion/completions/elaunch
_elaunch() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} flag= word i
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '{commands}' -- "$cur"))
        return
    fi
    if [[ ${{COMP_WORDS[1]}} != run ]]; then
        [[ $cur == -* ]] && case ${{COMP_WORDS[1]}} in
{others}
        esac
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ $word == = ]]; then
            continue
        elif [[ -n $flag ]]; then
            flag=
        elif [[ $word == -* ]]; then
            case $word in {valued}) flag=$word ;; esac
        else
            return
        fi
    done
    [[ $cur == = ]] && cur=
    case $flag in
        '') [[ $cur == -* ]] && COMPREPLY=($(compgen -W '{flags}' -- "$cur")) ;;
{choices}
    esac
}}
_elaunch_torchrun() {{
    COMP_WORDS=(elaunch run "${{COMP_WORDS[@]:1}}")
    ((COMP_CWORD++))
    _elaunch
}}
complete -o default -o bashdefault -F _elaunch elaunch
complete -o default -o bashdefault -F _elaunch_torchrun elaunch-torchrun
"""
ZSH = """\
#compdef elaunch elaunch-torchrun
# Completion of elaunch for zsh: elaunch run --print-completion zsh > ~/.zsh/completions/_elaunch
if [[ $service == elaunch-torchrun ]]; then
    words=(elaunch run "${{(@)words[2,-1]}}")
    (( CURRENT++ ))
fi
if (( CURRENT == 2 )); then
    compadd -- {commands}
elif [[ $words[2] == run ]]; then
    shift words
    (( CURRENT-- ))
    _arguments -S -A '-*' \\
{flags} \\
        '*::script:_files'
else
    case $words[2] in
{others}
    esac
    _files
fi
"""
FISH = """\
# Completion of elaunch for fish: elaunch run --print-completion fish > \
~/.config/fish/completions/elaunch.fish
complete -c elaunch -n __fish_use_subcommand -f -a '{commands}'
{flags}
{others}
complete -c elaunch-torchrun -w 'elaunch run'
"""
TCSH = """\
# Completion of elaunch for tcsh: elaunch run --print-completion tcsh > ~/.elaunch.tcsh
complete elaunch 'p/1/({commands})/' {choices} 'c/--/({flags})/' 'n/*/f/'
complete elaunch-torchrun {choices} 'c/--/({flags})/' 'n/*/f/'
"""


def script(shell: str) -> str:
    """Return the completion script for ``bash``, ``zsh``, ``fish`` or ``tcsh``."""
    return _SCRIPTS[shell]()


def _long(flag: Flag) -> list[str]:
    return [f"--{name}" for name in (flag.name, *flag.aliases)]


def _bash() -> str:
    valued = [name for flag in FLAGS if not flag.is_switch for name in flag.spellings]
    choices = [
        f"""        {"|".join(flag.spellings)}) COMPREPLY=($(compgen -W """
        f"""'{" ".join(flag.kind.choices)}' -- "$cur")) ;;"""
        for flag in FLAGS
        if flag.kind.choices
    ]
    others = [
        f"""            {name}) COMPREPLY=($(compgen -W '{" ".join(flags)}' -- "$cur")) ;;"""
        for name, flags in _others().items()
    ]
    return BASH.format(
        commands=" ".join(COMMANDS),
        others="\n".join(others),
        valued="|".join(valued),
        flags=" ".join(name for flag in FLAGS for name in _long(flag)),
        choices="\n".join(choices),
    )


def _zsh() -> str:
    rows = [f"        {shlex.quote(row)}" for flag in FLAGS for row in _zsh_rows(flag)]
    others = [f"        {name}) compadd -- {' '.join(own)} ;;" for name, own in _others().items()]
    commands = " ".join(COMMANDS)
    return ZSH.format(commands=commands, flags=" \\\n".join(rows), others="\n".join(others))


def _zsh_rows(flag: Flag) -> list[str]:
    """Return what zsh's _arguments takes for each name of a flag."""
    help_text = re.sub(r"([\[\]\\])", r"\\\1", flag.help)
    if flag.is_switch:
        return [f"{name}[{help_text}]" for name in _long(flag)]
    choices = f"({' '.join(flag.kind.choices)})" if flag.kind.choices else "_files"
    value = flag.kind.metavar.replace(":", "\\:")
    return [f"{name}=[{help_text}]:{value}:{choices}" for name in _long(flag)]


def _fish() -> str:
    flags = [
        f"complete -c elaunch -n '__fish_seen_subcommand_from run' -l {name[2:]}"
        f" -d {shlex.quote(flag.help)}" + _fish_value(flag)
        for flag in FLAGS
        for name in _long(flag)
    ]
    others = [
        f"complete -c elaunch -n '__fish_seen_subcommand_from {command}' -l {name[2:]}"
        for command, names in _others().items()
        for name in names
    ]
    commands = " ".join(COMMANDS)
    return FISH.format(commands=commands, flags="\n".join(flags), others="\n".join(others))


def _fish_value(flag: Flag) -> str:
    if flag.kind.choices:
        return f" -x -a '{' '.join(flag.kind.choices)}'"
    return "" if flag.is_switch else " -r"


def _others() -> dict[str, list[str]]:
    """Return the long flags of the commands beside ``run``, and of theirs."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        if name == "run" or command is None:
            continue
        parts = [command, *getattr(command, "commands", {}).values()]
        names = [long for part in parts for one in part.params for long in one.opts]
        found[name] = list(dict.fromkeys(long for long in [*names, "--help"] if long[:2] == "--"))
    return found


def _tcsh() -> str:
    choices = [
        f"'n/{name}/({' '.join(flag.kind.choices)})/'"
        for flag in FLAGS
        if flag.kind.choices
        for name in _long(flag)
    ]
    return TCSH.format(
        commands=" ".join(COMMANDS),
        choices=" ".join(choices),
        flags=" ".join(name[2:] for flag in FLAGS for name in _long(flag)),
    )


_SCRIPTS: Mapping[str, Callable[[], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
    "tcsh": _tcsh,
}

FLAG = Flag(
    "print-completion",
    one_of(*_SCRIPTS),
    None,
    "Print a completion script for the shell, and start nothing.",
)
"""It stands on the command line alone: no variable and no key of a job file asks for it."""


@click.command("man")
def man() -> None:
    """Print the manual page, in the language of man(7).

    `elaunch man | man -l -` shows it. `elaunch man > ~/.local/share/man/man1/elaunch.1` installs it
    for `man elaunch`.
    """
    click.echo(page(), nl=False)


def page() -> str:
    """Return the manual page, made from the commands' help and the table of flags."""
    date = time.strftime("%Y-%m-%d")
    lines = [f'.TH ELAUNCH 1 {date} "elaunch {__version__}" "User Commands"']
    lines += [".SH NAME", rf"elaunch \- {_shown((cli.help or '').rstrip('.'))}"]
    lines += [".SH SYNOPSIS", r".B elaunch \fICOMMAND\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]"]
    lines += [".SH COMMANDS"]
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        lines += _command(f"elaunch {name}", command)
        for part, inner in sorted(getattr(command, "commands", {}).items()):
            lines += _command(f"elaunch {name} {part}", inner)
    lines += [".SH OPTIONS OF ELAUNCH RUN"]
    lines += _options((", ".join(flag.spellings), flag.kind.metavar, flag.help) for flag in FLAGS)
    lines += [".SH SEE ALSO", ".BR torchrun (1)"]
    return "\n".join(lines) + "\n"


def _command(name: str, command: click.Command) -> Iterator[str]:
    yield f".SS {_shown(name)}"
    for paragraph in (command.help or "").split("\n\n"):
        yield _shown(" ".join(paragraph.split()))
        yield ".PP"
    yield from _options(
        (", ".join(one.opts), one.metavar or "", one.help or "")
        for one in command.params
        if isinstance(one, click.Option) and one.help
    )


def _options(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    for names, value, text in rows:
        yield ".TP"
        yield rf"\fB{_shown(names)}\fR \fI{_shown(value)}\fR".removesuffix(r" \fI\fR")
        yield _shown(" ".join(text.split()))


def _shown(text: str) -> str:
    """Return what is shown as ``text``: a line that begins with a dot or a quote is no request."""
    shown = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{shown}" if shown[:1] in (".", "'") else shown
