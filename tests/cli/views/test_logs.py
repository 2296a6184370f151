"""What is wrong with ``elaunch logs`` is named, with its reason and a remedy."""

from __future__ import annotations

import pytest

from elaunch.cli import execute


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "a"], "--rank a: 'a' is no rank; give numbers and spans, as 3,7-9"),
        (["--rank", "9-7"], "--rank 9-7: '9-7' is no rank"),
        (["--rank", "0-99999999999"], "is no rank"),
        (["--rank", "²"], "is no rank"),
        (["--since", "soon"], "--since soon: is no time; give how long ago, as 90s, 10m, 3h, or"),
        (["--since", "slurm"], "--since slurm: is no time"),
        (["--grep", "("], "--grep (: is no regular expression: missing )"),
        (["--dirs", "--grep", "x"], "leave out --follow, --stream, --since and --grep"),
        ([], "no run is recorded in "),
    ],
)
def test_bad_input_is_refused(
    words: list[str],
    message: str,
    tmp_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert execute(["logs", *words]) == 2
    assert message in capsys.readouterr().err
