"""The walk for --checkpoint-glob."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.checkpoint.search.globs import check_glob, find
from elaunch.errors import UsageError

FILES = """step_1.pt step_2.pt notes.txt a/step_3.pt a/b/step_4.pt a/b/c/step_5.pt run1/model/6.pt
.hidden/step_7.pt tmp/step_8.pt .stage/step_9.pt .quarantine/step_10.pt step_11.pt.tmp .step_12.pt
tmp_13.pt a/tmp_14/step_15.pt"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with files in several depths."""
    for name in FILES.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def matches(root: Path, pattern: str) -> str:
    """Return the matching paths, sorted, in one string."""
    entries, unreadable = find(root, pattern)
    assert not unreadable
    return " ".join(sorted(str(entry.path.relative_to(root)) for entry in entries))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("step_*.pt", "step_1.pt step_2.pt"),
        ("./step_[2-9].pt", "step_2.pt"),
        ("step_?.pt", "step_1.pt step_2.pt"),
        ("*/step_*.pt", "a/step_3.pt"),
        ("a/*/step_*.pt", "a/b/step_4.pt"),
        ("**/step_*.pt", "a/b/c/step_5.pt a/b/step_4.pt a/step_3.pt step_1.pt step_2.pt"),
        ("a/**/step_*.pt", "a/b/c/step_5.pt a/b/step_4.pt a/step_3.pt"),
        ("a/**/**/c/*", "a/b/c/step_5.pt"),
        ("**/b/**/*.pt", "a/b/c/step_5.pt a/b/step_4.pt"),
        ("a/b/**", "a/b/c a/b/c/step_5.pt a/b/step_4.pt"),
        ("run1/model", "run1/model"),
        ("run*/", "run1"),
        ("tmp/*.pt", "tmp/step_8.pt"),
        (".hidden/*", ".hidden/step_7.pt"),
        (".stage/*", ""),
        (".quarantine/*", ""),
        ("*.tmp", ""),
        (".step_12.pt", ""),
        ("nothing/*", ""),
        ("step_1.pt/*", ""),
    ],
)
def test_patterns(tree: Path, pattern: str, expected: str) -> None:
    assert matches(tree, pattern) == expected


def test_kinds(tree: Path) -> None:
    entries, _ = find(tree, "*1*")
    assert {entry.path.name: entry.is_dir for entry in entries} == {
        "step_1.pt": False,
        "run1": True,
    }


def test_links_make_no_circle(tree: Path) -> None:
    (tree / "a" / "back").symlink_to(tree)
    (tree / "loop").symlink_to("loop")
    (tree / "gone").symlink_to("nowhere")
    assert matches(tree, "**/step_4.pt") == "a/b/step_4.pt"
    assert matches(tree, "a/back/step_1.pt") == "a/back/step_1.pt"
    assert matches(tree, "loop") == matches(tree, "gone") == ""


def test_linked_entries_are_marked(tree: Path) -> None:
    (tree / "x").symlink_to("a")
    (tree / "step_99.pt").symlink_to("step_1.pt")
    marked = {entry.path.name: entry.linked for entry in find(tree, "step_[19]*.pt")[0]}
    assert marked == {"step_1.pt": False, "step_99.pt": True}
    assert [entry.linked for entry in find(tree, "x/step_*.pt")[0]] == [True]


def test_missing_and_wrong_roots(tree: Path) -> None:
    assert find(tree / "nowhere", "*") == ([], [])
    entries, unreadable = find(tree / "notes.txt", "*")
    assert (entries, [over.reason for over in unreadable]) == ([], ["Not a directory: notes.txt"])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "is empty"),
        ("./", "is empty"),
        ("/ck/step_*.pt", "is absolute"),
        ("../*.pt", "leaves"),
        ("a/../../b", "leaves"),
    ],
)
def test_refused_patterns(tmp_path: Path, pattern: str, reason: str) -> None:
    with pytest.raises(
        UsageError, match=f"--checkpoint-glob '{pattern}' ".replace("*", r"\*")
    ) as e:
        check_glob(pattern)
    assert reason in str(e.value)
    with pytest.raises(UsageError):
        find(tmp_path, pattern)


@pytest.mark.slow
def test_a_deep_tree(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 400)
    deep.mkdir(parents=True)
    (deep / "step_1.pt").touch()
    assert len(find(tmp_path, "**/*.pt")[0]) == 1
