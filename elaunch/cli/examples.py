"""``elaunch examples``: the installed example scripts, to read and to start from."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

import click

from elaunch.config.values import did_you_mean
from elaunch.errors import UsageError

DIRECTORY = Path(__file__).parents[1] / "examples"
README = "README.md"


@click.group("examples", invoke_without_command=True)
@click.pass_context
def examples(ctx: click.Context) -> None:
    """List, show or copy the examples that are installed with elaunch.

    Without a command, list their names and what each shows.
    """
    if ctx.invoked_subcommand is None:
        names = installed()
        width = max(map(len, names))
        for name, path in names.items():
            click.echo(f"{name:<{width}}  {_about(path)}")
        click.echo(f"\n`elaunch examples show NAME`, `copy NAME DIR`; they are in {DIRECTORY}")


@examples.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print the example NAME."""
    click.echo(_named(name).read_text(encoding="utf-8"), nl=False)


@examples.command("copy")
@click.argument("words", nargs=-1, metavar="[NAME]... [DIR]")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
def copy(words: tuple[str, ...], force: bool) -> None:
    """Copy examples to DIR; without a NAME, all of them.

    DIR is the current directory by default, and is made if it has a slash in it (./mine). Examples
    that a copied one imports are copied, too.
    """
    directory, names = Path("."), list(words)
    if names and (os.sep in names[-1] or Path(names[-1]).is_dir()):
        directory = Path(names.pop())
    known = installed()
    chosen = [_named(name) for name in names] or [*known.values(), DIRECTORY / README]
    wanted = list(dict.fromkeys(path for one in chosen for path in (one, *_imported(one, known))))
    targets = [directory / path.name for path in wanted]
    if not force and (there := [str(target) for target in targets if os.path.lexists(target)]):
        raise UsageError(f"{', '.join(there)}: there already; --force overwrites it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, target in zip(wanted, targets, strict=True):
            shutil.copyfile(path, target)
            click.echo(str(target))
    except OSError as error:
        raise UsageError(f"cannot copy to {directory}: {error.strerror or error}") from None


def installed() -> dict[str, Path]:
    """Return the installed examples, by their names."""
    found = {path.stem: path for path in sorted(DIRECTORY.glob("*.py"))}
    if not found:
        raise UsageError(f"no examples are in {DIRECTORY}: install elaunch again")
    return found


def _named(name: str) -> Path:
    known = installed()
    path = known.get(name.removesuffix(".py"))
    if path is None:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        raise UsageError(f"no example {name!r}{hint}")
    return path


def _imported(path: Path, known: dict[str, Path]) -> list[Path]:
    """Return the other examples that one imports."""
    if path.suffix != ".py":
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    return [known[name] for name in names if name in known]


def _about(path: Path) -> str:
    """Return the first line of an example's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
