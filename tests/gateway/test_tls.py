"""A gateway with a certificate: both doors, and another gateway that follows it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest

from phalanx.errors import ConfigurationError
from phalanx.gateway.config import GatewayConfig
from phalanx.gateway.gateway import Gateway
from tests.certificates import needs_openssl, write_certificate
from tests.gateway.http.running import Client
from tests.gateway.http.running import request as request_of
from tests.gateway.policy_servers import answer_to, infer, request, run
from tests.gateway.whole import ProbedServer, ready, running

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("tls"))


def test_both_doors_speak_tls_and_a_follower_comes_in_by_it(certificate, monkeypatch):
    cert, key = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))

    async def scenario():
        async with running(ProbedServer(), tls_cert=cert, tls_key=key) as gateway:
            await ready(gateway, 1)
            assert gateway.announcement.startswith("phalanx gateway: https://")
            trusting = ssl.create_default_context(cafile=cert)
            client = Client(
                *await asyncio.open_connection("localhost", gateway.http_port, ssl=trusting)
            )
            client.write(request_of("GET", "/health"))
            assert (await client.answer()).status == 200
            client.close()
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            address = f"localhost:{gateway.grpc_port}"
            async with grpc.aio.secure_channel(address, credentials) as channel:
                assert await (await infer(channel, request())) == answer_to(request())
            url = f"https://localhost:{gateway.http_port}"
            async with running(follow=url) as follower:
                await ready(follower, 1)

    run(scenario())


def test_asyncios_own_loop_which_loses_answers_by_tls_is_refused(certificate):
    cert, key = certificate

    async def scenario():
        with pytest.raises(ConfigurationError, match="run it with uvloop.run, or leave TLS out"):
            Gateway(GatewayConfig(tls_cert=cert, tls_key=key))

    asyncio.run(scenario())


def test_files_that_are_no_certificate_are_named(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("no")
    key.write_text("no")

    async def scenario():
        with pytest.raises(ConfigurationError, match="--tls-cert .*cert.pem and --tls-key .*key.p"):
            async with running(tls_cert=cert, tls_key=key):
                pass

    run(scenario())
