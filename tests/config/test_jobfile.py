"""Job files: what each key becomes, and the line of what is wrong."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from elaunch.config import StreamMap
from tests.config.resolving import Job

WHOLE = """
name: digits
entrypoint: train.py --lr 0.1 --tag "a b"
nodes: 1
slots: 2
restarts: 3
checkpoint: {dir: ck, glob: "step_*.pt"}
environment:
  OMP_NUM_THREADS: 4
  DEBUG: yes
signals-to-handle: [SIGTERM, SIGINT]
tee: {0: 3, 11: 1}
rdzv_conf: {timeout: 900}
duplicate_stdout_filters: ["a,b", c]
local_ranks_filter: [0, 1]
sibling_grace: 2.5
log_dir: logs
"""


def test_a_whole_file(job: Job) -> None:
    """Every kind of key at once."""
    job.write("j.yaml", WHOLE)
    found = job.settings("-f j.yaml")
    assert (found.name, found.entrypoint) == ("digits", "train.py")
    assert found.args == ("--lr", "0.1", "--tag", "a b")
    assert (found.nproc_per_node, found.max_restarts, found.sibling_grace) == ("2", 3, 2.5)
    assert (found.checkpoint_dir, found.checkpoint_glob) == (job.directory / "ck", "step_*.pt")
    assert found.env == {"OMP_NUM_THREADS": "4", "DEBUG": "yes"}
    assert found.signals_to_handle == (signal.SIGTERM, signal.SIGINT)
    assert found.tee == StreamMap(0, {0: 3, 11: 1})
    assert found.duplicate_stdout_filters == ("a,b", "c")
    assert found.local_ranks_filter == frozenset({0, 1})
    assert found.run_id.startswith("digits-")


DETERMINED = """
name: mnist
entrypoint: python3 -m pkg.train --epochs 2
resources:
  slots_per_trial: 2
searcher:
  name: single
  metric: loss
  max_length: {batches: 100}
max_restarts: 2
environment:
  environment_variables:
    - A=b=c
"""


def test_determineds_spelling(job: Job) -> None:
    """What maps is taken, what has no effect is said."""
    job.write("pkg/train.py", "")
    job.write("d.yaml", DETERMINED)
    found = job.settings("-f d.yaml")
    assert (found.entrypoint, found.mode, found.args) == ("pkg.train", "module", ("--epochs", "2"))
    assert (found.nproc_per_node, found.max_restarts, found.env) == ("2", 2, {"A": "b=c"})
    assert "d.yaml:7: metric, max_length of the searcher has no effect" in found.notices[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.py a", ("train.py", ("a",), "script")),
        ("python train.py a", ("train.py", ("a",), "script")),
        (f"python3.{sys.version_info.minor} -u train.py", ("train.py", (), "script")),
        ("-m train x", ("train", ("x",), "module")),
        ("python -m train x", ("train", ("x",), "module")),
        ("[train.py, --lr, 0.1]", ("train.py", ("--lr", "0.1"), "script")),
        (f"{sys.executable} train.py", ("train.py", (), "script")),
    ],
)
def test_forms_of_the_entrypoint(job: Job, text: str, expected: tuple[object, ...]) -> None:
    """As it would be typed, as a string or a list."""
    job.write("j.yaml", f"entrypoint: {text}\n")
    found = job.settings("-f j.yaml")
    assert (found.entrypoint, found.args, found.mode) == expected


def test_the_command_line_wins_as_a_whole(job: Job) -> None:
    """Neither the file's arguments nor its -m stay."""
    job.write("other.py", "")
    job.write("j.yaml", "entrypoint: -m train x y\nslots: 2\n")
    found = job.settings("-f j.yaml --nproc-per-node 3 other.py z")
    assert (found.entrypoint, found.args, found.mode) == ("other.py", ("z",), "script")
    assert found.nproc_per_node == "3"


