"""What docs/failures.md quotes, held to what the tests of its rows really print.

A quoted line is an example: its numbers, names of nodes and addresses, and what is left out differ
from run to run. Its words have to be in what a process of the test has printed; what the row says
of ``elaunch why`` has to be what that shows of one of the test's run directories.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from elaunch.runs.directory import RunDir
from elaunch.views import failures
from elaunch.views.read import read

ANY: Final = r"[\s\S]{0,300}?"
"""What stands for a number, a name, an address, a list of them, or for what is left out."""
PAGE: Final = Path(__file__).parent.parent / "docs" / "failures.md"
TESTS: Final = Path(__file__).parent / "failures.txt"
"""The first cell of each row, and, indented below it, the tests that hold the row."""
_NAMED: Final = re.compile(r"`([^`:]+?)?(?:::(\w+)(\[[^\]`]*\])?)?`")
_VARIABLE: Final = re.compile(r"…|(?:\b(?:[\w./-]*\d[\w.:/-]*|SIG\w+)(?: \([^)]*\))?(?:, |,…)?)+")
_END: Final = re.compile(r"exited with code \d+")
_ON_NODE: Final = re.compile(r" on node\d\b")
_PLURAL: Final = re.compile(r"\b(worker|node|round|rank|restart)s?\b")


def rows() -> list[list[str]]:
    """Return the cells of each row of the page's tables, and after them the row's tests."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r" \|(?= |$)", line[2:])][:-1] for line in lines]
    tests = tests_of_rows()
    return [[*row, tests.get(row[0], "")] for row in cells if row[0] != "what fails"]


def tests_of_rows() -> dict[str, str]:
    """Return the tests of each row by its first cell."""
    pairs = re.findall(r"^([^#\s].*)\n {4}(.+)$", TESTS.read_text(), re.MULTILINE)
    return dict(pairs)


def named(cell: str) -> list[tuple[str, str, str]]:
    """Return file, function and parameters of each test that is named for a row.

    Those without a path are in tests/integration; "…", or nothing, is the file of the name before.
    Without a function the whole file is meant, without parameters any.
    """
    found: list[tuple[str, str, str]] = []
    path = ""
    for name, test, parameters in _NAMED.findall(cell):
        if name not in ("", "…"):
            path = name if "/" in name else f"tests/integration/{name}"
        found.append((path, test, parameters))
    return found


def quoted(seen: str) -> list[tuple[str, ...]]:
    """Return the lines that a cell quotes; "`…`, or `…`" is either.

    Those in brackets are said with ``LOGLEVEL=INFO`` only, and left out.
    """
    said = re.sub(r"\(`[^`]+`\)", "", seen)
    either = re.findall(r"`[^`]+`(?:, or `[^`]+`)*", said)
    return [tuple(re.findall(r"`([^`]+)`", one)) for one in either]


def pattern(line: str) -> re.Pattern[str]:
    """Return what finds the words of a quoted line, whatever its numbers and names are."""
    parts, at = [], 0
    line = _ON_NODE.sub("…", _END.sub("exited with code …", line))
    for found in _VARIABLE.finditer(line):
        parts += [_words(line[at : found.start()]), ANY]
        at = found.end()
    whole = "".join([*parts, _words(line[at:])])
    ended = rf"(?:exited\s+with\s+code\s+{ANY}|was\s+killed\s+by\s+{ANY})"
    return re.compile(whole.replace(rf"exited\s+with\s+code\s+{ANY}", ended))


def _words(text: str) -> str:
    """Return what finds these words, be they broken into lines; one or more of a thing."""
    found = r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))
    return _PLURAL.sub(r"\1s?", found)


def cards(directory: Path) -> str:
    """Return what ``elaunch why`` says of the run directories below a test's own."""
    found = []
    for record in sorted(directory.rglob("elaunch/runs/*/state.json")):
        run = RunDir(record.parent)
        shown = (failures.read_cards(read(run), one) for one in run.reports() or [None])
        found += ["\n".join(failures.lines(cards)) for cards in shown]
    return "\n".join(found)


def is_named(test: str) -> bool:
    """Return whether a row names the test by its function."""
    return any(_is_named(test, *name) for *_, tests in rows() for name in named(tests))


def complaints(test: str, printed: str, shown: str) -> list[str]:
    """Return what a test that has passed did not print, or ``elaunch why`` not show, of its rows.

    Args:
        test: its id, as pytest has it.
        printed: by all of its processes.
        shown: by ``elaunch why``, of all of its run directories.
    """
    found = []
    for what, seen, _, _, why, tests in rows():
        if not any(_is_named(test, *name) for name in named(tests)):
            continue
        lines = [tuple(map(pattern, either)) for either in quoted(seen)]
        for either, line in zip(quoted(seen), lines, strict=True):
            if not any(one.search(printed) for one in line):
                found.append(f"{what}: not printed: {' or '.join(either)}")
        if not all(_is_shown(part, lines, shown) for part in filter(None, why.split("; "))):
            found.append(f"{what}: elaunch why does not show {why}, but:\n{shown}")
    return found


def _is_named(test: str, path: str, function: str, parameters: str) -> bool:
    name = f"{path}::{function}{parameters}"
    return bool(function) and (test == name or test.startswith(f"{name}["))


def _is_shown(part: str, lines: list[tuple[re.Pattern[str], ...]], shown: str) -> bool:
    """Whether ``elaunch why`` shows a part of a cell: a code, or one of the words for the rest."""
    if part == "the report":
        return "(local_rank " in shown
    if part == "the line":
        return any(one.search(shown) for line in lines for one in line)
    if part == "nothing":
        return "No round has failed" in shown and "why each began" not in shown
    code = re.escape(part.strip("`"))
    return re.search(rf"(?:^|### |elaunch explain ){code}\b", shown, re.MULTILINE) is not None
