"""What a gateway warns of when it starts."""

from __future__ import annotations

import pytest

from phalanx.gateway.config import GatewayConfig
from tests.certificates import needs_openssl, write_certificate


@needs_openssl
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"lerobot": True}, []),
        ({"api_key": "k"}, []),
        ({"http_host": "0.0.0.0"}, ["listening on 0.0.0.0 without a key"]),
        ({"http_host": "0.0.0.0", "admin_key": "k"}, []),
        ({"lerobot": True, "api_key": "k"}, ["--lerobot with a key"]),
        ({"lerobot": True, "admin_key": "k"}, ["--lerobot with a key"]),
        ({"lerobot": True, "tls_cert": 1, "tls_key": 1}, ["--lerobot with --tls-cert"]),
        (
            {"lerobot": True, "api_key": "k", "tls_cert": 1, "tls_key": 1},
            ["--lerobot with a key", "--lerobot with --tls-cert"],
        ),
    ],
)
def test_robots_that_could_never_come_in_are_warned_of(tmp_path, changes, words):
    given = dict(changes)
    if "tls_cert" in given:
        given["tls_cert"], given["tls_key"] = write_certificate(tmp_path)
    warnings = GatewayConfig(**given).warnings
    assert len(warnings) == len(words)
    for warning, word in zip(warnings, words, strict=True):
        assert word in warning and "give" in warning
