"""What the documents say can be checked: links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import configparser
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from elaunch import errors
from elaunch.cli import COMMANDS, cli
from elaunch.config.flags.flag import Given, convert
from elaunch.config.flags.table import TABLE
from tests import test_style as style
from tests.tables import each

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"

TOUR_LINES = 1500
"""What one may have to read to follow a failure, a save or a hang through all processes."""
ROUNDED = 50
"""Lines by which the number that a tour states may be wrong: docstrings change."""

RETIRED = (
    "books",
    "courier",
    "depot",
    "desk",
    "doorstep",
    "handed",
    "journal",
    "keeper",
    "keeping",
    "knock",
    "narrator",
    "roster",
    "seal",
    "seat",
    "spokesman",
    "stranger",
    "surrounding",
    "telephone",
    "untold",
    "wording",
)
"""Words of a private dictionary that the code had once; docs/glossary.md has those that it has."""
CORE = (
    *("rendezvous", "store", "server", "launchers", "agent.nodes", "agent.policy"),
    *("agent.workers", "agent.resume", "agent.logs", "agent.wrap"),
)
RETIRED_IN_CORE = frozenset(
    "hello mend parted pulse said spot stirred stranger strangers tell tells told unheard".split()
)
"""Words that no name of those rooms has, nor any module beside them in ``elaunch.agent``."""
SAVING = ("agent.peers", "agent.saver", "checkpoint", "training", "wire.worker")
RETIRED_IN_SAVING = frozenset(
    "handed hear heard hello said say says seal sealed seals stranger surroundings told "
    "untold".split()
)
"""The same for the rooms of saving and loading."""


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files of the project; those to the web are not followed."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    files = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [target for target in files if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page has both on the site and where the repository is browsed."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"<a (?:id|name)=\"([\w-]+)", text))
    for heading in re.findall(r"^#+ +(.+?)(?: *\{.*\})?$", text, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "]", heading)).strip().lower()
        names.add(re.sub(r"\s", "-", words))
    return names


@each("page", PAGES)
def test_links_lead_to_headings(page: Path) -> None:
    """Of headings with the same words only the first can be linked to."""
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
    known = {name: anchors(page.parent / name if name else page) for name, _ in links}
    assert [f"{name}#{anchor}" for name, anchor in links if anchor not in known[name]] == []


def test_the_tests_that_pages_name_exist() -> None:
    """Those of docs/failures.md are in tests/failures.txt (tests/test_failures.py)."""
    named = {
        found
        for page in PAGES
        for found in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())
    }
    lost = [
        (file, test)
        for file, test in sorted(named)
        if not (ROOT / file).exists() or f"def {test}" not in (ROOT / file).read_text()
    ]
    assert len(named) > 8 and lost == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md names each page beside it."""
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []


def _blocks(*languages: str) -> list[tuple[str, str]]:
    """Return page and text of the code blocks in these languages; "" is a block that names none."""
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    return [
        (f"{page.relative_to(ROOT)}: {text[:60]!r}", textwrap.dedent(text))
        for page in PAGES
        for _, language, text in fence.findall(page.read_text())
        if language in languages
    ]


def test_blocks_of_python_can_be_parsed() -> None:
    """In api.md a block may be a signature, which is one without ``def`` and body."""
    found = _blocks("python", "py")
    assert len(found) > 100
    for where, text in found:
        if where.startswith("docs/api.md"):
            text = re.sub(r"\A(class )?(elaunch|[A-Z]\w+)\.(?=\w+(\(|:|\n\Z))", "", text)
            text = re.sub(r"\A(\w+\(.*\)( -> .+)?)\n\Z", r"def \1: ...", text, flags=re.DOTALL)
        ast.parse(text, where)


def _read_json(text: str) -> None:
    """Read one document after the other."""
    while text := text.lstrip():
        text = text[json.JSONDecoder().raw_decode(text)[1] :]


def test_blocks_of_data_can_be_read() -> None:
    """JSON, YAML and unit files; what is left out is an ellipsis, which no string needs."""
    readers: dict[str, Callable[[str], object]] = {
        "json": _read_json,
        "yaml": lambda text: list(yaml.safe_load_all(text)),
        "ini": configparser.ConfigParser(strict=False).read_string,
    }
    for language, read in readers.items():
        found = _blocks(language)
        assert found
        for where, text in found:
            try:
                read(text)
            except (ValueError, yaml.YAMLError, configparser.Error) as error:
                pytest.fail(f"{where} is no {language}: {error}")


def _command_lines() -> list[tuple[str, list[str]]]:
    """Return page and words of the command lines in blocks, without what stands behind them.

    That is a comment, an explanation after two spaces, or where the output goes.
    """
    lines = []
    for where, text in _blocks("", "sh"):
        for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
            for part in re.split(r" {2,}| #", line.strip()):
                call = re.match(r"(?:\$ )?(?:(?:srun|mpirun) .*? )?elaunch ([a-z].*)", part)
                if call and call[1].split()[0] in COMMANDS:
                    text = re.sub(r"\[,…\]|[\[\]…]", "", re.sub(r"\$\([^)]*\)", "x", call[1]))
                    words = shlex.shlex(text, posix=True, punctuation_chars="|>")
                    words.whitespace_split = True
                    lines.append(
                        (
                            where,
                            list(
                                itertools.takewhile(lambda word: word[:1] not in {"|", ">"}, words)
                            ),
                        )
                    )
    return lines


