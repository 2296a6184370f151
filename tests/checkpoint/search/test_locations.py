"""Placeholders in the script's arguments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.records import Checkpoint
from elaunch.checkpoint.search.locations import (
    broken_link,
    check_glob,
    fill_placeholders,
    find,
    has_placeholder,
    is_within,
    parse_location,
    without_slash,
)
from elaunch.errors import UsageError
from tests.tables import each


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/c", Path("/c")),
        ("a/../b", Path("/start/b")),
        ("file:///c%20d", Path("/c d")),
        ("local://c", Path("/start/c")),
        ("FILE:///c/", Path("/c")),
        ("c:/d", Path("/start/c:/d")),
        ("~nobody-of-this-name/x", Path("/start/~nobody-of-this-name/x")),
        ("s3://bucket", "s3://bucket"),
        ("hdfs:///run", "hdfs:///run"),
        ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x"),
        ("memory://", "memory://"),
    ],
)
def test_a_place(text: str, place: Path | str) -> None:
    """URLs stay as they are, but for those of files."""
    assert parse_location(text, Path("/start")) == place


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://", "is a URL without a bucket; write s3://BUCKET/PATH"),
        ("S3:///run", "is a URL without a bucket; write S3://BUCKET/PATH"),
        ("simplecache::gs:///x", "is a URL without a bucket"),
        ("hdfs:///", "is a URL without a path; write hdfs://PLACE/PATH"),
        ("file://", "is a URL without a path; write file:///DIRECTORY"),
    ],
)
def test_what_a_variable_that_is_not_set_leaves(text: str, told: str) -> None:
    """No directory is made of it."""
    with pytest.raises(ValueError, match=told):
        parse_location(text)


def test_slashes_at_the_end() -> None:
    """Those of the scheme are none."""
    urls = ["s3://b/x//", "memory://", "memory:///", "/c/", "/"]
    assert [without_slash(url) for url in urls] == ["s3://b/x", "memory://", "memory://", "/c", ""]


def test_broken_links(tmp_path: Path) -> None:
    """On the way to a directory, too; links that lead somewhere are none."""
    for name, target in (("lost", "nowhere"), ("loop", "loop"), ("good", "."), ("twice", "lost")):
        os.symlink(target, tmp_path / name)
    lost = f"'{tmp_path}/lost' is a link to 'nowhere', which is not there"
    assert broken_link(tmp_path / "lost") == broken_link(tmp_path / "lost" / "a" / "b") == lost
    assert "twice' is a link to 'lost', which" in broken_link(tmp_path / "twice")
    assert broken_link(tmp_path / "loop" / "x").endswith(
        "loop' is a link that leads back to itself"
    )
    assert broken_link(tmp_path / "good" / "new") == broken_link(tmp_path / ("x" * 300)) == ""


def test_what_is_within(tmp_path: Path) -> None:
    """Links are followed, on the way and at the end."""
    own, other = tmp_path / "own", tmp_path / "other"
    for path in (own / "step-1", other / "step-1"):
        path.mkdir(parents=True)
    os.symlink(other / "step-1", own / "step-2")
    os.symlink(other, own / "away")
    os.symlink(own, tmp_path / "link")
    for place in ("step-1", str(own / "step-1"), str(tmp_path / "link" / "step-1"), "gone/step-9"):
        assert is_within(place, own) and is_within(place, tmp_path / "link")
    wrong = [".", "", "..", "../other/step-1", "step-2", "away/step-1", str(other / "step-1")]
    for place in [*wrong, str(own), "/", "s3://own/step-1", f"file://{own}/step-1", "a\0b"]:
        assert not is_within(place, own)


def test_what_is_within_a_url() -> None:
    """By its text; no storage is asked."""
    for place in ("s3://b/run/step-1", "s3://b/run/a/step-1"):
        assert is_within(place, "s3://b/run") and is_within(place, "s3://b/run/")
    wrong = ["s3://b/running/step-1", "s3://b/run/../x", "s3://b/run/", "s3://b/run", "/s3://b/run"]
    assert not any(is_within(place, "s3://b/run") for place in [*wrong, "gs://b/run/step-1"])
    assert is_within("memory://step-1", "memory://") and is_within("memory:///step-1", "memory://")


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
        ("a/step_**.pt", "has"),
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


FOUND = Checkpoint(Path("/ck/step_120"), 120, "dcp")


@each(
    ("args", "filled", "dropped"),
    [
        ("--resume {checkpoint}", "--resume /ck/step_120", ""),
        ("--resume={checkpoint}", "--resume=/ck/step_120", ""),
        ("ckpt={checkpoint}", "ckpt=/ck/step_120", ""),
        ("--flag ckpt={checkpoint}", "--flag ckpt=/ck/step_120", "--flag"),
        ("--resume {checkpoint}/model.pt", "--resume /ck/step_120/model.pt", ""),
        ("-r {checkpoint} --lr 1", "-r /ck/step_120 --lr 1", "--lr 1"),
        ("--lr=1 {checkpoint}", "--lr=1 /ck/step_120", "--lr=1"),
        ("--lr 1 {checkpoint}", "--lr 1 /ck/step_120", "--lr 1"),
        ("--seed -5 {checkpoint}", "--seed -5 /ck/step_120", "--seed -5"),
        ("-.5 {checkpoint}", "-.5 /ck/step_120", "-.5"),
        ("-- {checkpoint}", "-- /ck/step_120", "--"),
        ("- {checkpoint}", "- /ck/step_120", "-"),
        ("{checkpoint}", "/ck/step_120", ""),
        ("--from {checkpoint} {checkpoint_step}", "--from /ck/step_120 120", ""),
        ("--x --from {checkpoint} -s {checkpoint_step}", "--x --from /ck/step_120 -s 120", "--x"),
        ("--a={checkpoint} {checkpoint_step}", "--a=/ck/step_120 120", ""),
        ("--a-{checkpoint_step} {checkpoint}", "--a-120 /ck/step_120", ""),
        ("a{checkpoint}b{checkpoint_step}c", "a/ck/step_120b120c", ""),
        ("{{checkpoint}}", "{checkpoint}", "{checkpoint}"),
        ("--t {{checkpoint_step}}", "--t {checkpoint_step}", "--t {checkpoint_step}"),
        ("--t {{checkpoint}}{checkpoint}", "--t {checkpoint}/ck/step_120", "--t"),
        ('{"a":{checkpoint}}', '{"a":/ck/step_120}', ""),
        (
            "{lr} {} {0} {check} {{x}} {",
            "{lr} {} {0} {check} {{x}} {",
            "{lr} {} {0} {check} {{x}} {",
        ),
        ("", "", ""),
    ],
)
def test_table(args: str, filled: str, dropped: str) -> None:
    assert fill_placeholders(args.split(), FOUND) == tuple(filled.split())
    assert fill_placeholders(args.split(), None) == tuple(dropped.split())


def test_only_unescaped_placeholders_ask_for_a_checkpoint() -> None:
    assert has_placeholder(["--a", "--r={checkpoint}"])
    assert has_placeholder(["{checkpoint_step}"])
    assert has_placeholder(["{{checkpoint}}{checkpoint}"])
    assert not has_placeholder(["{{checkpoint}}", "checkpoint", "{lr}", "{ checkpoint }"])
    assert not has_placeholder([])


def test_a_path_with_braces_is_put_in_as_it_is() -> None:
    odd = Checkpoint(Path("/ck/{checkpoint}/\\1"), 1, "dcp")
    assert fill_placeholders(["--r={checkpoint}"], odd) == ("--r=/ck/{checkpoint}/\\1",)


ARGUMENTS = st.lists(st.text(alphabet="-=a{}", max_size=6) | st.text(max_size=6))


@given(ARGUMENTS, st.sampled_from([FOUND, None]))
def test_arguments_without_placeholder_are_untouched(
    args: list[str], checkpoint: Checkpoint | None
) -> None:
    assert fill_placeholders(args, checkpoint) == tuple(args)
    assert not has_placeholder(args)


PIECES = st.sampled_from(["-a", "--b", "x", "{checkpoint}", "--c={checkpoint}", "{{checkpoint}}"])


@given(st.lists(PIECES))
def test_without_checkpoint_none_is_asked_for_any_more(args: list[str]) -> None:
    left = fill_placeholders(args, None)
    assert left.count("{checkpoint}") == args.count("{{checkpoint}}")
    assert left.count("x") == args.count("x")
    assert len(fill_placeholders(args, FOUND)) == len(args)
