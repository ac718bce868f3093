"""Where an engine's URL leads."""

from __future__ import annotations

import pytest

from phalanx.errors import NoServerError
from phalanx.gateway.roles.places import RolePlaces


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix", "authority"),
    [
        ("http://10.0.0.1:15000", "10.0.0.1", 15000, False, b"", b"10.0.0.1:15000"),
        ("http://node/", "node", 80, False, b"", b"node"),
        ("https://node/a/b/", "node", 443, True, b"/a/b", b"node"),
        ("http://[::1]:7", "::1", 7, False, b"", b"[::1]:7"),
        ("http://user:secret@node:1", "node", 1, False, b"", b"node:1"),
    ],
)
def test_an_url_is_read_once(url, host, port, tls, prefix, authority):
    places = RolePlaces("rollout")
    place = places.of(url)
    assert places.of(url) is place and place.key == url
    assert (place.host, place.port, place.tls is not None) == (host, port, tls)
    assert place.prefix == prefix and place.host_line == b"host: %b\r\n" % authority


@pytest.mark.parametrize("url", ["", "node:1", "grpc://node:1", "http://", "http://node:x"])
def test_what_is_no_url_is_no_server(url):
    with pytest.raises(NoServerError, match="'rollout'"):
        RolePlaces("rollout").of(url)
