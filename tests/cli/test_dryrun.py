"""``--dry-run``: what is shown, what is hidden, and that nothing starts."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch.cli import dryrun
from elaunch.errors import UsageError
from tests.config.resolving import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a directory with a script to resolve command lines in."""
    return Job(tmp_path)


def plain(job: Job, line: str, capsys: pytest.CaptureFixture[str], **environ: str) -> str:
    """Return what a dry run prints where there is no terminal."""
    dryrun.show(job.settings(line, **environ), environ)
    return capsys.readouterr().out


def test_the_command_and_a_row_for_each_worker(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain text, one line each."""
    out = plain(job, "--nproc 2 --rdzv-id 7 train.py --tag a$b", capsys)
    assert f"  command    {sys.executable} -u train.py --tag 'a$b'\n" in out
    assert "  run id     7\n" in out
    assert "  WORLD_SIZE=2\n" in out and "  OMP_NUM_THREADS=1\n" in out
    assert "  MASTER_PORT=(a free port in each round)\n" in out
    rows = [line.split() for line in out.splitlines()[-3:]]
    assert rows == [
        ["rank", "local_rank", "devices", "logs"],
        ["0", "0", "all", "attempt_0/0/"],
        ["1", "1", "all", "attempt_0/1/"],
    ]


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-m train x", f"{sys.executable} -u -m train x"),
        ("--no-python /bin/sh -c true", "/bin/sh -c true"),
    ],
)
def test_the_command_of_each_mode(job: Job, line: str, command: str) -> None:
    """As it could be typed."""
    assert dryrun.command(job.settings(line)) == command


def test_secrets_are_hidden(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """The job file's variables are shown, but not those that look like a secret."""
    job.write(
        "j.yaml",
        "entrypoint: train.py\n"
        "environment: {WANDB_API_KEY: abc123, HF_TOKEN: def456, MODE: fast}\n",
    )
    out = plain(job, "-f j.yaml", capsys)
    assert "    WANDB_API_KEY=(hidden)\n    HF_TOKEN=(hidden)\n    MODE=fast\n" in out
    assert "abc123" not in out and "def456" not in out


def test_one_device_for_each_worker(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """With --virtual-local-rank."""
    line = "--virtual-local-rank --nproc 2 train.py"
    out = plain(job, line, capsys, CUDA_VISIBLE_DEVICES="4,7")
    assert [row.split()[2] for row in out.splitlines()[-2:]] == ["4", "7"]


def test_what_cannot_be_bound_is_refused(job: Job) -> None:
    """As the start itself would: no accelerator is here."""
    with pytest.raises(UsageError, match="--numa-binding node: torch finds no accelerator"):
        dryrun.show(job.settings("--numa-binding node --nproc 2 train.py"), {})


def test_one_device_of_amd_for_each_worker(job: Job) -> None:
    """ROCm goes by its own variable; libraries may read the other one."""
    settings = job.settings("--virtual-local-rank --nproc 2 train.py")
    launcher = {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "4,7"}
    variables = dryrun.worker(settings, 1, 2, launcher)
    names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    assert [variables[name] for name in names] == ["0", "7", "7"]
    assert "HIP_VISIBLE_DEVICES" not in dryrun.worker(settings, 1, 2, {})


def test_the_checkpoint_directory_is_shown(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """And that the choice is made at the start."""
    out = plain(job, "--checkpoint-dir ck train.py", capsys)
    assert f"  checkpoints  {job.directory / 'ck'}\n" in out
    assert "  ELAUNCH_RESUME_FROM=(chosen at the start)\n" in out


def test_nodes_that_have_not_met_yet(job: Job) -> None:
    """Where they would meet; ranks are not known."""
    line = "--nnodes 1:4 --nproc 2 --rdzv-backend c10d --rdzv-endpoint localhost train.py"
    settings = job.settings(line, SLURM_PROCID="3")
    found = dict(dryrun.facts(settings, 2))
    assert found["nodes"] == "1 to 4"
    assert found["rendezvous"] == (
        "c10d at localhost:29400, which this node hosts unless another agent on it does"
    )
    assert found["this node"] == (
        "its rank and those of its workers are decided when the nodes meet; it asks for place 3"
    )
    variables = dryrun.worker(settings, 1, 2, {})
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "ELAUNCH_NODE_ADDRS"):
        assert variables[name] == "(decided when the nodes meet)", name
    assert (variables["LOCAL_RANK"], variables["LOCAL_WORLD_SIZE"]) == ("1", "2")


def test_ranks_of_static_nodes(job: Job) -> None:
    """They are given, and so are those of the workers if all nodes are alike."""
    settings = job.settings("--nnodes 3 --node-rank 2 --master-addr 192.0.2.1 train.py")
    found = dict(dryrun.facts(settings, 4))
    assert found["nodes"] == "3"
    assert found["rendezvous"] == "static at 192.0.2.1:29500, which another node hosts"
    assert found["this node"] == "node 2; ranks as if each had 4 workers"
    variables = dryrun.worker(settings, 1, 4, {})
    expected = {"RANK": "9", "WORLD_SIZE": "12", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3"}
    assert expected.items() <= variables.items()
    assert variables["MASTER_ADDR"] == "192.0.2.1"


def test_the_way_into_etcd_is_hidden(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """User and password, wherever they come from."""
    line = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint a,b --rdzv-id 7 train.py"
    out = plain(job, line, capsys, PET_RDZV_CONF="user=me,password=s3cr3t")
    assert "  rendezvous  etcd at a:2379,b:2379\n" in out
    assert "s3cr3t" not in out
    rows = [row.split() for row in out.splitlines()[-1:]]
    assert rows == [["-", "0", "all", "attempt_0/0/"]]


@pytest.mark.slow
@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_a_table(job: Job, no_color: str) -> None:
    """Unless NO_COLOR is set."""
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environ |= {"TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": no_color}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "elaunch", "run", "--dry-run", "train.py"],
        cwd=job.directory,
        env=environ,
        stdout=theirs,
    )
    os.close(theirs)
    out = b""
    try:
        while chunk := os.read(ours, 4096):
            out += chunk
    except OSError:  # the end of a terminal
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert b"local_rank" in out
    assert (b"\x1b[" in out) is (not no_color)
