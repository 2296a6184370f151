"""Records of a rendezvous as bytes, and back: JSON, signed if there is a secret.

::

    [<hex HMAC-SHA256> \\n] {"elaunch": <version>, "kind": "agent" | "plan", field: …}

The signature covers the kind, the purpose of the record (a plan's version, an agent's name) and the
JSON. Its key is of one run id (``key_of``). So a record that was signed once cannot be used as
another version, under another name or in another run. An agent's older records have a lower
``seq``.

Fields with their default value are left out. The nodes of a plan are beside it, as ``{field of a
node: column}`` without a signature; the plan has their digest. So the plan, which every agent reads
twice in a round, has some hundred bytes, and an agent reads and decodes the nodes only when they
have changed. Columns are joined by commas: 4,096 nodes stay below 200 KB.

Any process that reaches the store may have written a record, so all of it is checked: size,
signature, version, each field's type and range (elaunch.rendezvous.plan), and no field that is not
known. A record that fails is refused with its sender named; it can disturb, it cannot run anything.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, ValidationError
from msgspec.structs import replace

from elaunch.errors import StoreError
from elaunch.rendezvous.plan import (
    NUMBERS,
    Column,
    Line,
    Node,
    NodeList,
    NodeStatus,
    Plan,
    Port,
    Slots,
    length,
)
from elaunch.rendezvous.plan import column as column_of
from elaunch.text import shortened

if TYPE_CHECKING:
    from elaunch.store.protocol import Post

VERSIONS: Final = {"agent": 3, "plan": 4}
"""The version of each kind that is written and read; all nodes of a job have the same elaunch."""
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
    peer_port: _Column


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def key_of(secret: bytes | None, run_id: str) -> bytes | None:
    """Return what signs the records of one run id, None without a secret."""
    if secret is None:
        return None
    return hmac.digest(secret, b"elaunch records of " + run_id.encode(), hashlib.sha256)


def encode(record: NodeStatus, secret: bytes | None, name: str) -> bytes:
    """Return the record of the agent ``name`` as bytes, signed if there is a ``secret``.

    Raises:
        RecordError: no other agent could read it: a field does not fit, or it is too large.
    """
    return _encoded(record, {}, secret, ("agent", name), MAX_AGENT_BYTES)


def encode_plan(plan: Plan, secret: bytes | None, version: int, nodes: bytes) -> bytes:
    """Return a plan as bytes, without its nodes: those are ``nodes``, as encode_nodes returns them.

    Raises:
        RecordError: as for :func:`encode`.
    """
    reference = {"nodes": _digest(nodes)} if nodes else {}
    return _encoded(
        replace(plan, nodes=()), reference, secret, ("plan", str(version)), MAX_PLAN_BYTES
    )


def encode_nodes(nodes: Sequence[Node]) -> bytes:
    """Return a plan's nodes as bytes for the store; raises as :func:`encode`."""
    if not nodes:
        return b""
    raw = _json({name: _column(nodes, name) for name in Node.__struct_fields__})
    _check_size(raw, MAX_PLAN_BYTES, "this agent")
    return raw


def _encoded(
    record: NodeStatus | Plan,
    more: dict[str, str],
    secret: bytes | None,
    purpose: tuple[str, str],
    most: int,
) -> bytes:
    fields = msgspec.to_builtins(record)
    _fitted(fields, type(record), "this agent")
    kind = purpose[0]
    body = _json({"elaunch": VERSIONS[kind], "kind": kind, **fields, **more})
    raw = body if secret is None else _signature(" ".join(purpose), body, secret) + b"\n" + body
    _check_size(raw, most, "this agent")
    return raw


