"""``elaunch wrap`` under the real mpirun and the real srun, on one node and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from tests import programs, slurm
from tests.launching import Launcher, Running, wait_until
from tests.slurm import Slurm

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("jobs") / "wrapped.py"
WRAP = [sys.executable, "-m", "elaunch", "wrap"]
PYTHON = [sys.executable, SCRIPT]
REMOTE = """\
#!/bin/sh
# What mpirun calls in place of ssh: a "host" is a namespace with a host name of its own.
host=$1; shift
exec unshare --uts sh -c 'hostname "$0"; eval "$@"' "$host" "$*"
"""


def mpirun(elaunch: Launcher, *words: str | Path, env: dict[str, str] | None = None) -> Running:
    """Start mpirun, which has its session's files in the test's directory."""
    programs.needed("mpirun", "orted", "ssh")
    # The directory's name has to be short: mpirun makes sockets below it.
    flags = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader,tcp"]
    return elaunch.start_command(["mpirun", *flags, *words], env=env)


@pytest.fixture
def cluster_of_two(elaunch: Launcher, tmp_path: Path) -> Iterator[Slurm]:
    """Return a running Slurm with two nodes."""
    slurm.needed()
    made = Slurm(elaunch, tmp_path / "slurm")
    made.start()
    yield made
    made.close()


def rows(text: str) -> list[str]:
    """Return what the ranks said, without the prefix, which must be theirs."""
    found = re.findall(r"^\[default(\d+)\]:(rank=(\d+) .*)$", text, re.M)
    assert all(prefix == rank for prefix, _, rank in found), text
    return sorted(row for _, row, _ in found)


def expected(size: int, launcher: str, nodes: list[int]) -> list[str]:
    """Return what the ranks say, ``nodes`` ranks on each node."""
    places = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    return [
        f"rank={rank} local={local} sum={size * (size + 1) // 2} ranks={list(range(size))} "
        f"nodes={[node] * nodes[node]} launcher={launcher} node={node}/{len(nodes)}"
        for rank, (node, local) in enumerate(places)
    ]


def test_ranks_under_mpirun(elaunch: Launcher) -> None:
    """torch's process group and elaunch's collectives; a prefix on each line."""
    done = mpirun(elaunch, "-np", "2", *WRAP, "--", *PYTHON, "torch").wait(100)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == expected(2, "mpi", [2])


@pytest.mark.trial
def test_the_first_failure_is_mpiruns_code(elaunch: Launcher) -> None:
    """The wrapper's own code was 7."""
    done = mpirun(elaunch, "-np", "4", *WRAP, "--", *PYTHON, "exit=2:7").wait(100)
    assert done.returncode == 7
    assert re.search(r"^elaunch: rank 2 on .*: exited with code 7$", done.stderr, re.M)
    assert re.search(r"Exit code:\s+7", done.stderr)


@pytest.mark.trial
def test_elaunch_run_supervises_mpirun(elaunch: Launcher) -> None:
    """The ranks meet in the store of each round, and know the run that they are part of."""
    programs.needed("mpirun", "orted", "ssh")
    inner = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *WRAP, "--", *PYTHON]
    flags = ["--nproc-per-node=1", "--max-restarts=1", "--no-python"]
    done = elaunch.run(["run", *flags, *inner, "exit=1:5"])
    assert done.returncode == 5
    assert rows(done.stdout) == sorted(expected(2, "elaunch", [2]) * 2)


def test_sigterm_to_mpirun_reaches_the_scripts(elaunch: Launcher) -> None:
    """They save; nothing is left."""
    # mpirun waits for so long, whatever the ranks do meanwhile, and reads none of their output.
    patience = ["--mca", "odls_base_sigkill_timeout", "5", "-np", "2"]
    logs = elaunch.directory / "logs"
    running = mpirun(elaunch, *patience, *WRAP, f"--log-dir={logs}", "--", *PYTHON, "wait")
    wait_until(lambda: running.output().count(":up\n") == 2, 60)
    running.send_signal(SIGTERM)
    running.wait(100)
    files = list(logs.glob("mpi-*/attempt_0/*/stdout.log"))
    assert [file.read_text() for file in files] == ["up\nsaved\n"] * 2
    wait_until(lambda: not elaunch.leftovers(), what="nothing is left")


def test_mpirun_that_is_killed_leaves_nothing(elaunch: Launcher) -> None:
    """It tells nobody; the wrappers see it."""
    running = mpirun(elaunch, "-np", "2", *WRAP, "--", *PYTHON, "wait")
    wait_until(lambda: running.output().count(":up\n") == 2, 60)
    running.send_signal(SIGKILL)
    running.wait(60)
    wait_until(lambda: not elaunch.leftovers(), what="nothing is left")


@pytest.mark.parametrize("nodes", [[2, 1], pytest.param([2, 2], marks=pytest.mark.trial)])
def test_mpirun_on_two_nodes(elaunch: Launcher, tmp_path: Path, nodes: list[int]) -> None:
    """The node's rank is derived; where rank 0 is has to be said."""
    alone = subprocess.run(["unshare", "--uts", "true"], capture_output=True)
    no_right = "no right to give a process another host name"
    programs.allowed(no_right if alone.returncode else None)
    remote = tmp_path / "remote"
    remote.write_text(REMOTE)
    remote.chmod(0o700)
    hosts = ",".join(f"host{index}:{count}" for index, count in enumerate(nodes))
    words = ["--mca", "plm_rsh_agent", str(remote), "--host", hosts, "-np", str(sum(nodes)), *WRAP]
    done = mpirun(elaunch, *words, "--", *PYTHON).wait(100)
    assert done.returncode == 2 and "-x MASTER_ADDR=HOST" in done.stderr
    done = mpirun(elaunch, *words, "--master-addr=127.0.0.1", "--", *PYTHON).wait(100)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == expected(sum(nodes), "mpi", nodes)


@pytest.mark.trial
def test_three_ranks_on_two_nodes_of_slurm(elaunch: Launcher, cluster_of_two: Slurm) -> None:
    """Unequal nodes; exit codes; files by rank; a signal comes once."""
    env = {"MASTER_ADDR": "127.0.0.1"}  # n1 and n2 are names that only Slurm knows
    three = ["-N2", "-n3", "--distribution=block"]
    done = cluster_of_two.srun(*three, *WRAP, "--", *PYTHON, env=env).wait(100)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == expected(3, "slurm", [2, 1])

    logs = elaunch.directory / "logs"
    flags = [f"--log-dir={logs}", "--redirects=1", "--tee=2"]
    done = cluster_of_two.srun(*three, *WRAP, *flags, "--", *PYTHON, "exit=2:7", env=env).wait(100)
    assert done.returncode == 7
    files = sorted(logs.glob("slurm-*.0/attempt_0/*/stdout.log"))
    assert [file.read_text().split()[0] for file in files] == ["rank=0", "rank=1", "rank=2"]

    running = cluster_of_two.srun(*three, *WRAP, "--", *PYTHON, "wait", env=env)
    wait_until(lambda: running.output().count(":up\n") == 3, 60)
    cluster_of_two.ask("scancel", cluster_of_two.ask("squeue", "-h", "-o", "%A"))
    assert running.wait(100).stdout.count(":saved\n") == 3


@pytest.mark.trial
def test_slurm_on_one_node_needs_nothing(elaunch: Launcher, cluster_of_two: Slurm) -> None:
    """The port and the address come from the step itself, on one node."""
    done = cluster_of_two.srun("-N1", "-n2", *WRAP, "--", *PYTHON, "torch").wait(100)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == expected(2, "slurm", [2])
