"""Records of a rendezvous as bytes, and back: JSON with a schema, signed if there is a secret.

::

    [<hex HMAC-SHA256> \\n] {"elaunch": 1, "kind": "agent" | "plan", field: …}

The signature is of the kind, of the place that the record is for (a plan's version, an agent's
name) and of the JSON, under a key of this run id alone (``key_of``). So what was signed once is of
no use as another version, under another name or in another run; an agent's own older records are
known by ``seq``.

Fields that have their default value are left out. A plan's nodes are columns, joined by commas: the
plan of 4,096 nodes stays below 200 KB and is read in about two milliseconds, by each of 4,096
agents. Any process that reaches the store may have written a record, so all of it is checked: size,
signature, version, each field's type and range, and no field that is not known. A record that fails
is refused with its sender named; it can disturb, it cannot run anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Final

from elaunch.errors import StoreError
from elaunch.rendezvous import schema
from elaunch.rendezvous.plan import Node, NodeStatus, Plan

VERSION: Final = 1
MAX_AGENT_BYTES: Final = 64 * 1024
MAX_PLAN_BYTES: Final = 8 * 1024 * 1024
SIGNATURE_BYTES: Final = 64
"""Length of a signature in hex digits; a newline follows it."""


class RecordError(StoreError):
    """A record in the store is refused: names who sent it and what is wrong with it."""


def _defaults(record: type[NodeStatus] | type[Plan]) -> dict[str, Any]:
    return {f.name: f.default for f in fields(record) if f.default is not MISSING}


_AGENT_DEFAULTS = {**_defaults(NodeStatus), "facts": {}}
_PLAN_DEFAULTS = {**_defaults(Plan), "facts": {}}


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def key_of(secret: bytes | None, run_id: str) -> bytes | None:
    """Return what signs the records of one run id, None without a secret."""
    if secret is None:
        return None
    return hmac.digest(secret, b"elaunch records of " + run_id.encode(), hashlib.sha256)


def encode(record: NodeStatus | Plan, secret: bytes | None, at: str | int) -> bytes:
    """Return a record as bytes for the store, signed if there is a ``secret``.

    ``at`` is the agent's name, or the plan's version.

    Raises:
        RecordError: no other agent could read it: a field does not fit, or it is too large.
    """
    plan = isinstance(record, Plan)
    defaults = _PLAN_DEFAULTS if plan else _AGENT_DEFAULTS
    table = schema.PLAN if plan else schema.AGENT
    said = {
        name: value
        for name, value in vars(record).items()
        if name not in defaults or value != defaults[name]
    }
    if isinstance(record, Plan) and record.nodes:
        said["nodes"] = _columns(record.nodes)
    for name, value in said.items():
        if isinstance(value, tuple):
            said[name] = list(value)
        elif isinstance(value, Mapping):
            said[name] = dict(value)
    _check(said, table, "this agent")
    kind = "plan" if plan else "agent"
    body = json.dumps(
        {"elaunch": VERSION, "kind": kind, **said}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    raw = body if secret is None else _signature(f"{kind} {at}", body, secret) + b"\n" + body
    _check_size(raw, MAX_PLAN_BYTES if plan else MAX_AGENT_BYTES, "this agent")
    return raw


def fitting(record: NodeStatus) -> NodeStatus:
    """Return the record with its free texts made fit to be written."""
    failure = record.failure
    if failure is not None and isinstance(failure.get("text"), str):
        failure = {**failure, "text": _text(failure["text"])}
    return replace(record, failure=failure, reason=_text(record.reason), note=_text(record.note))


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()[: schema.MOST_FREE]


def _columns(nodes: tuple[Node, ...]) -> dict[str, Any]:
    """Return the nodes as one text per field; a list where a comma is part of a value."""
    columns: dict[str, Any] = {}
    for name in _NODE_FIELDS:
        values = [str(getattr(node, name)) for node in nodes]
        if len(set(values)) == 1 and len(values) > 1:
            columns[name] = {"all": values[0], "number": len(values)}
        elif any("," in value for value in values):
            columns[name] = values
        else:
            columns[name] = ",".join(values)
    return columns


def _signature(place: str, body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, f"{place}\n".encode() + body, hashlib.sha256).hex().encode()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def decode_agent(raw: bytes, secret: bytes | None, sender: str) -> NodeStatus:
    """Return the record that ``sender`` has published of itself.

    Raises:
        RecordError: it is malformed, too large, of another version or not signed with ``secret``.
    """
    said = _read(raw, secret, sender, f"agent {sender}")
    _kind(said, "agent", sender)
    _check(said, schema.AGENT, sender)
    _require(said, ("host", "addr", "port", "slots"), sender)
    return NodeStatus(**said)


def decode_plan(raw: bytes, secret: bytes | None, sender: str, version: int) -> Plan:
    """Return the plan that ``sender`` has published as ``version``.

    Raises:
        RecordError: as for :func:`decode_agent`.
    """
    said = _read(raw, secret, sender, f"plan {version}")
    _kind(said, "plan", sender)
    _check(said, schema.PLAN, sender)
    _require(said, ("job",), sender)
    if "nodes" in said:
        said["nodes"] = _nodes(said["nodes"], sender)
    for name in ("spares", "joining", "strangers"):
        if name in said:
            said[name] = tuple(said[name])
    return Plan(**said)


def _read(raw: bytes, secret: bytes | None, sender: str, place: str) -> dict[str, Any]:
    _check_size(raw, MAX_PLAN_BYTES if place.startswith("plan") else MAX_AGENT_BYTES, sender)
    signed = raw[SIGNATURE_BYTES : SIGNATURE_BYTES + 1] == b"\n" and not raw.startswith(b"{")
    body = raw[SIGNATURE_BYTES + 1 :] if signed else raw
    if secret is None and signed:
        raise _refused(sender, "it is signed, and this agent was given no --rdzv-secret-file")
    if secret is not None and not signed:
        raise _refused(sender, "it is not signed; start every agent with --rdzv-secret-file")
    if secret is not None and not hmac.compare_digest(
        raw[:SIGNATURE_BYTES], _signature(place, body, secret)
    ):
        raise _refused(
            sender,
            "its signature is wrong; its --rdzv-secret-file is another one, or it was written for "
            "another place by who cannot sign",
        )
    try:
        said = json.loads(body.decode())
    except (ValueError, RecursionError) as exc:  # not UTF-8, not JSON, or nested without end
        raise _refused(sender, f"it is not JSON ({type(exc).__name__})") from None
    if type(said) is not dict or "elaunch" not in said:
        raise _refused(sender, "it is no record of elaunch")
    version = said.pop("elaunch")
    if version != VERSION or type(version) is not int:
        raise _refused(
            sender,
            f"it is of version {_shown(version)}, this agent reads {VERSION}; "
            "install the same version of elaunch on every node",
        )
    return said


def _kind(said: dict[str, Any], expected: str, sender: str) -> None:
    kind = said.pop("kind", None)
    if kind != expected:
        raise _refused(sender, f"it is of the kind {_shown(kind)}, not {expected!r}")


def _check(said: Mapping[str, Any], table: Mapping[str, schema.Kind], sender: str) -> None:
    for name, value in said.items():
        kind = table.get(name)
        if kind is None:
            raise _refused(sender, f"it has an unknown field {_shown(name)}")
        if not kind.fits(value):
            raise _refused(sender, f"its {name} is {_shown(value)}, not {kind.words}")


def _require(said: Mapping[str, Any], names: tuple[str, ...], sender: str) -> None:
    missing = [name for name in names if name not in said]
    if missing:
        raise _refused(sender, f"it has no {', '.join(missing)}")


_NODE_FIELDS: Final = tuple(f.name for f in fields(Node))
_NODE_NUMBERS: Final = {"slots": 9_999_999, "courier": 65_535}
"""The columns that are numbers, and their largest values."""


def _nodes(columns: dict[str, Any], sender: str) -> tuple[Node, ...]:
    if set(columns) != set(_NODE_FIELDS):
        raise _refused(sender, f"its nodes have the columns {_shown(sorted(columns))}")
    split = {name: _column(columns[name], name, sender) for name in _NODE_FIELDS}
    if len({len(values) for values in split.values()}) != 1:
        raise _refused(sender, "the columns of its nodes differ in length")
    for name, most in _NODE_NUMBERS.items():
        texts = split[name]
        if not all(len(text) <= 7 and text.isascii() and text.isdigit() for text in set(texts)):
            raise _refused(sender, f"its nodes have {name} that are no numbers")
        split[name] = list(map(int, texts))
        if max(split[name], default=0) > most:
            raise _refused(sender, f"its nodes have {name} above {most}")
    return tuple(map(Node, *(split[name] for name in _NODE_FIELDS)))


def _column(column: Any, name: str, sender: str) -> list[Any]:
    values = column
    if type(column) is str and not schema.CONTROL.search(column):
        return column.split(",")
    if type(column) is dict and schema.NODES_ALL.fits(column):
        return [column["all"]] * int(column["number"])
    if type(values) is not list or not all(map(schema.is_short, values)):
        raise _refused(sender, f"the column {name} of its nodes is malformed")
    return values


def _check_size(raw: bytes, most: int, sender: str) -> None:
    if len(raw) > most:
        raise _refused(sender, f"it has {len(raw):,} bytes, more than {most:,}")


def _refused(sender: str, problem: str) -> RecordError:
    return RecordError(f"the record of {sender} is refused: {problem}")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
