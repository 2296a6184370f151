"""What a job runs under when something happens to it: each condition is a row of CONDITIONS.

A condition is prepared before the job starts, sets in when the job has saved for the first time,
and lifts some seconds after the event, where it lifts at all.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import psutil

from elaunch.checkpoint.storage.storage import open_storage
from tests import programs
from tests.cluster import Cluster
from tests.launching import NO_KILL, Launcher, Running, wait_until

WORKER = Path(__file__).with_name("worker.py")
HELD_UP = Path(__file__).parents[1] / "integration" / "jobs" / "slowagent.py"
PORT: Final = 29400
"""Of the agents' store, on the first of several nodes."""


@dataclass
class Job:
    """A job of two ranks: two workers of one agent, or one of each of two agents.

    Attributes:
        directory: its notes and all else of it, shared by the nodes.
        nodes: how many agents.
        launcher: starts the one agent on this machine.
        cluster: has the machines of several.
        prefix: words before ``python -m elaunch``, or in the place of ``-m elaunch``.
        env: variables of the agents.
        flags: of ``elaunch run``.
        words: of the worker.
        saves: the checkpoint directory.
    """

    directory: Path
    nodes: int
    launcher: Launcher | None = None
    cluster: Cluster | None = None
    prefix: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=lambda: ["-m", "elaunch"])
    env: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    saves: Path = Path()
    agents: list[Running] = field(default_factory=list)
    ends: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.notes = self.directory / "notes"
        self.notes.mkdir(parents=True)
        if self.saves == Path():
            self.saves = self.directory / "saves"

    def start(self) -> None:
        """Start the agents, and wait until a save of each rank has returned."""
        self.launch()
        wait_until(lambda: self.acked() >= 2 or self.ended(), what="both ranks have saved")
        assert not self.ended(), [agent.output("stderr") for agent in self.agents]

    def launch(self) -> None:
        """Start the agents."""
        flags = [f"--checkpoint-dir={self.saves}", "--shutdown-timeout=20", "--sibling-grace=2"]
        line = ["run", "--rdzv-id=job", "--preload=torch", *flags, *self.flags]
        script = [str(WORKER), str(self.notes), *self.words]
        words = [*self.prefix, sys.executable, *self.program, *line]
        if self.nodes == 1:
            self.launcher = Launcher(self.directory, forks=True)
            self.ends.callback(self.launcher.close)
            argv = [*words, "--nproc-per-node=2", *script]
            self.agents = [self.launcher.start_command(argv, env=self.env)]
        else:
            meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=node1:{PORT}"]
            self.cluster = Cluster(self.directory, self.nodes)
            self.ends.callback(self.cluster.close)
            argv = [*words, *meeting, "--rdzv-conf=settle=20", "--nproc-per-node=1", *script]
            state = self.env.pop("XDG_STATE_HOME", "")
            for node in self.cluster.nodes:
                own = {"XDG_STATE_HOME": f"{state}/{node.name}"} if state else {}
                self.agents.append(node.popen(argv, self.env | own))

    def ended(self) -> bool:
        """Whether an agent has ended."""
        return any(agent.process.poll() is not None for agent in self.agents)

    def read(self, name: str) -> int:
        """Return a note's number; -1 where there is none yet."""
        with suppress(FileNotFoundError):
            return int((self.notes / name).read_text())
        return -1

    def acked(self) -> int:
        """Return the newest step that all ranks' saves have been acknowledged for."""
        return min(self.read(f"acked.{rank}") for rank in (0, 1))

    def processes(self, agent: int) -> list[int]:
        """Return an agent's pid and those of all below it."""
        first = psutil.Process(self.agents[agent].pid)
        return [first.pid, *(one.pid for one in first.children(recursive=True))]


@dataclass
class Nothing:
    """No condition: the undisturbed job, with which the others are compared.

    Attributes:
        nodes: how many agents it takes; an event may take more.
        holds: seconds from the event until it lifts.
        loses_peer: the second agent is taken for lost, and ends as such.
    """

    loses_peer: ClassVar[bool] = False
    nodes: int = 1
    holds: float = 0.0

    def prepare(self, job: Job) -> None:
        """Set up what the job needs before it starts."""

    def set_in(self, job: Job) -> None:
        """Begin."""

    def lift(self, job: Job) -> None:
        """End."""


