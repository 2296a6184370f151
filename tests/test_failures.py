"""docs/failures.md: what is seen is what the code writes, and each row has a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests import seen
from tests import test_style as style

ROOT: Final = Path(__file__).parent.parent
PUT_TOGETHER: Final = {
    "restart brought no progress",
    "have been waiting there for",
    "more is needed",
}
"""Words of one message that stand apart in the code, around a number or beside a choice."""
SHORTEST: Final = 8
"""Letters of a part of a message, of two words at least, that says which message it is."""
_VARIABLE: Final = re.compile(
    r"\S*\d\S*|node\S*|\(.*?\)|[;:,…]|SIG\w+|\bs\b|rank |workers?|ranks|etcd"
)


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
    for _, cell, *_ in seen.rows():
        for line in re.findall(r"`([^`]+)`", cell):
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


def test_each_row_has_a_test() -> None:
    """Those without a path are in tests/integration; "…" is the file of the name before."""
    assert sorted(seen.tests_of_rows()) == sorted(row[0] for row in seen.rows())
    lost, count = [], 0
    for *_, tests in seen.rows():
        for path, function, _ in seen.named(tests):
            file = ROOT / path
            there = file.is_file() and (not function or f"def {function}(" in file.read_text())
            count += 1
            lost += [] if there else [(path, function)]
    assert count > 80
    assert lost == []


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (
            "rank 1 on node2 exited with code 7; stopping 8 workers",
            "rank 0 was killed by SIGKILL; stopping 1 worker",
        ),
        (
            "2 of 3 nodes after 600 s: node1 (10.0.0.1), node2 (10.0.0.2); 1 more is needed",
            "1 of 3 nodes after 12 s: m4 (10.20.0.1);\n2 more is needed",
        ),
        ("cut off: …; killing 8 workers", "cut off: it is gone; killing 2 workers"),
    ],
)
def test_a_line_is_an_example(line: str, printed: str) -> None:
    """Numbers, names, addresses and broken lines may be others, and no word."""
    assert seen.pattern(line).search(printed)
    for word in ("stopping", "needed", "killing"):
        if word in line:
            assert not seen.pattern(line).search(printed.replace(word, "x"))


def test_what_a_test_did_not_show_is_told() -> None:
    """Of each row that names it: a line that nobody printed, a code that the card does not have."""
    test = "tests/integration/test_nodes_store.py::test_etcd_is_gone_for_good"
    assert seen.is_named(test) and not seen.is_named(f"{test}_at_all")
    line = "lost the store, etcd at 10.2.0.1:2379: no answer for 5 s, the last attempt: refused"
    printed = f"{line}; stopping 1 worker, grace 30 s"
    assert seen.complaints(test, printed, f"{printed}\n### E-STORE\n") == []
    (told,) = seen.complaints(test, printed, line)
    assert "elaunch why does not show" in told
    assert len(seen.complaints(test, "", "")) == 2
