"""The rendezvous flags on one node by itself."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.config import endpoints
from elaunch.torchrun import agentprocess
from tests import launching
from tests.config.resolving import Job

PORT_IN_USE = "--master-port {port} train.py"


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def free() -> int:
    """Return a port that nobody listened on a moment ago."""
    return launching.free_port()


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "--standalone train.py",
        "--standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py",
        "--rdzv_id=100 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 train.py",
        "--rdzv_backend=c10d --rdzv_endpoint=localhost:29400 train.py",
        "--rdzv_backend=c10d --rdzv_endpoint=127.0.0.1 --nnodes 1:1 train.py",
        "--rdzv_backend=c10d --rdzv_endpoint=[::1]:29400 train.py",
        "--rdzv_backend=c10d train.py",
        "--rdzv-backend=c10d --rdzv-endpoint=elsewhere:1 --rdzv-conf is_host=1 train.py",
        "--master-port 0 train.py",
        "--node-rank 0 train.py",
    ],
)
def test_one_node_by_itself(job: Job, line: str) -> None:
    """A fresh port in each round, and nothing to remark on."""
    found = job.settings(line)
    assert (found.rdzv_backend, found.master_addr, found.master_port) == ("c10d", None, None)
    assert found.notices == ()


def test_this_machines_own_name_is_local(job: Job) -> None:
    """Scripts for a cluster give the head node's name even with one node."""
    line = f"--rdzv-backend c10d --rdzv-endpoint {socket.gethostname()}:29400 train.py"
    assert job.settings(line).rdzv_backend == "c10d"


def test_an_address_and_a_port_are_taken_exactly(job: Job, free: int) -> None:
    """As torchrun's static rendezvous does."""
    line = f"--nnodes=1 --node_rank 0 --master_addr 127.0.0.1 --master_port {free} train.py"
    found = job.settings(line)
    assert (found.rdzv_backend, found.master_addr, found.master_port) == (
        "static",
        "127.0.0.1",
        free,
    )
    assert job.settings(f"--master-port {free} train.py").master_addr == "127.0.0.1"
    found = job.settings(f"--rdzv-endpoint localhost:{free} train.py")
    assert (found.master_addr, found.master_port) == ("localhost", free)


def test_an_address_alone_is_honoured(job: Job) -> None:
    """Torchrun ignores it without a port."""
    found = job.settings("--master-addr localhost train.py")
    assert (found.master_addr, found.master_port) == ("localhost", None)
    assert job.settings("--local-addr 127.0.0.5 train.py").master_addr == "127.0.0.5"
    assert job.settings("--master-addr [::1] train.py").master_addr == "::1"


def test_a_port_in_use_names_its_holder(job: Job, taken: int) -> None:
    """The test itself holds it here."""
    message = job.error(PORT_IN_USE.format(port=taken))
    assert f"--master-port: '{taken}' is in use by process {os.getpid()}" in message
    message = job.error(f"--rdzv-endpoint localhost:{taken} train.py")
    assert f"port {taken} is in use by process {os.getpid()}" in message


@pytest.mark.parametrize("flag", ["--metrics-port", "--dashboard"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no.such.host.invalid:80", "does not resolve to an address; name this machine, or give"),
        ("192.0.2.1:9100", "is not an address of this machine; 127.0.0.1 is for this machine"),
        ("127.0.0.1:99999", "has the port '99999', which is not a number from 0 to 65535"),
        ("127.0.0.1:{taken}", "cannot be used: port {taken} is in use by process {pid} ("),
    ],
)
def test_a_place_where_nobody_can_answer_is_refused(
    job: Job, flag: str, place: str, reason: str, taken: int
) -> None:
    """Before anything starts; a free one, or any port, is taken."""
    place, reason = (text.format(taken=taken, pid=os.getpid()) for text in (place, reason))
    assert f"{flag}: {place!r} {reason}" in job.error(f"{flag}={place} train.py")


def test_free_ports_are_taken(job: Job, free: int) -> None:
    """Of several nodes only one serves pages, and it is not known yet which."""
    found = job.settings(f"--dashboard --metrics-port {free} train.py")
    assert (found.dashboard, found.metrics_port) == (("127.0.0.1", None), ("127.0.0.1", free))
    nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29400"
    found = job.settings(f"{nodes} --dashboard=192.0.2.1:80 train.py")
    assert found.dashboard == ("192.0.2.1", 80)


