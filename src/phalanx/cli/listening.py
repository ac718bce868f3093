"""Looks whether a server could listen where it is told to, without listening there."""

from __future__ import annotations

import socket

from phalanx.errors import ConfigurationError


def check_host(key: str, host: str) -> None:
    """Refuse a host that is no address of this machine. Takes no port that anybody could want."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigurationError(
            f"{key}={host!r}: nothing can listen there ({why.lower()}); give an address of this"
            " machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        ) from None
