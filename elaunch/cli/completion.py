"""``elaunch run --print-completion SHELL``: a completion script, made from the table of flags.

The script needs nothing but the shell. It completes the commands, the flags of ``run`` and the
values of those that have a few; from the script of the job on, and everywhere else, files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping

from elaunch.cli import COMMANDS
from elaunch.config.flag import Flag, one_of
from elaunch.config.table import FLAGS

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
    [[ ${{COMP_WORDS[1]}} == run ]] || return
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
complete -o default -o bashdefault -F _elaunch elaunch
"""
ZSH = """\
#compdef elaunch
# Completion of elaunch for zsh: elaunch run --print-completion zsh > ~/.zsh/completions/_elaunch
if (( CURRENT == 2 )); then
    compadd -- {commands}
elif [[ $words[2] == run ]]; then
    shift words
    (( CURRENT-- ))
    _arguments -S -A '-*' \\
{flags} \\
        '*::script:_files'
else
    _files
fi
"""
TCSH = """\
# Completion of elaunch for tcsh: elaunch run --print-completion tcsh > ~/.elaunch.tcsh
complete elaunch 'p/1/({commands})/' {choices} 'c/--/({flags})/' 'n/*/f/'
"""


def script(shell: str) -> str:
    """Return the completion script for ``bash``, ``zsh`` or ``tcsh``."""
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
    return BASH.format(
        commands=" ".join(COMMANDS),
        valued="|".join(valued),
        flags=" ".join(name for flag in FLAGS for name in _long(flag)),
        choices="\n".join(choices),
    )


def _zsh() -> str:
    rows = [f"        {shlex.quote(row)}" for flag in FLAGS for row in _zsh_rows(flag)]
    return ZSH.format(commands=" ".join(COMMANDS), flags=" \\\n".join(rows))


def _zsh_rows(flag: Flag) -> list[str]:
    """Return what zsh's _arguments takes for each name of a flag."""
    help_text = re.sub(r"([\[\]\\])", r"\\\1", flag.help)
    if flag.is_switch:
        return [f"{name}[{help_text}]" for name in _long(flag)]
    choices = f"({' '.join(flag.kind.choices)})" if flag.kind.choices else "_files"
    value = flag.kind.metavar.replace(":", "\\:")
    return [f"{name}=[{help_text}]:{value}:{choices}" for name in _long(flag)]


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


_SCRIPTS: Mapping[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "tcsh": _tcsh}

FLAG = Flag(
    "print-completion",
    one_of(*_SCRIPTS),
    None,
    "Print a completion script for the shell, and start nothing.",
)
"""It stands on the command line alone: no variable and no key of a job file asks for it."""
