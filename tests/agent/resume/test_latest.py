"""The search for the next round's checkpoint, as the loop and the coordinator ask for it."""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from elaunch.agent import patience
from elaunch.agent.policy import events
from elaunch.agent.resume import latest
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import DirectoryProbe
from elaunch.checkpoint import probe, records
from elaunch.checkpoint.records import Image, ShardHeader, Stage
from elaunch.checkpoint.storage.posix import PosixStorage
from elaunch.config import Settings, resolve
from elaunch.errors import CheckpointError, UsageError
from elaunch.rendezvous.decide.view import Search, SearchResult
from tests.checkpoint.search.test_latest import save_checkpoint
from tests.launching import wait_until


def settings(directory: Path, cwd: Path, glob: str | None = "step_*.pt") -> Settings:
    """Return the settings of a job with a checkpoint directory."""
    line = {"checkpoint-dir": str(directory)} | ({"checkpoint-glob": glob} if glob else {})
    script = cwd / "train.py"
    script.write_text("")
    return resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, cwd)


def searched(made: Settings, post: Callable[[events.Event], None] = print) -> SearchResult:
    """Return what the coordinator's search finds in a directory that nobody has locked."""
    finisher = DirectoryFinisher(made)
    found = latest.for_all_nodes(made, post, finisher)(Search())
    finisher.close()
    return found


def test_every_node_is_told_what_the_coordinator_found(tmp_path: Path) -> None:
    """The newest, as plain data; the loop hears of it too."""
    import torch

    for step in (2, 10):
        torch.save({"step": step}, tmp_path / f"step_{step}.pt")
    posted: list[events.Event] = []
    found = searched(settings(tmp_path, tmp_path), posted.append).checkpoint
    assert found is not None
    assert (found.path, found.step) == (str(tmp_path / "step_10.pt"), 10)
    (event,) = posted
    assert isinstance(event, events.CheckpointChosen)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    """A directory that is empty."""
    (tmp_path / "ck").mkdir()
    assert searched(settings(tmp_path / "ck", tmp_path)) == SearchResult()


def test_storage_that_cannot_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    """Nobody may begin anew because a disk is away for a moment."""
    made = settings(tmp_path / "ck", tmp_path)
    if (tmp_path / "ck").is_dir():
        (tmp_path / "ck").rmdir()
    (tmp_path / "ck").write_text("a file where the directory was")
    found = searched(made)
    assert found.problem.startswith(str(tmp_path / "ck"))
    assert found.exit_code == CheckpointError.exit_code


def commit(place: Path, made: Settings, step: int) -> Path:
    """Have a checkpoint of one rank committed in ``place``; return its data file."""
    storage, stage = PosixStorage(place), Stage(step, 0, f"{step:032x}")
    storage.prepare(made.run_id, given=False)
    part = ShardHeader(0, 1, made.run_id, {"steps_completed": step})
    storage.write_shard(stage, part, [Image("model.pt", [b"content"])])
    done = storage.commit(stage, lambda: None, {})
    return place / done.name / "model.pt"


def damage(file: Path, *, told: bool) -> None:
    """Flip a bit; unless ``told``, as a disk does it, that changes no time."""
    times = file.stat()
    file.write_bytes(b"Content")
    if not told:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def found(made: Settings, finisher: DirectoryFinisher) -> str | None:
    """Return the name of what the next round would resume from."""
    search = latest.look(made, finisher, Search()).search
    return None if search.checkpoint is None else Path(search.checkpoint.path).name


def test_what_this_job_has_sealed_is_not_read_again(tmp_path: Path) -> None:
    """A restart does not wait for it; what was written to since is read, and put aside."""
    place = tmp_path / "ck"
    made = settings(place, tmp_path, None)
    finisher = DirectoryFinisher(made)
    assert found(made, finisher) is None
    files = [commit(place, made, step) for step in (10, 20)]
    damage(files[1], told=False)
    assert found(made, finisher) == "step-00000020.r0"
    damage(files[1], told=True)
    assert found(made, finisher) == "step-00000010.r0"
    assert (place / ".quarantine" / "step-00000020.r0").is_dir()
    finisher.close()


def test_what_was_there_before_is_read_once(tmp_path: Path) -> None:
    """Nobody knows what a power cut has left of it."""
    place = tmp_path / "ck"
    made = settings(place, tmp_path, None)
    files = [commit(place, made, step) for step in (10, 20)]
    damage(files[1], told=False)
    finisher = DirectoryFinisher(made)
    assert found(made, finisher) == "step-00000010.r0"
    damage(files[0], told=False)
    assert found(made, finisher) == "step-00000010.r0"
    finisher.close()


