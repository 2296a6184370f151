"""Plans that a stranger writes into the store in which a job's agents meet.

Into an etcd without a password. In a store that an agent hosts only that agent writes plans.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elaunch.errors import JoinTimeoutError, StoreError
from tests import etcdserver
from tests.attacks.stranger import Stranger, stranger_in_etcd
from tests.etcdserver import Cluster
from tests.launching import Launcher, Running, wait_until

pytestmark = pytest.mark.slow

WAITS = """
import os, sys, time
print("resumes from", os.environ["ELAUNCH_RESUME_FROM"] or "nothing", flush=True)
until = time.monotonic() + 60
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.05)
"""


def meeting(where: int | Cluster) -> list[str]:
    """Return the flags of a job in the store that an agent hosts at a port, or in an etcd."""
    if isinstance(where, int):
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{where}", "--rdzv-id=job"]
    host, port = where.place().endpoints[0]
    return ["--rdzv-backend=etcd", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=job"]


def job(where: int | Cluster, *flags: str) -> list[str]:
    """Return the command of a job of one node so far, which a second one may join."""
    conf = ["--rdzv-conf=settle=0.2,join_timeout=30"]
    return ["run", "--nnodes=1:2", *meeting(where), *conf, "--start-method=spawn", *flags]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    """Run an etcd."""
    with etcdserver.etcd(tmp_path / "etcd") as server:
        yield server


@pytest.fixture
def other(etcd: Cluster) -> Iterator[Stranger]:
    """Return a stranger who writes into it."""
    with stranger_in_etcd(etcd, "job") as made:
        yield made


def test_a_plan_cannot_name_anybodys_directory(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path
) -> None:
    """A plan of a next round that resumes from a directory of the stranger's is refused.

    torchrun: whoever reaches its store replaces the pickled state of its rendezvous, which every
    agent unpickles.
    """
    script, evil, own = tmp_path / "waits.py", tmp_path / "evil", tmp_path / "own"
    script.write_text(WAITS)
    (evil / "step-9").mkdir(parents=True)
    running = elaunch.start(job(etcd, f"--checkpoint-dir={own}", str(script), str(tmp_path / "go")))
    running.wait_for_line("resumes from nothing", 60.0)
    version, plan = other.await_plan(phase="running", round=0)
    plan["checkpoint"] = {"path": str(evil / "step-9"), "step": 9, "format": "dcp"}
    other.post(version + 1, json.dumps(plan | {"round": 1}).encode())
    done = running.wait(60.0)
    assert done.returncode == 2
    assert f"would have the workers resume from '{evil}/step-9', and this node has" in done.stderr
    assert "--rdzv-secret-file" in done.stderr and "evil" not in done.stdout


def pair(
    elaunch: Launcher,
    where: int | Cluster,
    tmp_path: Path,
    *flags: str,
    conf: str = "",
    patience: int = 60,
) -> list[Running]:
    """Start both agents of a job on this machine; their workers wait for ``tmp_path/go``."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    options = ["run", "--nnodes=2", *meeting(where), f"--rdzv-conf=join_timeout={patience}{conf}"]
    argv = [*options, "--start-method=spawn", *flags, str(script), str(tmp_path / "go")]
    agents = [elaunch.start(argv) for _ in range(2)]
    for agent in agents:
        agent.wait_for_line("resumes from nothing", 90.0)
    return agents


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """Return the flag for a secret of the job's."""
    path = tmp_path / "secret"
    path.write_text("a secret of the job's\n")
    path.chmod(0o600)
    return f"--rdzv-secret-file={path}"


@pytest.mark.parametrize("ahead", [1, pytest.param(5, marks=pytest.mark.trial), 10**14, 10**15 - 1])
def test_a_replayed_record_does_not_keep_a_job(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path, secret: str, ahead: int
) -> None:
    """A plan that was signed once, written as a later version: it is refused, and the job ends.

    torchrun: whoever writes to its store replaces the state of the rendezvous, which hangs or ends.
    """
    agents = pair(elaunch, etcd, tmp_path, secret)
    version, _ = other.await_plan(phase="running")
    old = other.plan()[1]
    other.post(version + ahead, old)
    if ahead < 10:
        wait_until(partial(other.is_above, version + ahead), 30.0, "it is answered")
    (tmp_path / "go").touch()
    assert [agent.wait(60.0).returncode for agent in agents] == [0, 0]


