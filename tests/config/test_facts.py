"""What nodes compare: it differs when it matters, and only then."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from elaunch import __version__
from elaunch.config.facts import facts
from tests.config.resolving import Job

LINE = "--nnodes 2 --node-rank 1 --master-addr 192.0.2.1"


@pytest.fixture(autouse=True)
def inside(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start where a launcher would: relative scripts are found from there."""
    monkeypatch.chdir(job.directory)


def of(job: Job, line: str, **environ: str) -> dict[str, str]:
    """Return the facts of a command line."""
    return facts(job.settings(line, **environ), environ)


def test_the_facts_of_a_job(job: Job) -> None:
    """Each with the name that a message can show."""
    found = of(job, f"{LINE} --max-restarts 3 --checkpoint-dir ck train.py --lr 0.1")
    assert set(found) == set(
        "script argv elaunch python torch nnodes max_restarts restart_budget checkpoint_dir "
        "heartbeat_timeout on_join".split()
    )
    assert (found["elaunch"], found["python"]) == (__version__, platform.python_version())
    assert found["torch"] == metadata.version("torch")
    assert (found["nnodes"], found["max_restarts"], found["on_join"]) == ("2", "3", "graceful")
    assert found["script"].startswith("train.py ") and found["argv"].startswith("--lr 0.1 (")
    assert found["checkpoint_dir"] == str(job.directory / "ck")
    assert of(job, "train.py")["argv"] == "none"


def test_a_pipe_is_left_to_the_worker(job: Job) -> None:
    """To look into the script would take it away, or wait for one who writes."""
    os.mkfifo(job.directory / "pipe")
    assert of(job, f"{LINE} pipe")["script"] == "pipe"


def test_a_call_from_python_is_the_same_on_all_nodes(job: Job) -> None:
    """Each node's program has made a directory of its own for it, with a random name."""
    here, there = (
        of(job, f"{LINE} -m elaunch.torchrun.worker /tmp/elaunch-call-{name} $local_rank")
        for name in ("x1", "y2")
    )
    assert here == there


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (f"{LINE} train.py --lr 0.2", "argv"),
        (f"{LINE} train.py --lr 0.1 ", None),
        (f"{LINE} other/train.py --lr 0.1", "script"),
        (f"{LINE} same/train.py --lr 0.1", None),
        ("--nnodes 3 --node-rank 2 --master-addr 192.0.2.1 train.py --lr 0.1", "nnodes"),
        (f"{LINE} --max-restarts 1 train.py --lr 0.1", "max_restarts"),
        (f"{LINE} --checkpoint-dir ck train.py --lr 0.1", "checkpoint_dir"),
        (f"{LINE} --rdzv-conf heartbeat_timeout=9 train.py --lr 0.1", "heartbeat_timeout"),
        (f"{LINE} --nproc 2 --role x --log-dir l train.py --lr 0.1", None),
    ],
)
def test_which_fact_differs(job: Job, other: str, fact: str | None) -> None:
    """Unequal nodes (workers, roles, log directories) are no difference."""
    job.write("other/train.py", "print('other')\n")
    job.write("same/train.py", "print('hello')\n")
    ours, theirs = of(job, f"{LINE} train.py --lr 0.1"), of(job, other)
    differing = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
    assert differing == ({fact} if fact else set())


def test_the_file_that_is_run(job: Job, tmp_path: Path) -> None:
    """Of a module, a package, a directory, a program on PATH, a program by its path."""
    job.write("pkg/__init__.py", "")
    job.write("pkg/__main__.py", "print('hello')\n")
    program = job.write("bin/prog", "print('hello')\n")
    program.chmod(0o755)
    script = of(job, "train.py")["script"].split()[1]
    for line in ("-m train", "-m pkg", "pkg", "--no-python prog", "--no-python bin/prog"):
        found = of(job, line, PATH=str(tmp_path / "bin"))["script"]
        assert found.split()[1] == script, line
    inner = job.write("sub/inner.py", "print('hello')\n")
    assert of(job, f"-C {inner.parent} inner.py")["script"] == f"inner.py {script}"


def test_another_python_has_its_own_versions(job: Job) -> None:
    """Nothing is claimed of it."""
    python = job.write("bin/python3", "#!/bin/sh\n")
    python.chmod(0o755)
    found = of(job, "-m train", PYTHON_EXEC=str(python))
    assert "python" not in found and "torch" not in found and found["script"] == "train"


def test_variables_on_which_ranks_must_agree(job: Job) -> None:
    """Not those of one node: devices, interfaces, addresses, files, logs."""
    agreed = {"NCCL_ALGO": "Ring", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_TIMEOUT": "3"}
    of_one_node = {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_DEBUG": "INFO",
        "NCCL_TOPO_FILE": "/x",
        "TORCH_HOME": "/x",
        "TORCH_LOGS": "all",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCH_API_KEY": "x",
        "MASTER_ADDR": "x",
    }
    plain = of(job, "train.py")
    assert of(job, "train.py", **of_one_node) == plain
    assert of(job, "train.py", **agreed, **of_one_node) == {**plain, **agreed}
    job.write("j.yaml", "entrypoint: train.py\nenvironment: {NCCL_ALGO: Tree}\n")
    assert of(job, "-f j.yaml", **agreed)["NCCL_ALGO"] == "Tree"


def test_facts_stay_small_and_still_differ(job: Job) -> None:
    """Long texts end in a digest, many variables become one."""
    many = {f"NCCL_{number:03}": "v" * 100 for number in range(200)}
    long = [
        *LINE.split(),
        "--checkpoint-dir",
        "d" * 200,
        "train.py",
        *("x" * 50 for _ in range(99)),
    ]
    found = facts(job.of(long, many), many)
    other = facts(job.of([*long, "y"], {**many, "NCCL_199": "w"}), {**many, "NCCL_199": "w"})
    assert len(json.dumps(found)) < 2048
    assert found["variables"].startswith("200 of NCCL, TORCH and GLOO: ")
    assert {name for name in found if found[name] != other[name]} == {"argv", "variables"}


@pytest.mark.parametrize(
    "args", ["--api-key s3cr3t", "--hf_token=s3cr3t", "--db.password s3cr3t --lr 1"]
)
def test_arguments_that_look_like_a_secret_are_not_shown(job: Job, args: str) -> None:
    """Facts go to the store, where others read them."""
    assert "s3cr3t" not in of(job, f"train.py {args}")["argv"]


def test_texts_of_several_lines(job: Job) -> None:
    """Facts have one line each: a record with another is refused."""
    environ = {"NCCL_ALGO": "a\nb"}
    found = facts(job.of(["train.py", "a\nb\tc", "\x1b"], environ), environ)
    assert found["argv"].startswith("a\\nb\\tc \\x1b (") and found["NCCL_ALGO"] == "a\\nb"


def test_arguments_of_any_bytes(job: Job) -> None:
    """A name of a file need not be UTF-8."""
    found = facts(job.of(["train.py", "a\udcff", "é"], {}), {})
    json.dumps(found).encode("utf-8")
    assert found["argv"].split()[:-1] == ["a?", "?"]
    assert sys.executable not in json.dumps(found)
