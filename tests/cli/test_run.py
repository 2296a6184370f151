"""Cutting a command line: compared with torchrun's own parser, and where elaunch is better."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Sequence
from unittest import mock

import click
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.cli.run import LINE_FLAGS, parse
from elaunch.config.flags.table import FLAGS
from tests.tables import each

Parsed = tuple[dict[str, str], str, list[str]]


@pytest.fixture(scope="module")
def torchrun() -> argparse.ArgumentParser:
    """Return torchrun's parser as it is without variables."""
    from torch.distributed.run import get_args_parser

    clean = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}
    with mock.patch.dict(os.environ, clean, clear=True):
        return get_args_parser()


def by_torchrun(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Parsed | None:
    """Return what torchrun makes of a command line, or None for a usage error or help."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            parsed = vars(parser.parse_args(list(argv)))
        except SystemExit:
            return None
    script = parsed.pop("training_script")
    args = parsed.pop("training_script_args")
    defaults = {action.dest: action.default for action in parser._actions}
    given = {name: text for name, text in parsed.items() if text != defaults[name]}
    return {name: spelt(text) for name, text in given.items()}, script, args


def by_elaunch(argv: Sequence[str]) -> Parsed:
    """Return what elaunch makes of a command line, in the same form."""
    words = parse(argv)
    assert not words.help
    table = {flag.name: flag for flag in FLAGS}
    texts = {table[name].dest: (table[name], text) for name, text in words.flags.items()}
    known = {flag.dest: flag.default for flag in FLAGS}
    found = {
        dest: spelt(flag.kind.read(text))
        for dest, (flag, text) in texts.items()
        if text != known[dest] or dest == "start_method"
    }
    return found, words.command[0], list(words.command[1:])


def spelt(value: object) -> str:
    """Return a value so that torchrun's and elaunch's can be compared."""
    if isinstance(value, tuple):
        return ",".join(str(getattr(each, "name", each)) for each in value)
    return ",".join(value) if isinstance(value, list) else str(value)


SAME = """
s.py
s.py --nnodes 3 -r 3
s.py -- --foo
s.py -- -- --foo
s.py a -- b
s.py --
-- s.py
-- s.py -- --foo
-- --standalone s.py
-- -- s.py
--standalone -- s.py -- x
--nproc-per-node 2 s.py
--nproc_per_node=2 s.py --nproc_per_node=3
--nproc-p 2 s.py
--nproc-p=2 s.py
--nproc_p 2 s.py
--standal s.py
--mod pkg.mod a b
--no-py prog
--run-p s.py
--max-r 3 --max-restarts 4 s.py
--si SIGTERM s.py
--sh 7 s.py
--ev console s.py
--v s.py
-m pkg.mod --lr 0.1
-mr3 pkg.mod
-m -r3 pkg.mod
-m -r=3 pkg.mod
-r3 s.py
-r 3 -t=0:1,1:2 s.py
-t3 -r2 s.py
--max-restarts 2 -- s.py -r 3
--role a=b s.py
--role=-x s.py
--role - s.py
--rdzv-conf a=b,c=d s.py
--rdzv-conf=join_timeout=1 s.py
--master-addr 1.2.3.4 --master-port 29400 --node_rank 0 s.py
--start-method spawn s.py
- x
-1 x
""".strip().splitlines()


@pytest.mark.parametrize("line", SAME)
def test_a_line_that_torchrun_takes_means_the_same(
    torchrun: argparse.ArgumentParser, line: str
) -> None:
    """Flags, script and script arguments are cut alike."""
    argv = line.split()
    expected = by_torchrun(torchrun, argv)
    if expected is None:  # ambiguous on this Python's argparse; see the next test
        assert line.split()[0].startswith("--")
        return
    found, script, args = by_elaunch_raw(argv)
    assert (script, args) == expected[1:]
    assert set(found) >= set(expected[0])


def by_elaunch_raw(argv: Sequence[str]) -> tuple[dict[str, str], str, list[str]]:
    """Return texts unread, for values that torchrun's parser does not check."""
    words = parse(argv)
    found = {name.replace("-", "_"): text for name, text in words.flags.items()}
    return found, words.command[0], list(words.command[1:])


@each(
    ("word", "name"),
    [
        ("--nproc", "nproc-per-node"),
        ("--master-p", "master-port"),
        ("--log-d", "log-dir"),
        ("--log-ra", "local-ranks-filter"),
        ("--local-r", "local-ranks-filter"),
        ("--run", "run-path"),
        ("--run-i", "rdzv-id"),
        ("--rdzv-i", "rdzv-id"),
        ("--si", "signals-to-handle"),
        ("--sib", "sibling-grace"),
        ("--e", "event-log-handler"),
        ("--check", None),
        ("--checkpoint-d", "checkpoint-dir"),
        ("--dr", "dry-run"),
        ("--fi", "file"),
        ("--n", None),
        ("--log", None),
        ("--master", None),
        ("--local", None),
        ("--st", None),
    ],
)
def test_a_flag_may_be_cut_short_while_one_is_meant(word: str, name: str | None) -> None:
    """Torchrun's flags are looked at first; both spellings of one flag are one flag."""
    if name is None:
        with pytest.raises(click.UsageError, match="ambiguous"):
            parse([f"{word}=1", "s.py"])
    else:
        assert parse([f"{word}=1", "s.py"]).flags == {name: "1"}


WORDS = st.sampled_from(
    [
        *"-- - -r -t -m -r3 -t=1 -mr1 --standalone --nnodes --nnodes=1 --nproc_per_node".split(),
        *"--nproc-p=2 --max-restarts --max_r=1 --role --role=x --no-py --no_python".split(),
        *"--rdzv-conf --signals --shutdown-t=3 --virtual --run_p --log_d --log-dir=d".split(),
        *"--tee=1 --redir 1 2 3 s.py x.y a=b --lr --foo=1 -x -5 --h --start-method".split(),
        *["spawn", "fork", "", "a b", "-a b", "--role x", "--foo bar", "-1 2"],
    ]
)


@pytest.mark.slow
@given(st.lists(WORDS, max_size=8))
@example(["s.py", "--", "--"])
@example(["-r", "--", "3", "s.py"])
@example(["-m", "--role", "-5", "--", "x", "--"])
def test_whatever_torchrun_takes_elaunch_cuts_alike(argv: list[str]) -> None:
    """Any command line: torchrun refuses it, or elaunch finds the same parts."""
    from torch.distributed.run import get_args_parser

    expected = by_torchrun(_PARSERS.setdefault(0, get_args_parser()), argv)
    if expected is None:
        return
    flags, script, args = expected
    found, *command = by_elaunch_raw(argv)
    assert command == [script, args]
    assert {name: {"True": "yes"}.get(text, text) for name, text in flags.items()} == {
        name: text for name, text in found.items() if name in flags
    }


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
PINNED = (2, 13)
NEWER = pytest.mark.skipif(TORCH < PINNED, reason="this torchrun has fewer flags")
ADDED = {(2, 14): "log_line_prefix_template print_completion"}
"""Flags of torchrun's by the version since PINNED that they came with."""
_PARSERS: dict[int, argparse.ArgumentParser] = {}


@NEWER
def test_values_are_those_of_torchrun(torchrun: argparse.ArgumentParser) -> None:
    """The converted values agree, defaults left out."""
    argv = (
        "--nnodes=1:1 --nproc-per-node 4 --max-restarts 3 --rdzv-id r1 --standalone -m "
        "--role w --log-dir d --duplicate-stdout-filters a,b,,c --node-rank 1 --master-port 29400 "
        "--master-addr h --signals-to-handle SIGTERM,SIGUSR1 --virtual-local-rank pkg.mod x"
    ).split()
    assert by_elaunch(argv) == by_torchrun(torchrun, argv)


@NEWER
def test_every_flag_of_torchrun_is_there_with_its_spellings_and_default(
    torchrun: argparse.ArgumentParser,
) -> None:
    """The table has them all, marked as torchrun's, and nothing else is."""
    table = {flag.dest: flag for flag in LINE_FLAGS if flag.torchrun}
    actions = {a.dest: a for a in torchrun._actions if a.option_strings and a.dest != "help"}
    missing = {name for since, names in ADDED.items() if since > TORCH for name in names.split()}
    assert set(table) == set(actions) | missing
    different = {"start_method": "forkserver", "master_addr": None, "rdzv_id": None}
    different |= {"shutdown_timeout": "30"}
    for dest, action in actions.items():
        flag = table[dest]
        assert set(action.option_strings) <= {flag.short, *flag.spellings}
        default = "no" if action.default is False else action.default
        expected = different.get(dest, default)
        spelt_default = ",".join(expected) if isinstance(expected, list) else expected
        assert flag.default == (None if spelt_default is None else str(spelt_default)), dest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nproc-pr-node 2 s.py", "nproc-per-node"),
        ("--max_restart5 s.py", "max-restarts"),
        ("--logranks 0 s.py", "log-ranks"),
        ("-x s.py", "-x"),
        ("-np 4 s.py", "No such option '-np'. Did you mean '--nproc-per-node'?"),
        ("-n4 s.py", "'--nproc-per-node'? Workers on this node"),
        ("--num_machines=2 s.py", "No such option '--num_machines'. Did you mean '--nnodes'?"),
        ("-nproc_per_node 4 s.py", "'-nproc_per_node'. Did you mean '--nproc-per-node'?"),
        ("-standalone s.py", "No such option '-standalone'. Did you mean '--standalone'?"),
        ("-N2 s.py", "No such option '-N2'. Did you mean '--nnodes'?"),
        ("-N 2 s.py", "No such option '-N'. Did you mean '--nnodes'?"),
        ("--role", "--role needs a value"),
        ("--role --standalone s.py", "'--standalone' follows"),
        ("--nproc-per-node -- 2 s.py", "needs a value: a number of workers"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_nearest_name(line: str, message: str) -> None:
    """The message names what was meant."""
    with pytest.raises(click.UsageError) as error:
        parse(line.split())
    assert message in error.value.format_message()


def test_a_switch_can_be_set_off() -> None:
    """Against a variable or a job file."""
    assert parse(["--standalone=no", "s.py"]).flags == {"standalone": "no"}
    assert parse(["--standal=no", "-m=no", "s.py"]).flags == {"standalone": "no", "module": "no"}


@pytest.mark.parametrize("line", ["-h", "--help", "--he s.py", "-m -h", "--nnodes 1 --help"])
def test_help_is_asked_for_before_the_script(line: str) -> None:
    """Behind the script it is the script's."""
    assert parse(line.split()).help == "--help"
    assert not parse(["s.py", *line.split()]).help


def test_a_value_may_be_two_dashes() -> None:
    """Some versions of argparse lose them."""
    assert parse(["--role=--", "s.py"]).flags == {"role": "--"}
