"""Options that take a duration."""

from __future__ import annotations

import pytest

from elaunch.cli import execute


@pytest.mark.parametrize(
    ("option", "days"), [("preempt --deadline", 11574), ("stop --timeout", 24)]
)
def test_units(option: str, days: int, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the manifest's --time and --lead; what is none is shown with what would be right."""
    command, flag = option.split()
    for given in ("90", "1.5h", "5m", "2d", "0"):
        assert execute([command, "no-such-run", flag, given]) == 2
        assert "no-such-run" in capsys.readouterr().err
    for given in ("soon", "-1", "nan", "inf", "", "1 h 5"):
        assert execute([command, "no-such-run", flag, given]) == 2
        said = capsys.readouterr().err
        assert f"{given!r} is no duration such as 90, 30m, 4h or 2d" in said
    assert execute([command, "no-such-run", flag, "99999d"]) == 2
    assert f"'99999d' is longer than {days} days" in capsys.readouterr().err
