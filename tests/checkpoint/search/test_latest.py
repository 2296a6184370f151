"""The search: newest complete checkpoint, with a reason for each that is passed over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.checkpoint import layout
from elaunch.checkpoint.search.latest import Checkpoint, SearchOutcome, find_latest
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.errors import UsageError
from tests.checkpoint import makers, storages


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory to copy."""
    return makers.dcp_directory(tmp_path_factory.mktemp("dcp") / "template")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.save file to copy; its global_step is 120."""
    return makers.saved(tmp_path_factory.mktemp("zip") / "template.pt")


def reasons(search: SearchOutcome) -> dict[str, str]:
    """Return the names passed over with their reasons, in order."""
    return {over.path.name: over.reason for over in search.passed_over}


def found(search: SearchOutcome) -> str | None:
    """Return the name of the checkpoint found."""
    return search.checkpoint.path.name if search.checkpoint else None


def test_nothing_there(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing") == SearchOutcome(None, ())
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    (tmp_path / "file").touch()
    assert reasons(find_latest(tmp_path / "file")) == {"file": "Not a directory: file"}


def test_the_order_is_step_then_round_never_time(tmp_path: Path) -> None:
    for step, round_ in ((120, 0), (90, 7), (120, 10), (120, 9), (110, 30)):
        path = makers.own(tmp_path, step, round_)
        os.utime(path, (0, 2_000_000_000 - 1000 * step - 10 * round_))
    path = tmp_path / "step-00000120.r10"
    assert find_latest(tmp_path) == SearchOutcome(Checkpoint(path, 120, "elaunch", 10), ())


def test_numbers_are_compared_as_numbers(tmp_path: Path, template: Path) -> None:
    for name in ("step_9", "step_10", "step_0002"):
        shutil.copytree(template, tmp_path / name)
    assert find_latest(tmp_path) == SearchOutcome(Checkpoint(tmp_path / "step_10", 10, "dcp"), ())


def test_newer_incomplete_ones_are_passed_over_newest_first(tmp_path: Path, template: Path) -> None:
    makers.own(tmp_path, 90)
    makers.own(tmp_path, 100, 1)
    shutil.copytree(template, tmp_path / "step_110")
    torn = Path(shutil.copytree(template, tmp_path / "step_120"))
    size = (torn / "__0_0.distcp").stat().st_size
    makers.truncate(torn / "__0_0.distcp", 512)
    (Path(shutil.copytree(template, tmp_path / "step_130")) / "__0_0.distcp").unlink()
    (makers.own(tmp_path, 140, 2) / layout.COMMIT).unlink()
    makers.trainer(tmp_path, 150, weights=False)
    (tmp_path / "step_160").mkdir()
    search = find_latest(tmp_path)
    assert search.checkpoint == Checkpoint(tmp_path / "step_110", 110, "dcp")
    told = reasons(search)
    assert list(told) == ["step_160", "checkpoint-150", "step-00000140.r2", "step_130", "step_120"]
    assert told["step_160"] == "it is empty"
    assert told["checkpoint-150"].startswith("no weights")
    assert told["step-00000140.r2"] == "not committed: COMMIT is missing"
    assert told["step_130"] == "missing: __0_0.distcp"
    assert told["step_120"] == f"truncated: __0_0.distcp has 512 bytes, .metadata wants {size}"


def test_older_ones_are_not_even_opened(tmp_path: Path) -> None:
    makers.own(tmp_path, 100)
    (tmp_path / "step_99").mkdir()
    os.mkfifo(tmp_path / "step_99" / ".metadata")
    assert find_latest(tmp_path).passed_over == ()


def test_all_formats_side_by_side(tmp_path: Path, template: Path, archive: Path) -> None:
    made = {
        "step-00000010.r0": ("elaunch", 10, makers.own(tmp_path, 10)),
        "global_step20": ("dcp", 20, shutil.copytree(template, tmp_path / "global_step20")),
        "checkpoint-30": ("huggingface", 30, makers.trainer(tmp_path, 30)),
        "epoch=0-step=40.ckpt": (
            "lightning",
            40,
            shutil.copy(archive, tmp_path / "epoch=0-step=40.ckpt"),
        ),
        "step=50.ckpt": ("lightning", 50, shutil.copytree(template, tmp_path / "step=50.ckpt")),
        "last.ckpt": ("lightning", 120, shutil.copy(archive, tmp_path / "last.ckpt")),
        "checkpoint-130": ("dcp", 130, shutil.copytree(template, tmp_path / "checkpoint-130")),
    }
    shutil.copy(archive, tmp_path / "step=50.ckpt" / "meta.pt")
    for name, (format_, step, path) in reversed(made.items()):
        search = find_latest(tmp_path)
        assert search.checkpoint
        assert search.passed_over == ()
        assert (found(search), search.checkpoint.format, search.checkpoint.step) == (
            name,
            format_,
            step,
        )
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def test_of_another_run(tmp_path: Path) -> None:
    makers.own(tmp_path, 200, run_id="mnist")
    makers.own(tmp_path, 100, run_id="digits")
    search = find_latest(tmp_path, run_id="digits")
    assert found(search) == "step-00000100.r0"
    assert reasons(search) == {"step-00000200.r0": "belongs to run mnist"}
    assert found(find_latest(tmp_path)) == "step-00000200.r0"


def test_stage_quarantine_and_temporary_names_are_not_looked_at(
    tmp_path: Path, template: Path
) -> None:
    makers.own(tmp_path / ".stage", 500)
    makers.own(tmp_path / ".quarantine", 500)
    (tmp_path / "latest").symlink_to(".quarantine/step-00000500.r0")
    (tmp_path / "step_501").symlink_to(".stage/step-00000500.r0")
    for name in (".step_500", "step_500.tmp", "tmp-checkpoint-500", "tmp_500"):
        shutil.copytree(template, tmp_path / name)
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    assert find_latest(tmp_path, glob="**/*500*") == SearchOutcome(None, ())


def test_a_copy_from_a_url(tmp_path: Path) -> None:
    """It has another name there, by which no storage in a directory knows it; renamed it is one."""
    pytest.importorskip("fsspec")
    made = storages.save(open_storage(f"file://{tmp_path}"), 120, 3)
    search = find_latest(tmp_path)
    name = Path(str(made.place)).name
    assert found(search) is None
    assert reasons(search) == {
        name: "it has the name of a checkpoint at a URL; rename it to step-00000120.r3"
    }
    (tmp_path / name).rename(tmp_path / "step-00000120.r3")
    assert found(find_latest(tmp_path)) == "step-00000120.r3"


def test_things_that_are_no_checkpoints_are_not_mentioned(tmp_path: Path, archive: Path) -> None:
    (tmp_path / "logs_2024" / "plots").mkdir(parents=True)
    (tmp_path / "version_0").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "run.json").touch()
    shutil.copy(archive, tmp_path / "step_120.pt")
    shutil.copy(archive, tmp_path / "checkpoint_120.pth")
    assert find_latest(tmp_path) == SearchOutcome(None, ())


def test_directories_that_sound_like_checkpoints_are(tmp_path: Path, template: Path) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "model.msgpack").touch()
    shutil.copytree(template, tmp_path / "best")
    assert reasons(find_latest(tmp_path)) == {
        "best": "no number in its name, so its step is not known",
        "step_5": "no checkpoint of a known format is in it",
    }


def test_a_lightning_file_without_a_step(tmp_path: Path, archive: Path) -> None:
    makers.saved(tmp_path / "model_7.ckpt", {"weights": 1})
    shutil.copy(archive, tmp_path / "last.ckpt")
    makers.truncate(tmp_path / "last.ckpt", 300)
    (tmp_path / "epoch=1.ckpt").mkdir()
    told = reasons(find_latest(tmp_path))
    assert "no step= in its name and no global_step in it" in told["model_7.ckpt"]
    assert told["last.ckpt"].startswith("last.ckpt is truncated")
    assert told["epoch=1.ckpt"] == "missing: meta.pt"
    assert found(find_latest(tmp_path, glob="*_*.ckpt")) == "model_7.ckpt"


def test_a_glob_picks_torch_save_files(tmp_path: Path, archive: Path) -> None:
    for name in ("step_9.pt", "step_10.pt", "step_11.pt", "step_x.pt", "step_12.pt.tmp"):
        shutil.copy(archive, tmp_path / name)
    makers.truncate(tmp_path / "step_11.pt", 1000)
    makers.own(tmp_path, 500)
    search = find_latest(tmp_path, glob="step_*")
    assert search.checkpoint == Checkpoint(tmp_path / "step_10.pt", 10, "torch.save")
    told = reasons(search)
    assert list(told) == ["step_x.pt", "step_11.pt"]
    assert told["step_x.pt"] == "no number in its name, so its step is not known"
    assert told["step_11.pt"].startswith("step_11.pt is truncated")


def test_a_glob_picks_directories_and_other_files(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path / "a" / "b" / "step_7")
    makers.safetensors(tmp_path / "a" / "w_6.safetensors")
    makers.own(tmp_path / "a", 5)
    assert found(find_latest(tmp_path, glob="**/step_*")) == "step_7"
    search = find_latest(tmp_path, glob="a/*.safetensors")
    path = tmp_path / "a" / "w_6.safetensors"
    assert search.checkpoint == Checkpoint(path, 6, "safetensors")
    assert found(find_latest(tmp_path, glob="a/step-*")) == "step-00000005.r0"
    assert find_latest(tmp_path) == SearchOutcome(None, ())
    (tmp_path / "logs_9").mkdir()
    assert reasons(find_latest(tmp_path, glob="logs_*")) == {"logs_9": "it is empty"}


def test_a_glob_that_leaves_the_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--checkpoint-glob"):
        find_latest(tmp_path, glob="../*.pt")
    with pytest.raises(UsageError, match="--checkpoint-glob"):
        find_latest(tmp_path, glob="")


def test_links_are_not_counted_twice(tmp_path: Path, template: Path) -> None:
    torn = Path(shutil.copytree(template, tmp_path / "step_120"))
    (torn / ".metadata").unlink()
    (tmp_path / "latest").symlink_to("step_120")
    (tmp_path / "step_121").symlink_to(torn)
    assert list(reasons(find_latest(tmp_path))) == ["step_120"]


def test_links_to_other_disks_count(
    tmp_path: Path, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("disk")
    target = Path(shutil.copytree(template, other / "step_120"))
    (tmp_path / "latest").symlink_to(target)
    assert find_latest(tmp_path).checkpoint == Checkpoint(target, 120, "dcp")
    (tmp_path / "step_130").symlink_to(shutil.copytree(template, other / "plain"))
    assert find_latest(tmp_path).checkpoint == Checkpoint(tmp_path / "step_130", 130, "dcp")
    shutil.rmtree(other)
    assert find_latest(tmp_path) == SearchOutcome(None, ())


def test_a_root_that_is_a_link(tmp_path: Path) -> None:
    path = makers.own(tmp_path / "real", 5)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "latest").symlink_to(path.name)
    search = find_latest(tmp_path / "link")
    assert search.checkpoint == Checkpoint(tmp_path / "link" / path.name, 5, "elaunch", 0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_nobody(folder: Path) -> str:
    """Return what the search prints for a user who is not root."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from elaunch.checkpoint.search.latest import find_latest\n"
        "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
        "search = find_latest(Path(sys.argv[1]))\n"
        "print(search.checkpoint and search.checkpoint.path.name)\n"
        "for over in search.passed_over: print(over.path.name, over.reason)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.slow
