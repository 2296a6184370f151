"""``elaunch manifest``: ready files for schedulers, from the flags of ``elaunch run``.

Here the words of a command line become a job; ``elaunch.extras.schedulers`` has the files of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from elaunch.cli.run import SPELLINGS, Line, parse
from elaunch.cli.stop import DAY_S, up_to
from elaunch.config import checks, command, settings
from elaunch.config.flags.flag import Answers, collect
from elaunch.config.flags.table import TABLE
from elaunch.endings import PREEMPTED
from elaunch.errors import UsageError
from elaunch.extras.schedulers import MARGIN_S, TARGETS, ScheduledJob, to_yaml

LONGEST_S: Final = 9999 * DAY_S
_MEETING: Final = frozenset(
    "standalone node-rank master-addr master-port local-addr detach dry-run workdir".split()
)
"""Flags that the target decides on, or that make no sense there."""
_SIZE: Final = ("nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint")

_CLAIM: Final = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)


def read(words: Sequence[str], **given: Any) -> ScheduledJob:
    """Return what the words of ``elaunch run`` ask for.

    Raises UsageError for what is wrong with them, or means nothing to a scheduler.
    """
    line = _parse(words)
    if line.help or not (line.command or "file" in line.flags):
        raise UsageError("give the flags of `elaunch run` and the script; `elaunch run --help`")
    file = settings.job_file(line.flags, {}, Path.cwd())
    answers = collect(TABLE.values(), line.flags, {}, file)
    for name in (*line.flags, *(one for one in file.flags if one != "workdir")):
        if name in _MEETING:
            raise answers.fault(name, "has no place in a manifest", "the scheduler decides that")
    checks.refused(answers)
    _check_backend(answers)
    if answers["exit-codes"] == "torchrun":
        why = f"has no place in a manifest: a job to be continued has to end with {PREEMPTED}"
        raise answers.fault("exit-codes", why, "leave it out")
    for word in (*line.command, *line.flags.values(), given["image"], given["claim"]):
        if not _is_text(word):
            raise UsageError(f"{word!r} has bytes in it that are no text in UTF-8")
    chosen = command.choose(line.command, file.entrypoint, answers)
    if chosen.is_open_here:
        why = f"script {chosen.shown}: no scheduler has this open file"
        raise UsageError(f"{why}; save it to a file", code="E-NO-SCRIPT")
    flags = [_flag(name, text) for name, text in line.flags.items() if name not in _SIZE]
    if given["claim"] and not _can_be_mounted_at(str(answers["checkpoint-dir"] or "")):
        what = "an absolute path that is not / or /dev/shm and has no ':'"
        raise UsageError(f"--claim: give --checkpoint-dir, {what}: it is mounted there")
    if given["lead"] <= MARGIN_S:
        raise UsageError(
            f"--lead: {given['lead']} s are too short: the agent takes up to {MARGIN_S} of them "
            f"to end what has not saved; give {MARGIN_S + 1} or more"
        )
    name = label(answers["name"] or chosen.name)
    ended = ("--",) if line.command and chosen.entrypoint.startswith("-") else ()
    return ScheduledJob(name, answers, tuple(flags), (*ended, *line.command), **given)


def _parse(words: Sequence[str]) -> Line:
    try:
        return parse(words)
    except click.UsageError as error:
        own = [name for option in manifest.params for name in option.opts if name[:2] == "--"]
        for name in own:
            if repr(name) in error.format_message():
                raise UsageError(
                    f"{name} is an option of `elaunch manifest`; it stands before the target"
                ) from None
        raise


def _check_backend(answers: Answers) -> None:
    backend = answers["rdzv-backend"]
    if answers.is_set("rdzv-backend") and backend not in ("c10d", "etcd"):
        fix = "the nodes meet at the first one (c10d), or in an etcd (etcd)"
        raise answers.fault("rdzv-backend", "has no place in a manifest", fix)
    if backend != "etcd" and answers["rdzv-endpoint"]:
        raise answers.fault("rdzv-endpoint", "is for etcd here", "the nodes meet at the first one")
    if backend == "etcd" and not answers["rdzv-endpoint"]:
        raise answers.fault("rdzv-backend", "needs --rdzv-endpoint", "name the members of etcd")


def _can_be_mounted_at(path: str) -> bool:
    place = os.path.normpath(f"/{path.lstrip('/')}")
    return path[:1] == "/" and place not in ("/", "/dev/shm") and ":" not in path


def _is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False


def _flag(name: str, text: str) -> str:
    return f"--{name}" if TABLE[name].is_switch and text == "yes" else f"--{name}={text}"


def label(text: str) -> str:
    """Return a name as Kubernetes allows it for a Service, the strictest."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"train-{plain}".strip("-")


class _Manifest(click.Command):
    """Names the place of a flag of ``elaunch run`` that stands before the target."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in SPELLINGS:
                raise
            raise UsageError(
                f"{error.option_name} is a flag of `elaunch run`; it stands behind the target"
            ) from None


@click.command(
    "manifest",
    cls=_Manifest,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
)
@click.option(
    "--image",
    default="",
    metavar="IMAGE",
    help="Image of the pods, with elaunch and the script; not for slurm.",
)
@click.option(
    "--gpus", type=click.IntRange(0), default=0, metavar="N", help="Number of GPUs of each node."
)
@click.option(
    *("--time", "limit"),
    callback=up_to(LONGEST_S),
    default="0",
    metavar="DURATION",
    help="Time limit of the job, as in 30m, 4h, 2d.  [default: none]",
)
@click.option(
    "--lead",
    callback=up_to(LONGEST_S),
    default="2m",
    metavar="DURATION",
    help="Time from the request to save to the end.  [default: 2m]",
)
@click.option(
    "--claim",
    default="",
    metavar="NAME",
    help="PersistentVolumeClaim to mount at --checkpoint-dir; not for slurm.",
)
@click.argument("target", metavar="|".join(TARGETS), type=click.Choice(list(TARGETS)))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[RUN FLAGS] SCRIPT [ARGS]...")
def manifest(target: str, words: tuple[str, ...], **given: Any) -> None:
    """Print a scheduler's file that starts what `elaunch run` would.

    After the target come the flags of `elaunch run`, the script and its arguments.
    """
    image, claim = given["image"], given["claim"]
    given |= {name: int(given[name]) for name in ("limit", "lead")}
    if target == "slurm" and (image or claim):
        raise UsageError(f"--{'image' if image else 'claim'}: is for pods; slurm has none")
    if target != "slurm" and not re.fullmatch(r"[^\s-]\S*", image):
        fault = f"{image!r} is no image" if image else f"{target} needs the image"
        raise UsageError(f"--image: {fault} that has elaunch and the script")
    if claim and not _CLAIM.fullmatch(claim):
        raise UsageError(
            f"--claim: {claim!r} is no name of a PersistentVolumeClaim: small letters, digits, "
            "'-' and '.', a letter or digit first and last, at most 253"
        )
    job = read(words, **given)
    if job.gpus > 1 and not job.answers.is_set("nproc-per-node"):
        line = f"a node has {job.gpus} GPUs and 1 worker; `--nproc-per-node {job.gpus}` behind"
        click.echo(f"elaunch: note: {line} {target} gives each one a worker", err=True)
    made = TARGETS[target](job)
    click.echo(made if isinstance(made, str) else to_yaml(made), nl=False)