def _json(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except UnicodeEncodeError:
        raise _refused("this agent", "it has text that is not Unicode") from None


def _digest(nodes: bytes) -> str:
    return hashlib.blake2b(nodes, digest_size=16).hexdigest()


def fitting(record: NodeStatus) -> NodeStatus:
    """Return the record with its free texts made fit to be written."""
    failure = record.failure
    if failure is not None:
        failure = replace(failure, text=_text(failure.text))
    return replace(record, failure=failure, reason=_text(record.reason), note=_text(record.note))


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()[:MOST_FREE]


def _column(nodes: Sequence[Node], name: str) -> Any:
    """Return one field of all nodes as one text; as a list where a comma is part of a value."""
    values = list(map(str, column_of(nodes, name)))
    if len(set(values)) == 1 and len(values) > 1:
        return {"all": values[0], "number": len(values)}
    return values if any("," in value for value in values) else ",".join(values)


def _signature(purpose: str, body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, f"{purpose}\n".encode() + body, hashlib.sha256).hex().encode()


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def decode_agent(raw: bytes, secret: bytes | None, sender: str) -> NodeStatus:
    """Return the record that ``sender`` has published of itself.

    Raises:
        RecordError: it is malformed, too large, of another version or not signed with ``secret``.
    """
    return _fitted(_read(raw, secret, sender, ("agent", sender)), NodeStatus, sender)


def decode_plan(post: Post, secret: bytes | None, sender: str, known: Sequence[Node] = ()) -> Plan:
    """Return the plan that ``sender`` has published; ``known`` are nodes that were decoded before.

    Raises:
        RecordError: as for :func:`decode_agent`.
    """
    sender = f"{sender} (the key {post.key})" if post.key else sender
    fields = _read(post.value, secret, sender, ("plan", str(post.version)))
    named = fields.pop("nodes", None)
    nodes: Sequence[Node] = ()
    if named is not None:
        nodes = _listed(named, post.nodes, sender, known)
    return replace(_fitted(fields, Plan, sender), nodes=nodes)


def _listed(named: Any, raw: bytes, sender: str, known: Sequence[Node]) -> Sequence[Node]:
    """Return the nodes that a plan names by their digest."""
    if isinstance(known, NodeList) and known.digest == named:
        return known
    _check_size(raw, MAX_PLAN_BYTES, sender)
    if _digest(raw) != named:
        raise _refused(sender, "the list of its nodes is not there, or is that of another plan")
    return _nodes(_parsed(raw, sender), named, sender, plain=_is_plain(raw))


def _read(
    raw: bytes, secret: bytes | None, sender: str, purpose: tuple[str, str]
) -> dict[str, Any]:
    """Return the fields of a record of the kind ``purpose[0]``."""
    kind = purpose[0]
    _check_size(raw, MAX_PLAN_BYTES if kind == "plan" else MAX_AGENT_BYTES, sender)
    signed = raw[SIGNATURE_BYTES : SIGNATURE_BYTES + 1] == b"\n" and not raw.startswith(b"{")
    body = raw[SIGNATURE_BYTES + 1 :] if signed else raw
    if secret is None and signed:
        raise _refused(sender, "it is signed, and this agent was given no --rdzv-secret-file")
    if secret is not None and not signed:
        raise _refused(sender, "it is not signed; start every agent with --rdzv-secret-file")
    if secret is not None and not hmac.compare_digest(
        raw[:SIGNATURE_BYTES], _signature(" ".join(purpose), body, secret)
    ):
        raise _refused(
            sender,
            "its signature is wrong; its --rdzv-secret-file is another one, or it was written for "
            "another place by who cannot sign",
        )
    fields = _parsed(body, sender)
    if type(fields) is not dict or "elaunch" not in fields:
        raise _refused(sender, "it is no record of elaunch")
    version = fields.pop("elaunch")
    if version != VERSIONS[kind] or type(version) is not int:
        raise _refused(
            sender,
            f"it is of version {_shown(version)}, this agent reads {VERSIONS[kind]}; "
            "install the same version of elaunch on every node",
        )
    found = fields.pop("kind", None)
    if found != kind:
        raise _refused(sender, f"it is of the kind {_shown(found)}, not {kind!r}")
    return fields


def _parsed(body: bytes, sender: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as exc:  # not JSON, a huge number, or too deep
        raise _refused(sender, f"it is not JSON ({type(exc).__name__})") from None


def _is_plain(raw: bytes) -> bool:
    """Return whether no text in this JSON has control characters: it writes them by escapes."""
    return raw.isascii() and b"\\" not in raw and b"\x7f" not in raw


def _fitted(
    fields: Any, kind: type[Fitted], sender: str, part: str = "", *, plain: bool = False
) -> Fitted:
    """Return ``fields`` as ``kind``, whose types and bounds it has to fit.

    ``plain``: nothing in them has to be searched for control characters.
    """
    try:
        fitted = msgspec.convert(fields, kind)
        if not plain:
            _check_lines(part, fields, sender)
        return fitted
    except ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
    problem = shortened(ascii(problem[:1].lower() + problem[1:].replace("`", ""))[1:-1], 80)
    field = re.search(r"\$\.(\w+)", path)
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
    elif isinstance(value, str) and not value.isprintable() and _CONTROL.search(value):
        raise _refused(sender, f"its {name} is {_shown(value)}, not one line")


def _nodes(fields: Any, digest: str, sender: str, *, plain: bool = False) -> Sequence[Node]:
    fitted = _fitted(fields, _Columns, sender, "nodes", plain=plain)
    columns = {name: _plain(getattr(fitted, name)) for name in Node.__struct_fields__}
    if len(set(map(length, columns.values()))) != 1:
        raise _refused(sender, "the columns of its nodes differ in length")
    for name, kind in zip(NUMBERS, (list[Slots], list[Port]), strict=True):
        try:
            msgspec.convert(_different(columns[name]), kind, strict=False)
        except ValidationError as error:
            problem = str(error).partition(" - at ")[0].replace("`", "")
            raise _refused(sender, f"its nodes.{name} are no numbers: {problem}") from None
    return NodeList(columns, digest) if length(columns["name"]) else ()


def _plain(column: _Column) -> Column:
    return (column.all, column.number) if isinstance(column, _Same) else column


def _different(column: Column) -> list[str]:
    """Return the values of a column, those of all nodes once."""
    if isinstance(column, str):
        return column.split(",")
    return [column[0]] if isinstance(column, tuple) else column


def _check_size(raw: bytes, most: int, sender: str) -> None:
    if len(raw) > most:
        raise _refused(sender, f"it has {len(raw):,} bytes, more than {most:,}")


def _refused(sender: str, problem: str) -> RecordError:
    return RecordError(f"the record of {sender} is refused: {problem}")


def _shown(value: Any) -> str:
    return shortened(ascii(value), 80)
