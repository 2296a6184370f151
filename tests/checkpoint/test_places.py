"""What a text that says where checkpoints are means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.checkpoint.places import broken_link, parse_place, without_slash


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
    assert parse_place(text, Path("/start")) == place


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
        parse_place(text)


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
