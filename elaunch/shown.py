"""What others wrote, as it may be printed: on one line, or as lines, without what moves a terminal.

================  ==================================================================================
``line``          one line; whatever is not printable is written out: escapes, control characters
                  (C0 and C1), line breaks, marks that turn the direction of text, surrogates
``block``         the same for each of several lines; tabs stay
``arguments``     a command's arguments without the values of options that are secret by their names
================  ==================================================================================

Everything passes through here that comes from another machine, a worker, a store, a file or the
name of one, and is printed among elaunch's own lines. What workers write to their own streams is
theirs, and is not touched.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Final

HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|credential|api[-_]?key|access[-_]?key|private[-_]?key", re.IGNORECASE
)
_SECRET_WORDS: Final = frozenset(("auth", "key", "pwd", "token"))
_NOT_SECRET: Final = frozenset(("dir", "file", "name", "path"))
"""Last words of names whose values say where a secret is, and are none."""


def line(text: str) -> str:
    """Return ``text`` on one line, with what is not printable written out."""
    if text.isprintable():
        return text
    return "".join(char if _is_plain(char) else ascii(char)[1:-1] for char in text)


def _is_plain(char: str) -> bool:
    """Return whether a character is printed as itself; blanks of any width are."""
    return char.isprintable() or unicodedata.category(char) == "Zs"


def block(text: str) -> str:
    """Return ``text`` in the lines that it has, with what else is not printable written out."""
    lines = text.split("\n")
    return "\n".join("\t".join(line(part) for part in one.split("\t")) for one in lines)


def arguments(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, with ``(hidden)`` for values that look secret.

    ``--api-key VALUE``, ``--api-key=VALUE`` and ``wandb.token=VALUE`` are such.
    """
    found: list[str] = []
    follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        option = name.startswith("-")
        if follows and not word.startswith("--"):
            found.append(HIDDEN)
            follows = False
        elif equals and is_secret(name):
            found.append(f"{name}={HIDDEN}")
            follows = False
        else:
            found.append(word)
            follows = option and not equals and is_secret(name)
    return found


def is_secret(name: str) -> bool:
    """Return whether an option or a variable of that name looks as if its value were secret."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or words[-1] in _NOT_SECRET or len(name) > 200:
        return False
    named = words[-1] in _SECRET_WORDS or words[-1].endswith("token")
    return named or _SECRET.search(name) is not None
