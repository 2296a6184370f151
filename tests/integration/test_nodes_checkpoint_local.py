"""Nodes whose checkpoint directories are their own: what one has, all resume from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.formats import own
from elaunch.errors import CheckpointError
from tests.checkpoint import makers
from tests.integration.nodes import DEADLINE, Build, Job, over, said, wait_until_said
from tests.launching import Running, wait_until

pytestmark = pytest.mark.slow

RESUMED = Path(__file__).with_name("jobs") / "resumed.py"
LOCALSAVE = RESUMED.with_name("localsave.py")
TRAIN = RESUMED.with_name("checkpoint_train.py")
LINE = r"^resumed rank=(\d+) round=(\d+) step=(\d*) from=(\S+) tree=(\w+)$"


class Disks:
    """The checkpoint directories of a job's nodes, each at a path of its own."""

    def __init__(self, job: Job, count: int) -> None:
        self.job = job
        self.roots = [job.machines[number].state / f"ck{number}" for number in range(1, count + 1)]
        for root in self.roots:
            root.mkdir(parents=True)

    def start(self, *flags: str, words: tuple[str, ...] = ()) -> list[Running]:
        """Start the agents of all nodes."""
        numbers = range(1, 1 + len(self.roots))
        return [self.start_one(number, *flags, words=words) for number in numbers]

    def start_one(self, number: int, *flags: str, words: tuple[str, ...] = ()) -> Running:
        """Start the agent of one node."""
        given = [f"--checkpoint-dir={self.roots[number - 1]}", "--checkpoint-local", *flags]
        return self.job.start(number, given, words, script=RESUMED)


def resumed(agents: list[Running]) -> list[tuple[str, str, Path]]:
    """Wait for the end of all; return step, content and path that each has resumed from."""
    codes = [agent.wait(DEADLINE).returncode for agent in agents]
    assert codes == [0] * len(agents)
    found = [re.findall(LINE, agent.output(), re.M)[-1] for agent in agents]
    return [(step, tree, Path(path)) for _, _, step, path, tree in found]


def assert_alike(found: list[tuple[str, str, Path]], disks: Disks, name: str, step: int) -> None:
    """All resume from that step, of one content, each in its own directory."""
    assert [path for *_, path in found] == [root / name for root in disks.roots]
    assert {(step, tree) for step, tree, _ in found} == {(str(step), found[0][1])}


@over("c10d", "etcd")
def test_the_newest_of_all_disks_is_resumed_from(cluster: Build, backend: str) -> None:
    """40 and 50 on two nodes, nothing on a third; what is newer is foreign, or damaged."""
    job = Job(cluster, backend, 3)
    disks = Disks(job, 3)
    makers.own(disks.roots[0], 40, run_id="job")
    good = makers.own(disks.roots[1], 50, run_id="job")
    makers.own(disks.roots[0], 70, run_id="another")
    flipped = makers.own(disks.roots[0], 60, run_id="job") / "model.pt"
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])
    agents = disks.start("--nnodes=3")
    found = resumed(agents)
    assert_alike(found, disks, good.name, 50)
    told = "\n".join(line for agent in agents for line in said(agent))
    assert "belongs to run another" in told
    assert "no node has all of it: model.pt (on node1)" in told


def test_shards_of_two_nodes_are_put_together(cluster: Build) -> None:
    """Each has its rank's file, one of them with a bit flipped that a third has whole."""
    job = Job(cluster, "c10d", 3)
    disks = Disks(job, 3)
    whole = makers.own(disks.roots[0], 50, run_id="job")
    for root in disks.roots[1:]:
        shutil.copytree(whole, root / whole.name)
    (disks.roots[1] / whole.name / "model.pt").unlink()
    (disks.roots[2] / whole.name / "model.pt").unlink()
    (whole / "rank1" / "rng.bin").write_bytes(b"\x00" * 100)
    (disks.roots[2] / whole.name / "rank1" / "rng.bin").unlink()
    assert_alike(resumed(disks.start("--nnodes=3")), disks, whole.name, 50)
    for root in disks.roots:
        assert (root / whole.name / "rank1" / "rng.bin").read_bytes() == b"\x01" * 100


@pytest.mark.trial
def test_files_of_scripts_without_elaunch(cluster: Build) -> None:
    """One file per step, by torch.save; the newer one of the other node is torn."""
    import torch

    job = Job(cluster, "c10d", 2)
    disks = Disks(job, 2)
    for root, step in zip(disks.roots, (40, 50), strict=True):
        torch.save({"step": step, "w": torch.full((1000,), float(step))}, root / f"step_{step}.pt")
    torn = disks.roots[0] / "step_60.pt"
    torch.save({"w": torch.zeros(1000)}, torn)
    os.truncate(torn, 3000)
    found = resumed(disks.start("--nnodes=2", "--checkpoint-glob=step_*.pt"))
    assert_alike(found, disks, "step_50.pt", 50)


