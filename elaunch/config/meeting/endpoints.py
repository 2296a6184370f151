"""The text of an endpoint: ``host``, ``host:port``, ``[IPv6]:port``, several of them by comma.

Only the form is looked at: whether a name resolves is asked when it is connected to, because the
machine behind it may come up later. Errors are ``ValueError`` with the end of a sentence that
begins with the endpoint, and give the form that was probably meant.
"""

from __future__ import annotations

import ipaddress
import re

_LABEL = r"\w(?:[\w-]{0,61}\w)?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def endpoint(raw: str) -> str:
    """Return an endpoint's text, or that of several, after a check of its form."""
    if raw.strip():
        split_all(raw)
    return raw.strip()


def split_all(raw: str) -> list[tuple[str, int | None]]:
    """Return (host, port or None) of each endpoint in ``h1:2379,h2:2379``, none twice."""
    parts = [part.strip() for part in raw.split(",")]
    if len(parts) > 1 and not all(parts):
        raise ValueError("has an empty part between its commas")
    return list(dict.fromkeys(map(split, parts)))


def split(raw: str) -> tuple[str, int | None]:
    """Return (host, port or None) of one endpoint; an IPv6 address without its brackets."""
    text = raw.strip()
    _refuse_url(text)
    if text.startswith("["):
        return _bracketed(text)
    if text.count(":") > 1:
        raise ValueError(_unbracketed(text))
    head, colon, tail = text.partition(":")
    if not colon:
        if text.isdigit():
            raise ValueError(f"is a port without a host; write HOST:{text}")
        return host(text), None
    if not head:
        raise ValueError("has no host before its port")
    return host(head), port(tail)


def host(raw: str) -> str:
    """Return a host's name or address after a check of its form; an IPv6 address as it is."""
    text = raw.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if is_ipv6(text):
        return text
    if text.count(":") == 1 and text.rpartition(":")[2].isdigit():
        raise ValueError("has a port in it, where only a host is expected")
    if re.fullmatch(r"[\d.]+", text):
        if not _is_ipv4(text):
            raise ValueError(f"has no valid host: {text!r} is not an IPv4 address")
    elif len(text) > 253 or not _NAME.fullmatch(text):
        raise ValueError("has no valid host: a name, an IPv4 address or [IPv6]")
    return text


def port(raw: str) -> int:
    """Return a port's number."""
    if not re.fullmatch(r"[0-9]{1,5}", raw) or int(raw) > 65535:
        raise ValueError(f"has the port {raw!r}, which is not a number from 0 to 65535")
    return int(raw)


def join(name: str, number: int | None) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    shown = f"[{name}]" if ":" in name else name
    return shown if number is None else f"{shown}:{number}"


def is_ipv6(text: str) -> bool:
    """Whether a text is an IPv6 address, perhaps with its scope (``fe80::1%eth0``)."""
    address, percent, scope = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return bool(scope) == bool(percent)


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _refuse_url(text: str) -> None:
    scheme, mark, _ = text.partition("://")
    if mark:
        tls = " (TLS: --rdzv-conf protocol=https)" if scheme.lower() == "https" else ""
        raise ValueError(f"is a URL; write HOST:PORT without {scheme + mark!r}{tls}")
    if "/" in text:
        raise ValueError("has a path in it; write HOST:PORT")


def _bracketed(text: str) -> tuple[str, int | None]:
    inner, bracket, rest = text[1:].partition("]")
    if not bracket or not is_ipv6(inner):
        raise ValueError("has no IPv6 address between its brackets")
    if not rest:
        return inner, None
    if not rest.startswith(":"):
        raise ValueError(f"has {rest!r} behind its brackets, where ':PORT' is expected")
    return inner, port(rest[1:])


def _unbracketed(text: str) -> str:
    """Return the reason why a text with several colons is no endpoint."""
    head, _, tail = text.rpartition(":")
    meant = [f"[{head}]:{tail}"] if is_ipv6(head) and tail.isdigit() else []
    meant += [f"[{text}]"] if is_ipv6(text) else []
    if meant:
        return f"is an IPv6 address without brackets; write {' or '.join(map(repr, meant))}"
    return "has more than one port, and is no IPv6 address either; several endpoints go by comma"