def test_a_free_port_is_free(free: int) -> None:
    """Asking leaves it free."""
    for host in ("127.0.0.1", "localhost", "192.0.2.1", "127.0.0.1"):
        assert endpoints.why_not_free(host, free) is None


def test_a_listener_on_another_address_is_not_in_the_way(taken: int) -> None:
    """The store listens on its own address only, or on all for a foreign one."""
    assert endpoints.why_not_free("127.0.0.5", taken) is None
    assert "is in use" in (endpoints.why_not_free("192.0.2.1", taken) or "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--node-rank 1 --master-port 1 train.py", "--node-rank: '1' is not a rank of one node"),
        ("--node-rank 1 train.py", "the only node is 0; for several nodes add --nnodes N"),
        ("--rdzv-endpoint localhost train.py", "has no port"),
        ("--master-addr no.such.host.invalid train.py", "does not resolve"),
    ],
)
def test_what_one_node_cannot_be_is_refused(job: Job, line: str, message: str) -> None:
    """With what to do."""
    assert message in job.error(line)


@pytest.mark.parametrize("port", [{}, {"PET_MASTER_PORT": str(launching.free_port())}])
def test_a_name_of_a_cluster_that_does_not_resolve_yet(job: Job, port: dict[str, str]) -> None:
    """As Kubeflow's for the only pod: the store is here, whatever its name; it was refused."""
    found = job.settings(PET_MASTER_ADDR="train-node-0-0.train.invalid", **port)
    assert found.master_addr in (None, "127.0.0.1")


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--standalone --master-port 29400 train.py", "--master-port has no effect"),
        ("--rdzv-backend c10d --node-rank 1 train.py", "--node-rank has no effect"),
        (
            "--standalone --nnodes 1:2 train.py",
            "--nnodes has no effect where no other node can join: this one is by itself",
        ),
        (
            "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
            "--nnodes has no effect where no other node can join",
        ),
        ("--on-join now --standalone --nnodes 1:2 train.py", "--on-join has no effect on one node"),
        ("--on-join now train.py", "--on-join has no effect on one node"),
        ("--strict-symmetry --standalone train.py", "--strict-symmetry has no effect on one"),
        ("--rdzv-secret-file none train.py", "--rdzv-secret-file has no effect on one node"),
        ("--master-addr localhost --local-addr 127.0.0.1 train.py", "--local-addr has no effect"),
        ("--master-addr 192.0.2.1 train.py", "is not an address of this machine"),
    ],
)
def test_what_has_no_effect_on_one_node_is_said(job: Job, line: str, notice: str) -> None:
    """Never silently."""
    assert notice in job.notices(line)


def test_one_node_that_meets_at_a_store_uses_what_several_use(job: Job) -> None:
    """Its store may be reached by others, and nodes may join it."""
    (job.directory / "secret").write_text("s" * 40)
    (job.directory / "secret").chmod(0o600)
    line = "--rdzv-backend etcd --rdzv-endpoint localhost --rdzv-id one"
    flags = "--rdzv-secret-file secret --on-join now --strict-symmetry"
    assert "no effect" not in job.notices(f"{line} {flags} train.py")


@pytest.mark.parametrize(
    ("words", "is_agent"),
    [
        (["python", "/usr/bin/elaunch", "run", "s.py"], True),
        (["python", "LINK", "--nnodes", "2", "s.py"], True),
        (["python", "-m", "elaunch.torchrun", "s.py"], True),
        ([sys.executable, "-c", agentprocess._BOOT, "/", "1", "run", "s.py"], True),
        (["python", "-m", "http.server"], False),
        (["python", "/usr/bin/torchrun", "/home/elaunch/s.py"], False),
        ([], True),
    ],
)
def test_which_process_on_the_port_may_be_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], is_agent: bool
) -> None:
    """It may import torch just then, and is waited for; under a name of torchrun's, too."""
    link = tmp_path / "torchrun"
    link.symlink_to("/usr/bin/elaunch-torchrun")
    shown = [str(link) if word == "LINK" else word for word in words]
    monkeypatch.setattr(endpoints, "_process", lambda pid: {"cmdline": shown})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert endpoints.may_be_agent(listening.getsockname()[1]) is is_agent
