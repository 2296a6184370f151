"""Whether the agents meet, where, and which of them hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from elaunch.config import endpoints
from elaunch.config.rendezvous import RendezvousSettings
from tests.config.resolving import Job

# Of the block for documentation: never an address of this machine, and nothing to resolve.
ELSEWHERE = "192.0.2.1"
C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint"
ETCD = "--nnodes 1:4 --rdzv-backend etcd --rdzv-id 7 --rdzv-endpoint"
STATIC = f"--nnodes 3 --master-addr {ELSEWHERE}"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[str]]], None]:
    """Return a function that gives names their addresses, instead of the resolver."""

    def resolve(table: dict[str, list[str]]) -> None:
        def look_up(host: str) -> list[str]:
            return table.get(host, [host] if host[:1].isdigit() else [])

        monkeypatch.setattr(endpoints, "addresses", look_up)

    return resolve


def meet(job: Job, line: str, **environ: str) -> RendezvousSettings:
    """Return how the agents meet."""
    found = job.settings(f"{line} train.py", **environ).rendezvous
    assert found is not None
    return found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--standalone",
        "--standalone --rdzv-backend etcd",
        "--standalone --rdzv-backend c10d --rdzv-endpoint 192.0.2.1",
        "--nnodes 1",
        "--nnodes 1:1 --node-rank 0",
        "--rdzv-backend c10d",
        "--rdzv-backend c10d --rdzv-endpoint localhost:0",
        "--rdzv-backend c10d --rdzv-endpoint [::1]:29400",
        f"--rdzv-backend c10d --rdzv-endpoint {socket.gethostname()}:29400",
        "--rdzv-backend c10d --rdzv-endpoint 192.0.2.1 --rdzv-conf is_host=1",
        "--master-addr 127.0.0.1",
        "--standalone --nnodes 1:2",
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint localhost:0",
    ],
)
def test_one_node_by_itself_meets_nobody(job: Job, line: str) -> None:
    """And needs no store."""
    assert job.settings(f"{line} train.py").rendezvous is None


@pytest.mark.parametrize(
    ("line", "backend", "endpoint", "is_host"),
    [
        (f"{C10D} {ELSEWHERE}", "c10d", "192.0.2.1:29400", False),
        (f"{C10D} {ELSEWHERE}:1234", "c10d", "192.0.2.1:1234", False),
        (f"{C10D} [2001:db8::1]", "c10d", "[2001:db8::1]:29400", False),
        (f"{C10D} localhost", "c10d", "localhost:29400", None),
        (f"{C10D} 127.0.0.7:5", "c10d", "127.0.0.7:5", None),
        (f"{C10D} [::1]:5", "c10d", "[::1]:5", None),
        (f"{C10D} {socket.gethostname()}:5", "c10d", f"{socket.gethostname()}:5", None),
        (f"{C10D} {ELSEWHERE} --rdzv-conf is_host=1", "c10d", "192.0.2.1:29400", True),
        (f"{C10D} {ELSEWHERE} --rdzv-conf is_host=y", "c10d", "192.0.2.1:29400", True),
        (f"{C10D} localhost --rdzv-conf is_host=false", "c10d", "localhost:29400", False),
        (f"{C10D} localhost --nnodes 1:4", "c10d", "localhost:29400", None),
        (f"{C10D} {ELSEWHERE} --nnodes 1", "c10d", "192.0.2.1:29400", False),
        (f"{C10D} localhost --nnodes 1 --rdzv-conf is_host=0", "c10d", "localhost:29400", False),
        (f"{ETCD} h1", "etcd", "h1:2379", False),
        (f"{ETCD} h1:1,h2,[::1]:2,h1:1", "etcd", "h1:1,h2:2379,[::1]:2", False),
        (f"{ETCD} localhost --nnodes 1", "etcd", "localhost:2379", False),
        (f"{STATIC} --node-rank 2", "static", "192.0.2.1:29500", False),
        (f"{STATIC} --node-rank 0", "static", "192.0.2.1:29500", True),
        (f"{STATIC} --master-port 7 --node-rank 1", "static", "192.0.2.1:7", False),
        ("--nnodes 2 --master-addr ::1 --node-rank 1", "static", "[::1]:29500", False),
        ("--nnodes 2 --rdzv-endpoint 192.0.2.1:7 --node-rank 1", "static", "192.0.2.1:7", False),
        (f"{STATIC} --rdzv-conf rank=2", "static", "192.0.2.1:29500", False),
    ],
)
def test_where_they_meet_and_who_hosts(
    job: Job, line: str, backend: str, endpoint: str, is_host: bool | None
) -> None:
    """None: whoever of this machine's agents gets the port."""
    found = meet(job, line)
    assert (found.backend, found.endpoint, found.is_host) == (backend, endpoint, is_host)
    settings = job.settings(f"{line} train.py")
    assert (settings.rdzv_backend, settings.rdzv_endpoint) == (backend, endpoint)
    assert (settings.master_addr, settings.master_port) == (None, None)


