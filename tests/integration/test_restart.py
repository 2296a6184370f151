"""A round fails, the next one runs: what workers see of it, what it costs, when it is the last."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import COLLECTIVE, FORK, SPAWN, both_methods
from tests.integration.watching import Clock, act, agent_lines
from tests.launching import Launcher

pytestmark = pytest.mark.slow

Method = Sequence[str]
SHOWN = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    "TORCHELASTIC_RUN_ID ELAUNCH_RUN_ID ELAUNCH_ROUND ELAUNCH_RESTART_REASON ELAUNCH_RESUME_FROM"
).split()


def shown(stdout: str) -> dict[tuple[int, int], dict[str, str]]:
    """Return what ``show`` printed: (round, rank) → variables."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for rank, number, name, value in re.findall(r"^(\d+)\.(\d+) (\w+)=(.*)$", stdout, re.M):
        found.setdefault((int(number), int(rank)), {})[name] = value
    return found


def state(elaunch: Launcher) -> dict[str, Any]:
    """Return the record of the test's one run."""
    (path,) = elaunch.state.glob("elaunch/runs/*/state.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


@both_methods
def test_what_workers_are_told_in_each_round(
    elaunch: Launcher, method: Method, tmp_path: Path
) -> None:
    """Ranks stay, counts go up, the reason is given, the store's port is another one."""
    words = [f"show={','.join(SHOWN)}", f"meet={tmp_path}", "1r0:exit=7", "r0:wait"]
    flags = ["--max-restarts=3", "--run-id=told"]
    done = elaunch.run(act(method, *words, nproc=3, flags=flags))
    assert done.returncode == 0
    told = shown(done.stdout)
    assert sorted(told) == [(number, rank) for number in range(2) for rank in range(3)]
    for (number, rank), variables in told.items():
        same = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
        same |= {name: "3" for name in SHOWN if name.endswith("WORLD_SIZE")}
        same |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        same |= {"TORCHELASTIC_RESTART_COUNT": str(number), "ELAUNCH_ROUND": str(number)}
        same |= {"TORCHELASTIC_MAX_RESTARTS": "3", "ELAUNCH_RESUME_FROM": ""}
        same |= {"TORCHELASTIC_RUN_ID": "told", "ELAUNCH_RUN_ID": "told"}
        assert same.items() <= variables.items()
    reasons = [
        {told[number, rank]["ELAUNCH_RESTART_REASON"] for rank in range(3)} for number in (0, 1)
    ]
    assert reasons == [{""}, {"rank 1 exited with code 7; restart 1 of 3"}]
    ports = [{told[number, rank]["MASTER_PORT"] for rank in range(3)} for number in (0, 1)]
    assert [len(each) for each in ports] == [1, 1] and ports[0] != ports[1]


def test_a_port_that_was_given_stays(elaunch: Launcher, tmp_path: Path, free_port: int) -> None:
    """The address too."""
    words = ["show=MASTER_ADDR,MASTER_PORT", f"meet={tmp_path}", "0r0:exit=7", "r0:wait"]
    flags = ["--max-restarts=1", "--master-addr=localhost", f"--master-port={free_port}"]
    done = elaunch.run(act(FORK, *words, flags=flags))
    told = shown(done.stdout)
    assert len(told) == 4
    for variables in told.values():
        assert variables == {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}


@pytest.mark.parametrize(
    ("nproc", "fixed"),
    [
        (2, False),
        *(pytest.param(*more, marks=pytest.mark.trial) for more in ((4, False), (2, True))),
    ],
    ids=["2", "4", "2 on one port"],
)
def test_the_group_forms_again_after_each_of_ten_restarts(
    elaunch: Launcher, tmp_path: Path, nproc: int, fixed: bool, free_port: int
) -> None:
    """With gloo and an all-reduce; each newer checkpoint refills the budget of one restart."""
    flags = ["--max-restarts=1", f"--nproc-per-node={nproc}"]
    flags += [f"--checkpoint-dir={tmp_path}", "--checkpoint-glob=step_*.pt"]
    flags += [f"--master-port={free_port}"] if fixed else []
    done = elaunch.run(["run", *flags, COLLECTIVE, tmp_path, "11"])
    assert done.returncode == 0, done.stderr
    reduced = re.findall(r"^reduced rank=(\d+) round=(\d+) port=(\d+)$", done.stdout, re.M)
    expected = [(str(rank), str(number)) for number in range(11) for rank in range(nproc)]
    assert sorted(each[:2] for each in reduced) == sorted(expected)
    ports = {int(port) for _, _, port in reduced}
    assert ports == {free_port} if fixed else len(ports) > 5
    record = state(elaunch)
    assert record["restarts"]["used"] == 10 and "backoff" not in done.stderr
    assert [entry["resumed_step"] for entry in record["history"]] == [None, *range(10)]


@pytest.mark.trial
def test_the_group_forms_again_in_plain_processes(elaunch: Launcher, tmp_path: Path) -> None:
    """The store's host imports torch by itself there."""
    flags = ["--max-restarts=1", "--nproc-per-node=2", *SPAWN]
    done = elaunch.run(["run", *flags, COLLECTIVE, tmp_path, "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reduced") == 4


def test_ranks_that_wait_in_a_collective_are_ended(
    elaunch: Launcher, tmp_path: Path, free_port: int
) -> None:
    """With torchrun's command line, word for word; rank 1 fails while rank 0 is in a barrier."""
    words = f"--nnodes=1 --nproc_per_node=2 --master_addr 127.0.0.1 --master_port {free_port}"
    clock = Clock()
    done = elaunch.run(["run", *words.split(), "--max_restarts", "0", COLLECTIVE, tmp_path, "2"])
    assert done.returncode == 3
    assert clock() < 30
    assert f"reduced rank=0 round=0 port={free_port}" in done.stdout


def test_no_restart_by_default(elaunch: Launcher) -> None:
    """--max-restarts 0: the first failure ends the job with its code, and there is one attempt."""
    clock = Clock()
    done = elaunch.run(act(FORK, "1:exit=3", "wait", flags=["--max_restarts", "0"]))
    assert done.returncode == 3
    assert clock() < 10
    record = state(elaunch)
    assert [entry["round"] for entry in record["history"]] == [0]
    assert [path.name for path in Path(record["dir"], "logs").iterdir()] == ["attempt_0"]
    *_, why, result = agent_lines(done.stderr)
    assert why == "round 0: rank 1 exited with code 3; --max-restarts is 0"
    assert re.match(r"result: FAILED after .*, 0 restarts: rank 1 exited with code 3 \(", result)
    assert done.stderr.rstrip().endswith(result), "below torchrun's table"


@both_methods
def test_logs_of_all_rounds_are_kept(elaunch: Launcher, method: Method, tmp_path: Path) -> None:
    """Each in the directory of its attempt."""
    words = ["say=alive", f"meet={tmp_path}", "r0:exit=1", "r1:exit=1"]
    flags = ["--max-restarts=2", f"--log-dir={tmp_path}/logs"]
    assert elaunch.run(act(method, *words, flags=flags)).returncode == 0
    for number in range(3):
        for rank in range(2):
            (log,) = tmp_path.glob(f"logs/*/attempt_{number}/{rank}/stdout.log")
            assert f"alive rank={rank} round={number}" in log.read_text()


def test_the_lifetime_budget_is_not_refilled(elaunch: Launcher, tmp_path: Path) -> None:
    """torchrun's count: two restarts, with progress or without."""
    flags = [f"--checkpoint-dir={tmp_path}", "--checkpoint-glob=step_*.pt"]
    flags += ["--max-restarts=2", "--restart-budget=lifetime"]
    done = elaunch.run(act(FORK, f"ckpt={tmp_path}", "0:exit=6", "wait", flags=flags))
    assert done.returncode == 6
    assert [entry["resumed_step"] for entry in state(elaunch)["history"]] == [None, 10, 20]
    assert "2 of 2 restarts are used up" in done.stderr


def test_workers_that_die_at_once_again_and_again_are_waited_for(elaunch: Launcher) -> None:
    """The first restart is at once; then half a second at most, then one."""
    done = elaunch.run(act(FORK, "0:exit=5", "wait", flags=["--max-restarts=3"]))
    assert done.returncode == 5
    counted = {"used": 3, "without_progress": 3, "max": 3, "budget": "progress"}
    assert state(elaunch)["restarts"] == counted
    assert "3 restarts in a row brought no progress (--max-restarts)" in done.stderr
    lines = agent_lines(done.stderr)
    restarts = [line for line in lines if "; restart" in line]
    assert ["backoff" in line for line in restarts] == [False, True, True]
    begun = [entry["started_at"] for entry in state(elaunch)["history"]]
    waits = [after - before for before, after in itertools.pairwise(begun)]
    assert waits[1] > 0.25 and waits[2] > 0.5  # half of what is meant: the rest is chance


def test_a_corrupt_error_file_does_no_harm(elaunch: Launcher) -> None:
    """Neither to a restart nor to the report."""
    words = ['error={"message": {"mess', "1r0:exit=7", "1r1:exit=8", "wait"]
    done = elaunch.run(act(FORK, *words, flags=["--max-restarts=1"]))
    assert done.returncode == 8
    assert "rank 1 exited with code 7; restart 1 of 1" in done.stderr
    assert "error.json" in done.stderr
    assert "JSONDecodeError" not in done.stderr


def test_a_rank_that_ends_early_with_0_is_no_failure(elaunch: Launcher, tmp_path: Path) -> None:
    """The others go on; a failure among them later is one all the same."""
    words = ["0:exit=0", "sleep=0.3", "1:exit=0", f"touch={tmp_path}/end"]
    assert elaunch.run(act(FORK, *words, nproc=3)).returncode == 0
    assert (tmp_path / "end").exists()
    words = [f"meet={tmp_path}", "0:exit=0", "sleep=0.5", "1:exit=9", "wait"]
    done = elaunch.run(act(FORK, *words, nproc=3))
    assert done.returncode == 9
    assert "Stopped by elaunch: rank 2 (SIGTERM)" in done.stderr


def test_all_start_again_also_those_that_had_succeeded(elaunch: Launcher, tmp_path: Path) -> None:
    """A group is as good as its last rank."""
    words = ["say=up", f"meet={tmp_path}", "0:exit=0", "sleep=0.2", "1r0:exit=9"]
    done = elaunch.run(act(FORK, *words, flags=["--max-restarts=1"]))
    assert done.returncode == 0
    assert len(re.findall(r"^up rank=0 round=[01]", done.stdout, re.M)) == 2


def test_two_ranks_that_fail_in_one_moment(elaunch: Launcher, tmp_path: Path) -> None:
    """One is the first; the other failed by itself, or was stopped: never both the cause."""
    done = elaunch.run(act(FORK, f"meet={tmp_path}", "exit=3", nproc=3))
    assert done.returncode == 3
    failure = state(elaunch)["failure"]
    others = [each["rank"] for each in (*failure["victims"], *failure["stopped"])]
    assert sorted([failure["first"]["rank"], *others]) == [0, 1, 2]


def test_the_same_failure_ends_the_job(elaunch: Launcher, tmp_path: Path) -> None:
    """Numbers in a message make no other failure; the rounds are named, the code is its own."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\n"
        "number = int(os.environ['ELAUNCH_ROUND'])\n"
        "raise ValueError(f'no batch {number} at 0x7f{number}' if number else 'something else')\n"
    )
    flags = [*FORK, "--run-id=same", "--max-restarts=9", "--max-same-failures=3"]
    done = elaunch.run(["run", *flags, script])
    why = "the same failure in rounds 1, 2, 3 without progress (--max-same-failures)"
    assert done.returncode == 78 and f"rank 0 exited with code 1; {why}" in done.stderr
    record = state(elaunch)
    assert (record["state"], record["exit_code"], record["round"]) == ("FAILED", 78, 3)
