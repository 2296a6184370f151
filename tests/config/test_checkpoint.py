"""The checkpoint flags: places, sizes, what is kept, and what contradicts what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elaunch.checkpoint.records import Keep
from elaunch.config import values
from elaunch.config.facts import facts
from tests.config.resolving import Job

NODES = "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("ck", "{}/ck"),
        ("./a/../ck", "{}/ck"),
        ("/abs/ck", "/abs/ck"),
        ("file:///abs/ck", "/abs/ck"),
        ("local://ck", "{}/ck"),
        ("file:///abs/a%20b", "/abs/a b"),
        ("c:/d", "{}/c:/d"),
    ],
)
def test_a_directory(job: Job, given: str, place: str) -> None:
    """Absolute, below the working directory; URLs of files are paths."""
    found = job.settings(f"--checkpoint-dir {given} train.py").checkpoint_dir
    assert found == Path(place.format(job.directory))


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://x", "gs://b", "S3://b/x y"])
def test_a_url_stays_as_it_is(job: Job, url: str) -> None:
    """fsspec knows what it means."""
    found = job.of(["--checkpoint-dir", url, "train.py"], {})
    assert found.checkpoint_dir == url
    assert facts(found, {})["checkpoint_dir"] == url


def test_a_url_without_fsspec(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the start, with what to install."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    told = job.error("--checkpoint-dir s3://b train.py")
    assert "is a URL, which needs fsspec; pip install 'elaunch[storage]'" in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "--checkpoint-dir s3://b --checkpoint-glob *.pt train.py",
            "--checkpoint-glob: '*.pt' cannot be looked for at s3://b; leave it out, or mount",
        ),
        (
            "--checkpoint-dir s3://b --checkpoint-local train.py",
            "--checkpoint-local: contradicts --checkpoint-dir s3://b, which all nodes share",
        ),
        (
            "--checkpoint-local train.py",
            "--checkpoint-local: has no directory that could be each node's own; add --checkpoint",
        ),
        ("--checkpoint-replicas 2 train.py", "--checkpoint-replicas: '2' is more than 1"),
        ("--checkpoint-keep-last 0 train.py", "--checkpoint-keep-last: '0' is less than 1"),
        ("--checkpoint-keep-every x train.py", "--checkpoint-keep-every: 'x' is not a whole"),
        ("--checkpoint-keep-best :max train.py", "--checkpoint-keep-best: ':max' does not name"),
        ("--checkpoint-keep-best loss:up train.py", "neither min nor max"),
        ("--checkpoint-memory 8GX train.py", "--checkpoint-memory: '8GX' is not a size such as"),
        ("--checkpoint-dir train.py/ck train.py", "is below '{}/train.py', which is a file"),
        (
            "--checkpoint-dir s3:///run train.py",
            "--checkpoint-dir: 's3:///run' is a URL without a bucket; write s3://BUCKET/PATH",
        ),
        (
            f"--checkpoint-dir {'x' * 300} train.py",
            "' cannot be looked at: File name too long; give an",
        ),
    ],
)
def test_what_contradicts_or_means_nothing(job: Job, line: str, told: str) -> None:
    """An error, before anything is started."""
    assert told.format(job.directory) in job.error(line)


def test_links_that_lead_nowhere(job: Job) -> None:
    """They are no files."""
    (job.directory / "lost").symlink_to("nowhere")
    told = job.error("--checkpoint-dir lost/ck train.py")
    assert f"cannot be made: '{job.directory}/lost' is a link to 'nowhere', which is not" in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--checkpoint-dir c --checkpoint-local train.py", "--checkpoint-local has no effect on"),
        ("--checkpoint-replicas 1 train.py", "--checkpoint-replicas has no effect on one node"),
        (
            "--checkpoint-keep-last 3 train.py",
            "--checkpoint-keep-last has no effect on the script's own files without --checkpoint-",
        ),
        (f"{NODES} --checkpoint-dir c --checkpoint-local train.py", ""),
        (f"{NODES} --checkpoint-replicas 1 train.py", ""),
        ("--checkpoint-dir c --checkpoint-keep-last 3 train.py", ""),
    ],
)
def test_what_has_no_effect_is_said(job: Job, line: str, told: str) -> None:
    """And what has one is not."""
    notices = job.notices(line)
    assert (told in notices) if told else ("--checkpoint" not in notices)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("train.py", Keep()),
        ("--checkpoint-keep-last 3 train.py", Keep(last=3)),
        ("--checkpoint-keep-every 500 train.py", Keep(every=500)),
        ("--checkpoint-keep-best loss train.py", Keep(best="loss")),
        ("--checkpoint-keep-best eval:acc:max train.py", Keep(best="eval:acc", mode="max")),
        ("--checkpoint-keep-best eval:acc:min train.py", Keep(best="eval:acc")),
        ("--checkpoint-keep-best loss:min train.py", Keep(best="loss")),
        (
            "--checkpoint_keep_last=2 --checkpoint-keep-best=a:max --checkpoint-keep-every=7 t.py",
            Keep(2, 7, "a", "max"),
        ),
    ],
)
def test_the_rule(job: Job, line: str, rule: Keep) -> None:
    """From the three flags together."""
    job.write("t.py", "")
    assert job.settings(line).checkpoint_keep == rule


def test_defaults_variables_and_the_job_file(job: Job) -> None:
    """As for all flags; in the job file they may stand in their own section."""
    plain = job.settings("train.py")
    assert (plain.checkpoint_local, plain.checkpoint_replicas, plain.checkpoint_memory) == (
        False,
        0,
        None,
    )
    made = job.settings("train.py", ELAUNCH_CHECKPOINT_MEMORY="2GiB", PET_CHECKPOINT_REPLICAS="1")
    assert (made.checkpoint_memory, made.checkpoint_replicas) == (2 << 30, 1)
    job.write(
        "j.yaml",
        "entrypoint: train.py\n"
        "checkpoint: {dir: ck, local: yes, memory: 512MiB, keep_last: 3, keep-best: 'loss:min'}\n"
        "checkpoint_replicas: 1\n",
    )
    read = job.settings(f"-f {job.directory}/j.yaml")
    assert (read.checkpoint_local, read.checkpoint_replicas) == (True, 1)
    assert (read.checkpoint_memory, read.checkpoint_keep) == (512 << 20, Keep(3, best="loss"))
    job.write("bad.yaml", "entrypoint: train.py\ncheckpoint: {keep_lats: 3}\n")
    assert "did you mean 'keep-last'" in job.error(f"-f {job.directory}/bad.yaml")


def test_a_worker_of_another_job_does_not_hand_its_own_on(job: Job) -> None:
    """What an agent sets for its workers is no flag of a job that they start."""
    outer = {
        "ELAUNCH_AGENT_SOCKET": "/s",
        "ELAUNCH_CHECKPOINT_DIR": "/outer",
        "ELAUNCH_CHECKPOINT_LOCAL": "1",
        "ELAUNCH_CHECKPOINT_KEEP": '{"last": 3}',
    }
    found = job.settings("train.py", **outer)
    assert (found.checkpoint_dir, found.checkpoint_local) == (None, False)
    assert found.checkpoint_keep == Keep() and not found.notices


def test_nodes_with_directories_of_their_own_need_not_call_them_alike(job: Job) -> None:
    """The other flags about checkpoints must be the same on all nodes."""
    local = f"{NODES} --checkpoint-local --checkpoint-dir"
    one, two = (facts(job.settings(f"{local} {name} train.py"), {}) for name in ("a", "b"))
    assert one == two
    more = facts(job.settings(f"{local} a --checkpoint-keep-last 2 train.py"), {})
    assert more["checkpoint_keep"] == '{"last": 2}' and "checkpoint_keep" not in one
    copies = facts(job.settings(f"{local} a --checkpoint-replicas 1 train.py"), {})
    assert copies["checkpoint_replicas"] == "1"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1024", 1024),
        ("8GiB", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 * 10**9),
        (" 1.5 MiB ", 3 << 19),
        ("2T", 2 << 40),
        ("9007199254740993", 9007199254740993),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Powers of 1024 unless it ends in a bare B."""
    assert values.size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8 G B", "GiB", "1e9", "0.1b", "٣", "1_000"])
