"""Several machines with a switch between them, for one test, on this one machine.

``Cluster(directory, count)`` makes ``node1`` … ``nodeN`` (``tests/netns.py``), each with one cable
to a bridge that has a namespace of its own: the host's network is not touched, and clusters of
tests that run at the same time do not meet. A machine has its own addresses, host name, clocks and
directories (``HOME``, ``TMPDIR``, ``XDG_STATE_HOME``); the file system, so storage, is shared.

=========================  =======================================================================
fault                      what happens
=========================  =======================================================================
``link_down``, ``link_up``  the cable is out of the switch: the node has no carrier
``drop(src, dst)``         no packet of src reaches dst; the way back works
``partition(a, b)``        no packet either way between two groups of nodes
``shut(ports)``            no packet comes to these TCP ports, wherever they are
``lose(node, percent)``    of all frames of that cable, either way, so many per cent are lost
``narrow(size)``           frames of more bytes are lost; the nodes would send some of 9,000
``delay(node, seconds)``   each frame of that cable, either way, arrives so much later
``heal``                   no drops, losses and delays any more
``power_off``              the cable goes dark and all processes are killed, without a word
=========================  =======================================================================
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import delayline, netns
from tests.launching import Launcher, Running

Word = str | os.PathLike[str]

# A cluster's network is its own, so all clusters have the same addresses.
_IPV4, _IPV6 = "10.20.0", "fd00:20:"
_CLOCKS_APART = 300_000
"""Seconds between the monotonic clocks of two neighbours: no two machines booted together."""


class Node:
    """One machine of a cluster, where commands run."""

    def __init__(self, machine: netns.Machine, number: int, launcher: Launcher) -> None:
        self.machine = machine
        self.name = machine.name
        self.address = f"{_IPV4}.{number}"
        self.address6 = f"{_IPV6}:{number}"
        self.port = f"port{number}"
        """Name of the switch's end of this node's cable."""
        self._launcher = launcher
        self._started: list[Running] = []
        home = machine.directory
        self.state = home / "state"
        self.env = {"HOME": str(home), "XDG_STATE_HOME": str(self.state), "TMPDIR": f"{home}/tmp"}
        (home / "tmp").mkdir()

    def popen(
        self,
        argv: Sequence[Word],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        clock: str | None = None,
    ) -> Running:
        """Start any command here; its pid is that of the command itself.

        Args:
            clock: how far its and its children's wall clock is from the test's: ``+1h``, ``-30s``.
        """
        words = list(argv)
        if clock is not None:
            # Set by a command inside: the library leaves files in the /dev/shm where it is loaded.
            words[:0] = ["env", *(f"{name}={value}" for name, value in wall_clock(clock).items())]
        added = self.env | dict(env or {})
        self._started.append(
            self._launcher.start_command(words, env=added, cwd=cwd, machine=self.machine)
        )
        return self._started[-1]

    def elaunch(
        self,
        args: Sequence[Word],
        env: Mapping[str, str] | None = None,
        *,
        clock: str | None = None,
    ) -> Running:
        """Start ``elaunch ARGS`` here; see ``popen``."""
        if clock is not None:
            return self.popen([sys.executable, "-m", "elaunch", *args], env, clock=clock)
        added = self._launcher.env | self.env | dict(env or {})
        where = self._launcher.directory
        self._started.append(self._launcher.start_elaunch(args, added, where, self.machine))
        return self._started[-1]

    def run(self, argv: Sequence[Word], deadline: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run any command here to its end."""
        return self.popen(argv).wait(deadline)

    def tell(self) -> None:
        """Print what all commands here have said: pytest shows it if the test has failed."""
        for running in self._started:
            command = " ".join(running.argv).partition(" -- ")[2]
            print(f"=== {self.name} [{running.pid}]: {running.process.poll()} {command}")
            print(f"--- stdout\n{running.output()}\n--- stderr\n{running.output('stderr')}")

    def processes(self) -> set[int]:
        """Return the pids of all that runs here now."""
        return self.machine.processes()


