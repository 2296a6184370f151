"""A small training whose every step is a function of the step before: bitwise, on any machine.

``DIR MODE STEPS EVERY [NAME=VALUE…]``: saves after each EVERY-th step in MODE's way, resumes from
the latest, and notes in ``DIR/notes.RANK`` what it loaded, trained and saved.

==========  ====================================================================================
mode        saves by
==========  ====================================================================================
none        nothing
store       ``store_path(shard=True)``: the tensors dealt out to the ranks, a file of each rank
save        ``save``
aside       ``save(block=False)``
==========  ====================================================================================

=============  =================================================================================
word           means
=============  =================================================================================
time=SECONDS   each step takes that long beside its own work (0)
keep=N         of the checkpoints, the newest N stay (2; 0: all)
wide=N         columns of the model: 100 are 0.5 MB of state (8)
die=R.S        in round 0, rank R is killed right after its call that saved step S has returned
term=R.S       the same, but it is its agent that is sent SIGTERM, and the rank sleeps
busy=skip      ``aside`` skips a save while another is in flight (wait)
calm           a save that fails is noted, and the training goes on
hold=PATH      wait for PATH at the end, before the context is closed
=============  =================================================================================

A line of the notes is a JSON object: ``what`` is ``loaded``, ``trained``, ``saved``, ``refused`` or
``done``, with ``step``, ``round``, ``world``, ``at`` (seconds of the monotonic clock), ``digest``
of all that is the same on all ranks, and ``own``, that of what is this rank's.
``DIR/pid.ROUND.RANK`` holds each worker's pid.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_fault  # from the script's own directory
import torch
import torch.distributed as dist
from torch import nn

import elaunch

BATCH, SAMPLES = 4, 96


class Training:
    """Model, optimizer, place in the data and random state of one rank."""

    def __init__(self, wide: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, wide), nn.Tanh(), nn.Linear(wide, wide))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = elaunch.ElasticDistributedSampler(range(SAMPLES), seed=3)
        self.noise = torch.Generator().manual_seed(100 + self.rank)
        self.step = 0
        # An optimizer without a state has other keys than one with it.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def train(self) -> None:
        """Make one step, on all ranks together."""
        self.step += 1
        if self.sampler.offset >= SAMPLES:
            self.sampler.set_epoch(self.sampler.epoch + 1)
        numbers = [number for number, _ in zip(self.sampler, range(BATCH), strict=False)]
        x = torch.sin(torch.tensor(numbers).float().unsqueeze(1) * torch.arange(1.0, 5.0))
        x = x + 0.1 * torch.rand(x.shape, generator=self.noise)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        dist.all_reduce(gradients)
        at = 0
        for parameter in self.model.parameters():
            mean = gradients[at : at + parameter.numel()] / self.world
            parameter.grad.copy_(mean.view_as(parameter))
            at += parameter.numel()
        self.optimizer.step()
        self.sampler.advance(len(numbers))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all that is the same on all ranks, by name; the tensors themselves."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
        return found

    def state(self) -> dict[str, Any]:
        """Return what ``save`` and ``load`` take."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "noise": elaunch.PerRank(Noise(self.noise), on_fewer_ranks="drop"),
        }

    def digests(self) -> dict[str, str]:
        """Return the digests of what all have and of what this rank has."""
        total = hashlib.sha256(f"{self.step} {self.sampler.epoch} {self.sampler.offset}".encode())
        for name, tensor in sorted(self.tensors().items()):
            total.update(name.encode() + tensor.detach().numpy().tobytes())
        own = hashlib.sha256(self.noise.get_state().numpy().tobytes())
        return {"digest": total.hexdigest()[:16], "own": own.hexdigest()[:16]}


class Noise:
    """A generator as an object with ``state_dict``."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set it."""
        self.generator.set_state(state["state"])


