"""The libraries that are tried as clients of elaunch, and what a person types for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHARED = "venv"
"""Name of the environment of all libraries that need none of their own."""


@dataclass(frozen=True)
class Library:
    """One library with its script.

    Args:
        name: how the library calls itself.
        package: what pip installs, and whose version is shown.
        script: name of the file in ``jobs``.
        arguments: of the script; ``DIR`` stands for the directory of the checkpoints, ``CONFIG``
            for the file beside the script that ends with ``.yaml``.
        resume: arguments of the script that name the checkpoint, for elaunch alone.
        flags: of ``elaunch run``; without any the script finds its checkpoint by itself.
        saved: pattern of the checkpoints in the directory.
        enough: how many of them there are when a rank is killed.
        age: seconds since they were written, for a library that writes over the ones before.
        env: for launcher and script.
        install: words for pip besides the package's name.
        meeting: how two nodes meet, ``c10d`` or ``etcd``, which torch below 2.8 needs.
        venv: name of the environment. In one of its own the library chooses the versions, and it
            is tried only by its name.
    """

    name: str
    package: str
    script: str
    arguments: Sequence[str] = ("--dir", "DIR")
    resume: Sequence[str] = ()
    flags: Sequence[str] = ()
    saved: str = "step*"
    enough: int = 2
    age: float = 0.0
    env: Sequence[str] = ()
    install: Sequence[str] = ()
    meeting: str = "c10d"
    venv: str = SHARED

    def plain(self, script: str, directory: str) -> list[str]:
        """Return script and arguments as they are typed for torchrun."""
        config = script.removesuffix(".py") + ".yaml"
        words = (word.replace("DIR", directory) for word in self.arguments)
        return [script, *(word.replace("CONFIG", config) for word in words)]

    def supervised(self, script: str, directory: str) -> list[str]:
        """Return the same for elaunch, with its flags before and the checkpoint behind."""
        flags = [word.replace("DIR", directory) for word in self.flags]
        return [*flags, *self.plain(script, directory), *self.resume]

    def line(self) -> str:
        """Return the line to type on one node."""
        words = [f"'{word}'" if set(word) & set("*[") else word for word in self.supervised(*TYPED)]
        start = "elaunch run --nproc-per-node 2 --max-restarts 3"
        return " ".join([*self.env, start, *words])


TYPED = ("train.py", "ckpts")
"""Script and directory in the lines that are shown."""
CHECKPOINTS = ("--checkpoint-dir", "DIR")
LIBRARIES = (
    Library(
        "PyTorch's DDP tutorial",
        "torch",
        "pytorch_snapshot.py",
        arguments=("20", "1", "--snapshot", "DIR/snapshot.pt"),
        saved="snapshot.pt",
        enough=1,
    ),
    Library(
        "Accelerate",
        "accelerate",
        "accelerate_state.py",
        arguments=("--output_dir", "DIR"),
        resume=("--resume_from_checkpoint", "{checkpoint}"),
        flags=CHECKPOINTS,
    ),
    Library(
        "Lightning, Trainer",
        "lightning",
        "lightning_trainer.py",
        resume=("--ckpt_path", "{checkpoint}"),
        flags=CHECKPOINTS,
        saved="*.ckpt",
    ),
    Library(
        "Lightning, Fabric",
        "lightning",
        "lightning_fabric.py",
        resume=("--resume", "{checkpoint}"),
        flags=CHECKPOINTS,
        saved="*.ckpt",
    ),
    Library(
        "Transformers, Trainer",
        "transformers",
        "transformers_trainer.py",
        arguments=tuple(
            "--output_dir DIR --use_cpu --num_train_epochs 2 --per_device_train_batch_size 4"
            " --save_steps 10 --report_to none".split()
        ),
        resume=("--resume_from_checkpoint", "{checkpoint}"),
        flags=CHECKPOINTS,
        saved="checkpoint-*",
        install=("accelerate",),
    ),
    Library(
        "Ignite",
        "pytorch-ignite",
        "ignite_engine.py",
        resume=("--resume", "{checkpoint}"),
        flags=(*CHECKPOINTS, "--checkpoint-glob", "checkpoint_*.pt"),
        saved="checkpoint_*.pt",
    ),
    Library(
        "torchdata",
        "torchdata",
        "torchdata_loader.py",
        resume=("--resume", "{checkpoint}"),
        flags=(*CHECKPOINTS, "--checkpoint-glob", "step_*.pt"),
    ),
    Library(
        "DeepSpeed on the CPU",
        "deepspeed",
        "deepspeed_zero.py",
        flags=CHECKPOINTS,
        saved="global_step*",
        env=("DS_ACCELERATOR=cpu",),
        install=("--no-build-isolation",),
    ),
    Library(
        "Composer",
        "mosaicml",
        "composer_trainer.py",
        resume=("--load_path", "{checkpoint}"),
        flags=(*CHECKPOINTS, "--checkpoint-glob", "ep*-rank0.pt"),
        saved="ep*-rank0.pt",
        meeting="etcd",
        venv="composer",
    ),
    Library(
        "torchtune, its recipe",
        "torchtune",
        "torchtune_recipe.py",
        arguments=("--config", "CONFIG", "output_dir=DIR"),
        resume=(
            "checkpointer.checkpoint_files=[{checkpoint}/model-00001-of-00001.bin]",
            "resume_from_checkpoint={checkpoint}",
        ),
        flags=(*CHECKPOINTS, "--checkpoint-glob", "epoch_*"),
        saved="recipe_state/recipe_state.pt",
        enough=1,
        age=0.2,
        install=("torch==2.13.0", "torchao<0.14"),
        venv="torchtune",
    ),
)
