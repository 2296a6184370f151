"""The fixture ``cluster`` itself: machines, the faults between them, and nothing left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import netns
from tests.cluster import Cluster, Node
from tests.launching import Running, freeze, thaw, wait_until

pytestmark = pytest.mark.slow

Build = Callable[[int], Cluster]

# Says hello to whoever connects, and stays to read what they say.
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0), family=int(sys.argv[2])) as server:
    print(f"port {server.getsockname()[1]}", flush=True)
    peer, address = server.accept()
    with peer:
        peer.sendall(b"hello " + address[0].encode() + b"\\n")
        while data := peer.recv(1024):
            print("heard", data.decode(), flush=True)
"""

CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    print(sock.recv(1024).decode(), end="", flush=True)
    for line in sys.stdin:
        pass
"""

ABOUT = """
import os, socket, time
began = time.monotonic()
print("name", socket.gethostname(), socket.getfqdn())
print("mapped", socket.getnameinfo(("::ffff:10.20.0.1", 80), 0)[0])
print("six", socket.getaddrinfo("node1-v6", 80, type=socket.SOCK_STREAM)[0][4][0])
print("took", time.monotonic() - began < 5.0)
print("monotonic", time.monotonic())
print("home", os.environ["HOME"], os.environ["TMPDIR"], os.environ["XDG_STATE_HOME"])
"""


def python(node: Node, code: str, *words: str, clock: str | None = None) -> Running:
    """Start a Python program on a node."""
    return node.popen([sys.executable, "-c", code, *words], clock=clock)


def answers(source: Node, target: str, count: int = 1, pause: float = 0.01) -> int:
    """Return how many of some packets to an address were answered, each within 0.5 s."""
    argv = ["ping", "-n", "-c", str(count), "-i", str(pause), "-W", "0.5", target]
    done = source.run(argv)
    match = re.search(r"(\d+) received", done.stdout)
    assert match, done
    return int(match[1])


def test_a_machine_is_one_of_its_own(cluster: Build) -> None:
    """Names without a resolver, directories, and a monotonic clock that is nobody else's."""
    machines = cluster(2)
    said = [python(node, ABOUT).wait().stdout for node in machines.nodes]
    for node, text in zip(machines.nodes, said, strict=True):
        home = machines.directory / "machines" / node.name
        assert f"name {node.name} {node.name}\n" in text
        assert "mapped mapped-node1\nsix fd00:20::1\ntook True\n" in text
        assert f"home {home} {home}/tmp {home}/state\n" in text
    one, two = (float(text.partition("monotonic ")[2].split()[0]) for text in said)
    assert not Path("/proc/self/ns/time").exists() or one - two > 1000


@pytest.mark.parametrize("family", [2, 10], ids=["ipv4", "ipv6"])
def test_machines_reach_each_other(cluster: Build, family: int) -> None:
    """By name and by address, over both protocols."""
    machines = cluster(3)
    target = machines[2]
    server = python(target, SERVER, target.address if family == 2 else target.address6, str(family))
    port = server.wait_for_line(r"^port (\d+)$")[1]
    name = target.name if family == 2 else f"{target.name}-v6"
    said = python(machines[3], CLIENT, name, port).wait().stdout
    assert said.strip() == f"hello {machines[3].address if family == 2 else machines[3].address6}"
    server.wait()


def test_two_clusters_do_not_meet(cluster: Build, tmp_path: Path) -> None:
    """The addresses are the same, the networks are not; the host has neither."""
    machines = cluster(1)
    (tmp_path / "other").mkdir()
    other = Cluster(tmp_path / "other", 2)
    try:
        wait_until(lambda: answers(other[1], "node2"))
        assert answers(machines[1], other[2].address) == 0
    finally:
        other.close()
    routes = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True).stdout
    assert machines[1].address not in routes


def test_a_link_goes_down_and_up(cluster: Build) -> None:
    """And an established connection outlives that."""
    machines = cluster(2)
    one, two = machines.nodes
    machines.link_down(two)
    assert answers(one, "node2") == 0
    assert "NO-CARRIER" in two.run(["ip", "link", "show", "eth0"]).stdout
    machines.link_up(two)
    wait_until(lambda: answers(one, "node2"))
    wait_until(lambda: answers(one, two.address6))


def test_packets_are_dropped_one_way(cluster: Build) -> None:
    """What node 1 sends does not reach node 2; what node 2 sends reaches node 1."""
    machines = cluster(3)
    one, two, three = machines.nodes
    receive = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7))"
    receive += "; print('up', flush=True); print(s.recv(9), flush=True)"
    send = "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    send += "s.sendto(b'word', (sys.argv[1], 7))"
    machines.drop(one, two)
    ears = [python(node, receive) for node in (one, two)]
    for ear in ears:
        ear.wait_for_line("^up$")
    python(one, send, two.name).wait()
    python(two, send, one.name).wait()
    assert ears[0].wait().stdout == "up\nb'word'\n"
    assert (answers(one, "node2"), answers(two, "node1")) == (0, 0)
    wait_until(lambda: answers(one, "node3"))
    assert ears[1].output() == "up\n"
    machines.heal()
    python(one, send, two.name).wait()
    assert ears[1].wait().stdout == "up\nb'word'\n"
    wait_until(lambda: answers(three, "node2"))


def test_groups_are_parted(cluster: Build) -> None:
    """Over both protocols; inside a group all is well."""
    machines = cluster(3)
    one, two, three = machines.nodes
    machines.partition([one], [two, three])
    assert [answers(one, node.address) for node in (two, three)] == [0, 0]
    assert [answers(node, one.address6) for node in (two, three)] == [0, 0]
    wait_until(lambda: answers(two, three.address6))
    machines.heal()
    wait_until(lambda: answers(one, two.address6))