def test_a_trainers_ranks_have_left_their_random_states_on_their_own_nodes(cluster: Build) -> None:
    """By ``save_on_each_node``; no node has all of them, and none is taken for torn."""
    job = Job(cluster, "c10d", 2)
    disks = Disks(job, 2)
    for rank, root in enumerate(disks.roots):
        path = makers.trainer(root, 20)
        makers.training_arguments(path, 2)
        makers.saved(path / f"rng_state_{rank}.pth")
    found = resumed(disks.start("--nnodes=2"))
    assert [(step, path) for step, _, path in found] == [
        ("20", root / path.name) for root in disks.roots
    ]


def test_a_newcomer_gets_what_the_others_have(cluster: Build) -> None:
    """The job grows: the round that follows resumes on the new node, too, from the same."""
    job = Job(cluster, "c10d", 2)
    disks = Disks(job, 2)
    good = makers.own(disks.roots[0], 50, run_id="job")
    job.conf["settle"] = 0.1
    flags = [f"--checkpoint-dir={disks.roots[0]}", "--checkpoint-local", "--nnodes=1:2"]
    stop = str(job.share / "stop")
    first = job.start(1, flags, [stop], script=RESUMED)
    first.wait_for_line(LINE, DEADLINE)
    flags[0] = f"--checkpoint-dir={disks.roots[1]}"
    second = job.start(2, flags, [stop], script=RESUMED)
    second.wait_for_line(LINE, DEADLINE)
    job.stop()
    found = resumed([first, second])
    assert_alike(found, disks, good.name, 50)
    assert re.findall(LINE, second.output(), re.M)[0][1] == "1"


def large(root: Path, step: int, size: int) -> Path:
    """Write a committed checkpoint of one sparse file."""
    path = makers.own(root, step, run_id="job", ranks={0: {"model.pt": b""}})
    with open(path / "model.pt", "wb") as file:
        file.truncate(size)
    total = hashlib.sha256()
    for _ in range(size >> 20):
        total.update(bytes(1 << 20))
    files = [{"path": "model.pt", "size": size, "checksum": f"sha256:{total.hexdigest()}"}]
    manifest = {"schema": 1, "rank": 0, "host": "here", "files": files}
    makers.write_json(path / layout.manifest_name(0), manifest)
    makers.commit(path)
    return path


