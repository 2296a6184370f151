"""Jobs of srun, whose agents share a key by MUNGE, and strangers who write into their store."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pytest

from elaunch.errors import StoreDenied
from tests import slurm
from tests.attacks.stranger import stranger
from tests.launching import Launcher, Running
from tests.munged import Munged
from tests.slurm import Slurm

pytestmark = pytest.mark.slow

OPEN = "is open"
WAITS = """
import os, sys, time
print(f"round {os.environ['ELAUNCH_ROUND']} key={os.environ.get('ELAUNCH_CHANNEL_KEY', '')}")
sys.stdout.flush()
until = time.monotonic() + 120
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.05)
"""


@pytest.fixture
def daemon() -> Iterator[Munged]:
    """Run the munged of the agents' nodes."""
    made = Munged()
    yield made
    made.close()


class Job:
    """A job of srun's on this machine; ``end`` has its workers end."""

    def __init__(self, elaunch: Launcher, port: int, directory: Path) -> None:
        self._elaunch = elaunch
        self._script = directory / "waits.py"
        self._script.write_text(WAITS)
        self._go = directory / "go"
        self.meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]

    def start(self, env: dict[str, str], nodes: str = "2") -> Running:
        """Start one more agent."""
        return self._elaunch.start(self.words(nodes), env=env)

    def words(self, nodes: str = "2") -> list[str]:
        """Return the words after ``elaunch``."""
        conf = "--rdzv-conf=settle=0.2,join_timeout=60,store_timeout=60"
        argv = ["run", f"--nnodes={nodes}", *self.meeting, conf, "--start-method=spawn"]
        return [*argv, str(self._script), str(self._go)]

    def end(self, *agents: Running) -> list[int]:
        """Let the workers end, and return the exit codes of agents."""
        self._go.touch()
        return [agent.wait(90.0).returncode for agent in agents]


@pytest.fixture
def job(elaunch: Launcher, port: int, tmp_path: Path) -> Job:
    """Return a job that nobody has started."""
    return Job(elaunch, port, tmp_path)


def key_of(agent: Running, round_number: int = 0) -> str:
    """Wait for a round; return the key of its workers."""
    return agent.wait_for_line(f"^round {round_number} key=(.*)$", 90.0)[1]


@pytest.mark.trial
def test_agents_of_srun_share_a_key(elaunch: Launcher, job: Job, port: int, daemon: Munged) -> None:
    """Records are signed, and workers know each other.

    torchrun: whoever reaches its store replaces the pickled state of its rendezvous.
    """
    agents = [job.start(daemon.srun) for _ in range(2)]
    keys = {key_of(agent) for agent in agents}
    assert len(keys) == 1 and keys != {""}
    with stranger(port, "job") as other:
        assert other.store.shared().startswith(b"MUNGE:")
        with pytest.raises(StoreDenied, match="have a secret"):
            other.plan()
    status = ["status", *job.meeting]
    seen = elaunch.run(status, env={"PATH": daemon.path})
    assert (seen.returncode, seen.stderr) == (0, "") and "RUNNING" in seen.stdout
    unseen = elaunch.run(status)
    assert unseen.returncode == 69 and "cannot be read: unmunge: Error" in unseen.stderr
    assert job.end(*agents) == [0, 0]
    assert not any(OPEN in agent.output("stderr") for agent in agents)


def test_what_srun_starts_is_known_by_its_variables(
    elaunch: Launcher, job: Job, port: int, daemon: Munged, tmp_path: Path
) -> None:
    """Those of a real srun, on two nodes."""
    slurm.needed()
    cluster = Slurm(elaunch, tmp_path / "slurm")
    cluster.start()
    words = [sys.executable, "-m", "elaunch", *job.words()]
    step = cluster.srun("-N2", "-n2", *words, env={"PATH": daemon.path})
    with stranger(port, "job") as other:
        assert other.store.shared().startswith(b"MUNGE:")
        with pytest.raises(StoreDenied, match="have a secret"):
            other.plan()
    assert job.end(step) == [0]
    assert len(set(re.findall("^.*key=(.+)$", step.output(), re.M))) == 1
    assert OPEN not in step.output("stderr")
    cluster.close()


def test_a_host_that_is_started_anew_and_the_agent_that_stayed_share_a_key(
    job: Job, daemon: Munged
) -> None:
    """A new one, made by the new host."""
    host = job.start(daemon.srun)
    host.wait_for_line("waiting", 60.0, "stderr")
    stays = job.start(daemon.srun)
    before = key_of(host)
    host.send_signal(SIGKILL)
    host.wait()
    again = job.start(daemon.srun)
    after = {key_of(agent, 1) for agent in (again, stays)}
    assert len(after) == 1 and not after & {before, ""}
    assert job.end(again, stays) == [0, 0]


@pytest.mark.parametrize("lacking", ["host", "client"])
def test_nodes_that_differ_in_munge_end_with_the_reason(
    job: Job, daemon: Munged, lacking: str
) -> None:
    """The one that comes second does; the first one's line says how its store is."""
    without = daemon.srun | {"PATH": str(daemon.key.parent)}
    envs = [daemon.srun, daemon.srun]
    envs[lacking == "client"] = without
    first = job.start(envs[0], "1:2")
    key_of(first)
    second = job.start(envs[1], "1:2").wait(90.0)
    assert second.returncode == 69 and "--rdzv-secret-file FILE, the same on all" in second.stderr
    said = "shares no key by MUNGE" if lacking == "host" else "unmunge is not on the PATH"
    assert said in second.stderr
    assert (OPEN in first.output("stderr")) == (lacking == "host")
    assert job.end(first) == [0]
