"""``--print-completion``: the scripts that it prints, bash's in bash itself."""

from __future__ import annotations

import subprocess

import click
import pytest
from click.testing import CliRunner

from elaunch.cli import COMMANDS
from elaunch.cli.run import parse, run
from elaunch.config.flags.table import FLAGS
from elaunch.errors import UsageError
from elaunch.extras import completion

COMPLETE = """
source /dev/stdin
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
found=$(complete -p "$1")
found=${found#*-F }
${found% *}
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("st", "stacks stop status"),
        ("pr", "profile preempt"),
        ("run --rdzv-b", "--rdzv-backend"),
        ("run --rdzv-backend ", "static c10d etcd"),
        ("run --nnodes 2 --numa_binding = ex", "exclusive"),
        ("run --rdzv-backend =", "static c10d etcd"),
        ("run --role --tee --no-p", "--no-python"),
        ("run -m -t 3 --standalone --log-r", "--log-ranks"),
        ("run train.py --no-p", ""),
        ("run --max-restarts ", ""),
        ("status --no-p", ""),
        ("status --wa", "--watch"),
        ("logs job --s", "--stream --since"),
        ("checkpoints verify --js", "--json"),
    ],
)
def test_what_bash_completes(line: str, expected: str) -> None:
    """Commands, flags and their values; files, which bash finds itself, from the script on."""
    assert completed("elaunch", *line.split(" ")) == expected.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [("--rdzv-b", "--rdzv-backend"), ("--rdzv-backend ", "static c10d etcd"), ("st", "")],
)
def test_what_bash_completes_of_torchruns_command(line: str, expected: str) -> None:
    """`elaunch-torchrun` has no commands, and the flags of `elaunch run`."""
    assert completed("elaunch-torchrun", *line.split(" ")) == expected.split()


def completed(*words: str) -> list[str]:
    """Return what bash offers for the last of the words of a line."""
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", *words],
        input=completion.script("bash"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_every_flag_and_command_is_in_the_script(shell: str) -> None:
    """It is printed whole, and nothing else is, whatever else the line has."""
    printed = CliRunner().invoke(run, ["--print-completion", shell, "nosuch.py"])
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert printed.stdout == completion.script(shell)
    assert [flag.name for flag in FLAGS if flag.name not in printed.stdout] == []
    assert [name for name in COMMANDS if name not in printed.stdout] == []
    assert "elaunch-torchrun" in printed.stdout


def test_another_shell_is_refused() -> None:
    """The nearest is named; the flag needs one."""
    refused = CliRunner().invoke(run, ["--print-completion=bsh"])
    assert isinstance(refused.exception, UsageError)
    assert "did you mean 'bash'? (allowed: bash, zsh, fish, tcsh)" in str(refused.exception)
    with pytest.raises(click.UsageError, match="needs a value: bash, zsh, fish, tcsh"):
        parse(["--print-completion"])
