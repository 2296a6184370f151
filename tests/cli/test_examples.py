"""``elaunch examples``: what is installed with the package can be listed, shown and copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.cli import execute

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it shows."""
    assert execute(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] + ".py" for line in lines[: len(EXAMPLES)]] == EXAMPLES
    assert all(len(line.split()) > 3 for line in lines[: len(EXAMPLES)])


@pytest.mark.parametrize("name", ["increment", "increment.py"])
def test_one_is_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["examples", "show", name]) == 0
    assert capsys.readouterr().out == (ROOT / "examples" / "increment.py").read_text()


def test_one_is_copied_with_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a directory that is made, or to the current one; never over a file that is there."""
    assert execute(["examples", "copy", "own_launcher", str(tmp_path / "mine")]) == 0
    found = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert found == ["increment.py", "own_launcher.py"]
    monkeypatch.chdir(tmp_path)
    assert execute(["examples", "copy", "sharded"]) == 0
    (tmp_path / "sharded.py").write_text("mine")
    assert execute(["examples", "copy", "sharded"]) == 2
    assert (tmp_path / "sharded.py").read_text() == "mine"
    assert execute(["examples", "copy", "--force", "sharded"]) == 0
    assert (tmp_path / "sharded.py").read_text() == (ROOT / "examples/sharded.py").read_text()


def test_all_are_copied(tmp_path: Path) -> None:
    assert execute(["examples", "copy", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["README.md", *EXAMPLES])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "incremnt"], "no example 'incremnt'; did you mean 'increment'?"),
        (["copy", "xyz"], "no example 'xyz'; there are "),
        (["copy", "sharded", "/proc/nowhere"], "cannot copy to /proc/nowhere: "),
        (["sho"], "sho"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["examples", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
