"""Heartbeats and sections as the agent reads them, and stacks that a process writes when asked."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch import env
from elaunch.errors import ContextError
from elaunch.training import liveness
from elaunch.wire.progress import PageReader, ProgressPage
from tests.launching import wait_until


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    """A page, closed at the end."""
    opened = ProgressPage()
    yield opened
    opened.close()


@pytest.fixture
def reader(page: ProgressPage) -> Iterator[PageReader]:
    """The agent's end of ``page``."""
    opened = PageReader(os.dup(page.fd))
    yield opened
    opened.close()


def test_a_heartbeat_is_seen(page: ProgressPage, reader: PageReader) -> None:
    """By its count."""
    before = reader.read().beats
    liveness.heartbeat(page)
    assert reader.read().beats == before + 1


def test_sections_nest_and_end(page: ProgressPage, reader: PageReader) -> None:
    """What is inside is shown, and afterwards what is around it."""
    with liveness.section(page, "fit"):
        with liveness.section(page, "eval", timeout=900):
            inside = reader.read()
        around = reader.read()
    assert inside.section == "eval"
    assert inside.section_until is not None
    assert 800 < inside.section_until - time.monotonic() <= 900
    assert (around.section, around.section_until) == ("fit", None)
    assert reader.read().section == ""


def test_an_exception_leaves_the_section(page: ProgressPage, reader: PageReader) -> None:
    """And goes on its way."""
    with pytest.raises(KeyError), liveness.section(page, "eval", 5):
        raise KeyError("x")
    assert (reader.read().section, reader.read().section_until) == ("", None)


def test_an_inner_section_cannot_lengthen_the_outer_one(
    page: ProgressPage, reader: PageReader
) -> None:
    """What a library allows itself is bounded by what its caller allowed."""
    with liveness.section(page, "eval", 60), liveness.section(page, "library", 6000):
        until = reader.read().section_until
    assert until is not None
    assert until - time.monotonic() <= 60


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf])
def test_a_timeout_that_is_none_is_refused(page: ProgressPage, timeout: float) -> None:
    """With the section's name and the value, before anything is done."""
    with (
        pytest.raises(ContextError, match=r"'eval'.*above 0"),
        liveness.section(page, "eval", timeout),
    ):
        pytest.fail("the body must not run")


@pytest.mark.parametrize("name", ["", "  "])
def test_a_section_without_a_name_is_refused(page: ProgressPage, name: str) -> None:
    """It could not be told from none."""
    with pytest.raises(ContextError, match="needs a name"), liveness.section(page, name):
        pytest.fail("the body must not run")


IN_C = """
import os, sys, threading
from elaunch.training import liveness
print(liveness.register_stacks(os.environ), flush=True)

def in_a_thread():
    threading.Event().wait()

threading.Thread(target=in_a_thread, daemon=True).start()

def in_c_with_the_lock():
    import ctypes
    while True:
        ctypes.PyDLL(None).pause()  # a PyDLL keeps Python's lock: no Python runs meanwhile

print("ready", flush=True)
in_c_with_the_lock()
"""


def start(code: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    """Start a worker that has only these variables beside ours."""
    variables = {**os.environ, **environ}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True
    )


def said(worker: subprocess.Popen[str]) -> str:
    """Return the next line that the worker prints."""
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def test_stacks_of_all_threads_are_written_while_the_lock_is_held_in_c(tmp_path: Path) -> None:
    """Again at each signal; the process goes on."""
    stacks = tmp_path / "stacks"
    worker = start(IN_C, {env.STACKS_FILE: str(stacks)})
    try:
        assert (said(worker), said(worker)) == ("True", "ready")
        wait_until(lambda: "S (sleeping)" in Path(f"/proc/{worker.pid}/status").read_text(), 60)
        os.kill(worker.pid, env.STACKS_SIGNAL)
        wait_until(lambda: stacks.read_text().count("in_c_with_the_lock") == 1, 60)
        os.kill(worker.pid, env.STACKS_SIGNAL)
        wait_until(lambda: stacks.read_text().count("in_c_with_the_lock") == 2, 60)
        assert "in_a_thread" in stacks.read_text()
        assert stacks.stat().st_mode & 0o777 == 0o600
    finally:
        worker.kill()
        worker.communicate(timeout=60)


TWICE = """
import faulthandler, os, signal
from elaunch import env
from elaunch.training import liveness
with open(os.environ["FIRST"], "a") as first:
    faulthandler.register(env.STACKS_SIGNAL, file=first, all_threads=True, chain=False)
    print(liveness.register_stacks(os.environ), flush=True)
    os.kill(os.getpid(), env.STACKS_SIGNAL)
"""


def test_stacks_are_registered_once(tmp_path: Path) -> None:
    """A worker of the fork server is registered already: its file stays the one."""
    first, second = tmp_path / "first", tmp_path / "second"
    worker = start(TWICE, {env.STACKS_FILE: str(second), "FIRST": str(first)})
    assert worker.communicate(timeout=60)[0] == "True\n"
    assert worker.returncode == 0
    assert "most recent call first" in first.read_text()
    assert not second.exists()


def test_without_an_agent_that_asks_nothing_is_registered() -> None:
    """The signal keeps what it does."""
    assert liveness.register_stacks({}) is False
    assert signal.getsignal(env.STACKS_SIGNAL) == signal.SIG_DFL


def test_a_file_that_cannot_be_written_is_no_error_for_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with what follows from it."""
    path = tmp_path / "gone" / "stacks"
    assert liveness.register_stacks({env.STACKS_FILE: str(path)}) is False
    assert "will lack this worker's stacks" in caplog.text
    assert str(path) in caplog.text
