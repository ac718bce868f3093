"""Endpoints: what is understood, what two spellings are one, and what a refusal says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigurationError
from phalanx.routing.endpoint import Endpoint, Scheme, parse_listener


@pytest.mark.parametrize(
    ("text", "scheme", "host", "port"),
    [
        ("10.0.0.11:50063", Scheme.GRPC, "10.0.0.11", 50063),
        ("grpc://10.0.0.11:50063", Scheme.GRPC, "10.0.0.11", 50063),
        ("GPU-1.lab:1", Scheme.GRPC, "gpu-1.lab", 1),
        ("[::1]:65535", Scheme.GRPC, "::1", 65535),
        ("grpc://[2001:DB8:0::1]:80", Scheme.GRPC, "2001:db8::1", 80),
        ("http://localhost:30000", Scheme.HTTP, "localhost", 30000),
        ("http://localhost:30000/", Scheme.HTTP, "localhost", 30000),
        ("http://[::1]:30000", Scheme.HTTP, "::1", 30000),
    ],
)
def test_an_endpoint_is_understood(text, scheme, host, port):
    endpoint = Endpoint.parse(text)
    assert (endpoint.scheme, endpoint.host, endpoint.port) == (scheme, host, port)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.11", "has no port"),
        ("[::1]", "has no port"),
        ("::1:50063", "without brackets"),
        ("[::g]:50063", "not an IPv6 address"),
        ("300.0.0.1:50063", "not an IPv4 address"),
        ("0.0.0.0:50063", "stands for every address"),
        ("http://0.0.0.0:80", "stands for every address"),
        ("[::]:50063", "stands for every address"),
        ("[0:0::0]:50063", "stands for every address"),
        ("host:0", "from 1 to 65535"),
        ("host:65536", "from 1 to 65535"),
        ("host:٣", "from 1 to 65535"),
        ("host:+5", "from 1 to 65535"),
        ("host:", "port ''"),
        (":50063", "no valid host"),
        ("a b:50063", "no valid host"),
        ("-a:50063", "no valid host"),
        ("https://host:443", "asks for TLS"),
        ("ftp://host:21", "scheme 'ftp'"),
        ("http://host:80/v1", "a path or a query"),
        ("http://host:80?x", "a path or a query"),
        ("http://user:word@host:80", "credentials"),
        ("grpc://host:80/", "a path or a query"),
        ("h" * 400 + ":1", "longer than 300"),
        ("", "has no port"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_is_allowed(text, says):
    with pytest.raises(ConfigurationError, match=says) as refused:
        Endpoint.parse(text)
    assert "http://HOST:PORT for HTTP" in str(refused.value)


@given(st.text(max_size=30) | st.from_regex(r"(http://|grpc://)?\[?[a-z0-9.:]+\]?:[0-9]{1,6}"))
def test_whatever_is_parsed_prints_as_itself(text):
    try:
        endpoint = Endpoint.parse(text)
    except ConfigurationError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_a_listener_may_take_any_free_port():
    assert parse_listener("0.0.0.0:0", "--gateway") == ("0.0.0.0", 0)
    assert parse_listener("[::1]:50111", "--gateway") == ("::1", 50111)


@pytest.mark.parametrize("text", ["50111", "host:-1", "host:65536", "a b:1"])
def test_a_refused_listener_names_its_flag(text):
    with pytest.raises(ConfigurationError, match="--gateway|endpoint"):
        parse_listener(text, "--gateway")
