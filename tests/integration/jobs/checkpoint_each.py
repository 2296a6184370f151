"""Kill a save before each of its calls that change something on the disk, one after the other.

``DIR STRIDE MODE…``: for each mode and each number K there is a copy of a directory with two
checkpoints. A fork of this process saves the third there and is killed before call K of ``os`` in
it (see ``checkpoint_fault``); another one loads the latest and saves again. K grows by STRIDE until
a save comes to its end. A mode is ``store``, ``save``, ``aside``, or ``plain``: ``torch.save``
to one name, killed before its write K.

Prints a JSON object for each mode: ``mode``, ``kills``, ``steps`` (how many loaded which step;
-1: what is there cannot be read), ``wrong`` (how many loaded what was not saved), ``left`` (stages
and pieces of removed checkpoints that were left after the next save).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoint_fault  # from the script's own directory
import torch
import torch.distributed.checkpoint.state_dict

import elaunch
import elaunch.training.checkpoint.load
import elaunch.training.checkpoint.save
import elaunch.training.context

NAMES = ("weights", "moments")
KEEP = elaunch.Keep(last=2)


class Dying(io.FileIO):
    """A file whose writer is killed before a write."""

    left = 0

    def write(self, data: Any) -> int:
        """Write, or die."""
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data) or 0


class Count(checkpoint_fault.Patched):
    """Kills this process before its call number ``nth`` that changes something."""

    def _is_it(self, what: str) -> bool:
        name, _, rest = what.partition(" ")
        if not rest or rest.startswith("saver") or (name == "open" and ".tmp-" not in rest):
            return False
        with self.lock:
            self.seen += 1
            if self.seen == self.fault["nth"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return False


def state_of(step: int) -> dict[str, Any]:
    """Return what is saved at a step."""
    return {"step": step, **{name: torch.full((300,), float(step)) for name in NAMES}}


def through_elaunch(directory: Path, mode: str, nth: int) -> str:
    """Load, save the next step; return what was loaded."""
    os.environ["ELAUNCH_CHECKPOINT_DIR"] = str(directory)
    with elaunch.init(announce=False) as ctx:
        state = state_of(0)
        found = ctx.checkpoint.latest()
        if found is not None and mode == "store":
            with ctx.checkpoint.restore_path() as path:
                state = torch.load(path / "deep" / "step.pt", weights_only=True)
                state |= torch.load(path / "tensors.pt", weights_only=True)
        elif found is not None:
            ctx.checkpoint.load(state)
        loaded = verdict(state, 0 if found is None else found.step)
        step = state["step"] + 1
        if nth:
            Count({"directory": str(directory), "nth": nth}).install()
        save(ctx, mode, state_of(step))
    return loaded


def save(ctx: elaunch.Context, mode: str, state: dict[str, Any]) -> None:
    """Save, and keep two."""
    step = state["step"]
    if mode == "store":
        metadata = {"steps_completed": step}
        with ctx.checkpoint.store_path(metadata, keep=KEEP) as (path, _):
            (path / "deep").mkdir()
            torch.save({"step": state.pop("step")}, path / "deep" / "step.pt")
            torch.save(state, path / "tensors.pt")
    else:
        ctx.checkpoint.save(state, step, keep=KEEP, block=mode == "save")
        ctx.checkpoint.wait()


def through_torch(directory: Path, _: str, nth: int) -> str:
    """Do the same in the plain way."""
    path, loaded = directory / "state.pt", "0"
    if path.exists():
        try:
            state = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            return "-1"
        loaded = verdict(state, state["step"])
    directory.mkdir(exist_ok=True)
    with Dying(path, "wb") as file:
        file.left = nth
        torch.save(state_of(int(loaded) + 1), file)
    return loaded


def verdict(state: dict[str, Any], step: int) -> str:
    """Return the step that was loaded, or what is wrong with it."""
    same = all(torch.equal(state[name], state_of(step)[name]) for name in NAMES)
    return str(step) if same and state["step"] == step else f"wrong: {step} {state}"


def fork(directory: Path, mode: str, nth: int = 0) -> str | None:
    """Save in a process of its own; return what it had loaded, None if it was killed."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        work = through_torch if mode == "plain" else through_elaunch
        os.write(writes, work(directory, mode, nth).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        loaded = file.read()
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return loaded
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"{mode}: the process to be killed at call {nth} ended with {status}")
    return None


def each(directory: Path, mode: str, stride: int) -> dict[str, Any]:
    """Go through one mode."""
    base, nth, left, found = directory / f"{mode}-base", 1, 0, Counter[str]()
    for step in (0, 1):
        loaded = fork(base, mode)
        assert loaded == str(step), loaded
    while True:
        copy = directory / f"{mode}-{nth}"
        shutil.copytree(base, copy)
        if fork(copy, mode, nth) is not None:
            break
        found[fork(copy, mode) or "killed"] += 1
        left += sum(len(list(copy.glob(f"{name}/*"))) for name in (".stage", ".trash"))
        shutil.rmtree(copy)
        nth += stride
    steps = {text: count for text, count in found.items() if not text.startswith("wrong")}
    wrong = sum(found.values()) - sum(steps.values())
    kills = sum(found.values())
    return {"mode": mode, "kills": kills, "steps": steps, "wrong": wrong, "left": left}


if __name__ == "__main__":
    for mode in sys.argv[3:]:
        print(json.dumps(each(Path(sys.argv[1]), mode, int(sys.argv[2]))), flush=True)
