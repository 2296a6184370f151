"""Import of gRPC, and of etcd's messages and services out of etcd3's generated code.

That code is older than protobuf's runtime accepts, unless that is the slow one in Python. So it is
not run: each of its modules has the description of its messages as one string, from which protobuf
makes the classes. They are in a pool of their own, beside whatever else this process has loaded.

gRPC reads the environment while it loads, and workers inherit the agent's, which stays as it was:

==========================  ======================================================================
variable                    why it is set while gRPC loads, and only then
==========================  ======================================================================
GRPC_VERBOSITY              gRPC would write to stderr, between the workers' lines; kept if the
                            user has set it
GRPC_ENABLE_FORK_SUPPORT    the agent starts processes by exec only: handlers that stop gRPC's
                            threads for a fork would only be in the way
==========================  ======================================================================
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from elaunch.errors import StoreError

_FOR_LOADING = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_USERS_OWN = "GRPC_VERBOSITY"
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Loaded:
    """gRPC (with ``.aio``), the classes of etcd's messages, and its services by name."""

    grpc: Any
    rpc: Any
    services: Mapping[str, Any]

    def method(self, channel: Any, service: str, name: str) -> Any:
        """Return gRPC's callable of a method such as ``("KV", "Range")``."""
        found = self.services[service].methods_by_name[name]
        make = channel.stream_stream if found.client_streaming else channel.unary_unary
        return make(
            f"/{self.services[service].full_name}/{name}",
            request_serializer=getattr(self.rpc, found.input_type.name).SerializeToString,
            response_deserializer=getattr(self.rpc, found.output_type.name).FromString,
        )


def load() -> Loaded:
    """Return gRPC and what is etcd's.

    Raises:
        StoreError: a package is missing, or too old.
    """
    with _one_at_a_time:
        return _load()


@cache
def _load() -> Loaded:
    try:
        with _environment():
            import grpc
            import grpc.aio
        from google.protobuf.descriptor_pool import DescriptorPool
        from google.protobuf.message_factory import GetMessageClass

        pool = DescriptorPool()
        for name in ("kv", "auth", "rpc"):  # each after those that it needs
            pool.AddSerializedFile(_described(name))
    except ImportError as error:
        raise StoreError(
            f"etcd3, the client of etcd, cannot be loaded: {str(error).splitlines()[0]} "
            "(pip install 'etcd3>=0.12' 'protobuf>=4.22')"
        ) from error
    file = pool.FindFileByName("rpc.proto")
    messages = {name: GetMessageClass(one) for name, one in file.message_types_by_name.items()}
    return Loaded(grpc, SimpleNamespace(**messages), file.services_by_name)


def _described(name: str) -> bytes:
    """Return the description of a file of etcd's API, which is a constant of etcd3's module."""
    found = find_spec("etcd3")
    if found is None or not found.submodule_search_locations:
        raise ImportError("No module named 'etcd3'")
    path = os.path.join(found.submodule_search_locations[0], "etcdrpc", f"{name}_pb2.py")
    begin = f"\n{chr(len(name) + len('.proto'))}{name}.proto"
    code = SourceFileLoader(f"{name}_pb2", path).get_code(f"{name}_pb2")
    for constant in () if code is None else code.co_consts:
        text = constant.decode("latin-1") if isinstance(constant, bytes) else constant
        if isinstance(text, str) and text.startswith(begin):
            return text.encode("latin-1")
    raise ImportError(f"{path} does not describe {name}.proto")


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
