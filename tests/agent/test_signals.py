"""Signals, and the time of --preempt-at, as events."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from elaunch.agent import signals
from elaunch.agent.policy import events


@pytest.mark.parametrize(("before_end", "most"), [(300.0, 200.0), (40.0, 0.0), (None, None)])
def test_a_timer_that_is_late(before_end: float | None, most: float | None) -> None:
    """What is left until Slurm ends the job is counted when it fires: here 100 s too late."""
    posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    signals.timer(time.time() - 100.0, before_end, posted.put)
    event = posted.get(timeout=60.0)
    assert isinstance(event, events.PreemptAsked)
    if most is None or event.left is None:
        assert event.left is most
    else:
        assert max(0.0, most - 60.0) <= event.left <= most


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
