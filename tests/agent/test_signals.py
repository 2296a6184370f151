"""Signals as events."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

ANOTHER_THREAD = """
import queue, signal, threading
from elaunch.agent import signals
inbox = queue.SimpleQueue()
threading.Thread(target=threading.Event().wait, daemon=True).start()
signals.install((signal.SIGUSR2, signal.SIGTERM), inbox.put)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # the other threads take it
print("up", flush=True)
while True:
    print(inbox.get().signum.name, flush=True)
"""


@pytest.mark.slow
def test_a_signal_that_another_thread_gets() -> None:
    """The main thread waits for an event, and the kernel does not wake it for such a signal."""
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER_THREAD], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(60.0, process.kill)
        watchdog.start()
        try:
            assert process.stdout.readline() == "up\n"
            for signum in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM):
                process.send_signal(signum)
                assert process.stdout.readline() == f"{signum.name}\n"
        finally:
            watchdog.cancel()
            process.kill()


CHILD_ENDS = """
import os, queue, signal, sys
from elaunch.agent import signals
from elaunch.agent.children import Reaper
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a parent may have left it
inbox = queue.SimpleQueue()
signals.install((), inbox.put)
Reaper().spawn([sys.executable, "-c", "raise SystemExit(7)"], os.environ, inbox.put)
print(inbox.get(timeout=30), flush=True)
"""


def test_ends_of_children_are_learned_where_sigchld_was_ignored() -> None:
    """The kernel tells nobody then how a child has ended."""
    command = [sys.executable, "-c", CHILD_ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "7\n", done.stderr
