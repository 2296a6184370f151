"""Jobs on a GPU with NCCL: the server leaves it alone, and what ranks wait for is seen there, too.

``make gpu`` runs these on a machine that has one. No other target does.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import GPUCOMPILE, GPUSTATE, ONEGPU
from tests.launching import Launcher, wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.executed,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no GPU here"),
]


def failure(elaunch: Launcher) -> dict[str, Any]:
    """Return the JSON report of the round that failed."""
    (path,) = elaunch.state.glob("elaunch/runs/*/failure-0.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("what", ["exit", "kill", "raise", "full"])
def test_a_rank_fails_beside_one_that_waits_in_nccl(elaunch: Launcher, what: str) -> None:
    """One restart; the server has not opened the GPU, before and after it.

    Ranks that fill its memory find it free again.
    """
    done = elaunch.run(["run", "--nproc-per-node=2", "--max-restarts=1", ONEGPU, what])
    assert done.returncode == 0, done
    assert done.stdout.count("ended") == 2 and done.stdout.count("not opened") == 4
    assert "COMPLETED" in done.stderr and ", 1 restart" in done.stderr


TOLD = {
    "absent": r"rank 1 has not entered all_reduce #6; rank 0 has been waiting there for",
    "first": r"rank 1 waits for no other rank; rank 0 has been waiting in all_reduce for",
    "size": r"rank 0 has entered all_reduce #6 with 4 of Float, rank 1 has entered all_reduce #6 "
    r"with 1048576 of Float: the sizes or types differ",
    "name": r"rank 0 has entered all_reduce #6, rank 1 has entered \S+ #6: the collectives differ",
    "order": r"rank 0 waits in all_reduce .*: collectives are entered in different orders",
}


@pytest.mark.parametrize("what", TOLD)
def test_whom_a_rank_waits_for_in_nccl(elaunch: Launcher, what: str) -> None:
    """NCCL's collectives are in a record of their own."""
    flags = ["--nproc-per-node=2", "--hang-timeout=1", "--max-restarts=1"]
    done = elaunch.run(["run", *flags, ONEGPU, what])
    assert done.returncode == 0, done
    found = failure(elaunch)
    assert re.match(TOLD[what], found["culprit"]), found["culprit"]
    assert found["hang"]["source"] == "collectives"


def test_the_rank_that_comes_last_on_the_gpu(elaunch: Launcher) -> None:
    """Where torch measures how long each collective takes; else nothing is said of it."""
    timed, untimed = (
        elaunch.start(
            ["run", "--nproc-per-node=2", f"--run-id={name}", ONEGPU, "late"],
            env={"TORCH_NCCL_ENABLE_TIMING": name},
        )
        for name in ("1", "0")
    )

    def shown(name: str) -> str:
        """Return the status, for which the workers are asked."""
        return elaunch.run(["status", name]).stdout

    wait_until(lambda: "attention: rank 1 arrived last in " in shown("1"))
    untimed.wait_for_line("not opened")
    while untimed.process.poll() is None:
        assert "is last in" not in shown("0")
    assert (timed.wait().returncode, untimed.wait().returncode) == (0, 0)


CODES = {"memory": "E-CUDA-OOM", "index": "E-DEVICE-ASSERT"}


@pytest.mark.parametrize("what", CODES)
def test_causes_on_a_gpu(elaunch: Launcher, what: str) -> None:
    """Real texts of CUDA."""
    done = elaunch.run(["run", "--nproc-per-node=1", ONEGPU, what])
    assert done.returncode != 0
    assert failure(elaunch)["code"] == CODES[what], done


def test_a_restart_after_a_compilation(elaunch: Launcher) -> None:
    """What the server imports for it asks for GPUs, by NVML: its next worker can use one."""
    done = elaunch.run(["run", "--nproc-per-node=1", "--max-restarts=1", GPUCOMPILE])
    assert done.returncode == 0 and done.stdout.count("compiled") == 2, done.stderr
    assert "exited with code 3" in done.stderr and "used the GPU" not in done.stderr


def test_modules_that_are_imported_in_the_server(elaunch: Launcher, tmp_path: Path) -> None:
    """To ask whether there is a GPU is right, to use it is an error."""
    (tmp_path / "asks.py").write_text("import torch\nassert torch.cuda.is_available()\n")
    (tmp_path / "uses.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n")
    flags = ["run", "--nproc-per-node=1"]
    path = {"PYTHONPATH": str(tmp_path)}
    done = elaunch.run([*flags, "--preload=torch,asks", ONEGPU, "nothing"], env=path)
    assert done.returncode == 0 and "ended" in done.stdout, done
    done = elaunch.run([*flags, "--preload=torch,uses", ONEGPU, "nothing"], env=path)
    assert done.returncode == 2 and "a module used the GPU while it was imported" in done.stderr


def test_a_state_on_a_gpu(elaunch: Launcher, tmp_path: Path) -> None:
    """The copy that the agent has is whole when the worker is killed right after the save."""
    flags = ["--nproc-per-node=1", "--max-restarts=1", f"--checkpoint-dir={tmp_path}/ckpt"]
    done = elaunch.run(["run", *flags, GPUSTATE])
    assert done.returncode == 0, done
    assert re.findall("resumed (.*)", done.stdout) == ["0 cuda:0", "3 cuda:0"]
    assert "ends 6.0 6.0" in done.stdout