def test_a_switch_of_the_file_can_be_set_off(job: Job) -> None:
    """By =no, or by a variable."""
    job.write("j.yaml", "entrypoint: train.py\nvirtual_local_rank: true\n")
    assert job.settings("-f j.yaml").virtual_local_rank
    assert not job.settings("-f j.yaml --virtual-local-rank=no").virtual_local_rank
    assert not job.settings("-f j.yaml", PET_VIRTUAL_LOCAL_RANK="0").virtual_local_rank


def test_no_python_in_a_file_keeps_the_words(job: Job) -> None:
    """The program python is then what is asked for."""
    job.write("j.yaml", "entrypoint: sh -c 'echo $$'\nno_python: true\n")
    found = job.settings("-f j.yaml", PATH="/usr/bin:/bin")
    assert (found.entrypoint, found.args, found.mode) == ("sh", ("-c", "echo $$"), "command")


ENTRY = "entrypoint: train.py\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "j.yaml: the file is empty"),
        ("# nothing\n", "j.yaml: the file is empty"),
        ("- a\n", "j.yaml:1: the file must be a mapping"),
        ("just text\n", "j.yaml:1: the file must be a mapping"),
        ("a: [1\n", "not YAML"),
        ("a: b\n---\nc: d\n", "j.yaml:2: not YAML"),
        ("a: \t- x\n  y: \x00", "not YAML"),
        ("name: x\n", "nothing to start"),
        (ENTRY + "slot: 2\n", "j.yaml:2: unknown key 'slot' in the file; did you mean 'slots'?"),
        (ENTRY + "max_restart: 2\n", "did you mean 'max_restarts'?"),
        (ENTRY + "file: x\n", "unknown key 'file'"),
        (ENTRY + "dry_run: true\n", "unknown key 'dry_run'"),
        (ENTRY + "slots: 1\nslots: 2\n", "j.yaml:3: the key 'slots' is there twice"),
        (ENTRY + "slots: 1\nnproc-per-node: 2\n", "j.yaml:3: sets --nproc-per-node a second time"),
        (ENTRY + "slots: 0\n", "--nproc-per-node: '0' is not at least 1 worker (from j.yaml:2"),
        (ENTRY + "slots: gpus\n", "did you mean 'gpu'? (from j.yaml:2"),
        (ENTRY + "slots: 1.5\n", "(from j.yaml:2"),
        (ENTRY + "slots: [1]\n", "j.yaml:2: nproc-per-node must be one value, not a list"),
        (ENTRY + "slots: {a: b}\n", "must be one value, not a mapping"),
        (ENTRY + "slots:\n", "has no value"),
        (ENTRY + "standalone: ture\n", "did you mean 'true'?"),
        (ENTRY + "environment: x\n", "j.yaml:2: environment must be a mapping"),
        (ENTRY + "environment: {A: [x]}\n", "must be one value"),
        (ENTRY + "environment: {A-B: x}\n", "'A-B' is not the name of a variable"),
        (ENTRY + "environment: {A: x, A: y}\n", "is there twice"),
        (ENTRY + "environment:\n  RANK: 1\n", "j.yaml:3: the variable RANK is set by elaunch"),
        (
            ENTRY + "environment:\n  ELAUNCH_RESUME_UUID: 1\n",
            "j.yaml:3: the variable ELAUNCH_RESUME_UUID is set by elaunch",
        ),
        (ENTRY + "checkpoint: {dri: x}\n", "unknown key 'dri' in checkpoint; did you mean 'dir'?"),
        (ENTRY + "checkpoint: {glob: '*.pt'}\n", "add --checkpoint-dir"),
        (ENTRY + "resources: {slots: 1}\n", "known: slots_per_trial"),
        (ENTRY + "searcher: {name: adaptive_asha}\n", "does not search over hyperparameters"),
        (ENTRY + "searcher: {metric: x}\n", "searcher has no name"),
        ("entrypoint: ''\n", "entrypoint is empty"),
        ("entrypoint: 'a \"b'\n", "cannot be split"),
        ("entrypoint: python\n", "no script or module is named"),
        ("entrypoint: python -O train.py\n", "'-O' stands where the script is expected"),
        ("entrypoint: tain.py\n", "script 'tain.py' (from j.yaml:1) does not exist; did you mean"),
        (ENTRY + "monitor_interval: 0\n", "(from j.yaml:2"),
        (ENTRY + "? [a]\n: b\n", "must be one value"),
        (ENTRY + "environment: &e {environment_variables: *e}\n", "must be one value"),
        (ENTRY + "slots: &s [*s]\n", "must be one value"),
        (ENTRY + "a: " + "[" * 3000 + "\n", "not YAML"),
        (ENTRY + "<<: {slots: 2}\n", "unknown key '<<'"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(job: Job, text: str, message: str) -> None:
    """File, line, reason, nearest name."""
    job.write("j.yaml", text)
    assert message in job.error("-f j.yaml")


def test_a_missing_file_and_its_nearest_name(job: Job) -> None:
    """Also a directory and bytes that are no text."""
    job.write("job.yaml", ENTRY)
    assert "did you mean 'job.yaml'?" in job.error("-f jb.yaml")
    assert "cannot be read" in job.error("-f .")
    (job.directory / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in job.error("-f b.yaml")


def test_the_file_can_come_from_a_variable(job: Job) -> None:
    """As every flag."""
    job.write("j.yaml", ENTRY + "restarts: 5\n")
    assert job.settings("", ELAUNCH_FILE="j.yaml").max_restarts == 5


def test_what_the_file_gives_without_effect_is_said(job: Job) -> None:
    """As for the command line."""
    job.write("j.yaml", ENTRY + "monitor_interval: 1\n")
    assert "--monitor-interval has no effect" in job.notices("-f j.yaml")


HYPERPARAMETERS = """
entrypoint: train.py
hyperparameters:
  lr: 1e-3
  layers: [64, 32]
  "on": true
  name: adam
  "10": null
  day: 2024-01-02
  width: {type: const, val: 128}
  optimizer: {type: adam, betas: [0.9, 0.99]}
"""


def test_hyperparameters_are_values(job: Job) -> None:
    """Determined's constants are their values; what YAML takes for a date is text."""
    job.write("j.yaml", HYPERPARAMETERS)
    assert json.loads(job.settings("-f j.yaml").env["ELAUNCH_HPARAMS"]) == {
        "lr": 0.001,
        "layers": [64, 32],
        "on": True,
        "name": "adam",
        "10": None,
        "day": "2024-01-02",
        "width": 128,
        "optimizer": {"type": "adam", "betas": [0.9, 0.99]},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "j.yaml:2: hyperparameters must be a mapping"),
        ("{a: 1, a: 2}", "j.yaml:2: the key 'a' is there twice in hyperparameters"),
        ("{a: {[1]: 2}}", "a key of hyperparameters.a must be one value"),
        (
            "{lr: {type: log, minval: -5, maxval: 0}}",
            "hyperparameters.lr is of type 'log': elaunch",
        ),
        ("{a: " + 25 * "[" + 25 * "]" + "}", "has more than 20 levels"),
        ("{a: " + 120_000 * "x" + "}", "hyperparameters takes 120,009 bytes as JSON, and 100,000"),
        ("&a {b: *a}", "has more than 20 levels"),
        (
            "{a: &a [1,1,1,1,1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a,*a], "
            "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b], d: [*c,*c,*c,*c,*c,*c,*c,*c,*c]}",
            "has more than 10,000 values",
        ),
    ],
)
def test_hyperparameters_that_cannot_be(job: Job, text: str, message: str) -> None:
    """Each with its line; a small file with anchors is no way to fill the memory."""
    job.write("j.yaml", f"entrypoint: train.py\nhyperparameters: {text}\n")
    assert message in job.error("-f j.yaml")
