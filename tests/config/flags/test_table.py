"""The table of flags and the documents: complete, and in step with each other."""

from __future__ import annotations

import re
from pathlib import Path

from elaunch.config.flags.table import FLAGS, GROUPS, TABLE, USUAL
from elaunch.config.jobfile import SECTIONS

DOCS = Path(__file__).parents[3] / "docs"


def test_names_are_used_once() -> None:
    """No two flags share a spelling, a key of a job file, or a variable."""
    spellings = [name for flag in FLAGS for name in flag.spellings]
    assert len(spellings) == len(set(spellings))
    keys = [name for flag in FLAGS for name in (flag.name, *flag.aliases, *flag.keys)]
    assert len(keys) == len(set(keys))
    assert not set(keys) & set(SECTIONS)
    variables = [name for flag in TABLE.values() for name in flag.environment]
    assert len(variables) == len(set(variables))


def test_every_flag_is_shown_in_help_and_explains_its_values() -> None:
    """A sentence, and what is allowed."""
    assert set(USUAL) < {flag.name for flags in GROUPS.values() for flag in flags}
    for flag in FLAGS:
        assert flag.help.endswith("."), flag.name
        assert flag.is_switch or flag.kind.metavar, flag.name


def test_every_flag_is_in_the_document() -> None:
    """docs/flags.md names each of them in a row of a table."""
    rows = [line for line in (DOCS / "flags.md").read_text().splitlines() if line[:1] == "|"]
    named = set(re.findall(r"`(--[a-z-]+)`", "\n".join(row.split("|")[1] for row in rows)))
    expected = {f"--{name}" for flag in FLAGS for name in (flag.name, *flag.aliases)}
    assert expected <= named


def test_every_trap_is_decided() -> None:
    """Each says whether it is the same, better or different here."""
    text = (DOCS / "torchrun.md").read_text().split("## Traps")[1]
    decided = re.findall(r"^\* \*\*[^*]+: (?:same|better|different)\b", text, re.MULTILINE)
    assert len(decided) >= 29
    assert len(decided) == text.count("\n* ")


def test_every_section_of_a_job_file_is_in_its_document() -> None:
    """docs/job-file.md."""
    text = (DOCS / "job-file.md").read_text()
    for key in (*SECTIONS, *(key for flag in FLAGS for key in flag.keys)):
        assert f"`{key}" in text, key
