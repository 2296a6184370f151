"""Read a job file: the settings of one job in YAML (docs/job-file.md).

=====================================  =========================================================
key                                    is
=====================================  =========================================================
any flag's name                        that flag, with ``-`` or ``_``
nodes, slots, restarts                 --nnodes, --nproc-per-node, --max-restarts
entrypoint                             the command: a string or a list
environment                            variables of the workers
hyperparameters                        values that the script finds in ``ctx.info.hparams``
checkpoint: {dir, glob, local, …}      --checkpoint-dir, --checkpoint-glob, … (by any such flag)
resources: {slots_per_trial}           --nproc-per-node (Determined's spelling)
searcher: {name: single, ...}          run once (Determined's); any other search is refused
=====================================  =========================================================

Nothing is converted here: every value stays text with its line, so that the one conversion of
``flag.convert`` names the line of a wrong one. An unknown key is an error. Only hyperparameters are
read as values, and handed to the script as JSON:

===============================  =================================================================
in the file                      in the script
===============================  =================================================================
number, text, true, null         the same, by YAML's rules
list, mapping                    list, dict
``{type: const, val: X}``        X (Determined's spelling)
``{type: int, minval: …}``       refused: elaunch does not search
a date, and other kinds          its text
===============================  =================================================================
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from elaunch.config import files, values
from elaunch.config.flags.flag import Entrypoint, Flag, Given, JobFile
from elaunch.config.flags.table import FLAGS, GROUPS, TABLE
from elaunch.errors import UsageError

OF_THE_LINE = ("file", "dry-run", "detach")
KEYS = {
    key: flag
    for flag in FLAGS
    if flag.name not in OF_THE_LINE
    for key in (flag.name, *flag.aliases, *flag.keys)
}
SECTIONS = (
    "entrypoint",
    "environment",
    "hyperparameters",
    "checkpoint",
    "resources",
    "searcher",
)
SEARCHER_KEYS = ("name", "metric", "max_length", "smaller_is_better", "max_time", "time_metric")
CHECKPOINT_KEYS = {
    flag.name.removeprefix("checkpoint-"): flag.name for flag in GROUPS["Checkpoints"]
}
BLOCK_STYLES = ("|", ">")
LARGEST = 1 << 20
DEEPEST = 100
HPARAMS_BYTES: Final = 100_000
"""Bytes of JSON: Linux takes 128 KiB in one variable."""
HPARAMS_DEPTH: Final = 20
HPARAMS_VALUES: Final = 10_000
_SEARCHED: Final = ("int", "double", "log", "categorical")
_FLOAT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SPACE: Final = ("minval", "maxval", "vals")
_PLAIN: Final = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))


def load(path: Path, shown: str) -> JobFile:
    """Read the job file at ``path``; messages call it ``shown``.

    Raises:
        UsageError: missing, not readable, not YAML, or with a key or a type that has no meaning.
    """
    try:
        text = files.read_text(path, LARGEST)
    except ValueError as error:
        missing = str(error) == files.NOTHING_THERE
        raise UsageError(f"--file: {shown!r} {error}{_near(path) if missing else ''}") from None
    if _deepest(text) > DEEPEST:
        raise UsageError(f"{shown}: not YAML of a job: nested more than {DEEPEST} deep")
    return _TextReader(shown).read(text)


def _near(path: Path) -> str:
    try:
        return values.did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""


def _deepest(text: str) -> int:
    """Return how deep brackets stand in brackets: yaml needs the square of it to find out."""
    depth = deepest = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth = max(0, depth + (1 if found[0] in "[{" else -1))
        deepest = max(deepest, depth)
    return deepest


class _TextReader:
    """Collects the texts of one file; ``read`` is called once."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.flags: dict[str, Given] = {}
        self.entrypoint = Entrypoint()
        self.environment: dict[str, Given] = {}
        self.hparams: Given | None = None
        self.notices: list[str] = []

    def read(self, text: str) -> JobFile:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as exc:
            line = exc.problem_mark.line + 1 if exc.problem_mark else 1
            raise UsageError(f"{self.shown}:{line}: not YAML: {exc.problem}") from None
        except (yaml.YAMLError, RecursionError) as exc:
            raise UsageError(f"{self.shown}: not YAML: {exc}") from None
        if root is None:
            raise UsageError(f"{self.shown}: the file is empty; it needs at least 'entrypoint'")
        known = [*(name.replace("-", "_") for name in KEYS), *SECTIONS]
        for key, node in self._pairs(root, "the file", known):
            if key in SECTIONS:
                getattr(self, f"_read_{key}")(node)
            else:
                self._set(KEYS[values.fold(key)], node)
        notices = tuple(self.notices)
        return JobFile(self.flags, self.entrypoint, self.environment, notices, self.hparams)

    def _where(self, node: Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"

    def _wrong(self, node: Node, what: str) -> UsageError:
        return UsageError(f"{self._where(node)}: {what}")

    def _pairs(self, node: Node, name: str, known: list[str] | None) -> Iterator[tuple[str, Node]]:
        """Yield keys and values of a mapping; unknown and repeated keys are errors."""
        seen: dict[str, int] = {}
        for key_node, value in self._mapping(node, name).value:
            key = self._scalar(key_node, f"a key of {name}")
            folded = values.fold(key) if known is not None else key
            if known is not None and folded not in map(values.fold, known):
                hint = values.did_you_mean(key, known)
                if not hint and len(known) < len(KEYS):
                    hint = f"; known: {', '.join(known)}"
                raise self._wrong(key_node, f"unknown key {key!r} in {name}{hint}")
            if folded in seen:
                first = f"first on line {seen[folded]}"
                raise self._wrong(key_node, f"the key {key!r} is there twice ({first})")
            seen[folded] = key_node.start_mark.line + 1
            yield (folded if folded in SECTIONS else key), value

    def _mapping(self, node: Node, name: str) -> MappingNode:
        if not isinstance(node, MappingNode):
            raise self._wrong(node, f"{name} must be a mapping of 'key: value' lines")
        return node

    def _scalar(self, node: Node, name: str) -> str:
        if not isinstance(node, ScalarNode):
            raise self._wrong(node, f"{name} must be one value, not {_kind(node)}")
        if node.tag == "tag:yaml.org,2002:null":
            raise self._wrong(node, f"{name} has no value; leave the line out for the default")
        text: str = node.value
        return text.rstrip("\n") if node.style in BLOCK_STYLES else text

    def _set(self, flag: Flag, node: Node) -> None:
        if flag.name in self.flags:
            first = self.flags[flag.name].where
            raise self._wrong(node, f"sets --{flag.name} a second time (first at {first})")
        self.flags[flag.name] = Given(self._text(flag, node), "file", self._where(node))

    def _text(self, flag: Flag, node: Node) -> str:
        """Return the text that would follow the flag on the command line."""
        name, kind = flag.name, flag.kind
        if isinstance(node, SequenceNode) and kind.comma:
            items = [self._scalar(each, f"an item of {name}") for each in node.value]
            return ",".join(item.replace(",", kind.comma) for item in items)
        if isinstance(node, MappingNode) and kind.pairs:
            found = self._pairs(node, name, None)
            return ",".join(f"{key}{kind.pairs}{self._scalar(each, key)}" for key, each in found)
        return self._scalar(node, name)

    def _read_entrypoint(self, node: Node) -> None:
        if isinstance(node, SequenceNode):
            words = [self._scalar(each, "an item of entrypoint") for each in node.value]
        else:
            try:
                words = shlex.split(self._scalar(node, "entrypoint"))
            except ValueError as exc:
                raise self._wrong(node, f"entrypoint cannot be split into words: {exc}") from None
        if not words:
            raise self._wrong(node, "entrypoint is empty")
        for word in words:
            if why := values.unfit(word):
                raise self._wrong(node, f"entrypoint: {word!r} {why}")
        self.entrypoint = Entrypoint(tuple(words), self._where(node))

    def _read_environment(self, node: Node) -> None:
        for key, value in self._pairs(node, "environment", None):
            if key == "environment_variables" and not isinstance(value, ScalarNode):
                self._read_variables(value)
            else:
                self._set_variable(key, value, self._scalar(value, f"the variable {key}"))

    def _read_variables(self, node: Node) -> None:
        """Read Determined's list of ``NAME=value``, or a mapping."""
        if isinstance(node, MappingNode):
            for key, each in self._pairs(node, "environment_variables", None):
                self._set_variable(key, each, self._scalar(each, f"the variable {key}"))
            return
        for item in node.value:
            name, equals, value = self._scalar(item, "a variable").partition("=")
            if not equals:
                raise self._wrong(item, f"{name!r} is not of the form NAME=value")
            self._set_variable(name, item, value)

    def _set_variable(self, name: str, node: Node, value: str) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise self._wrong(node, f"{name!r} is not the name of a variable")
        if name in self.environment:
            raise self._wrong(node, f"the variable {name} is there twice")
        if why := values.unfit(value):
            raise self._wrong(node, f"the variable {name} {why}")
        self.environment[name] = Given(value, "file", self._where(node))

    def _read_hyperparameters(self, node: Node) -> None:
        self._mapping(node, "hyperparameters")
        self.hparams = Given(hparams_to_json(node, self._where), "file", self._where(node))

    def _read_checkpoint(self, node: Node) -> None:
        for key, value in self._pairs(node, "checkpoint", list(CHECKPOINT_KEYS)):
            self._set(TABLE[CHECKPOINT_KEYS[values.fold(key)]], value)

    def _read_resources(self, node: Node) -> None:
        for _, value in self._pairs(node, "resources", ["slots_per_trial"]):
            self._set(KEYS["nproc-per-node"], value)

    def _read_searcher(self, node: Node) -> None:
        found = dict(self._pairs(node, "searcher", list(SEARCHER_KEYS)))
        if "name" not in found:
            raise self._wrong(node, "searcher has no name; elaunch knows 'single' (run once)")
        name = self._scalar(found.pop("name"), "the searcher's name")
        if name != "single":
            raise self._wrong(
                node,
                f"searcher {name!r}: elaunch runs a job once ('single') and does not search "
                "over hyperparameters; start one job for each setting instead",
            )
        if found:
            self.notices.append(
                f"{self._where(node)}: {', '.join(found)} of the searcher has no effect: "
                "the script decides how long it trains"
            )


def _kind(node: Node) -> str:
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def hparams_to_json(root: Node, where: Callable[[Node], str]) -> str:
    """Return a mapping's values as JSON.

    Raises:
        UsageError: a value is to be searched for, a key is there twice, or it is too large or too
            deep; with the line, as ``where`` names it.
    """
    text = json.dumps(_NodeReader(where).value(root, "hyperparameters", 0))
    if len(text) > HPARAMS_BYTES:
        raise UsageError(
            f"{where(root)}: hyperparameters takes {len(text):,} bytes as JSON, and "
            f"{HPARAMS_BYTES:,} fit: keep what is large in a file, and give its name"
        )
    return text


class _NodeReader:
    """Turns the nodes of one section into values; anchors may make a small file a large one."""

    def __init__(self, where: Callable[[Node], str]) -> None:
        self._where = where
        self._count = 0

    def value(self, node: Node, name: str, depth: int) -> Any:
        """Return what ``node`` stands for; messages call it ``name``."""
        self._count += 1
        if depth > HPARAMS_DEPTH or self._count > HPARAMS_VALUES:
            limit = (
                f"{HPARAMS_DEPTH} levels" if depth > HPARAMS_DEPTH else f"{HPARAMS_VALUES:,} values"
            )
            raise self._wrong(node, f"{name} has more than {limit}")
        if isinstance(node, SequenceNode):
            return [
                self.value(each, f"{name}[{i}]", depth + 1) for i, each in enumerate(node.value)
            ]
        if isinstance(node, MappingNode):
            return self._mapping(node, name, depth)
        assert isinstance(node, ScalarNode)  # there are no other kinds
        return self._scalar(node)

    def _mapping(self, node: Any, name: str, depth: int) -> Any:
        found: dict[str, Any] = {}
        for key, each in node.value:
            if not isinstance(key, ScalarNode):
                raise self._wrong(key, f"a key of {name} must be one value")
            if key.value in found:
                raise self._wrong(key, f"the key {key.value!r} is there twice in {name}")
            found[key.value] = self.value(each, f"{name}.{key.value}", depth + 1)
        if depth and found.get("type") == "const" and set(found) == {"type", "val"}:
            return found["val"]
        if depth and found.get("type") in _SEARCHED and any(word in found for word in _SPACE):
            raise self._wrong(
                node,
                f"{name} is of type {found['type']!r}: elaunch does not search over "
                "hyperparameters; give its value, and start one job for each",
            )
        return found

    def _scalar(self, node: ScalarNode) -> Any:
        if node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)  # to PyYAML 1e-4 is text
        if node.tag not in _PLAIN:
            return node.value
        try:
            return yaml.SafeLoader("").construct_document(node)
        except (ValueError, KeyError, yaml.YAMLError):
            return node.value

    def _wrong(self, node: Node, what: str) -> UsageError:
        return UsageError(f"{self._where(node)}: {what}")
