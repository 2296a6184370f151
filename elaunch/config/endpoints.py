"""Endpoints: their text, which hosts and ports are this machine's, and whether a port is free.

A text is ``host``, ``host:port``, ``[IPv6]:port``, several of them by comma. Only its form is
looked at: whether a name resolves is asked when it is connected to, because the machine behind it
may come up later. Errors are ``ValueError`` with the end of a sentence that begins with the
endpoint, and give the form that was probably meant.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

from elaunch import hosts
from elaunch.config import values
from elaunch.text import one_line, shortened

# Addresses for documentation, never anybody's: the route to them is the default route.
_EVERYWHERE = ("192.0.2.1", "2001:db8::1")

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


def listening(raw: str) -> tuple[str, int]:
    """Return (host, port) of a place to listen at; a port alone is one of loopback."""
    place, number = ("127.0.0.1", port(raw)) if raw.isdecimal() else split(raw)
    if not number:
        raise ValueError("has no port, or 0: nobody would know which")
    return place, number


def pages(raw: str) -> tuple[str, int | None] | None:
    """Return (host, port or None) of a web server, "yes" for any port of loopback; None for no."""
    if not raw.isdecimal() or raw in ("0", "1"):  # another number is a port
        with contextlib.suppress(ValueError):
            if not values.switch(raw):
                return None
            raw = ""
    place = listening(raw) if raw else ("127.0.0.1", None)
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"needs {package}: pip install 'elaunch[dashboard]'")
    return place


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
        with contextlib.suppress(ValueError):
            return str(ipaddress.IPv4Address(text))
        raise ValueError(f"has no valid host: {text!r} is not an IPv4 address")
    if len(text) > 253 or not _NAME.fullmatch(text):
        raise ValueError("has no valid host: a name, an IPv4 address or [IPv6]")
    return text


def port(raw: str) -> int:
    """Return a port's number."""
    if not re.fullmatch(r"[0-9]{1,5}", raw) or int(raw) > 65535:
        raise ValueError(f"has the port {raw!r}, which is not a number from 0 to 65535")
    return int(raw)


def is_ipv6(text: str) -> bool:
    """Whether a text is an IPv6 address, perhaps with its scope (``fe80::1%eth0``)."""
    address, percent, scope = text.partition("%")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).version == 6 and bool(scope) == bool(percent)
    return False


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


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address belongs to this machine; unknown names do not."""
    if host == socket.gethostname() or hosts.is_loopback(host):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return any(_is_bindable(address) for address in addresses(host))
    return _is_bindable(hosts.plain(host))


def addresses(host: str) -> list[str]:
    """Return the addresses of a host's name; an empty list if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(hosts.plain(str(each[4][0])) for each in found))


def _is_bindable(address: str) -> bool:
    """Whether the kernel lets a socket have the address, which is so for this machine's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def sources(host: str) -> Iterator[str]:
    """Yield this machine's address on the route to each address of a host."""
    for address in addresses(host):
        found = hosts.source(address)
        if found:
            yield found


def own_addresses() -> Iterator[str]:
    """Yield the addresses of this machine's name, then that on the route to everywhere."""
    for address in addresses(socket.gethostname()):
        if not hosts.is_loopback(address) and is_this_machine(address):
            yield address
    for address in _EVERYWHERE:
        found = hosts.source(address)
        if found and not hosts.is_loopback(found):
            yield found


def why_not_served(host: str, port: int) -> tuple[str, str, str] | None:
    """Return why no server of this machine's can listen there: reason, remedy, code; None if one
    can.

    The reason is the end of a sentence that begins with the endpoint. It is asked before
    :func:`socket.create_server`, for the first address of the host.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):  # a UnicodeError: it can be no name at all
        remedy = "name this machine, or give one of its addresses"
        return "does not resolve to an address", remedy, "E-HOST-NAME"
    problem = _problem(family, str(address[0]), port)
    if problem == errno.EADDRNOTAVAIL:
        remedy = "127.0.0.1 is for this machine alone, 0.0.0.0 for all that reach it"
        return "is not an address of this machine", remedy, ""
    why = _reason(problem, port)
    if why is None:
        return None
    return f"cannot be used: port {port} {why}", "take another port", "E-PORT-IN-USE"


def why_not_free(host: str, port: int) -> str | None:
    """Return why nothing can listen on ``port`` of this machine's ``host``, or None if one can.

    A host that is not this machine's own (a service's name) stands for all addresses.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    # localhost is often 127.0.0.1 and ::1: another process on either would be connected to.
    problems = {_problem(family, str(address[0]), port) for family, *_, address in found}
    problems.discard(errno.EADDRNOTAVAIL)
    if errno.EADDRINUSE in problems:
        return _reason(errno.EADDRINUSE, port)
    if problems:
        return _reason(None if None in problems else problems.pop(), port)
    everywhere = _problem(socket.AF_INET6, "::", port)
    if everywhere not in (None, errno.EADDRINUSE, errno.EACCES):  # a machine without IPv6
        everywhere = _problem(socket.AF_INET, "0.0.0.0", port)
    return _reason(everywhere, port)


def _problem(family: int, address: str, port: int) -> int | None:
    """Return the errno of listening there, or None; nothing stays open."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((address, port))
    except OSError as exc:
        return exc.errno or errno.EIO
    return None


def _reason(problem: int | None, port: int) -> str | None:
    if problem is None:
        return None
    if problem == errno.EADDRINUSE:
        return f"is in use{_holder(port)}"
    if problem == errno.EACCES:
        return "cannot be listened on: a port this low needs more rights"
    return f"cannot be listened on: {os.strerror(problem)}"


def _holder(port: int) -> str:
    """Return `` by PID (COMMAND)`` of the process that listens on the port, where it is seen."""
    pid = _holder_pid(port)
    if pid is None:
        return " by a process that this user cannot see"
    name = shortened(one_line(_process(pid).get("name") or ""), 60)  # arguments may be secrets
    return f" by process {pid} ({name})" if name else f" by process {pid}"


def may_be_agent(port: int) -> bool:
    """Whether an elaunch agent may listen on the port: one does, or the listener is not seen.

    It is ``elaunch``, ``elaunch-torchrun``, a link to that, a module of elaunch, or what a program
    has started (elaunch.torchrun.agentprocess).
    """
    pid = _holder_pid(port)
    words = [] if pid is None else _process(pid).get("cmdline") or ()
    return not words or any("elaunch" in os.path.basename(os.path.realpath(w)) for w in words)


def _holder_pid(port: int) -> int | None:
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
            pid: int | None = connection.pid
            return pid
    return None


def _process(pid: int) -> dict[str, Any]:
    """Return name and command line of a process, as far as they are seen."""
    import psutil

    try:
        seen: dict[str, Any] = psutil.Process(pid).as_dict(["name", "cmdline"])
    except psutil.Error:
        return {}
    return seen
