"""The checksums of files: what they are of, and where they cannot be computed."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaunch.checkpoint.formats import own
from elaunch.checkpoint.storage import checksums
from elaunch.checkpoint.storage.checksums import BLOCK, begin, checksum_of, differs
from elaunch.errors import CheckpointError
from tests.checkpoint import makers

CONTENT = os.urandom(3 * BLOCK + 5)


def test_the_polynomial() -> None:
    """The check value that RFC 3720 and everybody else has for CRC-32C."""
    total = begin()
    total.update(b"123456789")
    assert total.text() == "crc32c:e3069283"


def test_each_block_has_its_own(tmp_path: Path) -> None:
    """However the content comes; a file that is empty has none."""
    chance, whole = random.Random(3), tmp_path / "a"
    whole.write_bytes(CONTENT)
    parts = [CONTENT[at : at + BLOCK] for at in range(0, len(CONTENT), BLOCK)]
    expected = ""
    for part in parts:
        (tmp_path / "part").write_bytes(part)
        expected += checksum_of(tmp_path / "part").removeprefix("crc32c:")
    assert checksum_of(whole) == f"crc32c:{expected}" and len(expected) == 4 * 8
    total, at = begin(), 0
    while at < len(CONTENT):
        size = chance.choice([1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
        total.update(memoryview(CONTENT)[at : at + size])
        at += size
    assert total.text() == f"crc32c:{expected}" and begin().text() == "crc32c:"


def test_the_checksums_of_the_version_before(tmp_path: Path) -> None:
    """Are compared as well."""
    (tmp_path / "a").write_bytes(CONTENT)
    assert not differs(tmp_path / "a", f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")
    assert differs(tmp_path / "a", f"sha256:{hashlib.sha256(CONTENT[1:]).hexdigest()}")
    assert differs(tmp_path / "a", "sha256:") and differs(tmp_path / "a", "crc32c:")
    read: list[int] = []
    assert not differs(tmp_path / "a", checksum_of(tmp_path / "a"), read.append)
    assert sum(read) == len(CONTENT)


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(CheckpointError, match="not a regular file: a"):
        checksum_of(tmp_path / "a")


@pytest.fixture(params=["python", None], ids=["only in Python", "not installed"])
def slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no CRC-32C of the processor."""
    found = SimpleNamespace(implementation=request.param) if request.param else None
    monkeypatch.setitem(sys.modules, "google_crc32c", found)
    checksums.crc32c.cache_clear()
    yield
    checksums.crc32c.cache_clear()


@pytest.mark.usefixtures("slow")
def test_a_machine_without_the_instruction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New files get SHA-256; what others wrote is read, not compared; one line tells it."""
    path = makers.own(tmp_path)
    (path / "model.pt").write_bytes(CONTENT)
    with caplog.at_level(logging.WARNING, "elaunch"):
        expected = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
        assert checksum_of(path / "model.pt") == expected
        assert not differs(path / "model.pt", "crc32c:00000000")
        with pytest.raises(CheckpointError, match=r"changed: model\.pt has"):
            own.verify(path, None)
    (said,) = caplog.messages
    assert said.startswith("google-crc32c ") and "SHA-256" in said and "install a wheel" in said
