"""Training that saves, and is killed while it does: start it, end it, see what came of it.

A job is ``jobs/checkpoint_train.py``, whose every step is a function of the one before. A run that
nobody disturbed says what each step looks like, bit by bit (``Trajectory``); what any other run has
loaded and trained is compared with that.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elaunch.checkpoint.storage.storage import Committed, open_storage
from tests.integration.jobs import FORK, checkpoint_fault
from tests.launching import Launcher, Running, free_port, wait_until

JOBS = Path(__file__).with_name("jobs")
TRAIN, ACT = JOBS / "checkpoint_train.py", JOBS / "checkpoint_act.py"
AGENT, SLOW = JOBS / "checkpoint_agent.py", JOBS / "checkpoint_slow.py"
PRELOAD = "torch,torch._dynamo,torch.distributed.checkpoint.state_dict"
"""All that the script imports and that takes long; a restart then costs nothing."""
ENV = {"OMP_NUM_THREADS": "1"}
DEADLINE = 120.0
"""Seconds for a job that takes a few."""


@dataclass(frozen=True)
class Trajectory:
    """Digests of an undisturbed run: after each step, what all have, and what each rank has."""

    shared: dict[int, str]
    own: dict[tuple[int, int], str]

    @classmethod
    def of(cls, notes: Mapping[int, Sequence[dict[str, Any]]]) -> Trajectory:
        """Return what the notes of a run say."""
        lines = [(rank, line) for rank in notes for line in notes[rank]]
        shared = {line["step"]: line["digest"] for _, line in lines}
        return cls(shared, {(line["step"], rank): line["own"] for rank, line in lines})

    def check(self, rank: int, line: Mapping[str, Any], own: bool = True) -> None:
        """See that a note agrees; ``own``: what is the rank's, too."""
        assert line["digest"] == self.shared[line["step"]], f"rank {rank}: {line}"
        if own:
            assert line["own"] == self.own[line["step"], rank], f"rank {rank}: {line}"