def test_packets_are_lost_by_chance(cluster: Build) -> None:
    """Of 300, there and back with 20 % each way, 192 come back on average."""
    machines = cluster(2)
    one, two = machines.nodes
    wait_until(lambda: answers(one, "node2"))  # a lost question for its address costs a second
    machines.lose(two, 20)
    assert 140 < answers(one, "node2", 300, 0.002) < 240
    machines.lose(two, 100)
    assert answers(one, "node2", 5) == 0
    machines.heal()
    wait_until(lambda: answers(one, "node2", 20) == 20)


def test_a_cable_is_slow(cluster: Build) -> None:
    """Each way, also for a stream of data that the kernel handles in large pieces."""
    machines = cluster(3)
    one, two, three = machines.nodes
    took = "import socket, sys, time\n"
    took += "with socket.create_server(('', 0)) as s:\n"
    took += " print('port', s.getsockname()[1], flush=True)\n peer, _ = s.accept()\n size = 0\n"
    took += " while data := peer.recv(1 << 16): size += len(data)\n print('size', size)"
    send = "import socket, sys, time; t = time.monotonic()\n"
    send += "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    send += "print('connected', time.monotonic() - t); s.sendall(bytes(1 << 20)); s.close()"
    machines.delay(two, 0.1)
    receiver = python(two, took)
    port = receiver.wait_for_line(r"^port (\d+)$")[1]
    connected = python(one, send, two.name, port).wait().stdout.split()[1]
    assert float(connected) >= 0.2
    assert receiver.wait().stdout.endswith(f"size {1 << 20}\n")
    wait_until(lambda: answers(one, "node3"))
    machines.drop(one, two)
    assert answers(one, "node2") == 0
    machines.heal()
    wait_until(lambda: answers(three, "node2"))
    machines.delay(two, 0.01)  # and once more
    wait_until(lambda: answers(three, "node2"))


def test_a_node_loses_its_power(cluster: Build) -> None:
    """Its peers hear nothing more from it; it can be started again."""
    machines = cluster(2)
    one, two = machines.nodes
    server = python(one, SERVER, one.address, "2")
    port = server.wait_for_line(r"^port (\d+)$")[1]
    code = "import os, signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "subprocess.Popen(['setsid', 'sleep', '60'])\n" + CLIENT
    code = code.replace("for line in sys.stdin", "while sock.recv(9)")
    client = python(two, code, one.name, port)
    client.wait_for_line("^hello")
    assert len(two.processes()) == 2
    machines.power_off(two)
    assert two.processes() == set()
    assert client.wait().returncode == -signal.SIGKILL
    assert server.process.poll() is None  # no end of the connection came
    machines.link_up(two)
    wait_until(lambda: answers(two, "node1"))
    server.end()


def test_a_process_is_frozen(cluster: Build) -> None:
    """And goes on."""
    machines = cluster(1)
    go = machines.directory / "go"
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    running = python(machines[1], code, str(go))
    freeze(running.pid)
    go.touch()
    assert running.process.poll() is None
    thaw(running.pid)
    assert running.wait().returncode == 0


def test_a_wall_clock_is_wrong(cluster: Build) -> None:
    """For one command and what it starts; clocks that measure durations are right."""
    machines = cluster(1)
    shared = set(os.listdir("/dev/shm"))
    code = "import os, sys, time; t = time.monotonic(); time.sleep(0.1); u = time.monotonic()\n"
    code += "print(time.time(), u - t, flush=True); os.system('date +%s')"
    for clock, seconds in (("+1h", 3600), ("-1000s", -1000)):
        words = python(machines[1], code, clock=clock).wait().stdout.split()
        assert abs(float(words[0]) - time.time() - seconds) < 30
        assert 0.1 <= float(words[1]) < 30
        assert abs(float(words[2]) - time.time() - seconds) < 30
    left = set(os.listdir("/dev/shm")) - shared
    assert not [name for name in left if "faketime" in name]


def test_what_is_left_behind_is_named_and_killed(
    cluster: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the fixture for one machine does it."""
    monkeypatch.setattr("tests.launching.LEFTOVER_SECONDS", 0.2)
    (tmp_path / "mine").mkdir()
    machines = Cluster(tmp_path / "mine", 1)
    nets = {machines[1].machine.net}
    machines[1].run(["sh", "-c", "setsid sleep 61 >/dev/null 2>&1 &"])
    with pytest.raises(AssertionError, match=r"left behind: .*sleep 61"):
        machines.close()
    assert netns.in_networks(nets) == set()


MAKER = """
import sys, time
from pathlib import Path
from tests.cluster import Cluster
machines = Cluster(Path(sys.argv[1]), 2)
machines.delay(machines[1], 0.1)
machines[2].popen(["setsid", "sleep", "62"])
while not len(machines[2].processes()) == 1:
    time.sleep(0.01)
print("nets", *(node.machine.net for node in machines.nodes), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_nothing_remains_when_the_test_itself_is_killed(
    cluster: Build, tmp_path: Path, ending: signal.Signals
) -> None:
    """The saver sees to that."""
    assert callable(cluster)  # for its reasons to skip
    root = Path(__file__).parent.parent
    test = subprocess.Popen(
        [sys.executable, "-c", MAKER, tmp_path],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        start_new_session=True,
    )
    assert test.stdout is not None
    with test.stdout:
        nets = {int(word) for word in test.stdout.readline().split()[1:]}
        assert len(nets) == 2 and netns.in_networks(nets)
        os.killpg(test.pid, ending)
        wait_until(lambda: not netns.in_networks(nets))
    test.wait(60.0)