def test_command_lines_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command's own parser, with the values of all flags of ``run``; nothing is done."""
    called: list[click.Context] = []
    monkeypatch.setattr(click.Command, "invoke", lambda _, ctx: called.append(ctx))
    lines = _command_lines()
    assert {words[0] for _, words in lines} > {"run", "status", "checkpoints", "manifest", "wrap"}
    for where, words in lines:
        called.clear()
        try:
            cli.main(words, prog_name="elaunch", standalone_mode=False)
            line = called[-1].params.get("line")
            for name, text in line.flags.items() if line else ():
                if "$" not in text:
                    convert(TABLE[name], Given(text, "command line"))
        except (click.ClickException, errors.UsageError) as error:
            pytest.fail(f"{where}: {shlex.join(words)}: {error}")


def test_the_site_has_every_page() -> None:
    """Its navigation names each once, and nothing else."""
    settings = (ROOT / "scripts" / "docs" / "mkdocs.yml").read_text()
    named = re.findall(r"[\w-]+\.md", settings.partition("\nnav:\n")[2])
    assert sorted(named) == sorted([*(page.name for page in ROOT.glob("docs/*.md")), "examples.md"])


def test_the_list_for_tools_has_every_page() -> None:
    """docs/llms.txt: each page once, with a line that says what it has."""
    text = (ROOT / "docs" / "llms.txt").read_text()
    listed = re.findall(r"^- \[[^\]]+\]\(([\w./-]+)\): \S.+$", text, re.MULTILINE)
    pages = [page.name for page in ROOT.glob("docs/*.md")]
    assert sorted(listed) == sorted([*pages, "../README.md", "../examples/README.md"])
    assert text.startswith("# elaunch\n\n> ")


def test_the_description_of_the_package_has_no_link_into_the_repository() -> None:
    """README.md is shown by the package index, too, where such a link leads nowhere."""
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert [target for target in targets if not re.match(r"https://|#", target)] == []


def test_the_pictures_of_the_description_exist() -> None:
    """They are tags, not links: the package index shows their text instead."""
    pictures = re.findall(r'<img src="([^"]+)" alt="[^"]{20,}">', (ROOT / "README.md").read_text())
    assert len(pictures) == 3
    assert [name for name in pictures if not (ROOT / name).is_file()] == []


def test_the_start_page_is_short() -> None:
    """It is read in three minutes."""
    assert len((ROOT / "docs" / "README.md").read_text().split()) <= 500


def test_every_exit_code_is_documented() -> None:
    """Each exception class has its row in docs/exit-codes.md, with its code."""
    rows = dict(
        re.findall(
            r"^\| (\d+) \|.*\(`(\w+)`\) \|$",
            (ROOT / "docs" / "exit-codes.md").read_text(),
            re.MULTILINE,
        )
    )
    kinds = [errors.ElaunchError, *errors.ElaunchError.__subclasses__()]
    kinds.remove(errors.ScriptError)  # raised in a script, whose exit code is its own
    assert rows == {str(kind.exit_code): kind.__name__ for kind in kinds}


@pytest.mark.parametrize("script", ["api_docs.py", "error_docs.py", "docs/chart.py"])
def test_what_is_written_by_a_script_is_up_to_date(script: str) -> None:
    """docs/api.md has the docstrings, docs/errors.md the catalogue, the chart docs/bench.md."""
    argv = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_lines_for_libraries_are_those_that_make_clients_tries() -> None:
    """docs/clients.md has a row of results and a line to type for each."""
    libraries = runpy.run_path(str(ROOT / "scripts" / "clients" / "libraries.py"))["LIBRARIES"]
    page = (ROOT / "docs" / "clients.md").read_text()
    rows = [f"| {library.name} | `{library.line()}` |" for library in libraries]
    assert [row for row in rows if row not in page] == []
    assert [one.name for one in libraries if page.count(f"\n| {one.name} | ") != 2] == []


def _tours() -> dict[str, str]:
    """Return the text of each tour of docs/architecture.md by its heading."""
    sections = re.split(r"^## ", ARCHITECTURE.read_text(), flags=re.MULTILINE)[1:]
    texts = dict(section.split("\n", 1) for section in sections)
    return {heading: text for heading, text in texts.items() if heading.startswith("Tour")}


def _stops(text: str) -> list[tuple[str, str]]:
    """Return (file, function) of all that a tour names, as `elaunch/x.py` `f`, `Class.g`."""
    named = re.findall(r"`(elaunch/[\w/]+\.py)`\s+((?:`[\w.]+`(?:,\s+)?)+)", text)
    return [(file, name) for file, names in named for name in re.findall(r"`([\w.]+)`", names)]


