"""How the words of ``elaunch run`` are cut into flags, script and script arguments.

The rules are those of torchrun's argparse parser, word for word, so that a command line moves over
unchanged (docs/torchrun.md, trap 1):

* flags come before the script; from the script on, every word belongs to the script;
* ``--`` before the script is dropped; a ``--`` right after the script is dropped, unless one came
  before it;
* ``--flag value``, ``--flag=value``, ``-r3``, ``-r 3``, ``-r=3``, ``-mr3``; a value never begins
  with ``-``, unless it is a negative number, has a blank in it, or is joined to its flag;
* a flag may be cut short as long as one flag is meant: torchrun's flags are looked at first, so
  that an abbreviation which torchrun takes means the same here.

A switch may also be set off: ``--standalone=no`` (against a variable or a job file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from elaunch.config.flags.flag import Flag, by_spelling
from elaunch.config.flags.table import FLAGS

SPELLINGS = by_spelling(FLAGS)


@dataclass(frozen=True)
class Words:
    """A command line in parts; ``command`` is the script and its arguments, empty for none."""

    flags: tuple[tuple[Flag, str], ...]
    command: tuple[str, ...]
    help: bool = False


def cut(argv: Sequence[str]) -> Words:
    """Cut ``argv`` into flags with their values, and the script with its arguments.

    Raises:
        click.UsageError: an unknown or ambiguous flag, or a flag without its value.
    """
    found: list[tuple[Flag, str]] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return Words(tuple(found), tuple(rest))
        if not _is_option(word):
            after = rest[1:] if rest[:1] == ["--"] else rest
            return Words(tuple(found), (word, *after))
        for name, joined in _names(word):
            flag = _flag(name)
            if flag is None:
                return Words(tuple(found), (), help=True)
            found.append((flag, _value(flag, name, joined, rest)))
    return Words(tuple(found), ())


def _is_option(word: str) -> bool:
    """Whether argparse would take the word for a flag."""
    if len(word) < 2 or not word.startswith("-"):
        return False
    if word in SPELLINGS or word.split("=", 1)[0] in SPELLINGS:
        return True
    if re.fullmatch(r"-\d+|-\d*\.\d+", word):
        return False
    return " " not in word or _matches(word) or word[:2] in SPELLINGS


def _matches(word: str) -> bool:
    return word.startswith("--") and bool(_candidates(word.split("=", 1)[0]))


def _names(word: str) -> Iterable[tuple[str, str | None]]:
    """Yield each flag in a word with the value joined to it, or None."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        yield name, value if equals else None
        return
    letters = word[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        if name in SPELLINGS and SPELLINGS[name].is_switch and not letters.startswith("="):
            yield name, None
            continue
        yield name, (letters[1:] if letters.startswith("=") else letters) if letters else None
        return


def _flag(name: str) -> Flag | None:
    """Return the flag of a name or of its beginning; None is the request for help."""
    if name in SPELLINGS:
        return SPELLINGS[name]
    candidates = _candidates(name) if name.startswith("--") and len(name) > 2 else []
    if name == "-h" or candidates == ["--help"]:
        return None
    if len(candidates) == 1:
        return SPELLINGS[candidates[0]]
    if candidates:
        raise click.UsageError(f"{name} is ambiguous: {', '.join(candidates)}")
    raise click.NoSuchOption(name, possibilities=_long_names())


def _candidates(name: str) -> list[str]:
    """Return the flags that a beginning may stand for; torchrun's, or else elaunch's own."""
    start = name.replace("_", "-")
    for torchrun in (True, False):
        flags = [flag for flag in FLAGS if flag.torchrun is torchrun]
        pairs = [(flag, alias) for flag in FLAGS for alias in flag.aliases]
        found = [f"--{flag.name}" for flag in flags if f"--{flag.name}".startswith(start)]
        if torchrun and "--help".startswith(start):
            found.append("--help")
        if not torchrun:
            found += [f"--{flag.name}" for flag, alias in pairs if f"--{alias}".startswith(start)]
        if found:
            return list(dict.fromkeys(found))
    return []


def _long_names() -> list[str]:
    return [*(f"--{name}" for flag in FLAGS for name in (flag.name, *flag.aliases)), "--help"]


def _value(flag: Flag, name: str, joined: str | None, rest: list[str]) -> str:
    if flag.is_switch:
        return "yes" if joined is None else joined
    if joined is not None:
        return joined
    if not rest or rest[0] == "--" or _is_option(rest[0]):
        got = f", but {rest[0]!r} follows" if rest else ""
        raise click.UsageError(f"{name} needs a value: {flag.allowed or flag.metavar}{got}")
    return rest.pop(0)
