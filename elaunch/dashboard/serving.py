"""The dashboard's server: its port, its token, its one line of output.

It listens on loopback. At any other address it asks for a token, which is drawn once and kept in
``dashboard-token`` beside the runs, readable by the user only; the address that is printed has it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import quote

from elaunch.config.endpoints import why_not_served
from elaunch.dashboard.guard import Guard
from elaunch.errors import RunDirError, UsageError
from elaunch.runs.directory import RunDir
from elaunch.runs.statedir import make_private, state_root
from elaunch.text import host_port

PORT: Final = 8642
TOKEN_FILE: Final = "dashboard-token"
CLOSE_S: Final = 1


@dataclass(frozen=True)
class Place:
    """Where to listen, and for whom.

    ``port`` None is PORT or, where that is taken, any free one; ``control``: runs can be stopped.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    token: bool = False
    names: Sequence[str] = ()
    control: bool = False


def serve(
    place: Place, environ: Mapping[str, str], run: RunDir | None, say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; ``say`` gets the address once it can be opened.

    Raises:
        UsageError: it cannot listen there, or the extra is not installed.
        RunDirError: the token cannot be kept.
    """
    try:
        import uvicorn

        from elaunch.dashboard.app import Dashboard
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the dashboard needs {error.name}: pip install 'elaunch[dashboard]'"
        ) from None
    listener = _listen(place)
    with listener:
        host, port = listener.getsockname()[:2]
        needs_token = place.token or not ipaddress.ip_address(host).is_loopback
        token = kept_token(environ) if needs_token else None
        own = _own_names(host) | {name.lower() for name in place.names}
        key = secrets.token_urlsafe(24) if place.control else None
        dashboard = Dashboard(environ, run, key)

        class Server(uvicorn.Server):  # type: ignore[misc]
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                """Let go of the pages that are open, then close."""
                dashboard.closing.set()
                await super().shutdown(sockets)

        app = Guard(dashboard.app(), own, token, key=key)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        say(_address(host, port, token, run))
        Server(config).run(sockets=[listener])


def _address(host: str, port: int, token: str | None, run: RunDir | None) -> str:
    shown = os.uname().nodename if ipaddress.ip_address(host).is_unspecified else host
    query = f"?token={token}" if token else ""
    view = f"#/run/{quote(run.path.name)}" if run else ""
    return f"http://{host_port(shown, port)}/{query}{view}"


def _own_names(host: str) -> frozenset[str]:
    """Return the names under which others reach this machine at ``host``."""
    if ipaddress.ip_address(host).is_loopback:
        return frozenset({host})
    name = os.uname().nodename.lower()
    return frozenset({host, name, name.partition(".")[0], socket.getfqdn().lower()})


def _listen(place: Place) -> socket.socket:
    port = PORT if place.port is None else place.port
    try:
        family, *_, address = socket.getaddrinfo(place.host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except (OSError, UnicodeError) as error:
        again = (f"port {port} cannot be used: {error}", "try again", "E-PORT-IN-USE")
        reason, remedy, code = why_not_served(place.host, port) or again
    if place.port is None and code == "E-PORT-IN-USE":
        return _listen(replace(place, port=0))
    flags = f"--host {place.host}" + (f" --port {port}" if place.port else "")
    raise UsageError(f"{flags}: {reason}; {remedy}", code=code)


def kept_token(environ: Mapping[str, str]) -> str:
    """Return this user's token; draw it the first time. Raises RunDirError if it cannot be kept."""
    root = state_root(environ)
    if root is None:
        raise RunDirError("no place for the token: neither XDG_STATE_HOME nor HOME is a directory")
    path = root.parent / TOKEN_FILE
    try:
        make_private(root.parent)
        with contextlib.suppress(FileExistsError):
            _draw_token(path)
        return _read_token(path)
    except OSError as error:
        raise RunDirError(f"{path}: {error.strerror}") from None


def _draw_token(path: Path) -> None:
    """Make the file with a token in it; whole, or not at all, whoever else does so."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24))
        os.link(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def _read_token(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise RunDirError(f"{path} can be read by others: remove it, and a new one is drawn")
        token = file.read(200).strip()
    if len(token) < 16:
        raise RunDirError(f"{path} has no token: remove it, and a new one is drawn")
    return token
