"""A real Slurm of two nodes on this machine: one slurmctld, two slurmd, on loopback.

Nothing is installed for it but Debian's slurm-wlm, and nothing is read from /etc: SLURM_CONF leads
to a configuration of its own, without authentication. It needs root, as slurmd does. What runs on
the nodes finds their names in an /etc/hosts of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL, SIGTERM

from tests import programs
from tests.launching import Launcher, Running, free_port, wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scancel", "scontrol", "squeue")
NODES = ("n1", "n2")
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={ports[0]}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=300
SlurmdTimeout=300
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{last}] CPUs=4
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def needed() -> None:
    """End the test where there can be no Slurm here."""
    programs.needed(*PROGRAMS)
    programs.allowed("" if os.geteuid() == 0 else "slurmd needs root")


class Slurm:
    """Two nodes, n1 and n2, of four CPUs each; ``env`` is what Slurm's commands need."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self._launcher = launcher
        self._directory = directory
        self._daemons: list[Running] = []
        self.env = {"SLURM_CONF": str(directory / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        self._directory.mkdir()
        ports = [_free_ports(1), _free_ports(2)]
        host = socket.gethostname().partition(".")[0]
        text = SETTINGS.format(host=host, directory=self._directory, ports=ports, last=ports[1] + 1)
        Path(self.env["SLURM_CONF"]).write_text(text)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self._directory / name).mkdir()
        hosts = self._directory / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
        mounts = f'mount --bind {hosts} /etc/hosts && exec slurmd -D -N "$0"'
        inside = ["unshare", "--mount", "sh", "-c", mounts]
        for words in (["slurmctld", "-D"], *([*inside, node] for node in NODES)):
            self._daemons.append(self._launcher.start_command(words, env=self.env))
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 60.0, "idle nodes")

    def ask(self, *words: str) -> str:
        """Return what a command of Slurm says; empty where it fails."""
        environ = self._launcher.env | self.env
        done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=60)
        return done.stdout.strip()

    def srun(self, *words: str | Path, env: dict[str, str] | None = None) -> Running:
        """Start ``srun WORDS``."""
        return self._launcher.start_command(["srun", *words], env=self.env | (env or {}))

    def close(self) -> None:
        """End the daemons; jobs have ended before.

        On a busy machine slurmd may wait for the process of a step that hangs in its own end. Both
        are killed then: what is tested is over.
        """
        for daemon in self._daemons:
            daemon.send_signal(SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.process.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.end()
        for pid, line in self._launcher.leftovers().items():
            if line.startswith("slurmstepd"):
                os.kill(pid, SIGKILL)


def _free_ports(count: int) -> int:
    """Return the first of some ports in a row that nobody listens on."""
    for _ in range(100):
        with ExitStack() as stack:
            first = _bound(stack, free_port())
            try:
                for more in range(1, count):
                    _bound(stack, first + more)
            except OSError:
                continue
            return first
    raise AssertionError("no free ports in a row")


def _bound(stack: ExitStack, port: int) -> int:
    sock = stack.enter_context(socket.socket())
    sock.bind(("127.0.0.1", port))
    number: int = sock.getsockname()[1]
    return number
