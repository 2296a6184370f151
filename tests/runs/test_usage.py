"""elaunch.runs.usage: real processes that spin, sleep and have children."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elaunch.runs.usage import Measurement, measure, usage
from tests.launching import wait_until

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True)\\nwhile True: pass"])
print(flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.mark.slow
def test_cpu_and_memory_of_a_worker_and_its_tree() -> None:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.stdout.readline()
        before = measure([process.pid])

        def spun() -> float:
            return measure([process.pid])[process.pid].tree_cpu_s - before[process.pid].tree_cpu_s

        wait_until(lambda: spun() > 0.5, 60)  # how soon depends on who else spins here
        used = usage(before, measure([process.pid]))[process.pid]
        process.stdin.close()
    assert 4 * used.cpu_percent < used.tree_cpu_percent < 150
    assert 1 << 20 < used.rss < used.tree_rss
    assert used.threads == 1


def test_processes_that_are_gone_are_left_out() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert measure([process.pid]) == {}
    assert measure([]) == {}
    assert list(measure([process.pid, os.getpid()])) == [os.getpid()]


def test_a_new_worker_and_a_tree_that_shrank_take_nothing() -> None:
    now = Measurement(at=11.0, cpu_s=1.0, rss=5, threads=1, tree_cpu_s=1.0, tree_rss=5)
    before = Measurement(at=10.0, cpu_s=0.5, rss=5, threads=1, tree_cpu_s=3.0, tree_rss=9)
    assert usage({}, {1: now})[1].cpu_percent == 0
    used = usage({1: before}, {1: now})[1]
    assert (used.cpu_percent, used.tree_cpu_percent) == (50.0, 0.0)
