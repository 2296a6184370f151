"""Which requests are answered, and what every answer carries.

A page of another site that is open in the same browser, a name that an attacker's DNS points to
this machine, and another user of this machine can all send requests here.

=====================  ======  =================================================================
request                status  why
=====================  ======  =================================================================
not GET or HEAD        405     nothing can be changed, but for POST to CONTROL where that is allowed
POST without its key   403     the page reads it from CONTROL, which no page of another site can
a foreign Host         403     DNS rebinding: the page of another site, under its own name
from another site      403     ``Sec-Fetch-Site`` and ``Origin``; a link to the page is followed
of another user        403     on loopback without a token: the kernel names the peer's user
without the token      401     where one is needed: in a cookie, or ``Authorization: Bearer``
``/?token=…``          303     the right token becomes a cookie, and leaves the address
=====================  ======  =================================================================

Scripts and styles come from files of the package only, so markup that gets into a page runs
nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

CONTROL: Final = "/api/control"
KEY_HEADER: Final = "x-elaunch-control"
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_TABLES: Final = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
PeerUser = Callable[[tuple[str, int], tuple[str, int]], int | None]


@dataclass(frozen=True)
class RefusedRequest:
    """Why a request is not answered; ``headers`` go with it."""

    status: HTTPStatus
    text: str
    headers: Mapping[str, str]


def peer_user(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the uid that owns the other end of a loopback connection; None if it is not found."""
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    ends = [f"{_kernel_form(family, host)}:{port:04X}" for host, port in (client, server)]
    try:
        rows = _TABLES[family].read_text().splitlines()[1:]
    except OSError:
        return None
    found = (row.split() for row in rows if ends[0] in row)
    # A socket that its process has closed has no inode any more, and root for its user.
    return next((int(row[7]) for row in found if row[1:3] == ends and row[9] != "0"), None)


def _kernel_form(family: socket.AddressFamily, host: str) -> str:
    """Return an address as /proc/net has it: words of 32 bits in the machine's byte order."""
    raw = socket.inet_pton(family, host)
    words = (raw[at : at + 4] for at in range(0, len(raw), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


class Guard:
    """Stands before ``app``: answers what is refused, and adds HEADERS to every answer.

    Args:
        app: gets the other requests.
        hosts: names that a request may call this server by, beside those of loopback.
        token: what a client has to show; None where every process of this user may read.
        key: what a POST to CONTROL has to show besides, in KEY_HEADER; None: there is none.
        peer: finds the user of a connection's other end.
    """

    def __init__(
        self,
        app: App,
        hosts: frozenset[str] = frozenset(),
        token: str | None = None,
        peer: PeerUser = peer_user,
        *,
        key: str | None = None,
    ) -> None:
        self._app = app
        self._hosts = hosts | LOOPBACK
        self._token = token
        self._peer = peer
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server has no {scope['type']}")
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        refusal = self._refusal(scope, headers)

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = ((name.encode(), text.encode()) for name, text in HEADERS.items())
                message["headers"] = [*message["headers"], *(h for h in more if h[0] not in own)]
            await send(message)

        if refusal is None:
            await self._app(scope, receive, guarded)
            return
        body = f"{refusal.text}\n".encode()
        sent = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
        sent |= refusal.headers
        raw = [(name.encode(), text.encode("latin-1")) for name, text in sent.items()]
        await guarded({"type": "http.response.start", "status": refusal.status, "headers": raw})
        await guarded({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> RefusedRequest | None:
        changes = scope["method"] == "POST" and scope["path"] == CONTROL and self._key is not None
        if scope["method"] not in ("GET", "HEAD") and not changes:
            return RefusedRequest(
                HTTPStatus.METHOD_NOT_ALLOWED,
                "only GET: nothing can be changed here",
                {"allow": "GET"},
            )
        if not self._is_called(headers.get("host", "")):
            why = "this server is not known by that name: take the address that it has printed"
            return RefusedRequest(HTTPStatus.FORBIDDEN, why, {})
        if _is_cross_site(scope["path"], headers):
            return RefusedRequest(
                HTTPStatus.FORBIDDEN, "requests of other sites are not answered", {}
            )
        if changes and not _same(headers.get(KEY_HEADER, ""), self._key or ""):
            why = f"the key of {CONTROL} is missing in {KEY_HEADER}; load the page again"
            return RefusedRequest(HTTPStatus.FORBIDDEN, why, {})
        if self._token is not None:
            return self._without_token(scope, headers, self._token)
        if self._peer(scope["client"], scope["server"]) not in (os.getuid(), 0):
            why = "only the user who started this server may read here; --token lets others in"
            return RefusedRequest(HTTPStatus.FORBIDDEN, why, {})
        return None

    def _is_called(self, host: str) -> bool:
        """Tell whether Host names this server; with a token also by any address of it."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.removeprefix("[").removesuffix("]").lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._token is not None

    def _without_token(
        self, scope: Scope, headers: Mapping[str, str], token: str
    ) -> RefusedRequest | None:
        cookie = f"elaunch-{scope['server'][1]}"
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and given:
            if not _same(given, token):
                return RefusedRequest(HTTPStatus.UNAUTHORIZED, "that is not the token", {})
            kept = f"{cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
            return RefusedRequest(
                HTTPStatus.SEE_OTHER, "come in", {"location": "/", "set-cookie": kept}
            )
        shown = [headers.get("authorization", "").removeprefix("Bearer "), _cookie(headers, cookie)]
        if any(_same(one, token) for one in shown):
            return None
        return RefusedRequest(
            HTTPStatus.UNAUTHORIZED,
            "a token is needed: open the address that was printed when the server was started",
            {"www-authenticate": "Bearer"},
        )


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _cookie(headers: Mapping[str, str], name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _is_cross_site(path: str, headers: Mapping[str, str]) -> bool:
    """Tell whether a page of another site sends this; to follow a link to the page is no attack."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return path != "/" or headers.get("sec-fetch-dest") != "document"
