"""Fixtures of the tests with real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import launching, seen

MEMORY = 3 << 30
"""Bytes that a job in the test's own cgroup may take."""


@pytest.fixture
def free_port() -> int:
    """Return a port that nobody listens on; another may take it before it is used."""
    return launching.free_port()


@pytest.fixture
def cgroup() -> Iterator[str]:
    """Make a memory cgroup (v1) of the test's own; an empty name where none can be made."""
    own = next(
        (line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line),
        "",
    )
    path = Path(f"/sys/fs/cgroup/memory{own.partition(':memory:')[2]}") / f"causes-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(MEMORY))
    except OSError:
        yield ""
        return
    yield str(path)
    with suppress(OSError):
        path.rmdir()


@pytest.fixture
def freezer() -> Iterator[Path]:
    """Make a freezer cgroup (v1) of the test's own, which thaws at the end."""
    path = Path(f"/sys/fs/cgroup/freezer/elaunch-{os.getpid()}")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup v1 freezer can be had: {error}")
    yield path
    (path / "freezer.state").write_text("THAWED")
    launching.wait_until(lambda: not (path / "cgroup.procs").read_text(), 60.0)
    path.rmdir()


@pytest.fixture(autouse=True)
def is_as_documented(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Hold what a test has made processes print to the rows of docs/failures.md that name it."""
    launching.Running.started.clear()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed or not seen.is_named(request.node.nodeid):
        return
    printed = [one.output() + one.output("stderr") for one in launching.Running.started]
    told = seen.complaints(request.node.nodeid, "\n".join(printed), seen.cards(tmp_path))
    assert not told, "\n".join(told)