def test_a_record_over_the_end_of_a_job_does_not_hide_it(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path, secret: str
) -> None:
    """Whatever is written above the newest plan is answered by that plan, above it.

    So an agent that had yet to read the plan does. torchrun: the state is what was written last.
    """
    agents = pair(elaunch, etcd, tmp_path, secret)
    version, plan = other.await_plan(phase="running")
    for value in (b"{}", b"", other.plan()[1]):
        other.post(version + 1, value)
        wait_until(partial(other.is_above, version + 1), 30.0, "it is answered")
        version, newest = other.await_plan(phase="running")
        assert newest == plan
    (tmp_path / "go").touch()
    assert [agent.wait(60.0).returncode for agent in agents] == [0, 0]


def test_a_newcomer_joins_although_somebody_has_written_to_the_board(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path, secret: str
) -> None:
    """What it cannot read it waits to see replaced. torchrun: it unpickles what is there."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    argv = job(etcd, secret, str(script), str(tmp_path / "go"))
    first = elaunch.start(argv)
    first.wait_for_line("resumes from nothing", 60.0)
    version, _ = other.await_plan(phase="running")
    other.post(version + 1, b"{}")
    second = elaunch.start(argv)
    other.await_plan(phase="running", round=1)
    (tmp_path / "go").touch()
    assert [agent.wait(60.0).returncode for agent in (first, second)] == [0, 0]


def test_another_secret_is_told(elaunch: Launcher, port: int, tmp_path: Path, secret: str) -> None:
    """An agent that can read no plan of the job ends and says why. torchrun: it has no secrets."""
    script, wrong = tmp_path / "waits.py", tmp_path / "wrong"
    script.write_text(WAITS)
    wrong.write_text("another\n")
    wrong.chmod(0o600)
    first = elaunch.start(job(port, secret, str(script), str(tmp_path / "go")))
    first.wait_for_line("resumes from nothing", 60.0)
    flag = f"--rdzv-secret-file={wrong}"
    second = elaunch.run(job(port, flag, str(script), str(tmp_path / "go")))
    assert second.returncode == 69
    assert "has another secret: give the same --rdzv-secret-file on all nodes" in second.stderr
    (tmp_path / "go").touch()
    assert first.wait(60.0).returncode == 0


def test_without_a_secret_nothing_hangs(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path
) -> None:
    """A plan of the stranger's is followed, here to the end; garbage is skipped.

    The coordinator may write its own above it before all have read it. Then an agent waits for the
    one that has ended, for as long as agents may take to come. torchrun: as with its own state.
    """
    agents = pair(elaunch, etcd, tmp_path, patience=5)
    version, plan = other.await_plan(phase="running")
    other.post(version + 1, b"\xff")
    wait_until(partial(other.is_above, version + 1), 30.0, "it is answered")
    version, _ = other.await_plan(phase="running")
    over = plan | {"phase": "over", "exit_code": 9, "reason": "a stranger says so"}
    other.post(version + 1, json.dumps(over).encode())
    codes = {agent.wait(60.0).returncode for agent in agents}
    others = {JoinTimeoutError.exit_code, StoreError.exit_code, 128 + signal.SIGTERM}
    assert 9 in codes and codes <= {9, *others}


def test_the_reason_of_a_plan(
    elaunch: Launcher, etcd: Cluster, other: Stranger, tmp_path: Path
) -> None:
    """It cannot move the terminal, or forge a line. torchrun: it has no reasons."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    running = elaunch.start(job(etcd, str(script), str(tmp_path / "go")))
    running.wait_for_line("resumes from nothing", 60.0)
    version, plan = other.await_plan(phase="running")
    reason = "over\nelaunch 00:00:00.000 all is well \x1b[2J\x9b\u202e"
    over = plan | {"phase": "over", "exit_code": 9, "reason": reason}
    other.post(version + 1, json.dumps(over).encode())
    done = running.wait(60.0)
    assert done.returncode == 9
    assert r"over\nelaunch 00:00:00.000 all is well \x1b[2J\x9b\u202e" in done.stderr
    assert not {"\x1b", "\x9b", "\u202e"} & set(done.stderr)
    page = elaunch.run(["status", "job"])
    assert not {"\x1b", "\x9b", "\u202e"} & set(page.stdout)
