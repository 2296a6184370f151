"""Records of a rendezvous as bytes, and back: JSON, signed if there is a secret.

::

    [<hex HMAC-SHA256> \\n] {"elaunch": 1, "kind": "agent" | "plan", field: …}

The signature is of the kind, of the place that the record is for (a plan's version, an agent's
name) and of the JSON, under a key of this run id alone (``key_of``). So what was signed once is of
no use as another version, under another name or in another run; an agent's own older records are
known by ``seq``.

Fields that have their default value are left out. A plan's nodes are columns, joined by commas: the
plan of 4,096 nodes stays below 200 KB and is read in about two milliseconds, by each of 4,096
agents. Any process that reaches the store may have written a record, so all of it is checked: size,
signature, version, each field's type and range (elaunch.rendezvous.plan), and no field that is not
known. A record that fails
is refused with its sender named; it can disturb, it cannot run anything.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError
from msgspec.structs import replace

from elaunch.errors import StoreError
from elaunch.rendezvous.plan import Line, Node, NodeStatus, Plan, Port, Slots

VERSION: Final = 1
MAX_AGENT_BYTES: Final = 64 * 1024
MAX_PLAN_BYTES: Final = 8 * 1024 * 1024
MOST_FREE: Final = 5_000
"""Characters of a free text that this agent writes; three of them fit into a record."""
SIGNATURE_BYTES: Final = 64
"""Length of a signature in hex digits; a newline follows it."""

# Not by Meta(pattern=…): msgspec 0.22 corrupts memory where that is in a union with a list.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f\u2028\u2029\ud800-\udfff]")
_FREE: Final = frozenset(
    ("reason", "note", "asks", "asked", "waits", "notice", "text", "summary", "path")
)
"""Fields that may have several lines."""

Fitted = TypeVar("Fitted")


class RecordError(StoreError):
    """A record in the store is refused: names who sent it and what is wrong with it."""


class _Same(Struct, frozen=True, forbid_unknown_fields=True):
    """A column in which each of ``number`` nodes has the same value."""

    all: Line
    number: Annotated[int, Meta(ge=1, le=100_000)]


_Column = str | list[str] | _Same


class _Columns(Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes of a plan, a column for each field."""

    name: _Column
    host: _Column
    addr: _Column
    slots: _Column
    role: _Column
    courier: _Column


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
    nodes: dict[str, Any] = {}
    kind, most = "agent", MAX_AGENT_BYTES
    plain = record
    if isinstance(record, Plan):
        kind, most = "plan", MAX_PLAN_BYTES
        nodes = {"nodes": _columns(record.nodes)} if record.nodes else {}
        plain = replace(record, nodes=())
    fields = msgspec.to_builtins(plain)
    _fitted(fields, type(record), "this agent")
    try:
        body = msgspec.json.encode({"elaunch": VERSION, "kind": kind, **fields, **nodes})
    except UnicodeEncodeError:
        raise _refused("this agent", "it has text that is not Unicode") from None
    raw = body if secret is None else _signature(f"{kind} {at}", body, secret) + b"\n" + body
    _check_size(raw, most, "this agent")
    return raw


def fitting(record: NodeStatus) -> NodeStatus:
    """Return the record with its free texts made fit to be written."""
    failure = record.failure
    if failure is not None:
        failure = replace(failure, text=_text(failure.text))
    return replace(record, failure=failure, reason=_text(record.reason), note=_text(record.note))


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()[:MOST_FREE]


def _columns(nodes: tuple[Node, ...]) -> dict[str, Any]:
    """Return the nodes as one text per field; a list where a comma is part of a value."""
    columns: dict[str, Any] = {}
    for name in Node.__struct_fields__:
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
    fields = _read(raw, secret, sender, f"agent {sender}")
    _kind(fields, "agent", sender)
    return _fitted(fields, NodeStatus, sender)


def decode_plan(raw: bytes, secret: bytes | None, sender: str, version: int) -> Plan:
    """Return the plan that ``sender`` has published as ``version``.

    Raises:
        RecordError: as for :func:`decode_agent`.
    """
    fields = _read(raw, secret, sender, f"plan {version}")
    _kind(fields, "plan", sender)
    nodes = _nodes(fields.pop("nodes"), sender) if "nodes" in fields else ()
    return replace(_fitted(fields, Plan, sender), nodes=nodes)


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
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as exc:  # not JSON, a huge number, or too deep
        raise _refused(sender, f"it is not JSON ({type(exc).__name__})") from None
    if type(fields) is not dict or "elaunch" not in fields:
        raise _refused(sender, "it is no record of elaunch")
    version = fields.pop("elaunch")
    if version != VERSION or type(version) is not int:
        raise _refused(
            sender,
            f"it is of version {_shown(version)}, this agent reads {VERSION}; "
            "install the same version of elaunch on every node",
        )
    return fields


def _kind(fields: dict[str, Any], expected: str, sender: str) -> None:
    kind = fields.pop("kind", None)
    if kind != expected:
        raise _refused(sender, f"it is of the kind {_shown(kind)}, not {expected!r}")


def _fitted(fields: Any, kind: type[Fitted], sender: str, part: str = "") -> Fitted:
    """Return ``fields`` as ``kind``, whose types and bounds it has to fit."""
    try:
        fitted = msgspec.convert(fields, kind)
        _check_lines(part, fields, sender)
        return fitted
    except ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
    problem = _clipped(ascii(problem[:1].lower() + problem[1:].replace("`", ""))[1:-1])
    field = re.search(r"\$\.(\w+)", place)
    if field is None or field[1] not in fields:
        raise _refused(sender, f"its {part}: {problem}" if part else problem)
    name = f"{part}.{field[1]}" if part else field[1]
    raise _refused(sender, f"its {name} is {_shown(fields[field[1]])}: {problem}")


def _check_lines(name: str, value: Any, sender: str) -> None:
    """Refuse control characters where one line is meant, also in keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_lines(name or "a key", key, sender)
            if key not in _FREE or name == "facts":
                _check_lines(name or key, item, sender)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_lines(name, item, sender)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise _refused(sender, f"its {name} is {_shown(value)}, not one line")


def _nodes(fields: Any, sender: str) -> tuple[Node, ...]:
    columns = _fitted(fields, _Columns, sender, "nodes")
    split = {name: _values(getattr(columns, name)) for name in Node.__struct_fields__}
    if len({len(values) for values in split.values()}) != 1:
        raise _refused(sender, "the columns of its nodes differ in length")
    for name, kind in (("slots", list[Slots]), ("courier", list[Port])):
        try:
            split[name] = msgspec.convert(split[name], kind, strict=False)
        except ValidationError as error:
            problem = str(error).partition(" - at ")[0].replace("`", "")
            raise _refused(sender, f"its nodes.{name} are no numbers: {problem}") from None
    return tuple(map(Node, *split.values()))


def _values(column: str | list[str] | _Same) -> list[Any]:
    if isinstance(column, str):
        return column.split(",")
    return [column.all] * column.number if isinstance(column, _Same) else column


def _check_size(raw: bytes, most: int, sender: str) -> None:
    if len(raw) > most:
        raise _refused(sender, f"it has {len(raw):,} bytes, more than {most:,}")


def _refused(sender: str, problem: str) -> RecordError:
    return RecordError(f"the record of {sender} is refused: {problem}")


def _shown(value: Any) -> str:
    return _clipped(ascii(value))


def _clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"
