"""Which requests the dashboard refuses, and what every answer carries."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

from elaunch.dashboard.guard import CONTROL, HEADERS, KEY_HEADER, Guard, PeerUser, peer_user
from tests.dashboard.asking import ask

TOKEN = "a-token-of-the-test"
KEY = "a-key-of-the-test"


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Answer everything."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def guarded(token: str | None = None, peer: PeerUser = lambda *_: os.getuid()) -> Guard:
    """Return the page behind its guard."""
    return Guard(page, frozenset({"node0"}), token, peer)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/api/runs", {}, 200),
        ("/api/runs", {"host": "localhost:1234"}, 200),
        ("/api/runs", {"host": "[::1]:8642"}, 200),
        ("/api/runs", {"host": "node0:8642"}, 200),
        ("/api/runs", {"host": "evil.example:8642"}, 403),
        ("/api/runs", {"host": "127.0.0.1.evil.example"}, 403),
        ("/api/runs", {"host": "10.0.0.1:8642"}, 403),
        ("/api/runs", {"host": ""}, 403),
        ("/api/runs", {"sec-fetch-site": "same-origin"}, 200),
        ("/api/runs", {"sec-fetch-site": "cross-site"}, 403),
        ("/api/runs", {"sec-fetch-site": "same-site"}, 403),
        ("/api/runs", {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 403),
        ("/", {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 200),
        ("/", {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"}, 403),
        ("/", {"origin": "http://evil.example"}, 403),
        ("/", {"origin": "null"}, 403),
        ("/", {"origin": "http://127.0.0.1:8642"}, 200),
    ],
)
def test_the_name_and_the_site_of_a_request(
    path: str, headers: dict[str, str], status: int
) -> None:
    """A rebound name, a page of another site, a frame in one: nothing of a run is in the answer."""
    answer = ask(guarded(), path, headers=headers)
    assert (answer.status, b"secret" in answer.body) == (status, status == 200)
    assert HEADERS.items() <= answer.headers.items()
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_reading(method: str) -> None:
    """Also not the question of a browser that wants to send more."""
    answer = ask(guarded(), "/api/runs", method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


def test_no_other_user_of_the_machine() -> None:
    """Loopback is open to all of them; a peer that cannot be found is none of ours."""
    for user in (os.getuid() + 1, None):
        assert ask(guarded(peer=lambda *_, user=user: user), "/api/runs").status == 403
    assert ask(guarded(peer=lambda *_: 0), "/api/runs").status == 200


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_names_the_peers_user(family: socket.AddressFamily) -> None:
    """On a real connection; a client port that nobody has is nobody's."""
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as client:
            with listener.accept()[0]:
                assert peer_user(client.getsockname()[:2], address) == os.getuid()
            assert peer_user((host, 1), address) is None


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_peer_that_has_closed_its_end_is_nobody(family: socket.AddressFamily) -> None:
    """The kernel gives root as the user of such a socket, whoever has had it."""
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        address = listener.getsockname()[:2]
        client = socket.create_connection(address)
        name = client.getsockname()[:2]
        with listener.accept()[0]:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            client.close()
            assert peer_user(name, address) is None
        assert peer_user(name, address) is None


def test_a_token_opens_it_once() -> None:
    """It becomes a cookie that no script can read, and leaves the address."""
    app = guarded(TOKEN, peer=lambda *_: None)
    assert ask(app, "/api/runs").status == 401
    assert ask(app, "/", token="another").status == 401
    assert ask(app, "/api/runs", token=TOKEN).status == 401, "only the page takes it"
    answer = ask(app, "/", token=TOKEN)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    kept, *rest = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(rest)
    for headers in ({"cookie": kept}, {"authorization": f"Bearer {TOKEN}"}):
        assert ask(app, "/api/runs", headers=headers).status == 200
    for headers in ({"cookie": f"{kept}x"}, {"authorization": f"Bearer {TOKEN}é"}):
        assert ask(app, "/api/runs", headers=headers).status == 401
    assert ask(app, "/", headers={"host": "10.0.0.1:8642"}, token=TOKEN).status == 303
    assert ask(app, "/", headers={"host": "evil.example"}, token=TOKEN).status == 403


def test_others_are_answered_beside_one_that_is_slow() -> None:
    """A guard has no state: two threads ask at once."""
    answers: list[int] = []
    app = guarded()
    threads = [
        threading.Thread(target=lambda: answers.append(ask(app, "/").status)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [200] * 4


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CONTROL, {KEY_HEADER: KEY}, 200),
        (CONTROL, {KEY_HEADER: KEY, "origin": "http://127.0.0.1:8642"}, 200),
        (CONTROL, {}, 403),
        (CONTROL, {KEY_HEADER: ""}, 403),
        (CONTROL, {KEY_HEADER: KEY[:-1]}, 403),
        (CONTROL, {KEY_HEADER: KEY, "origin": "http://evil.example"}, 403),
        (CONTROL, {KEY_HEADER: KEY, "origin": "null"}, 403),
        (CONTROL, {KEY_HEADER: KEY, "sec-fetch-site": "cross-site"}, 403),
        (CONTROL, {KEY_HEADER: KEY, "host": "evil.example:8642"}, 403),
        ("/api/runs", {KEY_HEADER: KEY}, 405),
        ("/", {KEY_HEADER: KEY}, 405),
    ],
)
def test_what_may_change_something(path: str, headers: dict[str, str], status: int) -> None:
    """A form of another site has no key, and its browser says where it comes from."""
    guard = Guard(page, token=None, peer=lambda *_: os.getuid(), key=KEY)
    assert ask(guard, path, method="POST", headers=headers).status == status
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(guard, path, method=method, headers=headers).status == 405


def test_the_key_is_no_token() -> None:
    """Both are needed where a token is; and on loopback the user, too."""
    with_token = Guard(page, token=TOKEN, peer=lambda *_: os.getuid(), key=KEY)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for headers, status in (
        ({KEY_HEADER: KEY}, 401),
        (bearer, 403),
        ({KEY_HEADER: KEY, **bearer}, 200),
    ):
        assert ask(with_token, CONTROL, method="POST", headers=headers).status == status
    other = Guard(page, token=None, peer=lambda *_: os.getuid() + 1, key=KEY)
    assert ask(other, CONTROL, method="POST", headers={KEY_HEADER: KEY}).status == 403
