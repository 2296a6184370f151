"""Faults that are brought about for real, and what the card of each failed round says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.runs.directory import RunDir
from tests import programs
from tests.integration.jobs import faulty
from tests.launching import Launcher, without_waits

# What is expected of each fault: the code of its card, "" where no cause is known.
EXPECTED = {
    "missing-module": "E-IMPORT",
    "missing-file": "E-FILE-MISSING",
    "missing-in-loader": "E-FILE-MISSING",
    "full-device": "E-DISK-FULL",
    "full-save": "E-SAVE-CUT",
    "torn-checkpoint": "E-CHECKPOINT-TORN",
    "other-model": "E-CHECKPOINT-KEYS",
    "loader-killed": "E-DATALOADER-KILLED",
    "torch-memory": "E-HOST-MEMORY",
    "open-files": "E-OPEN-FILES",
    "local-rank": "E-LOCAL-RANK",
    "taken-port": "E-PORT-IN-USE",
    "no-group": "E-NO-PROCESS-GROUP",
    "handled-before": "",
    "missing-command": "E-COMMAND-MISSING",
    "signal-kill": "E-KILLED",
    "segfault": "E-SEGFAULT",
}
MORE = {
    "broken-module": "E-IMPORT-BROKEN",
    "bad-syntax": "E-SYNTAX",
    "forbidden-file": "E-PERMISSION",
    "full-disk": "E-DISK-FULL",
    "read-only-disk": "E-READ-ONLY",
    "full-shm": "E-SHM-FULL",
    "empty-checkpoint": "E-CHECKPOINT-TORN",
    "garbage-checkpoint": "E-CHECKPOINT-TORN",
    "torn-pickle": "E-CHECKPOINT-TORN",
    "other-objects": "E-WEIGHTS-ONLY",
    "loader-crashed": "E-DATALOADER-DIED",
    "loader-timeout": "E-DATALOADER-TIMEOUT",
    "python-memory": "E-HOST-MEMORY",
    "oom-kill": "E-OOM-KILLED",
    "file-size": "E-FILE-LIMIT",
    "threads": "E-PROCESS-LIMIT",
    "pickling": "E-PICKLE",
    "arguments": "E-ARGUMENTS",
    "taken-store-port": "E-PORT-IN-USE",
    "unknown-host": "E-HOST-NAME",
    "no-service": "E-CONNECTION",
    "no-store": "E-STORE-CONNECT",
    "no-cuda": "E-CPU-BUILD",
    "no-interface": "E-NETWORK-INTERFACE",
    "plain-exception": "",
    "own-code": "",
    "refused-and-left": "",
    "killed-command": "E-KILLED",
    "bus-error": "E-BUS-ERROR",
    "cpu-limit": "E-CPU-LIMIT",
    "signal-abrt": "E-ABORTED",
    "signal-term": "E-TERMINATED",
    "signal-hup": "E-HUNG-UP",
    "signal-ill": "E-ILLEGAL-INSTRUCTION",
    "signal-fpe": "E-DIVISION",
    "signal-usr1": "E-USER-SIGNAL",
    "signal-sys": "E-FORBIDDEN-CALL",
    "dies-in-collective": "",
    "raises-in-collective": "E-FILE-MISSING",
    "killed-in-collective": "E-KILLED",
    "late-in-collective": "E-COLLECTIVE-TIMEOUT",
    "other-size": "E-COLLECTIVE-MISMATCH",
    "text-cuda-oom": "E-CUDA-OOM",
    "text-ordinal": "E-DEVICE-ORDINAL",
    "text-assert": "E-DEVICE-ASSERT",
    "text-ecc": "E-GPU-FAILED",
    "text-kind": "E-GPU-KIND",
    "text-fork": "E-CUDA-FORK",
    "text-nccl": "E-NCCL",
    "text-duplicate": "E-SHARED-GPU",
    "text-quota": "E-QUOTA",
    "text-stale": "E-IO",
    "text-download": "E-DOWNLOAD",
}
NOBODY = {"late-in-collective"}
"""Faults whose rank does not end by itself: no other is to be accused."""
ALL = {"other-size"}
"""Faults of all ranks: whose end comes first is chance, and its report says that it is all."""


def job(at: Path, words: Sequence[str], *flags: str) -> list[str]:
    """Return the arguments of ``elaunch`` for a job that meets these faults, one a round."""
    (at / "saves").mkdir()
    saves = [f"--checkpoint-dir={at / 'saves'}", "--checkpoint-glob=step_*.json"]
    known = ["--run-id=faulty", "--max-restarts=1", "--progress-regex=^step ([0-9]+)$", *flags]
    return ["run", "--nproc-per-node=2", *saves, *known, faulty.__file__, str(at), *words]


def guilty(number: int) -> int:
    """Return the rank that a round's fault is made by."""
    return number % 2


def as_torch_may_say(code: str, name: str) -> str:
    """Return the code; where torch could not say that a loader's process was killed, of that."""
    lost = name == "loader-killed" and code == "E-DATALOADER-DIED"
    return "E-DATALOADER-KILLED" if lost else code


def words(names: Sequence[str]) -> list[str]:
    """Return the script's words for these faults."""
    return [f"{name}:{guilty(number)}" for number, name in enumerate(names)]


def cards(elaunch: Launcher) -> dict[int, dict[str, Any]]:
    """Return the card of each failed round."""
    run = RunDir(elaunch.state / "elaunch" / "runs" / "faulty")
    return {each: json.loads(run.report(each, "json").read_text()) for each in run.reports()}