def test_variables_of_a_cluster_are_enough(job: Job) -> None:
    """Kubeflow's trainer sets these."""
    found = job.settings(
        PET_NNODES="2", PET_NODE_RANK="1", PET_MASTER_ADDR=ELSEWHERE, PET_MASTER_PORT="29500"
    )
    assert found.rendezvous is not None and found.notices == ()
    assert (found.rendezvous.node_hint, found.rendezvous.is_host) == (1, False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes 2", "--nnodes 2: nothing says where the nodes meet; add, the same on all nodes"),
        ("--nnodes 2", "--master-addr HOST (node 0) and --node-rank on each node, or --rdzv-back"),
        ("--nnodes 2 --master-port 29500", "nothing says where the nodes meet"),
        ("--nnodes 2 --node-rank 1", "nothing says where the nodes meet"),
        ("--nnodes 1:4 --rdzv-backend c10d", "--rdzv-backend c10d: nothing says where"),
        ("--nnodes 1:4 --rdzv-backend c10d", "--rdzv-endpoint HOST[:29400], where HOST is one of"),
        ("--rdzv-backend c10d --rdzv-conf is_host=0", "nothing says where the nodes meet"),
        ("--rdzv-backend etcd", "--rdzv-endpoint HOST[:2379],HOST"),
        ("--nnodes 2 --standalone", "--nnodes: '2' needs other nodes, and --standalone means one"),
        ("--rdzv-backend etcd-v2", "API v2, which etcd 3.6 has removed; write --rdzv-backend etcd"),
        ("--nnodes 2 --rdzv-backend etdc", "did you mean 'etcd'?"),
        (f"{C10D} localhost:0", "has port 0, a free one, which the other nodes cannot find"),
        (f"{C10D} localhost:0", "such as localhost:29400"),
        (f"{C10D} h1:1,h2:2", "names several endpoints, and the c10d backend has one"),
        (f"{C10D} fd00::1:29400", "without brackets; write '[fd00::1]:29400'"),
        (f"{ETCD} h1:0", "such as h1:2379"),
        ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h", "--rdzv-id is missing: etcd may hold"),
        ("--nnodes 1:2 --master-addr h", "'1:2' is a range, and the static backend takes exactly"),
        ("--nnodes 1:2 --master-addr h", "write --nnodes 2, or use --rdzv-backend c10d or etcd"),
        (f"{STATIC} --node-rank 3", "'3' is not one of the 3 nodes; their ranks go from 0 to 2"),
        (f"{STATIC} --rdzv-conf rank=3", "has rank=3, which is not one of the 3 nodes"),
        (STATIC, f"--node-rank is missing: {ELSEWHERE} is another machine, where node 0 is"),
        (STATIC, "give this node its own rank, from 1 to 2 (under SLURM --node-rank $SLURM_NODEI"),
        ("--nnodes 2 --master-addr h:29500", "has a port in it, where only a host is expected; "),
        ("--nnodes 2 --master-addr a..b", "--master-addr: 'a..b' has no valid host"),
        ("--nnodes 2 --master-addr h --master-port 0", "leave it out for 29500"),
        ("--nnodes 2 --rdzv-endpoint h", "has no port, which the static backend needs"),
        (
            "--nnodes 2 --rdzv-endpoint h:1,i:2",
            "names several endpoints, and the static backend has one",
        ),
        ("--nnodes 2 --rdzv-endpoint h:0", "has port 0"),
        (f"{C10D} localhost:0 --nnodes 2:4", "has port 0"),
        (f"{C10D} {ELSEWHERE}:0 --nnodes 1:4", "has port 0"),
        (f"{C10D} h --local-addr {ELSEWHERE}", "--local-addr: '192.0.2.1' is not an address of"),
        (f"{C10D} h --local-addr localhost:1", "--local-addr: 'localhost:1' has a port in it"),
    ],
)
def test_what_is_wrong_is_said(job: Job, line: str, message: str) -> None:
    """With the way out."""
    assert message in job.error(f"{line} train.py")


def test_slurms_numbers_do_not_replace_the_rank_of_static(job: Job) -> None:
    """As under torchrun; the message says how to pass them."""
    assert "--node-rank is missing" in job.error(f"{STATIC} train.py", SLURM_PROCID="1")
    assert meet(job, f"{STATIC} --node-rank 2", SLURM_PROCID="1").node_hint == 2


