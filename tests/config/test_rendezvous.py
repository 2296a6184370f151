"""How long the agents wait, what signs their records, and how a reader finds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.config.rendezvous import RendezvousSettings, resolve_place, resolve_run_id
from elaunch.errors import UsageError
from tests.config.resolving import Job

C10D = "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1"
ETCD = "--nnodes 2 --rdzv-backend etcd --rdzv-id 7 --rdzv-endpoint h"
STATIC = "--nnodes 2 --node-rank 1 --master-addr 192.0.2.1"


def meet(job: Job, line: str, **environ: str) -> RendezvousSettings:
    """Return how the agents meet."""
    found = job.settings(f"{line} train.py", **environ).rendezvous
    assert found is not None
    return found


def test_the_defaults(job: Job) -> None:
    """Those of the dataclass, so that tests of other parts have them too."""
    found = meet(job, C10D)
    assert found == RendezvousSettings("c10d", (("192.0.2.1", 29400),), is_host=False)
    assert (found.join_timeout, found.settle, found.debounce) == (600.0, 2.0, 0.5)
    assert (found.heartbeat_timeout, found.store_timeout) == (3.0, 30.0)
    assert (found.on_join, found.strict_symmetry, found.secret) == ("graceful", False, None)


def test_agents_of_mpirun_have_a_secret_without_being_asked(job: Job) -> None:
    """That of Open MPI's own; --rdzv-secret-file goes before it, and nobody else's counts."""
    shared = {"OMPI_MCA_orte_precondition_transports": "8c8fd887a09a9725-6ef0e190a449f6db"}
    found = meet(job, C10D, OMPI_COMM_WORLD_RANK="1", **shared).secret
    assert found == meet(job, C10D, OMPI_COMM_WORLD_RANK="0", **shared).secret
    assert found and shared.popitem()[1].encode() not in found
    assert meet(job, C10D, OMPI_COMM_WORLD_RANK="0").secret is None
    assert meet(job, C10D, OMPI_MCA_orte_precondition_transports="x").secret is None


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (f"{C10D} --rdzv-conf join_timeout=60", "join_timeout", 60.0),
        (f"{C10D} --rdzv-conf join_timeout=60", "connect_timeout", 60.0),
        (f"{C10D} --rdzv-conf timeout=60", "join_timeout", 600.0),
        (f"{ETCD} --rdzv-conf timeout=60", "join_timeout", 60.0),
        (f"{ETCD} --rdzv-conf timeout=60,join_timeout=50", "join_timeout", 50.0),
        (STATIC, "join_timeout", 900.0),
        (f"{STATIC} --rdzv-conf timeout=60", "join_timeout", 60.0),
        (f"{C10D} --rdzv-conf last_call_timeout=30", "settle", 30.0),
        (f"{C10D} --rdzv-conf settle=0", "settle", 0.0),
        (f"{C10D} --rdzv-conf debounce=1.5", "debounce", 1.5),
        (f"{ETCD} --nnodes 128", "heartbeat_timeout", 3.0),
        (f"{ETCD} --nnodes 2:129", "heartbeat_timeout", 6.0),
        (f"{ETCD} --nnodes 2:129 --rdzv-conf heartbeat_timeout=4", "heartbeat_timeout", 4.0),
        (f"{C10D} --rdzv-conf heartbeat=10", "heartbeat_timeout", 10.0),
        (f"{C10D} --rdzv-conf heartbeat_timeout=0.5", "heartbeat_timeout", 0.5),
        (f"{C10D} --rdzv-conf keep_alive_interval=2", "heartbeat_timeout", 6.0),
        (f"{C10D} --rdzv-conf keep_alive_max_attempt=2", "heartbeat_timeout", 10.0),
        (
            f"{C10D} --rdzv-conf keep_alive_interval=2,keep_alive_max_attempt=2",
            "heartbeat_timeout",
            4.0,
        ),
        (
            f"{C10D} --rdzv-conf keep_alive_interval=2,heartbeat_timeout=1",
            "heartbeat_timeout",
            1.0,
        ),
        (f"{C10D} --rdzv-conf store_timeout=5", "store_timeout", 5.0),
        (f"{C10D} --on-join now", "on_join", "now"),
        (f"{C10D} --on-join Never", "on_join", "never"),
        (f"{C10D} --strict-symmetry", "strict_symmetry", True),
        (f"{C10D} --local-addr 127.0.0.5", "local_addr", "127.0.0.5"),
        (f"{C10D} --local-addr [::1]", "local_addr", "::1"),
        (f"{C10D} --local-addr localhost", "local_addr", "localhost"),
    ],
)
def test_what_a_flag_sets(job: Job, line: str, name: str, value: object) -> None:
    """Field by field."""
    assert getattr(meet(job, line), name) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{ETCD} --rdzv-conf heartbeat_timeout=1", "has heartbeat_timeout of 1 s, and etcd's"),
        (f"{ETCD} --rdzv-conf heartbeat=1.9", "leases last 2 s at least; give 2 or more"),
        (
            f"{ETCD} --rdzv-conf keep_alive_interval=1,keep_alive_max_attempt=1",
            "has keep_alive_interval times keep_alive_max_attempt of 1 s",
        ),
        (f"{C10D} --rdzv-conf join_timeout=x", "has a bad value for 'join_timeout'"),
        (f"{C10D} --on-join sometimes", "allowed: graceful, now, never"),
        (f"{C10D} --on-join gracefull", "did you mean 'graceful'?"),
        (f"{C10D} --rdzv-secret-file none", "--rdzv-secret-file: 'none' does not exist"),
        (f"{C10D} --rdzv-conf secret_file=none", "names a secret_file that does not exist"),
        (f"{C10D} --rdzv-secret-file open", "'open' has mode 0644"),
        (f"{C10D} --rdzv-secret-file a --rdzv-conf secret_file=b", "differ; give one"),
    ],
)
def test_what_is_wrong_is_said(job: Job, line: str, message: str) -> None:
    """Value, reason, fix."""
    job.write("open", "x").chmod(0o644)
    assert message in job.error(f"{line} train.py")


def test_the_secret(job: Job) -> None:
    """From the flag, its variable, the job file or --rdzv-conf; no text shows it."""
    job.write("secret", "s3cr3t\n").chmod(0o600)
    job.write("j.yaml", "entrypoint: train.py\nrdzv_secret_file: secret\n")
    found = meet(job, f"{C10D} --rdzv-secret-file secret")
    assert found.secret == b"s3cr3t" and "s3cr3t" not in repr(found)
    assert meet(job, C10D, ELAUNCH_RDZV_SECRET_FILE="secret").secret == b"s3cr3t"
    assert meet(job, f"{ETCD} --rdzv-conf secret_file=secret").secret == b"s3cr3t"
    both = f"{STATIC} --rdzv-secret-file secret --rdzv-conf secret_file=secret"
    assert meet(job, both).secret == b"s3cr3t"
    in_file = job.of([*C10D.split(), "-f", "j.yaml"], {}).rendezvous
    assert in_file is not None and in_file.secret == b"s3cr3t"


def test_a_job_file_of_several_nodes(job: Job) -> None:
    """Endpoints as a list, the configuration as a mapping."""
    job.write(
        "j.yaml",
        "entrypoint: train.py\nnodes: 2:4\nrdzv_backend: etcd\nrdzv_id: 7\n"
        "rdzv_endpoint: [h1:1, 'h2', '[::1]:3']\nrdzv_conf: {join_timeout: 60, settle: 1}\n"
        "on_join: never\nstrict_symmetry: yes\n",
    )
    found = job.settings("-f j.yaml")
    assert (found.min_nodes, found.max_nodes, found.run_id) == (2, 4, "7")
    assert found.rendezvous == RendezvousSettings(
        "etcd",
        (("h1", 1), ("h2", 2379), ("::1", 3)),
        is_host=False,
        join_timeout=60.0,
        connect_timeout=60.0,
        settle=1.0,
        on_join="never",
        strict_symmetry=True,
    )


Line = dict[str, str]


@pytest.mark.parametrize(
    ("line", "environ", "backend", "endpoint"),
    [
        ({"rdzv-endpoint": "h"}, {}, "c10d", "h:29400"),
        ({"rdzv-endpoint": "h:5"}, {}, "c10d", "h:5"),
        ({"rdzv-backend": "c10d", "rdzv-endpoint": "[::1]"}, {}, "c10d", "[::1]:29400"),
        ({"rdzv-backend": "etcd", "rdzv-endpoint": "a,b:1"}, {}, "etcd", "a:2379,b:1"),
        ({"rdzv-backend": "static", "rdzv-endpoint": "h:5"}, {}, "static", "h:5"),
        ({}, {"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ENDPOINT": "h"}, "etcd", "h:2379"),
        ({}, {"PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "6"}, "static", "h:6"),
        ({"rdzv-endpoint": "x"}, {"PET_MASTER_ADDR": "h"}, "c10d", "x:29400"),
        ({"rdzv-endpoint": "localhost"}, {"PET_MAX_RESTARTS": "x"}, "c10d", "localhost:29400"),
        ({"rdzv-endpoint": "h", "rdzv-conf": "is_host=1"}, {}, "c10d", "h:29400"),
    ],
)
def test_a_reader_finds_the_store(
    line: Line, environ: Line, backend: str, endpoint: str, tmp_path: Path
) -> None:
    """Without a script, and it never hosts."""
    found = resolve_place(line, environ, tmp_path)
    assert (found.backend, found.endpoint) == (backend, endpoint)
    assert (found.is_host, found.node_hint, found.local_addr) == (False, None, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "nothing says where the nodes meet; add"),
        ({"rdzv-backend": "etcd"}, "--rdzv-backend etcd: nothing says where"),
        ({"rdzv-backend": "etcd-v2", "rdzv-endpoint": "h"}, "API v2"),
        ({"rdzv-backend": "c10"}, "did you mean 'c10d'?"),
        ({"rdzv-endpoint": "h:x"}, "has the port 'x'"),
        ({"rdzv-endpoint": "h:0"}, "has port 0"),
        ({"rdzv-endpoint": "a,b"}, "names several endpoints"),
        ({"rdzv-endpoint": "h", "rdzv-conf": "user=a,password=s3cr3t"}, "of this machine can"),
        ({"rdzv-endpoint": "h", "rdzv-secret-file": "none"}, "does not exist"),
    ],
)
def test_what_a_reader_is_told(line: Line, message: str, tmp_path: Path) -> None:
    """As those who take part."""
    with pytest.raises(UsageError) as error:
        resolve_place(line, {}, tmp_path)
    assert message in str(error.value)
    assert "s3cr3t" not in str(error.value)


def test_a_reader_may_have_the_run_id_from_a_variable() -> None:
    """Or from the line, or not at all."""
    assert resolve_run_id({"rdzv-id": "7"}, {"PET_RDZV_ID": "8"}) == "7"
    assert resolve_run_id({}, {"PET_RDZV_ID": "8"}) == "8"
    assert resolve_run_id({}, {}) is None
