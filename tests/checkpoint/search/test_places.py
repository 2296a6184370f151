"""What a text that says where checkpoints are means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.checkpoint.search.places import broken_link, is_within, parse_place, without_slash


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
