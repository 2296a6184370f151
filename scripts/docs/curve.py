"""Train examples/chars_steps.py undisturbed and with kills, and draw both curves of the loss.

    python scripts/docs/curve.py                 docs/pictures/curve.svg, as `make pictures` does
    python scripts/docs/curve.py --steps 100 --every 3 --out FILE

In the second run SIGKILL ends a random rank every few seconds. Both runs have to report the same
bits: the loss of each step, of those that were done twice, too, and the digest of the weights. Else
it ends with 1, and draws nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaunch.training.metrics import reading

ROOT = Path(__file__).resolve().parents[2]
ELAUNCH = Path(sys.executable).with_name("elaunch")
PRELOAD = "torch,torch._dynamo,torch.distributed.checkpoint,pydoc_data.topics"
"""What the script and torch import later: the fork server does it once, for all restarts."""
SAVE_EVERY = 5
"""Steps; those since the last save are done again."""
DEADLINE = 1800.0
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 400, 60, 60, 20, 50


@dataclass
class Training:
    """What came of one run: its losses by step, its last line, and the kills: step and rank."""

    losses: dict[int, float] = field(default_factory=dict)
    last_line: str = ""
    kills: list[tuple[int, int]] = field(default_factory=list)


class Different(Exception):
    """Two values that should have had the same bits."""


def train(place: Path, name: str, words: argparse.Namespace, every: float | None) -> Training:
    """Run the example; ``every``: seconds from one kill to the next."""
    foreign = ("PET_", "ELAUNCH_", "TORCHELASTIC_")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    environ |= {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(place)}
    command = [str(ELAUNCH), "run", "--run-id", name, f"--nproc-per-node={words.ranks}"]
    command += ["--max-restarts=1000", f"--checkpoint-dir={place / name}", f"--preload={PRELOAD}"]
    command += [str(ROOT / "examples" / "chars_steps.py"), f"--steps={words.steps}"]
    command += [f"--save-every={SAVE_EVERY}"]
    found = Training()
    with (place / f"{name}.log").open("w+") as output:
        job = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + DEADLINE
            while job.poll() is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"{name} has not ended after {DEADLINE:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(every or 1.0)
                if every is not None and job.poll() is None:
                    kill_one(name, environ, found)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(60)
        output.seek(0)
        shown = output.read()
    if job.returncode:
        raise SystemExit(f"{name} has ended with {job.returncode}\n{shown}")
    found.last_line = re.findall(r"^\d+ steps: \w+$", shown, re.MULTILINE)[-1]
    for row in reading.read(reading.directories(name, environ)).rows:  # superseded ones, too
        step, loss = row.values["steps_completed"], row.values["loss"]
        if found.losses.setdefault(step, loss) != loss:
            raise Different(f"step {step} was done twice: loss {found.losses[step]!r} and {loss!r}")
    return found


def kill_one(name: str, environ: Mapping[str, str], found: Training) -> None:
    """Kill a random rank, if the job trains: if a step was done since the last restart."""
    command = [str(ELAUNCH), "status", "--json", name]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    status: dict[str, Any] = json.loads(shown.stdout) if shown.returncode == 0 else {}
    workers = [one for one in status.get("workers", []) if one["state"] == "RUNNING"]
    progress = (status.get("progress") or {}).get("workers", [])
    step = max((one["step"] or 0 for one in progress), default=0)
    if not workers or not step:
        return
    victim = random.choice(workers)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim["pid"], signal.SIGKILL)
        found.kills.append((step, victim["rank"]))
        print(f"step {step}: SIGKILL to rank {victim['rank']}", flush=True)


def compare(calm: Training, killed: Training, steps: int) -> None:
    """Raise Different unless both have all steps, with the same bits."""
    for one in (calm, killed):
        if sorted(one.losses) != list(range(1, steps + 1)):
            missing = sorted(set(range(1, steps + 1)) - one.losses.keys())
            raise Different(f"no loss of the steps {missing[:9]} is there")
    for step, loss in calm.losses.items():
        if killed.losses[step] != loss:
            raise Different(f"step {step}: loss {loss!r} and, with kills, {killed.losses[step]!r}")
    if calm.last_line != killed.last_line:
        raise Different(f"{calm.last_line} and, with kills, {killed.last_line}")


def draw(calm: Training, killed: Training) -> str:
    """Return the picture: the undisturbed curve is broad, the other one lies on it."""
    last, highest = max(calm.losses), math.ceil(max(calm.losses.values()))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / highest)

    def curve(losses: Mapping[int, float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(losses.items()))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def words(at: float, height: float, said: str, style: str = "") -> str:
        return f'<text x="{at:.0f}" y="{height:.0f}" {style}>{said}</text>'

    broad, thin = 'stroke="#f5b041" stroke-width="9"', 'stroke="#1f3a5f" stroke-width="1.5"'
    dashes = 'stroke="#c0392b" stroke-dasharray="3"'
    low, middle = HEIGHT - BOTTOM, 'text-anchor="middle"'
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for loss in range(highest + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(words(LEFT - 10, y(loss) + 5, str(loss), 'text-anchor="end"'))
    steps = range(0, last + 1, _spacing(last))
    parts += [words(x(step), low + 20, str(step), middle) for step in steps]
    parts.append(words(x(last / 2), low + 40, "step", middle))
    parts += [f'<path d="M{x(step):.1f} {TOP}V{low}" {dashes}/>' for step, _ in killed.kills]
    parts += [curve(calm.losses, broad), curve(killed.losses, thin)]
    legend: Sequence[tuple[str, str]] = (
        (broad, "loss, undisturbed"),
        (thin, f"loss, a rank killed every few seconds ({len(killed.kills)} times)"),
        (dashes, "a SIGKILL"),
    )
    at = LEFT
    for style, said in legend:
        parts.append(f'<path d="M{at} 28h30" {style}/>')
        parts.append(words(at + 38, 33, said))
        at += 62 + 8 * len(said)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
    return "\n".join([f'{head}font-family="sans-serif" font-size="15">', *parts, "</svg>\n"])


def _spacing(last: int) -> int:
    return next(n for n in (10, 20, 50, 100, 200, 500, 1000, last + 1) if last / n <= 10)


def main() -> int:
    """Train, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "curve.svg")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        calm = train(Path(directory), "calm", words, None)
        killed = train(Path(directory), "killed", words, words.every)
    try:
        compare(calm, killed, words.steps)
    except Different as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{calm.last_line}, {len(killed.kills)} kills, the same bits in each step")
    words.out.write_text(draw(calm, killed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
