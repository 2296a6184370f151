"""A machine made of namespaces: its own network, host name, ``/etc/hosts`` and monotonic clock.

A holder, ``cat`` on a pipe from the test, keeps a machine alive; nothing has a name anywhere, so
nothing remains of a machine once its processes are gone. Whoever started it ends it with ``kill``;
should the test process itself be killed, a saver (this file, run as a program) does that when its
end of a pipe closes.

=====================  ===========================================================================
what                   in a machine
=====================  ===========================================================================
network                its own: loopback, and whatever its owner puts there
names                  ``/etc/hosts`` as given; a resolver that refuses at once
clocks                 CLOCK_MONOTONIC and CLOCK_BOOTTIME are ``ahead`` seconds before the test's
``/dev/shm``           its own
processes, files       otherwise those of the test: pids are the same inside and outside
=====================  ===========================================================================
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("unshare", "nsenter", "ip", "nft")
_CLOCKS = Path("/proc/self/ns/time").exists()

_HOLDER = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo $$
exec cat
"""


def needed() -> None:
    """End the test where no machine can be made here."""
    from tests import programs  # not where this file runs as a program

    programs.needed(*PROGRAMS)
    programs.allowed(_problem())


def _problem() -> str | None:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """One machine; it is up once ``ready`` has returned."""

    def __init__(self, name: str, directory: Path, hosts: str, ahead: float = 0.0) -> None:
        self.name = name
        self.directory = directory
        directory.mkdir()
        (directory / "hosts").write_text(hosts)
        (directory / "resolv.conf").write_text("nameserver 127.0.0.1\noptions attempts:1\n")
        # Only what a process forks is in its new time namespace: hence --fork.
        spaces = ["--net", "--mount", "--uts", "--fork"]
        if _CLOCKS:
            spaces += ["--time", f"--monotonic={ahead:.0f}", f"--boottime={ahead:.0f}"]
        self._unshare = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", _HOLDER, "sh", name, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the test
        )
        self.holder = 0
        self.net = 0
        self.network = -1

    def ready(self) -> None:
        """Wait until the machine is there."""
        assert self._unshare.stdout is not None and self._unshare.stderr is not None
        line = self._unshare.stdout.readline()
        assert line, f"{self.name}: {self._unshare.stderr.read()}"
        self.holder = int(line)
        # While this is open, no other network gets the same inode: what is killed by it is ours.
        self.network = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY)
        self.net = os.fstat(self.network).st_ino
        self._own = {self._unshare.pid, self.holder}

    def prefix(self, directory: Path | None = None) -> list[str]:
        """Return the words before a command that run it here, in ``directory``; the pid stays."""
        spaces = ["--net", "--mount", "--uts", *(["--time"] if _CLOCKS else [])]
        where = directory or self.directory
        return ["nsenter", f"--target={self.holder}", *spaces, f"--wdns={where}", "--"]

    def namespaces(self) -> list[str]:
        """Return the paths of what a process enters that runs here, in this order."""
        kinds = ["net", "uts", *(["time"] if _CLOCKS else []), "mnt"]
        return [f"/proc/{self.holder}/ns/{kind}" for kind in kinds]

    def do(self, argv: Sequence[str], text: str = "") -> str:
        """Run a short command in this machine's network; return what it said, fail if it does."""
        done = subprocess.run(
            ["nsenter", f"--target={self.holder}", "--net", "--", *argv],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {argv}: {done.stderr}\n{text}"
        return done.stdout

    def processes(self) -> set[int]:
        """Return the pids of what runs here, without what keeps the machine."""
        return in_networks({self.net}) - self._own

    def power_off(self) -> None:
        """Kill all that runs here."""
        kill({self.net}, spared=self._own)

    def close(self) -> None:
        """End the holder; with the last other process the machine is gone."""
        for pipe in (self._unshare.stdin, self._unshare.stdout, self._unshare.stderr):
            assert pipe is not None
            pipe.close()
        self._unshare.wait(60.0)
        if self.network >= 0:
            os.close(self.network)


def saver(machines: Sequence[Machine]) -> subprocess.Popen[bytes]:
    """Start the process that kills all that runs in the machines when this one has ended."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, *(str(machine.net) for machine in machines)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=[machine.network for machine in machines],
    )


def in_networks(networks: Collection[int]) -> set[int]:
    """Return the pids of all live processes in some networks, named by their inodes."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended, or is a zombie
            if os.stat(f"/proc/{name}/ns/net").st_ino in networks:
                found.add(int(name))
    return found


def kill(networks: Collection[int], spared: Collection[int] = (), deadline: float = 60.0) -> None:
    """Kill all processes in some networks, also those that are forked meanwhile, but the spared."""
    until = time.monotonic() + deadline
    while left := in_networks(networks) - set(spared):
        assert time.monotonic() < until, f"SIGKILL does not end {left}"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def main(networks: Collection[int]) -> None:
    """Be the saver: kill what is left when the test process is gone."""
    while os.read(0, 1):
        continue
    kill(networks)


if __name__ == "__main__":
    main({int(word) for word in sys.argv[1:]})
