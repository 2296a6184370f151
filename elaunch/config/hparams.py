"""The ``hyperparameters`` of a job file: read as values, and handed to the script as JSON.

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
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from elaunch.errors import UsageError

if TYPE_CHECKING:
    from yaml import Node, ScalarNode

LARGEST: Final = 100_000
"""Bytes of JSON: Linux takes 128 KiB in one variable."""
DEEPEST: Final = 20
MOST: Final = 10_000
_SEARCHED: Final = ("int", "double", "log", "categorical")
_FLOAT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SPACE: Final = ("minval", "maxval", "vals")
_PLAIN: Final = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))


def to_json(root: Node, where: Callable[[Node], str]) -> str:
    """Return a mapping's values as JSON.

    Raises:
        UsageError: a value is to be searched for, a key is there twice, or it is too large or too
            deep; with the line, as ``where`` names it.
    """
    text = json.dumps(_NodeReader(where).value(root, "hyperparameters", 0))
    if len(text) > LARGEST:
        raise UsageError(
            f"{where(root)}: hyperparameters takes {len(text):,} bytes as JSON, and {LARGEST:,} "
            "fit: keep what is large in a file, and give its name"
        )
    return text


class _NodeReader:
    """Turns the nodes of one section into values; anchors may make a small file a large one."""

    def __init__(self, where: Callable[[Node], str]) -> None:
        self._where = where
        self._count = 0

    def value(self, node: Node, name: str, depth: int) -> Any:
        """Return what ``node`` stands for; messages call it ``name``."""
        import yaml

        self._count += 1
        if depth > DEEPEST or self._count > MOST:
            limit = f"{DEEPEST} levels" if depth > DEEPEST else f"{MOST:,} values"
            raise self._wrong(node, f"{name} has more than {limit}")
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(each, f"{name}[{i}]", depth + 1) for i, each in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, name, depth)
        assert isinstance(node, yaml.ScalarNode)  # there are no other kinds
        return self._scalar(node)

    def _mapping(self, node: Any, name: str, depth: int) -> Any:
        import yaml

        found: dict[str, Any] = {}
        for key, each in node.value:
            if not isinstance(key, yaml.ScalarNode):
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
        import yaml

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
