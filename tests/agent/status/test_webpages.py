"""--dashboard: a real server beside a real job, from its start to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from elaunch import proc
from tests.integration.jobs import SPAWN
from tests.integration.watching import act, wait_for_workers
from tests.launching import Launcher, free_port, wait_until

FLAGS = ("--run-id", "job", "--max-restarts", "1")


def healthy(address: str) -> bool:
    """Tell whether a server answers there."""
    try:
        with urllib.request.urlopen(f"{address.partition('#')[0]}healthz", timeout=10) as answer:
            return bool(answer.read() == b"ok\n")
    except OSError:
        return False


@pytest.mark.slow
def test_pages_are_served_for_as_long_as_the_run_lasts(elaunch: Launcher) -> None:
    """Printed once; the server dies with the agent."""
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=[*FLAGS, "--dashboard"]))
    line = job.wait_for_line(r"dashboard: http://\S+#/run/job", stream="stderr")[0]
    wait_for_workers(job)
    address = re.findall(r"http://\S+", line)[0]
    assert healthy(address) and urlsplit(address).port is not None
    status = elaunch.run(["status", "job", "--json"])
    assert json.loads(status.stdout)["dashboard"] == address
    pids = proc.children(job.process.pid)
    (server,) = (p for p in pids if b"dashboard\0" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: healthy(address), what="the server is started again")
    job.process.kill()
    job.wait()
    wait_until(lambda: not healthy(address), what="the server ends with its agent")


@pytest.mark.slow
def test_of_several_nodes_a_port_that_is_taken_is_replaced(elaunch: Launcher) -> None:
    """Which node serves is known when the first round begins; an address of another is not tried
    again and again."""
    meet = "--nnodes=1:2 --rdzv-conf=settle=0 --rdzv-id=job --rdzv-backend=c10d".split()
    meet += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [*meet, f"--dashboard=127.0.0.1:{taken.getsockname()[1]}"]
        job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
        job.wait_for_line(r"--dashboard: .* is in use by process", stream="stderr")
        line = job.wait_for_line(r"dashboard: http://\S+#/run/\S+", stream="stderr")[0]
    assert healthy(re.findall(r"http://\S+", line)[0])
    flags = [*meet[:-1], f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--dashboard=192.0.2.1:80"]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    job.wait_for_line("is not an address of this machine.*; it stays away", stream="stderr")
    assert job.output("stderr").count("--dashboard: ") == 2


@pytest.mark.trial
def test_the_detached_command_prints_the_address(elaunch: Launcher) -> None:
    """And one word that is neither yes nor a place is refused."""
    done = elaunch.run(act(SPAWN, "wait", flags=[*FLAGS, "--dashboard", "--detach"]))
    found = re.search(r"elaunch: dashboard: (http://\S+)", done.stderr)
    assert found is not None and healthy(found[1])
    page = found[1].partition("#")[0]
    stream = {"accept": "text/event-stream"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{page}api/run?run=job", None, stream)
    ) as events:
        assert elaunch.run(["stop", "job"]).returncode == 0
        *_, last = (line for line in events if line.startswith(b"data: "))
    assert json.loads(last[6:])["state"] == "STOPPED", "an open page shows how the run ended"
    assert not healthy(found[1])
    refused = elaunch.run(act(SPAWN, "wait", flags=["--dashboard=maybe"]))
    assert refused.returncode == 2 and "--dashboard: 'maybe'" in refused.stderr


def test_a_port_alone_is_the_port(elaunch: Launcher) -> None:
    """It is of loopback; one that is taken is refused before anything starts."""
    port = free_port()
    flags = [*FLAGS, f"--dashboard={port}"]
    job = elaunch.start(act(SPAWN, "say=up", "wait", flags=flags))
    job.wait_for_line(rf"dashboard: http://127\.0\.0\.1:{port}/", stream="stderr")
    refused = elaunch.run(act(SPAWN, "wait", flags=flags))
    assert refused.returncode == 2 and f"port {port} " in refused.stderr
