"""Posts JSON over HTTP, with the user and password of the address: no proxy, no redirect."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import string
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

POST_S: Final = 5.0
"""Seconds for each step: to connect, to send, to be answered."""
WHOLE_S: Final = 15.0
"""Seconds from the connection to the end of the answer, which may come byte by byte."""
MOST_BYTES: Final = 2000

REFUSED: Final = (OSError, http.client.HTTPException, ValueError)
"""Where it is not taken."""


def post(
    address: str, body: Mapping[str, Any], headers: Mapping[str, str], cafile: str | None = None
) -> None:
    """Post ``body``; raises one of REFUSED where it is not taken within some seconds."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("it is no address that begins with https://HOST or http://HOST")
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        context = ssl.create_default_context(cafile=cafile)
        connection = http.client.HTTPSConnection(
            url.hostname, url.port, timeout=POST_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=POST_S)
    cut: threading.Timer | None = None
    try:
        connection.connect()
        cut = threading.Timer(WHOLE_S, socket.socket.shutdown, (connection.sock, socket.SHUT_RDWR))
        cut.daemon = True
        try:
            cut.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        path = quote(f"{url.path}?{url.query}" if url.query else url.path, string.punctuation)
        sent = {"Content-Type": "application/json", **_login(url), **headers}
        connection.request("POST", path or "/", json.dumps(body), sent)
        answer = connection.getresponse()
        said = answer.read(MOST_BYTES).decode("utf-8", "replace")
        if not 200 <= answer.status < 300:
            raise OSError(f"it answers {answer.status} {answer.reason}: {said}".rstrip(": "))
    finally:
        if cut is not None:
            cut.cancel()
        connection.close()


def _login(url: SplitResult) -> dict[str, str]:
    """Return the header for the user and password of the address, if it has some."""
    if url.username is None:
        return {}
    login = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
