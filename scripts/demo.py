"""Train on real data with two workers, kill one in the middle, tell what it cost.

Runs ``elaunch run … examples/digits_ddp.py`` as a user would. Once a checkpoint is committed and
training has gone on, the worker of rank 1 gets a SIGKILL from outside. The end of the output says
what happened, what was lost and how long the recovery took; the exit status is 1 where the job did
not do what it should: one restart, from that checkpoint, to more than 95 % test accuracy.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ELAUNCH = Path(sys.executable).with_name("elaunch")
SCRIPT = Path("examples/digits_ddp.py")
RUN = "digits-demo"
GOAL = 95.0
"""Test accuracy to reach, in percent."""
DEADLINE = 120
"""Seconds for the whole job, about ten times what it takes."""
ASK_AT = 40
"""At this step ``elaunch status`` is asked for the worker's pid."""
FIRST_CHECKPOINT = 100
"""The kill waits for a checkpoint of this step or a later one."""
STEPS_AFTER = 12
"""So many steps after the checkpoint the worker is killed: they are what is lost."""
PRELOAD = "torch,torch._dynamo,sklearn.datasets,sklearn.model_selection"
"""What the script imports, and what torch imports when an optimizer is made: with these in the fork
server a restart repeats no import."""
BATCH = 64
SHOWN_EVERY = 40

STEP = re.compile(r"^step (\d+) epoch")
RESUMED = re.compile(r"^resumed from (\S+): step (\d+)")
FINISHED = re.compile(r"^finished: step (\d+) test accuracy ([\d.]+)%")


@dataclass
class Story:
    """What was seen from outside, in seconds of this process's monotonic clock."""

    victim: int = 0
    """The pid of the worker of rank 1 in the first round."""
    killed_at: float = 0.0
    steps_before: int = 0
    """The last step that the first round logged."""
    resumes: list[tuple[str, int]] = field(default_factory=list)
    """Checkpoint and step of each ``resumed from`` line."""
    again_at: float = 0.0
    """When the first step after the restart was logged."""
    steps: int = 0
    accuracy: float = 0.0


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside the block after ``seconds``."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the job did not end within {seconds} s")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def environment(state: str) -> dict[str, str]:
    """Return this environment without another launcher's settings, with a state directory."""
    foreign = ("PET_", "ELAUNCH_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # One thread per worker: the network is small, and the machine may have two cores.
    return kept | {"XDG_STATE_HOME": state, "OMP_NUM_THREADS": "1"}


def record(env: dict[str, str]) -> dict[str, Any]:
    """Return what ``elaunch status --json`` says of the job."""
    argv = [str(ELAUNCH), "status", "--json", RUN]
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=20)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def due(step: int, checkpoints: Path) -> bool:
    """Return whether training has gone on far enough after a committed checkpoint."""
    newest = max(checkpoints.glob("step_*.pt"), default=None)
    saved = int(newest.stem.removeprefix("step_")) if newest else 0
    return FIRST_CHECKPOINT <= saved <= step - STEPS_AFTER


def take_line(story: Story, line: str, env: dict[str, str], checkpoints: Path) -> None:
    """Follow the job by one line of its output; kill the worker when the moment has come."""
    if match := STEP.match(line):
        step = int(match[1])
        if story.resumes:
            story.again_at = story.again_at or time.monotonic()
            return
        story.steps_before = step
        if step == ASK_AT:
            story.victim = next(w["pid"] for w in record(env)["workers"] if w["rank"] == 1)
        elif story.victim and not story.killed_at and due(step, checkpoints):
            os.kill(story.victim, signal.SIGKILL)
            story.killed_at = time.monotonic()
            print(f"  ** SIGKILL to the worker of rank 1, pid {story.victim}", flush=True)
    elif match := RESUMED.match(line):
        story.resumes.append((match[1], int(match[2])))
    elif match := FINISHED.match(line):
        story.steps, story.accuracy = int(match[1]), float(match[2])


def shown(line: str) -> bool:
    """Return whether a line is worth the screen: each step is logged, few are shown."""
    match = STEP.match(line)
    return match is None or int(match[1]) % SHOWN_EVERY == 0


def run_job(env: dict[str, str], checkpoints: Path) -> tuple[int, Story]:
    """Run the job and kill one of its workers; return its exit status and what was seen."""
    options = f"--nproc-per-node 2 --max-restarts 3 --rdzv-id {RUN}".split()
    options += ["--preload", PRELOAD]
    options += ["--checkpoint-dir", str(checkpoints), "--checkpoint-glob", "step_*.pt"]
    script = [str(SCRIPT), *f"--log-every 1 --step-seconds 0.01 --batch-size {BATCH}".split()]
    print("$ elaunch run", *options, *script, flush=True)
    story = Story()
    with subprocess.Popen(
        [ELAUNCH, "run", *options, *script],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if shown(line):
                    print("  " + line.rstrip(), flush=True)
                take_line(story, line, env, checkpoints)
            return process.wait(), story
        finally:
            process.kill()


def complaints(code: int, story: Story, job: dict[str, Any]) -> list[str]:
    """Return what did not hold; empty where the job did all that it should."""
    history = job["history"]
    checks = [
        (story.killed_at > 0, "no worker was killed: the moment never came"),
        (code == 0, f"elaunch run ended with status {code}"),
        (job["state"] == "COMPLETED", f"the state is {job['state']}: {job['reason']}"),
        (job["round"] == 1, f"{job['round']} restarts, not one"),
        (len(story.resumes) == 1, f"the log shows {len(story.resumes)} resumes, not one"),
        (
            bool(story.resumes) and history[-1]["resumed_step"] == story.resumes[0][1],
            "elaunch and the script do not agree on the checkpoint",
        ),
        (story.accuracy > GOAL, f"test accuracy {story.accuracy} % is not above {GOAL} %"),
    ]
    return [text for holds, text in checks if not holds]


def tell(story: Story, job: dict[str, Any]) -> None:
    """Print what happened, what was lost and how long the recovery took."""
    name, step = story.resumes[0]
    lost = story.steps_before - step
    restart = job["history"][-1]
    ready = f"{restart['recovery_s']:.3f} s" if restart["recovery_s"] is not None else "unknown"
    trains = f"{story.again_at - story.killed_at:.3f} s"
    print(f"""
What happened
  the worker of rank 1 (pid {story.victim}) got a SIGKILL after step {story.steps_before}
  reason of the restart: {restart["reason"]}
  both ranks went on from {name}, in round {restart["round"]}
What was lost
  steps {step + 1} to {story.steps_before} were trained again: {lost} of {story.steps} steps, \
{lost * BATCH} samples
How long the recovery took
  {ready:>9}  from the failure to the new workers, by elaunch's record
  {trains:>9}  from the SIGKILL to the end of the next training step: the process group,
             the data, the checkpoint and one step are in it
Result
  one restart, test accuracy {story.accuracy} % after step {story.steps}""")


def main() -> int:
    """Run the demo in a temporary directory; return the exit status."""
    try:
        with tempfile.TemporaryDirectory(prefix="elaunch-demo-") as place, deadline(DEADLINE):
            env = environment(f"{place}/state")
            code, story = run_job(env, Path(place, "checkpoints"))
            job = record(env)
    except (TimeoutError, subprocess.SubprocessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    failures = complaints(code, story, job)
    if not failures:
        tell(story, job)
    for text in failures:
        print(f"demo: {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
