"""Servers with a certificate: HTTP and gRPC, and files that cannot be used."""

import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest

from phalanx import Engine
from phalanx.cli.main import main
from phalanx.errors import ConfigurationError
from phalanx.schema.server_config import ServerConfig
from phalanx.server.tls import load_tls
from phalanx.testing.policy import FakePolicy
from phalanx.wire.robot_inference import (
    CHECK_HEALTH,
    decode_health_response,
    encode_health_request,
)
from tests.certificates import needs_openssl, write_certificate
from tests.server.policy.running import serving

pytestmark = needs_openssl


def certificate_in(folder: Path) -> dict[str, str]:
    cert, key = write_certificate(folder)
    return {"tls_cert": str(cert), "tls_key": str(key)}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> dict[str, str]:
    return certificate_in(tmp_path_factory.mktemp("tls"))


def test_model_server_speaks_tls_alone(serve, certificate):
    with serve(server=certificate) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate["tls_cert"])
        with httpx.Client(base_url=server.url, verify=trusting) as client:
            assert client.get("/health").status_code == 200
            assert client.post("/generate", json={"text": "abc"}).json()["text"] == "abc"
            body = {"text": "abc", "stream": True}
            with client.stream("POST", "/generate", json=body) as stream:
                assert stream.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_policy_server_speaks_tls_on_both_ports(certificate):
    if FakePolicy.name not in Engine.registered():
        Engine.register(FakePolicy)
    with serving(http_port=0, **certificate) as policy:
        assert policy.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate["tls_cert"])
        assert httpx.get(policy.url + "/health", verify=trusting).status_code == 200
        credentials = grpc.ssl_channel_credentials(Path(certificate["tls_cert"]).read_bytes())
        with grpc.secure_channel(policy.address, credentials) as channel:
            health = channel.unary_unary(CHECK_HEALTH)
            assert decode_health_response(health(encode_health_request("")))


@pytest.mark.parametrize("name", ["tls_cert", "tls_key"])
def test_file_that_is_not_there(certificate, name):
    config = ServerConfig(**{**certificate, name: "/nowhere/at.pem"})
    with pytest.raises(ConfigurationError, match=f"{name}='/nowhere/at.pem' cannot be read: No"):
        load_tls(config)


def test_key_of_another_certificate(certificate, tmp_path):
    other = certificate_in(tmp_path)
    config = ServerConfig(tls_cert=certificate["tls_cert"], tls_key=other["tls_key"])
    with pytest.raises(ConfigurationError, match=r"key values mismatch; give a PEM"):
        load_tls(config)


def test_file_without_pem(certificate, tmp_path):
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        load_tls(ServerConfig(tls_cert=str(empty), tls_key=certificate["tls_key"]))


def test_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(certificate, tmp_path):
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", certificate["tls_key"], "-aes256"]
    subprocess.run([*command, "-passout", "pass:secret", "-out", locked], check=True)
    with pytest.raises(ConfigurationError, match="the private key is encrypted"):
        load_tls(ServerConfig(tls_cert=certificate["tls_cert"], tls_key=str(locked)))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "a.pem"}, "tls_cert needs tls_key too"),
        ({"tls_key": "a.pem"}, "tls_key needs tls_cert too"),
        ({"tls_cert": " ", "tls_key": "a.pem"}, "tls_cert is empty"),
        ({"tls_cert": "a", "tls_key": "b", "gateway": "127.0.0.1:1"}, "without TLS"),
        ({"weight_source": "dcs"}, "weight_source='dcs'; allowed: static, dynamic"),
        ({"max_weights_bytes": 0}, "max_weights_bytes=0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit(given, words):
    with pytest.raises(ConfigurationError, match=words):
        ServerConfig(**given)


def test_a_bad_file_ends_serve_before_anything_is_loaded(certificate, capsys):
    arguments = ["serve", "--model", "smollm2-135m", "--tls-cert", "/nowhere/at.pem"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--tls-key", certificate["tls_key"], "--check"])
    assert ended.value.code == 2
    assert "tls_cert='/nowhere/at.pem' cannot be read" in capsys.readouterr().err
