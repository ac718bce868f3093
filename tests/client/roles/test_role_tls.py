"""Over TLS: discovery, engines and the gateway are believed by their certificate."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.client import AsyncRoleClient, RoleClientSettings
from phalanx.errors import ConfigurationError, EngineUnavailableError, NoServerError
from tests.client.roles.published import PAYLOAD
from tests.client.roles.servers import FakeEngine, FakeGateway, model
from tests.client.roles.test_role_page import PROGRAMS

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl to make a certificate"
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, ssl.SSLContext]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    return cert, serving


def test_a_certificate_is_trusted_where_the_settings_say_so_and_not_otherwise(certificate):
    cert, serving = certificate

    async def scenario():
        gateway, engine = FakeGateway(), FakeEngine()
        await gateway.start(tls=serving)
        await engine.start(tls=serving)
        assert gateway.role_url.startswith("https://")
        gateway.show(model("math", engine.replica()))
        settings = RoleClientSettings(tls_root=cert)
        for mode in ("direct", "gateway"):
            async with AsyncRoleClient(gateway.role_url, mode=mode, settings=settings) as client:
                assert (await client.generate(PAYLOAD))["sent"] == PAYLOAD
        for mode in ("direct", "gateway", "auto"):
            async with AsyncRoleClient(gateway.role_url, mode=mode) as client:
                with pytest.raises(ConfigurationError, match=r"CERTIFICATE_VERIFY.*tls_root in"):
                    await client.generate(PAYLOAD)
                with pytest.raises(ConfigurationError, match="tls_root"):
                    await client.wait_ready()
        await gateway.stop()
        await engine.stop()

    asyncio.run(scenario())


def test_an_address_with_the_wrong_scheme_is_told_so(certificate):
    _, serving = certificate

    async def no_request(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def scenario():
        for tls, right, wrong in ((serving, "https", "http"), (None, "http", "https")):
            server = await asyncio.start_server(no_request, "127.0.0.1", 0, ssl=tls)
            url = f"{wrong}://127.0.0.1:{server.sockets[0].getsockname()[1]}/teacher"
            async with AsyncRoleClient(url) as client:
                with pytest.raises(NoServerError, match=f"begins with {right}://"):
                    await client.generate(PAYLOAD)
            async with AsyncRoleClient(url, mode="gateway") as client:
                with pytest.raises(EngineUnavailableError, match=f"begins with {right}://"):
                    await client.generate(PAYLOAD)
            server.close()
            await server.wait_closed()

    asyncio.run(scenario())


def test_the_program_that_is_shown_for_tls_runs(certificate):
    cert, serving = certificate

    async def health(request):
        assert request.headers["authorization"] == "Bearer secret"
        request.answer({"at": request.path})

    async def scenario():
        gateway, engine = FakeGateway(role="genrm", key="secret"), FakeEngine()
        gateway.forward = health
        await gateway.start(tls=serving)
        await engine.start()
        gateway.show(model("judge", engine.replica()))
        shown = next(program for program in PROGRAMS if "tls_root" in program)
        shown = shown.replace("gateway.pem", str(cert))
        shown = shown.replace("https://127.0.0.1:30000/genrm", gateway.role_url)
        done = await asyncio.create_subprocess_exec(
            sys.executable, "-c", shown, stdout=-1, stderr=-1
        )
        output, errors = await done.communicate()
        assert done.returncode == 0, errors.decode()
        assert "/genrm/health" in output.decode()
        await gateway.stop()
        await engine.stop()

    asyncio.run(scenario())