@pytest.mark.parametrize(
    ("line", "environ", "hint"),
    [
        ("", {}, None),
        ("--node-rank 5", {"SLURM_PROCID": "3"}, 5),
        ("--node-rank 0", {"SLURM_PROCID": "3"}, 0),
        ("", {"PET_NODE_RANK": "4", "SLURM_PROCID": "3"}, 4),
        ("", {"SLURM_PROCID": "3", "JOB_COMPLETION_INDEX": "2"}, 3),
        ("", {"JOB_COMPLETION_INDEX": "2"}, 2),
        ("", {"SLURM_PROCID": "", "JOB_COMPLETION_INDEX": "02"}, 2),
    ],
)
def test_a_place_among_newcomers(
    job: Job, line: str, environ: dict[str, str], hint: int | None
) -> None:
    """By the flag, or by the scheduler's number of the process; no remark."""
    for where in (f"{C10D} {ELSEWHERE}", f"{ETCD} h1"):
        found = job.settings(f"{where} {line} train.py", **environ)
        assert found.rendezvous is not None and found.rendezvous.node_hint == hint
        assert found.notices == ()


@pytest.mark.parametrize("text", ["a", "-1", "1.0", "²"])
def test_a_number_that_is_none_is_remarked_on(job: Job, text: str) -> None:
    """And the next one is taken."""
    found = job.settings(f"{ETCD} h train.py", SLURM_PROCID=text, JOB_COMPLETION_INDEX="1")
    assert found.rendezvous is not None and found.rendezvous.node_hint == 1
    assert found.notices == (f"SLURM_PROCID={text!r} is no number, so it does not order the nodes",)


Names = Callable[[dict[str, list[str]]], None]


def test_a_name_is_this_machine_if_one_of_its_addresses_is(job: Job, names: Names) -> None:
    """A CNAME, a second interface, the name with the domain."""
    names({"head.example.org": ["127.0.1.1"], "other.example.org": [ELSEWHERE]})
    assert meet(job, f"{C10D} head.example.org").is_host is None
    assert meet(job, f"{C10D} other.example.org").is_host is False
    assert meet(job, f"{C10D} not-up-yet.example.org").is_host is False
    line = "--rdzv-backend c10d --rdzv-endpoint"
    assert job.settings(f"{line} head.example.org train.py").rendezvous is None
    assert meet(job, f"{line} not-up-yet.example.org").is_host is False


def test_a_name_of_several_machines_is_remarked_on(job: Job, names: Names) -> None:
    """A service's name, behind which every node would take itself for the host."""
    names({"svc": ["127.0.0.9", ELSEWHERE], "dual": ["127.0.0.9", "127.0.0.8"]})
    found = job.settings(f"{C10D} svc train.py")
    assert found.rendezvous is not None and found.rendezvous.is_host is None
    (notice,) = found.notices
    assert "svc stands for 127.0.0.9, 192.0.2.1, and only some of them are this machine's" in notice
    assert job.settings(f"{C10D} dual train.py").notices == ()
    assert job.settings(f"{C10D} svc --rdzv-conf is_host=0 train.py").notices == ()


def test_node_0_of_static_at_a_foreign_address_is_remarked_on(job: Job, names: Names) -> None:
    """A forwarded port, perhaps; a name that is not known yet is not remarked on."""
    names({})
    assert "is not an address of this machine" in job.notices(f"{STATIC} --node-rank 0 train.py")
    assert job.settings("--nnodes 2 --master-addr not-up-yet train.py").notices == ()


def test_node_0_of_static_needs_its_port(job: Job) -> None:
    """The other nodes do not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port}"
        message = job.error(f"{line} train.py")
        assert f"port {port} is in use by process {os.getpid()}" in message
        assert meet(job, f"{line} --node-rank 1").is_host is False
        assert meet(job, f"{C10D} 127.0.0.1:{port}").is_host is None


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        (f"{C10D} {ELSEWHERE} --master-addr h", "--master-addr has no effect where MASTER_ADDR is"),
        (f"{ETCD} h --master-port 1", "--master-port has no effect where each round has a free"),
        (
            "--nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --master-addr h",
            "--master-addr has no effect with --rdzv-endpoint",
        ),
    ],
)
def test_what_has_no_effect_is_said(job: Job, line: str, notice: str) -> None:
    """Never silently."""
    assert notice in job.notices(f"{line} train.py")


def test_the_run_id_is_the_same_on_all_nodes(job: Job) -> None:
    """Nothing random is in it; one node by itself has a fresh one."""
    assert job.settings(f"{C10D} {ELSEWHERE} train.py").run_id == "train"
    assert job.settings(f"{C10D} {ELSEWHERE} --rdzv-id 9 train.py").run_id == "9"
    assert job.settings("train.py").run_id != "train"