@dataclass
class AForeignChild(Nothing):
    """A worker has a child of another user, which the agent and the server may not signal."""

    def prepare(self, job: Job) -> None:
        """Root without CAP_KILL may signal its own processes, and no others, as any user."""
        programs.needed("setpriv")
        job.prefix = [*NO_KILL]
        job.words.append("foreign")
        job.flags.append("--shutdown-timeout=8")  # nothing ends that child any earlier

    def set_in(self, job: Job) -> None:
        """See Nothing."""
        job.ends.callback(self._end, job)

    def _end(self, job: Job) -> None:
        # It outlives the job: nobody there has the right to end it.
        for path in job.notes.glob("foreign.*"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


@dataclass
class NoThreads(Nothing):
    """Neither a thread nor a process can be started by anything of the job."""

    holds: float = 3.0

    def prepare(self, job: Job) -> None:
        """Make a cgroup (v1) for the job."""
        self._group = Path(f"/sys/fs/cgroup/pids/seam-{os.getpid()}")
        self._group.mkdir()
        job.ends.callback(self._remove)

    def set_in(self, job: Job) -> None:
        """Allow what runs, and no more."""
        for number in range(len(job.agents)):
            for pid in job.processes(number):
                with suppress(OSError):  # it has ended meanwhile
                    (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "pids.max").write_text((self._group / "pids.current").read_text())

    def lift(self, job: Job) -> None:
        """See Nothing."""
        (self._group / "pids.max").write_text("max")

    def _remove(self) -> None:
        wait_until(lambda: not (self._group / "cgroup.procs").read_text(), 60.0)
        self._group.rmdir()


@dataclass
class AHungDisk(Nothing):
    """The file system of the logs, or of the state directory, takes nothing for a while."""

    what: str = "logs"
    holds: float = 5.0

    def prepare(self, job: Job) -> None:
        """Make a file system of its own; a process sees to it that it goes with the test."""
        programs.needed("mkfs.ext4", "mount", "umount", "fsfreeze")
        self._place = job.directory / "disk"
        image = job.directory / "disk.img"
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
        mounted(job, ["-o", "loop", str(image)], self._place)
        if self.what == "logs":
            job.flags.append(f"--log-dir={self._place / 'logs'}")
        else:
            job.env["XDG_STATE_HOME"] = str(self._place / "state")

    def set_in(self, job: Job) -> None:
        """See Nothing."""
        subprocess.run(["fsfreeze", "--freeze", self._place], check=True, timeout=60)

    def lift(self, job: Job) -> None:
        """See Nothing."""
        subprocess.run(["fsfreeze", "--unfreeze", self._place], check=False, timeout=60)


@dataclass
class AFullDisk(Nothing):
    """Neither a checkpoint nor anything of the run's record can be written any more."""

    def prepare(self, job: Job) -> None:
        """Make a small file system for all of it."""
        self._place = job.directory / "disk"
        mounted(job, ["-t", "tmpfs", "-o", "size=8m", "tmpfs"], self._place)
        job.saves = self._place / "saves"
        job.words.append("few")
        job.env["XDG_STATE_HOME"] = str(self._place / "state")

    def set_in(self, job: Job) -> None:
        """Fill it, once what was acknowledged is on it."""
        wait_until(lambda: open_storage(job.saves).listed(), what="step 2 is committed")
        with suppress(OSError), (self._place / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


@dataclass
class AFlood(Nothing):
    """A worker sends its agent as many reports as that can read."""

    def prepare(self, job: Job) -> None:
        """See Nothing."""
        job.words.append("flood")

    def set_in(self, job: Job) -> None:
        """See Nothing."""
        (job.notes / "begin").touch()


@dataclass
class AHeldSave(Nothing):
    """A save that has returned is in the agent's memory alone: the storage takes nothing."""

    holds: float = 2.0

    def prepare(self, job: Job) -> None:
        """See Nothing."""
        job.program = [str(HELD_UP), str(job.directory), "write=2"]
        job.words.append("few")
        if job.nodes > 1:
            job.flags.append("--checkpoint-replicas=1")
            job.env["LOGLEVEL"] = "DEBUG"

    def set_in(self, job: Job) -> None:
        """See Nothing."""
        wait_until((job.directory / "reached").exists)
        if job.nodes > 1:
            job.agents[0].wait_for_line("memory has a copy of rank 1's shard", stream="stderr")

    def lift(self, job: Job) -> None:
        """See Nothing."""
        (job.directory / "go").touch()


@dataclass
class AFrozenPeer(Nothing):
    """The other node stands still: none of its processes runs, and its network is up."""

    loses_peer: ClassVar[bool] = True

    nodes: int = 2
    holds: float = 6.0

    def set_in(self, job: Job) -> None:
        """See Nothing."""
        self._stopped = job.processes(1)
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def lift(self, job: Job) -> None:
        """See Nothing."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@dataclass
class CutPorts(Nothing):
    """The ports at which agents talk to each other are cut; the store and the ranks are not."""

    nodes: int = 2
    holds: float = 6.0

    def prepare(self, job: Job) -> None:
        """See Nothing."""
        programs.needed("nft")

    def set_in(self, job: Job) -> None:
        """Drop what comes to those ports, and what is sent from them."""
        assert job.cluster is not None
        for node, agent in zip(job.cluster.nodes, job.agents, strict=True):
            ports = ",".join(str(port) for port in listened(agent.pid) - {PORT})
            lines = ["table inet cut {"]
            for hook, end in (("input", "dport"), ("output", "sport")):
                lines.append(f"chain {hook} {{ type filter hook {hook} priority 0;")
                lines.append(f"tcp {end} {{ {ports} }} drop")
                lines.append("}")
            table = "\n".join([*lines, "}", ""])
            node.machine.do(["nft", "-f", "-"], table)

    def lift(self, job: Job) -> None:
        """See Nothing."""
        assert job.cluster is not None
        for node in job.cluster.nodes:
            node.machine.do(["nft", "-f", "-"], "table inet cut\ndelete table inet cut\n")


def listened(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens, in its own network."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed again
            mine.add(os.readlink(descriptor))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in mine
    }


def mounted(job: Job, options: list[str], place: Path) -> None:
    """Mount a file system until the end of the test, also where the test process is killed."""
    place.mkdir()
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, timeout=60)
    assert done.returncode == 0, os.strerror(errno.EPERM) + done.stderr.decode()
    end = f"read line; fsfreeze --unfreeze {place} 2>/dev/null; umount --lazy {place}"
    guard = subprocess.Popen(["sh", "-c", end], stdin=subprocess.PIPE, start_new_session=True)
    job.ends.callback(guard.wait, 60.0)
    job.ends.callback(guard.stdin.close)  # type: ignore[union-attr]


CONDITIONS: Final[dict[str, Callable[[], Nothing]]] = {
    "nothing": Nothing,
    "foreign": AForeignChild,
    "threads": NoThreads,
    "logs": AHungDisk,
    "state": lambda: AHungDisk(what="state"),
    "full": AFullDisk,
    "flood": AFlood,
    "held": AHeldSave,
    "frozen": AFrozenPeer,
    "ports": CutPorts,
}
