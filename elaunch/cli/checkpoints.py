"""``elaunch checkpoints``: what is in a checkpoint directory, and what is done with it.

=========  =====================================================  ================================
command    does                                                   exit code 1
=========  =====================================================  ================================
ls         lists them, with those in quarantine                   the directory cannot be read
show       shows all about one
verify     reads them and compares checksums                      one of them is damaged
rm         removes some                                           one cannot be removed
pin unpin  keeps one from retention                               that cannot be written
export     writes one to a file of torch.save                     it cannot be read or written
import     makes one of a file of torch.save                      the same
=========  =====================================================  ================================

Exit code 2: what was asked for is not there or must not be done; nothing was changed.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

import click

from elaunch.errors import CheckpointError, UsageError
from elaunch.text import block
from elaunch.views.layout import show as print_page

if TYPE_CHECKING:
    from elaunch.views.checkpoints import ListedCheckpoint, Listing

P = ParamSpec("P")

FAILED = 1


@click.group(
    "checkpoints",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
def checkpoints() -> None:
    """List, verify, pin, remove and convert checkpoints.

    RUN_OR_DIR is a checkpoint directory, a URL, or a run of this machine. NAME is a name as `ls`
    shows it, a step (120), latest, or the beginning of a uuid.
    """


def _opened(
    function: Callable[Concatenate[Listing, str, P], int | None],
) -> Callable[Concatenate[str, P], int]:
    """Call a command with the listing of RUN_OR_DIR; make one line and 1 of what goes wrong."""

    @wraps(function)
    def command(where: str, *args: P.args, **kwargs: P.kwargs) -> int:
        from elaunch.views.checkpointtarget import listing, resolve

        try:
            target = resolve(where, os.environ)
            there = listing(target, os.environ)
            return function(there, target.name, *args, **kwargs) or 0
        except CheckpointError as error:
            click.echo(f"elaunch: error: {block(str(error))}", err=True)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not error.filename:
                raise  # the reader has gone, as behind `| head`: no error of the directory
            what = f"{error.filename}: " if error.filename else ""
            click.echo(f"elaunch: error: {what}{error.strerror or error}", err=True)
        return FAILED

    return cast("Callable[Concatenate[str, P], int]", command)


_where = click.argument("where", metavar="RUN_OR_DIR")
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON (docs/checkpoint-commands.md)."
)
_force = click.option("--force", is_flag=True, help="Do it in spite of that.")


@checkpoints.command("ls")
@_where
@_json
@_opened
def ls(there: Listing, _: str, as_json: bool) -> None:
    """List checkpoints, the oldest first.

    Those in quarantine are shown with the reason. Files are not read: `verify` does that.
    """
    from elaunch.views.checkpoints import document, list_page

    if isinstance(there.place, Path) and not there.place.is_dir():
        raise UsageError(f"there is no directory {str(there.place)!r}: nothing was saved yet")
    if as_json:
        _print_json(document(there))
    else:
        print_page(list_page(there, time.time()))


@checkpoints.command("show")
@_where
@click.argument("name", required=False)
@_json
@_opened
def show(there: Listing, pointed: str, name: str | None, as_json: bool) -> None:
    """Show one checkpoint: its run and hosts, metadata, metrics and files."""
    from elaunch.views.checkpoints import entry_document, show_page
    from elaunch.views.checkpointtarget import pick

    entry = pick(there, name or pointed or "latest")
    files = _files(entry)
    if as_json:
        _print_json({**entry_document(entry), "files": files})
    else:
        print_page(show_page(entry, files, time.time()))


@checkpoints.command("verify")
@_where
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_json
@_opened
def verify(there: Listing, pointed: str, names: tuple[str, ...], as_json: bool) -> int:
    """Read checkpoints and find damage; without a NAME, all of them.

    The exit code is 1 if one is damaged. In elaunch's own layout this finds a missing file, a
    truncation and a flipped bit. Other formats have no checksums: their headers are compared.
    """
    from elaunch.views.checkpoints import problem_of, verdict_page
    from elaunch.views.checkpointtarget import choose

    asked = names or ((pointed,) if pointed else ())
    entries = choose(there, asked) if asked else list(there.entries)
    if not entries:
        raise UsageError(f"{there.place} has no checkpoints")
    verdicts = [(entry, problem_of(there.storage, entry)) for entry in entries]
    bad = any(problem for _, problem in verdicts)
    if as_json:
        said = [
            {"name": entry.name, "good": not problem, "reason": problem or None}
            for entry, problem in verdicts
        ]
        _print_json({"schema": 1, "directory": str(there.place), "checkpoints": said})
    else:
        print_page(verdict_page(verdicts))
    return FAILED if bad else 0


@checkpoints.command("rm")
@_where
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_force
@_opened
def rm(there: Listing, _: str, names: tuple[str, ...], force: bool) -> None:
    """Remove checkpoints in elaunch's own layout.

    Without --force, the newest, pinned ones, and those that a living run has resumed from or reads
    are refused.
    """
    from elaunch.checkpoint import retention, shelves
    from elaunch.views.checkpointtarget import choose

    entries = choose(there, names)
    for entry in entries:
        _check_removal(there, entry, force)
    for entry in entries:
        assert entry.found is not None  # the check has refused others
        with retention.claimed(entry.found.place) as free:
            if not free and not force:
                raise UsageError(f"{entry.name} is being read; wait, or give --force")
            there.storage.remove(entry.found)
        if entry.pinned:
            shelves.unpin(there.place, entry.name)
        click.echo(f"removed {entry.name}")


def _check_removal(there: Listing, entry: ListedCheckpoint, force: bool) -> None:
    from elaunch.checkpoint import layout

    if entry.state == "quarantined":
        aside = f"/{layout.QUARANTINE}" if isinstance(there.place, Path) else ""
        at = f"{there.place}{aside}/{entry.name}"
        raise UsageError(f"{entry.name} is in quarantine: remove {at} yourself")
    if entry.found is None:
        raise UsageError(
            f"{entry.name} is not a committed checkpoint in elaunch's own layout: remove it with "
            f"`rm -r` below {there.place}"
        )
    if force:
        return
    problem = ""
    if entry.pinned:
        problem = "is pinned: unpin it"
    elif entry.name in there.resumed:
        problem = f"is what the living run {there.resumed[entry.name]} has resumed from: wait"
    elif there.newest is not None and entry.name == there.newest.name:
        problem = "is the newest, which the next start resumes from: remove an older one"
    if problem:
        raise UsageError(f"{entry.name} {problem}, or give --force")


@checkpoints.command("pin")
@_where
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_opened
def pin(there: Listing, _: str, names: tuple[str, ...]) -> None:
    """Protect checkpoints from retention (--checkpoint-keep-…) until they are unpinned."""
    _set_pins(there, names, True)


@checkpoints.command("unpin")
@_where
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_opened
def unpin(there: Listing, _: str, names: tuple[str, ...]) -> None:
    """Let retention remove checkpoints again."""
    _set_pins(there, names, False)


def _set_pins(there: Listing, names: tuple[str, ...], on: bool) -> None:
    from elaunch.checkpoint import shelves
    from elaunch.views.checkpointtarget import choose

    for entry in choose(there, names):
        if entry.found is None:
            raise UsageError(
                f"{entry.name} is not a committed checkpoint in elaunch's own layout: retention "
                "leaves it alone anyway"
            )
        (shelves.pin if on else shelves.unpin)(there.place, entry.name)
        click.echo(f"{'pinned' if on else 'unpinned'} {entry.name}")


@checkpoints.command("export")
@_where
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_force
@click.option("--trust", is_flag=True, help="Allow a checkpoint that runs code when it is read.")
@_opened
def export(there: Listing, _: str, name: str, file: Path, *, force: bool, trust: bool) -> None:
    """Convert a checkpoint of torch.distributed.checkpoint to one FILE of torch.save.

    --force replaces an existing FILE; of a link, the file that it leads to. This needs torch, and
    memory for the whole checkpoint.
    """
    from elaunch.checkpoint import retention
    from elaunch.training.checkpoint.dcp.convert import to_torch_file
    from elaunch.views.checkpoints import problem_of
    from elaunch.views.checkpointtarget import pick

    entry = pick(there, name)
    target = _target(file, force)
    if problem := problem_of(there.storage, entry):
        raise CheckpointError(f"{entry.name} is damaged: {problem}")
    if entry.found is not None:
        with retention.reading(entry.found.place), there.storage.fetch(entry.found) as path:
            to_torch_file(path, target, entry.found.metadata, trusted=trust)
    elif entry.candidate is not None:
        to_torch_file(entry.candidate.path, target, trusted=trust)
    click.echo(f"wrote {entry.name} to {file}")


def _target(file: Path, force: bool) -> Path:
    """Return the file that is to be written, behind links; UsageError if it must not be."""
    try:
        mode: int | None = file.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise UsageError(f"{str(file)!r} cannot be written: {error.strerror}") from None
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"{str(file)!r} is no regular file, and is not replaced; give another")
    if mode is not None and not force:
        raise UsageError(f"{str(file)!r} is there already; give another name, or --force")
    target = Path(os.path.realpath(file))
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {str(file.parent)!r} to write {file.name!r} to")
    return target


@checkpoints.command("import")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("directory", metavar="DIR")
@click.option(
    "--step", type=click.IntRange(min=0), required=True, help="Step of the checkpoint.", metavar="N"
)
@click.option(
    "--run-id",
    "--rdzv-id",
    "run_id",
    metavar="ID",
    help="Run that it belongs to.  [default: DIR's own]",
)
@click.option("--trust", is_flag=True, help="Allow a FILE that runs code when it is read.")
def import_(file: Path, directory: str, step: int, run_id: str | None, trust: bool) -> int:
    """Convert one FILE of torch.save to a committed checkpoint in DIR.

    A run that is started with --rdzv-id resumes only from its own checkpoints: give that id.
    """
    from elaunch.checkpoint.search.locations import parse_location
    from elaunch.training.checkpoint.dcp.convert import import_file

    try:
        place = parse_location(directory)
    except ValueError as error:
        raise UsageError(f"{directory!r} {error}") from None
    try:
        found = import_file(file, place, step, run_id, trust)
    except CheckpointError as error:
        click.echo(f"elaunch: error: {block(str(error))}", err=True)
        return FAILED
    except OSError as error:
        click.echo(f"elaunch: error: {error.filename or file}: {error.strerror}", err=True)
        return FAILED
    click.echo(f"committed {found.name} of run {found.run_id} in {directory}")
    return 0


def _files(entry: ListedCheckpoint) -> list[dict[str, Any]]:
    """Return the files as the manifests list them; of other formats none."""
    found = entry.found
    if found is None or not isinstance(found.place, Path):
        return []
    from elaunch.checkpoint.formats import own

    return [
        {"path": file.path, "rank": rank, "size": file.size, "checksum": file.checksum}
        for rank, files in own.read_documents(found.place, None).items()
        for file in files
    ]


def _print_json(said: dict[str, Any]) -> None:
    click.echo(json.dumps(_known(said), indent=2, allow_nan=False))


def _known(value: Any) -> Any:
    """Return a value with None for each number that JSON has no word for: NaN, infinity."""
    if isinstance(value, Mapping):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
