"""What may go wrong with checkpoints, one by one: damage, full disks, neighbours, late writers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT

import pytest

from elaunch.checkpoint.storage.storage import open_storage
from tests import programs
from tests.integration import checkpointing
from tests.integration.checkpointing import DEADLINE, JOBS, Job, Trajectory
from tests.integration.jobs import checkpoint_fault
from tests.integration.watching import agent_lines
from tests.launching import Launcher, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = 2_000_000
"""Bytes of the training's checkpoints with WIDE."""
WIDE = "wide=400"
SmallDisk = Callable[[Job, int], Path]


@pytest.fixture(scope="module")
def trajectory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Trajectory]:
    """Return how a training of so many ranks goes if it is left alone."""
    return lambda world: checkpointing.undisturbed(tmp_path_factory, world)


def act(elaunch: Launcher, *words: str, name: str = "job", nproc: int = 2) -> Job:
    """Return a job of workers without torch that do what the words say."""
    return Job(elaunch, name, "act", nproc=nproc, words=words)


def lines(running: Running) -> set[str]:
    """Return what the workers have said, without who it was."""
    return set(re.findall(r"^(.*) rank=\d+ round=\d+ pid=\d+$", running.output(), re.M))


def tree(directory: Path) -> dict[str, int]:
    """Return every path below a directory, and its change."""
    return {str(path): path.lstat().st_mtime_ns for path in directory.rglob("*")}


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