def test_no_sizes(text: str) -> None:
    """Refused rather than guessed."""
    with pytest.raises(ValueError, match=r"is not a size|is less than 1 byte"):
        values.size(text)


def test_another_runs_checkpoint(job: Job) -> None:
    """The newest in a directory, or the one that is named; its step counts as 0."""
    for step in (10, 20):
        (job.directory / f"step_{step}.pt").write_bytes(b"\x80\x02")
    path = job.directory / "checkpoint-7"
    path.mkdir()
    (path / "trainer_state.json").write_text('{"global_step": 7}')
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    found = job.settings("--init-from . train.py {checkpoint}").init_from
    assert found is not None and (found.path, found.step) == (path, 0)
    found = job.settings("--init-from step_10.pt train.py").init_from
    assert found is not None and (found.path.name, found.step) == ("step_10.pt", 0)
    assert job.settings("train.py").init_from is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gone", "--init-from: 'gone' cannot be begun from: {}/gone is not there"),
        ("empty", "{}/empty holds no complete checkpoint"),
        ("s3:///x", "is a URL without a bucket"),
    ],
)
def test_no_other_runs_checkpoint(job: Job, given: str, told: str) -> None:
    """Found before anything starts."""
    (job.directory / "empty").mkdir()
    assert told.format(job.directory) in job.error(f"--init-from {given} train.py")


def test_restarts_that_resume_from_nothing_are_pointed_out(job: Job) -> None:
    """In one line, to who asks for restarts on the command line."""
    told = "a restart runs the script from its beginning"
    assert job.notices("--max-restarts 3 train.py").count(told) == 1
    for line in (
        "train.py",
        "--max-restarts 0 train.py",
        "--max-restarts 3 --checkpoint-dir d train.py",
    ):
        assert told not in job.notices(line)
    assert told not in job.notices("train.py", PET_MAX_RESTARTS="3")