def peak(agent: Running) -> int:
    """Return the most memory that an agent had, in bytes."""
    status = Path(f"/proc/{agent.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.trial
@pytest.mark.executed
def test_a_large_file_goes_in_chunks(cluster: Build) -> None:
    """Neither agent's memory grows with it; the same was seen with 1 GiB."""
    job = Job(cluster, "etcd", 2)  # an agent that hosts a TCPStore has torch in its memory
    disks = Disks(job, 2)
    good = large(disks.roots[0], 50, 1 << 28)
    agents = disks.start("--nnodes=2", words=(str(job.share / "stop"),))
    for agent in agents:
        agent.wait_for_line(LINE, DEADLINE)
    assert max(map(peak, agents)) < 150 << 20
    job.stop()
    assert_alike(resumed(agents), disks, good.name, 50)


@pytest.mark.trial
@pytest.mark.parametrize("other_has_it", [True, False])
def test_a_sender_that_dies_in_the_middle(cluster: Build, other_has_it: bool) -> None:
    """Power off while it sends: another that has it goes on, or the next older one is taken."""
    job = Job(cluster, "etcd", 3)
    job.conf["settle"] = 5
    disks = Disks(job, 3)
    for root in disks.roots:
        makers.own(root, 40, run_id="job")
    newest = large(disks.roots[2], 50, 1 << 27)
    if other_has_it:
        shutil.copytree(newest, disks.roots[1] / newest.name)
    agents = disks.start("--nnodes=2:3")
    job.machines.delay(job.machines[3], 0.02)
    fetched = disks.roots[0] / layout.STAGE

    def begun() -> bool:
        return any(path.stat().st_size > 1 << 20 for path in fetched.glob("gather.*/*"))

    wait_until(begun, DEADLINE, "bytes on node 1")
    job.machines.power_off(job.machines[3])
    found = resumed(agents[:2])
    disks.roots.pop()
    step = 50 if other_has_it else 40
    assert_alike(found, disks, layout.step_name(step, 0), step)


def test_nodes_that_do_not_reach_each_other_are_waited_for(cluster: Build) -> None:
    """One fetches from another once the two are linked again; the coordinator reaches both.

    Nobody goes on from the older step that all have, and the job does not end.
    """
    job = Job(cluster, "etcd", 3)
    disks = Disks(job, 3)
    for root in disks.roots:
        makers.own(root, 40, run_id="job")
    newest = makers.own(disks.roots[1], 50, run_id="job")
    shutil.copytree(newest, disks.roots[0] / newest.name)
    part = disks.roots[0] / newest.name / "model.pt"
    part.write_bytes(b"X" + part.read_bytes()[1:])  # so only node 2 has it
    job.machines.partition([job.machines[2]], [job.machines[3]])
    assert job.etcd is not None
    names, agents = job.etcd.keys, [disks.start_one(1, "--nnodes=3")]
    wait_until(lambda: any("/lead/" in name for name in names()), DEADLINE, "node 1 leads")
    agents += [disks.start_one(number, "--nnodes=3") for number in (2, 3)]
    waits = r"waiting for its checkpoints, up to 600 s: .*cannot be had: .*cannot be reached"
    wait_until(
        lambda: any(re.search(waits, one.output("stderr")) for one in agents),
        DEADLINE,
        "a node that does not reach the other",
    )
    job.machines.heal()
    assert_alike(resumed(agents), disks, newest.name, 50)


def test_a_node_that_cannot_store_it_is_named(cluster: Build) -> None:
    """No worker starts from less than the others; the error says where and why."""
    job = Job(cluster, "c10d", 2)
    disks = Disks(job, 2)
    large(disks.roots[0], 50, 1 << 21)
    machine = job.machines[2].machine
    mount = ["nsenter", f"--target={machine.holder}", "--mount", "--", "mount", "-t", "tmpfs"]
    machine.do([*mount, "-o", "size=1m", "tmpfs", str(disks.roots[1])])
    agents = disks.start("--nnodes=2")
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [74, 74]
    for agent in agents:
        wait_until_said(agent, r"step 50 .*agent of node node2.*no space left on")
        assert "resumed" not in agent.output()


@pytest.mark.parametrize("way", ["async", pytest.param("path", marks=pytest.mark.trial)])
def test_what_elaunch_saved_on_each_node_is_brought_together(cluster: Build, way: str) -> None:
    """A rank fails right after a save: both nodes go on from that step, of the same content."""
    job = Job(cluster, "c10d", 2)
    flags = ["--checkpoint-local", "--nnodes=2", "--max-restarts=1"]
    roots = [job.machines[number].state / f"ck{number}" for number in (1, 2)]
    words = [job.share, way]
    agents = []
    for number, root in enumerate(roots, 1):
        place = f"--checkpoint-dir={root}"
        agents.append(job.start(number, [place, *flags], words, method=(), script=LOCALSAVE))
    for agent in agents:
        agent.wait_for_line(r"^saved 2 rank", DEADLINE)
    (job.share / "fail").touch()
    assert [agent.wait(DEADLINE).returncode for agent in agents] == [0, 0]
    pattern = r"^from rank=\d round=1 step=(\d+) tree=(\w+)$"
    one, other = (re.findall(pattern, agent.output(), re.M) for agent in agents)
    last = max(int(step) for step in re.findall(r"^saved (\d+)", agents[0].output(), re.M))
    assert one == other
    assert [int(step) for step, _ in one] == [last]
    for root in roots:
        assert not (root / layout.QUARANTINE).exists()


@pytest.mark.parametrize(
    ("backend", "victim"), [("c10d", 1), pytest.param("etcd", 0, marks=pytest.mark.trial)]
)
def test_a_neighbour_has_a_dead_nodes_part_on_its_own_disk(
    cluster: Build, backend: str, victim: int
) -> None:
    """Power off after the commit: the other goes on alone from that very step, equal to the bit."""
    job = Job(cluster, backend, 2)
    roots = [job.machines[number].state / f"ck{number}" for number in (1, 2)]
    hold = job.share / "hold"
    words = [job.share, "aside", "4", "2", "keep=0", f"hold={hold}"]
    flags = ["--checkpoint-local", "--checkpoint-replicas=1", "--nnodes=1:2"]
    agents = []
    for number, root in enumerate(roots, 1):
        places = [f"--checkpoint-dir={root}", *flags]
        agents.append(job.start(number, places, words, method=(), script=TRAIN))
    survivor, newest = agents[1 - victim], roots[1 - victim] / layout.step_name(4, 0)

    def whole() -> bool:
        try:
            own.verify(newest, "job")
        except (CheckpointError, OSError):
            return False
        return True

    wait_until(whole, DEADLINE, "both nodes' parts on one disk")
    job.machines.power_off(job.machines[victim + 1])
    told = job.share / "notes.0"
    wait_until(lambda: '"loaded"' in told.read_text(), DEADLINE, "the next round")
    hold.touch()
    assert survivor.wait(DEADLINE).returncode == 0
    notes = [json.loads(line) for line in told.read_text().splitlines()]
    saved = next(note for note in notes if (note["what"], note["step"]) == ("saved", 4))
    loaded = [note for note in notes if note["what"] == "loaded"]
    assert [(note["step"], note["world"], note["saved_by"]) for note in loaded] == [(4, 1, 2)]
    assert [loaded[0][key] for key in ("digest", "own")] == [saved["digest"], saved["own"]]
