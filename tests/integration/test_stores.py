"""Stores and process groups that scripts make: after a restart, again in one process, private ones.

Under torchrun 2.13 a group that is made again in one process fails, and a private ``tcp://`` store
hangs; so torchrun is no reference here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parity.launches import HERE
from tests.launching import Launcher

pytestmark = pytest.mark.slow

# torch's own message where rank 0 may not host the store at the launcher's address.
NOTE = re.compile(r"TCPStore\.cpp:\d+\] \[c10d\] The server socket on \d+ has failed to bind")


def results(directory: Path) -> dict[str, Any]:
    """Return what each rank of each round found: "<round>-<rank>" → results."""
    return {
        path.stem.removeprefix("stores-"): json.loads(path.read_text())
        for path in sorted(directory.glob("stores-*.json"))
    }


@pytest.mark.parametrize(
    ("options", "lines", "again"),
    [
        pytest.param(["--start-method", "spawn"], 2, [], marks=pytest.mark.trial),
        ([], 0, ["again"]),
    ],
    ids=["spawn", "fork"],
)
def test_stores_of_scripts(
    elaunch: Launcher, tmp_path: Path, options: list[str], lines: int, again: list[str]
) -> None:
    """In both rounds: env://, a part of the group, a TCPStore, tcp://, and again where mended."""
    words = ["run", *options, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = elaunch.run([*words, HERE / "stores.py", *again], env={"PARITY_OUT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert sorted(found) == ["0-0", "0-1", "1-0", "1-1"]
    for result in found.values():
        assert result.pop("round") in ("0", "1")
        assert result.pop("agent store") == "1"
        assert result.pop("own store") == "a value"
        assert result.pop("variable") is True
        assert set(result.values()) == {3}
        assert ("again in one process" in result) == bool(again)
    assert len(NOTE.findall(done.stderr)) == lines  # one per round, of rank 0


# Nothing but the collective keeps its tensor: with torch up to 2.7 one of a few of these hangs.
AGAIN_AND_AGAIN = """
import torch, torch.distributed as dist
for _ in range(30):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
"""


def test_groups_end_that_hang_under_an_old_torchrun(elaunch: Launcher, tmp_path: Path) -> None:
    """Each right after its last collective; a thread of gloo has yet to let go of the tensor."""
    script = tmp_path / "s.py"
    script.write_text(AGAIN_AND_AGAIN)
    done = elaunch.run(["run", "--nproc-per-node", "2", script])
    assert done.returncode == 0, done.stderr


LEFT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
pid = torch.tensor([os.getpid()])
dist.broadcast(pid, 0)
if dist.get_rank() == 0:
    left = dist.all_reduce(torch.ones(4), async_op=True)  # nobody waits for it
else:
    time.sleep(1)
    with open(f"/proc/{pid.item()}/stat") as file:
        print(file.read().rpartition(")")[2].split()[0])
    dist.all_reduce(torch.ones(4), async_op=True)
"""


@pytest.mark.executed  # the tests' own process holds more than the server does
def test_what_a_group_has_still_to_do_is_done_at_the_end(elaunch: Launcher, tmp_path: Path) -> None:
    """The script neither waits for a collective nor destroys the group: rank 0 ends only when the
    other has entered it, too. (How that ends for the other is up to gloo: rank 0 may be gone.)
    """
    script = tmp_path / "s.py"
    script.write_text(LEFT)
    done = elaunch.run(["run", "--nproc-per-node", "2", script])
    assert done.stdout in ("S\n", "R\n"), done.stderr


# As PyTorch's DDP tutorial has it, and with the address of the worker itself.
SPAWNS = """
import os, socket, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def demo(rank, how, port):
    address = {}
    if how == "variables":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    elif how == "tcp":
        address["init_method"] = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", rank=rank, world_size=2, **address)
    both = torch.ones(1) * (rank + 1)
    dist.all_reduce(both)
    os.write(1, f"{how} {both.item()}\\n".encode())  # both ranks write to one pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(demo, args=(sys.argv[1], port), nprocs=2)
"""


@pytest.mark.trial
@pytest.mark.parametrize("how", ["variables", "tcp", "worker"])
def test_ranks_that_a_worker_spawns_find_each_other(
    elaunch: Launcher, tmp_path: Path, how: str
) -> None:
    """They have the worker's variables and nothing of what elaunch mends in it."""
    script = tmp_path / "s.py"
    script.write_text(SPAWNS)
    done = elaunch.run(["run", script, how])
    assert (done.returncode, done.stdout) == (0, f"{how} 3.0\n" * 2), done.stderr
    assert len(NOTE.findall(done.stderr)) == (how == "worker")