class Store:
    """Mode ``store``: each rank writes every N-th tensor, and its own file."""

    def save(self, ctx: elaunch.Context, it: Training, keep: elaunch.Keep | None) -> None:
        """Save."""
        metadata = {"steps_completed": it.step, f"rank_{it.rank}": "ok"}
        with ctx.checkpoint.store_path(metadata, shard=True, keep=keep) as (path, _):
            mine = sorted(it.tensors().items())[it.rank :: it.world]
            torch.save(dict(mine), path / f"tensors-{it.rank}.pt")
            own = {"noise": it.noise.get_state(), "sampler": it.sampler.state_dict()}
            (path / "own").mkdir()
            torch.save(own, path / "own" / f"{it.rank}.pt")

    def load(self, ctx: elaunch.Context, it: Training) -> int | None:
        """Load into ``it`` and return the step."""
        latest = ctx.checkpoint.latest()
        if latest is None:
            return None
        with ctx.checkpoint.restore_path() as path:
            found: dict[str, torch.Tensor] = {}
            for rank in range(latest.world_size):
                found |= torch.load(path / f"tensors-{rank}.pt", weights_only=True)
            own = torch.load(path / "own" / f"{it.rank % latest.world_size}.pt")
        with torch.no_grad():
            for name, tensor in it.tensors().items():
                tensor.copy_(found.pop(name))
        assert not found, found.keys()
        it.noise.set_state(own["noise"])
        it.sampler.load_state_dict(own["sampler"])
        return latest.step


class Save:
    """Modes ``save`` and ``aside``."""

    def __init__(self, block: bool) -> None:
        self.block = block
        self.busy: Any = "wait"

    def save(self, ctx: elaunch.Context, it: Training, keep: elaunch.Keep | None) -> None:
        """Save."""
        ctx.checkpoint.save(it.state(), it.step, keep=keep, block=self.block, when_busy=self.busy)

    def load(self, ctx: elaunch.Context, it: Training) -> int | None:
        """Load into ``it`` and return the step."""
        found = ctx.checkpoint.load(it.state())
        return found.step if found else None


class Nothing:
    """Mode ``none``."""

    def save(self, ctx: elaunch.Context, it: Training, keep: elaunch.Keep | None) -> None:
        """Do nothing."""

    def load(self, ctx: elaunch.Context, it: Training) -> int | None:
        """Find nothing."""
        return None


MODES = {"none": Nothing(), "store": Store(), "save": Save(True), "aside": Save(False)}


def run(ctx: elaunch.Context, directory: Path, words: list[str]) -> None:
    """Train from where the latest checkpoint is to the end."""
    mode, steps, every = MODES[words[0]], int(words[1]), int(words[2])
    given = dict(word.partition("=")[::2] for word in words[3:])
    last = int(given.get("keep", 2))
    keep = elaunch.Keep(last=last) if last else None
    it = Training(int(given.get("wide", 8)))
    if isinstance(mode, Save):
        mode.busy = given.get("busy", "wait")

    def note(what: str, **more: Any) -> None:
        line = {"what": what, "step": it.step, "round": ctx.info.round, "world": it.world}
        line["at"] = time.monotonic()
        text = json.dumps({**line, **it.digests(), **more}) + "\n"
        os.write(notes, text.encode())

    notes = os.open(directory / f"notes.{it.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = mode.load(ctx, it)
    if step is not None:
        it.step = step
        latest = ctx.checkpoint.latest()
        assert latest is not None
        note("loaded", name=latest.name, saved_by=latest.world_size)
    while it.step < steps:
        it.train()
        note("trained")
        time.sleep(float(given.get("time", 0)))
        if it.step % every:
            continue
        try:
            mode.save(ctx, it, keep)
        except elaunch.SaveError as error:
            if "calm" not in given:
                raise
            note("refused", error=str(error))
            continue
        note("saved")
        now = f"{it.rank}.{it.step}"
        if given.get("die") == now and ctx.info.round == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if given.get("term") == now and not (directory / "termed").exists():
            (directory / "termed").touch()
            os.kill(int((directory / "agent.0").read_text()), signal.SIGTERM)
            time.sleep(60)
    if words[0] == "aside":
        ctx.checkpoint.wait()
    note("done")
    while "hold" in given and not Path(given["hold"]).exists():
        time.sleep(0.005)


def main() -> None:
    """Open the context, and train."""
    directory = Path(sys.argv[1])
    rank, number = os.environ["RANK"], os.environ["ELAUNCH_ROUND"]
    (directory / f"pid.{number}.{rank}").write_text(str(os.getpid()))
    checkpoint_fault.arm("worker")
    with elaunch.init(timeout=60, announce=False) as ctx:
        dist.init_process_group("gloo")
        run(ctx, directory, sys.argv[2:])
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
