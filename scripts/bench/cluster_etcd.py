"""A real etcd on loopback for the bench, of one member or three, with its production timings.

Data is not synced to the disk (``--unsafe-no-fsync``): the disk of a shared machine is not what is
measured. Everything lies below the directory of the bench and ends with the context.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import JobError
from procfs import free_port

START_SECONDS = 30.0
ANSWER_SECONDS = 2.0
POLL = 0.05


@dataclass
class Member:
    """One etcd process; clients reach it at ``address``."""

    name: str
    address: str
    peer: str
    process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10.0)


@dataclass
class Etcd:
    """A started etcd."""

    members: list[Member]

    @property
    def endpoints(self) -> str:
        """``host:port`` of all members, joined by commas."""
        return ",".join(member.address for member in self.members)

    def leader(self) -> Member:
        """Return the member that leads now; raises JobError if none does within 30 s."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            said = [(member, _status(member)) for member in self.members]
            if all(status.get("leader") for _, status in said):
                for member, status in said:
                    if status["leader"] == status["header"]["member_id"]:
                        return member
            time.sleep(POLL)
        raise JobError("etcd has no leader after 30 s")


@contextlib.contextmanager
def etcd(directory: Path, size: int) -> Iterator[Etcd]:
    """Run an etcd of ``size`` members with its data below ``directory``.

    Raises:
        JobError: etcd is not installed, or it does not start within 30 s.
    """
    if shutil.which("etcd") is None:
        raise JobError("etcd is not installed (scripts/setup-system.sh)")
    host = f"127.{random.randint(16, 250)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
    ports = [free_port(host) for _ in range(2 * size)]
    members = [
        Member(f"m{place}", f"{host}:{client}", f"http://{host}:{peer}")
        for place, (client, peer) in enumerate(zip(ports[:size], ports[size:], strict=True))
    ]
    initial = ",".join(f"{member.name}={member.peer}" for member in members)
    try:
        for member in members:
            _start(member, directory, initial)
        started = Etcd(members)
        started.leader()
        yield started
    finally:
        for member in members:
            member.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _start(member: Member, directory: Path, initial: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    client = f"http://{member.address}"
    words = ["etcd", "--name", member.name, "--data-dir", str(directory / member.name)]
    words += ["--listen-client-urls", client, "--advertise-client-urls", client]
    words += ["--listen-peer-urls", member.peer, "--initial-advertise-peer-urls", member.peer]
    words += ["--initial-cluster", initial, "--unsafe-no-fsync"]
    with (directory / f"{member.name}.log").open("wb") as log:
        member.process = subprocess.Popen(
            words, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _status(member: Member) -> dict[str, Any]:
    """Return what a member says of itself over etcd's JSON gateway; empty if it does not answer."""
    url = f"http://{member.address}/v3/maintenance/status"
    try:
        with urllib.request.urlopen(url, data=b"{}", timeout=ANSWER_SECONDS) as answer:
            said: dict[str, Any] = json.load(answer)
    except (OSError, ValueError):  # nobody listens yet, or it is not ready
        return {}
    return said