def accused(card: dict[str, Any]) -> int | None:
    """Return the rank that a card names as the cause; None where it names nobody."""
    if card["likelier"] is not None:
        return int(card["likelier"])
    return None if card["likely_victim"] else int(card["first"]["rank"])


@pytest.mark.slow
def test_real_faults_have_their_codes(elaunch: Launcher, tmp_path: Path) -> None:
    """One fault a round, by turns in rank 0 and 1; each card names it, and what it has cost."""
    names = list(EXPECTED)
    done = elaunch.run(job(tmp_path, words(names)))
    assert done.returncode == 0, done.stderr
    found = cards(elaunch)
    told = {
        name: (as_torch_may_say(found[n]["code"] or "", name), accused(found[n]))
        for n, name in enumerate(names)
    }
    assert told == {name: (EXPECTED[name], guilty(n)) for n, name in enumerate(names)}
    steps = {n: (card["at_step"], card["steps_lost"]) for n, card in found.items()}
    assert steps == {n: (3 * n + 2, 2) for n in range(len(names))}
    assert "no-such-data.bin. Give it" in done.stderr.replace("\n", " ")
    assert "(elaunch explain E-IMPORT)" in done.stderr.replace("\n", " ")
    shown = elaunch.start_command([sys.executable, "-m", "elaunch", "why", "faulty"]).wait()
    assert "faulty: COMPLETED" in shown.stdout and "E-SEGFAULT" in shown.stdout
    assert "rank 1" in shown.stdout and "round 0: rank 0 exited with code 1" not in shown.stdout


SAVES = """
import sys, torch
torch.save({"weight": torch.zeros(1_000_000)}, sys.argv[1] + "/x.pt")
"""
MAKES = """
import sys
for number in range(100):
    open(f"{sys.argv[1]}/{number}", "x").close()
"""


def run_on_a_small_disk(elaunch: Launcher, tmp_path: Path, script: str) -> tuple[str, str]:
    """Run ``script`` with the path of a small disk, beside a full one; return it, and stderr."""
    programs.needed("unshare", "mount")
    disk, other, path = tmp_path / "small", tmp_path / "other", tmp_path / "save.py"
    for directory in (disk, other):
        directory.mkdir()
    path.write_text(script)
    shell = f"mount -t tmpfs -o size=1m,nr_inodes=80 tmpfs {disk} && "
    shell += f"mount -t tmpfs -o size=64k tmpfs {other} && "
    shell += f"! head -c 1M /dev/zero > {other}/full 2> {tmp_path}/no && echo mounted && read end"
    argv = [sys.executable, "-m", "elaunch", "run", "--run-id=full", str(path), str(disk)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", shell], **pipes) as mounts:
        assert mounts.stdout is not None and mounts.stdout.readline() == b"mounted\n"
        done = elaunch.start_command(argv, spaces=[f"/proc/{mounts.pid}/ns/mnt"]).wait()
        mounts.communicate(b"\n", timeout=60)
    assert done.returncode == 1
    assert str(other) not in done.stderr
    return str(disk), without_waits(done.stderr)


@pytest.mark.slow
def test_a_full_disk_is_told_in_three_lines(elaunch: Launcher, tmp_path: Path) -> None:
    """Which one it is, and how much is free; torch's frames are in the log."""
    disk, told = run_on_a_small_disk(elaunch, tmp_path, SAVES)
    assert f"no room is left in {disk} (" in told.replace("\n", " "), told
    assert "failed at save.py:3: a write failed while torch.save wrote its file" in told
    assert "Traceback (" not in told and len(told.splitlines()) <= 8, told
    assert "Tracebacks of rank 0: elaunch logs full" in told
    assert "iostream error" in elaunch.run(["logs", "full"]).stderr


@pytest.mark.slow
def test_a_disk_without_inodes(elaunch: Launcher, tmp_path: Path) -> None:
    """Room is left on it, for no more files."""
    disk, told = run_on_a_small_disk(elaunch, tmp_path, MAKES)
    assert f"no room is left in {disk} (no inodes left)" in told.replace("\n", " "), told


@pytest.mark.trial
@pytest.mark.executed
def test_trial_of_faults(elaunch: Launcher, tmp_path: Path, cgroup: str) -> None:
    """Of more than 60 faults at least 95 % have their code and their rank; none accuses wrongly."""
    programs.needed("unshare", "mount")
    everything = EXPECTED | MORE
    if not cgroup:
        everything.pop("oom-kill")
    names = list(everything)
    for directory in ("small", "readonly"):
        (tmp_path / directory).mkdir()
    shell = (
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/small && "
        f"mount -t tmpfs -o ro tmpfs {tmp_path}/readonly && "
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && "
        + (f"echo $$ > {cgroup}/cgroup.procs && " if cgroup else "")
        + 'exec "$@"'
    )
    argv = [sys.executable, "-m", "elaunch", *job(tmp_path, words(names))]
    done = elaunch.start_command(["unshare", "--mount", "sh", "-c", shell, "sh", *argv]).wait(400)
    assert done.returncode == 0, done.stderr
    found = cards(elaunch)
    right, wrong, lines = 0, 0, []
    for number, name in enumerate(names):
        card = found[number]
        who = None if name in NOBODY else guilty(number)
        has_rank = name in ALL or accused(card) == who
        is_right = has_rank and (card["code"] or "") == everything[name]
        right += is_right
        wrong += not has_rank and accused(card) is not None
        if not is_right:
            lines.append(f"{name}: {card['code']}, accused {accused(card)}, is {who}")
    print(f"{right} of {len(names)} right, {wrong} accuse wrongly", *lines, sep="\n")
    assert right >= 0.95 * len(names) and wrong == 0, "\n".join(lines)