def flip(path: Path) -> None:
    """Change one bit in the middle; size and times stay."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def truncate(path: Path) -> None:
    """Take away the second half."""
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: Sequence[tuple[int, str, Callable[[Path], None]]] = (
    (10, "part-1.bin", flip),
    (8, "part-0.bin", truncate),
    (6, "part-1.bin", Path.unlink),
    (4, "manifest.rank-00001.json", Path.unlink),
)


def test_damaged_ones_are_put_aside_and_the_older_one_is_taken(elaunch: Launcher) -> None:
    """Each with its reason; nothing of them is lost, and they are looked at only once."""
    act(elaunch, *(f"save={step}" for step in (2, 4, 6, 8, 10))).run()
    job = act(elaunch, "load", "save=3")
    for step, name, damage in DAMAGE:
        damage(job.saves / f"step-{step:08d}.r0" / name)
    running = job.run()
    assert "loaded 2 of 0, saved by 2" in lines(running)
    put_aside = dict(open_storage(job.saves).quarantined())
    assert set(put_aside) == {f"step-{step:08d}.r0" for step, _, _ in DAMAGE}
    for step, name, _ in DAMAGE:
        called = f"step-{step:08d}.r0"
        assert name in put_aside[called] or "rank" in put_aside[called], put_aside
        said = [line for line in agent_lines(running.output("stderr")) if called in line]
        assert any("quarantine" in line for line in said), (said, put_aside)
        assert (job.saves / ".quarantine" / called / "COMMIT").exists()
    assert [(one.step, one.round) for one in job.listed()] == [(2, 0), (3, 0)]


def test_a_late_writer_cannot_change_a_checkpoint_unseen(elaunch: Launcher) -> None:
    """Who still has a file open when its directory is committed writes into the checkpoint."""
    job = act(elaunch, "r0:save=2", "r0:late=4", "r0:exit=7", "load")
    assert "loaded 2 of 0, saved by 2" in lines(job.run())
    put_aside = open_storage(job.saves).quarantined()
    assert [name for name, _ in put_aside] == ["step-00000004.r0"], put_aside


# ── who reads and writes there ───────────────────────────────────────────────────────────────────


def test_another_number_of_ranks(elaunch: Launcher) -> None:
    """``save`` fits them: what all have is the same, what a rank has of its own goes round."""
    first = Job(elaunch, "job", "save", steps=4)
    first.run()
    saved = dict(first.noted("saved"))
    Job(elaunch, "job", "save", steps=6, nproc=3).run()
    loaded = dict(first.noted("loaded"))
    assert {line["digest"] for line in loaded.values()} == {saved[0]["digest"]}
    assert [loaded[rank]["own"] for rank in range(3)] == [
        saved[rank % 2]["own"] for rank in range(3)
    ]
    assert {line["saved_by"] for line in loaded.values()} == {2}
    assert [one.world_size for one in first.listed()] == [2, 3]


@pytest.mark.trial
def test_a_script_learns_how_many_ranks_saved(elaunch: Launcher) -> None:
    """Who uses store_path deals the files out by himself."""
    act(elaunch, "save=2", nproc=2).run()
    running = act(elaunch, "load", nproc=3).run()
    assert lines(running) == {"loaded 2 of 0, saved by 2"}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_two_jobs_in_one_directory(elaunch: Launcher, used: bool) -> None:
    """The second is refused before it has written anything, and names the first."""
    if used:
        act(elaunch, "save=1").run()
    stop = elaunch.directory / "stop"
    first = act(elaunch, "load", "save=2", f"until={stop}", "save=4")
    running = first.start()
    running.wait_for_line(r"^saved 2 rank=1 ", DEADLINE)
    second = act(elaunch, "load", "save=9", name="other")
    second.saves = first.saves
    before = tree(first.saves)
    done = second.start().wait(DEADLINE)
    assert done.returncode == 2, done.stderr
    assert str(first.saves) in done.stderr and "Traceback" not in done.stderr
    assert re.search(r"in use by another job \(process \d+|belongs to run", done.stderr), (
        done.stderr
    )
    assert "saved" not in done.stdout
    assert {path: when for path, when in tree(first.saves).items() if path in before} == before
    assert set(tree(first.saves)) == set(before)
    stop.touch()
    assert running.wait(DEADLINE).returncode == 0
    assert [one.step for one in first.listed()] == [1, 2, 4][not used :]


def test_a_commit_of_a_round_that_is_over(elaunch: Launcher) -> None:
    """A worker of round 0 that lives on in round 1 asks its agent, and is refused."""
    words = ["r0:save=2", "1r0:exit=7", "r0:wait", "load", "stale=9,0", "save=4"]
    job = act(elaunch, *words)
    refused = [line for line in lines(job.run()) if line.startswith("refused 9")]
    assert refused == ["refused 9: round 0 may not commit any more: the job is in round 1"]
    assert [one.step for one in job.listed()] == [2, 4]


@pytest.mark.trial
def test_what_was_refused_is_not_committed_later(elaunch: Launcher) -> None:
    """It was complete; but the round that follows is not the one that was told of it."""
    words = ["r0:save=2", "1r0:exit=7", "r0:wait", "r1:load", "r1:stale=9,0", "0r1:exit=7"]
    job = act(elaunch, *words, "r1:wait", "load")
    assert {line for line in lines(job.run()) if "load" in line} == {"loaded 2 of 0, saved by 2"}
    assert [one.step for one in job.listed()] == [2]


@pytest.mark.parametrize("step", ["manifest", pytest.param("publish", marks=pytest.mark.trial)])
def test_a_node_that_was_frozen_in_its_commit(elaunch: Launcher, step: str) -> None:
    """The other one goes on without it; thawed, it commits nothing that the other has not seen."""
    job = act(elaunch, "r0:save=2", "r0:save=4", "r0:wait", "r1:load", "r1:save=6", nproc=1)
    job.nodes, job.min_nodes, job.host_last = 2, 1, True
    job.fault = {"where": "worker", "rank": 0, "step": step, "victims": ["node 1"]}
    job.fault |= {"signal": "SIGSTOP", "within": "step-00000004"}
    job.words = [*job.words, "r1:wait", "r2:load"]
    one, frozen = job.start(0), job.start(1)
    one.wait_for_line(r"^saved 6 rank=0 round=1 ", DEADLINE)
    # It was about to write its manifest, or else the checkpoint had all that it needs.
    resumed = 2 if step == "manifest" else 4
    assert f"loaded {resumed} of 0, saved by 2" in lines(one)
    names = [found.name for found in job.listed()]
    # The worker first, before its agent can end it: whatever it does now, it must do no harm.
    os.kill(int((job.directory / "pid.0.0").read_text()), SIGCONT)
    time.sleep(0.5)
    assert [found.name for found in job.listed()] == names
    checkpoint_fault.kill(["node 1"], job.directory, SIGCONT)
    for agent in (one, frozen):
        assert agent.wait(DEADLINE).returncode == 0, agent.output("stderr")
        assert "loaded 6 of 1, saved by 1" in lines(agent)
    assert [found.name for found in job.listed()] == names
    assert list((job.saves / ".stage").iterdir()) == []


# ── a full disk ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(elaunch: Launcher) -> Iterator[SmallDisk]:
    """Give a job a disk of so many bytes for its checkpoints; return where this process sees it.

    It is mounted in a namespace, which a process holds that waits for the test's end.
    """
    programs.needed("unshare", "mount")
    with ExitStack() as holders:

        def mount(job: Job, size: int) -> Path:
            line = f"mount -t tmpfs -o size={size} tmpfs {job.saves} && echo && exec cat"
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            holder = subprocess.Popen(["unshare", "--mount", "sh", "-c", line], **pipes)
            holders.enter_context(holder)
            holders.callback(holder.kill)
            assert holder.stdout is not None and holder.stderr is not None
            mounted = holder.stdout.readline() == b"\n"
            programs.allowed(None if mounted else holder.stderr.read().decode())
            job.spaces = (f"/proc/{holder.pid}/ns/mnt",)
            return Path(f"/proc/{holder.pid}/root{job.saves}")

        yield mount


@pytest.mark.trial
def test_a_full_disk_is_cleared_by_retention(elaunch: Launcher, small_disk: SmallDisk) -> None:
    """There is room for three and a half, three are kept: the oldest goes before the fourth."""
    job = Job(elaunch, "job", "aside", steps=10, words=[WIDE, "keep=3"])
    saves = small_disk(job, int(3.5 * SIZE))
    job.run()
    assert job.noted("refused") == []
    job.saves = saves
    assert [one.step for one in job.listed()] == [6, 8, 10]
    assert job.listed()[0].size > SIZE * 0.9


def test_a_full_disk_that_nothing_frees(elaunch: Launcher, small_disk: SmallDisk) -> None:
    """Those saves fail, with the reason; the training goes on, what is there is whole."""
    job = Job(elaunch, "job", "save", steps=10, words=[WIDE, "keep=0", "calm"])
    saves = small_disk(job, int(3.5 * SIZE))
    job.run()
    refused = job.noted("refused")
    assert {(rank, line["step"]) for rank, line in refused} == {(0, 8), (0, 10), (1, 8), (1, 10)}
    for _, line in refused:
        assert re.search(rf"no space left on {job.saves}: needs about .*B, has ", line["error"])
    job.saves = saves
    assert [one.step for one in job.listed()] == [2, 4, 6]
    assert list((saves / ".stage").iterdir()) == []


@pytest.mark.trial
def test_a_full_disk_in_the_block_of_a_script(elaunch: Launcher, small_disk: SmallDisk) -> None:
    """What a script has begun to write itself cannot be written again by anyone else."""
    job = act(elaunch, "calm=2,600000", "calm=4,600000", "calm=6,100", "load")
    saves = small_disk(job, 1_800_000)
    running = job.run()
    refused = [line for line in lines(running) if line.startswith("refused")]
    assert all(line.startswith("refused 4: ") for line in refused) and refused, lines(running)
    for line in refused:  # a rank whose own block it was gets what was raised there
        assert re.match(r"refused 4: (SaveError|OSError): .*[Nn]o space left", line), line
    assert "loaded 6 of 0, saved by 2" in lines(running)
    job.saves = saves
    assert [one.step for one in job.listed()] == [2, 6]


# ── the end in mid-save ──────────────────────────────────────────────────────────────────────────


def test_sigterm_while_a_save_is_in_flight(
    elaunch: Launcher, trajectory: Callable[[int], Trajectory]
) -> None:
    """What is in memory is written and committed before elaunch ends, with 143 as ever."""
    job = Job(elaunch, "job", "aside", steps=8, words=["term=1.6"])
    job.fault = {"where": "agent", "step": "begin", "nth": 10**6, "slow": 0.1}
    done = job.start().wait(DEADLINE)
    assert done.returncode == 143, done.stderr
    assert [one.step for one in job.listed()] == [4, 6]
    assert list((job.saves / ".stage").iterdir()) == []
    expected = trajectory(2)
    for rank, line in job.noted("trained"):
        expected.check(rank, line)


@pytest.mark.trial
def test_the_orphan_of_an_asynchronous_save_of_torch(elaunch: Launcher) -> None:
    """It outlives its trainer, but not the round; what it was at is no checkpoint."""
    marks, saves = elaunch.directory / "marks", elaunch.directory / "saves"
    marks.mkdir()
    flags = ["--rdzv-id=job", "--max-restarts=1", f"--checkpoint-dir={saves}"]
    flags.append(f"--preload={checkpointing.PRELOAD}")
    words = ["run", *flags, JOBS / "checkpoint_orphan.py", marks]
    done = elaunch.run(words, env=checkpointing.ENV, deadline=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "resumes from None",
        "resumes from 1",
        "orphan alive: False",
    ]
    assert not (marks / "finished").exists()
    assert [one.step for one in open_storage(saves).listed()] == [1]
    assert list((saves / ".stage").iterdir()) == []


# ── readers, power cuts ──────────────────────────────────────────────────────────────────────────


@pytest.mark.trial
def test_sixteen_readers_while_one_saves(elaunch: Launcher) -> None:
    """Not one of them fails; those of a file that is written in place do."""
    found = {}
    for mode, seconds in (("plain", "0.5"), ("elaunch", "3")):
        directory = elaunch.directory / mode
        directory.mkdir()
        words = [JOBS / "checkpoint_readers.py", directory, mode, "16", seconds]
        done = elaunch.start_command([sys.executable, *words], env=checkpointing.ENV).wait(DEADLINE)
        assert done.returncode == 0, done.stderr
        found[mode] = json.loads(done.stdout)
    print(found)
    assert found["plain"]["failed"] > 0 and found["plain"]["saved"] > 1
    assert found["elaunch"]["failed"] == 0 and found["elaunch"]["read"] > 16, found["elaunch"]
    assert found["elaunch"]["saved"] > 3


@dataclass(frozen=True)
class Call:
    """A system call: its name, and the paths of its arguments."""

    name: str
    paths: tuple[str, ...]


def traced(text: str) -> list[Call]:
    """Return the calls of ``strace -f -y`` that have succeeded.

    In the order in which they are certain: an fsync when it has returned, a rename when it began.
    """
    calls: list[Call | None] = []
    begun: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[pid] = len(calls), rest.removesuffix("<unfinished ...>")
            calls.append(None)
            continue
        at = len(calls)
        calls.append(None)
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest):
            started, first = begun.pop(pid)
            rest = first + resumed[1]
            at = started if rest.startswith("rename") else at
        if found := re.match(r"(\w+)\((.*)\) += 0$", rest):
            paths = re.findall(r'<([^>]*)>|"([^"]*)"', found[2])
            calls[at] = Call(found[1], tuple(one or other for one, other in paths))
    return [call for call in calls if call is not None]


def test_fsync_comes_before_rename(elaunch: Launcher) -> None:
    """For both who write: a script's files, sealed, and memory, written by elaunch.

    Data before their manifest, all before COMMIT, that before the checkpoint's name, which is on
    the disk when the commit returns.
    """
    programs.needed("strace")
    saves, log = elaunch.directory / "saves", elaunch.directory / "strace"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    strace = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", calls, "-e", "signal=none"]
    command = [*strace, "-o", log, sys.executable, JOBS / "checkpoint_once.py", saves]
    done = elaunch.start_command(command, env={"ELAUNCH_CHECKPOINT_DIR": str(saves)}).wait(DEADLINE)
    programs.allowed(done.stderr if "ptrace" in done.stderr else None)
    assert done.returncode == 0, done.stderr
    every = traced(log.read_text())
    for name in ("step-00000001.r0", "step-00000002.r0"):
        check_order(every, saves, name)


def check_order(calls: Sequence[Call], saves: Path, name: str) -> None:
    """See the order of one checkpoint's calls."""

    def renamed(to: str, start: int = 0) -> int:
        """Return where something gets a name that matches, from ``start`` on."""
        for at in range(start, len(calls)):
            call = calls[at]
            if call.name.startswith("rename") and re.fullmatch(to, call.paths[-1]):
                return at
        raise AssertionError(f"nothing was renamed to {to}: {calls}")

    def synced(path: str, until: int, since: int = 0) -> None:
        """See that a file or directory of that name is on the disk before ``until``."""
        found = (
            c.name in ("fsync", "fdatasync") and c.paths == (path,) for c in calls[since:until]
        )
        assert any(found), f"{path} was not fsynced before {calls[until]}: {calls}"

    root, stage = re.escape(str(saves)), rf"\.stage/{re.escape(name)}\.\w+"
    manifest = renamed(rf"{root}/{stage}/manifest\.rank-00000\.json")
    begun = calls[manifest].paths[-1].rpartition("/")[0]
    for file in ("deep/data.bin", "more.bin"):
        placed = renamed(f"{re.escape(begun)}/{file}")
        synced(calls[placed].paths[0], placed)
        assert placed < manifest
    synced(f"{begun}/deep", manifest, renamed(f"{re.escape(begun)}/deep/data.bin"))
    synced(calls[manifest].paths[0], manifest)
    claim = renamed(rf"{root}/{stage}\.commit-\w+", manifest)
    synced(begun, claim, manifest)
    claimed = calls[claim].paths[-1]
    described = renamed(f"{re.escape(claimed)}/metadata.json", claim)
    synced(calls[described].paths[0], described)
    committed = renamed(f"{re.escape(claimed)}/COMMIT", described)
    synced(calls[committed].paths[0], committed)
    published = renamed(f"{root}/{re.escape(name)}", committed)
    synced(claimed, published, committed)
    synced(str(saves), len(calls) - 1, published)
