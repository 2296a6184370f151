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
