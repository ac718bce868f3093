"""The certificate and key with which a server's ports speak TLS, read and checked before any opens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.schema.server_config import ServerConfig


@dataclass(frozen=True)
class Tls:
    """`cert_path` and `key_path` are PEM files that belong together; `cert` and `key` their bytes."""

    cert_path: str
    key_path: str
    cert: bytes
    key: bytes


def load_tls(config: ServerConfig) -> Tls | None:
    """What `config` names, None where it names nothing.

    Raises `ConfigurationError` for files that cannot be read or do not belong together.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    cert = _read("tls_cert", config.tls_cert)
    key = _read("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (ssl.SSLError, ConfigurationError) as error:
        raise ConfigurationError(
            f"tls_cert={config.tls_cert!r} and tls_key={config.tls_key!r} cannot be used: "
            f"{_reason(error)}; give a PEM certificate (chain) and its unencrypted private key"
        ) from error
    return Tls(config.tls_cert, config.tls_key, cert, key)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{name}={path!r} cannot be read: {error.strerror or error}; give a PEM file"
        ) from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal, and the server would hang there.
    raise ConfigurationError("the private key is encrypted")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
    return (reason or "no PEM data is in one of them").replace("_", " ").lower()
