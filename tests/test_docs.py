"""What the documents say can be checked: links lead somewhere, tables are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch import errors

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files of the project; those to the web are not followed."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    files = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md names each page beside it."""
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []


def test_every_exit_code_is_documented() -> None:
    """Each exception class has its row in docs/exit-codes.md, with its code."""
    rows = dict(
        re.findall(
            r"^\| (\d+) \|.*\(`(\w+)`\) \|$",
            (ROOT / "docs" / "exit-codes.md").read_text(),
            re.MULTILINE,
        )
    )
    kinds = [errors.ElaunchError, *errors.ElaunchError.__subclasses__()]
    kinds.remove(errors.ScriptError)  # raised in a script, whose exit code is its own
    assert rows == {str(kind.exit_code): kind.__name__ for kind in kinds}


def test_the_api_page_is_what_the_docstrings_say() -> None:
    """docs/api.md is written by a script; who changes a docstring runs it."""
    argv = [sys.executable, ROOT / "scripts" / "api_docs.py", "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
