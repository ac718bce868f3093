"""The certificate and key of a gateway's HTTP port, as the context that speaks TLS with them."""

from __future__ import annotations

import ssl
from pathlib import Path

from phalanx.errors import ConfigurationError


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Raises `ConfigurationError` for what is no certificate with its unencrypted key."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ConfigurationError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
        words = (reason or "no PEM data is in one of them").replace("_", " ").lower()
        raise ConfigurationError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used: {words}; give a PEM certificate"
            " (chain) and its unencrypted private key"
        ) from None
    return context


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal, and the gateway would hang there.
    raise ConfigurationError("the private key is encrypted")