def test_what_may_not_be_read_is_passed_over(open_folder: Path, template: Path) -> None:
    makers.own(open_folder, 1)
    for name in ("step_2", "step_3"):
        shutil.copytree(template, open_folder / name)
    (open_folder / "step_2" / ".metadata").chmod(0)
    (open_folder / "step_3").chmod(0)
    told = as_nobody(open_folder).splitlines()
    assert told == [
        "step-00000001.r0",
        "step_3 permission denied: step_3",
        "step_2 permission denied: .metadata",
    ]
    open_folder.chmod(0)
    told = as_nobody(open_folder).splitlines()
    assert told == ["None", f"{open_folder.name} permission denied: {open_folder.name}"]


@pytest.mark.slow
def test_retention_while_it_searches(tmp_path: Path, template: Path) -> None:
    for step in range(200):
        shutil.copytree(template, tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "__0_0.distcp").unlink(missing_ok=step > 0)
    shutil.copy(template / "__0_0.distcp", tmp_path / "step_0")
    newest_first = [tmp_path / f"step_{step}" for step in range(199, 0, -1)]

    def remove() -> None:
        for path in newest_first:
            shutil.rmtree(path)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        while remover.is_alive():
            search = find_latest(tmp_path)
            assert found(search) == "step_0"
            kinds = {over.reason.partition(":")[0] for over in search.passed_over}
            assert kinds <= {
                "missing",
                ".metadata is missing",
                "it vanished while it was read",
                "it is empty",
                "no checkpoint of a known format is in it",
            }
    finally:
        remover.join()