@dataclass
class Job:
    """One training, in a directory of its own: its agents, notes and checkpoints.

    Attributes:
        launcher: of the test.
        name: of its directory and its run id.
        mode: how it saves; "act": ``jobs/checkpoint_act.py``, without torch, does what the words
            say.
        nodes: how many agents, on this one host.
        nproc: ranks of each.
        fault: see ``checkpoint_fault``; none if empty.
        words: more for the script.
        flags: more for elaunch.
        spaces: paths of the namespaces that the agents are in.
        port: (several nodes) where they meet; found when it is needed.
        min_nodes: (several nodes) how few may go on; 0: all.
        host_last: (several nodes) node 0, which hosts the store, has the last ranks, not the first.
        rate: bytes a second that the storage takes from each agent; 0: it is not throttled.
    """

    launcher: Launcher
    name: str
    mode: str
    steps: int = 12
    every: int = 2
    nodes: int = 1
    nproc: int = 2
    fault: dict[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    flags: Sequence[str] = ()
    spaces: Sequence[str] = ()
    port: int = 0
    min_nodes: int = 0
    host_last: bool = False
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.home = self.launcher.directory / self.name
        self.directory, self.saves = self.home / "notes", self.home / "saves"
        for path in (self.directory, self.saves):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def struck(self) -> bool:
        """Whether the fault has happened."""
        return self._struck.exists()

    @property
    def _struck(self) -> Path:
        return self.home / "struck"

    def _meeting(self, node: int) -> list[str]:
        if self.nodes == 1:
            return []
        if self.port == 0:
            self.port = free_port("localhost")
        meeting = [f"--nnodes={self.min_nodes or self.nodes}:{self.nodes}", "--rdzv-backend=c10d"]
        conf = f"--rdzv-conf=is_host={int(node == 0)}"
        place = self.nodes - 1 - node if self.host_last else node
        where = f"--rdzv-endpoint=localhost:{self.port}"
        return [*meeting, where, conf, f"--node-rank={place}"]

    def start(self, node: int = 0, *more: str) -> Running:
        """Start an agent; ``more`` are words for the script."""
        fault = self.fault
        env = {**ENV, "XDG_STATE_HOME": str(self.home / f"state{node}")}
        if fault:
            said = {"directory": str(self.saves), "notes": str(self.directory), "nth": 1}
            said |= {"struck": str(self._struck), "after": False, **fault}
            env[checkpoint_fault.FAULT] = json.dumps(said)
        flags = [f"--rdzv-id={self.name}", f"--nproc-per-node={self.nproc}", "--max-restarts=3"]
        flags += [f"--checkpoint-dir={self.saves}", *self._meeting(node), *self.flags]
        if self.mode == "act":
            script: list[str | Path] = [ACT, self.directory]
            flags += FORK
        else:
            script = [TRAIN, self.directory, self.mode, str(self.steps), str(self.every)]
            flags.append(f"--preload={PRELOAD}")
        python: list[str | Path] = [sys.executable, AGENT, self.directory / f"agent.{node}"]
        if self.rate:
            python[1:2] = [SLOW, str(self.rate)]
        argv = [*python, "run", *flags, *script, *self.words, *more]
        return self.launcher.start_command(argv, env=env, spaces=self.spaces)

    def run(self, *more: str) -> Running:
        """Run the job of one agent to its end, which is a good one."""
        running = self.start(0, *more)
        done = running.wait(DEADLINE)
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return running

    def drive(self, expected: Collection[int], first: Sequence[Running] = ()) -> list[Running]:
        """Start agents again, while they end with one of ``expected``, until all end with 0.

        ``first``: those that run already. Returns all that ran.
        """
        agents = dict(enumerate(first)) or {node: self.start(node) for node in range(self.nodes)}
        every = list(agents.values())
        until, starts = time.monotonic() + DEADLINE, Counter[int]()
        while any(agent.process.poll() != 0 for agent in agents.values()):
            assert time.monotonic() < until, f"{self} hangs\n{told(every)}"
            for node, agent in agents.items():
                code = agent.process.poll()
                if code in (None, 0):
                    continue
                starts[node] += 1
                assert code in expected and starts[node] <= 3, f"{self}: {code}\n{told(every)}"
                agents[node] = self.start(node)
                every.append(agents[node])
            time.sleep(0.01)
        for agent in agents.values():
            agent.wait(DEADLINE)
        return every

    def notes(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each rank has noted so far."""
        found = {}
        for path in self.directory.glob("notes.*"):
            whole = path.read_text().split("\n")[:-1]
            found[int(path.name.split(".")[1])] = [json.loads(line) for line in whole]
        return found

    def noted(self, what: str) -> list[tuple[int, dict[str, Any]]]:
        """Return (rank, note) of a kind, in the order of their times."""
        notes = self.notes()
        found = [(r, line) for r in notes for line in notes[r] if line["what"] == what]
        return sorted(found, key=lambda item: float(item[1]["at"]))

    def wait_for(self, what: str, step: int, rank: int = 0) -> None:
        """Wait until a rank has noted that."""
        wait_until(
            lambda: any(r == rank and line["step"] >= step for r, line in self.noted(what)),
            DEADLINE,
            f"{what} {step} by rank {rank} of {self.name}",
        )

    def listed(self) -> list[Committed]:
        """Return the checkpoints, each of them whole."""
        storage = open_storage(self.saves)
        found = storage.listed()
        for one in found:
            storage.verify(one, self.name)
        return found

    def check_trained(self, trajectory: Trajectory) -> None:
        """See that all that was loaded and trained is what an undisturbed run has."""
        for rank, lines in self.notes().items():
            for line in lines:
                trajectory.check(rank, line)
            assert (lines[-1]["what"], lines[-1]["step"]) == ("done", self.steps), lines[-1]

    def check_nothing_lost(self, lag: int = 0) -> None:
        """See that each start went on from what had been saved before, less ``lag`` steps."""
        saved = [line for _, line in self.noted("saved")]
        for rank, lines in self.notes().items():
            for line in filter(begins, lines):
                step = line["step"] if line["what"] == "loaded" else 0
                newest = max((s["step"] for s in saved if s["at"] < line["at"]), default=0)
                assert step >= newest - lag, f"rank {rank} lost {newest - step} steps: {line}"

    def check_clean(self, keep: int = 2) -> None:
        """See that only whole checkpoints are left, the last one among them, and no rubbish."""
        found = self.listed()
        assert found[-1].step == self.steps and len(found) <= keep, found
        assert open_storage(self.saves).quarantined() == []
        for name in (".stage", ".trash"):
            assert list((self.saves / name).iterdir()) == [], name


def begins(line: Mapping[str, Any]) -> bool:
    """Whether a note is the first of a process."""
    return line["what"] == "loaded" or (line["what"], line["step"]) == ("trained", 1)


def told(agents: Sequence[Running]) -> str:
    """Return all that agents and their workers have said."""
    return "\n".join(
        f"=== {agent.process.poll()}\n{agent.output()}\n--- stderr\n{agent.output('stderr')}"
        for agent in agents
    )


def undisturbed(factory: pytest.TempPathFactory, world: int) -> Trajectory:
    """Return the trajectory of a job of ``world`` ranks; one process of the test run makes it."""
    shared = factory.getbasetemp().parent / f"trajectory-{world}"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "whole").exists():
            launcher = Launcher(shared, forks=True)
            Job(launcher, "job", "none", nproc=world).run()
            launcher.close()
            (shared / "whole").touch()
        return Trajectory.of(Job(Launcher(shared, forks=True), "job", "none", nproc=world).notes())
