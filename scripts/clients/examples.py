"""Run PyTorch's examples as they are: ``make clients EXAMPLES=DIRECTORY``.

DIRECTORY is a checkout of pytorch/examples, of which nothing is kept here. Each example runs on one
node under torchrun and under ``elaunch run``, and on two nodes under ``elaunch run``, with the same
arguments. A cell of the table has the exit code and the line that tells how it ended. Most of the
examples ask for CUDA, and say so.

Images are made up beforehand for those that read them. ``imagenet`` saves: a worker gets a SIGKILL
when an epoch is saved, and has to go on from there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import clients
from libraries import Library

ENVIRONMENT = Library(
    "PyTorch's examples",
    "torchvision",
    "examples",
    install=("gymnasium", "hydra-core", "boto3", "fsspec", "requests", "aiohttp"),
    venv="examples",
)
ERROR = re.compile(r"\b(?!ChildFailed)\w+Error: [^\n]{,70}")
ENDED = re.compile(
    r"Unable to locate .*Exiting|Training epoch \d+|Acc@1 \d\S*|Accuracy:? \S+|Finish training"
)
RESUMED = re.compile(r"loaded checkpoint .*\(epoch (\d+)\)")
IMAGES = Path(__file__).resolve().parent / "jobs" / "images.py"
"""Makes a tiny ImageNet and a tiny MNIST."""
SAVED = "checkpoint.pth.tar"


@dataclass(frozen=True)
class Example:
    """One example.

    Args:
        path: in the checkout.
        arguments: as they are typed.
        workers: of one node; on two nodes each has one.
        saves: it saves and resumes, and a worker is killed.
        ranked: it reads no variables: a shell gives it rank, size and where rank 0 is.
    """

    path: str
    arguments: Sequence[str] = ()
    workers: int = 2
    saves: bool = False
    ranked: bool = False


EXAMPLES = (
    Example(
        "imagenet/main.py",
        (
            *"../imagenet -a squeezenet1_1 -b 4 -j 1 --epochs 4 --seed 0 --no-accel".split(),
            *"--dist-url env:// --dist-backend gloo --resume".split(),
            SAVED,
        ),
        workers=1,
        saves=True,
    ),
    Example("mnist/main.py", ("--no-accel", "--epochs", "2")),
    Example("mnist_rnn/main.py", ("--epochs", "2")),
    Example("mnist_hogwild/main.py", ("--epochs", "2")),
    Example("distributed/ddp-tutorial-series/multigpu_torchrun.py", ("4", "2")),
    Example("distributed/ddp-tutorial-series/multinode.py", ("4", "2")),
    Example("distributed/ddp/example.py"),
    Example("distributed/minGPT-ddp/mingpt/main.py"),
    Example("distributed/FSDP2/example.py"),
    Example("distributed/tensor_parallelism/tensor_parallel_example.py"),
    Example("distributed/tensor_parallelism/sequence_parallel_example.py"),
    Example("distributed/tensor_parallelism/fsdp_tp_example.py"),
    Example("distributed/rpc/ddp_rpc/main.py"),
    Example(
        "distributed/rpc/parameter_server/rpc_parameter_server.py",
        (
            *"--world_size $WORLD_SIZE --rank $RANK".split(),
            *"--master_addr $MASTER_ADDR --master_port $MASTER_PORT".split(),
        ),
        ranked=True,
    ),
)


def command(example: Example, root: Path, launcher: Sequence[str]) -> list[str]:
    """Return the command of one node."""
    python = str(clients.python(ENVIRONMENT))
    words = [str(root / example.path), *example.arguments]
    if example.ranked:
        words = ["--no-python", "bash", "-c", " ".join(["exec", python, *words])]
    return [python, "-m", *launcher, *words]


def run(example: Example, commands: Sequence[Sequence[str]], place: Path, *, kill: bool) -> str:
    """Run the command of each node in a directory of its own; return the cell."""
    running: list[subprocess.Popen[bytes]] = []
    homes = [place / f"node{number}" for number in range(len(commands))]
    try:
        for argv, home in zip(commands, homes, strict=True):
            home.mkdir()
            env = clients.environment(ENVIRONMENT, home / "state")
            with (home / "output.txt").open("wb") as file:
                running.append(subprocess.Popen(argv, cwd=home, env=env, stdout=file, stderr=file))
        if kill:
            library = Library("", "", "", saved=SAVED, enough=1, age=1.0, venv=ENVIRONMENT.venv)
            env = clients.environment(ENVIRONMENT, homes[-1] / "state")
            clients.kill_when_saved(library, homes[-1], env)
        until = time.monotonic() + clients.DEADLINE
        codes = [process.wait(max(0.0, until - time.monotonic())) for process in running]
    except subprocess.TimeoutExpired:
        return f"not within {clients.DEADLINE} s"
    except clients.Failed as failure:
        return f"**{failure}**"
    finally:
        for process in running:
            process.terminate()
            process.wait(clients.DEADLINE)
    text = "".join((home / "output.txt").read_text(errors="replace") for home in homes)
    ended = [*ENDED.finditer(text)]
    told = ERROR.search(text) if any(codes) else ended[-1] if ended else None
    resumed = f", from epoch {max(RESUMED.findall(text), key=int)}" if RESUMED.search(text) else ""
    return f"{max(codes, key=abs)}{resumed}: {told[0] if told else 'nothing'}"


def row(example: Example, root: Path, images: Path) -> list[str]:
    """Run an example three times; return its row of the table."""
    elaunch = ["elaunch", "run", "--rdzv-id", "client", *clients.RESTARTS[: 2 * example.saves]]
    at = f"127.0.0.1:{clients.free_port()}"
    ways = [
        ["torch.distributed.run", "--nproc-per-node", str(example.workers)],
        [*elaunch, "--nproc-per-node", str(example.workers)],
        [*elaunch, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", at],
    ]
    cells = []
    for way in ways:
        place = Path(tempfile.mkdtemp(prefix="clients-"))
        try:
            for name in ("imagenet", "data"):
                (place / name).symlink_to(images / name)
            each = [command(example, root, way)] * (2 if "--nnodes" in way else 1)
            kill = example.saves and way[0] == "elaunch"
            cells.append(run(example, each, place, kill=kill))
            kept = clients.PLACE / "results" / f"{example.path.replace('/', ' ')} {len(cells)}.txt"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place / "node0" / "output.txt", kept)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    print(f"{example.path}: {'; '.join(cells)}", flush=True)
    return [f"`{example.path}`", *cells]


def main() -> int:
    """Print the table of the examples whose path contains one of the words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    asked = parser.parse_args()
    clients.prepare(ENVIRONMENT)
    chosen = [one for one in EXAMPLES if any(word in one.path for word in asked.only)]
    with tempfile.TemporaryDirectory(prefix="clients-") as images:
        argv = [str(clients.python(ENVIRONMENT)), str(IMAGES), images]
        subprocess.run(argv, check=True, timeout=clients.DEADLINE)
        rows = [row(example, asked.checkout.resolve(), Path(images)) for example in chosen]
    for cells in (["example", "torchrun", "one node", "two nodes"], ["---"] * 4, *rows):
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
