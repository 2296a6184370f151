"""etcd on the machines of a cluster, which only they can reach: one member on each of some nodes.

For what an etcd does when it is hurt, see ``tests/etcdserver.py``; here it is hurt while jobs run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import programs
from tests.cluster import Node
from tests.launching import Running, freeze, wait_until

CLIENT_PORT, PEER_PORT = 2379, 2380
LITTLE_SPACE = ("--quota-backend-bytes", "2000000")


@dataclass
class Member:
    """One member; ``running`` is its process, killed and frozen like any other."""

    node: Node
    running: Running

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"{self.node.address}:{CLIENT_PORT}"


class Etcd:
    """A cluster of etcd with ``options``; its processes end with the test."""

    def __init__(self, nodes: Sequence[Node], options: Sequence[str] = ()) -> None:
        programs.needed("etcd", "etcdctl")
        self._options = options
        self._user: list[str] = []
        self._peers = ",".join(f"{n.name}=http://{n.address}:{PEER_PORT}" for n in nodes)
        self.members = [Member(node, self._start(node)) for node in nodes]
        self.leader()

    @property
    def endpoint(self) -> str:
        """All endpoints, as ``--rdzv-endpoint`` takes them."""
        return ",".join(member.endpoint for member in self.members)

    def leader(self) -> Member:
        """Wait until all members that run know of one leader among them, and return it."""
        found: list[Member] = []

        def look() -> bool:
            running = [m for m in self.members if m.running.process.poll() is None]
            states = [_status(member) for member in running]
            found[:] = [
                member
                for member, state in zip(running, states, strict=True)
                if state is not None and state["leader"] == state["header"]["member_id"]
            ]
            return None not in states and len(found) == 1

        wait_until(look, what="etcd has a leader")
        return found[0]

    def move_leader(self) -> None:
        """Have another member lead."""
        leader = self.leader()
        other = self.members[self.members.index(leader) - 1]
        state = _status(other)
        if state is not None:
            number = f"{state['header']['member_id']:x}"
            leader.node.run(_etcdctl(leader, "move-leader", number))

    def follower(self) -> Member:
        """Return a member that does not lead."""
        leader = self.leader()
        return next(member for member in self.members if member is not leader)

    def keys(self) -> list[str]:
        """Return the names of all keys."""
        return self.ctl("get", "", "--from-key", "--keys-only").split()

    def ctl(self, *words: str) -> str:
        """Run an ``etcdctl`` and return what it prints."""
        member = self.leader()
        done = member.node.run(_etcdctl(member, *self._user, *words))
        assert done.returncode == 0, done
        return done.stdout

    def add_user(self, name: str, password: str) -> None:
        """Create a user of elaunch's keys, and switch on authentication."""
        for words in (
            ["user", "add", "root:root"],
            ["user", "grant-role", "root", "root"],
            ["user", "add", f"{name}:{password}"],
            ["role", "add", "jobs"],
            ["role", "grant-permission", "jobs", "--prefix=true", "readwrite", "/elaunch/"],
            ["user", "grant-role", name, "jobs"],
            ["auth", "enable"],
        ):
            self.ctl(*words)
        self._user = ["--user=root:root"]

    def set_password(self, name: str, password: str) -> None:
        """Change a user's password."""
        words = ["user", "passwd", name, "--interactive=false"]
        member = self.leader()
        ctl = " ".join(_etcdctl(member, *self._user, *words))
        done = member.node.run(["sh", "-c", f"echo {password} | {ctl}"])
        assert done.returncode == 0, done

    def put(self, key: str, value: str) -> None:
        """Write what is no agent's."""
        member = self.leader()
        file = member.node.state / "value"
        file.write_text(value)
        words = " ".join(_etcdctl(member, "put", key))
        done = member.node.run(["sh", "-c", f"{words} < {file}"])
        assert done.returncode == 0, done

    def agent_ports(self) -> dict[str, int]:
        """Return the ports on which the agents of a job reach each other, by their host."""
        said = self.ctl("get", "", "--from-key", "--print-value-only")
        pairs = re.findall(r'"host":"(\w+)".*?"peer_port":(\d+)', said)
        return {host: int(port) for host, port in pairs}

    def kill(self, member: Member) -> None:
        """End a member as ``kill -9`` does."""
        member.running.end()

    def restart(self, member: Member) -> None:
        """Start a member that was killed, with the data that it had."""
        member.running = self._start(member.node)

    def save(self, path: Path) -> None:
        """Save a snapshot of the only member."""
        (member,) = self.members
        done = member.node.run(_etcdctl(member, "snapshot", "save", str(path)))
        assert done.returncode == 0, done

    def lose(self, snapshot: Path | None = None) -> None:
        """Kill the only member, and start it with no data, or with what was saved."""
        (member,) = self.members
        self.kill(member)
        data = member.node.state / "etcd"
        shutil.rmtree(data)
        if snapshot is not None:
            words = ["--name", member.node.name, "--data-dir", str(data)]
            words += ["--initial-cluster", self._peers, "--initial-advertise-peer-urls"]
            words += [self._peers.partition("=")[2]]
            done = member.node.run(_etcdctl(member, "snapshot", "restore", str(snapshot), *words))
            assert done.returncode == 0, done
        self.restart(member)

    def fill(self) -> None:
        """Write until the only member, which has LITTLE_SPACE, takes no more."""
        (member,) = self.members
        while member.node.run(_etcdctl(member, "put", "junk", "x" * 100_000)).returncode == 0:
            pass

    def freeze(self, member: Member) -> None:
        """Stop a member: its connections stay, and nobody answers; ``thaw`` its pid."""
        freeze(member.running.pid)

    def _start(self, node: Node) -> Running:
        client, peer = (f"http://{node.address}:{port}" for port in (CLIENT_PORT, PEER_PORT))
        words = ["--name", node.name, "--data-dir", str(node.state / "etcd"), "--logger", "zap"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", self._peers, "--unsafe-no-fsync", "--log-level", "error"]
        if "," not in self._peers:
            # It has nobody to wait for. Several members have production's times.
            words += ["--heartbeat-interval", "20", "--election-timeout", "200"]
        return node.popen(["etcd", *words, *self._options])


def _etcdctl(member: Member, *words: str) -> list[str]:
    options = [f"--endpoints=http://{member.endpoint}", "--command-timeout=2s"]
    return ["env", "ETCDCTL_API=3", "etcdctl", *options, *words]


def _status(member: Member) -> dict[str, Any] | None:
    code = member.running.process.poll()
    assert code is None, f"etcd ended with {code}: {member.running.output('stderr')[-2000:]}"
    done = member.node.run(_etcdctl(member, "endpoint", "status", "--write-out=json"))
    if done.returncode != 0:
        return None
    status: dict[str, Any] = json.loads(done.stdout)[0]["Status"]
    return status if status.get("leader") else None
