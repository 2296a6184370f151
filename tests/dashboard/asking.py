"""Requests to the dashboard's application, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from elaunch.dashboard.guard import App, Scope

SERVER = ("127.0.0.1", 8642)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def ask(
    app: App,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    **query: Any,
) -> Answer:
    """Send one request, as a browser on this machine would; ``path`` goes as it is."""
    told = {"host": "127.0.0.1:8642"} | dict(headers or {})
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": urlencode(query).encode(),
        "headers": [(name.encode(), text.encode("latin-1")) for name, text in told.items()],
        "client": ("127.0.0.1", 50000),
        "server": SERVER,
    }
    sent: list[Any] = []

    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not requests:
            await asyncio.Event().wait()  # the client stays
        return requests.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    received = {name.decode(): text.decode("latin-1") for name, text in sent[0]["headers"]}
    return Answer(sent[0]["status"], received, b"".join(m.get("body", b"") for m in sent[1:]))
