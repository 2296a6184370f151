"""Commands that start nothing: how long a person waits for a version, a help text, an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

LIMIT = Target("at_most", 0.15)
TIMEOUT = 30.0


@dataclass(frozen=True)
class Command:
    """The arguments and exit code of a command under each launcher (code None: any but 0)."""

    key: str
    title: str
    elaunch: tuple[str, ...]
    torchrun: tuple[str, ...]
    elaunch_code: int = 0
    torchrun_code: int | None = 0


COMMANDS = (
    Command("version", "--version (torchrun: --help)", ("--version",), ("--help",)),
    Command("help", "--help", ("--help",), ("--help",)),
    Command("run-help", "run --help", ("run", "--help"), ("--help",)),
    Command(
        "usage-flag",
        "usage error: unknown flag",
        ("run", "--nproc-per-mode", "2", "train.py"),
        ("--nproc-per-mode", "2", "train.py"),
        elaunch_code=2,
        torchrun_code=2,
    ),
    Command(
        "usage-script",
        "usage error: script missing",
        ("run", "no-such-script.py"),
        ("--standalone", "no-such-script.py"),
        elaunch_code=2,
        torchrun_code=None,
    ),
)


def cases(options: Options) -> list[Case]:
    """Return one case for each command."""
    repeats = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    return [
        Case(
            "commands",
            command.title,
            (Figure(command.key, command.title, "s", LIMIT),),
            partial(_measure, command),
            repeats,
        )
        for command in COMMANDS
    ]


def _measure(command: Command, trial: Trial) -> Mapping[str, Sample]:
    ours = trial.is_elaunch
    args = command.elaunch if ours else command.torchrun
    wanted = command.elaunch_code if ours else command.torchrun_code
    with Job(trial.root, [trial.launcher.program, *args]) as job:
        code, seconds = job.wait(TIMEOUT)
        if code != wanted if wanted is not None else code == 0:
            raise job.error(f"exit code {code} instead of {wanted}")
    return {command.key: Sample(seconds)}