@pytest.mark.trial
@pytest.mark.slow
def test_ten_thousand_entries(tmp_path: Path, archive: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"step_{number}.pt").touch()
    makers.own(tmp_path, 50)
    started = time.thread_time()  # CPU time: it is the same on a busy machine
    assert found(find_latest(tmp_path)) == "step-00000050.r0"
    shutil.copy(archive, tmp_path / "step_9990.pt")
    search = find_latest(tmp_path, glob="*.pt")
    assert found(search) == "step_9990.pt"
    assert len(search.passed_over) == 9
    assert time.thread_time() - started < 5


def test_a_search_changes_nothing(tmp_path: Path, template: Path) -> None:
    makers.own(tmp_path, 3)
    (makers.own(tmp_path, 4) / layout.COMMIT).unlink()
    shutil.copytree(template, tmp_path / "step_2")
    makers.trainer(tmp_path, 5, weights=False)

    def listing() -> list[tuple[str, int, int]]:
        status = [(str(path), path.stat()) for path in sorted(tmp_path.rglob("*"))]
        return [(name, entry.st_mtime_ns, entry.st_size) for name, entry in status]

    before = listing()
    find_latest(tmp_path)
    find_latest(tmp_path, glob="**/*")
    assert listing() == before


@pytest.mark.slow
def test_the_search_needs_no_torch() -> None:
    code = "import sys, elaunch.checkpoint.search.latest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_small_state_in_json(tmp_path: Path) -> None:
    """The newest that is whole; what was cut off, or is no object, is passed over by name."""
    makers.write_json(tmp_path / "step_10.json", {"x": 1})
    (tmp_path / "step_20.json").write_text('{"x": 1')
    (tmp_path / "step_30.json").write_text("[]")
    (tmp_path / "step_40.json").write_text("")
    search = find_latest(tmp_path, glob="step_*.json")
    assert search.checkpoint == Checkpoint(tmp_path / "step_10.json", 10, "json")
    reasons = {p.path.name: p.reason for p in search.passed_over}
    assert "is not valid JSON" in reasons["step_20.json"]
    assert reasons["step_30.json"] == "step_30.json holds no JSON object"
    assert reasons["step_40.json"] == "step_40.json is empty"