@dataclass
class _Faults:
    """What the switch does to packets; the table of nft is written anew from it each time."""

    dropped: set[tuple[str, str]] = field(default_factory=set)
    shut: set[int] = field(default_factory=set)
    lossy: dict[str, float] = field(default_factory=dict)
    largest: int | None = None

    def table(self) -> str:
        # A delayed cable comes to the bridge as slowK instead of portK.
        lines = []
        for port, percent in self.lossy.items():
            for side in ("iifname", "oifname"):
                chance = f"numgen random mod 1000 < {percent * 10:.0f} " if percent < 100 else ""
                lines.append(f"{side} {_either(port)} {chance}drop")
        # Who is cut off by a filter still answers to its neighbours' question for its address.
        lines.append("ether type arp accept")
        lines.append("icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
        if self.largest is not None:
            lines.append(f"meta length > {self.largest} drop")
        lines += [f"tcp dport {port} drop" for port in sorted(self.shut)]
        for source, target in sorted(self.dropped):
            lines.append(f"iifname {_either(source)} oifname {_either(target)} drop")
        chain = "\n".join(["type filter hook forward priority 0;", *lines])
        return f"table bridge faults\ndelete table bridge faults\ntable bridge faults {{\n\
chain forward {{\n{chain}\n}}\n}}\n"


def _either(port: str) -> str:
    return f'{{ "{port}", "{_slow(port)}" }}'


def _slow(port: str) -> str:
    return port.replace("port", "slow")


class Cluster:
    """A test's machines and the switch; ``close`` fails where a process was left behind."""

    def __init__(self, directory: Path, count: int, *, forks: bool = True) -> None:
        self.directory = directory
        self.nodes: list[Node] = []
        self._forks = forks
        self._faults = _Faults()
        self._cables: dict[str, subprocess.Popen[str]] = {}
        self._machines: list[netns.Machine] = []
        self._saver: subprocess.Popen[bytes] | None = None
        self._launcher: Launcher | None = None
        try:
            self._build(count)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Node:
        """Return a node by its number, from 1."""
        return self.nodes[number - 1]

    def link_down(self, node: Node) -> None:
        """Pull the node's cable out of the switch."""
        self._switch.do(["ip", "link", "set", node.port, "down"])

    def link_up(self, node: Node) -> None:
        """Put the cable back."""
        self._switch.do(["ip", "link", "set", node.port, "up"])

    def drop(self, source: Node, target: Node) -> None:
        """Lose all packets from one node to another."""
        self._faults.dropped.add((source.port, target.port))
        self._apply()

    def partition(self, some: Iterable[Node], others: Iterable[Node]) -> None:
        """Lose all packets between two groups of nodes."""
        ends = list(others)
        for one in some:
            for other in ends:
                self._faults.dropped |= {(one.port, other.port), (other.port, one.port)}
        self._apply()

    def shut(self, ports: Iterable[int]) -> None:
        """Lose all packets to some TCP ports, as a firewall does."""
        self._faults.shut |= set(ports)
        self._apply()

    def lose(self, node: Node, percent: float) -> None:
        """Lose that part of all frames from and to a node, by chance; 0 to 100."""
        self._faults.lossy[node.port] = percent
        self._apply()

    def narrow(self, size: int) -> None:
        """Lose all frames of more than ``size`` bytes: the switch does not carry the nodes' MTU."""
        for node in self.nodes:
            # A frame that the kernel cuts only at its way out would be seen whole by the filter.
            node.machine.do(["ip", "link", "set", "eth0", "mtu", "9000", "gso_max_segs", "1"])
            self._switch.do(["ip", "link", "set", node.port, "mtu", "9000"])
        self._faults.largest = size
        self._apply()

    def delay(self, node: Node, seconds: float) -> None:
        """Deliver each frame from or to a node that much later; a round trip has it twice."""
        port, slow, inner = node.port, _slow(node.port), node.port.replace("port", "inner")
        lines = [
            f"link set {port} nomaster",
            f"link add {slow} type veth peer name {inner}",
            f"link set {slow} master bridge up",
            f"link set {inner} up",
        ]
        self._switch.do(["ip", "-batch", "-"], "\n".join(lines))
        program = [sys.executable, "-S", "-E", delayline.__file__, port, inner, str(seconds)]
        self._cables[port] = cable = subprocess.Popen(
            [*self._switch.prefix(), *program],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert cable.stdout is not None and cable.stdout.readline() == "ready\n"

    def heal(self) -> None:
        """Deliver all packets at once again; links that are down stay so."""
        self._faults = _Faults()
        self._apply()
        for port, cable in self._cables.items():
            _end(cable)
            lines = [f"link del {_slow(port)}", f"link set {port} master bridge"]
            self._switch.do(["ip", "-batch", "-"], "\n".join(lines))
        self._cables.clear()

    def power_off(self, node: Node) -> None:
        """End a node: nobody hears from it again. After ``link_up`` it is a fresh machine."""
        self.link_down(node)
        node.machine.power_off()

    def close(self) -> None:
        """End all; fail where a command that had ended, or was killed, left a process behind."""
        with ExitStack() as last_first:
            if self._saver is not None:
                last_first.callback(_end, self._saver)
            for machine in self._machines:
                last_first.callback(machine.close)
            last_first.callback(netns.kill, {machine.net for machine in self._machines} - {0})
            if self._launcher is not None:
                last_first.callback(self._launcher.close)
            for cable in self._cables.values():
                last_first.callback(_end, cable)
            for node in reversed(self.nodes):
                last_first.callback(node.tell)

    def _build(self, count: int) -> None:
        numbers = range(1, count + 1)
        hosts = _hosts(numbers)
        places = self.directory / "machines"
        places.mkdir()
        for number in (*numbers, 0):
            name = f"node{number}" if number else "switch"
            ahead = (count - number) * _CLOCKS_APART
            self._machines.append(netns.Machine(name, places / name, hosts, ahead))
        for machine in self._machines:
            machine.ready()
        self._saver = netns.saver(self._machines)
        *machines, self._switch = self._machines
        # Only now: what this process has started before is not the test's own.
        self._launcher = launcher = Launcher(self.directory, forks=self._forks)
        self.nodes = [
            Node(machine, number, launcher)
            for number, machine in zip(numbers, machines, strict=True)
        ]
        self._connect()

    def _connect(self) -> None:
        lines = ["link add bridge type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
        lines.append("link set bridge up")
        for node in self.nodes:
            peer = f"peer name eth0 netns {node.machine.holder}"
            lines.append(f"link add {node.port} type veth {peer}")
            lines.append(f"link set {node.port} master bridge up")
        self._switch.do(["ip", "-batch", "-"], "\n".join(lines))
        for node in self.nodes:
            lines = [
                f"addr add {node.address}/24 dev eth0",
                # Looking for a second owner of the address first would take a second.
                f"addr add {node.address6}/64 dev eth0 nodad",
                "link set eth0 up",
            ]
            node.machine.do(["ip", "-batch", "-"], "\n".join(lines))

    def _apply(self) -> None:
        self._switch.do(["nft", "-f", "-"], self._faults.table())


def _hosts(numbers: Iterable[int]) -> str:
    """Return an ``/etc/hosts``: ``nodeK`` is its IPv4 address, ``nodeK-v6`` the other.

    A TCPStore asks for the name of each peer, as an address of IPv6 whatever it is: without a row
    for that every connection waits for a resolver.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost", "::ffff:127.0.0.1 mapped-localhost"]
    for number in numbers:
        lines.append(f"{_IPV4}.{number} node{number}")
        lines.append(f"::ffff:{_IPV4}.{number} mapped-node{number}")
        lines.append(f"{_IPV6}:{number} node{number}-v6")
    return "\n".join(lines) + "\n"


def wall_clock(offset: str) -> dict[str, str]:
    """Return the variables that shift the wall clock of a process and of what it starts."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert library is not None, "not installed: faketime"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": offset,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).with_name("wrongclock")),
    }


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(60.0)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