def test_a_search_that_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A round that waits for the storage does not do so in silence."""
    storage = threading.Event()

    def hang(*_: object) -> records.SearchOutcome:
        assert storage.wait(60.0)
        return records.SearchOutcome(None)

    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    monkeypatch.setattr(latest, "_search", hang)
    with caplog.at_level(logging.WARNING, "elaunch"):
        looking = threading.Thread(target=searched, args=(settings(tmp_path, tmp_path),))
        looking.start()
        wait_until(lambda: bool(caplog.messages), 60.0)
        storage.set()
        looking.join(60.0)
    (line,) = caplog.messages
    said = f"still looking for the newest complete checkpoint in {tmp_path}, for "
    assert re.match(re.escape(said) + r"\d+ s", line)


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        ((), False),
        ((".lock", ".stage/step-00000001"), False),
        (("weights.npz",), True),
        ((".quarantine/step-00000001.r0",), True),
        (("step_1.pt",), True),
    ],
)
def test_a_required_resume_finds_nothing(
    tmp_path: Path, files: tuple[str, ...], lost: bool
) -> None:
    """An empty directory is a fresh start; one with files that nobody understands is not."""
    root = tmp_path / "ck"
    root.mkdir()
    required = replace(settings(root, tmp_path), require_resume=True)
    PosixStorage(root).prepare(required.run_id, given=False)
    for name in files:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("")
    found = searched(required)
    assert (found.checkpoint, bool(found.problem)) == (None, lost)
    if lost:
        assert found.problem.startswith("--require-resume is given")
        assert f"none of the 1 entries of {root} can be resumed from" in found.problem
        assert found.exit_code == CheckpointError.exit_code
    assert not searched(settings(root, tmp_path)).problem


def test_deepspeed_loads_what_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest is damaged: ``latest`` names the older one before the round begins."""
    root = tmp_path / "ck"
    save_checkpoint(root, "global_step10")
    (save_checkpoint(root) / "mp_rank_00_model_states.pt").write_bytes(b"torn")
    made = settings(root, tmp_path, None)
    assert (root / "latest").read_text() == "global_step20"
    chosen = latest.look(made, DirectoryFinisher(made), Search()).search.checkpoint
    assert (chosen and chosen.path, chosen and chosen.step) == (root, 10)
    assert (root / "latest").read_text() == "global_step10"
    assert f"{root}/latest named global_step20; it names global_step10 now" in caplog.text


DIRECTORY = "--checkpoint-dir=ck"
TWO_NODES = ("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1")
FINE = events.DirectoryProbed()
LONG = 30.0


class Begun(DirectoryProbe):
    """The probe of a job with these flags, which has begun to look."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        script = tmp_path / "train.py"
        script.write_text("")
        line = dict(flag.lstrip("-").split("=") for flag in flags)
        self.posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        settings = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, tmp_path)
        super().__init__(settings, self.posted.put)
        self.start()

    def answer(self) -> events.Event:
        """Return what the loop gets, which is one event."""
        answer = self.posted.get(timeout=LONG)
        assert self.posted.empty()
        return answer


def test_one_node_leaves_no_mark(tmp_path: Path) -> None:
    """The directory is made; nobody else has to see anything."""
    one = Begun(tmp_path, DIRECTORY)
    assert one.answer() == FINE
    assert (one.nonce, os.listdir(tmp_path / "ck")) == ("", [])
    one.close()


def test_one_of_two_nodes_leaves_its_mark_while_it_lives(tmp_path: Path) -> None:
    """Under the name that its record says; not where each node has its own directory."""
    one = Begun(tmp_path, DIRECTORY, *TWO_NODES)
    assert one.answer() == FINE
    assert os.listdir(tmp_path / "ck" / ".probe") == [one.nonce]
    one.close()
    assert os.listdir(tmp_path / "ck") == []
    own = Begun(tmp_path, DIRECTORY, "--checkpoint-local=yes", *TWO_NODES)
    assert (own.answer(), own.nonce) == (FINE, "")


@pytest.mark.parametrize("flags", [(), ("--checkpoint-dir=memory://x",)])
def test_nothing_to_look_at(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """No directory, or a URL: the answer is there at once, without a thread."""
    none = Begun(tmp_path, *flags, *TWO_NODES)
    assert (none.posted.get_nowait(), none.nonce) == (FINE, "")


def test_a_remark_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory can be used all the same."""
    monkeypatch.setattr(probe, "check", lambda *_: "little room")
    assert Begun(tmp_path, DIRECTORY).answer() == events.DirectoryProbed(remark="little room")


def test_storage_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for for ever, and the error names host and directory."""
    hangs = threading.Event()
    monkeypatch.setattr(latest, "ANSWER_S", 0.05)
    monkeypatch.setattr(probe, "check", lambda *_: str(hangs.wait(LONG)))
    answer = Begun(tmp_path, DIRECTORY).answer()
    assert answer == events.DirectoryProbed(
        f"--checkpoint-dir {tmp_path}/ck: the file system has not answered on "
        f"{os.uname().nodename} within 0.05 s; is its server up?"
    )
    hangs.set()


@pytest.mark.parametrize("name", ["check", "leave_mark"])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (UsageError("--checkpoint-dir /ck: no space"), "--checkpoint-dir /ck: no space"),
        (ValueError("odd"), "--checkpoint-dir {place}: ValueError: odd"),
    ],
)
def test_an_error_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, shown: str
) -> None:
    """Whatever it is, and also where only the mark cannot be written: the loop waits for it."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(probe, name, fails)
    one = Begun(tmp_path, DIRECTORY, *TWO_NODES)
    assert one.answer() == events.DirectoryProbed(shown.format(place=tmp_path / "ck"))
    one.close()
