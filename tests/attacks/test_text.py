"""Text of others at a console, and the user's secrets in what others can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import Launcher

pytestmark = pytest.mark.slow


def test_a_name_in_the_checkpoint_directory(elaunch: Launcher, tmp_path: Path) -> None:
    """A file whose name moves the terminal and forges a line. torchrun: it prints no names."""
    script, saves = tmp_path / "s.py", tmp_path / "saves"
    script.write_text("print('done')\n")
    saves.mkdir()
    (saves / "step_5\x1b[2J\x9b\u202e\nelaunch 00:00:00 all is well.pt").write_bytes(b"x")
    flags = ["--checkpoint-dir", str(saves), "--checkpoint-glob", "step_*.pt"]
    done = elaunch.run(["run", *flags, script])
    assert r"step_5\x1b[2J\x9b\u202e\nelaunch 00:00:00 all is well.pt" in done.stderr
    assert not {"\x1b", "\x9b", "\u202e"} & set(done.stderr)
    assert not any(line.startswith("elaunch 00:00:00") for line in done.stderr.splitlines())


def test_the_workers_own_output_is_theirs(elaunch: Launcher, tmp_path: Path) -> None:
    """Byte for byte; in the failure report it cannot move the terminal. torchrun: raw in both."""
    script = tmp_path / "s.py"
    script.write_text(
        "import sys\n"
        "sys.stderr.write('\\x1b[31mred\\x1b[0m \\x9b1m\\u202e\\n')\n"
        "raise ValueError('a \\x9b2J b \\u2066 c')\n"
    )
    words = ["run", "--preload=none", "--max-restarts=0", script]
    done = elaunch.run(words, env={"PYTHONIOENCODING": "utf-8"})
    raw, _, report = done.stderr.partition("FAILED")
    assert "\x1b[31mred\x1b[0m \x9b1m\u202e" in raw and report
    assert r"a \x9b2J b \u2066 c" in report
    assert not {"\x1b", "\x9b", "\u202e", "\u2066"} & set(report)


def test_secrets_among_the_arguments(elaunch: Launcher, tmp_path: Path) -> None:
    """The script gets them; dry run, status and the record show none. torchrun: ps shows them."""
    script = tmp_path / "s.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["--api-key", "hunter2", "--wandb_token=hunter3", "env.password=hunter4", "--lr", "3"]
    done = elaunch.run(["run", "--run-id", "job", script, *words])
    assert str(words) in done.stdout
    dry = elaunch.run(["run", "--dry-run", script, *words])
    told = "--api-key '(hidden)' '--wandb_token=(hidden)' 'env.password=(hidden)' --lr 3"
    assert told in dry.stdout
    page = elaunch.run(["status", "job"])
    whole = elaunch.run(["status", "job", "--json"])
    records = [path.read_text() for path in elaunch.state.rglob("*.json")]
    assert records and "hunter" not in "".join([dry.stdout, page.stdout, whole.stdout, *records])
