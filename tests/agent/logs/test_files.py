"""Log files, line filters and tails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.logs import files
from elaunch.agent.logs.files import KEPT_BYTES, KEPT_LINE, KEPT_LINES, LineFilter, LogFile, Tail


def unexpected(path: Path, exc: OSError) -> None:
    """Fail: nothing is wrong with this file."""
    raise AssertionError(f"{path}: {exc}")


def test_directories_are_private_and_may_exist(tmp_path: Path) -> None:
    """Whatever the umask."""
    old = os.umask(0)
    try:
        for _ in range(2):
            files.make_directories(tmp_path / "new" / "root", 7, [0, 12])
    finally:
        os.umask(old)
    for path in ("new/root", "new/root/attempt_7", "new/root/attempt_7/12"):
        assert (tmp_path / path).stat().st_mode & 0o777 == 0o700


def test_a_file_that_exists_is_appended_to(tmp_path: Path) -> None:
    """A round's log is never lost to another life of the same round."""
    for data in (b"first", b"second"):
        file = LogFile(tmp_path / "log", unexpected)
        assert file.open()
        file.write(data)
        file.close()
        file.write(b"after the end")
        file.close()
    assert (tmp_path / "log").read_bytes() == b"firstsecond"


def test_a_file_that_cannot_be_opened_complains(tmp_path: Path) -> None:
    """And takes writes without a word."""
    complaints: list[str] = []
    file = LogFile(tmp_path / "no" / "log", lambda path, exc: complaints.append(str(exc.strerror)))
    assert not file.open()
    file.write(b"lost")
    file.close()
    assert complaints == ["No such file or directory"]


def test_a_full_disk_is_complained_of_once_until_there_is_room() -> None:
    """Each further write tries again."""
    complaints: list[OSError] = []
    file = LogFile(Path("/dev/full"), lambda path, exc: complaints.append(exc))
    assert file.open()
    for _ in range(3):
        file.write(b"lost")
    file.close()
    assert [exc.strerror for exc in complaints] == ["No space left on device"]


LINES = st.lists(st.sampled_from([b"yes", b"no", b"\xffyes", b""]), max_size=12)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(lines=LINES, end=ENDS, ended=st.booleans(), size=st.integers(1, 7))
def test_a_filter_sees_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, ended: bool, size: int
) -> None:
    """However the bytes are cut, each matching line is copied once."""
    path = tmp_path_factory.mktemp("filter") / "filtered"
    file = LogFile(path, unexpected)
    assert file.open()
    line_filter = LineFilter(file, ("yes", "never"), b"[p]:")
    text = end.join(lines) + (end if ended else b"")
    for start in range(0, len(text), size):
        line_filter.feed(text[start : start + size])
    line_filter.end()
    file.close()
    assert path.read_bytes() == b"".join(b"[p]:%b\n" % x for x in lines if b"yes" in x)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"1%\r2%\r3%\r\ndone\r\n", ["3%", "done"]),
        (b"\r1%\r2%\r   \r", ["   "]),
        (b"\xffa\xc3", ["\ufffda\ufffd"]),
    ],
)
def test_tail(text: bytes, expected: list[str]) -> None:
    """A progress bar is its last state; what is not UTF-8 is replaced."""
    tail = Tail()
    for index in range(len(text)):
        tail.feed(text[index : index + 1])
    assert tail.lines(KEPT_LINES) == expected
    assert tail.lines(1) == expected[-1:]
    assert tail.lines(0) == []


def test_tail_is_bounded() -> None:
    """In lines and in bytes; of a long line its beginning is left, and what came before it."""
    tail = Tail()
    tail.feed(b"before\n")
    for _ in range(30):
        tail.feed(b"x" * (KEPT_BYTES // 7))
    assert tail.lines(5) == ["before", "x" * KEPT_LINE]
    tail.feed(b"\n" + b"1%\r" * KEPT_BYTES + b"9%\r")
    assert tail.lines(5) == ["before", "x" * KEPT_LINE, "9%"]
    tail.feed(b"10%\r\n" + b"y" * (KEPT_BYTES - 3) + b"\nz")
    assert tail.lines(5) == ["before", "x" * KEPT_LINE, "10%", "y" * KEPT_LINE, "z"]
    tail.feed(b"".join(b"%d\n" % n for n in range(1000)))
    assert tail.lines(5) == ["995", "996", "997", "998", "999"]
    assert len(tail.lines(10_000)) == KEPT_LINES
