"""docs/failures.md: what is seen is what the code writes, and each row names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests import test_style as style

ROOT: Final = Path(__file__).parent.parent
TESTS: Final = ROOT / "tests" / "integration"
PUT_TOGETHER: Final = {"restart brought no progress", "wait there since", "more is needed"}
"""Words of one message that stand apart in the code, around a number or beside a choice."""
SHORTEST: Final = 8
"""Letters of a part of a message, of two words at least, that says which message it is."""
_VARIABLE: Final = re.compile(
    r"\S*\d\S*|node\S*|\(.*?\)|[;:,…]|SIG\w+|\bs\b|rank |workers?|ranks|etcd"
)


def rows() -> list[list[str]]:
    """Return the cells of each row of the page's tables."""
    lines = (ROOT / "docs" / "failures.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] != "what fails"]


def messages() -> set[str]:
    """Return the parts of all texts in the product's code, but for docstrings, without fields."""
    found: set[str] = set()
    for module in style.modules():
        nodes = style.nodes(module)
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docs
            ):
                found |= {part.strip(" ;:,.()'") for part in re.split(r"[{%]\S*|\n", node.value)}
    return {part for part in found if " " in part and len(part) >= SHORTEST}


@pytest.mark.slow
def test_what_is_seen_is_what_the_code_says() -> None:
    """Three words and more between the names and numbers of a line that the page quotes."""
    known, quoted, lost = messages(), 0, []
    everything = "\n".join(known)
    for _, seen, *_ in rows():
        for line in re.findall(r"`([^`]+)`", seen):
            runs = [run.strip() for run in _VARIABLE.split(line)]
            words = [run for run in runs if run.count(" ") >= 2]
            quoted += len(words)
            lost += [
                run
                for run in words
                if run not in everything
                and run not in PUT_TOGETHER
                and not any(part in run for part in known)
            ]
    assert quoted > 80
    assert lost == []


def test_each_row_names_a_test() -> None:
    """Those without a path are in tests/integration; "…" is the file of the name before."""
    lost, named = [], 0
    for *_, tests in rows():
        path = TESTS
        for name, test in re.findall(r"`([^`:]+?)(?:::(\w+))?`", tests):
            if name != "…":
                path = ROOT / name if "/" in name else TESTS / name
            there = path.is_file() and (not test or f"def {test}(" in path.read_text())
            named += 1
            lost += [] if there else [(name, test)]
    assert named > 80
    assert lost == []