def _lines(file: str, name: str) -> set[tuple[str, int]]:
    """Return the lines of a function, class or method; LookupError if it is not there."""
    node: ast.AST = style.modules()[style.name_of(ROOT / file)]
    for part in name.split("."):
        found = [
            inner
            for inner in ast.iter_child_nodes(node)
            if isinstance(inner, ast.ClassDef | ast.FunctionDef) and inner.name == part
        ]
        if not found:
            raise LookupError(f"{file} has no {name}")
        node = found[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return {(file, line) for line in range(first, (node.end_lineno or first) + 1)}


def test_every_file_of_the_architecture_is_there() -> None:
    """It names files by their whole path."""
    files = set(re.findall(r"`([\w./]+\.py)`", ARCHITECTURE.read_text())) - {"__init__.py"}
    assert len(files) > 30
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_the_tours_lead_through_what_is_there() -> None:
    """Each numbered stop names a file and functions or methods that it has."""
    tours = _tours()
    assert len(tours) == 3
    for heading, text in tours.items():
        numbered = re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
        assert 12 <= len(numbered) <= 18, heading
        assert [stop for stop in numbered if not _stops(stop)] == []
        for file, name in _stops(text):
            assert _lines(file, name), heading


@pytest.mark.slow
def test_the_tours_are_short() -> None:
    """All functions of a tour are read in one sitting; the tour says how long they are."""
    for heading, text in _tours().items():
        lines = set().union(*(_lines(file, name) for file, name in _stops(text)))
        assert len(lines) <= TOUR_LINES, heading
        stated = re.search(r"have about ([\d,]+) lines", text)
        assert stated is not None, heading
        assert abs(int(stated[1].replace(",", "")) - len(lines)) <= ROUNDED, heading


def test_the_architecture_has_the_layers() -> None:
    """Its block on which layer may import whom has those that tests/test_style.py checks."""
    line = re.search(r"import whom\*\*.*?```\n(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    assert line is not None
    layers = [set(re.findall(r"\w+", names)) for names in line[1].split("<")]
    ends = ({"elaunch"}, {"__main__"})  # the package itself and its entry
    assert layers == [set(names) for names in style.LAYERS if names not in ends]


def _terms() -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    return [row.strip() for row in rows if row.strip() != "word"]


def _prose() -> str:
    """Return the docstrings of the package and the documents, but for the glossary, as one text."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = (node for module in style.modules() for node in style.nodes(module))
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    pages = [page.read_text() for page in ROOT.glob("docs/*.md") if page != GLOSSARY]
    return " ".join("\n".join([*docstrings, *pages]).split())


def test_the_glossary_is_sorted() -> None:
    """One row for each word."""
    terms = _terms()
    assert len(terms) > 40
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms, key=str.casefold)


@pytest.mark.slow
def test_the_glossary_has_words_that_are_used() -> None:
    """A word that neither a docstring nor another page has is not one that a reader meets."""
    prose = _prose()
    used = {term: re.search(rf"\b{re.escape(term)}s?\b", prose, re.IGNORECASE) for term in _terms()}
    assert [term for term, found in used.items() if found is None] == []


def _retired_words(name: str) -> list[str]:
    """Return the retired words in a name, in CamelCase or with underscores."""
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [word for word in RETIRED if any(part.startswith(word) for part in parts)]


def _names(node: ast.AST) -> list[str]:
    """Return what a node names: a variable, an attribute, a parameter, a function or a class."""
    if isinstance(node, ast.keyword):
        return []  # the parameter has the name, or a message the key
    found = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    return [name for name in found if isinstance(name, str)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rooms", "beside", "words"),
    [(CORE, r"elaunch\.agent\.\w+", RETIRED_IN_CORE), (SAVING, "-", RETIRED_IN_SAVING)],
    ids=["core", "saving"],
)
def test_no_name_of_some_rooms_has_a_retired_word(
    rooms: tuple[str, ...], beside: str, words: frozenset[str]
) -> None:
    """Of variables, attributes and parameters, too; ``beside`` are more modules."""
    prefixes = tuple(f"elaunch.{room}." for room in rooms)
    found = set()
    for module in style.modules():
        if not (f"{module}.".startswith(prefixes) or re.fullmatch(beside, module)):
            continue
        for name in itertools.chain.from_iterable(map(_names, style.nodes(module))):
            parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
            if parts & words:
                found.add(f"{module}: {name}")
    assert found == set()


@pytest.mark.slow
def test_no_name_has_a_retired_word() -> None:
    """Modules, classes and functions."""
    kinds = ast.ClassDef | ast.FunctionDef
    found: set[str] = set()
    for module in style.modules():
        if _retired_words(module):
            found.add(module)
        for node in style.nodes(module):
            if isinstance(node, kinds) and _retired_words(node.name):
                found.add(f"{module}:{node.name}")
    assert found == set()
