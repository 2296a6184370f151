"""Endpoints: every form, and what is said of those that are none."""

from __future__ import annotations

import ipaddress
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.config import endpoints
from elaunch.text import host_port
from tests.tables import each


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1", [("node1", None)]),
        (" node1:29400 ", [("node1", 29400)]),
        ("node-1.rack_2.example.org.:1", [("node-1.rack_2.example.org.", 1)]),
        ("10.0.0.1:0", [("10.0.0.1", 0)]),
        ("[::1]:29400", [("::1", 29400)]),
        ("[fe80::1%eth0]", [("fe80::1%eth0", None)]),
        ("h1:2379,h2,[::1]:2379", [("h1", 2379), ("h2", None), ("::1", 2379)]),
        ("h1:1, h2:2 ,h1:1", [("h1", 1), ("h2", 2)]),
        ("7node:1", [("7node", 1)]),
        ("größe:1", [("größe", 1)]),
    ],
)
def test_what_an_endpoint_may_be(text: str, found: list[tuple[str, int | None]]) -> None:
    """Host and port of each, none twice."""
    assert endpoints.split_all(text) == found


@each(
    ("text", "reason"),
    [
        ("::1", "without brackets; write '[::1]'"),
        ("fd00::7:2379", "write '[fd00::7]:2379' or '[fd00::7:2379]'"),
        ("fd00::7:29400", "write '[fd00::7]:29400'"),
        ("[::1", "no IPv6 address between its brackets"),
        ("[10.0.0.1]:80", "no IPv6 address between its brackets"),
        ("[::1]29400", "has '29400' behind its brackets, where ':PORT' is expected"),
        ("[::1]:", "has the port ''"),
        ("[fe80::1%]:1", "no IPv6 address between its brackets"),
        ("host:", "has the port ''"),
        ("host:x", "has the port 'x', which is not a number from 0 to 65535"),
        ("host:65536", "has the port '65536'"),
        ("host:-1", "has the port '-1'"),
        ("host:1:2", "has more than one port"),
        ("h1:1:h2:2", "several endpoints go by comma"),
        (":29400", "has no host before its port"),
        ("29400", "is a port without a host; write HOST:29400"),
        ("10.0.0.256:1", "'10.0.0.256' is not an IPv4 address"),
        ("10.0.0:1", "'10.0.0' is not an IPv4 address"),
        ("http://h:2379", "is a URL; write HOST:PORT without 'http://'"),
        ("https://h:2379", "(TLS: --rdzv-conf protocol=https)"),
        ("h1:2379,https://h2:2379", "is a URL"),
        ("host/path", "has a path in it"),
        ("h1 h2", "has no valid host"),
        ("-h:1", "has no valid host"),
        ("a..b", "has no valid host"),
        ("$HOST:1", "has no valid host"),
        (f"{'x' * 64}:1", "has no valid host"),
        ("h1:1,,h2:2", "has an empty part between its commas"),
        ("h1,", "has an empty part"),
    ],
)
def test_what_is_no_endpoint_is_answered_with_the_form_that_was_meant(
    text: str, reason: str
) -> None:
    """A sentence that begins with the endpoint."""
    with pytest.raises(ValueError) as error:
        endpoints.endpoint(text)
    assert reason in str(error.value)


@pytest.mark.parametrize("text", ["", "  ", "h:1"])
def test_the_text_stays_as_it_is(text: str) -> None:
    """An empty one stands for none."""
    assert endpoints.endpoint(text) == text.strip()


def test_a_host_alone_may_be_an_ipv6_address_with_or_without_brackets() -> None:
    """There is no port that it could be confused with."""
    assert endpoints.host("::1") == endpoints.host("[::1]") == "::1"
    with pytest.raises(ValueError, match="has a port in it"):
        endpoints.host("node1:29500")


@given(st.ip_addresses(), st.integers(0, 65535))
def test_joined_and_split_again(address: ipaddress.IPv4Address, number: int) -> None:
    """Any address with any port."""
    assert endpoints.split(host_port(str(address), number)) == (str(address), number)


@given(st.text(alphabet="a0.:[]%,-/_ é", max_size=12))
def test_any_text_is_an_endpoint_or_a_reason(text: str) -> None:
    """Nothing else than ValueError, and what is taken can be written again."""
    try:
        found = endpoints.split_all(text)
    except ValueError as exc:
        assert str(exc).split()[0] in ("is", "has")
        return
    assert endpoints.split_all(",".join(host_port(*each) for each in found)) == found


def test_a_holder_of_a_port_is_named_without_its_arguments() -> None:
    """They may hold a secret: another user's, or one of this user's."""
    code = (
        "import socket\n"
        "held = socket.create_server(('127.0.0.1', 0))\n"
        "print(held.getsockname()[1], flush=True)\n"
        "held.accept()\n"
    )
    argv = [sys.executable, "-c", code, "--password=hidden"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        said = endpoints.why_not_free("127.0.0.1", port)
        holder.kill()
    assert said is not None and said.startswith(f"is in use by process {holder.pid} (")
    assert "hidden" not in said and "-c" not in said
