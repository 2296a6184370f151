"""Import of gRPC and of etcd3's generated code, which read the environment while they load.

=======================================  =========================================================
variable                                 why it is set while they load, and only then
=======================================  =========================================================
PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION   etcd3's code is older than the fast runtime accepts
GRPC_VERBOSITY                           gRPC would write to stderr, between the workers' lines;
                                         kept if the user has set it
GRPC_ENABLE_FORK_SUPPORT                 the agent starts processes by exec only: handlers that
                                         stop gRPC's threads for a fork would only be in the way
=======================================  =========================================================

Workers inherit the agent's environment, and their own gRPC and protobuf must be as they were.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from elaunch.errors import StoreError

_FOR_LOADING = {
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
    "GRPC_VERBOSITY": "NONE",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_USERS_OWN = "GRPC_VERBOSITY"
_one_at_a_time = threading.Lock()


def load() -> Any:
    """Return gRPC as ``.grpc`` (with ``.aio``) and etcd3's generated code as ``.rpc``.

    Raises:
        StoreError: this process uses protobuf's fast runtime already, or a package is missing.
    """
    with _one_at_a_time:
        return _load()


@cache
def _load() -> SimpleNamespace:
    with _environment(), warnings.catch_warnings():
        # A deprecation per message and field: about the age of the generated code, known.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import grpc
            import grpc.aio
            from etcd3 import etcdrpc
        except (ImportError, TypeError) as error:
            # protobuf: "Descriptors cannot be created directly." is a TypeError.
            raise StoreError(
                f"etcd3, the client of etcd, cannot be loaded: {str(error).splitlines()[0]} "
                "(pip install 'etcd3>=0.12'; nothing else in this process may load protobuf first)"
            ) from error
    return SimpleNamespace(grpc=grpc, rpc=etcdrpc)


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _FOR_LOADING}
    kept = {_USERS_OWN} & set(os.environ)
    os.environ.update({name: _FOR_LOADING[name] for name in _FOR_LOADING.keys() - kept})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
